#pragma once
// Step 1 of the softmax family: the base. y = softmax(x) along the rows of a matrix.
//
// A thread block takes one row and walks it three times: for the maximum m, for the sum l of
// e^(x - m), and for y = e^(x - m) / l. Neighbouring threads load neighbouring elements, one per
// load, of fp32, bf16 or fp16; all arithmetic is fp32.
//
// The parts
//   1. Loads and stores are coalesced: a warp touches 64 or 128 consecutive bytes.
//   2. Maximum and sum are reduced by shuffles within each warp and by one barrier between warps.
//   3. e^x is one product with log2(e) and one MUFU.EX2; the division is one MUFU.RCP per row.
//
// Results are those of torch.softmax. -inf beside a finite element gives 0. A row with NaN or +inf,
// or of -inf alone, gives NaN: inf - inf is NaN, and so is 0 · (1 / 0).
//
// Why it is slow, in bf16: 4 bytes per element are needed, 2 read and 2 written. 3.35 TB/s of an
// H100 carry 838 billion elements per second, 3.6 per cycle and SM at 1.755 GHz. Four schedulers
// issue 128 thread instructions per cycle, 35 per element. The three loops take 22 per element, of
// which 4 are loads and stores. MUFU has time for 4.4 exponentials per element and computes 2.
//   The second and the third read come from L1, 256 KiB less what is shared, while the rows of an
// SM's 8 thread blocks fit: 8 · 8 KiB at a width of 4096. At 131072 the rows of all thread blocks
// are 132 · 8 · 256 KiB = 277 MB, and L2 holds 50 MB. All three reads then go to DRAM, which moves
// 8 bytes per element instead of 4.
// Expected, of 3.35 TB/s at 4 bytes per element: 60% at a width of 4096, where issue slots and the
// latency of three passes bind; at most 50% at 131072. In fp32, with twice the bytes per
// instruction, 75% at 4096.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of
// torch.softmax in the harmonic mean over widths. 8 warps: 2,628, 0.83. Cost: 32 registers per
// thread, 64 bytes of shared memory per block, 8 blocks per SM.
// benchmark:end
// Verdict: right, at 81% of torch.softmax. At 4096 it reaches 75% of 3.35 TB/s, more than expected:
// unexplained. At 131072 it reaches 37%.
//
// Phases: 1 m, 2 l, 3 y.

#include "elements.cuh"
#include "kernels/rows/arguments.cuh"
#include "numeric.cuh"

namespace s1 {

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

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    softmax_kernel(const __grid_constant__ RowsKernelArgs args) {
    constexpr SoftmaxKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.chunks == 0, "the row stays in registers from s3 on");

    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.n_threads();

    extern __shared__ float smem[];
    float *m_smem = smem, *l_smem = smem + kWarps; // (kWarps) each

    const int64_t row = blockIdx.x;
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + row * args.y_stride;

    // 1. m = max(x)
    float m = kLowest;
    for (int i = threadIdx.x; i < args.width; i += kThreads) {
        m = fmaxf(m, to_float<kDType>(__ldg(x_gmem + i)));
    }
    m = block_reduce<kWarps>(m, m_smem, [](float a, float b) { return fmaxf(a, b); });

    // 2. l = Σ e^(x - m)
    float l = 0.0f;
    for (int i = threadIdx.x; i < args.width; i += kThreads) {
        l += exponential(to_float<kDType>(__ldg(x_gmem + i)), m);
    }
    l = block_reduce<kWarps>(l, l_smem, [](float a, float b) { return a + b; });

    // 3. y = e^(x - m) / l
    const float inverse_l = reciprocal_approx(l);
    for (int i = threadIdx.x; i < args.width; i += kThreads) {
        const float x = to_float<kDType>(__ldg(x_gmem + i));
        y_gmem[i] = from_float<kDType>(exponential(x, m) * inverse_l);
    }
}

} // namespace s1
