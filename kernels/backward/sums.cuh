#pragma once
// Sums of dQ in memory: cleared, added to, and rounded.

#include "kernels/backward/outputs.cuh"
#include "kernels/backward/places.cuh"
#include "kernels/backward/statistics.cuh"
#include "memory.cuh"
#include "sm90/roles.cuh"

// The sums of dQ of the 64 queries from `row` on, for a thread of a warpgroup: its 64 accumulators
// in groups of 4. The four of neighbouring threads are neighbours, so that a warp has 512 bytes.
template <int d_head = kDHead>
__device__ __forceinline__ float4 *sums_of(const BackwardKernelArgs &args, int64_t row) {
    return reinterpret_cast<float4 *>(args.dQ_sums + row * d_head) + threadIdx.x % kWarpgroup;
}

// Clears those of the rows of a thread block of delta_kernel.
__device__ __forceinline__ void clear_sums(const BackwardKernelArgs &args) {
    constexpr int kFours = kDeltaRows * kDHead / 4;
    float4 *sums = reinterpret_cast<float4 *>(args.dQ_sums) + int64_t(blockIdx.x) * kFours;
#pragma unroll
    for (int i = 0; i < kFours; i += kDeltaThreads) {
        store_gmem_16(sums + i + threadIdx.x, make_uint4(0, 0, 0, 0));
    }
}

// Adds a warpgroup's accumulators to the sums.
template <int kCount>
__device__ __forceinline__ void add(float4 *sums, const float (&D)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        asm volatile(
            "red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums + i / 4 * kWarpgroup),
            "f"(D[i]), "f"(D[i + 1]), "f"(D[i + 2]), "f"(D[i + 3])
            : "memory");
    }
}

// The sums of dQ of a thread block's queries as accumulators.
template <int kCount>
__device__ __forceinline__ void load_sums(float (&dQ_rmem)[kCount], const float4 *sums) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
        const float4 four = sums[i * kWarpgroup];
        dQ_rmem[4 * i] = four.x, dQ_rmem[4 * i + 1] = four.y;
        dQ_rmem[4 * i + 2] = four.z, dQ_rmem[4 * i + 3] = four.w;
    }
}

// Rounds them, times softmax_scale, to 16 bits, and stores them through a tile in shared memory.
template <DType kDType, int B_r>
__device__ __forceinline__ void convert_sums(const BackwardKernelArgs &args, uint32_t tile_smem) {
    const TilePlace place = own_place<B_r>(args.len_q, args.heads);
    float dQ_rmem[kDHead / 2];
    load_sums(dQ_rmem, sums_of(args, row_index(args, place)));
    store_rows<kDType, B_r>(args.dQ, place, tile_smem, threadIdx.x / 32 * kWarpRows, dQ_rmem,
                            args.softmax_scale);
    tma_store_wait_read(); // after its end another thread block may have this memory
}

// Rounds the sums of dQ of a thread block's queries, in padded rows, times softmax_scale, to 16
// bits and stores them.
template <DType kDType, bool kCausal, int d_head = kDHead>
__device__ __forceinline__ void round_sums(const BackwardKernelArgs &args) {
    const int rows = padded_rows<kCausal>(args);
    TilePlace place = own_place<kWgmmaM>(rows, args.heads);
    float dQ_rmem[d_head / 2];
    load_sums(dQ_rmem, sums_of<d_head>(args, row_index(args, place, rows)));
    place.row -= rows_before<kCausal>(args); // TMA could not store from a negative row on
    store_sums<kDType, true>(args.dQ_gmem, args.dQ_strides, place, threadIdx.x / 32 * kWarpRows,
                             dQ_rmem, args.softmax_scale, args.len_q);
}
