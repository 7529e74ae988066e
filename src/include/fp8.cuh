#pragma once
// Conversion of e4m3, the fp8 of 4 exponent bits, to the elements that `mma` multiplies.

#include "elements.cuh"
#include "flash_attention.cuh"
#include "numeric.cuh"

// Two e4m3, the lower bytes, to fp16 or bf16 in the same order.
template <DType kDType>
__device__ __forceinline__ uint32_t widen(uint32_t bytes) {
    uint32_t halves;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(Element(bytes)));
#else
    bytes = __byte_perm(bytes, 0, 0x4140); // a byte in each half
    const uint32_t size = bytes & 0x007f007f;
    // 0x7f is NaN: one more sets bit 7, and so all bits of fp16's exponent
    const uint32_t number = size | ((size + 0x00010001) & 0x00800080);
    // times 2^8, since the exponents of fp16 begin 8 lower
    asm("mul.rn.f16x2 %0, %1, %2;"
        : "=r"(halves)
        : "r"(number << 7 | (bytes & 0x00800080) << 8), "r"(0x5c005c00));
#endif
    if constexpr (kDType == DType::FP16) {
        return halves;
    }
    return pack<kDType>(to_float<DType::FP16>(Element(halves)),
                        to_float<DType::FP16>(Element(halves >> 16)));
}
