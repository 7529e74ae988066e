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
    int rows_in_flight; // rows of a thread at once; 0 before s5: one
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Rows of each thread.
    constexpr int thread_rows() const { return rows_in_flight > 0 ? rows_in_flight : 1; }
    constexpr int block_rows() const {
        return (row_threads ? n_threads() / row_threads : 1) * thread_rows();
    }
    // With registers for exponentials, from s5 on: 8 per chunk, and 48 for the rest.
    constexpr int blocks_per_sm() const {
        const int blocks = 65536 / (n_threads() * (chunks * thread_rows() * 8 + 48));
        return blocks > 1 ? blocks : 1;
    }
    // A maximum and a sum per row of a thread and warp.
    constexpr int smem_bytes() const { return 2 * thread_rows() * n_warps * int(sizeof(float)); }
    friend auto operator<=>(const SoftmaxKernelConfig &, const SoftmaxKernelConfig &) = default;
};

// One kernel of the softmax_cluster family.
struct SoftmaxClusterKernelConfig {
    // fields:begin
    int softmax_cluster; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of the row, which a thread keeps in registers
    int cluster_blocks; // thread blocks that have a row
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Of 64 registers per thread.
    constexpr int blocks_per_sm() const { return 1024 / n_threads(); }
    // A barrier and m and l of each warp and each block; before x3 twice, and the next row.
    constexpr int smem_bytes() const {
        const int sums = 8 + (n_warps + cluster_blocks) * 2 * int(sizeof(float));
        return softmax_cluster >= 3 ? sums : chunks * n_threads() * 16 + 2 * sums;
    }
    friend auto operator<=>(const SoftmaxClusterKernelConfig &,
                            const SoftmaxClusterKernelConfig &) = default;
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
