#pragma once
// Config and arguments of the kernels of operation `merge`, shared with the host. Python has the
// same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// One kernel of the merge_states family.
struct MergeKernelConfig {
    // fields:begin
    int merge_states; // the step
    DType dtype;
    int n_warps; // of a thread block
    int parts_at_once; // whose chunks a thread loads at once; 0 before u3
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    constexpr int smem_bytes() const { return 0; }
    friend auto operator<=>(const MergeKernelConfig &, const MergeKernelConfig &) = default;
};

// Distances in elements. Those of `part` are 0 in tensors without parts.
struct PartStrides {
    int64_t part, row, head;
};

// o_parts (parts, rows, heads, d_head) and o (rows, heads, d_head) have stride 1 along d_head;
// lse_parts (parts, rows, heads) and lse (rows, heads) are fp32. Outputs overlap no input, because
// these are read through the cache for read-only data.
struct MergeKernelArgs {
    const void *o_parts;
    const float *lse_parts;
    void *o;
    float *lse;
    PartStrides o_parts_strides, lse_parts_strides, o_strides, lse_strides;
    int parts, rows, heads, d_head;
    float log2_base; // of the logarithms in lse_parts and lse: log2(e) where they are natural
};
