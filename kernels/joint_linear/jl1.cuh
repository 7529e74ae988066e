#pragma once
// Step 1 of the joint_linear family: two streams in one launch.
//
// y = x @ W^T + b for the rows of a sequence and for those of its context, each with W and b of its
// own, and the RMS norm of y with a weight, if the call asks for it.
//
// The parts
//   1. One grid has the tiles of both streams. A thread block finds by its index which stream it
//      has, and takes the pointers and sizes of that one.
//   2. Pieces of 64 columns of x and of W go through two buffers in shared memory by cp.async; with
//      128 input features both are in flight at once. A row that does not exist, and columns behind
//      the last, are zeros.
//   3. A warp has warp_rows rows and a share of the columns, and adds in fp32. With a norm the
//   thread
//      block has whole rows: squares of the sums are added up over the four lanes of a row, and
//      over its warps through shared memory. y is rounded once, behind the norm.
//   4. y goes through the memory of the pieces, and from there to global memory in 16-byte chunks.
//
// Why: a block of width 128 has two linear layers before attention and two behind it, with two
// norms, six launches. At batch 64, 186 + 64 tokens, these move 16 MB before attention and 8 MB
// behind it, 4.4 and 2.2 us at the 3.7 TB/s of a copy on an H200; measured they take 35 us
// together. At batch 1, 0.25 MB, launches are all of the time.
//   A tile of 64 rows and 128 outputs reads 48 KB with 128 input features: four thread blocks per
// SM have 192 KB in flight. Warps of 32 x 64 outputs read 24 KB of fragments for each 64 columns,
// 16 x 128 would read 36.
// Expected on an H200: 6 us before attention and 5 us behind it at batch 64; 3 us each at batch 1.
//
// benchmark:begin
// benchmark:end
// Verdict: not measured yet.
//
// Phases: 1 tile, 2 pieces of x and W, 3 y += x @ W^T, 4 bias, 5 norm, 6 store.

#include "cp_async.cuh"
#include "kernels/joint_linear/arguments.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

namespace jl1 {

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

// Elements i and i + 1 of a vector in shared memory.
template <DType kDType>
__device__ __forceinline__ float2 load_pair(uint32_t vector_smem, int i) {
    const uint32_t pair = load_smem_4(vector_smem + i * sizeof(Element));
    return {to_float<kDType>(Element(pair)), to_float<kDType>(Element(pair >> 16))};
}

// Thread blocks per SM: 16 warps with 128 registers per thread, where that is enough for the sums.
constexpr int blocks_per_SM(const JointLinearKernelConfig &cfg) {
    return cfg.warp_rows * cfg.warp_columns() / 32 > 64 ? 1 : 16 / cfg.n_warps;
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads(), blocks_per_SM(Kernels::value))
    linear_kernel(const __grid_constant__ JointLinearKernelArgs args) {
    constexpr JointLinearKernelConfig cfg = Kernels::value;
    constexpr DType kDType = cfg.dtype;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kThreads = cfg.n_threads();
    constexpr int kColumnWarps = cfg.column_warps();
    constexpr int kRowTiles = cfg.warp_rows / kMmaM, kTiles = cfg.warp_columns() / kMmaN;
    static_assert(B_c / kChunk <= kThreads, "a thread copies one chunk of the bias at most");

    // Two buffers: pieces of x (B_r, 64) and of W (B_c, 64); later y (B_r, B_c)
    extern __shared__ __align__(128) Element smem[];
    constexpr int kBufferBytes = cfg.piece_bytes() / 2;
    const uint32_t pieces_smem = smem_address(smem);
    const uint32_t bias_smem = pieces_smem + cfg.piece_bytes(); // (B_c)
    const uint32_t norm_smem = bias_smem + B_c * int(sizeof(Element)); // (B_c)
    auto &squares_smem = *reinterpret_cast<float (*)[B_r][kColumnWarps]>(
        smem + cfg.piece_bytes() / sizeof(Element) + 2 * B_c);

    // 1. The tile: all columns of some rows are neighbours in the grid, so that x comes from L2
    const bool is_context = int(blockIdx.x) >= args.blocks;
    const Stream stream = stream_of(args, is_context);
    const int tile = blockIdx.x - (is_context ? args.blocks : 0);
    const int column_tiles = (stream.out_features + B_c - 1) / B_c;
    const int first_row = tile / column_tiles * B_r, first_out = tile % column_tiles * B_c;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp / kColumnWarps * cfg.warp_rows; // in the tile
    const int warp_column = warp % kColumnWarps * cfg.warp_columns();

    // 2. Pieces of x and W: global → shared
    const auto copy_async = [&](int piece) {
        if (piece * kPiece < stream.in_features) {
            const uint32_t x_smem = pieces_smem + piece % 2 * kBufferBytes;
            copy_piece<B_r, kThreads>(x_smem, stream.x, stream.x_stride, first_row, stream.rows,
                                      piece * kPiece, stream.in_features);
            copy_piece<B_c, kThreads>(x_smem + piece_offset<B_r>(1), stream.weight,
                                      stream.weight_stride, first_out, stream.out_features,
                                      piece * kPiece, stream.in_features);
        }
        cp_async_commit();
    };
    copy_vector<B_c>(bias_smem, stream.bias, first_out, stream.out_features);
    copy_vector<B_c>(norm_smem, stream.norm_weight, first_out, stream.out_features);
    copy_async(0);
    copy_async(1);

    uint32_t x_lane_offset[4], W_lane_offset[4];
    set_lane_offsets(x_lane_offset, W_lane_offset);
    float y_rmem[kRowTiles][kTiles][4] = {}; // (warp_rows, warp_columns)
#pragma unroll 1
    for (int piece = 0; piece * kPiece < stream.in_features; ++piece) {
        cp_async_wait<1>();
        __syncthreads(); // a warp reads what others have copied

        // 3. y += x @ W^T
        const uint32_t x_smem = pieces_smem + piece % 2 * kBufferBytes;
        const uint32_t W_smem = x_smem + piece_offset<B_r>(1);
#pragma unroll
        for (int k = 0; k < kPiece / kMmaK; ++k) {
            uint32_t x_rmem[kRowTiles][4];
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                ldmatrix_x4(x_rmem[i],
                            fragment_address<B_r>(x_smem, x_lane_offset, warp_row + i * kMmaM, k));
            }
#pragma unroll
            for (int n = 0; n < kTiles / 2; ++n) {
                uint32_t W_rmem[4];
                ldmatrix_x4(W_rmem, fragment_address<B_c>(W_smem, W_lane_offset,
                                                          warp_column + n * kMmaK, k));
                add_product<kDType>(y_rmem, x_rmem, W_rmem, n);
            }
        }
        __syncthreads(); // no warp reads the piece any more
        copy_async(piece + 2);
    }

