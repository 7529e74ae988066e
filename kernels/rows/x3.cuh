#pragma once
// Step 3 of the softmax_cluster family: a cluster for each row. Parent: x2.
//
// What changed
//   1. A cluster has one row, and the grid as many clusters as x has rows. There is no loop over
//      rows, and shared memory has no chunks of a next row.
//   2. Blocks of 8 warps, of which an SM has four.
//   3. The barrier of m and l has one phase. A block ends when the bytes of all blocks have come,
//   so
//      that none sends to one that has ended.
//   4. A block arrives at the barrier of the cluster before it loads, and waits there where it
//      sends.
//
// Why: a persistent block copies its next row to shared memory and reads it back. An SM has two
// such blocks at most. Where one waits for m and l, only the other one has work. Here an SM has
// blocks of four rows: one loads while others compute, store or wait for m and l.
//   A row of 65536 elements of bf16 has 4 parts of 32 KB, each in the registers of 256 threads. In
// 64 registers a thread has 8 chunks, 4 registers each.
//   Cost: a cluster begins for each row, which the other blocks of an SM hide. No cluster barrier
// at the end: it would keep a block on its SM until the last one of the cluster has stored y.
// Expected, as a share of a copy at a width of 65536: 90%, where x2 has 88%.
//
// benchmark:begin
// benchmark:end
// Verdict: kept. On an H200 93% of a copy's speed at 65536 and 131072, where x2 has 88 and 87%.
//
// Phases: as x2.

#include "elements.cuh"
#include "kernels/rows/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "predicated.cuh"
#include "sm90/cluster.cuh"
#include "sm90/mbarrier.cuh"

namespace x3 {

constexpr float kLowest = -3.402823466e38f; // the lowest finite fp32

// e^(x - m). The product with log2(e) is not folded into one FFMA, x · log2(e) - m · log2(e), since
// m · log2(e) overflows where |m| exceeds 2.3e38.
__device__ __forceinline__ float exponential(float x, float m) {
    return exp2_approx((x - m) * kLog2e);
}

// A chunk of -inf.
template <DType kDType>
__device__ __forceinline__ uint4 minus_infinity() {
    float x_rmem[kChunkElements<kDType>];
#pragma unroll
    for (float &x : x_rmem) {
        x = -INFINITY;
    }
    return pack_chunk<kDType>(x_rmem);
}

// m = max(x) and l = Σ e^(x - m) over some elements of a row; kLowest and 0 over no element.
struct __align__(8) Partial {
    float m, l;
};

// Combines a and b. The larger m stays, so that one of the two factors is 1 and is left out. The
// order of a and b does not matter, so all lanes of a tree get the same bits.
__device__ __forceinline__ Partial combine(Partial a, Partial b) {
    const bool a_is_lower = a.m < b.m;
    const Partial lower = a_is_lower ? a : b, upper = a_is_lower ? b : a;
    return {upper.m, fmaf(lower.l, exponential(lower.m, upper.m), upper.l)};
}

__device__ __forceinline__ Partial shuffle_xor(Partial value, int lanes) {
    return {__shfl_xor_sync(0xffffffff, value.m, lanes),
            __shfl_xor_sync(0xffffffff, value.l, lanes)};
}

// Writes m and l to the shared memory of a block of the cluster, whose barrier counts their bytes.
__device__ __forceinline__ void send(uint32_t dst_smem, Partial sum, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 "
                 "[%0], {%2, %3}, [%1];" ::"r"(dst_smem),
                 "r"(barrier), "f"(sum.m), "f"(sum.l)
                 : "memory");
}

// The two halves of cluster_sync_relaxed. Work between them hides the wait.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Combines m and l of all threads of a cluster, once.
template <int kBlocks, int kWarps>
struct ClusterReduce {
    Partial *own_smem; // (kWarps): of the block's warps
    Partial *parts_smem; // (kBlocks): of the cluster's blocks
    uint32_t barrier;

    // The block's arrival at the cluster barrier must follow.
    __device__ __forceinline__ void init_barriers() const {
        barrier_init(barrier, 1);
        barrier_init_fence();
    }
    // Returns the same bits to each thread.
    __device__ __forceinline__ Partial operator()(Partial value) {
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            value = combine(value, shuffle_xor(value, lanes));
        }
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) {
            own_smem[warp] = value;
        }
        __syncthreads(); // a warp reads what the others have written
        value = own_smem[lane % kWarps];
