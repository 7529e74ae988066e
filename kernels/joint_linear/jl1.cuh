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
//      thread block has whole rows: squares of the sums are added up over the four lanes of a row,
//      and over its warps through shared memory. y is rounded once, behind the norm.
//   4. y goes through the memory of the pieces, and from there to global memory in chunks.
//
// Why: a block of width 128 has two linear layers before attention and two behind it, with two
// norms, six launches. At batch 64, 186 + 64 tokens, these have to move 17 MB before attention and
// 8 MB behind it, 4.5 and 2.2 us at the 3.7 TB/s of a copy on an H200; measured they take 35 us
// together. At batch 1 it is 0.6 MB, and launches are all of the time.
//   A tile of 64 rows and 128 outputs reads 48 KB with 128 input features: four thread blocks per
// SM have 192 KB in flight. Its four warps of 32 x 64 outputs read 48 KB of fragments for each 64
// columns; warps of 16 x 128 would read 72.
// Expected on an H200: 6 us before attention and 5 us behind it at batch 64; 3 us each at batch 1.
//
// benchmark:begin
// benchmark:end
// Verdict: kept. On an H200 with the norm 6.3 us at batch 64 and 2.5 at batch 1, where PyTorch's
// two matrix products and two norms take 22.3 and 8.7. Before attention 11.2 and 2.5 us, where
// two matrix products take 11.2 and 5.8.
//
// Phases: 1 tile, 2 pieces of x and W, 3 y += x @ W^T, 4 bias, 5 norm, 6 y to shared memory,
// 7 store.

#include "cp_async.cuh"
#include "kernels/joint_linear/arguments.cuh"
#include "kernels/joint_linear/parts.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

namespace jl1 {

// y (warp_rows, warp_columns) += x @ W^T over a piece of x and of W.
template <typename Kernels, int kRowTiles, int kTiles>
__device__ __forceinline__ void
multiply_piece(float (&y_rmem)[kRowTiles][kTiles][4], uint32_t x_smem, uint32_t W_smem,
               const uint32_t (&x_lane_offset)[4], const uint32_t (&W_lane_offset)[4],
               const Place &place) {
    constexpr JointLinearKernelConfig cfg = Kernels::value;
#pragma unroll
    for (int k = 0; k < kPiece / kMmaK; ++k) {
        uint32_t x_rmem[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            ldmatrix_x4(x_rmem[i],
                        fragment_address<cfg.B_r>(x_smem, x_lane_offset, place.row + i * kMmaM, k));
        }
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
            uint32_t W_rmem[4];
            ldmatrix_x4(W_rmem, fragment_address<cfg.B_c>(W_smem, W_lane_offset,
                                                          place.column + n * kMmaK, k));
            add_product<cfg.dtype>(y_rmem, x_rmem, W_rmem, n);
        }
    }
}

// y += b, and the norm of y, if the stream has one. A lane has columns 2t and 2t + 1 of every
// eight, of rows g and g + 8. The warps of a row exchange their sums of squares.
template <typename Kernels, int kRowTiles, int kTiles>
__device__ __forceinline__ void
add_bias_and_norm(float (&y_rmem)[kRowTiles][kTiles][4], const Stream &stream, uint32_t bias_smem,
                  float (&squares_smem)[Kernels::value.B_r][Kernels::value.column_warps()],
                  float eps, const Place &place) {
    constexpr JointLinearKernelConfig cfg = Kernels::value;
    constexpr int kColumnWarps = cfg.column_warps();
    const int lane = threadIdx.x % 32;
    const int own_column = place.column + lane % 4 * 2, own_row = place.row + lane / 4;

    // 4. y += b
    float squares[kRowTiles][2] = {};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const float2 bias = load_pair<cfg.dtype>(bias_smem, own_column + n * kMmaN);
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i) {
            float *y = &y_rmem[i / 2][n][i % 2 * 2];
            y[0] += bias.x;
            y[1] += bias.y;
            squares[i / 2][i % 2] = fmaf(y[0], y[0], fmaf(y[1], y[1], squares[i / 2][i % 2]));
        }
    }
    if (stream.norm_weight == nullptr) {
        return;
    }

    // 5. y *= rstd · weight of the norm, rstd = 1 / sqrt(mean of y² + eps)
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) {
        const float sum = quad_sum(squares[i / 2][i % 2]);
        if (lane % 4 == 0) {
            squares_smem[own_row + i * (kMmaM / 2)][threadIdx.x / 32 % kColumnWarps] = sum;
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
        squares[i / 2][i % 2] = rsqrtf(sum / stream.out_features + eps);
    }
    const uint32_t norm_smem = bias_smem + cfg.B_c * int(sizeof(Element)); // behind the bias
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const float2 weight = load_pair<cfg.dtype>(norm_smem, own_column + n * kMmaN);
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i) {
            y_rmem[i / 2][n][i % 2 * 2] *= squares[i / 2][i % 2] * weight.x;
            y_rmem[i / 2][n][i % 2 * 2 + 1] *= squares[i / 2][i % 2] * weight.y;
        }
    }
}

