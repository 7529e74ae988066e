#pragma once
// Step 6 of the decode_sync family: a cache in fp8. Parent: c4.
//
// What changed
//   1. K and V are e4m3, a byte per element, in memory and in shared memory, and become fp16 in
//      registers (fp8.cuh). Blocks have 32 keys, and so the bytes of 16 of c4's.
//   2. A register of ldmatrix has 4 bytes instead of two elements. Of K they are columns 4t to
//      4t + 3, two registers of mma's B. Q's columns get the order that Q @ K^T then adds in, once.
//      With Q in bf16 the fragments of K become bf16.
//   3. Of V, transposed, they are two columns of two keys. P @ V is in fp16 for both dtypes of Q;
//      even columns are one tile of O, and odd ones the next. The store puts them side by side.
//   4. S is multiplied by k_scale, and O by v_scale, of the sequence and the head, where they are
//      given.
//
// Why: decode is bound by the bytes of its cache, and a key takes 256 of them instead of 512. The
// price is instructions: a warp's 32 keys are 256 elements per lane. sm_89 and later convert two by
// one `cvt`: with shifts and PRMTs 224 instructions beside about 1,050 others, and 192 more for K
// if Q is in bf16. An SM of an H200 gets the 8 KB of these keys in about 400 cycles, in which its
// four schedulers issue 1,600. On sm_80 integers convert, by 7 instructions for two elements.
// Expected: 16 x 8192 keys on an H200 in 0.65 of c4's time with Q in fp16, and 0.75 with bf16; on
// an A100 in 0.8.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 81.8 us at 16 sequences of 8192 keys, where c4 takes 127 in bf16. Calls
// take it where the cache is in fp8, and only there.
//
// Phases: as c4.

#include "cp_async.cuh"
#include "fp8.cuh"
#include "kernels/decode_sync/arguments.cuh"
#include "kernels/decode_sync/parts.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

namespace c6 {

// Of a key: its page, or its sequence's row of the cache; and its number there. The page is -1
// where the sequence has no such key, or a window hides it from all of the tile: its page may be
// none.
struct Place {
    int page, slot;
};

// The place of the key that this lane looks up, in the block at `key`.
template <typename Kernels>
__device__ __forceinline__ Place find_place(const DecodeSyncKernelArgs &args,
                                            const Queries &queries, int key) {
    key += threadIdx.x % 32 % Kernels::value.B_c;
    if (key < queries.begin_of(0, args) || key >= queries.len_k) {
        return {-1, 0};
    }
    if (args.block_table == nullptr) {
        return {row_of_cache(args.cache_batch_idx, queries), key};
    }
    const int block = key / args.page_size;
    return {args.block_table[int64_t(queries.sequence) * args.table_blocks + block],
            key - block * args.page_size};
}

// Starts a warp's copy of a block of keys; X_gmem points to the head's first row. Rows without a
// page become zeros.
template <typename Kernels>
__device__ __forceinline__ void copy_block(uint32_t X_smem, const uint8_t *X_gmem,
                                           const TensorStrides &strides, Place place) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.d_head / 2), kLanesPerRow = kColumns / kChunk;
    const int lane = threadIdx.x % 32, column = lane % kLanesPerRow * kChunk;
#pragma unroll
    for (int i = 0; i < cfg.B_c; i += 32 / kLanesPerRow) {
        const int row = i + lane / kLanesPerRow;
        const int page = __shfl_sync(0xffffffff, place.page, row);
        const int slot = __shfl_sync(0xffffffff, place.slot, row);
        const bool exists = page >= 0;
        const uint8_t *row_gmem =
            X_gmem + (exists ? page * strides.batch + slot * strides.row + 2 * column : 0);
#pragma unroll
        for (int piece = 0; piece < cfg.d_head / 2 / kColumns; ++piece) {
            cp_async_16_L2_128B(X_smem + piece_offset<cfg.B_c, kColumns>(piece) +
                                    smem_offset<kColumns>(row, column),
                                row_gmem + piece * 2 * kColumns, exists ? 16 : 0);
        }
    }
}

constexpr DType kHalf = DType::FP16; // of P and V

// Columns of a piece of K or V in shared memory, counted in 16 bits, which hold two elements.
template <typename Kernels>
constexpr int kPairColumns = piece_columns(Kernels::value.d_head / 2);

