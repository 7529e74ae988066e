#pragma once
// Config and arguments of the kernels of operation `joint_linear`, shared with the host. Python has
// the same types: see flash_attention.cuh.

#include "flash_attention.cuh"

// One kernel of the joint_linear family.
struct JointLinearKernelConfig {
    // fields:begin
    int joint_linear; // the step
    DType dtype;
    int B_r; // rows of a thread block
    int B_c; // outputs of a thread block; all of a row with a norm
    int n_warps; // of a thread block
    int warp_rows; // rows of a warp, which has a share of the columns
    int depth; // input features of the weights that stay in shared memory; 0 before jl2
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    constexpr int row_warps() const { return B_r / warp_rows; }
    constexpr int column_warps() const { return n_warps / row_warps(); }
    constexpr int warp_columns() const { return B_c / column_warps(); }
    // Bytes of two buffers of x and of W, in pieces of 64 columns; from jl2 on of two of x, and W.
    constexpr int piece_bytes() const {
        return (depth > 0 ? (2 * B_r + B_c) * depth : 2 * (B_r + B_c) * 64) * int(sizeof(Element));
    }
    // Behind the pieces: bias and weights of the norm, and sums of squares of a warp's part of a
    // row.
    constexpr int smem_bytes() const {
        return piece_bytes() + 2 * B_c * int(sizeof(Element)) +
               B_r * column_warps() * int(sizeof(float));
    }
    friend auto operator<=>(const JointLinearKernelConfig &,
                            const JointLinearKernelConfig &) = default;
};

// x is (rows, in_features), the weight (out_features, in_features), bias and weight of the norm
// (out_features), y (rows, out_features), likewise for the context: rows of all samples, and their
// distances in elements. Elements of a row are neighbours.
struct JointLinearKernelArgs {
    const void *x, *weight, *bias, *norm_weight; // the last two or null
    // Null without a context.
    const void *context_x, *context_weight, *context_bias, *context_norm_weight;
    void *y, *context_y;
    int64_t x_stride, weight_stride, y_stride;
    int64_t context_x_stride, context_weight_stride, context_y_stride;
    int rows, in_features, out_features;
    int context_rows, context_in, context_out;
    int blocks; // thread blocks of the sequence, which come before those of the context
    int turns; // tiles of a thread block, one behind the other; 1 before jl2
    float eps;
    int activations; // from jl4 on: 1 for GELU of y, 2 for SiLU of x, 3 for both
};