    // 4. y += b; a lane has columns 2t and 2t + 1 of every eight, of rows g and g + 8
    const int own_column = warp_column + lane % 4 * 2, own_row = warp_row + lane / 4;
    float squares[kRowTiles][2] = {};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const float2 bias = load_pair<kDType>(bias_smem, own_column + n * kMmaN);
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i) {
            float *y = &y_rmem[i / 2][n][i % 2 * 2];
            y[0] += bias.x;
            y[1] += bias.y;
            squares[i / 2][i % 2] = fmaf(y[0], y[0], fmaf(y[1], y[1], squares[i / 2][i % 2]));
        }
    }

    // 5. y *= rstd · weight of the norm, rstd = 1 / sqrt(mean of y² + eps)
    if (stream.norm_weight != nullptr) {
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i) {
            const float sum = quad_sum(squares[i / 2][i % 2]);
            if (lane % 4 == 0) {
                squares_smem[own_row + i * (kMmaM / 2)][warp % kColumnWarps] = sum;
            }
        }
        __syncthreads(); // a warp reads the sums of the other warps of its rows
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i) {
            float sum = 0;
#pragma unroll
            for (int w = 0; w < kColumnWarps; ++w) {
                sum += squares_smem[own_row + i * (kMmaM / 2)][w];
            }
            squares[i / 2][i % 2] = rsqrtf(sum / stream.out_features + args.eps);
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float2 weight = load_pair<kDType>(norm_smem, own_column + n * kMmaN);
#pragma unroll
            for (int i = 0; i < kRowTiles * 2; ++i) {
                y_rmem[i / 2][n][i % 2 * 2] *= squares[i / 2][i % 2] * weight.x;
                y_rmem[i / 2][n][i % 2 * 2 + 1] *= squares[i / 2][i % 2] * weight.y;
            }
        }
    }

    // 6. y: registers → shared, where the pieces were, → global
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const int column = own_column + n * kMmaN;
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i) {
            const float *y = &y_rmem[i / 2][n][i % 2 * 2];
            store_smem_4(pieces_smem + piece_offset<B_r>(column / kPiece) +
                             smem_offset(own_row + i * (kMmaM / 2), column % kPiece),
                         pack<kDType>(y[0], y[1]));
        }
    }
    __syncthreads(); // a thread stores what other warps have computed
    constexpr int kRowChunks = B_c / kChunk, kChunks = B_r * kRowChunks;
#pragma unroll
    for (int i = 0; i < kChunks; i += kThreads) {
        const int chunk = i + threadIdx.x;
        const int row = chunk / kRowChunks, column = chunk % kRowChunks * kChunk;
        if ((kChunks % kThreads == 0 || chunk < kChunks) && first_row + row < stream.rows &&
            first_out + column < stream.out_features) {
            store_gmem_16(stream.y + int64_t(first_row + row) * stream.y_stride + first_out +
                              column,
                          load_smem_16(pieces_smem + piece_offset<B_r>(column / kPiece) +
                                       smem_offset(row, column % kPiece)));
        }
    }
}

} // namespace jl1
