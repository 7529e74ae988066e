#pragma once
// Step 1 of the softmax_backward_cluster family: persistent blocks with a ring, as x1 of softmax.
// Parent in the story: f1; no line of it is left.
//
// What changed
//   1. A row has a thread block, or a cluster of 2, 4 or 8. Each block keeps its part of y and dy
//   in
//      registers, up to 4 chunks of each per thread of 64 registers.
//   2. The blocks are persistent. A thread copies its chunks of the next rows of y and dy into a
//      ring in shared memory, 7 pairs with 1024 threads per SM.
//   3. A block sends the sum of its part, with what was rounded off, to all blocks of the cluster,
//      once per row.
//
// Why: a row of 65536 elements of y and dy has 256 KiB in bf16, all the registers of an SM. f1
// holds a part of it, reads the rest twice, and has nothing in flight while it computes: 84% of a
// copy of as many bytes at 65536, and 61% at 131072. Here 2 SMs hold the row, and 224 KiB of shared
// memory per SM hold the next one and most of that after it.
//   Rows that do not begin at multiples of 16 bytes, or without whole chunks, or longer than the
// registers, are taken one element after the other, and read twice.
// Expected, as a share of a copy: 97% at widths of 65536 (2 blocks) and 131072 (4).
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 96% of a copy's speed at a width of 65536, where f1 has 84%, and 76% at
// 131072 with 8 blocks, where f1 has 63%.
//
// Phases: 1 y and dy to registers, 2 Σ y · dy, 3 dx.

#include "cp_async.cuh"
#include "elements.cuh"
#include "kernels/rows_backward/arguments.cuh"
#include "memory.cuh"
#include "sm90/cluster.cuh"
#include "sm90/mbarrier.cuh"

namespace t1 {

// A sum is `value` + `rest`.
struct __align__(8) Sum {
    float value, rest;
};

// a + b without an error of rounding in `value`: `rest` takes what `value` leaves. The order of a
// and b does not matter, so all lanes of a tree get the same bits.
__device__ __forceinline__ Sum add(Sum a, Sum b) {
    const float value = a.value + b.value, of_b = value - a.value;
    const float lost = (a.value - (value - of_b)) + (b.value - of_b);
    return {value, a.rest + b.rest + lost};
}

__device__ __forceinline__ Sum shuffle_xor(Sum sum, int lanes) {
    return {__shfl_xor_sync(0xffffffff, sum.value, lanes),
            __shfl_xor_sync(0xffffffff, sum.rest, lanes)};
}

// Writes a sum to the shared memory of a block of the cluster and arrives at a barrier there. The
// release covers this thread's stores of dx, too, and waits for them; those are of the row before.
__device__ __forceinline__ void send(uint32_t dst_smem, Sum sum, uint32_t barrier) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%2, %3};\n\t"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%1];" ::"r"(dst_smem),
                 "r"(barrier), "f"(sum.value), "f"(sum.rest)
                 : "memory");
}

// Waits until the phase of this parity has ended, and sees what was written before its arrivals.
__device__ __forceinline__ void receive(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n\t"
                 ".reg .pred done;\n"
                 "retry:\n\t"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra retry;\n\t"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// Adds up the values of all threads of a cluster. Rows take turns with two slots of memory: a block
// writes to a slot of another one again when it has the result between, so that all threads there
// have read the slot before the __syncthreads of that row.
template <int kBlocks, int kWarps>
struct ClusterSum {
    Sum *warps_smem; // (2, kWarps): of the block's warps
    Sum *blocks_smem; // (2, kBlocks): of the cluster's blocks
    uint64_t *barriers; // (2)
    Ring<2> ring;

    // Before the first row; a cluster barrier must follow.
    __device__ __forceinline__ void init_barriers() const {
        for (int slot = 0; slot < 2; ++slot) {
            barrier_init(smem_address(barriers + slot), kBlocks);
        }
        barrier_init_fence();
    }
    // Returns the same bits to each thread.
    __device__ __forceinline__ Sum operator()(float own) {
        Sum value = {own, 0.0f};
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            value = add(value, shuffle_xor(value, lanes));
        }
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        Sum *own_smem = warps_smem + ring.slot * kWarps; // (kWarps)
        if (lane == 0) {
            own_smem[warp] = value;
        }
        __syncthreads(); // a warp reads what the others have written
        value = own_smem[lane % kWarps];
#pragma unroll
        for (int lanes = 1; lanes < kWarps; lanes *= 2) {
            value = add(value, shuffle_xor(value, lanes));
        }
        if constexpr (kBlocks > 1) {
            Sum *sums_smem = blocks_smem + ring.slot * kBlocks; // (kBlocks)
            const uint32_t barrier = ring.barrier(smem_address(barriers));
            if (threadIdx.x < kBlocks) {
                const uint32_t dst_smem = smem_address(sums_smem + cluster_rank());
                send(in_block(dst_smem, threadIdx.x), value, in_block(barrier, threadIdx.x));
            }
            receive(barrier, ring.lap); // those of all blocks
            value = sums_smem[0];
#pragma unroll
            for (int block = 1; block < kBlocks; ++block) {
                value = add(value, sums_smem[block]);
            }
        }
        ring.advance();
        // of an infinity less an infinity
        return {value.value, isnan(value.rest) ? 0.0f : value.rest};
    }
};

