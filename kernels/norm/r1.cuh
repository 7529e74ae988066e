#pragma once
// Step 1 of the rms_norm family: layer norm without the mean. Parent: n4.
//
// y = x · rstd · weight + bias along rows, where rstd is 1 / sqrt(mean of x² + eps).
//
// What changed
//   1. There is no mean: its sum, its subtractions and its reduction are left out.
//   2. The squares are summed where chunks beyond the registers are read first, so that these are
//      read twice instead of three times.
//
// Why, in instructions per element: n4 has an addition for the mean, a subtraction and an FFMA for
// the variance, and another subtraction for y. r1 has the FFMA alone: 3 fewer of about 10. A row
// has one reduction, 5 shuffles and additions for 32 threads, instead of two that wait for each
// other.
//   The bytes are the same where the registers hold the row. Of a row of 131072, 32 threads hold
// 1/32. There r1 moves 2 · (1 + 31/32) + 2 = 5.9 bytes per element instead of 7.9.
//   x² may overflow in fp32, from 1.8e19 on; rstd is 0 then, and so is y, as in
// torch.nn.functional.rms_norm.
// Expected: as n4 where DRAM binds, from 256 to 4096; 3% faster at 64, where the chain of two
// reductions is a part of a row's time; 30% faster at 131072.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 96 to 98% of a copy's speed from a width of 256 to 8192, 72% at 64.
//
// Phases: 1 x to registers, 2 rstd, 3 y.

#include "elements.cuh"
#include "kernels/norm/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"

namespace r1 {

// Adds the values of the kThreads threads of a row and returns the sum to each: by a tree over the
// lanes of each warp, then by one over the row's warps, if it has several. smem: (warps of the
// block).
template <int kThreads>
__device__ __forceinline__ float row_sum(float value, float *smem) {
#pragma unroll
    for (int lanes = 1; lanes < kThreads && lanes < 32; lanes *= 2) {
        value += __shfl_xor_sync(0xffffffff, value, lanes);
    }
    if constexpr (kThreads > 32) {
        constexpr int kWarps = kThreads / 32; // of a row
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) {
            smem[warp] = value;
        }
        __syncthreads(); // a warp reads what the others have written
        value = smem[warp / kWarps * kWarps + lane % kWarps];
#pragma unroll
        for (int lanes = 1; lanes < kWarps; lanes *= 2) {
            value += __shfl_xor_sync(0xffffffff, value, lanes);
        }
    }
    return value;
}

// Returns `squares` with x² of the elements of a chunk added to it.
template <DType kDType>
__device__ __forceinline__ float add_squares(float squares, uint4 chunk) {
    float x_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(x_rmem, chunk);
#pragma unroll
    for (const float x : x_rmem) {
        squares = fmaf(x, x, squares);
    }
    return squares;
}

// Whether a vector begins at a multiple of 16 bytes with this element, or is left out.
template <typename T>
__device__ __forceinline__ bool has_chunks_at(const T *gmem, int element) {
    return gmem == nullptr || elements_to_boundary(gmem + element) == 0;
}

// A chunk of weight or bias; `missing` throughout if a call leaves the vector out.
template <DType kDType>
__device__ __forceinline__ void load_chunk(float (&rmem)[kChunkElements<kDType>],
                                           const ElementOf<kDType> *gmem, int element,
                                           float missing) {
    if (gmem != nullptr) {
        unpack_chunk<kDType>(rmem, __ldg(reinterpret_cast<const uint4 *>(gmem + element)));
        return;
    }
#pragma unroll
    for (float &value : rmem) {
        value = missing;
    }
}

// y = x · rstd · weight + bias for the chunk of x that begins at an element of the row.
template <DType kDType>
__device__ __forceinline__ uint4 norm_chunk(uint4 chunk, float rstd,
                                            const ElementOf<kDType> *weight_gmem,
                                            const ElementOf<kDType> *bias_gmem, int element) {
    constexpr int kChunk = kChunkElements<kDType>;
    float x_rmem[kChunk], weight_rmem[kChunk], bias_rmem[kChunk];
    unpack_chunk<kDType>(x_rmem, chunk);
    load_chunk<kDType>(weight_rmem, weight_gmem, element, 1.0f);
    load_chunk<kDType>(bias_rmem, bias_gmem, element, 0.0f);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        x_rmem[j] = fmaf(x_rmem[j] * rstd, weight_rmem[j], bias_rmem[j]);
    }
    return pack_chunk<kDType>(x_rmem);
}

