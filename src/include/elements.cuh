#pragma once
// Elements of 16 or 32 bits as memory holds them, and their conversion to and from the fp32 values
// that kernels compute with.

#include "flash_attention.cuh"
#include "numeric.cuh"

#include <type_traits>

template <DType kDType>
using ElementOf = std::conditional_t<kDType == DType::FP32, float, Element>;

constexpr int kChunkBytes = 16; // the widest load or store of a thread
template <DType kDType>
constexpr int kChunkElements = kChunkBytes / int(sizeof(ElementOf<kDType>)); // 8, or 4 of fp32

template <DType kDType>
__device__ __forceinline__ float to_float(ElementOf<kDType> element) {
    if constexpr (kDType == DType::FP32) {
        return element;
    } else if constexpr (kDType == DType::BF16) {
        return __uint_as_float(uint32_t(element) << 16); // bf16 is the upper half of fp32
    } else {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(element));
        return x;
    }
}

// Rounds to nearest even.
template <DType kDType>
__device__ __forceinline__ ElementOf<kDType> from_float(float x) {
    if constexpr (kDType == DType::FP32) {
        return x;
    } else {
        return Element(pack<kDType>(x, 0.0f));
    }
}

// Converts the elements of a chunk, in the order of memory.
template <DType kDType>
__device__ __forceinline__ void unpack_chunk(float (&x_rmem)[kChunkElements<kDType>], uint4 chunk) {
    constexpr int kPerWord = kChunkElements<kDType> / 4;
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (kDType == DType::FP32) {
            x_rmem[i] = __uint_as_float(words[i]);
        } else {
            x_rmem[kPerWord * i] = to_float<kDType>(Element(words[i]));
            x_rmem[kPerWord * i + 1] = to_float<kDType>(Element(words[i] >> 16));
        }
    }
}

// The inverse of unpack_chunk; rounds to nearest even.
template <DType kDType>
__device__ __forceinline__ uint4 pack_chunk(const float (&x_rmem)[kChunkElements<kDType>]) {
    constexpr int kPerWord = kChunkElements<kDType> / 4;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (kDType == DType::FP32) {
            words[i] = __float_as_uint(x_rmem[i]);
        } else {
            words[i] = pack<kDType>(x_rmem[kPerWord * i], x_rmem[kPerWord * i + 1]);
        }
    }
    return {words[0], words[1], words[2], words[3]};
}

// Number of elements before the first that lies at a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ int elements_to_boundary(const T *element) {
    return int(-reinterpret_cast<uintptr_t>(element) % kChunkBytes / sizeof(T));
}
