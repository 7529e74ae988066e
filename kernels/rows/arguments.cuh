#pragma once
// Config and arguments of the kernels of operation `rows`, shared with the host. Python has the
// same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// One kernel of the softmax family.
struct SoftmaxKernelConfig {
    // fields:begin
    int softmax; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of the row, which a thread keeps in registers; 0 before s3
    int row_threads; // of a row; 0 before s4, where all of the block are
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    constexpr int block_rows() const { return row_threads ? n_threads() / row_threads : 1; }
    // A maximum and a sum per warp.
    constexpr int smem_bytes() const { return 2 * n_warps * int(sizeof(float)); }
    friend auto operator<=>(const SoftmaxKernelConfig &, const SoftmaxKernelConfig &) = default;
};

// x and y have shape (rows, width), stride 1 along a row and these strides from row to row, in
// elements. They do not overlap, because x is read through the cache for read-only data.
struct RowsKernelArgs {
    const void *x;
    void *y;
    int64_t x_stride, y_stride;
    int rows;
    int width;
};
