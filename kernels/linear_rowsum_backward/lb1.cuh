#pragma once
// Step 1 of the linear_rowsum_backward family: the base. Sums of columns, written row by row.
//
// y_i = Σ_o (x W^T + b)_io is x_i · ΣW + Σb. With the gradient dy of y, the gradients are
//   dx_ik = dy_i · Σ_o W_ok      dW_ok = Σ_i dy_i · x_ik      db_o = Σ_i dy_i
// The rows of dx are one row, ΣW, times a number each. All rows of dW are the same, and so are all
// elements of db. Both matrices are read once for sums of their columns, and no product is left.
//
// The parts
//   1. columns_kernel has a thread per column of W or x, and a thread block per 256 columns of a
//      piece of the rows. A thread adds up its column in fp32; rows of x count dy times. Σ dy is
//      one more column of x, of ones. There are 4 blocks per SM for each matrix at most.
//   2. combine_kernel adds the pieces: 32 warps take them in turn, and one adds the warps' sums.
//   3. rows_kernel writes dx and dW: a thread loads the sum of its column once and stores it, times
//      dy for dx, in `rows` rows. The first block of as many rows of dW writes their db.
//   4. Every sum has one order, which depends on the number of SMs alone: no atomics.
//
// Why, at 4096 rows of x and of W with 4096 features, in bf16: autograd through F.linear takes two
// products of 137 GFLOP. Here x and W are read once, and dx and dW written once: 134 MB, 40 µs at
// 3.35 TB/s of an H100.
//   A thread loads 2 bytes at a time, and nvcc unrolls the loop by 4: 2048 threads of an SM have 16
// KB in flight, where 3.35 TB/s need 16.5 KB. A store of a warp has 64 bytes of its 512: 8000 of
// them per SM, each of which converts one element per thread.
// Expected: 80 µs, 10 of them between the launches and at their ends: half of 3.35 TB/s.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 11.6 us at 64 input features and 54 us at 4096, with 4096 rows and
// outputs; 1.4 to 1.9 times as fast as torch.compile.
//
// Phases: 1 sums of a piece, 2 sums of all pieces, 3 dx, dW and db.

#include "elements.cuh"
#include "kernels/linear_rowsum_backward/arguments.cuh"

namespace lb1 {

// Elements of a row of sums: the features, and Σ dy behind them.
__device__ __forceinline__ int sums_pitch(const LinearRowsumBackwardKernelArgs &args) {
    return (args.in_features + 1 + 7) / 8 * 8;
}

// Pieces of W, whose sums are needed for dx.
__device__ __forceinline__ int weight_pieces(const LinearRowsumBackwardKernelArgs &args) {
    return args.dx == nullptr ? 0 : (args.out_features + args.weight_piece - 1) / args.weight_piece;
}

// 1. sums of a piece
template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    columns_kernel(const __grid_constant__ LinearRowsumBackwardKernelArgs args) {
    constexpr LinearRowsumBackwardKernelConfig cfg = Kernels::value;
    constexpr DType kDType = cfg.dtype;
    constexpr int kColumns = cfg.columns();

    // The blocks of W, then those of x. For db alone x is not read, and has one tile of columns.
    const int all_tiles = (args.in_features + kColumns - 1) / kColumns;
    const int weight_blocks = all_tiles * weight_pieces(args);
    const bool of_weight = int(blockIdx.x) < weight_blocks;
    const bool has_columns = of_weight || args.dweight != nullptr;
    const int block = blockIdx.x - (of_weight ? 0 : weight_blocks);
    const int tiles = has_columns ? all_tiles : 1, tile = block % tiles, piece = block / tiles;
    const int piece_rows = of_weight ? args.weight_piece : args.x_piece;
    const int end = min((piece + 1) * piece_rows, of_weight ? args.out_features : args.rows);

    const auto *dy_gmem = static_cast<const ElementOf<kDType> *>(args.dy); // (rows)
    const auto *matrix_gmem =
        static_cast<const ElementOf<kDType> *>(of_weight ? args.weight : args.x);
    const int64_t stride = of_weight ? args.weight_stride : args.x_stride;
    const int width = has_columns ? args.in_features : 0;
    const int64_t dy_stride = of_weight ? 0 : args.dy_stride;
    const auto dy_of = [&](int row) { // loaded for W, too: a branch would part the loads of rows
        const float dy = to_float<kDType>(__ldg(dy_gmem + row * dy_stride));
        return of_weight ? 1.0f : dy;
    };
    const int column = tile * kColumns + threadIdx.x;
    float sum = 0.0f, dy_sum = 0.0f;
    int row = piece * piece_rows;
    if (column < width) {
#pragma unroll 4 // loads of 4 rows in flight
        for (; row < end; ++row) {
            const float dy = dy_of(row);
            const auto *value_gmem = matrix_gmem + row * stride + column;
            sum = fmaf(dy, to_float<kDType>(__ldg(value_gmem)), sum);
            dy_sum += dy;
        }
    }
#pragma unroll 1
    for (; !has_columns && row < end; ++row) { // for db alone
        const float dy = dy_of(row);
        dy_sum += dy;
    }

    const int first_piece = of_weight ? 0 : weight_pieces(args);
    float *partial_gmem = args.partial + int64_t(first_piece + piece) * sums_pitch(args);
    if (column < width) {
        partial_gmem[column] = sum;
    }
    if (!of_weight && column == 0) {
        partial_gmem[args.in_features] = dy_sum;
    }
}

// 2. sums of all pieces
template <typename Kernels>
__global__ void __launch_bounds__(1024)
    combine_kernel(const __grid_constant__ LinearRowsumBackwardKernelArgs args) {
    constexpr int kWarps = 32; // of the block, which has 32 columns

    extern __shared__ float smem[]; // (kWarps, 32)

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int pitch = sums_pitch(args), blocks = (pitch + 31) / 32;
    const bool of_weight = args.dx != nullptr && int(blockIdx.x) < blocks;
    const int column = blockIdx.x % blocks * 32 + lane;
    const bool is_sum = column < args.in_features ? of_weight || args.dweight != nullptr
                                                  : column == args.in_features && !of_weight;
    const int first_piece = of_weight ? 0 : weight_pieces(args);
    const int x_pieces = (args.rows + args.x_piece - 1) / args.x_piece;
    const int end = of_weight ? weight_pieces(args) : first_piece + x_pieces;
    float sum = 0.0f;
    if (is_sum) {
#pragma unroll 4 // loads of 4 pieces in flight
        for (int piece = first_piece + warp; piece < end; piece += kWarps) {
            sum += __ldg(args.partial + int64_t(piece) * pitch + column);
        }
    }
    smem[warp * 32 + lane] = sum;
    __syncthreads(); // warp 0 adds what all warps have written
    if (warp > 0 || column >= pitch) {
        return;
    }
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
        sum += smem[w * 32 + lane];
    }
    args.sums[(of_weight ? 0 : pitch) + column] = sum; // 0 behind the last one
}

