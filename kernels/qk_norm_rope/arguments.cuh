#pragma once
// Config and arguments of the kernels of operation `qk_norm_rope`, shared with the host. Python has
// the same types: see flash_attention.cuh.

#include "flash_attention.cuh"
#include "kernels/joint/arguments.cuh" // RowStrides

// One kernel of the qk_norm_rope family.
struct QkNormRopeKernelConfig {
    // fields:begin
    int qk_norm_rope; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of the row, which a thread keeps in registers
    int row_threads; // that have a row; from qr2 on a token with its rows
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // A sum per warp; from qr2 on one of Q and one of K.
    constexpr int smem_bytes() const {
        return (qk_norm_rope > 1 ? 2 : 1) * n_warps * int(sizeof(float));
    }
    friend auto operator<=>(const QkNormRopeKernelConfig &,
                            const QkNormRopeKernelConfig &) = default;
};

// Tokens of a sample are those of the sequence, and behind them those of its context. q, k and v
// are (batch, length, heads · d_head), those of the context (batch, context, heads · d_head), the
// weights (heads · d_head), the rotary table (length, d_head / 2, 2): cosine and sine. joint_q is
// (batch, length + context_queries, heads · d_head), joint_k and joint_v are (batch, length +
// context, heads · d_head). No output overlaps an input, because inputs are read through the cache
// for read-only data.
struct QkNormRopeKernelArgs {
    const void *q, *k;
    const void *v; // null without a context, as joint_v
    const void *q_weight, *k_weight;
    const float *rotary; // or null
    // Null without a context; the first and the fourth also where the context has no queries.
    const void *context_q, *context_k, *context_v, *context_q_weight, *context_k_weight;
    void *joint_q, *joint_k, *joint_v;
    RowStrides q_strides, k_strides, v_strides, context_q_strides, context_k_strides,
        context_v_strides, joint_q_strides, joint_k_strides, joint_v_strides;
    int batch, length, context, context_queries, heads, d_head;
    float eps;
};
