#pragma once
// Config and arguments of the overlap family's kernels, shared with the host. Python has the same
// types: see flash_attention.cuh.

#include "flash_attention.cuh"

// One kernel of the overlap family.
struct OverlapKernelConfig {
    // fields:begin
    int overlap; // the step
    DType dtype;
    int d_head;
    int B_r; // query rows of a thread block
    int B_c; // keys of one step of its main loop
    int n_warps;
    int static_row_stride; // in elements; 0 = read from the arguments
    bool lse; // adds up P in fp32 for an LSE
    bool causal; // a causal mask, aligned to the bottom right
    bool softcap; // limits the logits by tanh
    bool window; // a query sees keys within a distance
    bool varlen; // sequences of various lengths, one after the other
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    constexpr int kv_buffers() const { return overlap >= 3 ? 2 : 1; } // for K and V each
    constexpr int smem_bytes() const {
        return (B_r + 2 * kv_buffers() * B_c) * d_head * int(sizeof(Element));
    }
    friend auto operator<=>(const OverlapKernelConfig &, const OverlapKernelConfig &) = default;
};

// Q and O have the shape (batch, len_q, heads, d_head), K and V (batch, len_k, heads /
// heads_per_kv, d_head). The grid is (tiles of queries, heads, batch). o1 to o5 take whole blocks,
// and len_q is len_k; o1 to o6 have as many heads of K and V as of Q.
// Sequences of various lengths are one batch: len_q and len_k are their totals, and the grid has
// len_q / B_r + n_sequences tiles.
struct OverlapKernelArgs {
    const void *Q, *K, *V;
    void *O;
    TensorStrides Q_strides, K_strides, V_strides, O_strides;
    int len_k, len_q, heads_per_kv;
    float scale; // log2(e) · softmax_scale
    float *lse; // (batch, heads, len_q), or null
    const Element *sinks; // (heads), or null
    float scale_in_cap; // softmax_scale / softcap, where `scale` is log2(e) · softcap
    int window_left, window_right; // keys beside its own that a query sees
    const int *cu_seqlens_q, *cu_seqlens_k; // begins of sequences, and the total; or null
    int n_sequences;
};
