#pragma once
// Config and arguments of the decode family's kernels, shared with the host. Python has the same
// types: see flash_attention.cuh.

#include <cuda.h>

#include "flash_attention.cuh"

// The kernels of one config of the decode family.
struct DecodeKernelConfig {
    // fields:begin
    int decode; // the step
    DType dtype;
    int d_head;
    int B_r; // queries and heads of a tile, which share keys
    int B_c; // keys of a block of K and V
    int slots; // blocks of K and V in shared memory
    int warpgroups; // warpgroups that compute
    // fields:end

    // From the third step on a warp loads, beside the warpgroups that compute.
    constexpr int n_threads() const { return warpgroups * 128 + (decode >= 3) * 32; }
    // m, l and O of parts of the keys: in the first step of streams, of d_head / 8 threads each.
    constexpr int sum_bytes(int parts) const {
        return parts * B_r * (d_head + 2) * int(sizeof(float));
    }
    // From the second step on blocks of K and V, a tile of Q, for each warpgroup a tile of P and
    // values that its warps exchange, and barriers.
    constexpr int smem_bytes() const {
        if (decode == 1) {
            return sum_bytes(n_threads() / (d_head / 8));
        }
        const int tiles = (2 * slots * B_c + B_r) * d_head + warpgroups * B_r * B_c;
        return tiles * int(sizeof(Element)) + warpgroups * 16 * B_r + 256;
    }
    friend auto operator<=>(const DecodeKernelConfig &, const DecodeKernelConfig &) = default;
};

// Q and O have the shape (batch, len_q, kv_heads · heads_per_kv, d_head), K and V (rows of the
// cache, len_k, kv_heads, d_head) or (pages, page_size, kv_heads, d_head), the LSE (batch, heads,
// len_q). The boxes of the tensor maps are a block of keys of one head; from d4 on as many of its
// keys as divide a page, and 64 of its columns.
struct alignas(128) DecodeKernelArgs {
    CUtensorMap K, V;
    const void *Q, *K_gmem, *V_gmem;
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
    const int *block_table; // (batch, table_blocks): pages of each sequence, or null
    int table_blocks, page_size;
    int pages; // of the cache, or its rows
    int box; // keys that TMA copies at once
    int pieces; // of the keys of a tile
    int keys_per_piece; // from d8 on: a multiple of B_c
    float *parts; // m, l and O of each piece of each tile, or null
    int batch; // sequences
    int *arrivals; // from d9 on: zeros, before a call and after it
};
