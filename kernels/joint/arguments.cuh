#pragma once
// Config and arguments of the kernels of operation `joint_attention`, shared with the host. Python
// has the same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// The kernels of one config of the joint family.
struct JointKernelConfig {
    // fields:begin
    int joint; // the step
    DType dtype;
    int d_head;
    int B_c; // keys of a block in shared memory
    int n_warps; // of a thread block; each of attention has 16 queries of a head, from jo4 on more
    int B_r; // queries of a thread block; 0 before jo4: 16 of each warp
    int columns; // of the heads of a thread block; 0 before jo4: those of one
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // A block of K and of V of each head; from jo4 on Q as well, and an unused row.
    constexpr int smem_bytes() const {
        const int rows = columns > 0 ? B_r + 2 * B_c + 1 : 2 * B_c;
        return rows * (columns > 0 ? columns : d_head) * int(sizeof(Element));
    }
    friend auto operator<=>(const JointKernelConfig &, const JointKernelConfig &) = default;
};

// Elements from a sample to the next, and from a token to the next.
struct RowStrides {
    int64_t batch, row;
};

// Tokens of a sample are those of the sequence, and behind them those of its context. q, k, v and o
// are (batch, length, heads · d_head), those of the context (batch, context, heads · d_head), the
// weights (heads · d_head), the rotary table (length, d_head / 2, 2): cosine and sine.
struct JointKernelArgs {
    const void *q, *k, *v, *q_weight, *k_weight;
    const float *rotary; // or null
    // Null without a context; the first and the fourth also where the context has no queries.
    const void *context_q, *context_k, *context_v, *context_q_weight, *context_k_weight;
    void *o, *context_o;
    RowStrides q_strides, k_strides, v_strides, context_q_strides, context_k_strides,
        context_v_strides, o_strides, context_o_strides;
    int batch, length, context, context_queries, heads;
    float eps;
    float scale; // log2(e) · softmax_scale
    // Before jo3: Q (batch, length + context_queries, heads · d_head) and K (batch, length +
    // context, heads · d_head) behind norm and rotary embedding.
    void *Q_normed, *K_normed;
};
