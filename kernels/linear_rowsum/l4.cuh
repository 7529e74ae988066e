#pragma once
// Step 4 of the linear_rowsum family: 16 bytes per lane. Parent: l3.
//
// What changed
//   1. A lane loads a chunk of 16 bytes of W or x, 8 elements of 16 bits or 4 of fp32.
//   2. A thread block of columns_kernel has as many columns as one warp has in chunks. Its warps
//      take the rows of the piece in turn, and their sums meet in shared memory.
//   3. Rows that do not begin at multiples of 16 bytes are loaded element by element, and so are
//      the last columns.
//   4. ΣW ends with zeros at a multiple of 8 elements, so that its loads need no such care.
//
// Why, in bf16: a load of a warp takes 512 bytes instead of 64, and addresses and loops are paid
// once for 8 elements. Each of 1024 threads of an SM has 4 loads of 16 bytes of W in flight, 64 KB
// instead of 8, where 3.35 TB/s of an H100 need 16.5 KB.
//   The loads of ΣW stay: 4 bytes for each 2 of x, from L1 and L2.
// Expected at 4096 x 4096 x 4096: 38 µs instead of 60; 53% of 3.35 TB/s.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at features 4096, and share of
// F.linear(x, W, b).sum(-1) in the harmonic mean over features. 8 warps: 2,660, 5.08. Cost: 57
// registers per thread, 8 KiB of shared memory per block, 4 blocks per SM.
// benchmark:end
// Verdict: 25 us at 4096 on an H200, 29% less than l3; 11% more at 1024, where launches are most of
// it.
//
// Phases: as l3.

#include "elements.cuh"
#include "kernels/linear_rowsum/arguments.cuh"

namespace l4 {

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
    constexpr int kChunk = kChunkElements<kDType>;

    extern __shared__ float smem[]; // (kWarps)

    const int row = blockIdx.x;
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride;
    const bool aligned = is_aligned(x_gmem, 0);
    float y = 0.0f;
    for (int first = threadIdx.x * kChunk; first < args.in_features;
         first += cfg.n_threads() * kChunk) {
        float sum_rmem[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; i += 4) {
            const auto sums = *reinterpret_cast<const float4 *>(args.sums + first + i);
            sum_rmem[i] = sums.x, sum_rmem[i + 1] = sums.y;
            sum_rmem[i + 2] = sums.z, sum_rmem[i + 3] = sums.w;
        }
        float x_rmem[kChunk];
        if (aligned && first + kChunk <= args.in_features) {
            load_chunk<kDType>(x_rmem, x_gmem, first);
        } else {
            load_elements<kDType>(x_rmem, x_gmem, first, args.in_features);
        }
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            y = fmaf(x_rmem[i], sum_rmem[i], y);
        }
    }
    y = block_sum<cfg.n_warps>(y, smem);
    if (threadIdx.x == 0) {
        static_cast<ElementOf<kDType> *>(args.y)[row * args.y_stride] =
            from_float<kDType>(y + args.sums[padded_features(args)]);
    }
}

} // namespace l4
