#pragma once
// The config and the one parameter of the backward family's kernels.

#include <cuda.h>

#include "flash_attention.cuh"

// One kernel of the backward family: a set of kernels for dQ, dK and dV.
struct BackwardKernelConfig {
    // fields:begin
    int backward; // the step
    DType dtype;
    int d_head;
    int B_r; // queries of a tile of Q and dO
    int B_c; // keys of a tile of K and V, 64 for each warpgroup that computes
    int slots; // tiles of each tensor that the loops walk
    bool causal; // a causal mask, aligned to the bottom right
    bool window; // a query sees keys within a distance
    bool softcap; // limits the logits by tanh
    bool in_turn; // adds dQ in one order: each call gives the same bits
    bool varlen; // sequences of various lengths, one after the other
    // fields:end

    friend auto operator<=>(const BackwardKernelConfig &, const BackwardKernelConfig &) = default;
};

// Q, dO, O and dQ have the shape (batch, len_q, heads, d_head), K, V, dK and dV the shape (batch,
// len_k, heads / heads_per_kv, d_head). The boxes of the tensor maps are a tile of Q or dO, a tile
// of K or V, and the 16 rows of a warp of an output.
struct alignas(128) BackwardKernelArgs {
    CUtensorMap Q, K, V, dO, dQ, dK, dV;
    const void *dO_gmem, *O_gmem;
    TensorStrides dO_strides, O_strides; // in elements
    const float *lse; // (batch, heads, len_q), natural logarithms
    float *delta; // (batch, heads, len_q): sums over d_head of dO · O
    int len_q, len_k, heads, heads_per_kv;
    float scale, softmax_scale; // log2(e) · softmax_scale, softmax_scale
    float *dQ_sums; // (batch, heads, len_q · d_head): sums of dQ, in an order of their own
    float *statistics; // (batch, heads, len_q / B_r, 2, B_r): -LSE / softmax_scale and -delta
    // Of persistent thread blocks: outputs, the counter of tiles that have been taken, all tiles.
    void *dK_gmem, *dV_gmem;
    TensorStrides dK_strides, dV_strides;
    int *next_tile;
    int *turns; // (batch, heads, len_q / B_r, 4): tiles of keys that have added, for each warp
    int tiles, head_group, last_heads; // heads of K per group of causal tiles, and in the last one
    void *dQ_gmem; // of steps that take any lengths
    TensorStrides dQ_strides;
    int window_left, window_right; // keys that a query sees to either side; 0 of those behind
    float scale_in_cap; // softmax_scale / softcap, and scale is log2(e) · softcap
    const int *cu_seqlens_q, *cu_seqlens_k; // begins of sequences, and the total; or null
    int n_sequences; // 0, or len_q and len_k are totals, and a row is a batch
};
