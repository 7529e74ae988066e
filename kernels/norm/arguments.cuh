#pragma once
// Configs and arguments of the kernels of operation `norm`, shared with the host. Python has the
// same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// One kernel of the layer_norm family.
struct LayerNormKernelConfig {
    // fields:begin
    int layer_norm; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of the row, which a thread keeps in registers; 0 before n3
    int row_threads; // that have a row; 0 before n4: all of the block
    int rows_in_flight; // rows of a thread at once; 0 before n5: one
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Threads that have a row.
    constexpr int threads_per_row() const { return row_threads > 0 ? row_threads : n_threads(); }
    // Rows of each thread.
    constexpr int thread_rows() const { return rows_in_flight > 0 ? rows_in_flight : 1; }
    // With registers for unpacked chunks, from n6 on: 8 per chunk, and 48 for the rest. In n7, n8
    // and n10 64 registers per thread, in n9 24 for the rest, and 40 at least.
    constexpr int blocks_per_sm() const {
        if (combines()) {
            return 1024 / n_threads();
        }
        const int held = chunks * thread_rows() * 8, least = held + 24 > 40 ? held + 24 : 40;
        const int blocks = 65536 / (n_threads() * (layer_norm < 9 ? held + 48 : least));
        return blocks > 1 ? blocks : 1;
    }
    // Whether a number, a mean and a sum are combined.
    constexpr bool combines() const {
        return layer_norm == 7 || layer_norm == 8 || layer_norm == 10;
    }
    // Two sums per row of a thread and warp, or a number, a mean and a sum.
    constexpr int smem_bytes() const {
        return (combines() ? 3 : 2) * thread_rows() * n_warps * int(sizeof(float));
    }
    friend auto operator<=>(const LayerNormKernelConfig &, const LayerNormKernelConfig &) = default;
};

// One kernel of the rms_norm family.
struct RmsNormKernelConfig {
    // fields:begin
    int rms_norm; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of the row, which a thread keeps in registers; 0 before n3
    int row_threads; // that have a row; 0 before n4: all of the block
    int rows_in_flight; // rows of a thread at once; 0 before r2: one
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Threads that have a row.
    constexpr int threads_per_row() const { return row_threads > 0 ? row_threads : n_threads(); }
    // Rows of each thread.
    constexpr int thread_rows() const { return rows_in_flight > 0 ? rows_in_flight : 1; }
    // In r3: with 8 registers per chunk, and 24 for the rest. Of 8 chunks 64 with 512 threads, and
    // 128 with fewer, as measured.
    constexpr int blocks_per_sm() const {
        const int held = chunks * thread_rows(), many = n_threads() < 512 ? 128 : 64;
        const int blocks = 65536 / (n_threads() * (held < 8 ? held * 8 + 24 : many));
        return blocks > 1 ? blocks : 1;
    }
    // A sum per row of a thread and warp.
    constexpr int smem_bytes() const { return thread_rows() * n_warps * int(sizeof(float)); }
    friend auto operator<=>(const RmsNormKernelConfig &, const RmsNormKernelConfig &) = default;
};

// One kernel of the norm_cluster family.
struct NormClusterKernelConfig {
    // fields:begin
    int norm_cluster; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of the row, which a thread keeps in registers
    int cluster_blocks; // thread blocks that have a row
    bool rms; // RMS norm instead of layer norm
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Whether a cluster has one row, and nothing of it in shared memory.
    constexpr bool has_one_row() const { return norm_cluster == 4 || norm_cluster >= 7; }
    // Of 64 registers per thread. From a5 on as many as 227 KiB of shared memory have room for;
    // from a7 on with 80 registers per thread, if they have 8 warps.
    constexpr int blocks_per_sm() const {
        const int threads = 1024 / n_threads(), fitting = 228 * 1024 / (smem_bytes() + 1024);
        if (norm_cluster >= 7 && n_warps == 8) {
            return 3;
        }
        return norm_cluster < 5 || fitting > threads ? threads : fitting > 1 ? fitting : 1;
    }
    // Chunks of a thread in shared memory: of x, not from a4 on; of weight, not in a4 and from a7
    // on; of bias, not in these, and of RMS norm not from a2 on.
    constexpr int smem_chunks() const {
        const int bias = norm_cluster >= 2 && rms ? 0 : 1;
        return has_one_row() ? 0 : ((norm_cluster < 4 ? 2 : 1) + bias) * chunks;
    }
    // The chunks; a barrier and a sum of each warp and each block, twice, of one row once. From a4
    // on a sum has 16 bytes: a number, a mean and a sum.
    constexpr int smem_bytes() const {
        const int sum = norm_cluster >= 4 ? 16 : 4, times = has_one_row() ? 1 : 2;
        return smem_chunks() * n_threads() * 16 + times * (8 + (n_warps + cluster_blocks) * sum);
    }
    friend auto operator<=>(const NormClusterKernelConfig &,
                            const NormClusterKernelConfig &) = default;
};

// x and y have shape (rows, width), stride 1 along a row and these strides from row to row, in
// elements. weight and bias (width), and the outputs mean and rstd (rows), have stride 1; each is
// null if a call leaves it out. No output overlaps an input, because inputs are read through the
// cache for read-only data.
struct NormKernelArgs {
    const void *x, *weight, *bias;
    void *y;
    float *mean, *rstd;
    int64_t x_stride, y_stride;
    int rows;
    int width;
    float eps;
};
