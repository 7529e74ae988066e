#pragma once
// A streaming store of 16 bytes under a predicate instead of behind a branch: see predicated.cuh.

#include "flash_attention.cuh"

// Stores a chunk that is not read soon, if it exists: L2 may drop its line before others.
__device__ __forceinline__ void store_gmem_16_streaming_if(bool exists, void *dst_gmem,
                                                           uint4 chunk) {
    asm volatile("{\n\t"
                 ".reg .pred exists;\n\t"
                 "setp.ne.b32 exists, %5, 0;\n\t"
                 "@exists st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};\n\t"
                 "}" ::"l"(dst_gmem),
                 "r"(chunk.x), "r"(chunk.y), "r"(chunk.z), "r"(chunk.w), "r"(int(exists))
                 : "memory");
}
