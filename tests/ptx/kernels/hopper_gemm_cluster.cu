// C = A B^T by clusters of two blocks: each loads its rows of A and half of the rows of B that both
// need, which TMA writes into both. Persistent: the store of a tile runs beside the next tile.
#include "hopper.cuh"

using namespace hopper;

constexpr int blocks = 2, stages = 3, consumers = 2, warpgroup = 128;
constexpr int tile_m = 64 * consumers, tile_n = 128, tile_k = 64; // of a block
constexpr int A_bytes = tile_m * tile_k * 2, B_bytes = tile_n * tile_k * 2;
constexpr int panel_bytes = tile_m * 128; // 64 columns of C
constexpr int threads = (consumers + 1) * warpgroup;

extern __shared__ __align__(1024) uint8_t smem[];

// A barrier per stage, 8 bytes apart. full: one arrival and the bytes of A and of both halves of B.
// empty: an arrival per warp of the consumers of both blocks, since both write what both read.
struct Shared {
    uint32_t A = shared_address(smem), B = A + stages * A_bytes, C = B + stages * B_bytes;
    uint32_t full, empty;

    __device__ Shared(uint32_t barriers) : full(barriers), empty(barriers + 8 * stages) {}
};

// A cluster's tiles, 2 x 128 rows and 128 columns each, in turn.
struct Tiles {
    int columns, all, tile = blockIdx.x / blocks;

    __device__ Tiles(int m, int n)
        : columns((n + tile_n - 1) / tile_n),
          all((m + blocks * tile_m - 1) / (blocks * tile_m) * columns) {}
    __device__ bool left() const { return tile < all; }
    __device__ void advance() { tile += gridDim.x / blocks; }
    __device__ int row(uint32_t rank) const { return (tile / columns * blocks + rank) * tile_m; }
    __device__ int column() const { return tile % columns * tile_n; }
};

__device__ inline void produce(const CUtensorMap *A, const CUtensorMap *B, const Shared &shared,
                               uint32_t rank, int m, int n, int k) {
    uint64_t once, often;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
    constexpr int share = tile_n / blocks; // rows of B that this block loads
    Ring<stages> ring;
    for (Tiles at(m, n); at.left(); at.advance())
        for (int k0 = 0; k0 < k; k0 += tile_k, ring.advance()) {
            const uint32_t full = shared.full + 8 * ring.slot;
            wait_cluster(shared.empty + 8 * ring.slot, ring.lap ^ 1);
            arrive_expecting(full, A_bytes + B_bytes);
            load_2d_multicast(shared.A + ring.slot * A_bytes, A, full, k0, at.row(rank), 1 << rank,
                              once);
            load_2d_multicast(shared.B + ring.slot * B_bytes + rank * share * 128, B, full, k0,
                              at.column() + rank * share, (1 << blocks) - 1, often);
        }
}

template <typename T>
__device__ void consume(const CUtensorMap *C, const Shared &shared, uint32_t rank, int m, int n,
                        int k) {
    const uint32_t consumer = threadIdx.x / warpgroup, thread = threadIdx.x % warpgroup,
                   warp = thread / 32, lane = thread % 32;
    const uint32_t A_rows = shared.A + consumer * 64 * 128, C_rows = shared.C + consumer * 64 * 128;
    // Each warp tells both blocks that it has read a stage: lane i tells block i.
    const uint32_t empty = in_block(shared.empty, lane % blocks);
    float acc[tile_n / 2];
    Ring<stages> ring;
    for (Tiles at(m, n); at.left(); at.advance()) {
        uint32_t last = 0;
        for (int k0 = 0; k0 < k; k0 += tile_k, ring.advance()) {
            wait_cluster(shared.full + 8 * ring.slot, ring.lap);
            const uint64_t a = swizzled_128(A_rows + ring.slot * A_bytes, 16, 1024);
            const uint64_t b = swizzled_128(shared.B + ring.slot * B_bytes, 16, 1024);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < tile_k / 16; ++step)
                wgmma<T>(acc, a + advance(32 * step), b + advance(32 * step), k0 > 0 || step > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (k0 > 0 && lane < blocks)
                arrive_remote(last);
            last = empty + 8 * ring.slot;
        }
        wgmma_wait<0>();
        hold(acc);
        if (lane < blocks)
            arrive_remote(last);

        if (thread == 0)
            wait_stores_read<0>(); // of the tile before
        barrier_sync(1 + consumer, warpgroup);
#pragma unroll
        for (int j = 0; j < tile_n / 16; ++j)
            store_fragment<T>(C_rows + j / 4 * panel_bytes +
                                  swizzled(warp * 16 + lane % 16, j % 4 * 2 + lane / 16),
                              acc + 8 * j);
        fence_proxy();
        barrier_sync(1 + consumer, warpgroup);
        if (thread == 0) {
            const int row = at.row(rank) + consumer * 64;
            store_2d(C, C_rows, at.column(), row);
            store_2d(C, C_rows + panel_bytes, at.column() + 64, row);
            commit_stores();
        }
    }
    if (thread == 0)
        wait_stores_read<0>();
}

// A (m, k), B (n, k), C (m, n), row-major, by boxes of 64 k x 128 rows, 64 k x 64 rows and
// 64 columns x 64 rows in the 128-byte swizzle.
template <typename T>
__device__ void gemm_cluster(const CUtensorMap *A, const CUtensorMap *B, const CUtensorMap *C,
                             int m, int n, int k) {
    __shared__ uint64_t barriers[2 * stages];
    const Shared shared(shared_address(barriers));
    const uint32_t rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; ++s) {
            init(shared.full + 8 * s, 1);
            init(shared.empty + 8 * s, blocks * consumers * 4);
        }
        fence_init();
    }
    cluster_sync(); // nothing may reach the barriers of a block that has not made them

    if (threadIdx.x / warpgroup == consumers) {
        give_registers<40>();
        if (threadIdx.x / 32 == consumers * 4 && elected())
            produce(A, B, shared, rank, m, n, k);
        __syncwarp();
    } else {
        take_registers<232>();
        consume<T>(C, shared, rank, m, n, k);
        __syncwarp();
    }
    cluster_sync(); // the other block still writes here and arrives here
}

#define MAP const __grid_constant__ CUtensorMap

extern "C" __global__ __cluster_dims__(blocks, 1, 1)
    __launch_bounds__(threads, 1) void gemm_cluster_bf16(MAP A, MAP B, MAP C, int m, int n, int k) {
    gemm_cluster<__nv_bfloat16>(&A, &B, &C, m, n, k);
}

extern "C" __global__ __cluster_dims__(blocks, 1, 1)
    __launch_bounds__(threads, 1) void gemm_cluster_f16(MAP A, MAP B, MAP C, int m, int n, int k) {
    gemm_cluster<__half>(&A, &B, &C, m, n, k);
}
