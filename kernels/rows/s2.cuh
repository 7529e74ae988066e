#pragma once
// Step 2 of the softmax family: 16 bytes per lane. Parent: s1.
//
// What changed
//   1. A thread loads and stores chunks of 16 bytes, 8 elements of 16 bits or 4 of fp32.
//   2. A row need not begin at a multiple of 16 bytes. The elements before the first boundary and
//      behind the last chunk are taken one by one, each by a thread of the first warp.
//   3. Where the rows of x and y begin at different offsets from such a boundary, no chunk of x is
//      a chunk of y. Loads keep to the chunks of x, and y is written one by one, as in s1.
//
// Why: a warp asks for 512 bytes per load instead of 64 (bf16). For 8 elements s1 issues 24 loads
// and 8 stores, s2 issues 3 and 1, and addresses and loop counters fall with them: 14 instructions
// per element instead of 22, of 35 that there is time for. A thread has up to 4 loads of 16 bytes
// in flight (nvcc unrolls the loops), an SM 128 KiB. At a latency of some 650 ns, 3.35 TB/s need
// 16.5 KB per SM.
//   The bytes stay the same: three reads, from DRAM where the rows do not fit L2.
// Expected, of 3.35 TB/s at 4 bytes per element: 80% at a width of 4096 in bf16; at 131072 still at
// most 50%; in fp32 little more than s1. Rows of less than a chunk per thread, 2048 in bf16 for 8
// warps, leave threads without work: slower than s1 there.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of
// torch.softmax in the harmonic mean over widths. 8 warps: 3,465, 1.01. Cost: 32 registers per
// thread, 64 bytes of shared memory per block, 8 blocks per SM.
// benchmark:end
// Verdict: a gain at every width, to 93% of torch.softmax; short rows gain as well, unlike
// expected. It reaches 86% of 3.35 TB/s at 4096 and 43% at 131072.
//
// Phases: as s1.

#include "elements.cuh"
#include "kernels/rows/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"

namespace s2 {

constexpr float kLowest = -3.402823466e38f; // the lowest finite fp32

// Combines the values of all threads of the block and returns the result to each: by a tree over
// the lanes of each warp, then by one over the warps. Each call needs its own smem (kWarps).
template <int kWarps, typename Combine>
__device__ __forceinline__ float block_reduce(float value, float *smem, Combine combine) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        value = combine(value, __shfl_xor_sync(0xffffffff, value, lanes));
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        smem[warp] = value;
    }
    __syncthreads(); // a warp reads what the others have written
    value = smem[lane % kWarps];
#pragma unroll
    for (int lanes = 1; lanes < kWarps; lanes *= 2) {
        value = combine(value, __shfl_xor_sync(0xffffffff, value, lanes));
    }
    return value;
}

// e^(x - m). The product with log2(e) is not folded into one FFMA, x · log2(e) - m · log2(e), since
// m · log2(e) overflows where |m| exceeds 2.3e38.
__device__ __forceinline__ float exponential(float x, float m) {
    return exp2_approx((x - m) * kLog2e);
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
    static_assert(cfg.chunks == 0, "the row stays in registers from s3 on");

    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.n_threads();
    constexpr int kChunk = kChunkElements<kDType>;

    extern __shared__ float smem[];
    float *m_smem = smem, *l_smem = smem + kWarps; // (kWarps) each

    const int64_t row = blockIdx.x;
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + row * args.y_stride;

    // A row of x is a head, chunks that begin at multiples of 16 bytes, and a tail. Head and tail
    // have less than a chunk each, together at most 14 elements, so no thread has more than one.
    const int head = min(elements_to_boundary(x_gmem), args.width);
    const int n_chunks = (args.width - head) / kChunk;
    const bool has_edge = threadIdx.x < args.width - n_chunks * kChunk;
    const int edge = threadIdx.x + (threadIdx.x < head ? 0 : n_chunks * kChunk);
    const auto *x_chunks_gmem = reinterpret_cast<const uint4 *>(x_gmem + head); // (n_chunks)

    // 1. m = max(x)
    const float x_edge = has_edge ? to_float<kDType>(__ldg(x_gmem + edge)) : -INFINITY;
    float m = fmaxf(kLowest, x_edge);
    for (int i = threadIdx.x; i < n_chunks; i += kThreads) {
        float x_rmem[kChunk];
        unpack_chunk<kDType>(x_rmem, __ldg(x_chunks_gmem + i));
#pragma unroll
        for (const float x : x_rmem) {
            m = fmaxf(m, x);
        }
    }
    m = block_reduce<kWarps>(m, m_smem, [](float a, float b) { return fmaxf(a, b); });

    // 2. l = Σ e^(x - m)
    float l = exponential(x_edge, m); // 0 for a thread without an edge
    for (int i = threadIdx.x; i < n_chunks; i += kThreads) {
        float x_rmem[kChunk];
        unpack_chunk<kDType>(x_rmem, __ldg(x_chunks_gmem + i));
#pragma unroll
        for (const float x : x_rmem) {
            l += exponential(x, m);
        }
    }
    l = block_reduce<kWarps>(l, l_smem, [](float a, float b) { return a + b; });

    // 3. y = e^(x - m) / l
    const float inverse_l = reciprocal_approx(l);
    if (elements_to_boundary(y_gmem) != elements_to_boundary(x_gmem)) {
        // No chunk of x is a chunk of y. Threads that stored a chunk element by element would touch
        // each sector of y up to 8 times. Here neighbouring threads store neighbouring elements,
        // which touches a sector once, and read x again.
        for (int i = threadIdx.x; i < args.width; i += kThreads) {
            const float x = to_float<kDType>(__ldg(x_gmem + i));
            y_gmem[i] = from_float<kDType>(exponential(x, m) * inverse_l);
        }
        return;
    }
    if (has_edge) {
        y_gmem[edge] = from_float<kDType>(exponential(x_edge, m) * inverse_l);
    }
    auto *y_chunks_gmem = reinterpret_cast<uint4 *>(y_gmem + head); // (n_chunks)
    for (int i = threadIdx.x; i < n_chunks; i += kThreads) {
        const uint4 chunk = __ldg(x_chunks_gmem + i);
        store_gmem_16(y_chunks_gmem + i, softmax_chunk<kDType>(chunk, m, inverse_l));
    }
}

} // namespace s2
