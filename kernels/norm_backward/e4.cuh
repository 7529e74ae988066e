#pragma once
// Step 4 of the layer_norm_backward family: threads per row by width. Parent: e3.
//
// What changed
//   1. `row_threads` threads have a row, from 8 to all of the block. A block of n_warps warps takes
//      n_warps · 32 / row_threads rows at a time.
//   2. The two sums of a row are a tree over its own lanes only. Up to 32 threads per row no
//   barrier
//      stands in the loop over rows.
//   3. The rows of a block share its columns. Behind the last row, lanes with the same columns add
//      their sums by shuffles, then warps do by shared memory, one after the other.
//   4. Threads behind the last row have a row of width 0, because all lanes take part in a shuffle.
//
// Why: in e3 all 256 threads have a row. A row of 64 elements of bf16 has 8 chunks, so that 248
// threads have none and still take part in a reduction with a barrier. With 8 threads per row 32
// rows are on their way in a block of 8 warps.
//   Warps of different rows never wait for each other, so that one row's loads run beside another's
// arithmetic. That is what e3 lacks with its 2 blocks per SM.
//   The sums over the rows of a block are added once per tile, not once per row: 8 turns of 8 warps
// with a barrier each. The blocks' sums in `partial` are no more than before.
//   Cost: a warp alone has fewer columns. A row of 1024 elements takes 4 chunks of 32 threads, 96
// registers of chunks and sums. 12 warps of them fit into an SM, and load 48 KiB at once.
// Expected, of 3.35 TB/s at 6 bytes per element: 80% at 64 with 8 threads per row and at 256 to
// 1024 with 32; 70% at 4096 with 128; as e3 from 16384 on.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of PyTorch's
// operator behind the gradients of layer_norm or rms_norm in the harmonic mean over widths. 4
// warps: 2,955, 0.31. Cost: 166 registers per thread, 64 bytes of shared memory per block, 3
// blocks per SM.
// benchmark:end
// Verdict: with threads by width 74 to 78% of a copy's speed from 64 to 2048 on an H200, and 70% at
// 4096.
//
// Phases: as e3.

#include "elements.cuh"
#include "kernels/norm_backward/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"

namespace e4 {

// Adds the values of the kThreads threads of a row and returns the sums to each: by a tree over the
// lanes of each warp, then by one over the row's warps, if it has several. smem: (warps of the
// block).
template <int kThreads>
__device__ __forceinline__ float2 row_sums(float2 value, float2 *smem) {
#pragma unroll
    for (int lanes = 1; lanes < kThreads && lanes < 32; lanes *= 2) {
        value.x += __shfl_xor_sync(0xffffffff, value.x, lanes);
        value.y += __shfl_xor_sync(0xffffffff, value.y, lanes);
    }
    if constexpr (kThreads > 32) {
        constexpr int kWarps = kThreads / 32; // of a row
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) {
            smem[warp] = value;
        }
        __syncthreads(); // a warp reads what the others have written
        value = smem[warp / kWarps * kWarps + lane % kWarps];
#pragma unroll
        for (int lanes = 1; lanes < kWarps; lanes *= 2) {
            value.x += __shfl_xor_sync(0xffffffff, value.x, lanes);
            value.y += __shfl_xor_sync(0xffffffff, value.y, lanes);
        }
    }
    return value;
}

// Whether all rows of a matrix begin at multiples of 16 bytes.
template <typename T>
__device__ __forceinline__ bool is_aligned(const T *matrix, int64_t stride) {
    const auto begin = reinterpret_cast<uintptr_t>(matrix), bytes = uintptr_t(stride) * sizeof(T);
    return (begin | bytes) % kChunkBytes == 0;
}

// Puts an element behind those of a chunk, whose first one leaves.
template <DType kDType>
__device__ __forceinline__ void append(uint4 &chunk, ElementOf<kDType> element) {
    if constexpr (kDType == DType::FP32) {
        chunk = {chunk.y, chunk.z, chunk.w, __float_as_uint(element)};
    } else {
        chunk = {__funnelshift_r(chunk.x, chunk.y, 16), __funnelshift_r(chunk.y, chunk.z, 16),
                 __funnelshift_r(chunk.z, chunk.w, 16), __funnelshift_r(chunk.w, element, 16)};
    }
}

