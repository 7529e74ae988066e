#pragma once
// The way of accumulators to the outputs, in 16 bits.

#include "elements.cuh"
#include "kernels/backward/places.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"

// Rounds 16 rows of a warp, times a factor, to 16 bits and stores them through rows warp_row …
// warp_row + 15 of a tile of kRows rows in shared memory that nothing else reads any more. One lane
// issues the copies as one group.
template <DType kDType, int kRows>
__device__ __forceinline__ void store_rows(const CUtensorMap &tensor, TilePlace place,
                                           uint32_t tile_smem, int warp_row,
                                           float (&D_rmem)[kDHead / 2], float factor) {
    scale_rows(D_rmem, {factor, factor});
#pragma unroll
    for (int k = 0; k < kDSteps; ++k) {
        uint32_t packed[4];
        pack_fragment<kDType>(packed, D_rmem, k);
        store_fragment<kRows>(tile_smem, warp_row, k, packed);
    }
    fence_async_proxy();
    __syncwarp(); // one lane stores the rows that all lanes have written
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int piece = 0; piece < kDPieces; ++piece) {
            tma_store_piece(tensor, tile_smem + piece * piece_bytes(kRows) + warp_row * kRowBytes,
                            place.row + warp_row, piece, place.head, place.batch);
        }
        tma_store_commit();
    }
}

// Rounds 16 rows of a warp, times a factor, to 16 bits, stores them from row place.row on, of rows
// 0 … length - 1 if there is a length, and makes the accumulators 0 for the next tile. The four
// lanes that have a row store 64 bytes of it at once.
template <DType kDType, bool kClips = false, int kCount>
__device__ __forceinline__ void store_sums(void *tensor, const TensorStrides &strides,
                                           TilePlace place, int warp_row, float (&D_rmem)[kCount],
                                           float factor, int length = 0) {
    const int lane = threadIdx.x % 32;
    Element *row = static_cast<Element *>(tensor) + place.batch * strides.batch +
                   (place.row + warp_row + lane / 4) * strides.row + place.head * strides.head +
                   lane % 4 * 8;
    scale_rows(D_rmem, {factor, factor});
#pragma unroll
    for (int i = 0; i < kCount; i += 16) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t packed[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                float &left = D_rmem[i + 4 * n + 2 * half],
                      &right = D_rmem[i + 4 * n + 2 * half + 1];
                packed[n] = pack<kDType>(left, right);
                left = right = 0;
            }
            exchange(packed);
            const int own = place.row + warp_row + lane / 4 + half * 8;
            if (!kClips || (own >= 0 && own < length)) {
                store_gmem_16(row + half * 8 * strides.row + 2 * i,
                              make_uint4(packed[0], packed[1], packed[2], packed[3]));
            }
        }
    }
}
