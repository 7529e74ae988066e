#pragma once
// Step 5 of the decode_sync family: pieces of a fixed size. Parent: c4.
//
// What changed
//   1. A piece has keys_per_piece keys, the same number in every sequence, and pieces begin at
//      multiples of it from key 0 on. Thread block z of a tile has the z-th piece of which the
//      tile sees a key.
//   2. A thread block without a piece ends at once, and combine_kernel adds up as many parts as the
//      tile has pieces, in their order.
//   3. The host passes the size: the call's own, or 1024 keys.
//
// Why: c4 cuts a sequence into as many pieces as the SMs have room for, which depends on the batch.
// Sums in fp32 depend on the cuts, so the last bits of a result depend on the other sequences. With
// cuts at fixed keys they do not. A part is 8 KB, written and read again, 16 KB beside the 128 KB
// of 256 keys: 13% more bytes, 3% at 1024 keys.
// Expected: 16 x 8192 keys on an H100 at 1024 keys per piece within 5% of c4.
//
// benchmark:begin
// benchmark:end
// Verdict: not measured yet. Calls take it where they ask for keys_per_piece.
//
// Phases: as c4.

#include "cp_async.cuh"
#include "kernels/decode_sync/arguments.cuh"
#include "kernels/decode_sync/parts.cuh"
#include "memory.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

namespace c5 {

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
__device__ __forceinline__ void copy_block(uint32_t X_smem, const Element *X_gmem,
                                           const TensorStrides &strides, Place place) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.d_head), kLanesPerRow = kColumns / kChunk;
    const int lane = threadIdx.x % 32, column = lane % kLanesPerRow * kChunk;
#pragma unroll
    for (int i = 0; i < cfg.B_c; i += 32 / kLanesPerRow) {
        const int row = i + lane / kLanesPerRow;
        const int page = __shfl_sync(0xffffffff, place.page, row);
        const int slot = __shfl_sync(0xffffffff, place.slot, row);
        const bool exists = page >= 0;
        const Element *row_gmem =
            X_gmem + (exists ? page * strides.batch + slot * strides.row + column : 0);
#pragma unroll
        for (int piece = 0; piece < cfg.d_head / kColumns; ++piece) {
            cp_async_16_L2_128B(X_smem + piece_offset<cfg.B_c, kColumns>(piece) +
                                    smem_offset<kColumns>(row, column),
                                row_gmem + piece * kColumns, exists ? 16 : 0);
        }
    }
}

// The pieces of which a tile sees a key: `count` of them, from number `first` on. Keys 100 to 299
// in pieces of 128 are in three, 0 to 2.
struct Pieces {
    int first, count;

    __device__ __forceinline__ Pieces(const Queries &queries, const DecodeSyncKernelArgs &args) {
        const int begin = queries.begin_of(0, args);
        const int end = queries.end_of(queries.last_row(), args);
        first = begin / args.keys_per_piece;
        count = begin < end ? (end - 1) / args.keys_per_piece - first + 1 : 0;
    }
};

// The keys from `first` to `end` of a thread block: of all keys that its tile sees, one piece.
// Blocks of all warps are not cut.
struct Piece {
    int first, end;
};

template <typename Kernels>
__device__ __forceinline__ Piece own_piece(const Pieces &pieces, const Queries &queries,
                                           const DecodeSyncKernelArgs &args) {
    const int own = (pieces.first + int(blockIdx.z)) * args.keys_per_piece;
    const int seen = queries.begin_of(0, args) / Kernels::value.B_c * Kernels::value.B_c;
    const int end = queries.end_of(queries.last_row(), args);
    return {max(own, seen), min(own + args.keys_per_piece, end)};
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
    constexpr int kBlockBytes = B_c * kDHead * int(sizeof(Element)), kStages = cfg.stages;

    extern __shared__ __align__(128) Element smem[];
    const int warp = threadIdx.x / 32;
    const uint32_t Q_smem = smem_address(smem); // (16, d_head)
    const uint32_t K_smem = Q_smem + kRows * kDHead * int(sizeof(Element)) +
                            warp * kStages * 2 * kBlockBytes; // K_0, V_0, K_1, V_1, of this warp

    const Queries queries(args);
    const Pieces pieces(queries, args);
    if (args.pieces > 1 && int(blockIdx.z) >= pieces.count) {
        return; // combine_kernel reads no part of it
    }
    uint32_t lane_offset[4], K_lane_offset[4];
    set_lane_offsets<kColumns>(lane_offset, K_lane_offset);

    // 1. Q: global → shared
    copy_queries<Kernels>(Q_smem, queries, args);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads(); // a warp reads rows that other warps have copied

    const Element *K_gmem =
        static_cast<const Element *>(args.K) + queries.kv_head * args.K_strides.head;
    const Element *V_gmem =
        static_cast<const Element *>(args.V) + queries.kv_head * args.V_strides.head;
    float O_rmem[1][kDHead / kMmaN][4] = {};
    Statistics statistics;
    const auto [first, end] = own_piece<Kernels>(pieces, queries, args);
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

        // 3. S = Q @ K^T
        float S_rmem[1][B_c / kMmaN][4] = {};
        multiply_QK<Kernels>(S_rmem, Q_smem, stage_smem, lane_offset, K_lane_offset);
        limit_and_hide(S_rmem, queries, args, key);

        // 4. P = 2^(S - m)
        update(statistics, S_rmem, O_rmem, args.scale);
        uint32_t P_rmem[B_c / kMmaK][1][4];
        round_P<cfg.dtype>(P_rmem, S_rmem);

        // 5. O += P @ V
        multiply_PV<Kernels>(O_rmem, P_rmem, stage_smem + kBlockBytes, lane_offset);
        stage = stage == kStages - 1 ? 0 : stage + 1;
    }

    // 6. m, l, O of the warps: registers → shared
    const Sums<Kernels> sums = {reinterpret_cast<float *>(smem)};
    __syncthreads(); // no warp reads Q or its block any more
    sums.store(statistics, O_rmem);
    __syncthreads(); // a thread reads what all warps have stored

    // 7. O, LSE, or this piece's part of them: shared → global
    constexpr int kChunks = kDHead / kChunk;
    for (int i = threadIdx.x; i < kRows * kChunks; i += cfg.n_threads()) {
        const int row = i / kChunks, column = i % kChunks * kChunk;
        if (queries.has(row)) {
            const float2 m_and_l = sums.of_row(row);
            float own_rmem[kChunk] = {};
            sums.add_up(own_rmem, row, column, m_and_l.x);
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
    const Pieces pieces(queries, args);
    for (int i = threadIdx.x; i < kRows * kChunks; i += cfg.n_threads()) {
        const int row = i / kChunks, column = i % kChunks * kChunk;
        if (!queries.has(row)) {
            continue;
        }
        // 1. m, l, O of all pieces
        float m = -INFINITY, l = 0, O_rmem[kChunk] = {};
        for (int piece = 0; piece < pieces.count; ++piece) {
            m = fmaxf(m, Part<Kernels>(args, piece).m_and_l(row).x);
        }
        for (int piece = 0; piece < pieces.count; ++piece) {
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

} // namespace c5
