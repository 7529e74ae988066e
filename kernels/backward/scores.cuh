#pragma once
// S, P, dP and dS in registers, and the way of dS to shared memory.

#include "elements.cuh"
#include "numeric.cuh"
#include "sm90/tiles.cuh"

// The first values of sums whose columns are queries: columns 8n + 2t and 8n + 2t + 1 of a lane.
template <int kCount>
__device__ __forceinline__ void begin(float (&D_rmem)[kCount], const float *of_queries) {
    const float2 *pairs = reinterpret_cast<const float2 *>(of_queries) + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const float2 pair = pairs[i];
        D_rmem[i] = D_rmem[i + 2] = pair.x;
        D_rmem[i + 1] = D_rmem[i + 3] = pair.y;
    }
}

// Logits of keys behind the query become -infinity in a block on the diagonal. Rows are keys, the
// warp's from warp_row on; columns are queries.
template <int kCount>
__device__ __forceinline__ void hide_keys(float (&S_rmem)[kCount], int warp_row) {
    const int lane = threadIdx.x % 32, first = warp_row + lane / 4 - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i / 4 * 8 + i % 2 < first + i / 2 % 2 * 8) {
            S_rmem[i] = -INFINITY;
        }
    }
}

// Logits of keys that a query does not see become -infinity: of the block's queries, the warp's key
// g is seen by `width` from `first` on, and its key g + 8 by those 8 further on.
template <int kCount>
__device__ __forceinline__ void hide(float (&S_rmem)[kCount], int first, int width) {
    first += threadIdx.x % 32 / 4 - threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int query = i / 4 * 8 + i % 2 - i / 2 % 2 * 8;
        S_rmem[i] = uint32_t(query - first) < uint32_t(width) ? S_rmem[i] : -INFINITY;
    }
}

// P = 2^(S · scale) in the place of S.
template <int kCount>
__device__ __forceinline__ void exponentiate(float (&S_rmem)[kCount], float scale) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        S_rmem[i] = exp2_approx(S_rmem[i] * scale);
    }
}

// P = 2^(S · scale + mask) in the place of S. Masks are those of keys g and g + 8 of a warp.
template <int kCount>
__device__ __forceinline__ void exponentiate(float (&S_rmem)[kCount], float scale,
                                             const float (&mask)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        S_rmem[i] = exp2_approx(fmaf(S_rmem[i], scale, mask[i / 2 % 2]));
    }
}

// Keeps all of P before what follows: a warp barrier whose mask comes from P, as in h18. No P has a
// sign, so the mask is always all lanes, but ptxas cannot know that.
template <int kCount>
__device__ __forceinline__ void keep_before(const float (&P_rmem)[kCount]) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        bits |= __float_as_uint(P_rmem[i]);
    }
    __syncwarp(__ballot_sync(0xffffffff, int(bits) >= 0));
}

// dS = P · dP in the place of dP. P_rmem[k][i] has P of 8k + 2i and 8k + 2i + 1.
template <DType kDType, int kSteps>
__device__ __forceinline__ void weigh(const uint32_t (&P_rmem)[kSteps][4],
                                      float (&dP_rmem)[8 * kSteps]) {
#pragma unroll
    for (int i = 0; i < 8 * kSteps; ++i) {
        dP_rmem[i] *= to_float<kDType>(Element(P_rmem[i / 8][i / 2 % 4] >> i % 2 * 16));
    }
}

// Stores accumulators (16, 16) of a warp, packed in 16 bits, transposed: column 16k + r of theirs
// becomes row 16k + r of a tile of kRows rows, in columns column … column + 15. Lane n gives the
// address of row n % 8 of the n / 8-th of four matrices (8, 8), whose order is that of `packed`.
template <int kRows>
__device__ __forceinline__ void store_transposed(uint32_t tile_smem, int column, int k,
                                                 const uint32_t (&packed)[4]) {
    const int lane = threadIdx.x % 32;
    const int row = 16 * k + lane / 16 * 8 + lane % 8;
    const int chunk = (column / 8 + lane / 8 % 2) ^ row % 8;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     tile_smem + row * kRowBytes + chunk * kChunkBytes),
                 "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                 : "memory");
}

// S = tanh(S · scale). Masks come after it.
template <int kCount>
__device__ __forceinline__ void limit(float (&S_rmem)[kCount], float scale) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        asm("tanh.approx.f32 %0, %1;" : "=f"(S_rmem[i]) : "f"(S_rmem[i] * scale));
    }
}

// P = 2^(S · scale - LSE + mask) and its weight P · (1 - S^2): two of either, packed, in the place
// of two S.
template <DType kDType, int kCount>
__device__ __forceinline__ void weigh_P(float (&S_rmem)[kCount], float scale,
                                        const float *of_queries, const float (&mask)[2]) {
    const float2 *pairs = reinterpret_cast<const float2 *>(of_queries) + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
        const float2 pair = pairs[i / 4 * 4];
        float P[2], weight[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float S = S_rmem[i + n], begin = (n == 0 ? pair.x : pair.y) + mask[i / 2 % 2];
            P[n] = exp2_approx(fmaf(S, scale, begin));
            weight[n] = P[n] * __saturatef(fmaf(-S, S, 1.0f)); // S may be -infinity
        }
        S_rmem[i] = __uint_as_float(pack<kDType>(P[0], P[1]));
        S_rmem[i + 1] = __uint_as_float(pack<kDType>(weight[0], weight[1]));
    }
}
