#pragma once
// Step 3 of the layer_norm family: the row in registers, read once. Parent: n2.
//
// What changed
//   1. A thread loads `chunks` chunks of the row before it uses the first. It keeps them as they
//      are in memory: 4 registers each, 8 elements of 16 bits.
//   2. Mean, variance and y are computed from these registers.
//   3. Chunks beyond those in registers are read in each of the three phases, as in n2.
//
// Why, in bytes per element of bf16 where the rows of all thread blocks exceed L2: n2 reads 3 · 2
// and writes 2, 8 in all. A row that the registers hold takes 2 + 2 = 4. Where rows stay in L1,
// each is loaded once instead of three times. All loads of a thread are in flight before the first
// sum: 8 warps with 4 chunks have 16 KiB per block on their way.
//   The variance keeps its two passes. The second is over registers and moves nothing.
//   Chan's formula would combine (n, mean, Σ (x - mean)²) of parts, and rows beyond the registers
// would be read twice instead of three times. It takes a division per part, and the mean of a chunk
// before its squares. Wide rows have a cheaper way, more registers: those of a cluster.
// Expected, of 3.35 TB/s at 4 bytes per element: 90% from a width of 4096 to what the registers
// hold. At 131072, where `c4` with 8 warps holds 1/16 of a row, 53%: 2 · (1 + 2 · 15/16) + 2 bytes
// per element are 7.75 instead of 8.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of PyTorch's
// layer_norm or rms_norm in the harmonic mean over widths. 8 warps: 3,051, 0.46. Cost: 52
// registers per thread, 64 bytes of shared memory per block, 4 blocks per SM.
// benchmark:end
// Verdict: 95% of a copy's speed at a width of 8192 on an H200, which its registers hold; half of
// n2's at 64.
//
// Phases: 1 x to registers, 2 mean, 3 rstd, 4 y.

#include "elements.cuh"
#include "kernels/norm/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"

namespace n3 {

// Adds the values of all threads of the block and returns the sum to each: by a tree over the lanes
// of each warp, then by one over the warps. Each call needs its own smem (kWarps).
template <int kWarps>
__device__ __forceinline__ float block_sum(float value, float *smem) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        value += __shfl_xor_sync(0xffffffff, value, lanes);
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        smem[warp] = value;
    }
    __syncthreads(); // a warp reads what the others have written
    value = smem[lane % kWarps];
#pragma unroll
    for (int lanes = 1; lanes < kWarps; lanes *= 2) {
        value += __shfl_xor_sync(0xffffffff, value, lanes);
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
    static_assert(cfg.row_threads == 0, "a row has the threads of a block before n4");

    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.n_threads(), kChunks = cfg.chunks;
    constexpr int kChunk = kChunkElements<kDType>;

    extern __shared__ float smem[];
    float *mean_smem = smem, *variance_smem = smem + kWarps; // (kWarps) each

    const int64_t row = blockIdx.x;
    const int thread = threadIdx.x; // of those that have the row
    const int width = args.width;
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + row * args.y_stride;
    const auto *weight_gmem = static_cast<const ElementOf<kDType> *>(args.weight); // (width)
    const auto *bias_gmem = static_cast<const ElementOf<kDType> *>(args.bias); // (width)

    // A row of x is a head, chunks that begin at multiples of 16 bytes, and a tail. Head and tail
    // have less than a chunk each, together at most 14 elements, so no thread has more than one.
    const int head = min(elements_to_boundary(x_gmem), width);
    const int n_chunks = (width - head) / kChunk;
    const bool has_edge = thread < width - n_chunks * kChunk;
    const int edge = thread + (thread < head ? 0 : n_chunks * kChunk);
    const auto *x_chunks_gmem = reinterpret_cast<const uint4 *>(x_gmem + head); // (n_chunks)

    // 1. x: global → registers; 0 where there is no chunk
    const float x_edge = has_edge ? to_float<kDType>(__ldg(x_gmem + edge)) : 0.0f;
    uint4 x_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        x_rmem[k] = i < n_chunks ? __ldg(x_chunks_gmem + i) : uint4{};
    }
    const int first_rest = thread + kChunks * kThreads; // the first chunk not in registers

    // 2. mean = Σ x / width
    float sum = x_edge;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        sum = add_chunk<kDType>(sum, x_rmem[k]); // nothing, where there is no chunk
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        sum = add_chunk<kDType>(sum, __ldg(x_chunks_gmem + i));
    }
    const float mean = block_sum<kWarps>(sum, mean_smem) / width;

    // 3. rstd = 1 / sqrt(Σ (x - mean)² / width + eps)
    float squares = has_edge ? (x_edge - mean) * (x_edge - mean) : 0.0f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        if (thread + k * kThreads < n_chunks) { // else (0 - mean)² would be added
            squares = add_squares<kDType>(squares, x_rmem[k], mean);
        }
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        squares = add_squares<kDType>(squares, __ldg(x_chunks_gmem + i), mean);
    }
    const float variance = block_sum<kWarps>(squares, variance_smem) / width;
    const float rstd = rsqrtf(variance + args.eps);

    // 4. y = (x - mean) · rstd · weight + bias
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
    if (has_edge) {
        y_gmem[edge] = norm_element<kDType>(x_edge, mean, rstd, weight_gmem, bias_gmem, edge);
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

} // namespace n3
