#pragma once
// Step 2 of the layer_norm_backward family: sums of columns on the way. Parent: e1.
//
// What changed
//   1. rows_kernel is persistent: its grid is what the SMs hold, and a block takes each
//      gridDim.x-th row.
//   2. A thread has `chunks` chunks of columns, the same in each row, and adds to their sums of
//      dweight and dbias in registers. A block stores its sums once, to `partial`.
//   3. combine_kernel adds the sums of the blocks in a fixed order. 32 warps share 32 columns.
//      columns_kernel is left out.
//   4. Columns beyond the registers are taken in further tiles. Tile 0 walks the whole row for its
//      two sums and stores them; the others read these sums, and x and dy of their columns again.
//
// Why, in bf16: columns_kernel reads x and dy from DRAM again, 4 of 10 bytes per element. Here the
// second walk of a row hits L1 or L2, and 6 bytes remain. 264 blocks of a width of 4096 write 8.7
// MB of sums, which combine_kernel reads from L2; 32768 rows of x, dy and dx are 805 MB. All SMs
// sum columns, at a width of 4096 and at one of 64.
//   A chunk of bf16 has 16 sums. With 2 chunks they are 32 registers of a thread.
//   Sums of 65536 columns would be 512 KiB per block, as much as all registers and all shared
//   memory
// of an SM. So rows beyond the registers need tiles: 10 bytes per element there, as in e1.
//   Two sets of sums in shared memory, for even and odd rows: one barrier per row is enough. A warp
// that writes the first set again has passed the barrier of the row between, behind which no warp
// reads that set.
//   The order of the sums depends on the number of SMs, so that other GPUs may give other last
//   bits.
// Expected, of 3.35 TB/s at 6 bytes per element: 45% at a width of 4096, since a block waits for a
// row from DRAM, for the reduction and for the row from L1; 30% from 16384 on.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of PyTorch's
// operator behind the gradients of layer_norm or rms_norm in the harmonic mean over widths. 8
// warps: 2,118, 0.28. Cost: 96 registers per thread, 128 bytes of shared memory per block, 2
// blocks per SM.
// benchmark:end
// Verdict: 51% of a copy's speed at a width of 4096 on an H200, six times e1; 27 to 37% beyond
// 16384.
//
// Phases: rows_kernel 1 sums, 2 dx and sums of columns, 3 partial; combine_kernel 4 dweight and
// dbias.

#include "elements.cuh"
#include "kernels/norm_backward/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"

namespace e2 {

// Adds the values of all threads of the block and returns the sums to each: by a tree over the
// lanes of each warp, then by one over the warps. smem: (kWarps).
template <int kWarps>
__device__ __forceinline__ float2 block_sums(float2 value, float2 *smem) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        value.x += __shfl_xor_sync(0xffffffff, value.x, lanes);
        value.y += __shfl_xor_sync(0xffffffff, value.y, lanes);
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        smem[warp] = value;
    }
    __syncthreads(); // a warp reads what the others have written
    value = smem[lane % kWarps];
#pragma unroll
    for (int lanes = 1; lanes < kWarps; lanes *= 2) {
        value.x += __shfl_xor_sync(0xffffffff, value.x, lanes);
        value.y += __shfl_xor_sync(0xffffffff, value.y, lanes);
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

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads(), Kernels::value.blocks_per_sm())
    rows_kernel(const __grid_constant__ NormBackwardKernelArgs args) {
    constexpr LayerNormBackwardKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.chunks >= 1 && cfg.registers() <= 255 &&
                      cfg.registers() <= 65536 / cfg.n_threads(),
                  "sums and chunks are in registers, of which an SM has 65536");
    static_assert(cfg.row_threads == 0, "a row has the threads of a block before e4");

    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.n_threads(), kChunks = cfg.chunks;
    constexpr int kChunk = kChunkElements<kDType>, kTile = cfg.tile();

    extern __shared__ float2 sums_smem[]; // (2, kWarps): even and odd rows

    const int thread = threadIdx.x; // of those that have the row
    const int width = args.width, padded = (width + 7) / 8 * 8;
    const auto *dy_gmem = static_cast<const ElementOf<kDType> *>(args.dy);
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x);
    const auto *weight_gmem = static_cast<const ElementOf<kDType> *>(args.weight); // (width)
    auto *dx_gmem = static_cast<ElementOf<kDType> *>(args.dx);
    auto *row_sums_gmem = reinterpret_cast<float2 *>(args.row_sums); // (rows)
    const bool aligned = is_aligned(dy_gmem, args.dy_stride) && is_aligned(x_gmem, args.x_stride) &&
                         is_aligned(dx_gmem, args.dx_stride) && is_aligned(weight_gmem, 0) &&
                         width % kChunk == 0;

    for (int begin = 0; begin < width; begin += kTile) { // of a tile of columns
        float dweight_rmem[kChunks][kChunk] = {}, dbias_rmem[kChunks][kChunk] = {};
        int parity = 0;
        for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x, parity ^= 1) {
            const auto *dy_row = dy_gmem + row * args.dy_stride;
            const auto *x_row = x_gmem + row * args.x_stride;
            auto *dx_row = dx_gmem + row * args.dx_stride;
            const float mean = __ldg(args.mean + row), rstd = __ldg(args.rstd + row);

            // 1. Σ g and Σ g · (x - mean)
            float2 sums = {};
            if (begin == 0) {
                walk_row<kDType, kThreads>(sums, dy_row, x_row, weight_gmem, thread * kChunk, width,
                                           aligned, mean);
                sums = block_sums<kWarps>(sums, sums_smem + parity * kWarps);
                if (kTile < width && thread == 0) {
                    row_sums_gmem[row] = sums;
                }
            } else {
                sums = row_sums_gmem[row];
            }

            // 2. dx = rstd · (g - mean_g - (x - mean) · slope), and sums of columns
            const float mean_g = sums.x / width, slope = sums.y / width * rstd * rstd;
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                const int first = begin + (thread + k * kThreads) * kChunk;
                const uint4 dy = load_chunk<kDType>(dy_row, first, width, aligned);
                const uint4 x = load_chunk<kDType>(x_row, first, width, aligned);
                store_gradient<kDType>(dx_row, dy, x, weight_gmem, first, width, aligned, mean,
                                       rstd, mean_g, slope);
                add_columns<kDType>(dweight_rmem[k], dbias_rmem[k], dy, x, mean, rstd);
            }
        }
        __syncthreads(); // the tiles behind this one read the sums of the rows

        // 3. partial: the sums of the block's rows
        if (args.partial == nullptr) {
            continue;
        }
        float *dweight_gmem = args.partial + int64_t(blockIdx.x) * 2 * padded;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const int first = begin + (thread + k * kThreads) * kChunk;
            if (first < width) {
                store_sums<kChunk>(dweight_gmem + first, dweight_rmem[k]);
                store_sums<kChunk>(dweight_gmem + padded + first, dbias_rmem[k]);
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

    // 4. dweight and dbias: Σ partial
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

} // namespace e2
