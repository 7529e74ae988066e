#pragma once
// Parts of the joint family's kernels that no step is about: where a token's row is, the norm and
// the rotary embedding of 8 elements, blocks of one head's keys, and the softmax of a warp.

#include "elements.cuh"
#include "kernels/joint/arguments.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

// The row of a token, which is one of the sequence or, from `length` on, one of its context.
__device__ __forceinline__ int64_t row_offset(const RowStrides &own, const RowStrides &context,
                                              int sample, int token, int length) {
    return token < length ? sample * own.batch + token * own.row
                          : sample * context.batch + (token - length) * context.row;
}

__device__ __forceinline__ const Element *q_row_gmem(const JointKernelArgs &args, int sample,
                                                     int token) {
    return static_cast<const Element *>(token < args.length ? args.q : args.context_q) +
           row_offset(args.q_strides, args.context_q_strides, sample, token, args.length);
}

__device__ __forceinline__ const Element *k_row_gmem(const JointKernelArgs &args, int sample,
                                                     int token) {
    return static_cast<const Element *>(token < args.length ? args.k : args.context_k) +
           row_offset(args.k_strides, args.context_k_strides, sample, token, args.length);
}

__device__ __forceinline__ const Element *v_row_gmem(const JointKernelArgs &args, int sample,
                                                     int token) {
    return static_cast<const Element *>(token < args.length ? args.v : args.context_v) +
           row_offset(args.v_strides, args.context_v_strides, sample, token, args.length);
}

__device__ __forceinline__ Element *o_row_gmem(const JointKernelArgs &args, int sample, int token) {
    return static_cast<Element *>(token < args.length ? args.o : args.context_o) +
           row_offset(args.o_strides, args.context_o_strides, sample, token, args.length);
}

__device__ __forceinline__ const Element *q_weight_gmem(const JointKernelArgs &args, int token) {
    return static_cast<const Element *>(token < args.length ? args.q_weight
                                                            : args.context_q_weight);
}

__device__ __forceinline__ const Element *k_weight_gmem(const JointKernelArgs &args, int token) {
    return static_cast<const Element *>(token < args.length ? args.k_weight
                                                            : args.context_k_weight);
}

// Chunk number `chunk` of a row: 8 elements in fp32.
template <DType kDType>
__device__ __forceinline__ void load_chunk(float (&x_rmem)[kChunk], const Element *row_gmem,
                                           int chunk) {
    unpack_chunk<kDType>(x_rmem, __ldg(reinterpret_cast<const uint4 *>(row_gmem) + chunk));
}

// 1 / sqrt(mean of x² + eps) of a row, by kLanes lanes of a warp that have every kLanes-th chunk.
template <DType kDType, int kLanes = 32>
__device__ __forceinline__ float row_rstd(const Element *row_gmem, int n_chunks, float eps) {
    float squares = 0;
#pragma unroll 1 // up to a width of 8 · kLanes there is one turn
    for (int chunk = threadIdx.x % kLanes; chunk < n_chunks; chunk += kLanes) {
        float x_rmem[kChunk];
        load_chunk<kDType>(x_rmem, row_gmem, chunk);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            squares = fmaf(x_rmem[i], x_rmem[i], squares);
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        squares += __shfl_xor_sync(0xffffffff, squares, lanes);
    }
    return rsqrtf(squares / (n_chunks * kChunk) + eps);
}

// x · rstd · weight of a chunk.
template <DType kDType>
__device__ __forceinline__ void scale_chunk(float (&x_rmem)[kChunk], float rstd,
                                            const Element *weight_gmem, int chunk) {
    float weight_rmem[kChunk];
    load_chunk<kDType>(weight_rmem, weight_gmem, chunk);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        x_rmem[i] *= rstd * weight_rmem[i];
    }
}

// (x + iy) · (cos + i sin) of two neighbouring elements.
__device__ __forceinline__ void turn(float &x, float &y, float cosine, float sine) {
    const float real = x * cosine - y * sine;
    y = x * sine + y * cosine;
    x = real;
}

// Turns the 4 pairs of a chunk by the angles of a position, whose 32 bytes of the table they need.
template <int kDHead>
__device__ __forceinline__ void turn_chunk(float (&x_rmem)[kChunk], const float *rotary_gmem,
                                           int position, int chunk) {
    const auto *table_gmem = reinterpret_cast<const float4 *>(
        rotary_gmem + int64_t(position) * kDHead + chunk * kChunk % kDHead);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float4 angles = __ldg(table_gmem + half);
        turn(x_rmem[4 * half], x_rmem[4 * half + 1], angles.x, angles.y);
        turn(x_rmem[4 * half + 2], x_rmem[4 * half + 3], angles.z, angles.w);
    }
}

