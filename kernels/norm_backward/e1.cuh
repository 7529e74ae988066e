#pragma once
// Step 1 of the layer_norm_backward family: the base. Two kernels, for rows and for columns.
//
// With g = dy · weight and centred = x - mean of a row,
//
//     dx = rstd · (g - Σ g / width - centred · rstd² · Σ (g · centred) / width)
//     dweight = Σ dy · centred · rstd and dbias = Σ dy, over all rows
//
// mean and rstd are those that the forward pass has stored: 8 bytes per row, instead of two more
// reductions per row with a barrier each.
//
// The parts
//   1. rows_kernel: a thread block takes one row and walks x, dy and weight twice, for the two sums
//      and for dx. All loads and stores are of 16 bytes per lane.
//   2. columns_kernel: a thread block takes 256 columns, 128 of fp32, and all rows. Each warp adds
//      every 8th row to sums in registers; the warps' sums are added in their order.
//   3. A row that does not begin at a multiple of 16 bytes, and the end of one, is read element by
//      element into the same chunks. So the columns of a thread are the same in each row.
//   4. All orders are fixed, so that every call gives the same bits.
//
// (x - mean) is rounded before it is multiplied. x · rstd - mean · rstd would be one FFMA, and with
// a mean of 1000 and a deviation of 1 its constant has an error of 3e-5.
//
// Why it is slow, in bf16: 6 bytes per element are needed, x and dy read and dx written. The second
// walk of a row hits L1 or L2, and columns_kernel reads x and dy from DRAM again: 10 bytes. It has
// a block per 256 columns, 16 blocks for 132 SMs at a width of 4096, and one at 64.
// Expected, of 3.35 TB/s at 6 bytes per element: 10% at a width of 4096, where 16 SMs read all of x
// and dy, at about 60 GB/s each; below 1% at 64; 45% at 131072.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of PyTorch's
// operator behind the gradients of layer_norm or rms_norm in the harmonic mean over widths. 8
// warps: 332, 0.03. Cost: 32 registers per thread, 128 bytes of shared memory per block, 8 blocks
// per SM.
// benchmark:end
// Verdict: 8% of a copy's speed at a width of 4096 on an H200, and 42% at 131072, as expected.
//
// Phases: rows_kernel 1 sums, 2 dx; columns_kernel 3 dweight and dbias.

#include "elements.cuh"
#include "kernels/norm_backward/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"

namespace e1 {

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

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    rows_kernel(const __grid_constant__ NormBackwardKernelArgs args) {
    constexpr LayerNormBackwardKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.chunks == 0, "the row stays in registers from e2 on");
    static_assert(cfg.row_threads == 0, "a row has the threads of a block before e4");

    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.n_threads();
    constexpr int kChunk = kChunkElements<kDType>;

    extern __shared__ float2 sums_smem[]; // (kWarps)

    const int thread = threadIdx.x; // of those that have the row
    const int width = args.width;
    const auto *dy_gmem = static_cast<const ElementOf<kDType> *>(args.dy);
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x);
    const auto *weight_gmem = static_cast<const ElementOf<kDType> *>(args.weight); // (width)
    auto *dx_gmem = static_cast<ElementOf<kDType> *>(args.dx);
    const bool aligned = is_aligned(dy_gmem, args.dy_stride) && is_aligned(x_gmem, args.x_stride) &&
                         is_aligned(dx_gmem, args.dx_stride) && is_aligned(weight_gmem, 0) &&
                         width % kChunk == 0;

    const int64_t row = blockIdx.x;
    const auto *dy_row = dy_gmem + row * args.dy_stride, *x_row = x_gmem + row * args.x_stride;
    auto *dx_row = dx_gmem + row * args.dx_stride;
    const float mean = __ldg(args.mean + row), rstd = __ldg(args.rstd + row);

    // 1. Σ g and Σ g · (x - mean)
    float2 sums = {};
    walk_row<kDType, kThreads>(sums, dy_row, x_row, weight_gmem, thread * kChunk, width, aligned,
                               mean);
    sums = block_sums<kWarps>(sums, sums_smem);

    // 2. dx = rstd · (g - mean_g - (x - mean) · slope)
    const float mean_g = sums.x / width, slope = sums.y / width * rstd * rstd;
    for (int first = thread * kChunk; first < width; first += kThreads * kChunk) {
        const uint4 dy = load_chunk<kDType>(dy_row, first, width, aligned);
        const uint4 x = load_chunk<kDType>(x_row, first, width, aligned);
        store_gradient<kDType>(dx_row, dy, x, weight_gmem, first, width, aligned, mean, rstd,
                               mean_g, slope);
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    columns_kernel(const __grid_constant__ NormBackwardKernelArgs args) {
    constexpr LayerNormBackwardKernelConfig cfg = Kernels::value;
    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.n_threads();
    constexpr int kChunk = kChunkElements<kDType>, kColumns = 32 * kChunk; // of the block

    extern __shared__ float columns_smem[]; // (kWarps, 2, kColumns): of dweight and of dbias

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int width = args.width, first_column = blockIdx.x * kColumns;
    const int first = first_column + lane * kChunk;
    const auto *dy_gmem = static_cast<const ElementOf<kDType> *>(args.dy);
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x);
    const bool aligned = is_aligned(dy_gmem, args.dy_stride) && is_aligned(x_gmem, args.x_stride) &&
                         width % kChunk == 0;

    // 3. dweight = Σ dy · rstd · (x - mean), dbias = Σ dy
    float dweight_rmem[kChunk] = {}, dbias_rmem[kChunk] = {};
    for (int64_t row = warp; row < args.rows; row += kWarps) {
        const float mean = __ldg(args.mean + row), rstd = __ldg(args.rstd + row);
        add_columns<kDType>(
            dweight_rmem, dbias_rmem,
            load_chunk<kDType>(dy_gmem + row * args.dy_stride, first, width, aligned),
            load_chunk<kDType>(x_gmem + row * args.x_stride, first, width, aligned), mean, rstd);
    }
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        columns_smem[(warp * 2) * kColumns + lane * kChunk + j] = dweight_rmem[j];
        columns_smem[(warp * 2 + 1) * kColumns + lane * kChunk + j] = dbias_rmem[j];
    }
    __syncthreads(); // a thread adds what all warps have written
    for (int i = threadIdx.x; i < 2 * kColumns; i += kThreads) {
        const int column = first_column + i % kColumns;
        auto *out_gmem = static_cast<ElementOf<kDType> *>(i < kColumns ? args.dweight : args.dbias);
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            sum += columns_smem[w * 2 * kColumns + i];
        }
        if (out_gmem != nullptr && column < width) {
            out_gmem[column] = from_float<kDType>(sum);
        }
    }
}

} // namespace e1
