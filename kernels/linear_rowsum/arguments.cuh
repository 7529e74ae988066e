#pragma once
// Config and arguments of the kernels of operation `linear_rowsum`, shared with the host. Python
// has the same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// One config of the linear_rowsum family.
struct LinearRowsumKernelConfig {
    // fields:begin
    int linear_rowsum; // the step
    DType dtype;
    int n_warps; // of a thread block
    int rows; // of x that share each chunk of ΣW; 0 before l5
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Columns of W of a thread block that sums them: one per thread, from l4 on a chunk of 16 bytes
    // per lane.
    constexpr int columns() const {
        return linear_rowsum < 4 ? n_threads() : 32 * 16 / (dtype == DType::FP32 ? 4 : 2);
    }
    // l1 and l2: tiles of x and W. l3: a sum per warp; from l4 on, one per warp and column.
    constexpr int smem_bytes() const {
        const int sums = linear_rowsum < 4 ? n_warps : n_warps * columns();
        return (linear_rowsum < 3 ? 2 * 16 * (64 + 4) : sums) * int(sizeof(float));
    }
    friend auto operator<=>(const LinearRowsumKernelConfig &,
                            const LinearRowsumKernelConfig &) = default;
};

// x (rows, in_features) and weight (out_features, in_features) have stride 1 along a row and these
// strides from row to row, in elements; bias (out_features), nullptr for none, and y (rows) have
// any stride. y overlaps no input, because these are read through the cache for read-only data.
struct LinearRowsumKernelArgs {
    const void *x, *weight, *bias;
    void *y;
    int64_t x_stride, weight_stride, bias_stride, y_stride;
    int rows, in_features, out_features;
    int piece; // from l3 on: rows of W that a thread block sums
    void *products; // l1: (rows, out_features), in the dtype of x
    float *partial; // l2: (tiles of W, rows); from l3 on: (pieces, padded in_features)
    float *sums; // from l3 on: ΣW (padded in_features), and behind it Σb
    int *counters; // l6: units taken, columns ready, (tiles of columns); zeros before and after
};
