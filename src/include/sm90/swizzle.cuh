#pragma once
// Tiles as TMA and wgmma have them: pieces of 64 columns, rows of 128 bytes in which chunk c of row
// r stands at c ^ r % 8. The pattern repeats after 1024 bytes, to which pieces are aligned.

#include "flash_attention.cuh"

constexpr int kPiece = 64; // columns
constexpr int kRowBytes = kPiece * sizeof(Element);
constexpr int kChunkBytes = 16;
constexpr int kPatternBytes = 8 * kRowBytes;

__host__ __device__ constexpr uint32_t piece_bytes(int rows) {
    return rows * kRowBytes;
}

// Accumulators (16, 16) of a warp, d[0] to d[7] of each lane, in 16 bits, to rows row … row + 15
// and columns 16k … 16k + 15 of a tile of kRows rows. Lane l names row l % 16 of column half l
// / 16.
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