// S (16, 8 · kTiles) = Q @ K^T of one head, Q in registers.
template <typename Kernels, int kTiles>
__device__ __forceinline__ void
multiply_QK(float (&S_rmem)[1][kTiles][4],
            const uint32_t (&Q_rmem)[Kernels::value.d_head / kMmaK][1][4], uint32_t K_smem,
            const uint32_t (&K_lane_offset)[4]) {
    constexpr auto cfg = Kernels::value;
#pragma unroll
    for (int k = 0; k < cfg.d_head / kMmaK; ++k) {
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
            uint32_t K_rmem[4];
            ldmatrix_x4(K_rmem,
                        fragment_address<cfg.B_c, cfg.d_head>(K_smem, K_lane_offset, n * kMmaK, k));
            add_product<cfg.dtype>(S_rmem, Q_rmem[k], K_rmem, n);
        }
    }
}

// O (16, d_head) += P (16, 16 · kTiles) @ V of one head.
template <typename Kernels, int kTiles, int kOTiles>
__device__ __forceinline__ void multiply_PV(float (&O_rmem)[1][kOTiles][4],
                                            const uint32_t (&P_rmem)[kTiles][1][4], uint32_t V_smem,
                                            const uint32_t (&lane_offset)[4]) {
    constexpr auto cfg = Kernels::value;
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
        for (int n = 0; n < cfg.d_head / kMmaK; ++n) {
            uint32_t V_rmem[4];
            ldmatrix_x4_trans(
                V_rmem, fragment_address<cfg.B_c, cfg.d_head>(V_smem, lane_offset, k * kMmaK, n));
            add_product<cfg.dtype>(O_rmem, P_rmem[k], V_rmem, n);
        }
    }
}

// -infinity in the columns of S from n_keys on, none of them in the first block. A lane has columns
// 2t and 2t + 1 of every eight.
template <int kTiles>
__device__ __forceinline__ void hide_keys(float (&S_rmem)[1][kTiles][4], int n_keys) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) {
        float &S = S_rmem[0][i / 4][i % 4];
        S = i / 4 * kMmaN + column + i % 2 < n_keys ? S : -INFINITY;
    }
}

// m, the maximum · scale of a row, and l, this lane's part of the sum of P = 2^(S · scale - m): for
// rows g and g + 8.
struct Statistics {
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
};

// P in the place of S; m and l take in the block, of which a row sees a key, and O follows m.
template <int kTiles, int kOTiles>
__device__ __forceinline__ void update(Statistics &statistics, float (&S_rmem)[1][kTiles][4],
                                       float (&O_rmem)[1][kOTiles][4], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = -INFINITY, sum = 0;
#pragma unroll
        for (int n = 0; n < kTiles * 2; ++n) {
            largest = fmaxf(largest, S_rmem[0][n / 2][half * 2 + n % 2]);
        }
        const float m = fmaxf(quad_max(largest) * scale, statistics.m[half]);
        const float rescale = exp2_approx(statistics.m[half] - m);
        statistics.m[half] = m;
#pragma unroll
        for (int n = 0; n < kTiles * 2; ++n) {
            float &S = S_rmem[0][n / 2][half * 2 + n % 2];
            S = exp2_approx(fmaf(S, scale, -m));
            sum += S;
        }
        statistics.l[half] = statistics.l[half] * rescale + sum;
#pragma unroll
        for (int n = 0; n < kOTiles; ++n) {
            O_rmem[0][n][half * 2] *= rescale;
            O_rmem[0][n][half * 2 + 1] *= rescale;
        }
    }
}

// O / l of a head, of the rows of a warp that are queries: registers → global.
template <DType kDType, int kOTiles>
__device__ __forceinline__ void store_O(const float (&O_rmem)[1][kOTiles][4],
                                        const Statistics &statistics, const JointKernelArgs &args,
                                        int head, int first_query, int n_queries) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float inverse_l = reciprocal_approx(quad_sum(statistics.l[half]));
        const int query = first_query + half * 8 + lane / 4;
        if (query < n_queries) {
            Element *row_gmem =
                o_row_gmem(args, blockIdx.z, query) + head * (kOTiles * kMmaN) + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < kOTiles; ++n) {
                *reinterpret_cast<uint32_t *>(row_gmem + n * kMmaN) = pack<kDType>(
                    O_rmem[0][n][half * 2] * inverse_l, O_rmem[0][n][half * 2 + 1] * inverse_l);
            }
        }
    }
}
