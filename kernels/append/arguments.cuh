#pragma once
// Config and arguments of the kernels of operation `append`, shared with the host. Python has the
// same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// One kernel of the append family.
struct AppendKernelConfig {
    // fields:begin
    int append; // the step
    DType dtype;
    int n_warps; // of a thread block
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    constexpr int smem_bytes() const { return 0; }
    friend auto operator<=>(const AppendKernelConfig &, const AppendKernelConfig &) = default;
};

// k and v (batch, len_new, kv_heads, d_head), q and q_rotated (batch, len_q, heads, d_head),
// k_cache and v_cache (rows, slots, kv_heads, d_head) have stride 1 along d_head. In these six the
// strides are (batch or row, seq or slot, head). cos and sin are (positions, rotary_dim / 2),
// block_table is (batch, blocks) and the other integers are (batch). q, the tables and all integers
// but cache_seqlens are null where a call has none. An output overlaps no other tensor, because
// inputs are read through the cache for read-only data.
struct AppendKernelArgs {
    const void *k, *v, *q, *cos, *sin;
    const int *cache_seqlens, *rotary_seqlens, *block_table, *cache_batch_idx;
    void *k_cache, *v_cache, *q_rotated;
    TensorStrides k_strides, v_strides, q_strides;
    TensorStrides k_cache_strides, v_cache_strides, q_rotated_strides;
    int64_t cos_stride, sin_stride, block_table_stride;
    int len_new, kv_heads, len_q, heads; // 0 queries and 0 heads without q
    int d_head, rotary_dim, positions; // 0 without tables
    int room; // keys of a sequence
    int page_size; // 0 without pages
    int rows; // of the cache: pages, or sequences
    int interleaved, in_order, fp32_tables;
};
