#pragma once
// Elements of a chunk in registers for another pass over them.

#include "elements.cuh"

// unpack_chunk for another pass over a chunk, where `zero` is 0 and the compiler does not know it.
// Else it would unpack a chunk once, and keep 8 values instead of 4 words.
template <DType kDType>
__device__ __forceinline__ void unpack_chunk_again(float (&x_rmem)[kChunkElements<kDType>],
                                                   uint4 chunk, uint32_t zero) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    if constexpr (kDType == DType::BF16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) { // bytes of the word, behind two bytes of 0
            x_rmem[2 * i] = __uint_as_float(__byte_perm(words[i], 0, 0x1044 ^ zero));
            x_rmem[2 * i + 1] = __uint_as_float(__byte_perm(words[i], 0, 0x3244 ^ zero));
        }
    } else {
        unpack_chunk<kDType>(x_rmem,
                             {words[0] ^ zero, words[1] ^ zero, words[2] ^ zero, words[3] ^ zero});
    }
}