// dx = y · (dy - Σ y · dy)
__device__ __forceinline__ float gradient(float y, float dy, Sum sum) {
    return y * (dy - sum.value - sum.rest);
}

// Returns `sum` + Σ y · dy over a chunk of each.
template <DType kDType>
__device__ __forceinline__ float add_chunk(float sum, uint4 y_chunk, uint4 dy_chunk) {
    float y_rmem[kChunkElements<kDType>], dy_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(y_rmem, y_chunk);
    unpack_chunk<kDType>(dy_rmem, dy_chunk);
#pragma unroll
    for (int i = 0; i < kChunkElements<kDType>; ++i) {
        sum = fmaf(y_rmem[i], dy_rmem[i], sum);
    }
    return sum;
}

// dx for a chunk of y and one of dy.
template <DType kDType>
__device__ __forceinline__ uint4 gradient_chunk(uint4 y_chunk, uint4 dy_chunk, Sum sum) {
    float y_rmem[kChunkElements<kDType>], dy_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(y_rmem, y_chunk);
    unpack_chunk<kDType>(dy_rmem, dy_chunk);
#pragma unroll
    for (int i = 0; i < kChunkElements<kDType>; ++i) {
        dy_rmem[i] = gradient(y_rmem[i], dy_rmem[i], sum);
    }
    return pack_chunk<kDType>(dy_rmem);
}

// Whether all rows begin at multiples of 16 bytes, have whole chunks, and fit into the registers of
// a cluster.
template <SoftmaxBackwardClusterKernelConfig cfg>
__device__ __forceinline__ bool has_whole_chunks(const RowsBackwardKernelArgs &args) {
    constexpr int kChunk = kChunkElements<cfg.dtype>;
    const auto address = [](const void *gmem) { return reinterpret_cast<uintptr_t>(gmem); };
    return (address(args.y) | address(args.dy) | address(args.dx)) % kChunkBytes == 0 &&
           (args.y_stride | args.dy_stride | args.dx_stride | args.width) % kChunk == 0 &&
           args.width <= cfg.cluster_blocks * cfg.n_threads() * cfg.chunks * kChunk;
}

