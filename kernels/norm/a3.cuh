#pragma once
// Step 3 of the norm_cluster family: sums by st.async. Parent: a2.
//
// What changed
//   1. A block sends its sum by st.async. The receiver's mbarrier counts the bytes; its arrivals
//      are one of the receiver, which expects the bytes, and one of each sender.
//   2. Neither that arrival nor the wait has the scope of a cluster.
//
// Why: in machine code an arrival with .release.cluster is a MEMBAR.ALL.GPU. The threads that send
// wait there until their stores of y, of the row before, have reached L2, and the cluster waits for
// them. A wait with .acquire.cluster ends with a CCTL.IVALL, which empties L1. a2 has both in each
// of a row's two exchanges, a3 in none. The code of a2 has 3 MEMBAR.ALL.GPU and 5 CCTL.IVALL, that
// of a3 one of each, at the barrier before the first row.
//   The arrival says that the block has read older sums, so that their slot may be written again.
// It has the scope of a block, and follows no stores to memory that others read.
//   At a width of 65536 a cluster of 2 blocks has 4.2 us for the bytes of a row. If a wait for
// stores takes 0.5 to 1 us, the two of a row are 1 to 2 us that nothing hides.
//   A row with one block has no exchange, and nothing changes.
// Expected, as a share of a copy at a width of 65536: 87% with 2 blocks; of RMS norm, which has one
// exchange, 92%.
//
// benchmark:begin
// benchmark:end
// Verdict: kept. On an H200 layer norm has 88% of a copy's speed at 65536, where a1 has 75%, and
// 90% at 131072; RMS norm 88 and 89%.
//
// Phases: 1 x to registers, 2 mean, 3 rstd, 4 y.

#include "cp_async.cuh"
#include "elements.cuh"
#include "kernels/norm/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "sm90/cluster.cuh"
#include "sm90/mbarrier.cuh"

namespace a3 {

// Writes a sum to the shared memory of a block of the cluster, whose barrier counts its bytes.
__device__ __forceinline__ void send(uint32_t dst_smem, float sum, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %2, [%1];" ::"r"(dst_smem),
        "r"(barrier), "f"(sum)
        : "memory");
}

// Adds up values of a cluster. Sums take turns with two slots of memory: a block writes to a slot
// of another one again when it has the sum between, so that all threads there have read the slot
// before the __syncthreads of that sum.
template <int kBlocks, int kWarps>
struct ClusterSum {
    float *warps_smem; // (2, kWarps): sums of the block's warps
    float *blocks_smem; // (2, kBlocks): sums of the cluster's blocks
    uint64_t *barriers; // (2)
    Ring<2> ring;

    // Before the first sum; a cluster barrier must follow.
    __device__ __forceinline__ void init_barriers() const {
        for (int slot = 0; slot < 2; ++slot) {
            barrier_init(smem_address(barriers + slot), kBlocks + 1);
        }
        barrier_init_fence();
    }
    // Returns the sum over all threads of the cluster to each, with the same bits.
    __device__ __forceinline__ float operator()(float value) {
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            value += __shfl_xor_sync(0xffffffff, value, lanes);
        }
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float *own_smem = warps_smem + ring.slot * kWarps; // (kWarps)
        if (lane == 0) {
            own_smem[warp] = value;
        }
        __syncthreads(); // a warp reads what the others have written
        value = own_smem[lane % kWarps];
#pragma unroll
        for (int lanes = 1; lanes < kWarps; lanes *= 2) {
            value += __shfl_xor_sync(0xffffffff, value, lanes);
        }
        if constexpr (kBlocks == 1) {
            ring.advance();
            return value;
        }
        float *sums_smem = blocks_smem + ring.slot * kBlocks; // (kBlocks)
        const uint32_t barrier = ring.barrier(smem_address(barriers));
        if (threadIdx.x == 0) {
            barrier_expect(barrier, kBlocks * sizeof(float));
        }
        if (threadIdx.x < kBlocks) {
            const uint32_t dst_smem = smem_address(sums_smem + cluster_rank());
            const uint32_t dst_barrier = in_block(barrier, threadIdx.x);
            send(in_block(dst_smem, threadIdx.x), value, dst_barrier);
            cluster_barrier_arrive(dst_barrier); // the block has read older sums
        }
        barrier_wait(barrier, ring.lap); // the sums of all blocks have come
        ring.advance();
        value = 0.0f;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            value += sums_smem[block];
        }
        return value;
    }
};

