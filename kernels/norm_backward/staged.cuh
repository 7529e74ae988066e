#pragma once
// Configs of family norm_backward_staged, shared with the host. The arguments are those of the
// other families of operation `norm_backward`.

#include "kernels/norm_backward/arguments.cuh"

// One kernel of the norm_backward_staged family.
struct NormBackwardStagedKernelConfig {
    // fields:begin
    int norm_backward_staged; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of the row, of which a thread has the columns
    int row_threads; // that have a row
    int staged_rows; // of a thread in shared memory: one in use, others on their way
    bool rms; // RMS norm instead of layer norm
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Threads that have a row.
    constexpr int threads_per_row() const { return row_threads; }
    constexpr int chunk_elements() const { return dtype == DType::FP32 ? 4 : 8; }
    constexpr int sums() const { return rms ? 1 : 2; } // of a column
    // Of a thread: the sums of its columns, and up to 64 or 72 others.
    constexpr int registers() const {
        return chunks * sums() * chunk_elements() + (sums() * chunk_elements() == 16 ? 64 : 72);
    }
    constexpr int blocks_per_sm() const { return row_blocks_per_sm(n_threads(), registers()); }
    // Columns that the threads of a row have at once.
    constexpr int tile() const { return threads_per_row() * chunks * chunk_elements(); }
    // Chunks of x and dy in each stage, and of weight; two sums per warp, for two rows; where warps
    // of a block have several rows, one or two per column.
    constexpr int smem_bytes() const {
        const int columns = threads_per_row() < n_threads() ? tile() : 0;
        return (2 * staged_rows + 1) * chunks * n_threads() * 16 +
               int(sizeof(float)) * (4 * n_warps + sums() * columns);
    }
    friend auto operator<=>(const NormBackwardStagedKernelConfig &,
                            const NormBackwardStagedKernelConfig &) = default;
};
