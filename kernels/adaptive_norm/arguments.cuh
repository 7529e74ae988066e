#pragma once
// Config and arguments of the kernels of operation `adaptive_norm`, shared with the host. Python
// has the same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// One kernel of the adaptive_norm family.
struct AdaptiveNormKernelConfig {
    // fields:begin
    int adaptive_norm; // the step
    DType dtype;
    int n_warps; // of the thread block
    int chunks; // of 16 bytes of the sum, which a thread keeps in registers
    int row_threads; // that have a row
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Threads that have a row.
    constexpr int threads_per_row() const { return row_threads; }
    // A sum of squares and one of elements per warp.
    constexpr int smem_bytes() const { return 2 * n_warps * int(sizeof(float)); }
    friend auto operator<=>(const AdaptiveNormKernelConfig &,
                            const AdaptiveNormKernelConfig &) = default;
};

// x, change, y and sum are (batch, length, width), gate, scale and shift (batch, width), likewise
// for the context. Strides are in elements, from sample to sample and from row to row; elements of
// a row are neighbours. `rows` are those of all samples.
struct AdaptiveNormKernelArgs {
    // Null without a change, the second three, without a norm, the last two.
    const void *x, *change, *gate, *scale, *shift;
    // All null without a context.
    const void *context_x, *context_change, *context_gate, *context_scale, *context_shift;
    void *y, *sum, *context_y, *context_sum; // the sums null if a call leaves them out
    int64_t x_batch_stride, change_batch_stride, y_batch_stride, sum_batch_stride;
    int64_t x_row_stride, change_row_stride, y_row_stride, sum_row_stride;
    int64_t gate_batch_stride, scale_batch_stride, shift_batch_stride;
    int64_t context_x_batch_stride, context_change_batch_stride, context_y_batch_stride,
        context_sum_batch_stride;
    int64_t context_x_row_stride, context_change_row_stride, context_y_row_stride,
        context_sum_row_stride;
    int64_t context_gate_batch_stride, context_scale_batch_stride, context_shift_batch_stride;
    int rows, length, width;
    int context_rows, context_length, context_width;
    int blocks; // thread blocks of the sequence, which come before those of the context
    float eps;
};
