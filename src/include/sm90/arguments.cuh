#pragma once
// The one parameter of the hopper family's kernels.

#include <cuda.h>

#include "flash_attention.cuh"
#include "numeric.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"

// Q and O have the shape (batch, len_q, heads, d_head), K and V the shape (batch, len_k, heads /
// heads_per_kv, d_head). The boxes of the tensor maps are a tile of Q, of K and of V, and the 16
// rows of a warp of O. The pointers and strides, in elements, are for rows that are computed again
// without TMA. A tile is B_r queries of one head: tiles counts the tiles of all heads, q_tiles the
// tiles of one head, the last of which may have rows past len_q.
struct alignas(128) HopperKernelArgs {
    CUtensorMap Q, K, V, O;
    const void *Q_gmem, *K_gmem, *V_gmem;
    void *O_gmem;
    TensorStrides Q_strides, K_strides, V_strides, O_strides;
    int len_k, heads, tiles;
    int len_q, q_tiles, heads_per_kv;
    float scale; // log2(e) · softmax_scale
    float *lse; // (batch, heads, len_q), or null
    int *next_tile; // a counter, then the taker of each tile, at first 0; null: no counter
    int head_group, last_heads; // heads per group of causal tiles, and in the last one
};

// The edges that a kernel's tiles may cross: none; those of the tensors; those of the causal mask
// too, or of a window, which only arguments of family general have.
enum class Edges { kNone, kTensors, kCausal, kWindow };

// The end of the keys that a query sees. In causal attention the mask is aligned to the bottom
// right: query i sees key j if j <= i + len_k - len_q. A number below 1 means no key.
template <Edges kEdges>
__device__ __forceinline__ int visible_keys(int query, const HopperKernelArgs &args) {
    static_assert(kEdges != Edges::kWindow);
    return kEdges == Edges::kCausal ? min(query + 1 + args.len_k - args.len_q, args.len_k)
                                    : args.len_k;
}

// Their begin; a number below 1 means key 0.
template <Edges kEdges>
__device__ __forceinline__ int first_visible_key(int, const HopperKernelArgs &) {
    static_assert(kEdges != Edges::kWindow);
    return 0;
}

// The blocks of keys of a tile whose queries end before `end`: at least one, though all of it may
// be hidden. The first block begins at first_key.
template <int B_c, Edges kEdges, typename Args>
__device__ __forceinline__ int seen_blocks(int end, const Args &args, int first_key = 0) {
    const int last_query = min(end, args.len_q) - 1;
    return max((visible_keys<kEdges>(last_query, args) - first_key + B_c - 1) / B_c, 1);
}

// The block of rows of a tile of queries, and its head among the heads of all batches. Tiles of one
// head are neighbours, so they find K and V of the head in the L2 cache. Causal tiles differ in
// length: in a group of heads, whose K and V fit into the cache, the longest tiles come first, and
// short ones fill the gaps at the end. The last group has more heads: a thread block takes its next
// tile one ahead, and the kernel ends with the thread block that took a long tile last.
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
    // Reading q_tiles here would change the machine code of kernels that have been measured.
    const int q_tiles = kEdges == Edges::kNone ? args.len_k / B_r : args.q_tiles;
    return {tile % q_tiles, tile / q_tiles};
}

template <int B_r, Edges kEdges = Edges::kNone>
__device__ __forceinline__ TilePlace tile_place(int tile, const HopperKernelArgs &args) {
    const auto [block, head] = tile_index<B_r, kEdges>(tile, args);
    return {block * B_r, head % args.heads, head / args.heads};
}

// No sinks. A step that has sinks gives `of`, the sink of a head, and `add`, which adds it to the
// sum of a row, of which it takes m and l, and returns the factor of the row's O.
struct NoSinks {
    __device__ __forceinline__ float of(int) const { return -INFINITY; }
    __device__ __forceinline__ float add(float, float &, float &) const { return 1; }
};

// What follows from a tile's place: the place of its n-th key in K and V; the distance in elements
// from a tensor of `rows` rows to row 0 of a batch; the index of query 0 in the LSE. Places of
// other types have functions of their own.
__device__ __forceinline__ TilePlace keys_of(TilePlace place, const HopperKernelArgs &args,
                                             int n = 0) {
    return {n, place.head / args.heads_per_kv, place.batch};
}
__device__ __forceinline__ int64_t row_0(TilePlace, int batch, int, const TensorStrides &strides) {
    return batch * strides.batch;
}
__device__ __forceinline__ int64_t lse_0(TilePlace place, const HopperKernelArgs &args) {
    return (int64_t(place.batch) * args.heads + place.head) * args.len_q;
}

// LSE of a query: m + log2(l) is the logarithm of its sum to base 2. A query that sees no key has
// the sum 0 and an LSE of -infinity.
template <typename Place>
__device__ __forceinline__ void store_lse(const HopperKernelArgs &args, Place place, int query,
                                          float m, float l) {
    args.lse[lse_0(place, args) + query] = (m + log2_approx(l)) * kLn2;
}

// Rounds O of the 16 rows of a warp to 16 bits and stores it through rows of a tile in shared
// memory that no other warp uses. One lane issues the copies as one group.
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
    __syncwarp(); // one lane stores the rows that all lanes have written
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int piece = 0; piece < kCount / 32; ++piece) {
            tma_store_piece(args.O, tile_smem + piece * piece_bytes(B_r) + warp_row * kRowBytes,
                            place.row + warp_row, piece, place.head, place.batch);
        }
        tma_store_commit();
    }
}

// The next tile of a thread block, which knows its first: the next tile that no thread block has
// taken. The taker of a tile is noted, as its number + 1. If tiles differ and there is no counter,
// every other lot of tiles, one per thread block, is handed out backwards: the thread block with
// the longest tile gets the shortest next. The thread blocks of a cluster take a tile of all their
// rows together, and count as one.
template <bool kDynamic, int kBlocks = 1>
__device__ __forceinline__ int take_tile(int tile, const HopperKernelArgs &args) {
    if (!kDynamic) {
        return tile + gridDim.x / kBlocks;
    }
    const int lot = gridDim.x / kBlocks;
    if (args.next_tile == nullptr) {
        return tile + 2 * (lot - tile % lot) - 1; // mirrored at the end of the lot
    }
    args.next_tile[1 + tile] = blockIdx.x / kBlocks + 1;
    return atomicAdd(args.next_tile, 1) + lot;
}

// Whether the thread block has taken a tile.
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