// Of every 16 columns of Q the pairs 0, 2, 4 and 6 first: 0, 1, 4, 5 … 13, 2, 3, 6, 7 … 15.
template <typename Kernels>
__device__ __forceinline__ void order_pairs(uint32_t Q_smem) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.d_head);
    for (int i = threadIdx.x; i < kRows * cfg.d_head / kMmaK; i += cfg.n_threads()) {
        const int row = i % kRows, column = i / kRows * kMmaK;
        const uint32_t chunk_smem = Q_smem + piece_offset<kRows, kColumns>(column / kColumns) +
                                    smem_offset<kColumns>(row, column % kColumns);
        const uint32_t next_smem = chunk_smem ^ kChunkBytes;
        const uint4 a = load_smem_16(chunk_smem), b = load_smem_16(next_smem);
        const uint32_t pairs[8] = {a.x, a.z, b.x, b.z, a.y, a.w, b.y, b.w};
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            store_smem_4((n < 4 ? chunk_smem : next_smem) + n % 4 * 4, pairs[n]);
        }
    }
}

// S (16, B_c) = Q @ K^T for a warp's own block of K, 32 columns at a time.
template <typename Kernels>
__device__ __forceinline__ void
multiply_QK(float (&S_rmem)[1][Kernels::value.B_c / kMmaN][4], uint32_t Q_smem, uint32_t K_smem,
            const uint32_t (&Q_lane_offset)[4], const uint32_t (&K_lane_offset)[4]) {
    constexpr auto cfg = Kernels::value;
#pragma unroll
    for (int i = 0; i < cfg.B_c / kMmaK * (cfg.d_head / 32); ++i) {
        const int n = i % (cfg.B_c / kMmaK), k = i / (cfg.B_c / kMmaK);
        uint32_t K_rmem[4]; // 16 columns of eight keys and 16 more, then those of eight more keys
        ldmatrix_x4(K_rmem, fragment_address<cfg.B_c, kPairColumns<Kernels>>(K_smem, K_lane_offset,
                                                                             n * kMmaK, k));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t Q_rmem[1][4];
            ldmatrix_x4(Q_rmem[0], fragment_address<kRows, piece_columns(cfg.d_head)>(
                                       Q_smem, Q_lane_offset, 0, 2 * k + half));
            const uint32_t a = K_rmem[half], b = K_rmem[half + 2];
            add_product<cfg.dtype>(S_rmem, Q_rmem,
                                   {widen<cfg.dtype>(a), widen<cfg.dtype>(a >> 16),
                                    widen<cfg.dtype>(b), widen<cfg.dtype>(b >> 16)},
                                   n);
        }
    }
}

// O (16, d_head) += P @ V for a warp's own block of V, 32 columns at a time.
template <typename Kernels>
__device__ __forceinline__ void
multiply_PV(float (&O_rmem)[1][Kernels::value.d_head / kMmaN][4],
            const uint32_t (&P_rmem)[Kernels::value.B_c / kMmaK][1][4], uint32_t V_smem,
            const uint32_t (&lane_offset)[4]) {
    constexpr auto cfg = Kernels::value;
#pragma unroll
    for (int i = 0; i < cfg.B_c / kMmaK * (cfg.d_head / 32); ++i) {
        const int k = i / (cfg.d_head / 32), n = i % (cfg.d_head / 32);
        uint32_t V_rmem[4]; // eight keys and eight more of 16 columns, then of 16 more
        ldmatrix_x4_trans(V_rmem, fragment_address<cfg.B_c, kPairColumns<Kernels>>(
                                      V_smem, lane_offset, k * kMmaK, n));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // two keys of an even column, then of the odd one beside it
            const uint32_t a = __byte_perm(V_rmem[2 * half], 0, 0x3120);
            const uint32_t b = __byte_perm(V_rmem[2 * half + 1], 0, 0x3120);
            add_product<kHalf>(
                O_rmem, P_rmem[k],
                {widen<kHalf>(a), widen<kHalf>(b), widen<kHalf>(a >> 16), widen<kHalf>(b >> 16)},
                2 * n + half);
        }
    }
}

// The keys from `first` to `end` of a thread block: of all keys that its tile sees, one piece.
// Blocks of all warps are not cut.
struct Piece {
    int first, end;
};

