#pragma once
// Configs and arguments of the kernels of operation `add_norm`, shared with the host. Python has
// the same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// One kernel of the add_norm family.
struct AddNormKernelConfig {
    // fields:begin
    int add_norm; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of the sum, which a thread keeps in registers
    int row_threads; // that have a row
    bool rms; // RMS norm instead of layer norm
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Threads that have a row.
    constexpr int threads_per_row() const { return row_threads; }
    // Two sums per warp, or one of RMS norm.
    constexpr int smem_bytes() const { return (rms ? 1 : 2) * n_warps * int(sizeof(float)); }
    friend auto operator<=>(const AddNormKernelConfig &, const AddNormKernelConfig &) = default;
};

// x, residual, sum and y have shape (rows, width), stride 1 along a row and these strides from row
// to row, in elements. weight and bias (width), and the outputs mean and rstd (rows), have stride
// 1; each is null if a call leaves it out. No output overlaps an input, because inputs are read
// through the cache for read-only data.
struct AddNormKernelArgs {
    const void *x, *residual, *weight, *bias;
    void *y, *sum;
    float *mean, *rstd;
    int64_t x_stride, residual_stride, y_stride, sum_stride;
    int rows;
    int width;
    float eps;
};
