#pragma once
// Loads and stores of 16 bytes under a predicate instead of behind a branch. ptxas moves a load
// behind a branch down to the block that uses it, to save registers, and then few are in flight.

#include "flash_attention.cuh"

// A chunk of read-only data, or `otherwise` if it does not exist.
__device__ __forceinline__ uint4 load_gmem_16_if(bool exists, const void *src_gmem,
                                                 uint4 otherwise = {}) {
    asm volatile("{\n\t"
                 ".reg .pred exists;\n\t"
                 "setp.ne.b32 exists, %5, 0;\n\t"
                 "@exists ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n\t"
                 "}"
                 : "+r"(otherwise.x), "+r"(otherwise.y), "+r"(otherwise.z), "+r"(otherwise.w)
                 : "l"(src_gmem), "r"(int(exists)));
    return otherwise;
}

// The same for data that is read once: it does not stay in L1. NVRTC may load a default argument of
// this type from memory, so that there is none.
__device__ __forceinline__ uint4 load_gmem_16_once_if(bool exists, const void *src_gmem,
                                                      uint4 otherwise) {
    asm volatile("{\n\t"
                 ".reg .pred exists;\n\t"
                 "setp.ne.b32 exists, %5, 0;\n\t"
                 "@exists ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n\t"
                 "}"
                 : "+r"(otherwise.x), "+r"(otherwise.y), "+r"(otherwise.z), "+r"(otherwise.w)
                 : "l"(src_gmem), "r"(int(exists)));
    return otherwise;
}

// Stores a chunk if it exists.
__device__ __forceinline__ void store_gmem_16_if(bool exists, void *dst_gmem, uint4 chunk) {
    asm volatile("{\n\t"
                 ".reg .pred exists;\n\t"
                 "setp.ne.b32 exists, %5, 0;\n\t"
                 "@exists st.global.v4.b32 [%0], {%1, %2, %3, %4};\n\t"
                 "}" ::"l"(dst_gmem),
                 "r"(chunk.x), "r"(chunk.y), "r"(chunk.z), "r"(chunk.w), "r"(int(exists))
                 : "memory");
}