// y = x · rstd · weight + bias for one element of the row.
template <DType kDType>
__device__ __forceinline__ ElementOf<kDType>
norm_element(float x, float rstd, const ElementOf<kDType> *weight_gmem,
             const ElementOf<kDType> *bias_gmem, int element) {
    const float weight = weight_gmem ? to_float<kDType>(__ldg(weight_gmem + element)) : 1.0f;
    const float bias = bias_gmem ? to_float<kDType>(__ldg(bias_gmem + element)) : 0.0f;
    return from_float<kDType>(fmaf(x * rstd, weight, bias));
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    rms_norm_kernel(const __grid_constant__ NormKernelArgs args) {
    constexpr RmsNormKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.chunks >= 1 && cfg.chunks <= 16 &&
                      cfg.chunks * 4 + 48 <= 65536 / cfg.n_threads(),
                  "a chunk is 4 registers, the rest of the kernel up to 48, and an SM has 65536");
    static_assert(cfg.row_threads >= 8 && cfg.row_threads <= cfg.n_threads() &&
                      (cfg.row_threads & (cfg.row_threads - 1)) == 0,
                  "the tree over the threads of a row is one over the lanes of a warp");

    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.threads_per_row(), kChunks = cfg.chunks;
    constexpr int kRows = cfg.n_threads() / kThreads; // of the block
    constexpr int kChunk = kChunkElements<kDType>;
    constexpr int kEdges = (2 * (kChunk - 1) + kThreads - 1) / kThreads; // of a thread

    extern __shared__ float smem[];

    const int64_t row = int64_t(blockIdx.x) * kRows + threadIdx.x / kThreads;
    const int thread = threadIdx.x % kThreads; // of those that have the row
    const int width = row < args.rows ? args.width : 0;
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + row * args.y_stride;
    const auto *weight_gmem = static_cast<const ElementOf<kDType> *>(args.weight); // (width)
    const auto *bias_gmem = static_cast<const ElementOf<kDType> *>(args.bias); // (width)

    // A row of x is a head, chunks that begin at multiples of 16 bytes, and a tail. Head and tail
    // have less than a chunk each, together at most 14 elements of 16 bits: one per thread, or two
    // where 8 threads have the row.
    const int head = min(elements_to_boundary(x_gmem), width);
    const int n_chunks = (width - head) / kChunk;
    const int n_edges = width - n_chunks * kChunk;
    const auto edge = [&](int n) { // the place in the row of the n-th element of head and tail
        return n + (n < head ? 0 : n_chunks * kChunk);
    };
    const auto *x_chunks_gmem = reinterpret_cast<const uint4 *>(x_gmem + head); // (n_chunks)

    // 1. x: global → registers; 0 where there is no chunk
    float x_edges[kEdges];
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        const int n = thread + k * kThreads;
        x_edges[k] = n < n_edges ? to_float<kDType>(__ldg(x_gmem + edge(n))) : 0.0f;
    }
    uint4 x_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        x_rmem[k] = i < n_chunks ? __ldg(x_chunks_gmem + i) : uint4{};
    }
    const int first_rest = thread + kChunks * kThreads; // the first chunk not in registers

    // 2. rstd = 1 / sqrt(Σ x² / width + eps)
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        squares = fmaf(x_edges[k], x_edges[k], squares);
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        squares = add_squares<kDType>(squares, x_rmem[k]); // nothing, where there is no chunk
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        squares = add_squares<kDType>(squares, __ldg(x_chunks_gmem + i));
    }
    const float rstd = rsqrtf(row_sum<kThreads>(squares, smem) / width + args.eps);

    // 3. y = x · rstd · weight + bias
    if (row >= args.rows) {
        return;
    }
    if (thread == 0 && args.rstd != nullptr) {
        args.rstd[row] = rstd;
    }
    if (!has_chunks_at(y_gmem, head) || !has_chunks_at(weight_gmem, head) ||
        !has_chunks_at(bias_gmem, head)) {
        // Neighbouring threads take neighbouring elements, as in n1, and read x again.
        for (int i = thread; i < width; i += kThreads) {
            const float x = to_float<kDType>(__ldg(x_gmem + i));
            y_gmem[i] = norm_element<kDType>(x, rstd, weight_gmem, bias_gmem, i);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        const int n = thread + k * kThreads, i = edge(n);
        if (n < n_edges) {
            y_gmem[i] = norm_element<kDType>(x_edges[k], rstd, weight_gmem, bias_gmem, i);
        }
    }
    auto *y_chunks_gmem = reinterpret_cast<uint4 *>(y_gmem + head); // (n_chunks)
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        if (i < n_chunks) {
            store_gmem_16(y_chunks_gmem + i, norm_chunk<kDType>(x_rmem[k], rstd, weight_gmem,
                                                                bias_gmem, head + i * kChunk));
        }
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        const uint4 chunk = __ldg(x_chunks_gmem + i);
        store_gmem_16(y_chunks_gmem + i,
                      norm_chunk<kDType>(chunk, rstd, weight_gmem, bias_gmem, head + i * kChunk));
    }
}

} // namespace r1
