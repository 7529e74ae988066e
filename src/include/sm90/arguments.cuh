#pragma once
// The one parameter of the hopper family's kernels.

#include <cuda.h>

#include "flash_attention.cuh"
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
    int *next_tile; // a counter that begins at 0, null for kernels that take none
};

// Of a tile of queries: those of one head are neighbours, so that they find its K and V in the L2
// cache.
template <int B_r>
__device__ __forceinline__ TilePlace tile_place(int tile, int q_tiles, int heads) {
    const int head = tile / q_tiles;
    return {tile % q_tiles * B_r, head % heads, head / heads};
}

// Where queries and keys are whole tiles of one length. To read q_tiles would make the kernels that
// were measured other machine code.
template <int B_r>
__device__ __forceinline__ TilePlace tile_place(int tile, const HopperKernelArgs &args) {
    return tile_place<B_r>(tile, args.len_k / B_r, args.heads);
}
