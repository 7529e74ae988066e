#pragma once
// Parts of the overlap family's kernels from o6 on that no step is about.

#include "kernels/overlap/arguments.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

// The indices of block and thread, read anew. Values that follow from the usual ones would be
// computed before a loop, and would take registers in it; the loops here have none left.
__device__ __forceinline__ int block_index_anew() {
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

__device__ __forceinline__ int thread_index_anew() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// Columns of S from `visible` on, or before it, become -infinity; if by row, from one column more
// on in each next row of the thread block. A lane has columns 2t and 2t + 1 of every eight, of rows
// g and g + 8 of each row tile.
template <bool kByRow, bool kBefore, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void hide_columns(float (&S_rmem)[kRowTiles][kKeyTiles][4],
                                             int visible) {
    const int thread = thread_index_anew(), lane = thread % 32;
    const int row = thread / 32 * kRowTiles * kMmaM + lane / 4;
    visible += (kByRow ? row : 0) - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) { // 8 rows each
#pragma unroll
        for (int n = 0; n < kKeyTiles * 2; ++n) {
            const int column = n / 2 * kMmaN + n % 2 - (kByRow ? i * 8 : 0);
            float &S = S_rmem[i / 2][n / 2][i % 2 * 2 + n % 2];
            S = (column < visible) != kBefore ? S : -INFINITY;
        }
    }
}

// S = tanh(S · scale), each in one MUFU.TANH.
template <int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void limit(float (&S_rmem)[kRowTiles][kKeyTiles][4], float scale) {
#pragma unroll
    for (int i = 0; i < kRowTiles * kKeyTiles * 4; ++i) {
        float &S = S_rmem[i / (kKeyTiles * 4)][i / 4 % kKeyTiles][i % 4];
        asm("tanh.approx.f32 %0, %1;" : "=f"(S) : "f"(S * scale));
    }
}

// k-tile k of P = 2^(S · scale - scaled_m), in the layout of mma's A operand. If asked for, exact_l
// takes in this lane's part of the sums of P, which is not yet rounded.
template <DType kDType, bool kSums, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void
exponentiate(uint32_t (&P_rmem)[kRowTiles][4], float (&exact_l)[kRowTiles][2],
             const float (&S_rmem)[kRowTiles][kKeyTiles][4], float scale,
             const float (&scaled_m)[kRowTiles][2], int k) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float *S = &S_rmem[i][2 * k + n][2 * half];
                const float P0 = exp2_approx(fmaf(S[0], scale, -scaled_m[i][half]));
                const float P1 = exp2_approx(fmaf(S[1], scale, -scaled_m[i][half]));
                P_rmem[i][n * 2 + half] = pack<kDType>(P0, P1);
                if constexpr (kSums) {
                    exact_l[i][half] += P0 + P1;
                }
            }
        }
    }
}

// Thread blocks that an SM is to hold. Warps with 16 rows and 64 keys need at most 168 registers
// per thread: twelve warps per SM. Warps with larger tiles need up to 255: eight warps. Without a
// bound ptxas takes too many in one version, and in another so few that it gives up overlap.
constexpr int min_blocks(OverlapKernelConfig cfg) {
    const bool is_small = cfg.B_r / cfg.n_warps == kMmaM && cfg.B_c <= 64 && cfg.d_head <= 128;
    const int warps = is_small ? 12 : 8;
    return warps > cfg.n_warps ? warps / cfg.n_warps : 1;
}