template <typename Kernels>
__device__ __forceinline__ Piece own_piece(const Queries &queries,
                                           const DecodeSyncKernelArgs &args) {
    constexpr int kStep = Kernels::value.n_warps * Kernels::value.B_c;
    const int end = queries.end_of(queries.last_row(), args);
    const int first = queries.begin_of(0, args) / Kernels::value.B_c * Kernels::value.B_c;
    const int steps = (max(end - first, 0) + kStep - 1) / kStep; // a tile may see no key
    const int size = (steps + args.pieces - 1) / args.pieces * kStep;
    return {first + int(blockIdx.z) * size, min(first + (int(blockIdx.z) + 1) * size, end)};
}

// The part of a piece: m and l, and O in fp32, not divided by l, of the 16 rows of a tile.
template <typename Kernels>
struct Part {
    static constexpr int kDHead = Kernels::value.d_head;
    float2 *statistics_gmem; // (16)
    float *O_gmem; // (16, d_head)

    __device__ __forceinline__ Part(const DecodeSyncKernelArgs &args, int piece) {
        const int64_t tile = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
        const int64_t number = int64_t(piece) * gridDim.y * gridDim.x + tile;
        statistics_gmem = args.statistics + number * kRows;
        O_gmem = args.O_parts + number * kRows * kDHead;
    }
    __device__ __forceinline__ float2 m_and_l(int row) const { return statistics_gmem[row]; }

    __device__ __forceinline__ void store(const float (&O_rmem)[kChunk], float2 m_and_l, int row,
                                          int column) const {
        if (column == 0) {
            statistics_gmem[row] = m_and_l;
        }
        float4 *O = reinterpret_cast<float4 *>(O_gmem + row * kDHead + column);
        O[0] = make_float4(O_rmem[0], O_rmem[1], O_rmem[2], O_rmem[3]);
        O[1] = make_float4(O_rmem[4], O_rmem[5], O_rmem[6], O_rmem[7]);
    }

