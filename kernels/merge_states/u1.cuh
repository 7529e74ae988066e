#pragma once
// Step 1 of the merge_states family: the base. A warp merges the parts of a row.
//
// Attention on n parts of the keys gives n outputs O_i and n logarithms LSE_i of sums of
// exponentials. Attention on all keys is their weighted mean:
//   LSE = log Σ exp(LSE_i)      O = Σ exp(LSE_i - LSE) · O_i
//
// The parts
//   1. A row is one query of one head. Its warp finds the largest LSE_i, m, and the sum l of the
//      weights exp(LSE_i - m), in which each lane has every 32nd part.
//   2. A lane adds up one column of O in fp32, in the order of the parts, then the column 32 behind
//      it. The weight of a part is computed again for each.
//   3. A part without keys has LSE_i = -inf and weight 0. Its O_i is not read, since it may hold
//      anything. A row whose parts are all so gets O = 0 and LSE = -inf.
//
// Why it is slow, in bf16: a lane has one load of 2 bytes of O_i in flight. The 2048 threads of an
// SM have 4 KB, where 3.35 TB/s of an H100 at a latency of some 650 ns need 8.2 KB. Each element
// takes a load of LSE_i, a difference, a product, an exponential and a product besides its own load
// and multiplication.
// Expected, of 3.35 TB/s at the bytes of all parts and of the output: 35% at d_head 128.
//
// benchmark:begin
// benchmark:end
// Verdict: not measured yet.
//
// Phases: 1 the row, 2 m, 3 l, 4 O and LSE.

#include "elements.cuh"
#include "kernels/merge_states/arguments.cuh"
#include "numeric.cuh"

namespace u1 {

// exp(lse - m). Where all parts have an lse of -inf, m is 0.
__device__ __forceinline__ float weight(float lse, float m, float log2_base) {
    return exp2_approx((lse - m) * log2_base);
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    merge_kernel(const __grid_constant__ MergeKernelArgs args) {
    constexpr MergeKernelConfig cfg = Kernels::value;
    constexpr DType kDType = cfg.dtype;

    // 1. The row: warp 7 of rows with 3 heads has head 1 of row 2
    const int lane = threadIdx.x % 32;
    const unsigned thread =
        blockIdx.x * unsigned(cfg.n_threads()) + threadIdx.x; // below 2^31 + 1024
    const int64_t row = thread / 32 / unsigned(args.heads);
    const int64_t head = thread / 32 % unsigned(args.heads);
    if (row >= args.rows) {
        return;
    }
    const PartStrides of_o = args.o_parts_strides, of_lse = args.lse_parts_strides;
    const auto *o_parts_gmem = static_cast<const ElementOf<kDType> *>(args.o_parts) +
                               row * of_o.row + head * of_o.head; // (parts, d_head)
    const float *lse_parts_gmem = args.lse_parts + row * of_lse.row + head * of_lse.head; // (parts)
    auto *o_gmem = static_cast<ElementOf<kDType> *>(args.o) + row * args.o_strides.row +
                   head * args.o_strides.head; // (d_head)
    const auto lse_of = [&](int part) { return __ldg(lse_parts_gmem + part * of_lse.part); };

    // 2. m = max(LSE_i)
    float m = -INFINITY;
    for (int part = lane; part < args.parts; part += 32) {
        m = fmaxf(m, lse_of(part));
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, lanes));
    }
    m = m == -INFINITY ? 0.0f : m; // -inf less -inf is no number

    // 3. l = Σ exp(LSE_i - m)
    float l = 0.0f;
    for (int part = lane; part < args.parts; part += 32) {
        l += weight(lse_of(part), m, args.log2_base);
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        l += __shfl_xor_sync(0xffffffff, l, lanes);
    }
    const float inverse_l = l == 0.0f ? 0.0f : 1.0f / l;

    // 4. O = Σ exp(LSE_i - m) / l · O_i, LSE = m + log(l)
    for (int column = lane; column < args.d_head; column += 32) {
        float o = 0.0f;
        for (int part = 0; part < args.parts; ++part) {
            const float share = weight(lse_of(part), m, args.log2_base) * inverse_l;
            if (share != 0.0f) {
                o = fmaf(share, to_float<kDType>(__ldg(o_parts_gmem + part * of_o.part + column)),
                         o);
            }
        }
        o_gmem[column] = from_float<kDType>(o);
    }
    if (lane == 0) {
        args.lse[row * args.lse_strides.row + head * args.lse_strides.head] =
            m + log2_approx(l) / args.log2_base;
    }
}

} // namespace u1
