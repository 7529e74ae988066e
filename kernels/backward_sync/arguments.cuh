#pragma once
// Config and arguments of the backward_sync family's kernels, shared with the host. Python has the
// same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// The kernels of one config of the backward_sync family.
struct BackwardSyncKernelConfig {
    // fields:begin
    int backward_sync; // the step
    DType dtype;
    int d_head;
    int B_r; // rows of a thread block: of dQ, or of dK and dV
    int B_c; // rows of one step of its main loop: keys, or queries
    bool causal; // a causal mask, aligned to the bottom right
    bool window; // a query sees keys within a distance
    bool softcap; // limits the logits by tanh
    bool varlen; // sequences of various lengths, one after the other
    // fields:end

    constexpr int row_warps() const { return B_r / 16; }
    // Warps that share 16 rows of dK and dV. A wide head takes two, because dK and dV of 16 keys
    // fill 2 · 16 · 128 / 32 = 128 registers per thread at d_head 128.
    constexpr int column_warps() const { return d_head > 128 ? 2 : 1; }
    // From p2 on: whether a warp has its 16 rows of both tiles of B_r in registers. They fill
    // d_head / 2 registers per thread: 64 at d_head 128, beside 128 of dK and dV.
    constexpr bool holds_rows() const { return d_head <= 128; }
    // Columns of S and dP that a warp of dkdv_kernel has at a time. Where rows are held, fewer cost
    // nothing; where they are not, each part reads them.
    constexpr int part() const { return holds_rows() ? 16 : B_c; }
    // Blocks of its walk that a thread block has in shared memory from p3 on. Two fit where rows
    // are held, since they take the place of the tiles of B_r.
    constexpr int stages() const { return holds_rows() ? 2 : 1; }
    // From p4 on: warps of a thread block, and those that share the queries of a block of dQ, 32 at
    // most each. The others share its columns: 32 each, or 48 at d_head 96, and 64 at 256.
    constexpr int warps() const { return row_warps() * column_warps(); }
    constexpr int query_warps() const {
        const int usual = d_head <= 96 ? warps() / 2 : warps() / 4;
        return usual * 32 > B_c ? usual : B_c / 32;
    }
    friend auto operator<=>(const BackwardSyncKernelConfig &,
                            const BackwardSyncKernelConfig &) = default;
};

// What the gradients need of a query beside its rows of Q and dO.
struct Statistics {
    float lse; // log2(e) · LSE, or +infinity where the query sees no key, so that P is 0
    float delta; // Σ dO ∘ O
};

// dO, Q, O and dQ have the shape (batch, len_q, heads, d_head), K, V, dK and dV (batch, len_k,
// heads / heads_per_kv, d_head), the LSE and the statistics (batch, heads, len_q). Sequences of
// various lengths are one batch: len_q and len_k are their totals.
struct BackwardSyncKernelArgs {
    const void *dO, *Q, *K, *V, *O;
    void *dQ, *dK, *dV;
    TensorStrides dO_strides, Q_strides, K_strides, V_strides, O_strides;
    TensorStrides dQ_strides, dK_strides, dV_strides;
    const float *lse;
    Statistics *statistics;
    int len_q, len_k, heads_per_kv;
    float softmax_scale;
    float scale; // log2(e) · softmax_scale, or log2(e) · softcap
    float scale_in_cap; // softmax_scale / softcap
    int window_left, window_right; // keys beside its own that a query sees
    const int *cu_seqlens_q, *cu_seqlens_k; // begins of sequences, and the total; or null
    int n_sequences;
    // From p4 on: sums of dQ in fp32, sum_rows of each batch and head, in whole tiles of B_r; of
    // sequences of various lengths number n has the blocks of B_c from begin / B_c + n on.
    float *dQ_sums;
    int sum_rows, heads;
};
