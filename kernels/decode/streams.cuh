#pragma once
// Streams: lanes that share a key, and compute on CUDA cores in fp32.

#include "elements.cuh"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/scores.cuh"
#include "kernels/decode/sums.cuh"
#include "numeric.cuh"

// Eight elements of a key; zeros behind the end. X_gmem points to this lane's elements of key 0.
__device__ __forceinline__ uint4 load_key(const Element *X_gmem, int64_t row_stride, int key,
                                          int len_k) {
    return key < len_k ? __ldg(reinterpret_cast<const uint4 *>(X_gmem + key * row_stride))
                       : uint4{0, 0, 0, 0};
}

__device__ __forceinline__ float dot(const float (&x)[kChunk], const float (&y)[kChunk]) {
    float sum = x[0] * y[0];
#pragma unroll
    for (int i = 1; i < kChunk; ++i) {
        sum = fmaf(x[i], y[i], sum);
    }
    return sum;
}

// The sum over the lanes of a stream, in each of them.
template <int kLanes>
__device__ __forceinline__ float sum_over_stream(float x) {
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        x += __shfl_xor_sync(0xffffffff, x, lanes);
    }
    return x;
}

// S = Q @ K^T of a stream's keys, in each of its lanes.
template <DType kDType, int kLanes, int B_r, int kKeys>
__device__ __forceinline__ void multiply_QK(float (&S_rmem)[B_r][kKeys],
                                            const float (&Q_rmem)[B_r][kChunk],
                                            const uint4 (&K_rmem)[kKeys]) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
        float own_rmem[kChunk];
        unpack_chunk<kDType>(own_rmem, K_rmem[i]);
#pragma unroll
        for (int row = 0; row < B_r; ++row) {
            S_rmem[row][i] = sum_over_stream<kLanes>(dot(Q_rmem[row], own_rmem));
        }
    }
}

// O += P @ V of a stream's keys; a lane has its columns of V and O.
template <DType kDType, int B_r, int kKeys>
__device__ __forceinline__ void add_PV(float (&O_rmem)[B_r][kChunk],
                                       const float (&P_rmem)[B_r][kKeys],
                                       const uint4 (&V_rmem)[kKeys]) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
        float own_rmem[kChunk];
        unpack_chunk<kDType>(own_rmem, V_rmem[i]);
#pragma unroll
        for (int n = 0; n < B_r * kChunk; ++n) {
            float &O = O_rmem[n / kChunk][n % kChunk];
            O = fmaf(P_rmem[n / kChunk][i], own_rmem[n % kChunk], O);
        }
    }
}

// S = tanh(S · scale_in_cap) with a softcap, and -infinity where a row does not see a key. A
// stream has every kStreams-th key from block + stream on.
template <int kStreams, int B_r, int kKeys>
__device__ __forceinline__ void
limit_and_hide(float (&S_rmem)[B_r][kKeys], const Queries<B_r> &queries,
               const DecodeKernelArgs &args, int block, int stream) {
    const bool hides = !queries.see_all(block, kStreams * kKeys, args);
#pragma unroll
    for (int row = 0; row < B_r; ++row) {
        limit(S_rmem[row], args.scale_in_cap);
        if (hides) {
            const int first = queries.begin_of(row, args), end = queries.end_of(row, args);
#pragma unroll
            for (int i = 0; i < kKeys; ++i) {
                const int key = block + stream + i * kStreams;
                S_rmem[row][i] = key >= first && key < end ? S_rmem[row][i] : -INFINITY;
            }
        }
    }
}

// P = 2^(S · scale - m) in the place of S; m and l take in these keys, and O follows m.
template <int B_r, int kKeys>
__device__ __forceinline__ void update(float (&S_rmem)[B_r][kKeys], float (&m)[B_r],
                                       float (&l)[B_r], float (&O_rmem)[B_r][kChunk], float scale) {
#pragma unroll
    for (int row = 0; row < B_r; ++row) {
        float new_m = S_rmem[row][0];
#pragma unroll
        for (int i = 1; i < kKeys; ++i) {
            new_m = fmaxf(new_m, S_rmem[row][i]);
        }
        new_m = fmaxf(new_m * scale, m[row]);
        const float subtracted = new_m == -INFINITY ? 0 : new_m; // a row that has seen no key
        const float rescale = exp2_approx(m[row] - subtracted);
        m[row] = new_m;
        l[row] *= rescale;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            S_rmem[row][i] = exp2_approx(fmaf(S_rmem[row][i], scale, -subtracted));
            l[row] += S_rmem[row][i];
        }
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            O_rmem[row][i] *= rescale;
        }
    }
}

// m, l and O of a stream: registers → one part of the sums.
template <int B_r, int kDHead>
__device__ __forceinline__ void store_sums(const Sums<B_r, kDHead> &sums, int stream, int column,
                                           const float (&m)[B_r], const float (&l)[B_r],
                                           const float (&O_rmem)[B_r][kChunk]) {
#pragma unroll
    for (int row = 0; row < B_r; ++row) {
        float4 *O_smem = reinterpret_cast<float4 *>(sums.O(stream, row) + column);
        O_smem[0] = {O_rmem[row][0], O_rmem[row][1], O_rmem[row][2], O_rmem[row][3]};
        O_smem[1] = {O_rmem[row][4], O_rmem[row][5], O_rmem[row][6], O_rmem[row][7]};
        if (column == 0) {
            sums.m(stream, row) = m[row];
            sums.l(stream, row) = l[row];
        }
    }
}
