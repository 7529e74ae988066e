#pragma once
// Step 4 of the layer_norm family: threads per row by width. Parent: n3.
//
// What changed
//   1. `row_threads` threads have a row, from 8 to all of the block. A block of n_warps warps has
//      n_warps · 32 / row_threads rows.
//   2. The sums of a row are a tree over its own lanes only. Up to 32 threads per row there is no
//      barrier and no shared memory.
//   3. Threads behind the last row have a row of width 0, because all lanes take part in a shuffle.
//
// Why: n3 with 8 warps holds 8192 elements of bf16, and a row of 256 has 32 chunks. So 224 of 256
// threads have none, and they still take part in two reductions with a barrier each. With 32
// threads per row a block of 4 warps has 4 rows, and every thread has a chunk. A row of 64 elements
// has 8 chunks, for 8 threads.
//   Warps of different rows never wait for each other, so that one row's loads run beside another's
// arithmetic.
//   The sums of a warp take 5 shuffles instead of 8. No chunk is missing where the row fills the
// registers. The simulator counts 24 PTX instructions per element at a width of 4096, n3 has 39.
//   Cost: a warp alone holds fewer elements. 16 chunks per thread are 64 registers, and a row of
// 4096 elements of bf16 for 32 threads. 4 blocks of such a kernel, 16 warps, fit into an SM. With
// 16 chunks in flight per thread they ask for 128 KiB at once; 40 KiB hide the latency of DRAM.
// Expected, of 3.35 TB/s at 4 bytes per element: 85% at 256 and 1024 with 32 threads per row, 80%
// at 64 with 8; as n3 from a width of 4096 on, with its threads per row.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of PyTorch's
// layer_norm or rms_norm in the harmonic mean over widths. 4 warps: 3,517, 0.92. Cost: 120
// registers per thread, 32 bytes of shared memory per block, 4 blocks per SM.
// benchmark:end
// Verdict: on an H200 94 to 96% of a copy's speed from a width of 256 to 16384, with threads by
// width.
//
// Phases: as n3.

#include "elements.cuh"
#include "kernels/norm/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"

namespace n4 {

// Adds the values of the kThreads threads of a row and returns the sum to each: by a tree over the
// lanes of each warp, then by one over the row's warps, if it has several. Each call needs its own
// smem (warps of the block).
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

// Returns `sum` with the elements of a chunk added to it.
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

// Returns `squares` with (x - mean)² of the elements of a chunk added to it.
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

// y = (x - mean) · rstd · weight + bias for the chunk of x that begins at an element of the row.
template <DType kDType>
__device__ __forceinline__ uint4 norm_chunk(uint4 chunk, float mean, float rstd,
                                            const ElementOf<kDType> *weight_gmem,
                                            const ElementOf<kDType> *bias_gmem, int element) {
    constexpr int kChunk = kChunkElements<kDType>;
    float x_rmem[kChunk], weight_rmem[kChunk], bias_rmem[kChunk];
    unpack_chunk<kDType>(x_rmem, chunk);
    load_chunk<kDType>(weight_rmem, weight_gmem, element, 1.0f);
    load_chunk<kDType>(bias_rmem, bias_gmem, element, 0.0f);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        x_rmem[j] = fmaf((x_rmem[j] - mean) * rstd, weight_rmem[j], bias_rmem[j]);
    }
    return pack_chunk<kDType>(x_rmem);
}

// y = (x - mean) · rstd · weight + bias for one element of the row.
template <DType kDType>
__device__ __forceinline__ ElementOf<kDType>
norm_element(float x, float mean, float rstd, const ElementOf<kDType> *weight_gmem,
             const ElementOf<kDType> *bias_gmem, int element) {
    const float weight = weight_gmem ? to_float<kDType>(__ldg(weight_gmem + element)) : 1.0f;
    const float bias = bias_gmem ? to_float<kDType>(__ldg(bias_gmem + element)) : 0.0f;
    return from_float<kDType>(fmaf((x - mean) * rstd, weight, bias));
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    layer_norm_kernel(const __grid_constant__ NormKernelArgs args) {
    constexpr LayerNormKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.chunks >= 1 && cfg.chunks <= 16 &&
                      cfg.chunks * 4 + 48 <= 65536 / cfg.n_threads(),
                  "a chunk is 4 registers, the rest of the kernel up to 48, and an SM has 65536");
    static_assert(cfg.row_threads >= 8 && cfg.row_threads <= cfg.n_threads() &&
                      (cfg.row_threads & (cfg.row_threads - 1)) == 0,
                  "the tree over the threads of a row is one over the lanes of a warp");

    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.threads_per_row(), kChunks = cfg.chunks;
    constexpr int kRows = cfg.n_threads() / kThreads; // of the block
    constexpr int kChunk = kChunkElements<kDType>;
    constexpr int kEdges = (2 * (kChunk - 1) + kThreads - 1) / kThreads; // of a thread

    extern __shared__ float smem[];
    float *mean_smem = smem, *variance_smem = smem + kWarps; // (kWarps) each

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

    // 2. mean = Σ x / width
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        sum += x_edges[k];
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        sum = add_chunk<kDType>(sum, x_rmem[k]); // nothing, where there is no chunk
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        sum = add_chunk<kDType>(sum, __ldg(x_chunks_gmem + i));
    }
    const float mean = row_sum<kThreads>(sum, mean_smem) / width;

    // 3. rstd = 1 / sqrt(Σ (x - mean)² / width + eps)
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        if (thread + k * kThreads < n_edges) { // else (0 - mean)² would be added
            squares = fmaf(x_edges[k] - mean, x_edges[k] - mean, squares);
        }
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        if (thread + k * kThreads < n_chunks) {
            squares = add_squares<kDType>(squares, x_rmem[k], mean);
        }
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        squares = add_squares<kDType>(squares, __ldg(x_chunks_gmem + i), mean);
    }
    const float variance = row_sum<kThreads>(squares, variance_smem) / width;
    const float rstd = rsqrtf(variance + args.eps);

    // 4. y = (x - mean) · rstd · weight + bias
    if (row >= args.rows) {
        return;
    }
    if (thread == 0 && args.mean != nullptr) {
        args.mean[row] = mean;
    }
    if (thread == 0 && args.rstd != nullptr) {
        args.rstd[row] = rstd;
    }
    if (!has_chunks_at(y_gmem, head) || !has_chunks_at(weight_gmem, head) ||
        !has_chunks_at(bias_gmem, head)) {
        // Neighbouring threads take neighbouring elements, as in n1, and read x again.
        for (int i = thread; i < width; i += kThreads) {
            const float x = to_float<kDType>(__ldg(x_gmem + i));
            y_gmem[i] = norm_element<kDType>(x, mean, rstd, weight_gmem, bias_gmem, i);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        const int n = thread + k * kThreads, i = edge(n);
        if (n < n_edges) {
            y_gmem[i] = norm_element<kDType>(x_edges[k], mean, rstd, weight_gmem, bias_gmem, i);
        }
    }
    auto *y_chunks_gmem = reinterpret_cast<uint4 *>(y_gmem + head); // (n_chunks)
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        if (i < n_chunks) {
            store_gmem_16(y_chunks_gmem + i, norm_chunk<kDType>(x_rmem[k], mean, rstd, weight_gmem,
                                                                bias_gmem, head + i * kChunk));
        }
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        const uint4 chunk = __ldg(x_chunks_gmem + i);
        store_gmem_16(y_chunks_gmem + i, norm_chunk<kDType>(chunk, mean, rstd, weight_gmem,
                                                            bias_gmem, head + i * kChunk));
    }
}

} // namespace n4
