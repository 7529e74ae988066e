#pragma once
// The way of P from the warpgroup of dV to that of dK.

#include "elements.cuh"
#include "memory.cuh"
#include "numeric.cuh"

__device__ __forceinline__ void store_smem_16(uint32_t dst_smem, const uint32_t (&value)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst_smem), "r"(value[0]),
                 "r"(value[1]), "r"(value[2]), "r"(value[3])
                 : "memory");
}

// dS = P · dP in the place of dP, of queries 16k … 16k + 15, whose P a thread has packed in 16
// bits: P of 8k + 2i and 8k + 2i + 1 in the i-th of four words.
template <DType kDType, int kCount>
__device__ __forceinline__ void weigh(const uint4 &P, float (&dP_rmem)[kCount], int k) {
    const uint32_t words[4] = {P.x, P.y, P.z, P.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        dP_rmem[8 * k + i] *= to_float<kDType>(Element(words[i / 2] >> i % 2 * 16));
    }
}
