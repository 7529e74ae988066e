#pragma once
// Config and arguments of the decode_sync family's kernels, shared with the host. Python has the
// same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// The kernels of one config of the decode_sync family.
struct DecodeSyncKernelConfig {
    // fields:begin
    int decode_sync; // the step
    DType dtype;
    int d_head;
    int B_c; // keys of a warp's block
    int n_warps;
    int stages; // blocks of a warp in shared memory; 1 before c2
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    constexpr int cache_bytes() const { return decode_sync == 6 ? 1 : 2; } // of an element
    // Q and each warp's blocks of K and V; at the end O of each warp in fp32, with m and l.
    constexpr int smem_bytes() const {
        const int blocks = 2 * n_warps * stages * B_c * cache_bytes();
        const int tiles = (16 * int(sizeof(Element)) + blocks) * d_head;
        const int sums = n_warps * 16 * (d_head + 2) * int(sizeof(float));
        return tiles > sums ? tiles : sums;
    }
    friend auto operator<=>(const DecodeSyncKernelConfig &,
                            const DecodeSyncKernelConfig &) = default;
};

// Q and O have the shape (batch, len_q, kv_heads · heads_per_kv, d_head), K and V (rows of the
// cache, len_k, kv_heads, d_head), the LSE (batch, heads, len_q).
struct DecodeSyncKernelArgs {
    const void *Q, *K, *V;
    void *O;
    TensorStrides Q_strides, K_strides, V_strides, O_strides;
    float *lse; // or null
    const Element *sinks; // (heads), or null
    const int *cache_seqlens; // keys of each sequence, or null: len_k
    const int *cache_batch_idx; // its row of the cache, or null: its number
    int len_q, len_k, kv_heads, heads_per_kv;
    float scale; // log2(e) · softmax_scale, or log2(e) · softcap
    float scale_in_cap; // softmax_scale / softcap, or 0 without a softcap
    int window_left, window_right; // keys beside its own that a query sees
    // From c3 on: (batch, table_blocks) pages of page_size keys, or null. A page is a row of K and
    // V.
    const int *block_table;
    int table_blocks, page_size;
    // From c4 on: pieces of a sequence's keys, and the parts that several leave, (pieces, tiles of
    // queries, batch) of 16 rows each.
    int pieces;
    int keys_per_piece; // from c5 on: a multiple of n_warps · B_c
    float2 *statistics; // m and l
    float *O_parts; // (..., d_head)
    // From c6 on: of K and V in fp8, (batch, kv_heads), or null.
    const float *k_scale, *v_scale;
};
