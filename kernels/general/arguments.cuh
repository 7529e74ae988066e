#pragma once
// The config and the one parameter of the general family's kernels.

#include "flash_attention.cuh"
#include "memory.cuh"
#include "sm90/arguments.cuh"

// One kernel of the general family.
struct GeneralKernelConfig {
    // fields:begin
    int general; // the step
    DType dtype;
    int d_head;
    int B_r; // query rows of a thread block, 64 for each warpgroup that computes
    int B_c; // keys of one step of its main loop
    int K_slots; // tiles of K in shared memory
    int V_slots; // tiles of V in shared memory
    bool ping_pong; // one warpgroup at a time issues its products
    bool causal; // a causal mask, aligned to the bottom right
    int cluster; // thread blocks that share the loads of K and V
    int d_v; // head size of V and O; 0 for that of Q and K
    bool window; // a query sees keys within a distance
    bool softcap; // limits the logits by tanh
    bool varlen; // sequences of various lengths, one after the other
    int Q_slots; // tiles of Q in shared memory, later of O
    // fields:end

    constexpr int consumers() const { return B_r / 64; } // warpgroups
    constexpr int n_threads() const { return (consumers() + 1) * 128; } // and the producer's
    constexpr int v_columns() const { return d_v == 0 ? d_head : d_v; }
    // The tiles of Q, K and V in pieces of 64 columns, then the barriers.
    constexpr int smem_bytes() const {
        const int of_K = (d_head + 63) / 64 * 128, of_V = (v_columns() + 63) / 64 * 128; // a row
        return (Q_slots * B_r + K_slots * B_c) * of_K + V_slots * B_c * of_V + 256;
    }
    friend auto operator<=>(const GeneralKernelConfig &, const GeneralKernelConfig &) = default;
};

// The arguments of family hopper's kernels, and more.
struct GeneralKernelArgs : HopperKernelArgs {
    int window_left, window_right; // keys beside its own that a query sees
    float scale_in_cap; // softmax_scale / softcap, where `scale` is log2(e) · softcap
    const Element *sinks; // (heads), or null
    const int *cu_seqlens_q, *cu_seqlens_k; // (n_sequences + 1) begins in (total) rows, in order
    int n_sequences; // 0: len_q and len_k are those of each batch, else totals
};

// As in sm90/arguments.cuh, and of a window.
template <Edges kEdges>
__device__ __forceinline__ int visible_keys(int query, const GeneralKernelArgs &args) {
    if constexpr (kEdges == Edges::kWindow) {
        return args.len_k + min(query + 1 - args.len_q + args.window_right, 0);
    } else {
        return visible_keys<kEdges>(query, static_cast<const HopperKernelArgs &>(args));
    }
}
template <Edges kEdges>
__device__ __forceinline__ int first_visible_key(int query, const GeneralKernelArgs &args) {
    return kEdges == Edges::kWindow ? query - args.len_q + (args.len_k - args.window_left) : 0;
}
