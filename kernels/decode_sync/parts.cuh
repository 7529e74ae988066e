#pragma once
// Parts of the decode_sync family's kernels that no step is about: the queries of a tile and the
// keys that they see, fragments of a warp's own block, the running maximum, and the sum over warps.
//
// Queries that share keys are rows of one tile: row r of a head of K is query r / heads_per_kv of
// head r % heads_per_kv of the group. A warp has blocks of B_c keys of its own.

#include "elements.cuh"
#include "kernels/decode_sync/arguments.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

constexpr int kRows = kMmaM; // of a tile of queries

// The queries of a thread block, in a sequence of len_k keys. The grid is (batch, tiles of queries
// of all heads of K, ...).
struct Queries {
    int sequence, kv_head, first_row, n_rows; // of all rows of the head of K
    int len_k;
    int heads_per_kv, own; // query i stands at key i + own

    __device__ __forceinline__ explicit Queries(const DecodeSyncKernelArgs &args) {
        sequence = blockIdx.x;
        kv_head = blockIdx.y % args.kv_heads;
        first_row = blockIdx.y / args.kv_heads * kRows;
        n_rows = args.len_q * args.heads_per_kv;
        const int length = args.cache_seqlens ? args.cache_seqlens[sequence] : args.len_k;
        len_k = min(max(length, 0), args.len_k);
        heads_per_kv = args.heads_per_kv;
        own = len_k - args.len_q;
    }

    __device__ __forceinline__ bool has(int row) const { return first_row + row < n_rows; }
    __device__ __forceinline__ int query(int row) const { return (first_row + row) / heads_per_kv; }
    __device__ __forceinline__ int head(int row) const {
        return kv_head * heads_per_kv + (first_row + row) % heads_per_kv;
    }

    // The keys that a row sees, and those that some row of the tile sees.
    __device__ __forceinline__ int begin_of(int row, const DecodeSyncKernelArgs &args) const {
        return max(query(row) + own - args.window_left, 0);
    }
    __device__ __forceinline__ int end_of(int row, const DecodeSyncKernelArgs &args) const {
        return min(query(row) + own + args.window_right + 1, len_k);
    }
    __device__ __forceinline__ int last_row() const { return min(kRows, n_rows - first_row) - 1; }
};

// The row of the cache that a sequence has.
__device__ __forceinline__ int row_of_cache(const int *cache_batch_idx, const Queries &queries) {
    return cache_batch_idx ? cache_batch_idx[queries.sequence] : queries.sequence;
}

// The first key of a head in the sequence's row of the cache.
__device__ __forceinline__ const Element *cache_gmem(const void *X, const TensorStrides &strides,
                                                     const Queries &queries,
                                                     const int *cache_batch_idx) {
    return static_cast<const Element *>(X) +
           row_of_cache(cache_batch_idx, queries) * strides.batch + queries.kv_head * strides.head;
}

// Q of a tile: global → shared, by all threads; zeros for rows that are none.
template <typename Kernels>
__device__ __forceinline__ void copy_queries(uint32_t Q_smem, const Queries &queries,
                                             const DecodeSyncKernelArgs &args) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.d_head), kChunks = cfg.d_head / kChunk;
    for (int i = threadIdx.x; i < kRows * kChunks; i += cfg.n_threads()) {
        const int row = i / kChunks, column = i % kChunks * kChunk;
        const bool exists = queries.has(row);
        const Element *Q_gmem = static_cast<const Element *>(args.Q);
        if (exists) {
            Q_gmem += queries.sequence * args.Q_strides.batch +
                      queries.query(row) * args.Q_strides.row +
                      queries.head(row) * args.Q_strides.head + column;
        }
        cp_async_16(Q_smem + piece_offset<kRows, kColumns>(column / kColumns) +
                        smem_offset<kColumns>(row, column % kColumns),
                    Q_gmem, exists ? 16 : 0);
    }
}

// S (16, B_c) = Q @ K^T for a warp's own block of K.
template <typename Kernels>
__device__ __forceinline__ void
multiply_QK(float (&S_rmem)[1][Kernels::value.B_c / kMmaN][4], uint32_t Q_smem, uint32_t K_smem,
            const uint32_t (&lane_offset)[4], const uint32_t (&K_lane_offset)[4]) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.d_head);
