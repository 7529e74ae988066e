#pragma once
// The one parameter of the hopper family's kernels.

#include <cuda.h>

#include "flash_attention.cuh"
#include "numeric.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"

// Q and O of shape (batch, len_q, heads, d_head), K and V of shape (batch, len_k, heads /
// heads_per_kv, d_head), as TMA has them: boxes of a tile of Q, of K and of V, and of the 16 rows
// of a warp of O. The pointers and strides, in elements, are for rows that are computed again
// without TMA. A tile is B_r queries of one head; tiles counts them all, q_tiles those of one head,
// the last of which may have rows beyond len_q.
struct alignas(128) HopperKernelArgs {
    CUtensorMap Q, K, V, O;
    const void *Q_gmem, *K_gmem, *V_gmem;
    void *O_gmem;
    TensorStrides Q_strides, K_strides, V_strides, O_strides;
    int len_k, heads, tiles;
    int len_q, q_tiles, heads_per_kv;
    float scale; // log2(e) · softmax_scale
    float *lse; // (batch, heads, len_q), or null
    int *next_tile; // a counter and who took which tile, at first 0; null if every block knows its
    int head_group, last_heads; // heads whose causal tiles are taken together, and at the end
};

// What a kernel's tiles may stick out of: nothing; the tensors; the keys that its queries see, too.
enum class Edges { kNone, kTensors, kCausal };

// How many keys a query sees: all, or in causal attention, aligned to the bottom right, those up to
// as far from the last key as it is from the last query. None is below 1.
template <Edges kEdges>
__device__ __forceinline__ int visible_keys(int query, const HopperKernelArgs &args) {
    return kEdges == Edges::kCausal ? min(query + 1 + args.len_k - args.len_q, args.len_k)
                                    : args.len_k;
}

// Blocks of keys that a tile has whose queries end there: one at least, though it may be hidden.
template <int B_c, Edges kEdges>
__device__ __forceinline__ int seen_blocks(int end, const HopperKernelArgs &args) {
    const int last_query = min(end, args.len_q) - 1;
    return max((visible_keys<kEdges>(last_query, args) + B_c - 1) / B_c, 1);
}

// Which block of rows, and of which head of all batches, a tile of queries is. Those of one head
// are neighbours, so that they find its K and V in the L2 cache. Causal ones differ in length: of
// some heads together, whose K and V fit into the cache, the longest come first, so that short ones
// fill the gaps at the end. Of the last heads more are taken together: a block takes its next tile
// when it begins with one, and the end of all waits for whoever took a long one last.
struct TileIndex {
    int block, head;
};
template <int B_r, Edges kEdges>
__device__ __forceinline__ TileIndex tile_index(int tile, const HopperKernelArgs &args) {
    if constexpr (kEdges == Edges::kCausal) {
        const int before = args.tiles / args.q_tiles - args.last_heads;
        const bool is_last = tile >= before * args.q_tiles;
        const int group = tile / (args.head_group * args.q_tiles);
        const int first = is_last ? before : group * args.head_group;
        const int heads = is_last ? args.last_heads : min(args.head_group, before - first);
        tile -= first * args.q_tiles;
        return {args.q_tiles - 1 - tile / heads, first + tile % heads};
    }
    // To read q_tiles would make the kernels that were measured other machine code.
    const int q_tiles = kEdges == Edges::kNone ? args.len_k / B_r : args.q_tiles;
    return {tile % q_tiles, tile / q_tiles};
}

template <int B_r, Edges kEdges = Edges::kNone>
__device__ __forceinline__ TilePlace tile_place(int tile, const HopperKernelArgs &args) {
    const auto [block, head] = tile_index<B_r, kEdges>(tile, args);
    return {block * B_r, head % args.heads, head / args.heads};
}

// LSE of a query: m + log2(l) is its logarithm to base 2. No sum at all is 0, and that is
// -infinity.
__device__ __forceinline__ void store_lse(const HopperKernelArgs &args, TilePlace place, int query,
                                          float m, float l) {
    const int64_t row = int64_t(place.batch) * args.heads + place.head;
    args.lse[row * args.len_q + query] = (m + log2_approx(l)) * kLn2;
}

// O of the 16 rows of a warp, in 16 bits, through the rows of a tile in shared memory that nobody
// else uses. One lane begins the copies; they are one group.
template <DType kDType, int B_r, int kCount>
__device__ __forceinline__ void store_rows(const HopperKernelArgs &args, TilePlace place,
                                           uint32_t tile_smem, int warp_row,
                                           const float (&O_rmem)[kCount]) {
#pragma unroll
    for (int k = 0; k < kCount / 8; ++k) {
        uint32_t packed[4];
        pack_fragment<kDType>(packed, O_rmem, k);
        store_fragment<B_r>(tile_smem, warp_row, k, packed);
    }
    fence_async_proxy();
    __syncwarp(); // one lane stores what all have written
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int piece = 0; piece < kCount / 32; ++piece) {
            tma_store_piece(args.O, tile_smem + piece * piece_bytes(B_r) + warp_row * kRowBytes,
                            place.row + warp_row, piece, place.head, place.batch);
        }
        tma_store_commit();
    }
}

// The block's next tile, behind the first that it knows: the next that nobody has taken. Who took a
// tile is written down, as the block's number + 1. Without a counter, of tiles that differ every
// other lot, one for each block, goes to the blocks backwards, so that whoever had the longest gets
// the shortest. The blocks of a cluster take one together, a tile of all their rows, and count as
// one.
template <bool kDynamic, int kBlocks = 1>
__device__ __forceinline__ int take_tile(int tile, const HopperKernelArgs &args) {
    if (!kDynamic) {
        return tile + gridDim.x / kBlocks;
    }
    const int lot = gridDim.x / kBlocks;
    if (args.next_tile == nullptr) {
        return tile + 2 * (lot - tile % lot) - 1; // as far behind the lot's end as this is before
    }
    args.next_tile[1 + tile] = blockIdx.x / kBlocks + 1;
    return atomicAdd(args.next_tile, 1) + lot;
}

// Whether the block has taken a tile.
template <bool kDynamic, int kBlocks = 1>
__device__ __forceinline__ bool took_tile(int tile, const HopperKernelArgs &args) {
    if (!kDynamic) {
        return tile % (gridDim.x / kBlocks) == blockIdx.x / kBlocks;
    }
    if (args.next_tile == nullptr) {
        const int lot = gridDim.x / kBlocks, place = tile % lot;
        return (tile / lot % 2 ? lot - 1 - place : place) == blockIdx.x / kBlocks;
    }
    return args.next_tile[1 + tile] == blockIdx.x / kBlocks + 1;
}
