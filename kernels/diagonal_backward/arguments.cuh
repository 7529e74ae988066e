#pragma once
// Config and arguments of the kernels of operation `diagonal_backward`, shared with the host.
// Python has the same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// One kernel of the diagonal_backward family.
struct DiagonalBackwardKernelConfig {
    // fields:begin
    int diagonal_backward; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of B and of dC, which a thread loads at once
    int row_threads; // of a row
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    constexpr int block_rows() const { return n_threads() / row_threads; }
    // A sum per warp.
    constexpr int smem_bytes() const { return n_warps * int(sizeof(float)); }
    friend auto operator<=>(const DiagonalBackwardKernelConfig &,
                            const DiagonalBackwardKernelConfig &) = default;
};

// b, dc and db have shape (rows, width), stride 1 along a row and these strides from row to row, in
// elements; a and da have shape (rows) and stride 1. db is nullptr where it is not asked for. The
// outputs overlap no input, because these are read through the cache for read-only data.
struct DiagonalBackwardKernelArgs {
    const void *a, *b, *dc;
    void *da, *db;
    int64_t b_stride, dc_stride, db_stride;
    int rows;
    int width;
};
