#pragma once
// Step 2 of the linear_rowsum_backward family: 16 bytes per lane. Parent: lb1.
//
// What changed
//   1. A lane has a chunk of 16 bytes of columns, 8 of 16 bits or 4 of fp32, where a thread of lb1
//      has one column. A thread block has as many columns as one warp has in chunks.
//   2. The warps of columns_kernel take the rows of the piece in turn, and their sums meet in
//      shared memory. The warps of rows_kernel take rows in turn, too.
//   3. Rows that do not begin at multiples of 16 bytes are loaded and stored one element after the
//      other, and so are the last columns.
//
// Why, in bf16: a load or store of a warp has 512 bytes instead of 64, so that 1000 stores per SM
// write dx and dW instead of 8000. Addresses, dy and loops are paid once for 8 elements. Each of
// 1536 threads of an SM has 4 loads of 16 bytes in flight, 96 KB instead of 16, where 3.35 TB/s of
// an H100 need 16.5 KB.
//   Cost: shared memory for a sum per warp and column, 8 KB with 8 warps.
// Expected at 4096 x 4096 x 4096: 55 µs instead of 80; 73% of 3.35 TB/s.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 8.1 us at 64 input features and 45 us at 4096, where lb1 takes 11.6 and
// 54. At 16384 92% of a copy's speed.
//
// Phases: as lb1.

#include "elements.cuh"
#include "kernels/linear_rowsum_backward/arguments.cuh"
#include "memory.cuh"

namespace lb2 {

// Whether every row of a matrix begins at a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ bool is_aligned(const T *matrix, int64_t stride) {
    const auto begin = reinterpret_cast<uintptr_t>(matrix), bytes = uintptr_t(stride) * sizeof(T);
    return (begin | bytes) % kChunkBytes == 0;
}

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
    constexpr int kWarps = cfg.n_warps, kColumns = cfg.columns(), kSums = kColumns + 1;
    constexpr int kChunk = kChunkElements<kDType>, kAtOnce = 4; // rows of a warp

    extern __shared__ float smem[]; // (kWarps, kSums): of each column, and Σ dy

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
    const int first_column = tile * kColumns, first = first_column + lane * kChunk;
    const bool is_chunk = is_aligned(matrix_gmem, stride) && first + kChunk <= width;
    float sum_rmem[kChunk] = {}, dy_sum = 0.0f;
    int row = piece * piece_rows + warp;
    for (; is_chunk && row < end; row += kAtOnce * kWarps) {
        uint4 chunk_rmem[kAtOnce]; // 0 behind the last row, and so is its dy
        float dy_rmem[kAtOnce];
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            const int at = row + r * kWarps;
            const auto *chunk_gmem = matrix_gmem + at * stride + first;
            chunk_rmem[r] = at < end ? __ldg(reinterpret_cast<const uint4 *>(chunk_gmem)) : uint4{};
            dy_rmem[r] = at < end ? dy_of(at) : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            float value_rmem[kChunk];
            unpack_chunk<kDType>(value_rmem, chunk_rmem[r]);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                sum_rmem[i] = fmaf(dy_rmem[r], value_rmem[i], sum_rmem[i]);
            }
            dy_sum += dy_rmem[r];
        }
    }
#pragma unroll 1 // 4 rows would take more registers than whole chunks
    for (; (first < width || !has_columns) && row < end; row += kWarps) {
        const float dy = dy_of(row);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            const auto *value_gmem = matrix_gmem + row * stride + first + i;
            sum_rmem[i] = first + i < width
                              ? fmaf(dy, to_float<kDType>(__ldg(value_gmem)), sum_rmem[i])
                              : 0.0f;
        }
        dy_sum += dy;
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        smem[warp * kSums + lane * kChunk + i] = sum_rmem[i];
    }
    if (lane == 0) {
        smem[warp * kSums + kColumns] = dy_sum;
    }
    __syncthreads(); // a thread adds what all warps have written

    const int first_piece = of_weight ? 0 : weight_pieces(args);
    float *partial_gmem = args.partial + int64_t(first_piece + piece) * sums_pitch(args);
#pragma unroll 1 // a turn, and one more of a warp
    for (int column = threadIdx.x; column < kSums; column += cfg.n_threads()) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            sum += smem[w * kSums + column];
        }
        if (column == kColumns && !of_weight && tile == 0) {
            partial_gmem[args.in_features] = sum;
        } else if (column < kColumns && first_column + column < width) {
            partial_gmem[first_column + column] = sum;
        }
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
    constexpr int kWarps = cfg.n_warps, kChunk = kChunkElements<kDType>;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
    const int first = tile * kColumns + lane * kChunk;
    const bool is_chunk = is_aligned(matrix_gmem, stride) && first + kChunk <= width;
    if (first < width) {
        float sum_rmem[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            sum_rmem[i] = __ldg(sums_gmem + first + i); // zeros behind the last feature and Σ dy
        }
        int row = first_row + warp;
        if (is_chunk) {
#pragma unroll 4
            for (; row < end; row += kWarps) {
                const float dy = dy_of(row);
                float value_rmem[kChunk];
#pragma unroll
                for (int i = 0; i < kChunk; ++i) {
                    value_rmem[i] = dy * sum_rmem[i];
                }
                store_gmem_16(matrix_gmem + row * stride + first, pack_chunk<kDType>(value_rmem));
            }
        }
#pragma unroll 1
        for (; row < end; row += kWarps) {
            const float dy = dy_of(row);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                if (first + i < width) {
                    matrix_gmem[row * stride + first + i] = from_float<kDType>(dy * sum_rmem[i]);
                }
            }
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

} // namespace lb2
