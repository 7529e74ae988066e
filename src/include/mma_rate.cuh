#pragma once
// The rate at which the tensor cores take mma.sync: products of registers, back to back. No kernel
// that is built on this instruction can exceed it.
//
// A warp keeps the accumulators of a 32 x 32 tile, eight of mma's, so that an mma waits for none of
// the seven before it. Operands differ from one mma to the next, as they do in attention: a GPU
// that multiplies zeros or repeats its operands draws less power and clocks higher.

#include "mma.cuh"

namespace mma_rate {

constexpr int kThreads = 128;
constexpr int kBlocksPerSM = 4; // 16 warps per SM, four per tensor core
constexpr int kRowTiles = 2;
constexpr int kColumnTiles = 4;
constexpr int kUnroll = 8; // 64 mma per pass, beside three instructions of the loop itself

// Floating-point operations of one thread block in one iteration.
constexpr int64_t kOperations =
    int64_t{kThreads / 32} * kRowTiles * kColumnTiles * 2 * kMmaM * kMmaN * kMmaK;

// Two 16-bit numbers from 1 to 2 in absolute value, their signs and mantissas from a hash of the
// lane and `index`: sums of their products stay finite.
template <DType kDType>
__device__ __forceinline__ uint32_t operand(int index) {
    const uint32_t hash = (threadIdx.x * 8 + index + 1) * 2654435761u;
    constexpr uint32_t kOne = kDType == DType::FP16 ? 0x3c003c00u : 0x3f803f80u;
    constexpr uint32_t kVaried = kDType == DType::FP16 ? 0x83ff83ffu : 0x807f807fu;
    return kOne | ((hash ^ hash >> 13) & kVaried);
}

// Every thread writes the sum of its accumulators to sums (gridDim.x, kThreads), so that nothing is
// optimised away. Except for rounding it is a multiple of `iterations`.
template <DType kDType>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM) loop(float *sums, int iterations) {
    uint32_t A_rmem[kRowTiles][4], B_rmem[kColumnTiles][2];
    float D_rmem[kRowTiles][kColumnTiles][4] = {};
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            A_rmem[i][r] = operand<kDType>(i * 4 + r);
        }
    }
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            B_rmem[j][r] = operand<kDType>(1024 + j * 2 + r);
        }
    }
#pragma unroll kUnroll
    for (int n = 0; n < iterations; ++n) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int j = 0; j < kColumnTiles; ++j) {
                mma_m16n8k16<kDType>(D_rmem[i][j], A_rmem[i], B_rmem[j][0], B_rmem[j][1]);
            }
        }
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                sum += D_rmem[i][j][r];
            }
        }
    }
    sums[blockIdx.x * kThreads + threadIdx.x] = sum;
}

} // namespace mma_rate
