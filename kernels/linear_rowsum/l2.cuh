#pragma once
// Step 2 of the linear_rowsum family: the sum in the epilogue. Parent: l1.
//
// What changed
//   1. A thread adds its 4 elements of a row of P as soon as they are complete, in fp32. 16 threads
//      have a row of the tile; a tree over 16 lanes adds up their sums.
//   2. P is not stored. product_kernel stores one fp32 number per row and tile of W, and sum_kernel
//      adds these in the order of the tiles, a thread per row. The bits of y do not depend on the
//      order in which thread blocks end.
//
// Why: at 4096 rows of x and of W P has 33.5 MB in bf16. They were written and read once more, 20
// µs at 3.35 TB/s of an H100. The sums of 64 tiles have 1 MB. P is not rounded, either, so that y
// has the error of one rounding.
//   The product stays, 137 GFLOP, and with it all but a hundredth of the time.
// Expected: 20 µs less of 5 ms, within noise.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at features 4096, and share of
// F.linear(x, W, b).sum(-1) in the harmonic mean over features. 8 warps: 10, 0.03. Cost: 63
// registers per thread, 8 KiB of shared memory per block, 4 blocks per SM.
// benchmark:end
// Verdict: 4% slower than l1 on an H200, not 20 us faster: the sum takes registers, and a block of
// five.
//
// Phases of product_kernel: 1 tiles of x and W, 2 P += x @ W^T, 3 sums of P's rows.

#include "elements.cuh"
#include "kernels/linear_rowsum/arguments.cuh"

namespace l2 {

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

    // 3. sums of P's rows, columns outside of W left out
    const auto *bias_gmem = static_cast<const ElementOf<kDType> *>(args.bias);
    float y_rmem[kOwn] = {};
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
        const int out = first_out + own_out + o;
        const float b = bias_gmem != nullptr && out < args.out_features
                            ? to_float<kDType>(__ldg(bias_gmem + out * args.bias_stride))
                            : 0.0f;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            y_rmem[i] += P_rmem[i][o] + b; // beyond the last row of W, 0 + 0
        }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int lanes = 1; lanes < kTile / kOwn; lanes *= 2) {
            y_rmem[i] += __shfl_xor_sync(0xffffffff, y_rmem[i], lanes);
        }
        const int row = first_row + own_row + i;
        if (own_out == 0 && row < args.rows) {
            args.partial[int64_t(first_out / kTile) * args.rows + row] = y_rmem[i];
        }
    }
}

// y_i is the sum of its partial sums, with a thread per row.
template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    sum_kernel(const __grid_constant__ LinearRowsumKernelArgs args) {
    constexpr LinearRowsumKernelConfig cfg = Kernels::value;
    constexpr DType kDType = cfg.dtype;

    const int row = blockIdx.x * cfg.n_threads() + threadIdx.x;
    if (row >= args.rows) {
        return;
    }
    float y = 0.0f;
    for (int tile = 0; tile * kTile < args.out_features; ++tile) {
        y += args.partial[int64_t(tile) * args.rows + row];
    }
    static_cast<ElementOf<kDType> *>(args.y)[row * args.y_stride] = from_float<kDType>(y);
}

} // namespace l2