#pragma unroll
    for (int k = 0; k < cfg.d_head / kMmaK; ++k) {
        uint32_t Q_rmem[1][4];
        ldmatrix_x4(Q_rmem[0], fragment_address<kRows, kColumns>(Q_smem, lane_offset, 0, k));
#pragma unroll
        for (int n = 0; n < cfg.B_c / kMmaK; ++n) {
            uint32_t K_rmem[4];
            ldmatrix_x4(K_rmem,
                        fragment_address<cfg.B_c, kColumns>(K_smem, K_lane_offset, n * kMmaK, k));
            add_product<cfg.dtype>(S_rmem, Q_rmem, K_rmem, n);
        }
    }
}

// O (16, d_head) += P @ V for a warp's own block of V.
template <typename Kernels>
__device__ __forceinline__ void
multiply_PV(float (&O_rmem)[1][Kernels::value.d_head / kMmaN][4],
            const uint32_t (&P_rmem)[Kernels::value.B_c / kMmaK][1][4], uint32_t V_smem,
            const uint32_t (&lane_offset)[4]) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.d_head);
#pragma unroll
    for (int k = 0; k < cfg.B_c / kMmaK; ++k) {
#pragma unroll
        for (int n = 0; n < cfg.d_head / kMmaK; ++n) {
            uint32_t V_rmem[4];
            ldmatrix_x4_trans(
                V_rmem, fragment_address<cfg.B_c, kColumns>(V_smem, lane_offset, k * kMmaK, n));
            add_product<cfg.dtype>(O_rmem, P_rmem[k], V_rmem, n);
        }
    }
}

// S = tanh(S · scale_in_cap) with a softcap, and -infinity where a row does not see a key. A lane
// has columns 2t and 2t + 1 of every eight, of rows g and g + 8.
template <int kTiles>
__device__ __forceinline__ void limit_and_hide(float (&S_rmem)[1][kTiles][4],
                                               const Queries &queries,
                                               const DecodeSyncKernelArgs &args, int key) {
    if (args.scale_in_cap != 0) {
#pragma unroll
        for (int i = 0; i < kTiles * 4; ++i) {
            float &S = S_rmem[0][i / 4][i % 4];
            asm("tanh.approx.f32 %0, %1;" : "=f"(S) : "f"(S * args.scale_in_cap));
        }
    }
    const int last = queries.last_row();
    if (key >= queries.begin_of(last, args) && key + kTiles * kMmaN <= queries.end_of(0, args)) {
        return; // every row sees the whole block
    }
    const int lane = threadIdx.x % 32;
    key += lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = half * 8 + lane / 4;
        const int first = queries.begin_of(row, args), end = queries.end_of(row, args);
#pragma unroll
        for (int n = 0; n < kTiles * 2; ++n) {
            const int own = key + n / 2 * kMmaN + n % 2;
            float &S = S_rmem[0][n / 2][half * 2 + n % 2];
            S = own >= first && own < end ? S : -INFINITY;
        }
    }
}

// m, the maximum · scale of a row, and l, this lane's part of the sum of P = 2^(S · scale - m): for
// rows g and g + 8.
struct Statistics {
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
};

// P in the place of S; m and l take in the block, and O follows m.
template <int kTiles, int kOTiles>
__device__ __forceinline__ void update(Statistics &statistics, float (&S_rmem)[1][kTiles][4],
                                       float (&O_rmem)[1][kOTiles][4], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float m = -INFINITY;
#pragma unroll
        for (int n = 0; n < kTiles * 2; ++n) {
            m = fmaxf(m, S_rmem[0][n / 2][half * 2 + n % 2]);
        }
        const float old_m = statistics.m[half];
        const float new_m = fmaxf(quad_max(m) * scale, old_m);
        statistics.m[half] = new_m;
        const float subtracted = new_m == -INFINITY ? 0 : new_m; // a row that has seen no key
        const float rescale = exp2_approx(old_m - subtracted);
        float l = 0;
#pragma unroll
        for (int n = 0; n < kTiles * 2; ++n) {
            float &S = S_rmem[0][n / 2][half * 2 + n % 2];
            S = exp2_approx(fmaf(S, scale, -subtracted));
            l += S;
        }
        statistics.l[half] = statistics.l[half] * rescale + l;
#pragma unroll
        for (int n = 0; n < kOTiles; ++n) {
            O_rmem[0][n][half * 2] *= rescale;
            O_rmem[0][n][half * 2 + 1] *= rescale;
        }
    }
}

// Room of a thread block for m, l and O of each warp's rows, in floats.
template <typename Kernels>
struct Sums {
    static constexpr auto cfg = Kernels::value;
    float *smem; // (n_warps, 16, d_head) of O, then (n_warps, 16) of m, and the same of l

