#pragma once
// Step 2 of the layer_norm family: 16 bytes per lane. Parent: n1.
//
// What changed
//   1. x, weight and bias are loaded, and y is stored, in chunks of 16 bytes: 8 elements of
//      16 bits, or 4 of fp32. A warp moves 512 bytes per instruction.
//   2. Elements before the first multiple of 16 bytes in a row and behind the last, fewer than 16
//      together, are a head and a tail: each has a thread of its own, which takes one element.
//   3. Where y, weight or bias lie otherwise between the multiples of 16 bytes than x, the
//      last walk takes single elements, as in n1.
//
// Why, in instructions per element of bf16: n1 has 6 loads and stores of 2 bytes, and addresses and
// branches beside them. The simulator counts 55 PTX instructions of n1 at a width of 4096. n2 has
// 6/8 loads and stores, and 8 elements share a loop's overhead: 37 are left, most of them for
// conversions, weight and bias. Each SM has time for 35.
//   The bytes are the same: x is still read three times.
//   An odd width puts 7 of 8 rows between the multiples, and weight and bias never. These rows take
// the way of point 3. Loads of single weights beside chunks of x would need 8 per chunk, whose
// lanes lie 16 bytes apart, 16 sectors each.
// Expected: at a width of 4096 25% faster than n1 in bf16; in fp32, where n1 has half of the
// instructions per byte, 10%. Nothing at 131072, where DRAM binds. Rows of less than a chunk per
// thread, 2048 in bf16 for 8 warps, leave threads without work: slower than n1 there.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of PyTorch's
// layer_norm or rms_norm in the harmonic mean over widths. 8 warps: 3,022, 0.74. Cost: 32
// registers per thread, 64 bytes of shared memory per block, 8 blocks per SM.
// benchmark:end
// Verdict: 30% faster than n1 at a width of 4096 on an H200, and 47% at 8192; 23% slower at 64.
//
// Phases: as n1.

#include "elements.cuh"
#include "kernels/norm/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"

namespace n2 {

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
    static_assert(cfg.chunks == 0, "the row stays in registers from n3 on");
    static_assert(cfg.row_threads == 0, "a row has the threads of a block before n4");

    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.n_threads();
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

    // 1. mean = Σ x / width
    const float x_edge = has_edge ? to_float<kDType>(__ldg(x_gmem + edge)) : 0.0f;
    float sum = x_edge;
    for (int i = thread; i < n_chunks; i += kThreads) {
        float x_rmem[kChunk];
        unpack_chunk<kDType>(x_rmem, __ldg(x_chunks_gmem + i));
#pragma unroll
        for (const float x : x_rmem) {
            sum += x;
        }
    }
    const float mean = block_sum<kWarps>(sum, mean_smem) / width;

    // 2. rstd = 1 / sqrt(Σ (x - mean)² / width + eps)
    float squares = has_edge ? (x_edge - mean) * (x_edge - mean) : 0.0f;
    for (int i = thread; i < n_chunks; i += kThreads) {
        float x_rmem[kChunk];
        unpack_chunk<kDType>(x_rmem, __ldg(x_chunks_gmem + i));
#pragma unroll
        for (const float x : x_rmem) {
            squares = fmaf(x - mean, x - mean, squares);
        }
    }
    const float variance = block_sum<kWarps>(squares, variance_smem) / width;
    const float rstd = rsqrtf(variance + args.eps);

    // 3. y = (x - mean) · rstd · weight + bias
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
    for (int i = thread; i < n_chunks; i += kThreads) {
        const uint4 chunk = __ldg(x_chunks_gmem + i);
        store_gmem_16(y_chunks_gmem + i, norm_chunk<kDType>(chunk, mean, rstd, weight_gmem,
                                                            bias_gmem, head + i * kChunk));
    }
}

} // namespace n2