    __device__ __forceinline__ void add_to(float (&O_rmem)[kChunk], int row, int column,
                                           float factor) const {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            O_rmem[i] = fmaf(O_gmem[row * kDHead + column + i], factor, O_rmem[i]);
        }
    }
};

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    decode_kernel(const __grid_constant__ DecodeSyncKernelArgs args) {
    constexpr DecodeSyncKernelConfig cfg = Kernels::value;
    constexpr int B_c = cfg.B_c, kDHead = cfg.d_head, kColumns = piece_columns(kDHead);
    constexpr int kBlockBytes = B_c * kDHead, kStages = cfg.stages;

    extern __shared__ __align__(128) Element smem[];
    const int warp = threadIdx.x / 32;
    const uint32_t Q_smem = smem_address(smem); // (16, d_head)
    const uint32_t K_smem = Q_smem + kRows * kDHead * int(sizeof(Element)) +
                            warp * kStages * 2 * kBlockBytes; // K_0, V_0, K_1, V_1, of this warp

    const Queries queries(args);
    uint32_t Q_lane_offset[4], lane_offset[4], K_lane_offset[4];
    set_lane_offsets<kColumns>(Q_lane_offset, K_lane_offset);
    set_lane_offsets<kPairColumns<Kernels>>(lane_offset, K_lane_offset);

    // 1. Q: global → shared
    copy_queries<Kernels>(Q_smem, queries, args);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads(); // a warp reads rows that other warps have copied
    order_pairs<Kernels>(Q_smem);
    __syncthreads(); // and that other warps have put in order

    const uint8_t *K_gmem =
        static_cast<const uint8_t *>(args.K) + queries.kv_head * args.K_strides.head;
    const uint8_t *V_gmem =
        static_cast<const uint8_t *>(args.V) + queries.kv_head * args.V_strides.head;
    const int scale = queries.sequence * args.kv_heads + queries.kv_head;
    const float k_scale = args.k_scale ? args.k_scale[scale] : 1;
    const float v_scale = args.v_scale ? args.v_scale[scale] : 1;
    float O_rmem[1][kDHead / kMmaN][4] = {};
    Statistics statistics;
    const auto [first, end] = own_piece<Kernels>(queries, args);
    // 2. The first K and V: global → shared
    auto copy = [&](int stage, int key, Place place) {
        if (key < end) {
            const uint32_t stage_smem = K_smem + stage * 2 * kBlockBytes;
            copy_block<Kernels>(stage_smem, K_gmem, args.K_strides, place);
            copy_block<Kernels>(stage_smem + kBlockBytes, V_gmem, args.V_strides, place);
        }
        cp_async_commit(); // of no copies, too: groups are counted
    };
    constexpr int kStep = cfg.n_warps * B_c;
    int key = first + warp * B_c, stage = 0;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        copy(i, key + i * kStep, find_place<Kernels>(args, queries, key + i * kStep));
    }
    Place next_place = find_place<Kernels>(args, queries, key + (kStages - 1) * kStep);
    for (; key < end; key += kStep) {
        cp_async_wait<kStages - 2>();
        __syncwarp(); // a lane reads rows that other lanes have copied, and none the last block
        copy(stage == 0 ? kStages - 1 : stage - 1, key + (kStages - 1) * kStep, next_place);
        next_place = find_place<Kernels>(args, queries, key + kStages * kStep);
        const uint32_t stage_smem = K_smem + stage * 2 * kBlockBytes;

        // 3. S = Q @ K^T · k_scale
        float S_rmem[1][B_c / kMmaN][4] = {};
        multiply_QK<Kernels>(S_rmem, Q_smem, stage_smem, Q_lane_offset, K_lane_offset);
#pragma unroll
        for (int i = 0; i < B_c / 2; ++i) {
            S_rmem[0][i / 4][i % 4] *= k_scale;
        }
        limit_and_hide(S_rmem, queries, args, key);

        // 4. P = 2^(S - m)
        update(statistics, S_rmem, O_rmem, args.scale);
        uint32_t P_rmem[B_c / kMmaK][1][4];
        round_P<kHalf>(P_rmem, S_rmem);

        // 5. O += P @ V
        multiply_PV<Kernels>(O_rmem, P_rmem, stage_smem + kBlockBytes, lane_offset);
        stage = stage == kStages - 1 ? 0 : stage + 1;
    }

    // 6. m, l, O of the warps: registers → shared
    const Sums<Kernels> sums = {reinterpret_cast<float *>(smem)};
    __syncthreads(); // no warp reads Q or its block any more
    sums.template store<true>(statistics, O_rmem);
    __syncthreads(); // a thread reads what all warps have stored

    // 7. O, LSE, or this piece's part of them: shared → global
    constexpr int kChunks = kDHead / kChunk;
    for (int i = threadIdx.x; i < kRows * kChunks; i += cfg.n_threads()) {
        const int row = i / kChunks, column = i % kChunks * kChunk;
        if (queries.has(row)) {
            const float2 m_and_l = sums.of_row(row);
            float own_rmem[kChunk] = {};
            sums.add_up(own_rmem, row, column, m_and_l.x);
#pragma unroll
            for (int n = 0; n < kChunk; ++n) {
                own_rmem[n] *= v_scale;
            }
            if (args.pieces > 1) {
                Part<Kernels>(args, blockIdx.z).store(own_rmem, m_and_l, row, column);
            } else {
                store_output<cfg.dtype>(own_rmem, m_and_l, queries.sequence, queries.query(row),
                                        queries.head(row), column, args);
            }
        }
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    combine_kernel(const __grid_constant__ DecodeSyncKernelArgs args) {
    constexpr DecodeSyncKernelConfig cfg = Kernels::value;
    constexpr int kChunks = cfg.d_head / kChunk;
    const Queries queries(args);
    for (int i = threadIdx.x; i < kRows * kChunks; i += cfg.n_threads()) {
        const int row = i / kChunks, column = i % kChunks * kChunk;
        if (!queries.has(row)) {
            continue;
        }
        // 1. m, l, O of all pieces
        float m = -INFINITY, l = 0, O_rmem[kChunk] = {};
        for (int piece = 0; piece < args.pieces; ++piece) {
            m = fmaxf(m, Part<Kernels>(args, piece).m_and_l(row).x);
        }
        for (int piece = 0; piece < args.pieces; ++piece) {
            const Part<Kernels> part(args, piece);
            const float2 own = part.m_and_l(row);
            if (own.x != -INFINITY) { // otherwise its O is not a number of this row
                const float factor = exp2_approx(own.x - m);
                l = fmaf(own.y, factor, l);
                part.add_to(O_rmem, row, column, factor);
            }
        }

        // 2. O, LSE: registers → global
        store_output<cfg.dtype>(O_rmem, make_float2(m, l), queries.sequence, queries.query(row),
                                queries.head(row), column, args);
    }
}

} // namespace c6
