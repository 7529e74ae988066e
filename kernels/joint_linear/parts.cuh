#pragma once
// Parts of the joint_linear family's kernels that no step is about: the two streams, and copies of
// pieces and of vectors.

#include "cp_async.cuh"
#include "kernels/joint_linear/arguments.cuh"
#include "memory.cuh"
#include "mma_tiles.cuh"

// One of the two streams.
struct Stream {
    const Element *x, *weight, *bias, *norm_weight;
    Element *y;
    int64_t x_stride, weight_stride, y_stride;
    int rows, in_features, out_features;
};

__device__ __forceinline__ Stream stream_of(const JointLinearKernelArgs &args, bool is_context) {
    const auto in = [&](const void *own, const void *context) {
        return static_cast<const Element *>(is_context ? context : own);
    };
    return {
        in(args.x, args.context_x),
        in(args.weight, args.context_weight),
        in(args.bias, args.context_bias),
        in(args.norm_weight, args.context_norm_weight),
        static_cast<Element *>(is_context ? args.context_y : args.y),
        is_context ? args.context_x_stride : args.x_stride,
        is_context ? args.context_weight_stride : args.weight_stride,
        is_context ? args.context_y_stride : args.y_stride,
        is_context ? args.context_rows : args.rows,
        is_context ? args.context_in : args.in_features,
        is_context ? args.context_out : args.out_features,
    };
}

// Starts the copy of 64 columns of kRows rows of a matrix (rows, columns) in global memory. 8
// neighbouring threads have the 128 bytes of a row.
template <int kRows, int kThreads>
__device__ __forceinline__ void copy_piece(uint32_t piece_smem, const Element *matrix_gmem,
                                           int64_t stride, int first_row, int rows,
                                           int first_column, int columns) {
    constexpr int kPass = kThreads / kThreadsPerRow; // rows that all threads copy at once
    const int own_row = threadIdx.x / kThreadsPerRow;
    const int column = threadIdx.x % kThreadsPerRow * kChunk;
    const bool is_inside = first_column + column < columns;
    const Element *src_gmem =
        matrix_gmem + int64_t(first_row + own_row) * stride + first_column + column;
#pragma unroll
    for (int i = 0; i < kRows; i += kPass) {
        const int row = i + own_row;
        if (kRows % kPass == 0 || row < kRows) {
            cp_async_16_L2_128B(piece_smem + smem_offset(row, column), src_gmem,
                                is_inside && first_row + row < rows ? kChunkBytes : 0);
        }
        src_gmem += kPass * stride;
    }
}

// Starts the copy of kLength elements of a vector from `first` on; zeros stand for those behind the
// last, and for all of a vector that is null.
template <int kLength>
__device__ __forceinline__ void copy_vector(uint32_t vector_smem, const Element *vector_gmem,
                                            int first, int length) {
    const int i = threadIdx.x * kChunk;
    if (i < kLength) {
        const bool exists = vector_gmem != nullptr && first + i < length;
        cp_async_16(vector_smem + i * sizeof(Element), vector_gmem + first + i,
                    exists ? kChunkBytes : 0);
    }
}

// The same of the bias and, behind it, the weights of the norm.
template <int kLength>
__device__ __forceinline__ void copy_vectors(uint32_t bias_smem, const Stream &stream, int first) {
    copy_vector<kLength>(bias_smem, stream.bias, first, stream.out_features);
    copy_vector<kLength>(bias_smem + kLength * sizeof(Element), stream.norm_weight, first,
                         stream.out_features);
}

// Elements i and i + 1 of a vector in shared memory.
template <DType kDType>
__device__ __forceinline__ float2 load_pair(uint32_t vector_smem, int i) {
    const uint32_t pair = load_smem_4(vector_smem + i * sizeof(Element));
    return {to_float<kDType>(Element(pair)), to_float<kDType>(Element(pair >> 16))};
}

// The first row and column of a warp in the thread block's tile.
struct Place {
    int row, column;
};

template <typename Kernels>
__device__ __forceinline__ Place warp_place() {
    constexpr JointLinearKernelConfig cfg = Kernels::value;
    const int warp = threadIdx.x / 32;
    return {warp / cfg.column_warps() * cfg.warp_rows,
            warp % cfg.column_warps() * cfg.warp_columns()};
}
