#pragma once
// Config and arguments of the kernels of operation `linear_rowsum_backward`, shared with the host.
// Python has the same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// One config of the linear_rowsum_backward family.
struct LinearRowsumBackwardKernelConfig {
    // fields:begin
    int linear_rowsum_backward; // the step
    DType dtype;
    int n_warps; // of a thread block
    int rows; // of dx or dW that a thread block writes
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Columns of a thread block: one per thread, from lb2 on a chunk of 16 bytes per lane.
    constexpr int columns() const {
        return linear_rowsum_backward < 2 ? n_threads() : 32 * 16 / (dtype == DType::FP32 ? 4 : 2);
    }
    // From lb2 on a sum per warp and column, and Σ dy per warp.
    constexpr int smem_bytes() const {
        return linear_rowsum_backward < 2 ? 0 : n_warps * (columns() + 1) * int(sizeof(float));
    }
    friend auto operator<=>(const LinearRowsumBackwardKernelConfig &,
                            const LinearRowsumBackwardKernelConfig &) = default;
};

// x and dx (rows, in_features), weight and dweight (out_features, in_features) have stride 1 along
// a row and these strides from row to row, in elements; dy (rows) and dbias (out_features) have any
// stride. dx, dweight and dbias are nullptr where they are not asked for. They overlap no input,
// because inputs are read through the cache for read-only data.
struct LinearRowsumBackwardKernelArgs {
    const void *dy, *x, *weight;
    void *dx, *dweight, *dbias;
    int64_t dy_stride, x_stride, weight_stride, dx_stride, dweight_stride, dbias_stride;
    int rows, in_features, out_features;
    int weight_piece, x_piece; // rows of W and of x that a thread block sums
    // Each row has in_features sums of columns and Σ dy behind them, rounded up to a multiple of 8.
    float *partial; // (pieces of W, if dx is asked for, then of x, if dweight or dbias is)
    float *sums; // (2): ΣW; Σ dy · x and Σ dy
};
