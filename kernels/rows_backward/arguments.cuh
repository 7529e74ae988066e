#pragma once
// Config and arguments of the kernels of operation `rows_backward`, shared with the host. Python
// has the same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// One kernel of the softmax_backward family.
struct SoftmaxBackwardKernelConfig {
    // fields:begin
    int softmax_backward; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of y and of dy, which a thread keeps in registers
    int row_threads; // of a row
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    constexpr int block_rows() const { return n_threads() / row_threads; }
    // A sum per warp, and the rest of it.
    constexpr int smem_bytes() const { return 2 * n_warps * int(sizeof(float)); }
    friend auto operator<=>(const SoftmaxBackwardKernelConfig &,
                            const SoftmaxBackwardKernelConfig &) = default;
};

// One kernel of the softmax_backward_cluster family.
struct SoftmaxBackwardClusterKernelConfig {
    // fields:begin
    int softmax_backward_cluster; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of y and of dy, which a thread keeps in registers
    int cluster_blocks; // thread blocks that have a row
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Of 64 registers per thread.
    constexpr int blocks_per_sm() const { return 1024 / n_threads(); }
    // Chunks of y and of dy of a thread in shared memory, of the next rows.
    constexpr int slots() const { return 7; }
    // The chunks; a barrier and a sum of each warp and each block, twice.
    constexpr int smem_bytes() const {
        return 2 * slots() * n_threads() * 16 +
               2 * (8 + (n_warps + cluster_blocks) * 2 * int(sizeof(float)));
    }
    friend auto operator<=>(const SoftmaxBackwardClusterKernelConfig &,
                            const SoftmaxBackwardClusterKernelConfig &) = default;
};

// y, dy and dx have shape (rows, width), stride 1 along a row and these strides from row to row, in
// elements. dx overlaps neither of the others, because these are read through the cache for
// read-only data.
struct RowsBackwardKernelArgs {
    const void *y, *dy;
    void *dx;
    int64_t y_stride, dy_stride, dx_stride;
    int rows;
    int width;
};