#pragma unroll
        for (int lanes = 1; lanes < kWarps; lanes *= 2) {
            value = combine(value, shuffle_xor(value, lanes));
        }
        if constexpr (kBlocks > 1) {
            cluster_wait(); // all blocks have begun, and their barriers are ready
            if (threadIdx.x == 0) {
                barrier_expect(barrier, kBlocks * sizeof(Partial));
            }
            if (threadIdx.x < kBlocks) {
                const uint32_t dst_smem = smem_address(parts_smem + cluster_rank());
                const uint32_t dst_barrier = in_block(barrier, threadIdx.x);
                send(in_block(dst_smem, threadIdx.x), value, dst_barrier);
            }
            barrier_wait(barrier, 0); // those of all blocks have come
            value = parts_smem[0];
#pragma unroll
            for (int block = 1; block < kBlocks; ++block) {
                value = combine(value, parts_smem[block]);
            }
        }
        return value;
    }
};

// The larger elements of two chunks, place by place. NaN gives way, and gets into l.
template <DType kDType>
__device__ __forceinline__ uint4 chunk_max(uint4 a, uint4 b) {
    const auto word_max = [](uint32_t x, uint32_t y) {
        if constexpr (kDType == DType::FP32) {
            return __float_as_uint(fmaxf(__uint_as_float(x), __uint_as_float(y)));
        }
        uint32_t larger;
        if constexpr (kDType == DType::BF16) {
            asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
        } else {
            asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
        }
        return larger;
    };
    return {word_max(a.x, b.x), word_max(a.y, b.y), word_max(a.z, b.z), word_max(a.w, b.w)};
}

// m and l of a thread's chunks.
template <DType kDType, int kChunks>
__device__ __forceinline__ Partial chunks_partial(const uint4 (&chunks)[kChunks]) {
    uint4 largest = chunks[0];
#pragma unroll
    for (int k = 1; k < kChunks; ++k) {
        largest = chunk_max<kDType>(largest, chunks[k]);
    }
    float x_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(x_rmem, largest);
    Partial partial = {kLowest, 0.0f};
#pragma unroll
    for (const float x : x_rmem) {
        partial.m = fmaxf(partial.m, x);
    }
#pragma unroll
    for (const uint4 chunk : chunks) {
        unpack_chunk<kDType>(x_rmem, chunk);
#pragma unroll
        for (const float x : x_rmem) {
            partial.l += exponential(x, partial.m);
        }
    }
    return partial;
}

// y = e^(x - m) / l. log2(l) of a row of -inf is -inf, and y NaN.
__device__ __forceinline__ float softmax(float x, float m, float log2_l) {
    return exp2_approx(fmaf(x - m, kLog2e, -log2_l));
}

// unpack_chunk, where `zero` is 0 and the compiler does not know it. Else it would unpack a chunk
// once, and spill 8 values to keep them instead of 4 words.
template <DType kDType>
__device__ __forceinline__ void unpack_again(float (&x_rmem)[kChunkElements<kDType>], uint4 chunk,
                                             uint32_t zero) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    if constexpr (kDType == DType::BF16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x_rmem[2 * i] = __uint_as_float(words[i] << (16 + zero));
            x_rmem[2 * i + 1] = __uint_as_float(words[i] & (0xffff0000 | zero));
        }
    } else {
        unpack_chunk<kDType>(x_rmem,
                             {words[0] ^ zero, words[1] ^ zero, words[2] ^ zero, words[3] ^ zero});
    }
}

// y for a chunk of x.
template <DType kDType>
__device__ __forceinline__ uint4 softmax_chunk(uint4 chunk, float m, float log2_l, uint32_t zero) {
    float x_rmem[kChunkElements<kDType>];
    unpack_again<kDType>(x_rmem, chunk, zero);
#pragma unroll
    for (float &x : x_rmem) {
        x = softmax(x, m, log2_l);
    }
    return pack_chunk<kDType>(x_rmem);
}

