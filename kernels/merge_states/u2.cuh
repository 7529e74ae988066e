#pragma once
// Step 2 of the merge_states family: 16 bytes per lane, rows by width. Parent: u1.
//
// What changed
//   1. A thread has a chunk of 16 bytes of a row: 8 columns of 16 bits, or 4 of fp32. A row has as
//      many threads as chunks, and a thread block takes rows wherever its threads end: 32 lanes
//      have two rows at d_head 128, and 2 2/3 at 96.
//   2. Lanes of a warp may have different rows. So each finds m and l of its row by itself, in the
//      order of the parts.
//   3. d_head is a multiple of a chunk, and rows begin at multiples of 16 bytes. u1 takes others.
//
// Why, at d_head 128 in bf16 with n parts: 2048 threads have 32 KB in flight instead of 4, where
// 3.35 TB/s of an H100 need 8.2 KB. A weight is computed once for 8 columns instead of for each.
//   Cost: m and l take 2 n loads of LSE_i per thread, which lanes of a row share with each other,
// and 16 threads of a row compute what the warp of u1 divided among its lanes. 32 lanes read the
// LSE_i of 2 rows, 8 bytes for 512 bytes of O_i, and later passes find them in L1.
// Expected, of 3.35 TB/s at the bytes of all parts and of the output: 75% from 2 to 64 parts; 30%
// at 1024, where 2^28 bytes are 1024 rows and threads are too few.
//
// benchmark:begin
// benchmark:end
// Verdict: not measured yet.
//
// Phases: 1 the row, 2 m, 3 l, 4 O and LSE.

#include "elements.cuh"
#include "kernels/merge_states/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"

namespace u2 {

// exp(lse - m). Where all parts have an lse of -inf, m is 0.
__device__ __forceinline__ float weight(float lse, float m, float log2_base) {
    return exp2_approx((lse - m) * log2_base);
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    merge_kernel(const __grid_constant__ MergeKernelArgs args) {
    constexpr MergeKernelConfig cfg = Kernels::value;
    constexpr DType kDType = cfg.dtype;
    constexpr int kChunk = kChunkElements<kDType>;
    static_assert(cfg.parts_at_once == 0, "a thread has several chunks from u3 on");

    // 1. The row: thread 43 of rows with 3 heads of 16 chunks has chunk 11 of head 2 of row 0
    const unsigned chunks = args.d_head / kChunk; // of a row
    const unsigned thread =
        blockIdx.x * unsigned(cfg.n_threads()) + threadIdx.x; // below 2^31 + 1024
    const int column = int(thread % chunks) * kChunk;
    const int64_t row = thread / chunks / unsigned(args.heads);
    const int64_t head = thread / chunks % unsigned(args.heads);
    if (row >= args.rows) {
        return;
    }
    const PartStrides of_o = args.o_parts_strides, of_lse = args.lse_parts_strides;
    const auto *o_parts_gmem = static_cast<const ElementOf<kDType> *>(args.o_parts) +
                               row * of_o.row + head * of_o.head + column; // (parts, kChunk)
    const float *lse_parts_gmem = args.lse_parts + row * of_lse.row + head * of_lse.head; // (parts)
    auto *o_gmem = static_cast<ElementOf<kDType> *>(args.o) + row * args.o_strides.row +
                   head * args.o_strides.head + column; // (kChunk)
    const auto lse_of = [&](int part) { return __ldg(lse_parts_gmem + part * of_lse.part); };

    // 2. m = max(LSE_i)
    float m = -INFINITY;
    for (int part = 0; part < args.parts; ++part) {
        m = fmaxf(m, lse_of(part));
    }
    m = m == -INFINITY ? 0.0f : m; // -inf less -inf is no number

    // 3. l = Σ exp(LSE_i - m)
    float l = 0.0f;
    for (int part = 0; part < args.parts; ++part) {
        l += weight(lse_of(part), m, args.log2_base);
    }
    const float inverse_l = l == 0.0f ? 0.0f : 1.0f / l;

    // 4. O = Σ exp(LSE_i - m) / l · O_i, LSE = m + log(l)
    float o_rmem[kChunk] = {};
    for (int part = 0; part < args.parts; ++part) {
        const float share = weight(lse_of(part), m, args.log2_base) * inverse_l;
        if (share != 0.0f) {
            float part_rmem[kChunk];
            unpack_chunk<kDType>(
                part_rmem, __ldg(reinterpret_cast<const uint4 *>(o_parts_gmem + part * of_o.part)));
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                o_rmem[i] = fmaf(share, part_rmem[i], o_rmem[i]);
            }
        }
    }
    store_gmem_16(o_gmem, pack_chunk<kDType>(o_rmem));
    if (column == 0) {
        args.lse[row * args.lse_strides.row + head * args.lse_strides.head] =
            m + log2_approx(l) / args.log2_base;
    }
}

} // namespace u2