template <typename Kernels>
__global__ void __cluster_dims__(Kernels::value.cluster_blocks, 1, 1)
    __launch_bounds__(Kernels::value.n_threads(), Kernels::value.blocks_per_sm())
        softmax_backward_kernel(const __grid_constant__ RowsBackwardKernelArgs args) {
    constexpr SoftmaxBackwardClusterKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 16 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.cluster_blocks >= 1 && cfg.cluster_blocks <= 8, "portable clusters");
    static_assert(cfg.chunks >= 1 && cfg.chunks <= 4, "64 registers per thread");

    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.n_threads(), kChunks = cfg.chunks;
    constexpr int kBlocks = cfg.cluster_blocks, kChunk = kChunkElements<kDType>;
    constexpr int kSlots = cfg.slots();

    extern __shared__ uint4 smem[];
    uint4 *y_smem = smem; // (kSlots, kThreads): chunks of the next rows
    uint4 *dy_smem = y_smem + kSlots * kThreads; // (kSlots, kThreads)
    auto *barriers = reinterpret_cast<uint64_t *>(dy_smem + kSlots * kThreads); // (2)
    auto *sums_smem = reinterpret_cast<Sum *>(barriers + 2); // (2, kWarps), (2, kBlocks)
    ClusterSum<kBlocks, kWarps> cluster_sum{sums_smem, sums_smem + 2 * kWarps, barriers};

    // The part of a row that each block of the cluster has: whole chunks, but for the last one. A
    // row of 1000 elements in 4 blocks: 256, 256, 256 and 232.
    const int rank = cluster_rank(), thread = threadIdx.x;
    const int part = (args.width + kBlocks * kChunk - 1) / (kBlocks * kChunk) * kChunk;
    const int begin = rank * part, size = max(0, min(part, args.width - begin));
    const auto *y_gmem = static_cast<const ElementOf<kDType> *>(args.y) + begin;
    const auto *dy_gmem = static_cast<const ElementOf<kDType> *>(args.dy) + begin;
    auto *dx_gmem = static_cast<ElementOf<kDType> *>(args.dx) + begin;

    const bool is_whole = has_whole_chunks<cfg>(args);
    const int n_chunks = is_whole ? size / kChunk : 0; // in registers; else elements one by one
    const int n_clusters = gridDim.x / kBlocks;
    int64_t row = blockIdx.x / kBlocks;
    // Chunk q of a thread, counted over the rows of its cluster, has slot q % kSlots.
    const auto begin_copies = [&](int q, int slot) {
        const int64_t of = row + q / kChunks * n_clusters;
        const int i = thread + q % kChunks * kThreads; // chunk of the row
        if (i < n_chunks && of < args.rows) {
            const auto *y_chunks = reinterpret_cast<const uint4 *>(y_gmem + of * args.y_stride);
            const auto *dy_chunks = reinterpret_cast<const uint4 *>(dy_gmem + of * args.dy_stride);
            cp_async_16(smem_address(y_smem + slot * kThreads + thread), y_chunks + i);
            cp_async_16(smem_address(dy_smem + slot * kThreads + thread), dy_chunks + i);
        }
        cp_async_commit();
    };
#pragma unroll
    for (int q = 0; q < kSlots; ++q) {
        begin_copies(q, q);
    }
    if (thread == 0) {
        cluster_sum.init_barriers();
    }
    cluster_sync(); // no block sends to one that has not begun, or to a barrier that is not ready

    int slot = 0; // of the first chunk of the row
    for (; row < args.rows; row += n_clusters) {
        const auto y_element = [&](int i) {
            return to_float<kDType>(__ldg(y_gmem + row * args.y_stride + i));
        };
        const auto dy_element = [&](int i) {
            return to_float<kDType>(__ldg(dy_gmem + row * args.dy_stride + i));
        };

        // 1. y, dy: shared memory → registers; 0 where there is no chunk. A thread waits for its
        // own copies of this row, and begins later ones where it has read a slot.
        cp_async_wait<kSlots - kChunks>();
        uint4 y_rmem[kChunks], dy_rmem[kChunks];
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const bool has_chunk = thread + k * kThreads < n_chunks;
            y_rmem[k] = has_chunk ? y_smem[slot * kThreads + thread] : uint4{};
            dy_rmem[k] = has_chunk ? dy_smem[slot * kThreads + thread] : uint4{};
            begin_copies(k + kSlots, slot);
            slot = slot + 1 < kSlots ? slot + 1 : 0;
        }

        // 2. sum = Σ y · dy
        float own = 0.0f; // of this thread
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            own = add_chunk<kDType>(own, y_rmem[k], dy_rmem[k]);
        }
        for (int i = thread; !is_whole && i < size; i += kThreads) {
            own = fmaf(y_element(i), dy_element(i), own);
        }
        const Sum sum = cluster_sum(own);

        // 3. dx = y · (dy - sum)
        auto *dx_row_gmem = dx_gmem + row * args.dx_stride;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            if (const int i = thread + k * kThreads; i < n_chunks) {
                store_gmem_16(dx_row_gmem + i * kChunk,
                              gradient_chunk<kDType>(y_rmem[k], dy_rmem[k], sum));
            }
        }
        for (int i = thread; !is_whole && i < size; i += kThreads) {
            dx_row_gmem[i] = from_float<kDType>(gradient(y_element(i), dy_element(i), sum));
        }
    }
}

} // namespace t1
