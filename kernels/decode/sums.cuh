#pragma once
// Sums over the keys of a part each, and the outputs that come of them.

#include "elements.cuh"
#include "kernels/decode/arguments.cuh"
#include "kernels/decode/queries.cuh"
#include "memory.cuh"
#include "numeric.cuh"

// Room for m, l and O of the rows of some parts, which have seen other keys each. m is the maximum
// · scale of a row, l its sum of P = 2^(S · scale - m), O is not divided by l.
template <int B_r, int kDHead>
struct Sums {
    float *memory; // (parts, kFloats): O (B_r, d_head), m (B_r), l (B_r)
    int parts;

    static constexpr int kFloats = B_r * (kDHead + 2); // of a part

    __device__ __forceinline__ float *O(int part, int row) const {
        return memory + int64_t(part) * kFloats + row * kDHead;
    }
    __device__ __forceinline__ float &m(int part, int row) const {
        return memory[int64_t(part) * kFloats + B_r * kDHead + row];
    }
    __device__ __forceinline__ float &l(int part, int row) const {
        return memory[int64_t(part) * kFloats + B_r * (kDHead + 1) + row];
    }

    // As many parts from one on.
    __device__ __forceinline__ Sums from(int part) const {
        return {memory + int64_t(part) * kFloats, parts};
    }

    // The largest m of a row, and its l at that, over all parts.
    __device__ __forceinline__ float2 of_row(int row) const {
        float largest = -INFINITY, sum = 0;
        for (int part = 0; part < parts; ++part) {
            largest = fmaxf(largest, m(part, row));
        }
        for (int part = 0; part < parts; ++part) {
            sum += l(part, row) * weight(part, row, largest);
        }
        return make_float2(largest, sum);
    }

    // The factor of a part's sums; 0 where it has seen no key.
    __device__ __forceinline__ float weight(int part, int row, float largest) const {
        return m(part, row) == -INFINITY ? 0 : exp2_approx(m(part, row) - largest);
    }

    // Adds eight elements of O of a row, over every `step`-th part from `first` on.
    __device__ __forceinline__ void add_up(float (&O_rmem)[kChunk], int row, int column,
                                           float largest, int first = 0, int step = 1) const {
#pragma unroll 4
        for (int part = first; part < parts; part += step) {
            const float factor = weight(part, row, largest);
            const float4 *own = reinterpret_cast<const float4 *>(O(part, row) + column);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float4 four = own[half];
                O_rmem[4 * half] = fmaf(four.x, factor, O_rmem[4 * half]);
                O_rmem[4 * half + 1] = fmaf(four.y, factor, O_rmem[4 * half + 1]);
                O_rmem[4 * half + 2] = fmaf(four.z, factor, O_rmem[4 * half + 2]);
                O_rmem[4 * half + 3] = fmaf(four.w, factor, O_rmem[4 * half + 3]);
            }
        }
    }
};

// The sink of a head takes part in the sum: m and l with it.
template <DType kDType>
__device__ __forceinline__ float2 with_sink(float2 m_and_l, const Element *sinks, int head) {
    if (sinks == nullptr) {
        return m_and_l;
    }
    const float sink = to_float<kDType>(sinks[head]) * kLog2e;
    const float m = fmaxf(m_and_l.x, sink);
    if (m == -INFINITY) {
        return m_and_l;
    }
    return make_float2(m, m_and_l.y * exp2_approx(m_and_l.x - m) + exp2_approx(sink - m));
}

// Stores the LSE of a row, if `stores_lse`. Returns the factor of its O: one over l, the sink in
// it; 0 of a row that has seen no key.
template <DType kDType, int B_r>
__device__ __forceinline__ float finish_row(float2 m_and_l, const Queries<B_r> &queries, int row,
                                            bool stores_lse, const DecodeKernelArgs &args) {
    const int query = queries.query(row), head = queries.head(row);
    const float2 all = with_sink<kDType>(m_and_l, args.sinks, head);
    if (args.lse != nullptr && stores_lse) {
        const int heads = args.kv_heads * args.heads_per_kv;
        args.lse[(int64_t(queries.sequence) * heads + head) * args.len_q + query] =
            all.x == -INFINITY ? -INFINITY : (all.x + log2_approx(all.y)) * kLn2;
    }
    // with a sink, O's own m may be below the new one
    return m_and_l.x == -INFINITY ? 0 : exp2_approx(m_and_l.x - all.x) * reciprocal_approx(all.y);
}

// O and LSE of all rows of a tile, by the first kThreads threads: sums → global.
template <DType kDType, int kThreads, int B_r, int kDHead>
__device__ __forceinline__ void store_outputs(const Sums<B_r, kDHead> &sums,
                                              const Queries<B_r> &queries,
                                              const DecodeKernelArgs &args) {
    constexpr int kChunks = kDHead / kChunk;
    for (int i = threadIdx.x; i < B_r * kChunks; i += kThreads) {
        const int row = i / kChunks, column = i % kChunks * kChunk;
        if (queries.has(row)) {
            const float2 m_and_l = sums.of_row(row);
            float O_rmem[kChunk] = {};
            sums.add_up(O_rmem, row, column, m_and_l.x);
            const float factor = finish_row<kDType>(m_and_l, queries, row, column == 0, args);
#pragma unroll
            for (int j = 0; j < kChunk; ++j) {
                O_rmem[j] *= factor;
            }
            store_gmem_16(queries.O(row, args) + column, pack_chunk<kDType>(O_rmem));
        }
    }
}

// m, l and O of all rows over all parts of `sums`, as one of the parts in memory, by the first
// kThreads threads.
template <int kThreads, int B_r, int kDHead>
__device__ __forceinline__ void store_part(const Sums<B_r, kDHead> &parts, int part,
                                           const Sums<B_r, kDHead> &sums) {
    constexpr int kChunks = kDHead / kChunk;
    for (int i = threadIdx.x; i < B_r * kChunks; i += kThreads) {
        const int row = i / kChunks, column = i % kChunks * kChunk;
        const float2 m_and_l = sums.of_row(row);
        float O_rmem[kChunk] = {};
        sums.add_up(O_rmem, row, column, m_and_l.x);
        float4 *O_gmem = reinterpret_cast<float4 *>(parts.O(part, row) + column);
        O_gmem[0] = {O_rmem[0], O_rmem[1], O_rmem[2], O_rmem[3]};
        O_gmem[1] = {O_rmem[4], O_rmem[5], O_rmem[6], O_rmem[7]};
        if (column == 0) {
            parts.m(part, row) = m_and_l.x;
            parts.l(part, row) = m_and_l.y;
        }
    }
}