// 3. dx, dW and db
template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    rows_kernel(const __grid_constant__ LinearRowsumBackwardKernelArgs args) {
    constexpr LinearRowsumBackwardKernelConfig cfg = Kernels::value;
    constexpr DType kDType = cfg.dtype;
    constexpr int kColumns = cfg.columns(), kRows = cfg.rows;

    // The blocks of dx, then those of dW. For db alone there is one tile of columns.
    const int all_tiles = (args.in_features + kColumns - 1) / kColumns;
    const int dx_blocks = args.dx == nullptr ? 0 : all_tiles * ((args.rows + kRows - 1) / kRows);
    const bool of_dx = int(blockIdx.x) < dx_blocks;
    const bool has_columns = of_dx || args.dweight != nullptr;
    const int block = blockIdx.x - (of_dx ? 0 : dx_blocks);
    const int tiles = has_columns ? all_tiles : 1, tile = block % tiles;
    const int first_row = block / tiles * kRows;
    const int end = min(first_row + kRows, of_dx ? args.rows : args.out_features);

    const auto *dy_gmem = static_cast<const ElementOf<kDType> *>(args.dy); // (rows)
    const float *sums_gmem = args.sums + (of_dx ? 0 : sums_pitch(args));
    auto *matrix_gmem = static_cast<ElementOf<kDType> *>(of_dx ? args.dx : args.dweight);
    const int64_t stride = of_dx ? args.dx_stride : args.dweight_stride;
    const int width = has_columns ? args.in_features : 0;
    const int64_t dy_stride = of_dx ? args.dy_stride : 0;
    const auto dy_of = [&](int row) { // loaded for dW, too, without a branch
        const float dy = to_float<kDType>(__ldg(dy_gmem + row * dy_stride));
        return of_dx ? dy : 1.0f;
    };
    const int column = tile * kColumns + threadIdx.x;
    if (column < width) {
        const float sum = __ldg(sums_gmem + column);
#pragma unroll 4
        for (int row = first_row; row < end; ++row) {
            matrix_gmem[row * stride + column] = from_float<kDType>(dy_of(row) * sum);
        }
    }
    if (!of_dx && tile == 0 && args.dbias != nullptr) {
        auto *dbias_gmem = static_cast<ElementOf<kDType> *>(args.dbias);
        const auto dy_sum = from_float<kDType>(__ldg(sums_gmem + args.in_features));
        for (int row = first_row + threadIdx.x; row < end; row += cfg.n_threads()) {
            dbias_gmem[row * args.dbias_stride] = dy_sum;
        }
    }
}

} // namespace lb1
