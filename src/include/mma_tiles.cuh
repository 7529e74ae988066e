#pragma once
// Tiles of Q, K, V and dO for `mma.sync`: their place in shared memory, the copies of a thread, the
// fragments of mma in them, and a product of fragments.

#include "cp_async.cuh"
#include "elements.cuh"
#include "mma.cuh"

constexpr int kChunk = 8; // elements in 16 bytes: one copy of a thread, one row of ldmatrix
constexpr int kPiece = 64; // columns of a piece: rows of 128 bytes, all 32 banks once
constexpr int kThreadsPerRow = kPiece / kChunk;

// Columns of a tile's pieces: 64, or 32 for a head size that 64 does not divide.
__device__ constexpr int piece_columns(int d_head) {
    return d_head % kPiece ? kPiece / 2 : kPiece;
}

// Byte offset of (row, col) in a piece of a tile in shared memory: rows of 128 bytes. The row
// permutes its 16-byte chunks, so that the chunks of one column in 8 rows lie in all 32 banks. Rows
// of 64 bytes take turns in the two halves of the banks, so that each two permute alike.
template <int kColumns = kPiece>
__device__ __forceinline__ uint32_t smem_offset(int row, int col) {
    const int chunk = col / kChunk ^ row / (kPiece / kColumns) % (kColumns / kChunk);
    return (row * kColumns + chunk * kChunk + col % kChunk) * sizeof(Element);
}

// The pieces of a tile of kRows rows lie one after the other.
template <int kRows, int kColumns = kPiece>
__device__ constexpr int piece_offset(int piece) {
    return piece * kRows * kColumns * int(sizeof(Element));
}

// Offset of a thread's part of a tile, in elements. 8 neighbouring threads share the 128 bytes of a
// row in one piece, and copy the same columns of the other pieces; 4 threads share 64 bytes.
template <int kColumns = kPiece>
__device__ __forceinline__ int64_t thread_offset(int64_t row_stride) {
    constexpr int kThreadsPerRow = kColumns / kChunk;
    return threadIdx.x / kThreadsPerRow * row_stride + threadIdx.x % kThreadsPerRow * kChunk;
}

// The first row of the batch and head of K or V that this block's head of Q uses.
__device__ __forceinline__ const Element *
kv_head_gmem(const void *tensor, const TensorStrides &strides, int heads_per_kv) {
    return static_cast<const Element *>(tensor) + blockIdx.z * strides.batch +
           blockIdx.y / heads_per_kv * strides.head;
}

// Starts the copy of the (kRows, d_head) tile at row first_row of X; X_gmem points to this thread's
// first element of X. An address base + index · stride is one IMAD.WIDE as long as both factors
// have 32 bits. Where src_bytes(row) is 0 instead of 16 the copy of a row of the tile reads nothing
// and writes zeros: past the end of X, and after the loop's last block. A branch around it is
// slower, because it splits the code that ptxas may reorder.
template <int kRows, int kDHead, int kThreads, typename SrcBytes>
__device__ __forceinline__ void copy_tile_async(uint32_t tile_smem, const Element *X_gmem,
                                                int first_row, int row_stride, SrcBytes src_bytes) {
    constexpr int kColumns = piece_columns(kDHead), kThreadsPerRow = kColumns / kChunk;
    constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
    const int row = threadIdx.x / kThreadsPerRow, col = threadIdx.x % kThreadsPerRow * kChunk;
    const Element *src_gmem = X_gmem + int64_t(first_row) * row_stride;
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsPerPass) {
#pragma unroll
        for (int piece = 0; piece < kDHead / kColumns; ++piece) {
            cp_async_16_L2_128B(tile_smem + piece_offset<kRows, kColumns>(piece) +
                                    smem_offset<kColumns>(row + i, col),
                                src_gmem + piece * kColumns, src_bytes(row + i));
        }
        src_gmem += kRowsPerPass * row_stride;
    }
}

// The lanes give ldmatrix the 32 rows of the four 8 x 8 matrices of a 16 x 16 piece. The order for
// mma's A operand and, transposed, for V: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
// The order for K: columns 0-7 and 8-15 of rows 0-7, then of rows 8-15, so that the two registers
// that one mma reads as B are neighbours. Piece k of a row has its chunks at (2k + column half) ^
// (lane % 8). Bits 0 and 1 of k flip bits 1 and 2 of the chunk; bit 3 of the chunk is not swizzled.
// So a lane has four offsets of each kind, and the rest of an address is known at compile time. In
// a piece of 32 columns only bit 0 of k is swizzled, and there are two offsets.
template <int kColumns = kPiece>
__device__ __forceinline__ void set_lane_offsets(uint32_t (&lane_offset)[4],
                                                 uint32_t (&K_lane_offset)[4]) {
    const int lane = threadIdx.x % 32;
    const int K_row = lane / 16 * 8 + lane % 8, K_col = lane / 8 % 2 * kChunk;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        lane_offset[k] = smem_offset<kColumns>(lane % 16, lane / 16 * kChunk) ^ k * 2 * kChunkBytes;
        K_lane_offset[k] = smem_offset<kColumns>(K_row, K_col) ^ k * 2 * kChunkBytes;
    }
}

template <int kRows, int kColumns = kPiece>
__device__ __forceinline__ uint32_t fragment_address(uint32_t tile_smem,
                                                     const uint32_t (&lane_offset)[4], int row,
                                                     int k) {
    constexpr int kPerPiece = kColumns / kMmaK;
    return tile_smem + lane_offset[k % kPerPiece] + row * kColumns * int(sizeof(Element)) +
           piece_offset<kRows, kColumns>(k / kPerPiece);
}

// C (kRowTiles * 16, 16) += A (kRowTiles * 16, 16) @ B (16, 16), in pair n of C's column tiles. One
// ldmatrix_x4 of K or V loads B.
template <DType kDType, int kRowTiles, int kTiles>
__device__ __forceinline__ void add_product(float (&C_rmem)[kRowTiles][kTiles][4],
                                            const uint32_t (&A_rmem)[kRowTiles][4],
                                            const uint32_t (&B_rmem)[4], int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            mma_m16n8k16<kDType>(C_rmem[i][2 * n + half], A_rmem[i], B_rmem[2 * half],
                                 B_rmem[2 * half + 1]);
        }
    }
}
