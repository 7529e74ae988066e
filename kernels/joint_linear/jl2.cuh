#pragma once
// Step 2 of the joint_linear family: weights stay. Parent: jl1.
//
// What changed
//   1. A thread block has B_c columns of W in shared memory, with up to `depth` input features, and
//      computes `turns` tiles of rows with them, one behind the other. The grid has as many thread
//      blocks as the GPU runs at once, or fewer.
//   2. x has two buffers for whole tiles. The next tile is on its way while one is multiplied,
//      normed and stored.
//   3. y takes the buffer of its x on the way to global memory.
//
// Why: a tile of jl1 reads 16 KB of x and 32 KB of W for 64 rows and 128 outputs of 128 features,
// and writes 16. At batch 64 that is 36 MB from L2, and 576 MB at batch 1024, where x has 64 MB. At
// 5.5 TB/s from L2 these take 105 us; the least bytes take 70 from memory. Here W is read once for
// each thread block: 396 of them read 13 MB.
//   A thread block of jl1 waits for its copies, then multiplies, then stores, and other thread
// blocks of the SM fill the gaps, four at a time. Here there are three, each with copies in flight.
// Expected on an H200: 75 us at batch 1024 before attention, 1 us less than jl1 at batch 64, and no
// change at batch 1.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 before attention 9.4 us at batch 64 and 98.8 at batch 1024, where jl1
// takes 11.2 and 132. cuBLAS takes 11.2 and 83.6, so modules leave large batches without a norm
// to it. With the norm 6.7 and 46.3 us, jl1 6.3 and 49.6.
//
// Phases: 1 tiles, 2 W and tiles of x, 3 y = x @ W^T, 4 bias, 5 norm, 6 y to shared memory,
// 7 store.

#include "cp_async.cuh"
#include "kernels/joint_linear/arguments.cuh"
#include "kernels/joint_linear/parts.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

namespace jl2 {

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

// Thread blocks per SM: 16 warps with 128 registers per thread, or 12 with 168 for 64 sums.
constexpr int blocks_per_SM(const JointLinearKernelConfig &cfg) {
    const int sums = cfg.warp_rows * cfg.warp_columns() / 32;
    const int warps = sums > 64 ? cfg.n_warps : sums > 32 ? 12 : 16;
    return warps > cfg.n_warps ? warps / cfg.n_warps : 1;
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads(), blocks_per_SM(Kernels::value))
    linear_kernel(const __grid_constant__ JointLinearKernelArgs args) {
    constexpr JointLinearKernelConfig cfg = Kernels::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kThreads = cfg.n_threads();
    constexpr int kRowTiles = cfg.warp_rows / kMmaM, kTiles = cfg.warp_columns() / kMmaN;
    static_assert(B_c / kChunk <= kThreads, "a thread copies one chunk of the bias at most");

    // W (B_c, depth); two buffers of x (B_r, depth), in which y (B_r, B_c) follows
    extern __shared__ __align__(128) Element smem[];
    constexpr int kBufferBytes = B_r * cfg.depth * int(sizeof(Element));
    const uint32_t W_smem = smem_address(smem);
    const uint32_t buffers_smem = W_smem + B_c * cfg.depth * int(sizeof(Element));
    const uint32_t bias_smem = W_smem + cfg.piece_bytes(); // (2, B_c): weights of the norm, too
    auto &squares_smem = *reinterpret_cast<float (*)[B_r][cfg.column_warps()]>(
        smem + cfg.piece_bytes() / sizeof(Element) + 2 * B_c);

    // 1. The tiles: all columns of some rows are neighbours in the grid, so that x comes from L2
    const bool is_context = int(blockIdx.x) >= args.blocks;
    const Stream stream = stream_of(args, is_context);
    const int slot = blockIdx.x - (is_context ? args.blocks : 0);
    const int column_tiles = (stream.out_features + B_c - 1) / B_c;
    const int first_tile = slot / column_tiles * args.turns, first_out = slot % column_tiles * B_c;
    const int tiles = min(args.turns, (stream.rows + B_r - 1) / B_r - first_tile);

    // 2. W and two tiles of x: global → shared
    const auto copy_async = [&](int tile) {
#pragma unroll 1
        for (int piece = 0; tile < tiles && piece * kPiece < stream.in_features; ++piece) {
            const uint32_t x_smem = buffers_smem + tile % 2 * kBufferBytes;
            copy_piece<B_r, kThreads>(x_smem + piece_offset<B_r>(piece), stream.x, stream.x_stride,
                                      (first_tile + tile) * B_r, stream.rows, piece * kPiece,
                                      stream.in_features);
        }
        cp_async_commit();
    };
    copy_vectors<B_c>(bias_smem, stream, first_out);
#pragma unroll 1
    for (int piece = 0; piece * kPiece < stream.in_features; ++piece) {
        copy_piece<B_c, kThreads>(W_smem + piece_offset<B_c>(piece), stream.weight,
                                  stream.weight_stride, first_out, stream.out_features,
                                  piece * kPiece, stream.in_features);
    }
    copy_async(0);
    copy_async(1);

    const Place place = warp_place<Kernels>();
    uint32_t x_lane_offset[4], W_lane_offset[4];
    set_lane_offsets(x_lane_offset, W_lane_offset);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        cp_async_wait<1>();
        __syncthreads(); // a warp reads what others have copied

        // 3. y = x @ W^T
        const uint32_t x_smem = buffers_smem + tile % 2 * kBufferBytes;
        float y_rmem[kRowTiles][kTiles][4] = {}; // (warp_rows, warp_columns)
#pragma unroll 1
        for (int piece = 0; piece * kPiece < stream.in_features; ++piece) {
            multiply_piece<Kernels>(y_rmem, x_smem + piece_offset<B_r>(piece),
                                    W_smem + piece_offset<B_c>(piece), x_lane_offset, W_lane_offset,
                                    place);
        }
        add_bias_and_norm<Kernels>(y_rmem, stream, bias_smem, squares_smem, args.eps, place);
        __syncthreads(); // no warp reads this x any more
        store_y<Kernels>(y_rmem, x_smem, stream, (first_tile + tile) * B_r, first_out, place);
        __syncthreads(); // nor this y
        copy_async(tile + 2);
    }
}

} // namespace jl2
