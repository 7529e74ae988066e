#pragma once
// Immediate distances: o5, but copies of K and V have what is constant between their addresses in
// the instruction. docs/tuning.md has what was expected of it and what came out.

#include "kernels/overlap/o5.cuh"

#include <utility>

namespace immediate {

constexpr int kRows = 64, kThreads = 128, kStride = 2048; // of the config that it is launched as

// Starts a copy of 16 bytes between addresses plus constants, which the instruction holds.
template <int kSmemBytes, int kGmemBytes>
__device__ __forceinline__ void cp_async_16_at(uint32_t dst_smem, const Element *src_gmem,
                                               int src_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0 + %3], [%1 + %4], 16, %2;" ::"r"(dst_smem),
                 "l"(src_gmem), "r"(src_bytes), "n"(kSmemBytes), "n"(kGmemBytes)
                 : "memory");
}

// Passes of all threads, 16 rows each: a multiple of 8, after which the swizzle is the same.
template <int... kPass>
__device__ __forceinline__ void copy_passes(std::integer_sequence<int, kPass...>, uint32_t dst_smem,
                                            const Element *src_gmem, int src_bytes) {
    constexpr int kRowsPerPass = kThreads / o5::kThreadsPerRow, kElement = sizeof(Element);
    constexpr int kSmem = kRowsPerPass * o5::kPiece * kElement;
    constexpr int kGmem = kRowsPerPass * kStride * kElement;
    ((cp_async_16_at<kPass * kSmem, kPass * kGmem>(dst_smem, src_gmem, src_bytes),
      cp_async_16_at<kPass * kSmem + o5::piece_offset<kRows>(1),
                     kPass * kGmem + o5::kPiece * kElement>(dst_smem, src_gmem, src_bytes)),
     ...);
}

} // namespace immediate

template <>
__device__ __forceinline__ void o5::copy_tile_async<immediate::kRows, immediate::kThreads>(
    uint32_t tile_smem, const Element *X_gmem, int first_row, int row_stride, int src_bytes) {
    using namespace immediate;
    const int row = threadIdx.x / kThreadsPerRow, col = threadIdx.x % kThreadsPerRow * kChunk;
    copy_passes(std::make_integer_sequence<int, kRows * kThreadsPerRow / kThreads>{},
                tile_smem + smem_offset(row, col), X_gmem + int64_t(first_row) * row_stride,
                src_bytes);
}