// Returns `squares` with (x - mean)² of the elements of a chunk added to it; `sum` likewise.
template <DType kDType>
__device__ __forceinline__ float add_squares(float squares, uint4 chunk, float mean) {
    float x_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(x_rmem, chunk);
#pragma unroll
    for (const float x : x_rmem) {
        squares = fmaf(x - mean, x - mean, squares);
    }
    return squares;
}

template <DType kDType>
__device__ __forceinline__ float add_chunk(float sum, uint4 chunk) {
    float x_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(x_rmem, chunk);
#pragma unroll
    for (const float x : x_rmem) {
        sum += x;
    }
    return sum;
}

// Whether all rows begin at multiples of 16 bytes, have whole chunks, and fit into the registers of
// a cluster.
template <NormClusterKernelConfig cfg>
__device__ __forceinline__ bool has_whole_chunks(const NormKernelArgs &args) {
    constexpr int kChunk = kChunkElements<cfg.dtype>;
    const auto address = [](const void *gmem) { return reinterpret_cast<uintptr_t>(gmem); };
    return (address(args.x) | address(args.y) | address(args.weight) | address(args.bias)) %
                   kChunkBytes ==
               0 &&
           (args.x_stride | args.y_stride | args.width) % kChunk == 0 &&
           args.width <= cfg.cluster_blocks * cfg.n_threads() * cfg.chunks * kChunk;
}

// weight or bias of a thread's columns: global → shared memory; `missing` throughout if a call
// leaves the vector out. Each thread reads what it wrote itself.
template <NormClusterKernelConfig cfg>
__device__ __forceinline__ void keep_chunks(uint4 *smem, const void *gmem, int begin, int n_chunks,
                                            float missing) {
    constexpr int kChunk = kChunkElements<cfg.dtype>;
    for (int i = threadIdx.x; i < n_chunks; i += cfg.n_threads()) {
        float rmem[kChunk];
#pragma unroll
        for (float &value : rmem) {
            value = missing;
        }
        const auto *chunks_gmem = reinterpret_cast<const uint4 *>(
            static_cast<const ElementOf<cfg.dtype> *>(gmem) + begin);
        smem[i] = gmem != nullptr ? __ldg(chunks_gmem + i) : pack_chunk<cfg.dtype>(rmem);
    }
}

