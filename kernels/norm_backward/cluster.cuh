#pragma once
// Configs of family norm_backward_cluster, shared with the host. The arguments are those of the
// other families of operation `norm_backward`.

#include "kernels/norm_backward/arguments.cuh"

// One kernel of the norm_backward_cluster family.
struct NormBackwardClusterKernelConfig {
    // fields:begin
    int norm_backward_cluster; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of the row, of which a thread has the columns
    int cluster_blocks; // thread blocks that have a row
    bool rms; // RMS norm instead of layer norm
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    constexpr int chunk_elements() const { return dtype == DType::FP32 ? 4 : 8; }
    constexpr int sums() const { return rms ? 1 : 2; } // of a column
    // Of a thread: the sums of its columns, and up to 64 others.
    constexpr int registers() const { return chunks * sums() * chunk_elements() + 64; }
    constexpr int blocks_per_sm() const { return row_blocks_per_sm(n_threads(), registers()); }
    // Columns of a block.
    constexpr int tile() const { return n_threads() * chunks * chunk_elements(); }
    // Chunks of x and dy of three rows, and of weight; two sums per warp, for two rows; a barrier
    // and two sums per block of the cluster, for four rows.
    constexpr int smem_bytes() const {
        return 7 * chunks * n_threads() * 16 + 2 * int(sizeof(float)) * 2 * n_warps +
               4 * (8 + 2 * int(sizeof(float)) * cluster_blocks);
    }
    friend auto operator<=>(const NormBackwardClusterKernelConfig &,
                            const NormBackwardClusterKernelConfig &) = default;
};
