// Bulk copies: tensors of one to five dimensions into shared memory, out of it and with reductions;
// bytes in a row; and two rings, one that only copies and one whose tiles are changed in between.
#include "hopper.cuh"

using namespace hopper;

extern __shared__ __align__(1024) uint8_t smem[];

// -- what the other kernels do not need -----------------------------------------------------------

#define LOAD(n, coordinates, ...)                                                               \
    asm volatile("cp.async.bulk.tensor." n "d.shared::cta.global.mbarrier::complete_tx::bytes " \
                 "[%0], [%1, " coordinates "], [%2];" ::"r"(to),                                \
                 "l"(map), "r"(barrier), __VA_ARGS__                                            \
                 : "memory")
#define STORE(n, coordinates, ...)                                            \
    asm volatile("cp.async.bulk.tensor." n "d.global.shared::cta.bulk_group " \
                 "[%0, " coordinates "], [%1];" ::"l"(map),                   \
                 "r"(from), __VA_ARGS__                                       \
                 : "memory")
#define REDUCE(number, name)                                                              \
    if (operation == number)                                                              \
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta." name ".bulk_group " \
                 "[%0, {%2, %3}], [%1];" ::"l"(map),                                      \
                 "r"(from), "r"(x), "r"(y)                                                \
                 : "memory")

struct Place {
    int x, y, z, v, w; // of the first element of a box
};

template <int rank>
__device__ void load(uint32_t to, const CUtensorMap *map, uint32_t barrier, Place c) {
    if constexpr (rank == 1)
        LOAD("1", "{%3}", "r"(c.x));
    else if constexpr (rank == 2)
        LOAD("2", "{%3, %4}", "r"(c.x), "r"(c.y));
    else if constexpr (rank == 3)
        LOAD("3", "{%3, %4, %5}", "r"(c.x), "r"(c.y), "r"(c.z));
    else if constexpr (rank == 4)
        LOAD("4", "{%3, %4, %5, %6}", "r"(c.x), "r"(c.y), "r"(c.z), "r"(c.v));
    else
        LOAD("5", "{%3, %4, %5, %6, %7}", "r"(c.x), "r"(c.y), "r"(c.z), "r"(c.v), "r"(c.w));
}

template <int rank>
__device__ void store(const CUtensorMap *map, uint32_t from, Place c) {
    if constexpr (rank == 1)
        STORE("1", "{%2}", "r"(c.x));
    else if constexpr (rank == 2)
        STORE("2", "{%2, %3}", "r"(c.x), "r"(c.y));
    else if constexpr (rank == 3)
        STORE("3", "{%2, %3, %4}", "r"(c.x), "r"(c.y), "r"(c.z));
    else if constexpr (rank == 4)
        STORE("4", "{%2, %3, %4, %5}", "r"(c.x), "r"(c.y), "r"(c.z), "r"(c.v));
    else
        STORE("5", "{%2, %3, %4, %5, %6}", "r"(c.x), "r"(c.y), "r"(c.z), "r"(c.v), "r"(c.w));
}

__device__ inline void reduce(int operation, const CUtensorMap *map, uint32_t from, int x, int y) {
    REDUCE(0, "add");
    REDUCE(1, "min");
    REDUCE(2, "max");
    REDUCE(3, "inc");
    REDUCE(4, "dec");
    REDUCE(5, "and");
    REDUCE(6, "or");
    REDUCE(7, "xor");
}

__device__ inline void load_bytes(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ inline void store_bytes(void *to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

__device__ inline void prefetch_bytes(const void *from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}

__device__ inline void prefetch_2d(const CUtensorMap *map, int x, int y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map),
                 "r"(x), "r"(y));
}

__device__ inline void prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map));
}

// -- one box --------------------------------------------------------------------------------------

// Shared memory, of which `bytes` begin at an offset, as a load of one box to there leaves it.
template <int rank>
__device__ void load_box(const CUtensorMap *map, Place place, uint32_t offset, uint4 *out,
                         uint32_t bytes, uint32_t box_bytes) {
    __shared__ uint64_t barriers[1];
    const uint32_t barrier = shared_address(barriers);
    uint4 *window = reinterpret_cast<uint4 *>(smem + offset);
    for (uint32_t i = threadIdx.x; i < bytes / 16; i += blockDim.x)
        window[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    if (threadIdx.x == 0) {
        prefetch_map(map);
        init(barrier, 1);
    }
    fence_proxy(); // of what is written above and of the barrier
    __syncthreads();
    if (threadIdx.x == 0) {
        arrive_expecting(barrier, box_bytes);
        load<rank>(shared_address(window), map, barrier, place);
    }
    wait(barrier, 0);
    for (uint32_t i = threadIdx.x; i < bytes / 16; i += blockDim.x)
        out[i] = window[i];
}

__device__ inline void write_box(const uint4 *in, uint32_t bytes) {
    for (uint32_t i = threadIdx.x; i < bytes / 16; i += blockDim.x)
        reinterpret_cast<uint4 *>(smem)[i] = in[i];
    fence_proxy();
    __syncthreads();
}

// Stores shared memory as a box.
template <int rank>
__device__ void store_box(const CUtensorMap *map, Place place, const uint4 *in, uint32_t bytes) {
    write_box(in, bytes);
    if (threadIdx.x == 0) {
        store<rank>(map, shared_address(smem), place);
        commit_stores();
        wait_stores_read<0>();
    }
}

#define MAP const __grid_constant__ CUtensorMap
#define BOX(rank)                                                                                \
    extern "C" __global__ void load_box_##rank##d(                                               \
        MAP map, Place place, uint32_t offset, uint4 *out, uint32_t bytes, uint32_t box_bytes) { \
        load_box<rank>(&map, place, offset, out, bytes, box_bytes);                              \
    }                                                                                            \
    extern "C" __global__ void store_box_##rank##d(MAP map, Place place, const uint4 *in,        \
                                                   uint32_t bytes) {                             \
        store_box<rank>(&map, place, in, bytes);                                                 \
    }