// Whether all rows begin at multiples of 16 bytes, have whole chunks, and fit into the registers of
// a cluster.
template <SoftmaxClusterKernelConfig cfg>
__device__ __forceinline__ bool has_whole_chunks(const RowsKernelArgs &args) {
    constexpr int kChunk = kChunkElements<cfg.dtype>;
    const auto address = [](const void *gmem) { return reinterpret_cast<uintptr_t>(gmem); };
    return (address(args.x) | address(args.y)) % kChunkBytes == 0 &&
           (args.x_stride | args.y_stride | args.width) % kChunk == 0 &&
           args.width <= cfg.cluster_blocks * cfg.n_threads() * cfg.chunks * kChunk;
}

template <typename Kernels>
__global__ void __cluster_dims__(Kernels::value.cluster_blocks, 1, 1)
    __launch_bounds__(Kernels::value.n_threads(), Kernels::value.blocks_per_sm())
        softmax_kernel(const __grid_constant__ RowsKernelArgs args) {
    constexpr SoftmaxClusterKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 8 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.cluster_blocks >= 1 && cfg.cluster_blocks <= 8, "portable clusters");
    static_assert(cfg.chunks >= 1 && cfg.chunks <= 8, "64 registers per thread");

    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.n_threads(), kChunks = cfg.chunks;
    constexpr int kBlocks = cfg.cluster_blocks, kChunk = kChunkElements<kDType>;

    extern __shared__ uint64_t barrier_smem[]; // (1)
    auto *parts_smem = reinterpret_cast<Partial *>(barrier_smem + 1); // (kWarps), (kBlocks)
    ClusterReduce<kBlocks, kWarps> cluster_reduce{parts_smem, parts_smem + kWarps,
                                                  smem_address(barrier_smem)};

    // The part of a row that each block of the cluster has: whole chunks, but for the last one. A
    // row of 1000 elements in 4 blocks: 256, 256, 256 and 232.
    const int rank = cluster_rank(), thread = threadIdx.x;
    const int part = (args.width + kBlocks * kChunk - 1) / (kBlocks * kChunk) * kChunk;
    const int begin = rank * part, size = max(0, min(part, args.width - begin));
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + begin;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + begin;

    const bool is_whole = has_whole_chunks<cfg>(args);
    const int n_chunks = is_whole ? size / kChunk : 0; // in registers; else elements one by one
    const uint32_t zero = args.width >> 31; // of a width above 0
    if (thread == 0) {
        cluster_reduce.init_barriers();
    }
    if constexpr (kBlocks > 1) {
        cluster_arrive_relaxed();
    }
    const int64_t row = blockIdx.x / kBlocks;

    // Always true. Without a branch ptxas moves the arrival behind the sums.
    if (row < args.rows) {
        const auto *row_gmem = x_gmem + row * args.x_stride;
        const auto element = [&](int i) { return to_float<kDType>(__ldg(row_gmem + i)); };

        // 1. x: global → registers; -inf where there is no chunk: it changes neither m nor l
        uint4 x_rmem[kChunks];
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const bool has_chunk = thread + k * kThreads < n_chunks;
            x_rmem[k] = load_gmem_16_once_if(has_chunk, row_gmem + (thread + k * kThreads) * kChunk,
                                             minus_infinity<kDType>());
        }

        // 2. m = max(x), l = Σ e^(x - m)
        Partial partial = chunks_partial<kDType>(x_rmem);
        for (int i = thread; !is_whole && i < size; i += kThreads) {
            const float x = element(i), m = fmaxf(kLowest, x);
            partial = combine(partial, {m, exponential(x, m)});
        }
        const auto [m, l] = cluster_reduce(partial);

        // 3. y = e^(x - m) / l
        const float log2_l = log2_approx(l);
        auto *y_row_gmem = y_gmem + row * args.y_stride;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            if (const int i = thread + k * kThreads; i < n_chunks) {
                store_gmem_16(y_row_gmem + i * kChunk,
                              softmax_chunk<kDType>(x_rmem[k], m, log2_l, zero));
            }
        }
        for (int i = thread; !is_whole && i < size; i += kThreads) {
            y_row_gmem[i] = from_float<kDType>(softmax(element(i), m, log2_l));
        }
    }
}

} // namespace x3
