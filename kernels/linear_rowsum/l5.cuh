#pragma once
// Step 5 of the linear_rowsum family: rows share ΣW. Parent: l4.
//
// What changed
//   1. A thread block of rows_kernel has `rows` rows of x. Each chunk of ΣW that a thread loads
//      serves all of them, and the loads of their chunks of x are issued together.
//
// Why: ΣW has 4 bytes per feature, and x has 2 in bf16. l4 loads ΣW for each row, so that two
// thirds of all loads are ΣW: 64 MB from L1 and L2 beside 33.5 MB of x at 4096 x 4096. With 4 rows
// ΣW is a third of all loads, 16 MB. A thread has 4 loads of x in flight instead of 1.
//   Cost: a sum per row and thread, and a chunk of x per row, 80 registers instead of 29.
// Expected at 4096 x 4096 x 4096: 30 µs instead of 38; 66% of 3.35 TB/s of an H100, since three
// launches and their ends take about 10 µs.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at features 4096, and share of
// F.linear(x, W, b).sum(-1) in the harmonic mean over features. 8 warps: 2,543, 4.88. Cost: 57
// registers per thread, 8 KiB of shared memory per block, 4 blocks per SM.
// benchmark:end
// Verdict: on an H200 1 to 5% slower than l4: the sums of W come from the L2 cache fast enough.
//
// Phases: as l3.

#include "elements.cuh"
#include "kernels/linear_rowsum/arguments.cuh"

namespace l5 {

// Whether every row of a matrix begins at a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ bool is_aligned(const T *matrix, int64_t stride) {
    const auto begin = reinterpret_cast<uintptr_t>(matrix), bytes = uintptr_t(stride) * sizeof(T);
    return (begin | bytes) % kChunkBytes == 0;
}

// A chunk of a row from its `first` element on, which lies at a multiple of 16 bytes.
template <DType kDType>
__device__ __forceinline__ void load_chunk(float (&x_rmem)[kChunkElements<kDType>],
                                           const ElementOf<kDType> *row_gmem, int first) {
    unpack_chunk<kDType>(x_rmem, __ldg(reinterpret_cast<const uint4 *>(row_gmem + first)));
}

// The same one by one, for a chunk that lies anywhere or ends behind the row: zeros stand there.
template <DType kDType>
__device__ __forceinline__ void load_elements(float (&x_rmem)[kChunkElements<kDType>],
                                              const ElementOf<kDType> *row_gmem, int first,
                                              int width) {
#pragma unroll
    for (int i = 0; i < kChunkElements<kDType>; ++i) {
        x_rmem[i] = first + i < width ? to_float<kDType>(__ldg(row_gmem + first + i)) : 0.0f;
    }
}

template <int kChunk>
__device__ __forceinline__ void add(float (&sum_rmem)[kChunk], const float (&W_rmem)[kChunk]) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        sum_rmem[i] += W_rmem[i];
    }
}

// in_features, rounded up to a multiple of 8 elements: ΣW has zeros behind the last one.
__device__ __forceinline__ int padded_features(const LinearRowsumKernelArgs &args) {
    return (args.in_features + 7) / 8 * 8;
}

// 1. sums of a piece of W
template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    columns_kernel(const __grid_constant__ LinearRowsumKernelArgs args) {
    constexpr LinearRowsumKernelConfig cfg = Kernels::value;
    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kColumns = cfg.columns();
    constexpr int kChunk = kChunkElements<kDType>;

    extern __shared__ float smem[]; // (kWarps, kColumns)

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tiles = (args.in_features + kColumns - 1) / kColumns;
    const int first_column = blockIdx.x % tiles * kColumns, piece = blockIdx.x / tiles;
    const int first = first_column + lane * kChunk;
    const int end = min((piece + 1) * args.piece, args.out_features);

    const auto *W_gmem = static_cast<const ElementOf<kDType> *>(args.weight);
    const bool is_chunk =
        is_aligned(W_gmem, args.weight_stride) && first + kChunk <= args.in_features;
    float sum_rmem[kChunk] = {};
    int out = piece * args.piece + warp;
    if (is_chunk) {
#pragma unroll 4 // loads of 4 rows in flight
        for (; out < end; out += kWarps) {
            float W_rmem[kChunk];
            load_chunk<kDType>(W_rmem, W_gmem + out * args.weight_stride, first);
            add<kChunk>(sum_rmem, W_rmem);
        }
    }
#pragma unroll 1 // 4 rows would take 103 registers, with 2 blocks per SM instead of 4
    for (; out < end; out += kWarps) {
        float W_rmem[kChunk];
        load_elements<kDType>(W_rmem, W_gmem + out * args.weight_stride, first, args.in_features);
        add<kChunk>(sum_rmem, W_rmem);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        smem[warp * kColumns + lane * kChunk + i] = sum_rmem[i];
    }
    __syncthreads(); // a thread adds what all warps have written

    const int padded = padded_features(args);
    for (int column = threadIdx.x; column < kColumns; column += cfg.n_threads()) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            sum += smem[w * kColumns + column];
        }
        if (first_column + column < padded) {
            args.partial[int64_t(piece) * padded + first_column + column] = sum;
        }
    }
}