template <typename Kernels>
__global__ void __cluster_dims__(Kernels::value.cluster_blocks, 1, 1)
    __launch_bounds__(Kernels::value.n_threads(), Kernels::value.blocks_per_sm())
        norm_kernel(const __grid_constant__ NormKernelArgs args) {
    constexpr NormClusterKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 16 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.cluster_blocks >= 1 && cfg.cluster_blocks <= 8, "portable clusters");
    static_assert(cfg.chunks >= 1 && cfg.chunks <= 4, "64 registers per thread");

    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.n_threads(), kChunks = cfg.chunks;
    constexpr int kBlocks = cfg.cluster_blocks, kChunk = kChunkElements<kDType>;

    extern __shared__ uint4 smem[];
    uint4 *x_smem = smem; // (kChunks, kThreads): the next row
    uint4 *weight_smem = x_smem + kChunks * kThreads; // (kChunks, kThreads)
    uint4 *bias_smem = weight_smem + kChunks * kThreads; // (kChunks, kThreads), of layer norm
    auto *barriers = reinterpret_cast<uint64_t *>(smem + cfg.smem_chunks() * kThreads); // (2)
    auto *sums_smem = reinterpret_cast<float *>(barriers + 2); // (2, kWarps), (2, kBlocks)
    ClusterSum<kBlocks, kWarps> cluster_sum{sums_smem, sums_smem + 2 * kWarps, barriers};

    // The part of a row that each block of the cluster has: whole chunks, but for the last one. A
    // row of 1000 elements in 4 blocks: 256, 256, 256 and 232.
    const int rank = cluster_rank(), thread = threadIdx.x;
    const int part = (args.width + kBlocks * kChunk - 1) / (kBlocks * kChunk) * kChunk;
    const int begin = rank * part, size = max(0, min(part, args.width - begin));
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + begin;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + begin;
    const auto *weight_gmem = static_cast<const ElementOf<kDType> *>(args.weight); // (width)
    const auto *bias_gmem = static_cast<const ElementOf<kDType> *>(args.bias); // (width)

    const bool is_whole = has_whole_chunks<cfg>(args);
    const int n_chunks = is_whole ? size / kChunk : 0; // in registers; else elements one by one
    const auto begin_copies = [&](int64_t row) {
        const auto *chunks_gmem = reinterpret_cast<const uint4 *>(x_gmem + row * args.x_stride);
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            if (const int i = thread + k * kThreads; i < n_chunks && row < args.rows) {
                cp_async_16(smem_address(x_smem + i), chunks_gmem + i);
            }
        }
        cp_async_commit();
    };
    const int n_clusters = gridDim.x / kBlocks;
    int64_t row = blockIdx.x / kBlocks;
    begin_copies(row);
    keep_chunks<cfg>(weight_smem, args.weight, begin, n_chunks, 1.0f);
    if constexpr (!cfg.rms) {
        keep_chunks<cfg>(bias_smem, args.bias, begin, n_chunks, 0.0f);
    }

    if (thread == 0) {
        cluster_sum.init_barriers();
    }
    cluster_sync(); // no block sends to one that has not begun, or to a barrier that is not ready

    for (; row < args.rows; row += n_clusters) {
        const auto *row_gmem = x_gmem + row * args.x_stride;
        const auto element = [&](int i) { return to_float<kDType>(__ldg(row_gmem + i)); };

        // 1. x: shared memory → registers; 0 where there is no chunk. A thread waits for its own
        // copies, and begins those of the next row where it has read this one.
        cp_async_wait<0>();
        uint4 x_rmem[kChunks];
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const int i = thread + k * kThreads;
            x_rmem[k] = i < n_chunks ? x_smem[i] : uint4{};
        }
        begin_copies(row + n_clusters);

        // 2. mean = Σ x / width; 0 of RMS norm
        float mean = 0.0f, squares = 0.0f;
        if constexpr (!cfg.rms) {
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                mean = add_chunk<kDType>(mean, x_rmem[k]); // nothing, where there is no chunk
            }
            for (int i = thread; !is_whole && i < size; i += kThreads) {
                mean += element(i);
            }
            mean = cluster_sum(mean) / args.width;
        }

        // 3. rstd = 1 / sqrt(Σ (x - mean)² / width + eps)
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            if (thread + k * kThreads < n_chunks) { // else (0 - mean)² would be added
                squares = add_squares<kDType>(squares, x_rmem[k], mean);
            }
        }
        for (int i = thread; !is_whole && i < size; i += kThreads) {
            squares = fmaf(element(i) - mean, element(i) - mean, squares);
        }
        const float rstd = rsqrtf(cluster_sum(squares) / args.width + args.eps);
        if (rank == 0 && thread == 0 && args.mean != nullptr) {
            args.mean[row] = mean;
        }
        if (rank == 0 && thread == 0 && args.rstd != nullptr) {
            args.rstd[row] = rstd;
        }

        // 4. y = (x - mean) · rstd · weight + bias
        auto *y_row_gmem = y_gmem + row * args.y_stride;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const int i = thread + k * kThreads;
            if (i < n_chunks) {
                float y_rmem[kChunk], weight_rmem[kChunk], bias_rmem[kChunk];
                unpack_chunk<kDType>(y_rmem, x_rmem[k]);
                unpack_chunk<kDType>(weight_rmem, weight_smem[i]);
#pragma unroll
                for (int j = 0; j < kChunk; ++j) {
                    y_rmem[j] = (y_rmem[j] - mean) * rstd;
                }
                if (cfg.rms && bias_gmem == nullptr) {
#pragma unroll
                    for (int j = 0; j < kChunk; ++j) {
                        y_rmem[j] *= weight_rmem[j];
                    }
                } else {
                    const auto *bias = reinterpret_cast<const uint4 *>(bias_gmem + begin) + i;
                    unpack_chunk<kDType>(bias_rmem, cfg.rms ? __ldg(bias) : bias_smem[i]);
#pragma unroll
                    for (int j = 0; j < kChunk; ++j) {
                        y_rmem[j] = fmaf(y_rmem[j], weight_rmem[j], bias_rmem[j]);
                    }
                }
                store_gmem_16(y_row_gmem + i * kChunk, pack_chunk<kDType>(y_rmem));
            }
        }
        for (int i = thread; !is_whole && i < size; i += kThreads) {
            const int j = begin + i; // of the row
            const float weight = weight_gmem ? to_float<kDType>(__ldg(weight_gmem + j)) : 1.0f;
            const float bias = bias_gmem ? to_float<kDType>(__ldg(bias_gmem + j)) : 0.0f;
            y_row_gmem[i] = from_float<kDType>(fmaf((element(i) - mean) * rstd, weight, bias));
        }
    }
}

} // namespace a3
