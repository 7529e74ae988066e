#pragma once
// Plain loads and stores. Shared memory has its own 32-bit addresses, as in ldmatrix.

#include "flash_attention.cuh"

// The first row of this block's batch and head: the grid is (blocks of rows, n_heads, batch).
__device__ __forceinline__ const Element *head_gmem(const void *tensor,
                                                    const TensorStrides &strides) {
    return static_cast<const Element *>(tensor) + blockIdx.z * strides.batch +
           blockIdx.y * strides.head;
}

__device__ __forceinline__ Element *head_gmem(void *tensor, const TensorStrides &strides) {
    return const_cast<Element *>(head_gmem(static_cast<const void *>(tensor), strides));
}

__device__ __forceinline__ uint32_t smem_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void store_smem_4(uint32_t dst_smem, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst_smem), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_smem_4(uint32_t src_smem) {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(src_smem) : "memory");
    return value;
}

__device__ __forceinline__ uint4 load_smem_16(uint32_t src_smem) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(src_smem)
                 : "memory");
    return value;
}

// One store of 16 bytes. The compiler may split the assignment of a uint4 into four.
__device__ __forceinline__ void store_gmem_16(void *dst_gmem, uint4 value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(dst_gmem), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

// A store of data that is used once: it is the first to leave L2 (SASS: STG.E.EF).
__device__ __forceinline__ void store_gmem_16_streaming(void *dst_gmem, uint4 value) {
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(dst_gmem), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}