// Adds up the values of all threads of a block, in a fixed order, and returns the sum to each.
template <int kWarps>
__device__ __forceinline__ float block_sum(float value, float *smem) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        value += __shfl_xor_sync(0xffffffff, value, lanes);
    }
    if (threadIdx.x % 32 == 0) {
        smem[threadIdx.x / 32] = value;
    }
    __syncthreads(); // each thread adds what all warps have written
    value = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        value += smem[w];
    }
    return value;
}

// 2. ΣW and Σb
template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    combine_kernel(const __grid_constant__ LinearRowsumKernelArgs args) {
    constexpr LinearRowsumKernelConfig cfg = Kernels::value;
    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.n_threads();

    extern __shared__ float smem[];

    const int padded = padded_features(args);
    float sum = 0.0f;
    if (blockIdx.x + 1 == gridDim.x) {
        const auto *bias_gmem = static_cast<const ElementOf<kDType> *>(args.bias);
        const int n_bias = bias_gmem != nullptr ? args.out_features : 0;
        for (int out = threadIdx.x; out < n_bias; out += kThreads) {
            sum += to_float<kDType>(__ldg(bias_gmem + out * args.bias_stride));
        }
        args.sums[padded] = block_sum<cfg.n_warps>(sum, smem);
        return;
    }
    const int column = blockIdx.x * kThreads + threadIdx.x;
    if (column < padded) {
        const int pieces = (args.out_features + args.piece - 1) / args.piece;
#pragma unroll 4
        for (int piece = 0; piece < pieces; ++piece) {
            sum += args.partial[int64_t(piece) * padded + column];
        }
        args.sums[column] = sum;
    }
}

// 3. y = x · ΣW + Σb
template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    rows_kernel(const __grid_constant__ LinearRowsumKernelArgs args) {
    constexpr LinearRowsumKernelConfig cfg = Kernels::value;
    constexpr DType kDType = cfg.dtype;
    constexpr int kRows = cfg.rows, kChunk = kChunkElements<kDType>;

    extern __shared__ float smem[]; // (kRows, kWarps)

    const int first_row = blockIdx.x * kRows;
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x);
    const bool aligned = is_aligned(x_gmem, args.x_stride);
    float y_rmem[kRows] = {};
    for (int first = threadIdx.x * kChunk; first < args.in_features;
         first += cfg.n_threads() * kChunk) {
        float sum_rmem[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; i += 4) {
            const auto sums = *reinterpret_cast<const float4 *>(args.sums + first + i);
            sum_rmem[i] = sums.x, sum_rmem[i + 1] = sums.y;
            sum_rmem[i + 2] = sums.z, sum_rmem[i + 3] = sums.w;
        }
        float x_rmem[kRows][kChunk];
        const auto row_gmem = [&](int r) { // the last row again for those behind it, not stored
            return x_gmem + min(first_row + r, args.rows - 1) * args.x_stride;
        };
        if (aligned && first + kChunk <= args.in_features) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                load_chunk<kDType>(x_rmem[r], row_gmem(r), first);
            }
        } else {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                load_elements<kDType>(x_rmem[r], row_gmem(r), first, args.in_features);
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                y_rmem[r] = fmaf(x_rmem[r][i], sum_rmem[i], y_rmem[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float y = block_sum<cfg.n_warps>(y_rmem[r], smem + r * cfg.n_warps);
        if (threadIdx.x == 0 && first_row + r < args.rows) {
            static_cast<ElementOf<kDType> *>(args.y)[(first_row + r) * args.y_stride] =
                from_float<kDType>(y + args.sums[padded_features(args)]);
        }
    }
}

} // namespace l5
