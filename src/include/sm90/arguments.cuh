#pragma once
// The one parameter of the hopper family's kernels.

#include <cuda.h>

#include "flash_attention.cuh"
#include "sm90/tma.cuh"

// Tensors of shape (batch, seq_len, heads, d_head), as TMA has them: boxes of a tile of Q, of K and
// of V, and of the 16 rows of a warp of O. The pointers and strides, in elements, are for rows that
// are computed again without TMA. A tile is B_r queries of one head; tiles counts them all.
struct alignas(128) HopperKernelArgs {
    CUtensorMap Q, K, V, O;
    const void *Q_gmem, *K_gmem, *V_gmem;
    void *O_gmem;
    TensorStrides Q_strides, K_strides, V_strides, O_strides;
    int seq_len, heads, tiles;
};

// Of a tile of queries: those of one head are neighbours, so that they find its K and V in the L2
// cache.
template <int B_r>
__device__ __forceinline__ TilePlace tile_place(int tile, const HopperKernelArgs &args) {
    const int per_head = args.seq_len / B_r;
    const int head = tile / per_head;
    return {tile % per_head * B_r, head % args.heads, head / args.heads};
}
