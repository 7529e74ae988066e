#pragma once
// Step 3 of the merge_states family: several parts in flight. Parent: u2.
//
// What changed
//   1. A thread loads its chunks of `parts_at_once` parts before it uses the first, whatever their
//      weights are. Where the weight is 0, zeros take the place of the chunk.
//   2. The first of these loads begin before m and l are known, so that they are under way while
//      the LSE_i arrive.
//
// Why: in u2 the address of a chunk waits for nothing, but the branch that skips parts of weight 0
// waits for LSE_i, a difference, a product and an exponential. So a thread has one chunk in flight,
// and none while it computes. At 40 registers per thread 1536 threads of an SM have 24 KB in
// flight, at best. 3.35 TB/s of an H100 need 8.2 KB at a latency of 650 ns, and twice that where
// memory is busy.
//   With 4 chunks per thread 1024 threads have 64 KB. At 1024 parts, where 2^28 bytes are 1024 rows
// of 16 chunks, an SM has 124 threads and 8 KB instead of 2.
//   Cost: 16 registers, and the bytes of parts without keys, which u2 does not read.
// Expected, of 3.35 TB/s at the bytes of all parts and of the output: 90% from 2 to 64 parts, and
// 70% at 1024.
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

namespace u3 {

// exp(lse - m). Where all parts have an lse of -inf, m is 0.
__device__ __forceinline__ float weight(float lse, float m, float log2_base) {
    return exp2_approx((lse - m) * log2_base);
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    merge_kernel(const __grid_constant__ MergeKernelArgs args) {
    constexpr MergeKernelConfig cfg = Kernels::value;
    constexpr DType kDType = cfg.dtype;
    constexpr int kChunk = kChunkElements<kDType>, kParts = cfg.parts_at_once;
    static_assert(kParts >= 1 && kParts <= 16, "a chunk is 4 registers");

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

    // O_i of kParts parts: global → registers. Behind the last part it is read again.
    uint4 parts_rmem[kParts]; // (kParts, kChunk)
    const auto load = [&](int first) {
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
            const auto *part_gmem = o_parts_gmem + min(first + k, args.parts - 1) * of_o.part;
            parts_rmem[k] = __ldg(reinterpret_cast<const uint4 *>(part_gmem));
        }
    };
    load(0);

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
    for (int first = 0; first < args.parts; first += kParts) {
        if (first > 0) {
            load(first);
        }
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
            const int part = first + k;
            const float share =
                part < args.parts ? weight(lse_of(part), m, args.log2_base) * inverse_l : 0.0f;
            float part_rmem[kChunk];
            // a part without keys may hold NaN, and 0 · NaN is NaN
            unpack_chunk<kDType>(part_rmem, share != 0.0f ? parts_rmem[k] : uint4{});
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

} // namespace u3