BOX(1)
BOX(2)
BOX(3)
BOX(4)
BOX(5)

// operation: add, min, max, inc, dec, and, or, xor.
extern "C" __global__ void reduce_box_2d(MAP map, int operation, int x, int y, const uint4 *in,
                                         uint32_t bytes) {
    write_box(in, bytes);
    if (threadIdx.x == 0) {
        reduce(operation, &map, shared_address(smem), x, y);
        commit_stores();
        wait_stores<0>();
    }
}

// out += in, of floats, from all blocks at once: each has its own in. bytes: of one block's.
extern "C" __global__ void reduce_bytes(const uint4 *in, float *out, uint32_t bytes) {
    write_box(in + blockIdx.x * bytes / 16, bytes);
    if (threadIdx.x == 0) {
        asm volatile(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(out),
            "r"(shared_address(smem)), "r"(bytes)
            : "memory");
        commit_stores();
        wait_stores<0>();
    }
}

// -- rings ----------------------------------------------------------------------------------------

// out = in, by one thread of each block: a load runs `ahead` chunks before the store of the same.
extern "C" __global__ void copy_bytes(const uint8_t *in, uint8_t *out, int chunks) {
    constexpr int slots = 4, ahead = 2;
    constexpr uint32_t chunk_bytes = 2048;
    __shared__ uint64_t barriers[slots];
    const uint32_t full = shared_address(barriers), ring = shared_address(smem);
    if (threadIdx.x != 0)
        return;
    for (int slot = 0; slot < slots; ++slot)
        init(full + 8 * slot, 1);
    fence_init();

    in += static_cast<int64_t>(blockIdx.x) * chunks * chunk_bytes;
    out += static_cast<int64_t>(blockIdx.x) * chunks * chunk_bytes;
    for (int i = 0; i < chunks + ahead; ++i) {
        if (i < chunks) {
            const int slot = i % slots;
            wait_stores_read<slots - ahead - 1>(); // chunk i - slots has left
            arrive_expecting(full + 8 * slot, chunk_bytes);
            load_bytes(ring + slot * chunk_bytes, in + i * chunk_bytes, chunk_bytes,
                       full + 8 * slot);
            if (i + 1 < chunks)
                prefetch_bytes(in + (i + 1) * chunk_bytes, chunk_bytes);
        }
        if (i >= ahead) {
            const int j = i - ahead, slot = j % slots;
            wait(full + 8 * slot, j / slots % 2);
            store_bytes(out + j * chunk_bytes, ring + slot * chunk_bytes, chunk_bytes);
            commit_stores();
        }
    }
    wait_stores_read<0>();
}

// out = factor in, (rows, columns) fp32 by boxes of 32 x 32 in the 128-byte swizzle: a block takes
// a column of tiles, a producer warp loads, four warps multiply in place and store. 160 threads.
extern "C" __global__ __launch_bounds__(160) void scale_tiles(MAP in, MAP out, float factor,
                                                              int rows) {
    constexpr int slots = 3, side = 32, consumers = 128;
    constexpr uint32_t tile_bytes = side * side * 4;
    __shared__ uint64_t barriers[2][slots];
    const uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]),
                   tiles_smem = shared_address(smem);
    const uint32_t thread = threadIdx.x;
    const int x = blockIdx.x * side, tiles = (rows + side - 1) / side;
    if (thread == 0) {
        for (int slot = 0; slot < slots; ++slot) {
            init(full + 8 * slot, 1);
            init(empty + 8 * slot, 1); // the thread that stores
        }
        fence_init();
    }
    __syncthreads();

    Ring<slots> ring;
    if (thread / 32 == consumers / 32) {
        if (elected())
            for (int i = 0; i < tiles; ++i, ring.advance()) {
                wait(empty + 8 * ring.slot, ring.lap ^ 1);
                arrive_expecting(full + 8 * ring.slot, tile_bytes);
                load_2d(tiles_smem + ring.slot * tile_bytes, &in, full + 8 * ring.slot, x,
                        i * side);
                if (i + 1 < tiles)
                    prefetch_2d(&in, x, (i + 1) * side);
            }
        return;
    }
    uint32_t last = 0; // the barrier of the slot that the newest store reads
    for (int i = 0; i < tiles; ++i, ring.advance()) {
        wait(full + 8 * ring.slot, ring.lap);
        for (uint32_t j = thread; j < side * side / 4; j += consumers) {
            float4 &four =
                *reinterpret_cast<float4 *>(smem + ring.slot * tile_bytes + swizzled(j / 8, j % 8));
            four.x *= factor;
            four.y *= factor;
            four.z *= factor;
            four.w *= factor;
        }
        fence_proxy();
        barrier_sync(1, consumers);
        if (thread == 0) {
            store_2d(&out, tiles_smem + ring.slot * tile_bytes, x, i * side);
            commit_stores();
            if (i > 0) {
                wait_stores_read<1>();
                arrive(last);
            }
        }
        last = empty + 8 * ring.slot;
    }
    if (thread == 0)
        wait_stores_read<0>();
}
