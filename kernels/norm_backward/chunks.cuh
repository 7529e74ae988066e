#pragma once
// Parts of the kernels of families norm_backward_staged and norm_backward_cluster that no step is
// about: chunks of rows at any element, their arithmetic, and the sums of columns.

#include "elements.cuh"
#include "kernels/norm_backward/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"

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

// A chunk of weight; ones if a call leaves it out.
template <DType kDType>
__device__ __forceinline__ uint4 load_weight(const ElementOf<kDType> *weight_gmem, int first,
                                             int width, bool aligned) {
    float ones_rmem[kChunkElements<kDType>];
#pragma unroll
    for (float &one : ones_rmem) {
        one = 1.0f;
    }
    return weight_gmem == nullptr ? pack_chunk<kDType>(ones_rmem)
                                  : load_chunk<kDType>(weight_gmem, first, width, aligned);
}

// A chunk in fp32: dy, x - mean, and g = dy · rstd · weight.
template <DType kDType>
struct Chunk {
    static constexpr int kChunk = kChunkElements<kDType>;
    float dy_rmem[kChunk], x_rmem[kChunk], g_rmem[kChunk];

    __device__ __forceinline__ Chunk(uint4 dy, uint4 x, uint4 weight, float mean, float rstd) {
        unpack_chunk<kDType>(dy_rmem, dy);
        unpack_chunk<kDType>(x_rmem, x);
        unpack_chunk<kDType>(g_rmem, weight);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            x_rmem[j] -= mean;
            g_rmem[j] *= dy_rmem[j] * rstd;
        }
    }
    // Adds the chunk to Σ g and Σ g · (x - mean). Zeros behind the end of a row add nothing.
    __device__ __forceinline__ void add_to(float2 &sums) const {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            sums.x += g_rmem[j];
            sums.y = fmaf(g_rmem[j], x_rmem[j], sums.y);
        }
    }
    // Adds it to Σ dy · rstd · (x - mean) and Σ dy of its columns.
    __device__ __forceinline__ void add_to(float (&dweight_rmem)[kChunk],
                                           float (&dbias_rmem)[kChunk], float rstd) const {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            dweight_rmem[j] = fmaf(dy_rmem[j] * rstd, x_rmem[j], dweight_rmem[j]);
            dbias_rmem[j] += dy_rmem[j];
        }
    }
    // dx = g - mean_g - (x - mean) · slope
    __device__ __forceinline__ void gradient(float (&dx_rmem)[kChunk], float mean_g,
                                             float slope) const {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            dx_rmem[j] = fmaf(-slope, x_rmem[j], g_rmem[j] - mean_g);
        }
    }
};

// Adds the chunks of a row that a thread has from `begin` on to Σ g and Σ g · (x - mean).
template <DType kDType, int kThreads>
__device__ __forceinline__ void walk_row(float2 &sums, const ElementOf<kDType> *dy_row,
                                         const ElementOf<kDType> *x_row,
                                         const ElementOf<kDType> *weight_gmem, int begin, int width,
                                         bool aligned, float mean, float rstd) {
    for (int first = begin; first < width; first += kThreads * kChunkElements<kDType>) {
        const Chunk<kDType> chunk(load_chunk<kDType>(dy_row, first, width, aligned),
                                  load_chunk<kDType>(x_row, first, width, aligned),
                                  load_weight<kDType>(weight_gmem, first, width, aligned), mean,
                                  rstd);
        chunk.add_to(sums);
    }
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
__device__ __forceinline__ void add_stored(float (&rmem)[kChunk], const float *sums) {
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        rmem[j] += sums[j];
    }
}

// Adds the values of kLanes neighbouring lanes, by a tree, and returns the sums to each. kSums: 1
// if only y counts.
template <int kLanes, int kSums>
__device__ __forceinline__ float2 lane_sums(float2 value) {
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        if constexpr (kSums == 2) {
            value.x += __shfl_xor_sync(0xffffffff, value.x, lanes);
        }
        value.y += __shfl_xor_sync(0xffffffff, value.y, lanes);
    }
    return value;
}

// dweight and dbias: Σ partial, of 4 columns per lane. smem: (warps, 32).
template <DType kDType, int kSums>
__device__ __forceinline__ void add_parts(const NormBackwardKernelArgs &args,
                                          float4 *columns_smem) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int padded = (args.width + 7) / 8 * 8; // first the sums of dweight, then those of dbias
    const int i = (blockIdx.x * 32 + lane) * 4, column = i < padded ? i : i - padded;

    float4 sum = {};
    const auto add = [&](float4 other) {
        sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
    };
    const bool has_columns = i < kSums * padded && column < args.width;
    if (has_columns) {
#pragma unroll 8 // loads of 8 parts in flight
        for (int part = warp; part < args.parts; part += warps) {
            const float *sums_gmem = args.partial + int64_t(part) * kSums * padded + i;
            add(__ldg(reinterpret_cast<const float4 *>(sums_gmem)));
        }
    }
    columns_smem[warp * 32 + lane] = sum;
    __syncthreads(); // warp 0 adds what all warps have written
    auto *out_gmem = static_cast<ElementOf<kDType> *>(i < padded ? args.dweight : args.dbias);
    if (warp > 0 || !has_columns || out_gmem == nullptr) {
        return;
    }
#pragma unroll 8
    for (int w = 1; w < warps; ++w) {
        add(columns_smem[w * 32 + lane]);
    }
    const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (column + j < args.width) {
            out_gmem[column + j] = from_float<kDType>(sums[j]);
        }
    }
}
