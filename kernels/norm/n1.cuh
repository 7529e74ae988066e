#pragma once
// Step 1 of the layer_norm family: the base. y = (x - mean) · rstd · weight + bias along rows.
//
// A thread block takes one row and walks it three times: for the mean, for the variance, which is
// the mean of (x - mean)², and for y. rstd is 1 / sqrt(variance + eps). Neighbouring threads load
// neighbouring elements, one per load, of fp32, bf16 or fp16; all arithmetic is fp32.
//
// The parts
//   1. Loads and stores are coalesced: a warp touches 64 or 128 consecutive bytes.
//   2. Sums are reduced by shuffles within each warp and by one barrier between warps.
//   3. weight and bias are the same for all rows, so that they come from L1 or L2.
//   4. mean and rstd are stored if a call asks for them, as the backward pass needs them.
//
// The variance takes a pass of its own. One pass could sum x and x² together, and the variance is
// their mean of x² less mean². With a mean of 1000 and a deviation of 1 that is the difference of
// 1,000,001 and 1,000,000, and fp32 has steps of 0.0625 there: at most one digit is left.
//   The mean is a quotient and not a product with 1 / width, which is rounded: a row of one value
// would have another mean than that, and rstd is 316 there, 1 / sqrt(eps).
//
// Results are those of torch.nn.functional.layer_norm. NaN or infinity in a row gives NaN
// throughout.
//
// Why it is slow, in bf16: 4 bytes per element are needed, 2 read and 2 written. 3.35 TB/s of an
// H100 carry 838 billion elements per second, 3.6 per cycle and SM at 1.755 GHz. Four schedulers
// issue 128 thread instructions per cycle, 35 per element. The three loops have 6 loads and stores
// per element, since weight and bias are read, too. The simulator counts 55 PTX instructions per
// element at a width of 4096, of which ptxas removes the moves.
//   At a width of 131072 the rows of all thread blocks are 132 · 8 · 256 KiB = 277 MB, and L2 holds
// 50 MB. All three reads of x then go to DRAM, which moves 8 bytes per element instead of 4.
// Expected, of 3.35 TB/s at 4 bytes per element: 50% at a width of 4096, where issue slots bind; at
// most 50% at 131072.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of PyTorch's
// layer_norm or rms_norm in the harmonic mean over widths. 8 warps: 2,321, 0.76. Cost: 32
// registers per thread, 64 bytes of shared memory per block, 8 blocks per SM.
// benchmark:end
// Verdict: 55% of a copy's speed at a width of 4096 on an H200, and 31% at 131072.
//
// Phases: 1 mean, 2 rstd, 3 y.

#include "elements.cuh"
#include "kernels/norm/arguments.cuh"
#include "numeric.cuh"

namespace n1 {

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

    extern __shared__ float smem[];
    float *mean_smem = smem, *variance_smem = smem + kWarps; // (kWarps) each

    const int64_t row = blockIdx.x;
    const int thread = threadIdx.x; // of those that have the row
    const int width = args.width;
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + row * args.y_stride;
    const auto *weight_gmem = static_cast<const ElementOf<kDType> *>(args.weight); // (width)
    const auto *bias_gmem = static_cast<const ElementOf<kDType> *>(args.bias); // (width)

    // 1. mean = Σ x / width
    float sum = 0.0f;
    for (int i = thread; i < width; i += kThreads) {
        sum += to_float<kDType>(__ldg(x_gmem + i));
    }
    const float mean = block_sum<kWarps>(sum, mean_smem) / width;

    // 2. rstd = 1 / sqrt(Σ (x - mean)² / width + eps)
    float squares = 0.0f;
    for (int i = thread; i < width; i += kThreads) {
        const float centred = to_float<kDType>(__ldg(x_gmem + i)) - mean;
        squares = fmaf(centred, centred, squares);
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
    for (int i = thread; i < width; i += kThreads) {
        const float x = to_float<kDType>(__ldg(x_gmem + i));
        const float weight = weight_gmem ? to_float<kDType>(__ldg(weight_gmem + i)) : 1.0f;
        const float bias = bias_gmem ? to_float<kDType>(__ldg(bias_gmem + i)) : 0.0f;
        y_gmem[i] = from_float<kDType>(fmaf((x - mean) * rstd, weight, bias));
    }
}

} // namespace n1
