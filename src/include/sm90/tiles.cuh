#pragma once
// The layout of tiles for TMA and wgmma: pieces of 64 columns, with rows of 128 bytes in which
// chunk c of row r stands at c ^ r % 8. The pattern repeats after 1024 bytes, to which pieces are
// aligned. Also functions that turn accumulators into operands or store them in a tile.

#include "elements.cuh"
#include "flash_attention.cuh"
#include "numeric.cuh"

constexpr int kPiece = 64; // columns
constexpr int kRowBytes = kPiece * sizeof(Element);
constexpr int kPatternBytes = 8 * kRowBytes;

constexpr int kWgmmaM = 64, kWgmmaK = 16; // rows of a warpgroup, depth of one wgmma

__host__ __device__ constexpr uint32_t piece_bytes(int rows) {
    return rows * kRowBytes;
}

// The distance from the start of a tile of kRows rows to its k-tile of 16 columns, in the 16-byte
// units of a descriptor: 32 bytes per k-tile inside the 128 of a row, then the next piece.
template <int kRows>
__device__ constexpr uint32_t column_step(int k) {
    return (k / 4 * piece_bytes(kRows) + k % 4 * kWgmmaK * sizeof(Element)) / 16;
}

// The distance from the start of a tile of V to its k-tile of 16 keys, in the same units.
__device__ constexpr uint32_t row_step(int k) {
    return k * kWgmmaK * kRowBytes / 16;
}

// Multiplies each row of accumulators by its factor.
template <int kCount>
__device__ __forceinline__ void scale_rows(float (&D_rmem)[kCount], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        D_rmem[i] *= factor[i / 2 % 2];
    }
}

// Whether no accumulator is infinite or NaN: 0 times these is not 0. The sum of the products runs
// in kChains independent chains.
template <int kChains = 1, int kCount>
__device__ __forceinline__ bool all_finite(const float (&D_rmem)[kCount]) {
    float zeros[kChains] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        zeros[i % kChains] = fmaf(D_rmem[i], 0, zeros[i % kChains]);
    }
#pragma unroll
    for (int i = 1; i < kChains; ++i) {
        zeros[0] += zeros[i];
    }
    return zeros[0] == 0;
}

// Rounds columns 16k … 16k + 15 of accumulators to 16 bits, in the layout of operand A of wgmma.
template <DType kDType, int kCount>
__device__ __forceinline__ void pack_fragment(uint32_t (&A_rmem)[4], const float (&D_rmem)[kCount],
                                              int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        A_rmem[i] = pack<kDType>(D_rmem[8 * k + 2 * i], D_rmem[8 * k + 2 * i + 1]);
    }
}

// Four lanes have 32 columns of a row, packed: lane t has columns 8n + 2t and 8n + 2t + 1 in
// packed[n]. Afterwards it has columns 8t … 8t + 7.
__device__ __forceinline__ void exchange(uint32_t (&packed)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < 4 - bit; i += 3 - bit) { // the pairs (i, i + bit)
            const uint32_t sent = upper ? packed[i] : packed[i + bit];
            const uint32_t got = __shfl_xor_sync(0xffffffff, sent, bit);
            packed[i] = upper ? got : packed[i];
            packed[i + bit] = upper ? packed[i + bit] : got;
        }
    }
}

// Stores accumulators (16, 16) of a warp, packed in 16 bits, to rows row … row + 15 and columns
// 16k … 16k + 15 of a tile of kRows rows. Lane n gives the address of row n % 16, of the left or
// right 8 columns as n / 16 is 0 or 1.
template <int kRows>
__device__ __forceinline__ void store_fragment(uint32_t tile_smem, int row, int k,
                                               const uint32_t (&packed)[4]) {
    const int lane = threadIdx.x % 32;
    row += lane % 16;
    const int chunk = (k % 4 * 2 + lane / 16) ^ row % 8;
    const uint32_t address =
        tile_smem + k / 4 * piece_bytes(kRows) + row * kRowBytes + chunk * kChunkBytes;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                 : "memory");
}