// y of a thread block: registers → shared → global, in whole chunks of rows.
template <typename Kernels, int kRowTiles, int kTiles>
__device__ __forceinline__ void store_y(const float (&y_rmem)[kRowTiles][kTiles][4],
                                        uint32_t y_smem, const Stream &stream, int first_row,
                                        int first_out, const Place &place) {
    constexpr JointLinearKernelConfig cfg = Kernels::value;
    constexpr int B_r = cfg.B_r, kThreads = cfg.n_threads();
    const int lane = threadIdx.x % 32;

    // 6. y, rounded: registers → shared
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const int column = place.column + lane % 4 * 2 + n * kMmaN;
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i) {
            const float *y = &y_rmem[i / 2][n][i % 2 * 2];
            const int row = place.row + lane / 4 + i * (kMmaM / 2);
            store_smem_4(y_smem + piece_offset<B_r>(column / kPiece) +
                             smem_offset(row, column % kPiece),
                         pack<cfg.dtype>(y[0], y[1]));
        }
    }
    __syncthreads(); // a thread stores what other warps have computed
    constexpr int kRowChunks = cfg.B_c / kChunk, kChunks = B_r * kRowChunks;

    // 7. Shared → global
#pragma unroll
    for (int i = 0; i < kChunks; i += kThreads) {
        const int chunk = i + threadIdx.x;
        const int row = chunk / kRowChunks, column = chunk % kRowChunks * kChunk;
        if ((kChunks % kThreads == 0 || chunk < kChunks) && first_row + row < stream.rows &&
            first_out + column < stream.out_features) {
            store_gmem_16(stream.y + int64_t(first_row + row) * stream.y_stride + first_out +
                              column,
                          load_smem_16(y_smem + piece_offset<B_r>(column / kPiece) +
                                       smem_offset(row, column % kPiece)));
        }
    }
}

// Thread blocks per SM: 16 warps with 128 registers per thread, where that is enough for the sums.
constexpr int blocks_per_SM(const JointLinearKernelConfig &cfg) {
    return cfg.warp_rows * cfg.warp_columns() / 32 > 64 ? 1 : 16 / cfg.n_warps;
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads(), blocks_per_SM(Kernels::value))
    linear_kernel(const __grid_constant__ JointLinearKernelArgs args) {
    constexpr JointLinearKernelConfig cfg = Kernels::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kThreads = cfg.n_threads();
    constexpr int kRowTiles = cfg.warp_rows / kMmaM, kTiles = cfg.warp_columns() / kMmaN;
    static_assert(B_c / kChunk <= kThreads, "a thread copies one chunk of the bias at most");

    // Two buffers: pieces of x (B_r, 64) and of W (B_c, 64); later y (B_r, B_c)
    extern __shared__ __align__(128) Element smem[];
    constexpr int kBufferBytes = cfg.piece_bytes() / 2;
    const uint32_t pieces_smem = smem_address(smem);
    const uint32_t bias_smem =
        pieces_smem + cfg.piece_bytes(); // (2, B_c): weights of the norm, too
    auto &squares_smem = *reinterpret_cast<float (*)[B_r][cfg.column_warps()]>(
        smem + cfg.piece_bytes() / sizeof(Element) + 2 * B_c);

    // 1. The tile: all columns of some rows are neighbours in the grid, so that x comes from L2
    const bool is_context = int(blockIdx.x) >= args.blocks;
    const Stream stream = stream_of(args, is_context);
    const int tile = blockIdx.x - (is_context ? args.blocks : 0);
    const int column_tiles = (stream.out_features + B_c - 1) / B_c;
    const int first_row = tile / column_tiles * B_r, first_out = tile % column_tiles * B_c;

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
    copy_vectors<B_c>(bias_smem, stream, first_out);
    copy_async(0);
    copy_async(1);

    const Place place = warp_place<Kernels>();
    uint32_t x_lane_offset[4], W_lane_offset[4];
    set_lane_offsets(x_lane_offset, W_lane_offset);
    float y_rmem[kRowTiles][kTiles][4] = {}; // (warp_rows, warp_columns)
#pragma unroll 1
    for (int piece = 0; piece * kPiece < stream.in_features; ++piece) {
        cp_async_wait<1>();
        __syncthreads(); // a warp reads what others have copied

        // 3. y += x @ W^T
        const uint32_t x_smem = pieces_smem + piece % 2 * kBufferBytes;
        multiply_piece<Kernels>(y_rmem, x_smem, x_smem + piece_offset<B_r>(1), x_lane_offset,
                                W_lane_offset, place);
        __syncthreads(); // no warp reads the piece any more
        copy_async(piece + 2);
    }
    add_bias_and_norm<Kernels>(y_rmem, stream, bias_smem, squares_smem, args.eps, place);
    store_y<Kernels>(y_rmem, pieces_smem, stream, first_row, first_out, place);
}

} // namespace jl1
