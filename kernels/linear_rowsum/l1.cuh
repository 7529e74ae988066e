#pragma once
// Step 1 of the linear_rowsum family: the base. P = x @ W^T + b, then y_i = Σ_o P_io.
//
// Two launches do what F.linear(x, W, b).sum(-1) does. product_kernel is a matrix product on the
// CUDA cores, which computes fp32, bf16 and fp16 in the same way: all sums are fp32. It rounds P to
// the dtype and stores it, and sum_kernel adds up its rows.
//
// The parts
//   1. A thread block of 256 threads has a tile of 64 x 64 of P. 16 input features of 64 rows of x
//      and of W at a time go through shared memory, converted to fp32.
//   2. A thread has 4 x 4 elements of the tile, 16 FFMA for two loads of 16 bytes from shared
//      memory. Neighbouring threads store neighbouring groups of 4 elements.
//   3. sum_kernel has a warp per row of P, and adds by a tree over its lanes.
//
// Why it is slow, at 4096 rows of x and of W with 4096 features, in bf16: 2 · 4096³ = 137 GFLOP.
// 132 SMs with 128 FFMA per cycle at 1.755 GHz have 59 TFLOP/s, on which these take 2.3 ms; a tile
// of this size keeps the FFMA pipe busy for half of the cycles at best, since each warp waits for
// loads and barriers. P has 33.5 MB, which are written and read once more: 20 µs at 3.35 TB/s.
//   Tensor cores would take 139 µs at their peak of 989 TFLOP/s for the same product. They are not
// what this family is about: none of these operations is needed (l3).
// Expected on an H100 at this size: 5 ms; x and W, 67 MB, are read at 0.4% of 3.35 TB/s.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at features 4096, and share of
// F.linear(x, W, b).sum(-1) in the harmonic mean over features. 8 warps: 10, 0.03. Cost: 47
// registers per thread, 8 KiB of shared memory per block, 5 blocks per SM.
// benchmark:end
// Verdict: 6.6 ms at 4096 on an H200, 36 times PyTorch's time.
//
// Phases of product_kernel: 1 tiles of x and W, 2 P += x @ W^T, 3 P to memory.

#include "elements.cuh"
#include "kernels/linear_rowsum/arguments.cuh"

namespace l1 {

constexpr int kTile = 64; // rows of x and of W
constexpr int kDepth = 16; // input features at a time
constexpr int kPitch = kTile + 4; // 16 bytes more: rows begin at different banks
constexpr int kOwn = 4; // rows and columns of a thread

// 64 rows of x or W, kDepth features from `feature` on, to shared memory as (kDepth, kPitch). Zeros
// stand for what lies outside. 16 lanes load 16 neighbouring elements of a row.
template <DType kDType>
__device__ __forceinline__ void load_tile(float (&tile_smem)[kDepth][kPitch], const void *matrix,
                                          int64_t stride, int first_row, int rows, int feature,
                                          int features) {
    const int k = threadIdx.x % kDepth;
#pragma unroll
    for (int i = threadIdx.x / kDepth; i < kTile; i += 256 / kDepth) {
        const auto *gmem =
            static_cast<const ElementOf<kDType> *>(matrix) + (first_row + i) * stride + feature + k;
        const bool is_inside = first_row + i < rows && feature + k < features;
        tile_smem[k][i] = is_inside ? to_float<kDType>(__ldg(gmem)) : 0.0f;
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    product_kernel(const __grid_constant__ LinearRowsumKernelArgs args) {
    constexpr LinearRowsumKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_threads() == (kTile / kOwn) * (kTile / kOwn), "a thread has 4 x 4 of P");
    constexpr DType kDType = cfg.dtype;

    extern __shared__ float smem[];
    auto &x_smem = *reinterpret_cast<float (*)[kDepth][kPitch]>(smem);
    auto &W_smem = *reinterpret_cast<float (*)[kDepth][kPitch]>(smem + kDepth * kPitch);

    const int tiles = (args.out_features + kTile - 1) / kTile;
    const int first_row = blockIdx.x / tiles * kTile, first_out = blockIdx.x % tiles * kTile;
    const int own_row = threadIdx.x / (kTile / kOwn) * kOwn; // in the tile
    const int own_out = threadIdx.x % (kTile / kOwn) * kOwn;

    float P_rmem[kOwn][kOwn] = {};
    for (int feature = 0; feature < args.in_features; feature += kDepth) {
        // 1. tiles of x and W
        __syncthreads(); // no thread reads the tiles before these any more
        load_tile<kDType>(x_smem, args.x, args.x_stride, first_row, args.rows, feature,
                          args.in_features);
        load_tile<kDType>(W_smem, args.weight, args.weight_stride, first_out, args.out_features,
                          feature, args.in_features);
        __syncthreads(); // a thread reads what others have written

        // 2. P += x @ W^T
#pragma unroll
        for (int k = 0; k < kDepth; ++k) {
            const float4 x = *reinterpret_cast<const float4 *>(&x_smem[k][own_row]);
            const float4 W = *reinterpret_cast<const float4 *>(&W_smem[k][own_out]);
            const float x_rmem[kOwn] = {x.x, x.y, x.z, x.w};
            const float W_rmem[kOwn] = {W.x, W.y, W.z, W.w};
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
#pragma unroll
                for (int o = 0; o < kOwn; ++o) {
                    P_rmem[i][o] = fmaf(x_rmem[i], W_rmem[o], P_rmem[i][o]);
                }
            }
        }
    }

    // 3. P to memory
    auto *P_gmem = static_cast<ElementOf<kDType> *>(args.products);
    const auto *bias_gmem = static_cast<const ElementOf<kDType> *>(args.bias);
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
        const int out = first_out + own_out + o;
        const bool is_inside = out < args.out_features;
        const float b = bias_gmem != nullptr && is_inside
                            ? to_float<kDType>(__ldg(bias_gmem + out * args.bias_stride))
                            : 0.0f;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int row = first_row + own_row + i;
            if (is_inside && row < args.rows) {
                P_gmem[int64_t(row) * args.out_features + out] =
                    from_float<kDType>(P_rmem[i][o] + b);
            }
        }
    }
}

// y_i = Σ_o P_io, with a warp per row.
template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    sum_kernel(const __grid_constant__ LinearRowsumKernelArgs args) {
    constexpr LinearRowsumKernelConfig cfg = Kernels::value;
    constexpr DType kDType = cfg.dtype;

    const int lane = threadIdx.x % 32;
    const int row = blockIdx.x * cfg.n_warps + threadIdx.x / 32;
    if (row >= args.rows) {
        return;
    }
    const auto *P_gmem =
        static_cast<const ElementOf<kDType> *>(args.products) + int64_t(row) * args.out_features;
    float y = 0.0f;
    for (int out = lane; out < args.out_features; out += 32) {
        y += to_float<kDType>(P_gmem[out]);
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        y += __shfl_xor_sync(0xffffffff, y, lanes);
    }
    if (lane == 0) {
        static_cast<ElementOf<kDType> *>(args.y)[row * args.y_stride] = from_float<kDType>(y);
    }
}

} // namespace l1
