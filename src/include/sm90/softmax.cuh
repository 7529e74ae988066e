#pragma once
// Softmax of accumulators with the optimistic maximum: m is the maximum of a tile's first block of
// keys, and the sums of later blocks are checked for overflow. A lane has two rows, g and g + 8, as
// in wgmma.cuh. scale: log2(e) · softmax_scale.

#include "flash_attention.cuh"
#include "numeric.cuh"
#include "sm90/arguments.cuh"
#include "sm90/tiles.cuh"

constexpr float kMaxSum = 1 << 15; // of a lane's sum of P over a block: fp16 holds up to 65504
constexpr float kMaxRescale = 100; // of k, by which m grows: 2^-k is a normal number
constexpr float kMaxL = 1e30; // of a row's l: 1 / l is a normal number
constexpr float kNoMaximum = -1e30; // of no keys; finite, so that -infinity - m is not NaN

// Columns from `visible` on become -infinity, in either row.
template <int kCount>
__device__ __forceinline__ void hide_columns(float (&S_rmem)[kCount], const int (&visible)[2]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i / 4 * 8 + i % 2 >= visible[i / 2 % 2] - 2 * t) {
            S_rmem[i] = -INFINITY;
        }
    }
}

// S becomes P = 2^(S · scale - m), not yet rounded; sum is this lane's part of each row's sum.
template <int kCount>
__device__ __forceinline__ void exponentiate(float (&S_rmem)[kCount], float scale,
                                             const float (&m)[2], float (&sum)[2]) {
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        S_rmem[i] = exp2_approx(fmaf(S_rmem[i], scale, -m[i / 2 % 2]));
        sum[i / 2 % 2] += S_rmem[i];
    }
}

// m becomes the maximum of the rows · scale.
template <int kCount>
__device__ __forceinline__ void row_maximum(const float (&S_rmem)[kCount], float scale,
                                            float (&m)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float own_m = kNoMaximum;
#pragma unroll
        for (int i = 2 * half; i < kCount; i += 4) {
            own_m = fmaxf(own_m, fmaxf(S_rmem[i], S_rmem[i + 1]));
        }
        m[half] = quad_max(own_m) * scale;
    }
}

// The first block of a tile.
template <int kCount>
__device__ __forceinline__ void softmax_first(float (&S_rmem)[kCount], float scale, float (&m)[2],
                                              float (&l)[2]) {
    row_maximum(S_rmem, scale, m);
    exponentiate(S_rmem, scale, m, l);
}

// A block before which some row has seen no key. m becomes the maximum of the old m and this block,
// and O must be multiplied by rescale.
template <int kCount>
__device__ __forceinline__ void softmax_again(float (&S_rmem)[kCount], float scale, float (&m)[2],
                                              float (&l)[2], float (&rescale)[2]) {
    const float old_m[2] = {m[0], m[1]};
    row_maximum(S_rmem, scale, m);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        m[half] = fmaxf(m[half], old_m[half]);
        rescale[half] = exp2_approx(old_m[half] - m[half]);
    }
    float sum[2];
    exponentiate(S_rmem, scale, m, sum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        l[half] = l[half] * rescale[half] + sum[half];
    }
}

// All later blocks. Returns whether m must grow for any row of the warp, which only fp16 asks.
template <DType kDType, int kCount>
__device__ __forceinline__ bool softmax(float (&S_rmem)[kCount], float scale, const float (&m)[2],
                                        float (&l)[2]) {
    float sum[2];
    exponentiate(S_rmem, scale, m, sum);
    l[0] += sum[0];
    l[1] += sum[1];
    // the mask is always all lanes: neither a sum nor NaN is below 0
    __syncwarp(__ballot_sync(0xffffffff, !(l[0] < 0) && !(l[1] < 0)));
    const bool fits = sum[0] <= kMaxSum && sum[1] <= kMaxSum; // false for NaN
    return kDType == DType::FP16 && __any_sync(0xffffffff, !fits);
}

// m grows by k = log2(l), at least 0; P and l are multiplied by rescale = 2^-k, and O must be. If a
// row has left the range of fp32, l = NaN from then on, in at least one lane.
template <int kCount>
__device__ __forceinline__ void grow(float (&S_rmem)[kCount], float (&m)[2], float (&l)[2],
                                     float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float k = quad_max(fmaxf(log2_approx(l[half]), 0));
        m[half] += k;
        rescale[half] = exp2_approx(-k);
        l[half] *= k < kMaxRescale ? rescale[half] : NAN;
    }
    scale_rows(S_rmem, rescale);
}

// The factors of O of a warp's 16 rows, from each lane's part of l: 1 / l, or 0 if the query sees
// no key. Stores the LSE of the rows if asked for. Returns whether 1 / l is a normal number.
template <Edges kEdges, typename Args, typename Place, typename Sinks = NoSinks>
__device__ __forceinline__ bool finish_sums(const Args &args, Place place, int warp_row,
                                            const float (&m)[2], const float (&l)[2],
                                            float (&inverse_l)[2], Sinks sinks = {}) {
    const int lane = threadIdx.x % 32;
    const float sink = sinks.of(place.head);
    bool fits = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float row_m = m[half], row_l = quad_sum(l[half]);
        fits &= row_l < kMaxL; // false for NaN
        const float O_scale = sinks.add(sink, row_m, row_l);
        const int query = place.row + warp_row + half * 8 + lane / 4;
        const bool sees = visible_keys<kEdges>(query, args) > keys_of(place, args).row;
        inverse_l[half] = sees ? O_scale * reciprocal_approx(row_l) : 0;
        if (args.lse != nullptr && lane % 4 == 0 && query < args.len_q) {
            store_lse(args, place, query, row_m, row_l);
        }
    }
    return fits;
}
