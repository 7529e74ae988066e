#pragma once
// Step 4 of the softmax family: threads by width. Parent: s3.
//
// What changed
//   1. A row has `row_threads` threads, a power of two from 8 to those of the block, and the block
//      has n_threads / row_threads rows. 8 lanes with 4 chunks hold 256 elements of 16 bits.
//   2. The tree that combines m and l goes over the lanes of a row. Where these lie in one warp,
//      there is no shared memory and no barrier.
//   3. A row may have fewer threads than head and tail have elements: each takes up to two.
//
// Why: s3 gives each row a block. Of 8 warps with 4 chunks, 32 of 1024 places hold a chunk of a row
// of 256 elements, and the other 992 hold -inf, whose exponentials are computed all the same: 124
// warp instructions for each chunk. With 2 warps and 2 chunks, 32 of 128 places are taken. With 8
// lanes for a row all are, and a warp reads 4 rows, 512 bytes of each instruction in a line.
//   Cost: lanes whose row does not exist wait in the last block; with more than one warp for a row
// nothing is gained over s3.
// Expected: 90% of a copy at widths from 64 to 1024, with as many lanes as the row has chunks.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of
// torch.softmax in the harmonic mean over widths. 4 warps: 3,210, 1.40. Cost: 56 registers per
// thread, 32 bytes of shared memory per block, 9 blocks per SM.
// benchmark:end
// Verdict: on an H200 98 to 99% of a copy's speed from a width of 256 to 8192, with threads by
// width.
//
// Phases: 1 x to registers, 2 m and l, 3 y.

#include "elements.cuh"
#include "kernels/rows/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"

namespace s4 {

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

// Combines the values of the threads of a row and returns the result to each: by a tree over the
// lanes of each warp, then by one over the warps of the row. smem (warps of the block) is for rows
// of several warps. All threads of the block must call it.
template <int kRowThreads>
__device__ __forceinline__ Partial row_reduce(Partial value, Partial *smem) {
#pragma unroll
    for (int lanes = 1; lanes < 32 && lanes < kRowThreads; lanes *= 2) {
        value = combine(value, shuffle_xor(value, lanes));
    }
    if constexpr (kRowThreads > 32) {
        constexpr int kWarps = kRowThreads / 32;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) {
            smem[warp] = value;
        }
        __syncthreads(); // a warp reads what the others have written
        value = smem[warp / kWarps * kWarps + lane % kWarps];
#pragma unroll
        for (int lanes = 1; lanes < kWarps; lanes *= 2) {
            value = combine(value, shuffle_xor(value, lanes));
        }
    }
    return value;
}

// Returns `partial` extended by a chunk of x.
template <DType kDType>
__device__ __forceinline__ Partial add_chunk(Partial partial, uint4 chunk) {
    float x_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(x_rmem, chunk);
    float m = partial.m;
#pragma unroll
    for (const float x : x_rmem) {
        m = fmaxf(m, x);
    }
    float l = partial.l * exponential(partial.m, m);
#pragma unroll
    for (const float x : x_rmem) {
        l += exponential(x, m);
    }
    return {m, l};
}

// y = e^(x - m) / l for a chunk of x.
template <DType kDType>
__device__ __forceinline__ uint4 softmax_chunk(uint4 chunk, float m, float inverse_l) {
    float x_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(x_rmem, chunk);
#pragma unroll
    for (float &x : x_rmem) {
        x = exponential(x, m) * inverse_l;
    }
    return pack_chunk<kDType>(x_rmem);
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    softmax_kernel(const __grid_constant__ RowsKernelArgs args) {
    constexpr SoftmaxKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.chunks >= 1 && cfg.chunks <= 16 &&
                      cfg.chunks * 4 + 48 <= 65536 / cfg.n_threads(),
                  "a chunk is 4 registers, the rest of the kernel up to 48, and an SM has 65536");
    static_assert(cfg.row_threads >= 8 && (cfg.row_threads & (cfg.row_threads - 1)) == 0 &&
                      cfg.row_threads <= cfg.n_threads(),
                  "the tree over the threads of a row is one over lanes, then one over warps");

    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.row_threads, kChunks = cfg.chunks;
    constexpr int kChunk = kChunkElements<kDType>;
    constexpr int kEdges = (2 * (kChunk - 1) + kThreads - 1) / kThreads; // of a thread, at most

    extern __shared__ Partial smem[]; // (warps of the block)

    const int thread = threadIdx.x % kThreads; // of the row
    const int64_t row = int64_t(blockIdx.x) * cfg.block_rows() + threadIdx.x / kThreads;
    const int width = row < args.rows ? args.width : 0; // the last block may have rows too many
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + row * args.y_stride;

    // A row of x is a head, chunks that begin at multiples of 16 bytes, and a tail. Head and tail
    // have less than a chunk each, together at most 14 elements.
    const int head = min(elements_to_boundary(x_gmem), width);
    const int n_chunks = (width - head) / kChunk;
    const int n_edges = width - n_chunks * kChunk;
    // Where edge i is in the row.
    const auto place = [&](int i) { return i < head ? i : i + n_chunks * kChunk; };
    const auto *x_chunks_gmem = reinterpret_cast<const uint4 *>(x_gmem + head); // (n_chunks)

    // 1. x: global → registers; -inf where there is no chunk: it changes neither m nor l
    float x_edges[kEdges];
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        const int i = thread + k * kThreads;
        x_edges[k] = i < n_edges ? to_float<kDType>(__ldg(x_gmem + place(i))) : -INFINITY;
    }
    uint4 x_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        x_rmem[k] = i < n_chunks ? __ldg(x_chunks_gmem + i) : minus_infinity<kDType>();
    }
    const int first_rest = thread + kChunks * kThreads; // the first chunk not in registers

    // 2. m = max(x), l = Σ e^(x - m)
    Partial partial = {kLowest, 0.0f};
#pragma unroll
    for (const float x : x_edges) {
        const float m = fmaxf(kLowest, x);
        partial = combine(partial, {m, exponential(x, m)});
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        partial = add_chunk<kDType>(partial, x_rmem[k]);
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        partial = add_chunk<kDType>(partial, __ldg(x_chunks_gmem + i));
    }
    const auto [m, l] = row_reduce<kThreads>(partial, smem);

    // 3. y = e^(x - m) / l
    const float inverse_l = reciprocal_approx(l);
    if (elements_to_boundary(y_gmem) != elements_to_boundary(x_gmem)) {
        // No chunk of x is a chunk of y. Threads that stored a chunk element by element would touch
        // each sector of y up to 8 times. Here neighbouring threads store neighbouring elements,
        // which touches a sector once, and read x again.
        for (int i = thread; i < width; i += kThreads) {
            const float x = to_float<kDType>(__ldg(x_gmem + i));
            y_gmem[i] = from_float<kDType>(exponential(x, m) * inverse_l);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        if (const int i = thread + k * kThreads; i < n_edges) {
            y_gmem[place(i)] = from_float<kDType>(exponential(x_edges[k], m) * inverse_l);
        }
    }
    auto *y_chunks_gmem = reinterpret_cast<uint4 *>(y_gmem + head); // (n_chunks)
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        if (i < n_chunks) {
            store_gmem_16(y_chunks_gmem + i, softmax_chunk<kDType>(x_rmem[k], m, inverse_l));
        }
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        const uint4 chunk = __ldg(x_chunks_gmem + i);
        store_gmem_16(y_chunks_gmem + i, softmax_chunk<kDType>(chunk, m, inverse_l));
    }
}

} // namespace s4
