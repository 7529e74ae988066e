#pragma once
// Step 6 of the linear_rowsum family: one launch. Parent: l5.
//
// What changed
//   1. One kernel takes units of work by a counter: pieces of columns of W and the bias first, then
//      groups of rows of x. No unit waits for one that is taken later, so that no thread block
//      waits for one that has not begun, however many run at once.
//   2. The last thread block to sum a piece of its columns adds up their pieces, in their order,
//      and counts the columns as ready. A thread block that takes rows waits until all are.
//   3. atom.inc wraps each counter to zero at its last count, for the next call. The counter of
//      columns that are ready is set to zero by the thread block that leaves last.
//
// Why: l4 reads 16384 features at 91% of a copy's speed on an H200, 4096 at 77% and 1024 at 37%,
// as x and W take 80, 20 and 5 µs and three launches the same. Behind each of two kernels the GPU
// empties, then a launch fills it again.
//   Cost: an atomic and two barriers of the thread block per unit, about 1 µs, which the other
// thread blocks of an SM hide; all wait once, while the pieces of the last columns are added. The
// compiler would give all phases together 80 registers, and is held to 64 for 4 blocks per SM.
// Expected at 4096 x 4096 x 4096 on an H200: 22 µs instead of 25 of l4, 88% of a copy; with 1024
// features 12 µs instead of 19.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at features 4096, and share of
// F.linear(x, W, b).sum(-1) in the harmonic mean over features. 8 warps: 2,623, 5.23. Cost: 64
// registers per thread, 8 KiB of shared memory per block, 4 blocks per SM.
// benchmark:end
// Verdict: kept: on an H200 17.4 us at 1024 input features and 25.6 at 4096, where l5 takes 19.3
// and 26.4.
//
// Phases: 1 sums of a piece of W, 2 ΣW and Σb, 3 y = x · ΣW + Σb.

#include "elements.cuh"
#include "kernels/linear_rowsum/arguments.cuh"

namespace l6 {

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

// 1. sums of a piece of W. smem: (kWarps, kColumns)
template <LinearRowsumKernelConfig cfg>
__device__ __forceinline__ void sum_piece(int piece, int first_column, float *smem,
                                          const LinearRowsumKernelArgs &args) {
    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kColumns = cfg.columns();
    constexpr int kChunk = kChunkElements<kDType>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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

// 2. ΣW of the columns from first_column on, of which all pieces are summed
template <LinearRowsumKernelConfig cfg>
__device__ __forceinline__ void add_pieces(int pieces, int first_column,
                                           const LinearRowsumKernelArgs &args) {
    const int padded = padded_features(args);
    const int end = min(first_column + cfg.columns(), padded);
    for (int column = first_column + threadIdx.x; column < end; column += cfg.n_threads()) {
        float sum = 0.0f;
#pragma unroll 8 // loads in flight, while all thread blocks wait
        for (int piece = 0; piece < pieces; ++piece) {
            sum += args.partial[int64_t(piece) * padded + column];
        }
        args.sums[column] = sum;
    }
}

// 2. Σb, behind ΣW
template <LinearRowsumKernelConfig cfg>
__device__ __forceinline__ void sum_bias(float *smem, const LinearRowsumKernelArgs &args) {
    const auto *bias_gmem = static_cast<const ElementOf<cfg.dtype> *>(args.bias);
    const int n_bias = bias_gmem != nullptr ? args.out_features : 0;
    float sum = 0.0f;
    for (int out = threadIdx.x; out < n_bias; out += cfg.n_threads()) {
        sum += to_float<cfg.dtype>(__ldg(bias_gmem + out * args.bias_stride));
    }
    args.sums[padded_features(args)] = block_sum<cfg.n_warps>(sum, smem);
}

// 3. y = x · ΣW + Σb of a group of rows. smem: (kRows, kWarps)
template <LinearRowsumKernelConfig cfg>
__device__ __forceinline__ void multiply_rows(int first_row, float *smem,
                                              const LinearRowsumKernelArgs &args) {
    constexpr DType kDType = cfg.dtype;
    constexpr int kRows = cfg.rows, kChunk = kChunkElements<kDType>;
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

// Counts, wrapping to zero behind `last`, by the first thread of a block: with all that its threads
// have written, and each sees what was written before the counts that came earlier. Returns these
// to all threads. `told`: shared memory.
__device__ __forceinline__ int count(int *counter, int last, int &told) {
    __syncthreads(); // all have written, and read what was told before
    if (threadIdx.x == 0) {
        asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                     : "=r"(told)
                     : "l"(counter), "r"(last)
                     : "memory");
    }
    __syncthreads(); // a thread reads what the first has seen
    return told;
}

__device__ __forceinline__ void wait_for(const int *counter, int counts) {
    if (threadIdx.x == 0) {
        int seen;
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                         : "=r"(seen)
                         : "l"(counter)
                         : "memory");
        } while (seen < counts);
    }
    __syncthreads(); // all see what the first has seen
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads(),
                                  1024 / Kernels::value.n_threads()) // 64 registers
    rowsum_kernel(const __grid_constant__ LinearRowsumKernelArgs args) {
    constexpr LinearRowsumKernelConfig cfg = Kernels::value;
    extern __shared__ float smem[];
    __shared__ int told;

    const int tiles = (args.in_features + cfg.columns() - 1) / cfg.columns();
    const int pieces = (args.out_features + args.piece - 1) / args.piece;
    const int n_columns = tiles * pieces + 1, groups = (args.rows + cfg.rows - 1) / cfg.rows;
    // All units are taken once, and each thread block is told once that there are no more.
    const int last = n_columns + groups + gridDim.x - 1;
    int *taken = args.counters, *ready = taken + 1, *summed = ready + 1; // summed: (tiles)
    int unit = count(taken, last, told);
    for (; unit < n_columns; unit = count(taken, last, told)) {
        const int tile = unit % tiles;
        if (unit == n_columns - 1) {
            sum_bias<cfg>(smem, args);
        } else {
            sum_piece<cfg>(unit / tiles, tile * cfg.columns(), smem, args);
            if (count(summed + tile, pieces - 1, told) < pieces - 1) {
                continue;
            }
            add_pieces<cfg>(pieces, tile * cfg.columns(), args);
        }
        count(ready, tiles + 1, told);
    }
    if (unit < n_columns + groups) {
        wait_for(ready, tiles + 1);
    }
    for (; unit < n_columns + groups; unit = count(taken, last, told)) {
        multiply_rows<cfg>((unit - n_columns) * cfg.rows, smem, args);
    }
    if (unit == last && threadIdx.x == 0) {
        *ready = 0; // nobody reads it any more
    }
}

} // namespace l6
