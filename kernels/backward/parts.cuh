#pragma once
// The parts that no step of the backward family is about: the places of blocks, the sums of dO · O,
// and the way of accumulators to global memory.

#include "elements.cuh"
#include "flash_attention.cuh"
#include "kernels/backward/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

constexpr int kDHead = 128;
constexpr int kDPieces = kDHead / kPiece;
constexpr int kDSteps = kDHead / kWgmmaK;
constexpr int kWarpRows = kWgmmaM / 4;
template <int kRows>
constexpr uint32_t kTileBytes = kDPieces * piece_bytes(kRows); // a tile (kRows, d_head)

// The place of a thread block that has kRows of a head's rows. Blocks of one head are neighbours,
// so they find the head's other tensors in the L2 cache.
template <int kRows>
__device__ __forceinline__ TilePlace own_place(int length, int heads) {
    const int blocks = length / kRows, head = blockIdx.x / blocks;
    return {int(blockIdx.x % blocks) * kRows, head % heads, head / heads};
}

// The index of a query in LSE and delta.
__device__ __forceinline__ int64_t row_index(const BackwardKernelArgs &args, TilePlace place) {
    return (int64_t(place.batch) * args.heads + place.head) * args.len_q + place.row;
}

// LSE of a query as a logarithm to base 2. A query that sees no key has -infinity, for which
// +infinity makes its P 0.
__device__ __forceinline__ float load_lse(const BackwardKernelArgs &args, int64_t row) {
    const float lse = args.lse[row];
    return lse == -INFINITY ? INFINITY : lse * kLog2e;
}

// delta of a query is the sum of its dO · O. 16 lanes have 8 columns each.
constexpr int kDeltaThreads = 256, kDeltaLanes = kDHead / 8;
constexpr int kDeltaRows = kDeltaThreads / kDeltaLanes; // of a thread block
__device__ __forceinline__ TilePlace delta_place(const BackwardKernelArgs &args) {
    TilePlace place = own_place<kDeltaRows>(args.len_q, args.heads);
    place.row += threadIdx.x / kDeltaLanes;
    return place;
}
template <DType kDType>
__device__ __forceinline__ float row_delta(const BackwardKernelArgs &args, TilePlace place) {
    const int column = threadIdx.x % kDeltaLanes * 8;
    auto load = [&](float (&x_rmem)[8], const void *tensor, const TensorStrides &strides) {
        const Element *row = static_cast<const Element *>(tensor) + place.batch * strides.batch +
                             place.row * strides.row + place.head * strides.head;
        unpack_chunk<kDType>(x_rmem, *reinterpret_cast<const uint4 *>(row + column));
    };
    float dO_rmem[8], O_rmem[8], sum = 0;
    load(dO_rmem, args.dO_gmem, args.dO_strides);
    load(O_rmem, args.O_gmem, args.O_strides);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sum = fmaf(dO_rmem[i], O_rmem[i], sum);
    }
#pragma unroll
    for (int lanes = 1; lanes < kDeltaLanes; lanes *= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    }
    return sum;
}
template <DType kDType>
__device__ __forceinline__ void store_delta(const BackwardKernelArgs &args) {
    const TilePlace place = delta_place(args);
    const float delta = row_delta<kDType>(args, place);
    if (threadIdx.x % kDeltaLanes == 0) {
        args.delta[row_index(args, place)] = delta;
    }
}

// Stores accumulators (16, 16) of a warp, packed in 16 bits, transposed: column 16k + r of theirs
// becomes row 16k + r of a tile of kRows rows, in columns column … column + 15. Lane n gives the
// address of row n % 8 of the n / 8-th of four matrices (8, 8), whose order is that of `packed`.
template <int kRows>
__device__ __forceinline__ void store_transposed(uint32_t tile_smem, int column, int k,
                                                 const uint32_t (&packed)[4]) {
    const int lane = threadIdx.x % 32;
    const int row = 16 * k + lane / 16 * 8 + lane % 8;
    const int chunk = (column / 8 + lane / 8 % 2) ^ row % 8;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     tile_smem + row * kRowBytes + chunk * kChunkBytes),
                 "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                 : "memory");
}

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
