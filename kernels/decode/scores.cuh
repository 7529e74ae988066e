#pragma once
// Scores in registers. Those of wgmma are transposed: rows of S^T and P^T are keys, rows of O^T are
// columns of V, and columns are queries.

#include "elements.cuh"
#include "kernels/decode/queries.cuh"
#include "numeric.cuh"
#include "sm90/roles.cuh"
#include "sm90/tiles.cuh"

template <int kCount>
__device__ __forceinline__ void fill(float (&x_rmem)[kCount], float value) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        x_rmem[i] = value;
    }
}

// S = tanh(S · scale_in_cap) with a softcap. Masks come after it.
template <int kCount>
__device__ __forceinline__ void limit(float (&S_rmem)[kCount], float scale_in_cap) {
    if (scale_in_cap != 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            asm("tanh.approx.f32 %0, %1;" : "=f"(S_rmem[i]) : "f"(S_rmem[i] * scale_in_cap));
        }
    }
}

// The column of a lane's accumulator i: queries 8n + 2t and 8n + 2t + 1. `of_lane` counts those
// that a lane has.
__device__ __forceinline__ constexpr int of_lane(int i) {
    return i / 4 * 2 + i % 2;
}
__device__ __forceinline__ int column_of(int own) {
    return own / 2 * 8 + threadIdx.x % 4 * 2 + own % 2;
}

// Logits of keys that a query does not see become -infinity. `key`: the warpgroup's first.
template <int kCount, typename Rows>
__device__ __forceinline__ void hide(float (&S_rmem)[kCount], const Rows &queries, int key,
                                     const DecodeKernelArgs &args) {
    key += threadIdx.x / 32 % 4 * (kWgmmaM / 4) + threadIdx.x % 32 / 4; // of accumulators 0 and 1
#pragma unroll
    for (int own = 0; own < kCount / 2; ++own) {
        const int row = column_of(own);
        const int first = queries.begin_of(row, args), end = queries.end_of(row, args);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float &S = S_rmem[own / 2 * 4 + half * 2 + own % 2];
            const int at = key + half * 8;
            S = at >= first && at < end ? S : -INFINITY;
        }
    }
}

// Combines values of a lane's columns over all rows of a warpgroup: by shuffles over the lanes of a
// warp, and over the warps through shared memory (4, 2 · kCount). The caller sees to it that the
// warps have read what they exchanged before.
template <int kCount, typename Combine>
__device__ __forceinline__ void over_rows(float (&values)[kCount], float *exchange, int barrier,
                                          Combine combine) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int own = 0; own < kCount; ++own) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
            values[own] = combine(values[own], __shfl_xor_sync(0xffffffff, values[own], lanes));
        }
        if (lane < 4) {
            exchange[warp * 4 * kCount + column_of(own)] = values[own];
        }
    }
    named_sync(barrier, kWarpgroup); // a warp reads what all four have written
#pragma unroll
    for (int own = 0; own < kCount; ++own) {
        const float *of_column = exchange + column_of(own);
        values[own] = combine(combine(of_column[0], of_column[4 * kCount]),
                              combine(of_column[8 * kCount], of_column[12 * kCount]));
    }
}

// m, the maximum · scale of a query, and l, this lane's part of the sum of P = 2^(S · scale - m).
// Both are for the queries of a lane's columns. P comes in the place of S, and O follows m.
template <int kCount>
struct Statistics {
    float m[kCount / 2], l[kCount / 2];

    __device__ __forceinline__ Statistics() {
        fill(m, -INFINITY);
        fill(l, 0);
    }
    template <int kTiles>
    __device__ __forceinline__ void update(float (&S_rmem)[kCount], float (&O_rmem)[kTiles][kCount],
                                           float scale, float *exchange, int barrier) {
        float block_m[kCount / 2], rescale[kCount / 2];
#pragma unroll
        for (int own = 0; own < kCount / 2; ++own) {
            const int i = own / 2 * 4 + own % 2;
            block_m[own] = fmaxf(S_rmem[i], S_rmem[i + 2]);
        }
        over_rows(block_m, exchange, barrier, [](float x, float y) { return fmaxf(x, y); });
#pragma unroll
        for (int own = 0; own < kCount / 2; ++own) {
            const float new_m = fmaxf(block_m[own] * scale, m[own]);
            const float subtracted = new_m == -INFINITY ? 0 : new_m; // it has seen no key
            rescale[own] = exp2_approx(m[own] - subtracted);
            m[own] = new_m;
            const int i = own / 2 * 4 + own % 2;
            S_rmem[i] = exp2_approx(fmaf(S_rmem[i], scale, -subtracted));
            S_rmem[i + 2] = exp2_approx(fmaf(S_rmem[i + 2], scale, -subtracted));
            l[own] = l[own] * rescale[own] + S_rmem[i] + S_rmem[i + 2];
        }
#pragma unroll
        for (int i = 0; i < kTiles * kCount; ++i) {
            O_rmem[i / kCount][i % kCount] *= rescale[of_lane(i % kCount)];
        }
    }
};

// P^T of a warp's 16 keys: registers → shared, as P (B_r, 64). Lane n gives the address of row n %
// 8 of the n / 8-th of two matrices (8, 8), which stmatrix transposes.
template <DType kDType, int kCount>
__device__ __forceinline__ void store_P(uint32_t P_smem, const float (&P_rmem)[kCount]) {
    const int row = threadIdx.x % 8;
    const int chunk = (threadIdx.x / 32 % 4 * 2 + threadIdx.x / 8 % 2) ^ row;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                         P_smem + (8 * n + row) * kRowBytes + chunk * kChunkBytes),
                     "r"(pack<kDType>(P_rmem[4 * n], P_rmem[4 * n + 1])),
                     "r"(pack<kDType>(P_rmem[4 * n + 2], P_rmem[4 * n + 3]))
                     : "memory");
    }
}
