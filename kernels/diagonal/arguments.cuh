#pragma once
// Config and arguments of the kernels of operation `diagonal`, shared with the host. Python has the
// same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// One kernel of the diagonal family.
struct DiagonalKernelConfig {
    // fields:begin
    int diagonal; // the step
    DType dtype;
    int n_warps; // of a thread block
    int chunks; // of 16 bytes, which a lane loads at once; 0 before k3
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    constexpr int smem_bytes() const { return 0; }
    friend auto operator<=>(const DiagonalKernelConfig &, const DiagonalKernelConfig &) = default;
};

// B and C have shape (rows, width), stride 1 along a row and these strides from row to row, in
// elements; a has shape (rows) and any stride. C overlaps neither, because both are read through
// the cache for read-only data.
struct DiagonalKernelArgs {
    const void *a, *b;
    void *c;
    int64_t a_stride, b_stride, c_stride;
    int rows, width;
    int pieces; // of a row
};
