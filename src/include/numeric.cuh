#pragma once
// Rounding, exponential and the reductions of a row.

#include "flash_attention.cuh"

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Two fp32 values to one register of two 16-bit elements, rounded to nearest even; `low` comes
// first in memory.
template <DType kDType>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t packed;
    if constexpr (kDType == DType::FP16) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

// P (kRowTiles * 16, kKeyTiles * 8) as mma's A operand. An accumulator has that layout already: two
// neighbouring tiles of it are one fragment.
template <DType kDType, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void round_P(uint32_t (&P_rmem)[kKeyTiles / 2][kRowTiles][4],
                                        const float (&S_rmem)[kRowTiles][kKeyTiles][4]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
            uint32_t *P = &P_rmem[n / 2][i][n % 2 * 2];
            P[0] = pack<kDType>(S_rmem[i][n][0], S_rmem[i][n][1]);
            P[1] = pack<kDType>(S_rmem[i][n][2], S_rmem[i][n][3]);
        }
    }
}

// 2^x in one MUFU.EX2, with subnormals flushed to zero. exp2f() would add a scaling for them, but a
// probability that small cannot change a sum in which the largest term is near 1.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A row of an mma accumulator lies in four neighbouring lanes.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// 1 / x in one MUFU.RCP, within 1 ulp.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2(x) in one MUFU.LG2.
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