    __device__ __forceinline__ float *O(int warp, int row) const {
        return smem + (warp * kRows + row) * cfg.d_head;
    }
    __device__ __forceinline__ float &m(int warp, int row) const {
        return smem[cfg.n_warps * kRows * cfg.d_head + warp * kRows + row];
    }
    __device__ __forceinline__ float &l(int warp, int row) const {
        return smem[cfg.n_warps * kRows * (cfg.d_head + 1) + warp * kRows + row];
    }

    // m, l and O of this warp: registers → shared. kApart: of each 16 columns the even ones are in
    // one tile, and the odd ones in the next.
    template <bool kApart = false>
    __device__ __forceinline__ void store(const Statistics &statistics,
                                          const float (&O_rmem)[1][cfg.d_head / kMmaN][4]) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = half * 8 + lane / 4;
#pragma unroll
            for (int n = 0; n < cfg.d_head / kMmaN; ++n) {
                const int even = n / 2 * 2, own = half * 2 + n % 2;
                const int column =
                    kApart ? even * kMmaN + lane % 4 * 4 + n % 2 * 2 : n * kMmaN + lane % 4 * 2;
                asm volatile(
                    "st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem_address(O(warp, row) + column)),
                    "f"(kApart ? O_rmem[0][even][own] : O_rmem[0][n][half * 2]),
                    "f"(kApart ? O_rmem[0][even + 1][own] : O_rmem[0][n][half * 2 + 1])
                    : "memory");
            }
            const float l_all = quad_sum(statistics.l[half]);
            if (lane % 4 == 0) {
                m(warp, row) = statistics.m[half];
                l(warp, row) = l_all;
            }
        }
    }

    // The largest m of a row, and its l at that, over all warps.
    __device__ __forceinline__ float2 of_row(int row) const {
        float largest = -INFINITY, sum = 0;
#pragma unroll
        for (int warp = 0; warp < cfg.n_warps; ++warp) {
            largest = fmaxf(largest, m(warp, row));
        }
#pragma unroll
        for (int warp = 0; warp < cfg.n_warps; ++warp) {
            sum += l(warp, row) * weight(warp, row, largest);
        }
        return make_float2(largest, sum);
    }

    // The factor of a warp's sums; 0 where it has seen no key.
    __device__ __forceinline__ float weight(int warp, int row, float largest) const {
        return m(warp, row) == -INFINITY ? 0 : exp2_approx(m(warp, row) - largest);
    }

    // Eight elements of O of a row, not divided by l, over all warps.
    __device__ __forceinline__ void add_up(float (&O_rmem)[kChunk], int row, int column,
                                           float largest) const {
#pragma unroll
        for (int warp = 0; warp < cfg.n_warps; ++warp) {
            const float factor = weight(warp, row, largest);
            const float4 *own = reinterpret_cast<const float4 *>(O(warp, row) + column);
#pragma unroll
            for (int four = 0; four < kChunk / 4; ++four) {
                const float4 x = own[four];
                O_rmem[4 * four] = fmaf(x.x, factor, O_rmem[4 * four]);
                O_rmem[4 * four + 1] = fmaf(x.y, factor, O_rmem[4 * four + 1]);
                O_rmem[4 * four + 2] = fmaf(x.z, factor, O_rmem[4 * four + 2]);
                O_rmem[4 * four + 3] = fmaf(x.w, factor, O_rmem[4 * four + 3]);
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

// Eight elements of O, divided by l with the sink, and the LSE beside the first: registers →
// global. A row that has seen no key has an O of 0.
template <DType kDType>
__device__ __forceinline__ void store_output(float (&O_rmem)[kChunk], float2 m_and_l, int sequence,
                                             int query, int head, int column,
                                             const DecodeSyncKernelArgs &args) {
    const float2 all = with_sink<kDType>(m_and_l, args.sinks, head);
    // with a sink, O's own m may be below the new one
    const float factor =
        m_and_l.x == -INFINITY ? 0 : exp2_approx(m_and_l.x - all.x) * reciprocal_approx(all.y);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        O_rmem[i] *= factor;
    }
    Element *O_gmem = static_cast<Element *>(args.O) + sequence * args.O_strides.batch +
                      query * args.O_strides.row + head * args.O_strides.head + column;
    store_gmem_16(O_gmem, pack_chunk<kDType>(O_rmem));
    if (args.lse != nullptr && column == 0) {
        const int heads = args.kv_heads * args.heads_per_kv;
        args.lse[(int64_t(sequence) * heads + head) * args.len_q + query] =
            all.x == -INFINITY ? -INFINITY : (all.x + log2_approx(all.y)) * kLn2;
    }
}