// The elements of a row from `first` on; zeros behind its end. aligned: all chunks of all rows
// begin at multiples of 16 bytes, and none ends behind its row.
template <DType kDType>
__device__ __forceinline__ uint4 load_chunk(const ElementOf<kDType> *row_gmem, int first, int width,
                                            bool aligned) {
    if (aligned) {
        return first < width ? __ldg(reinterpret_cast<const uint4 *>(row_gmem + first)) : uint4{};
    }
    uint4 chunk = {};
#pragma unroll 1 // unrolled, this path would take more registers than the aligned one
    for (int j = 0; j < kChunkElements<kDType>; ++j) {
        append<kDType>(chunk,
                       first + j < width ? __ldg(row_gmem + first + j) : ElementOf<kDType>(0));
    }
    return chunk;
}

// The inverse: stores the elements that the row has.
template <DType kDType>
__device__ __forceinline__ void store_chunk(ElementOf<kDType> *row_gmem,
                                            const float (&rmem)[kChunkElements<kDType>], int first,
                                            int width, bool aligned) {
    constexpr int kChunk = kChunkElements<kDType>;
    if (aligned) {
        if (first < width) {
            store_gmem_16(row_gmem + first, pack_chunk<kDType>(rmem));
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        if (first + j < width) {
            row_gmem[first + j] = from_float<kDType>(rmem[j]);
        }
    }
}

// g = dy · weight for a chunk. weight: null if a call leaves it out.
template <DType kDType>
__device__ __forceinline__ void scale_chunk(float (&g_rmem)[kChunkElements<kDType>], uint4 dy,
                                            const ElementOf<kDType> *weight_gmem, int first,
                                            int width, bool aligned) {
    constexpr int kChunk = kChunkElements<kDType>;
    unpack_chunk<kDType>(g_rmem, dy);
    if (weight_gmem != nullptr) {
        float weight_rmem[kChunk];
        unpack_chunk<kDType>(weight_rmem, load_chunk<kDType>(weight_gmem, first, width, aligned));
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            g_rmem[j] *= weight_rmem[j];
        }
    }
}

// Adds a chunk to Σ g and Σ g · (x - mean). Zeros behind the end of a row add nothing.
template <DType kDType>
__device__ __forceinline__ void
add_sums(float2 &sums, const float (&g_rmem)[kChunkElements<kDType>], uint4 x, float mean) {
    constexpr int kChunk = kChunkElements<kDType>;
    float x_rmem[kChunk];
    unpack_chunk<kDType>(x_rmem, x);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        sums.x += g_rmem[j];
        sums.y = fmaf(g_rmem[j], x_rmem[j] - mean, sums.y);
    }
}

// Adds a chunk to Σ dy · rstd · (x - mean) and Σ dy of its columns.
template <DType kDType>
__device__ __forceinline__ void add_columns(float (&dweight_rmem)[kChunkElements<kDType>],
                                            float (&dbias_rmem)[kChunkElements<kDType>], uint4 dy,
                                            uint4 x, float mean, float rstd) {
    constexpr int kChunk = kChunkElements<kDType>;
    float dy_rmem[kChunk], x_rmem[kChunk];
    unpack_chunk<kDType>(dy_rmem, dy);
    unpack_chunk<kDType>(x_rmem, x);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        dweight_rmem[j] = fmaf(dy_rmem[j] * rstd, x_rmem[j] - mean, dweight_rmem[j]);
        dbias_rmem[j] += dy_rmem[j];
    }
}

// Adds the chunks of a row that a thread has from `begin` on to Σ g and Σ g · (x - mean).
template <DType kDType, int kThreads>
__device__ __forceinline__ void
walk_row(float2 &sums, const ElementOf<kDType> *dy_row, const ElementOf<kDType> *x_row,
         const ElementOf<kDType> *weight_gmem, int begin, int width, bool aligned, float mean) {
    for (int first = begin; first < width; first += kThreads * kChunkElements<kDType>) {
        const uint4 dy = load_chunk<kDType>(dy_row, first, width, aligned);
        const uint4 x = load_chunk<kDType>(x_row, first, width, aligned);
        float g_rmem[kChunkElements<kDType>];
        scale_chunk<kDType>(g_rmem, dy, weight_gmem, first, width, aligned);
        add_sums<kDType>(sums, g_rmem, x, mean);
    }
}

