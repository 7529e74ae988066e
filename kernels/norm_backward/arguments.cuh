#pragma once
// Configs and arguments of the kernels of operation `norm_backward`, shared with the host. Python
// has the same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// Thread blocks of an SM that walk rows. 1536 threads per SM are the most that all GPUs from sm_80
// on have.
constexpr int row_blocks_per_sm(int n_threads, int registers) {
    const int fitting = 65536 / n_threads / registers, most = 1536 / n_threads;
    return fitting < 1 ? 1 : fitting < most ? fitting : most;
}

// One kernel of the layer_norm_backward family.
struct LayerNormBackwardKernelConfig {
    // fields:begin
    int layer_norm_backward; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of a row of x and of dy, of which a thread has the columns; 0 in e1
    int row_threads; // that have a row; 0 before e4: all of the block
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Threads that have a row.
    constexpr int threads_per_row() const { return row_threads > 0 ? row_threads : n_threads(); }
    constexpr int chunk_elements() const { return dtype == DType::FP32 ? 4 : 8; }
    // Of a thread: per chunk 4 of x, 4 of dy, from e5 on as many of the next row, and two sums per
    // column; and up to 48 others.
    constexpr int registers() const {
        return chunks * ((layer_norm_backward < 5 ? 8 : 16) + 2 * chunk_elements()) + 48;
    }
    constexpr int blocks_per_sm() const { return row_blocks_per_sm(n_threads(), registers()); }
    // Columns that the threads of a row have at once.
    constexpr int tile() const { return threads_per_row() * chunks * chunk_elements(); }
    // Two sums per warp, for two rows; where warps of a block have several rows, two per column.
    constexpr int smem_bytes() const {
        const bool several = threads_per_row() < n_threads() && n_warps > 1;
        return 2 * int(sizeof(float)) * (2 * n_warps + (several ? tile() : 0));
    }
    friend auto operator<=>(const LayerNormBackwardKernelConfig &,
                            const LayerNormBackwardKernelConfig &) = default;
};

// One kernel of the rms_norm_backward family.
struct RmsNormBackwardKernelConfig {
    // fields:begin
    int rms_norm_backward; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of a row of x and of dy, of which a thread has the columns; 0 in e1
    int row_threads; // that have a row; 0 before e4: all of the block
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Threads that have a row.
    constexpr int threads_per_row() const { return row_threads > 0 ? row_threads : n_threads(); }
    constexpr int chunk_elements() const { return dtype == DType::FP32 ? 4 : 8; }
    // Of a thread: per chunk 4 of x, 4 of dy, from q2 on as many of the next row, and a sum per
    // column; and up to 48 others.
    constexpr int registers() const {
        return chunks * ((rms_norm_backward < 2 ? 8 : 16) + chunk_elements()) + 48;
    }
    constexpr int blocks_per_sm() const { return row_blocks_per_sm(n_threads(), registers()); }
    // Columns that the threads of a row have at once.
    constexpr int tile() const { return threads_per_row() * chunks * chunk_elements(); }
    // A sum per warp, for two rows; where warps of a block have several rows, one per column.
    constexpr int smem_bytes() const {
        const bool several = threads_per_row() < n_threads() && n_warps > 1;
        return int(sizeof(float)) * (2 * n_warps + (several ? tile() : 0));
    }
    friend auto operator<=>(const RmsNormBackwardKernelConfig &,
                            const RmsNormBackwardKernelConfig &) = default;
};

// dy, x and dx have shape (rows, width), stride 1 along a row and these strides from row to row, in
// elements. weight, dweight and dbias (width), mean and rstd (rows) have stride 1; all but rstd are
// null where a call leaves them out. No output overlaps an input, because inputs are read through
// the cache for read-only data.
//   From e2 on there are two buffers, with two sums each in family layer_norm_backward and one in
// rms_norm_backward. partial (parts, sums, width rounded up to 8) has those of dweight and dbias
// over the rows of each block; it is null where none is asked for. row_sums (rows, sums) has those
// of each row, for rows that are longer than a tile.
struct NormBackwardKernelArgs {
    const void *dy, *x, *weight;
    const float *mean, *rstd;
    void *dx, *dweight, *dbias;
    float *partial, *row_sums;
    int64_t dy_stride, x_stride, dx_stride;
    int rows;
    int width;
    int parts; // blocks of rows
};
