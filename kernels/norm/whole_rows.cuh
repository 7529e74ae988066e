#pragma once
// Rows that just fill the registers of their threads: all threads have as many elements, and no
// load and no store has a predicate.

#include "elements.cuh"
#include "memory.cuh"
#include "predicated.cuh"
#include "unpack_again.cuh"

namespace whole {

// A chunk of x that is read once.
__device__ __forceinline__ uint4 load_x(const uint4 *src_gmem) {
    uint4 chunk;
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                 : "l"(src_gmem));
    return chunk;
}
// A chunk of weight or bias.
__device__ __forceinline__ uint4 load(const uint4 *src_gmem) {
    uint4 chunk;
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                 : "l"(src_gmem));
    return chunk;
}

// Combines means (x) and M2 (y) of kLanes neighbouring lanes, with n elements each, by Chan's
// formula. The mean is the sum where one is infinite.
template <bool kRms, int kLanes>
__device__ __forceinline__ float2 lane_moments(float2 value, float n) {
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        const float other = __shfl_xor_sync(0xffffffff, value.y, lanes);
        value.y += other;
        if constexpr (!kRms) {
            const float mean = __shfl_xor_sync(0xffffffff, value.x, lanes), d = mean - value.x;
            value.y = fmaf(n * 0.5f * float(lanes) * d, d, value.y);
            const float middle = fmaf(d, 0.5f, value.x);
            value.x = middle == middle ? middle : value.x + mean;
        }
    }
    return value;
}

// Mean (x) and M2 (y) of the chunks of kThreads threads, of which a block has one set or several;
// of RMS norm 0 and the sum of squares. smem: (1 or 2, warps of the
// block).
template <DType kDType, bool kRms, int kThreads, int kChunks>
__device__ __forceinline__ float2 block_moments(const uint4 (&x_rmem)[kChunks], void *smem,
                                                uint32_t zero) {
    constexpr int kChunk = kChunkElements<kDType>, kLanes = kThreads < 32 ? kThreads : 32;
    constexpr float kOwn = kChunks * kChunk; // a power of two
    float own_mean = 0.0f, squares = 0.0f, rest = 0.0f;
#pragma unroll
    for (int k = 0; k < kChunks && !kRms; ++k) {
        float values[kChunk];
        unpack_chunk<kDType>(values, x_rmem[k]);
#pragma unroll
        for (const float value : values) {
            own_mean += value;
        }
    }
    own_mean /= kOwn; // exact
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        float values[kChunk];
        unpack_chunk_again<kDType>(values, x_rmem[k], zero & 1);
#pragma unroll
        for (const float value : values) {
            const float d = value - own_mean;
            if constexpr (kDType == DType::FP32 && !kRms) {
                rest += d; // what rounding has left of the mean
            }
            squares = fmaf(d, d, squares);
        }
    }
    // Lanes count their means from that of the first, without its rounding.
    const float first_mean = kRms ? 0.0f : __shfl_sync(0xffffffff, own_mean, 0, kLanes);
    const float origin = fabsf(first_mean) < INFINITY ? first_mean : 0.0f;
    rest = rest == rest ? rest / kOwn : 0.0f;
    float2 value = lane_moments<kRms, kLanes>({own_mean - origin + rest, squares}, kOwn);
    value.x += origin;
    if constexpr (kThreads > 32) {
        constexpr int kWarps = kThreads / 32;
        const int warp = threadIdx.x / 32, read = warp / kWarps * kWarps + threadIdx.x % kWarps;
        auto *sums_smem = static_cast<float *>(smem), *means_smem = sums_smem + blockDim.x / 32;
        if (threadIdx.x % 32 == 0) {
            sums_smem[warp] = value.y;
            if constexpr (!kRms) {
                means_smem[warp] = value.x;
            }
        }
        __syncthreads(); // a warp reads what the others have written
        value = {kRms ? 0.0f : means_smem[read], sums_smem[read]};
        value = lane_moments<kRms, kWarps>(value, kOwn * 32.0f);
    }
    return value;
}

// y = (x - mean) · rstd · weight + bias, of RMS norm without mean and bias. kApart: from a chunk of
// the thread to the next.
template <DType kDType, bool kRms, int kApart, int kChunks>
__device__ __forceinline__ void store_y(uint4 *y_gmem, const uint4 (&x_rmem)[kChunks], float mean,
                                        float rstd, const uint4 *weight_gmem,
                                        const uint4 *bias_gmem, uint32_t zero) {
    constexpr int kChunk = kChunkElements<kDType>;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        float values[kChunk], weight[kChunk], bias[kChunk] = {};
        unpack_chunk<kDType>(weight, load(weight_gmem + k * kApart));
        if constexpr (!kRms) {
            unpack_chunk<kDType>(bias, load(bias_gmem + k * kApart));
        }
        unpack_chunk_again<kDType>(values, x_rmem[k], zero & 2);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            values[j] = kRms ? values[j] * rstd * weight[j]
                             : fmaf((values[j] - mean) * rstd, weight[j], bias[j]);
        }
        store_gmem_16_streaming(y_gmem + k * kApart, pack_chunk<kDType>(values));
    }
}

} // namespace whole