// dx = rstd · (g - mean_g - (x - mean) · slope) for a chunk.
template <DType kDType>
__device__ __forceinline__ void store_gradient(ElementOf<kDType> *dx_row, uint4 dy, uint4 x,
                                               const ElementOf<kDType> *weight_gmem, int first,
                                               int width, bool aligned, float mean, float rstd,
                                               float mean_g, float slope) {
    constexpr int kChunk = kChunkElements<kDType>;
    float g_rmem[kChunk], dx_rmem[kChunk];
    scale_chunk<kDType>(g_rmem, dy, weight_gmem, first, width, aligned);
    unpack_chunk<kDType>(dx_rmem, x);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        dx_rmem[j] = fmaf(mean - dx_rmem[j], slope, g_rmem[j] - mean_g) * rstd;
    }
    store_chunk<kDType>(dx_row, dx_rmem, first, width, aligned);
}

// Stores the sums of a chunk's columns to `partial`, at a multiple of 16 bytes.
template <int kChunk>
__device__ __forceinline__ void store_sums(float *gmem, const float (&rmem)[kChunk]) {
#pragma unroll
    for (int j = 0; j < kChunk; j += 4) {
        *reinterpret_cast<float4 *>(gmem + j) = {rmem[j], rmem[j + 1], rmem[j + 2], rmem[j + 3]};
    }
}

// Adds the stored sums of a chunk's columns.
template <int kChunk>
__device__ __forceinline__ void add_stored(float (&rmem)[kChunk], const float *smem) {
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        rmem[j] += smem[j];
    }
}

// Adds the sums of those lanes of a warp that have the same columns: each kThreads-th.
template <int kThreads, int kChunk>
__device__ __forceinline__ void add_lanes(float (&rmem)[kChunk]) {
#pragma unroll
    for (int lanes = kThreads; lanes < 32; lanes *= 2) {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            rmem[j] += __shfl_xor_sync(0xffffffff, rmem[j], lanes);
        }
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads(), Kernels::value.blocks_per_sm())
    rows_kernel(const __grid_constant__ NormBackwardKernelArgs args) {
    constexpr LayerNormBackwardKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.chunks >= 1 && cfg.registers() <= 255 &&
                      cfg.registers() <= 65536 / cfg.n_threads(),
                  "sums and chunks are in registers, of which an SM has 65536");
    static_assert(cfg.row_threads >= 8 && cfg.row_threads <= cfg.n_threads() &&
                      (cfg.row_threads & (cfg.row_threads - 1)) == 0,
                  "the tree over the threads of a row is one over the lanes of a warp");

    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.threads_per_row(), kChunks = cfg.chunks;
    constexpr int kChunk = kChunkElements<kDType>, kTile = cfg.tile();
    constexpr int kRows = cfg.n_threads() / kThreads; // of the block, at a time
    constexpr int kGroup = kThreads < 32 ? 32 : kThreads; // threads of whole warps with rows
    constexpr int kGroups = cfg.n_threads() / kGroup;

    extern __shared__ float2 sums_smem[]; // (2, kWarps): even and odd rows

    float *columns_smem = reinterpret_cast<float *>(sums_smem + 2 * kWarps); // (2, kTile)

    const int thread = threadIdx.x % kThreads; // of those that have the row
    const int padded = (args.width + 7) / 8 * 8;
    const auto *dy_gmem = static_cast<const ElementOf<kDType> *>(args.dy);
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x);
    const auto *weight_gmem = static_cast<const ElementOf<kDType> *>(args.weight); // (width)
    auto *dx_gmem = static_cast<ElementOf<kDType> *>(args.dx);
    auto *row_sums_gmem = reinterpret_cast<float2 *>(args.row_sums); // (rows)
    const bool aligned = is_aligned(dy_gmem, args.dy_stride) && is_aligned(x_gmem, args.x_stride) &&
                         is_aligned(dx_gmem, args.dx_stride) && is_aligned(weight_gmem, 0) &&
                         args.width % kChunk == 0;

    for (int begin = 0; begin < args.width; begin += kTile) { // of a tile of columns
        float dweight_rmem[kChunks][kChunk] = {}, dbias_rmem[kChunks][kChunk] = {};
        int parity = 0;
        for (int64_t first_row = int64_t(blockIdx.x) * kRows; first_row < args.rows;
             first_row += int64_t(gridDim.x) * kRows, parity ^= 1) {
            const int64_t row = first_row + threadIdx.x / kThreads;
            const int width = row < args.rows ? args.width : 0; // all lanes take part in a shuffle
            const auto *dy_row = dy_gmem + row * args.dy_stride;
            const auto *x_row = x_gmem + row * args.x_stride;
            auto *dx_row = dx_gmem + row * args.dx_stride;
            const float mean = width > 0 ? __ldg(args.mean + row) : 0.0f;
            const float rstd = width > 0 ? __ldg(args.rstd + row) : 0.0f;

            // 1. x and dy: global → registers
            uint4 dy_rmem[kChunks], x_rmem[kChunks];
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                const int first = begin + (thread + k * kThreads) * kChunk;
                dy_rmem[k] = load_chunk<kDType>(dy_row, first, width, aligned);
                x_rmem[k] = load_chunk<kDType>(x_row, first, width, aligned);
            }

            // 2. Σ g and Σ g · (x - mean)
            float2 sums = {};
            if (begin == 0) {
#pragma unroll
                for (int k = 0; k < kChunks; ++k) {
                    const int first = (thread + k * kThreads) * kChunk;
                    float g_rmem[kChunk];
                    scale_chunk<kDType>(g_rmem, dy_rmem[k], weight_gmem, first, width, aligned);
                    add_sums<kDType>(sums, g_rmem, x_rmem[k], mean);
                }
                walk_row<kDType, kThreads>(sums, dy_row, x_row, weight_gmem,
                                           kTile + thread * kChunk, width, aligned, mean);
                sums = row_sums<kThreads>(sums, sums_smem + parity * kWarps);
                if (kTile < width && thread == 0) {
                    row_sums_gmem[row] = sums;
                }
            } else if (width > 0) {
                sums = row_sums_gmem[row];
            }

            // 3. dx = rstd · (g - mean_g - (x - mean) · slope), and sums of columns
            const float mean_g = sums.x / args.width, slope = sums.y / args.width * rstd * rstd;
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                const int first = begin + (thread + k * kThreads) * kChunk;
                store_gradient<kDType>(dx_row, dy_rmem[k], x_rmem[k], weight_gmem, first, width,
                                       aligned, mean, rstd, mean_g, slope);
                add_columns<kDType>(dweight_rmem[k], dbias_rmem[k], dy_rmem[k], x_rmem[k], mean,
                                    rstd);
            }
        }
        __syncthreads(); // the tiles behind this one read the sums of the rows

        // 4. partial: the sums of the block's rows, over lanes, then over warps in their order
        if (args.partial == nullptr) {
            continue;
        }
        float *dweight_gmem = args.partial + int64_t(blockIdx.x) * 2 * padded + begin;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            add_lanes<kThreads>(dweight_rmem[k]);
            add_lanes<kThreads>(dbias_rmem[k]);
        }
        for (int turn = 0; turn < kGroups; ++turn) {
            if (turn > 0) {
                __syncthreads(); // warps add to what those before them have written
            }
            if (threadIdx.x / kGroup != turn || threadIdx.x % kGroup >= kThreads) {
                continue;
            }
            const bool is_last = turn == kGroups - 1;
            float *dweight = is_last ? dweight_gmem : columns_smem;
            float *dbias = is_last ? dweight_gmem + padded : columns_smem + kTile;
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                const int first = (thread + k * kThreads) * kChunk; // of the tile
                if (turn > 0) {
                    add_stored<kChunk>(dweight_rmem[k], columns_smem + first);
                    add_stored<kChunk>(dbias_rmem[k], columns_smem + kTile + first);
                }
                if (begin + first < args.width) {
                    store_sums<kChunk>(dweight + first, dweight_rmem[k]);
                    store_sums<kChunk>(dbias + first, dbias_rmem[k]);
                }
            }
        }
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(1024)
    combine_kernel(const __grid_constant__ NormBackwardKernelArgs args) {
    constexpr DType kDType = Kernels::value.dtype;
    constexpr int kWarps = 32; // of the block, which has 32 columns

    extern __shared__ float columns_smem[]; // (kWarps, 32)

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int padded = (args.width + 7) / 8 * 8; // first the sums of dweight, then those of dbias
    const int i = blockIdx.x * 32 + lane, column = i < padded ? i : i - padded;

    // 5. dweight and dbias: Σ partial
    float sum = 0.0f;
    if (column < args.width) {
#pragma unroll 8 // loads of 8 parts in flight
        for (int part = warp; part < args.parts; part += kWarps) {
            sum += __ldg(args.partial + int64_t(part) * 2 * padded + i);
        }
    }
    columns_smem[warp * 32 + lane] = sum;
    __syncthreads(); // warp 0 adds what all warps have written
    auto *out_gmem = static_cast<ElementOf<kDType> *>(i < padded ? args.dweight : args.dbias);
    if (warp > 0 || column >= args.width || out_gmem == nullptr) {
        return;
    }
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
        sum += columns_smem[w * 32 + lane];
    }
    out_gmem[column] = from_float<kDType>(sum);
}

} // namespace e4
