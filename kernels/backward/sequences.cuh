#pragma once
// Tiles of sequences of various lengths, which lie one after the other. Blocks of queries and tiles
// of keys end where their sequence does, so that a causal diagonal runs through corners. The tensor
// maps begin with the tensor and have a batch for each of its rows: in batch b row 0 is row b of
// the tensor. So of a sequence that begins there, rows before its first are zeros in every tile.

#include "kernels/backward/layout.cuh"
#include "kernels/backward/loading.cuh"
#include "kernels/backward/outputs.cuh"
#include "kernels/backward/places.cuh"
#include "kernels/backward/statistics.cuh"
#include "kernels/backward/sums.cuh"
#include "kernels/backward/turns.cuh"

// The queries or the keys of a sequence in whole blocks. Of 100 queries from row 30 of the tensor
// on, in blocks of 64, begin is 30, before 28 and all 128.
struct Rows {
    int begin, before, all;
    int first; // of these rows among those of all sequences
};

// Those of sequence n, in one block at least if kLeast is 1. Begins that are no rows of the tensor,
// or fall, give none outside.
template <int kRows, int kLeast>
__device__ __forceinline__ Rows rows_of(const int *begins, int n, int total) {
    const int begin = min(max(begins[n], 0), total), end = min(max(begins[n + 1], begin), total);
    const int all = (max(end - begin, kLeast) + kRows - 1) / kRows * kRows;
    return {begin, all - (end - begin), all, (begin / kRows + n) * kRows};
}

// The sequence of a row: sequence n has the blocks from begin / kRows + n on, as many as it needs,
// or one more. With blocks of 64 and begins 0, 100 and 400 these are blocks 0 and 1, and 2 to 6.
template <int kRows>
__device__ __forceinline__ int find_sequence(const int *begins, int n_sequences, int row) {
    int n = 0, end = n_sequences; // the last n whose blocks begin with the row's or before it
    while (end - n > 1) {
        const int middle = n + (end - n) / 2;
        (begins[middle] / kRows + middle <= row / kRows ? n : end) = middle;
    }
    return n;
}

// A tile of keys, and the blocks of queries of its sequence. `row` is one of those in whole tiles,
// whose row `before` is the first key. The batch is the row of the tensor where the keys begin.
struct SequencePlace : TilePlace {
    int before = 0;
    int q_rows = 0, q_before = 0, q_first = 0; // `all`, `before` and `first` of the queries
    int shift = 0; // from rows of queries to those of keys: the last ones meet
    int q_begin = 0;
};

// That of a tile by its number, in the order of place_of_keys. Where a sequence has no tile, and
// behind the last tile, its row is -1.
template <bool kCausal, bool kInTurn, int B_r, int B_c>
__device__ __forceinline__ SequencePlace place_in_sequence(const BackwardKernelArgs &args,
                                                           int tile) {
    const int rows = (args.len_k / B_c + args.n_sequences) * B_c;
    const TilePlace place = place_of_keys<B_c, kCausal, kInTurn>(args, tile, rows);
    const int n = find_sequence<B_c>(args.cu_seqlens_k, args.n_sequences, place.row);
    const Rows keys = rows_of<B_c, 0>(args.cu_seqlens_k, n, args.len_k);
    const Rows queries = rows_of<B_r, 1>(args.cu_seqlens_q, n, args.len_q);
    const int row = place.row - keys.first;
    const bool exists = place.row >= 0 && row >= 0 && row < keys.all;
    return {{exists ? row : -1, place.head, keys.begin},
            keys.before,
            queries.all,
            queries.before,
            queries.first,
            keys.all - queries.all,
            queries.begin};
}

// A place in shared memory, without the begin of the queries, which only the loading thread needs.
__device__ __forceinline__ void store_four(uint32_t dst_smem, int x, int y, int z, int w) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst_smem), "r"(x), "r"(y), "r"(z),
                 "r"(w)
                 : "memory");
}
__device__ __forceinline__ void store_place(uint32_t dst_smem, const SequencePlace &place) {
    store_four(dst_smem, place.row, place.head, place.batch, place.before);
    store_four(dst_smem + kPlaceBytes, place.q_rows, place.q_before, place.q_first, place.shift);
}
__device__ __forceinline__ SequencePlace load_sequence_place(uint32_t src_smem) {
    const uint4 keys = load_smem_16(src_smem), queries = load_smem_16(src_smem + kPlaceBytes);
    return {{int(keys.x), int(keys.y), int(keys.z)},
            int(keys.w),
            int(queries.x),
            int(queries.y),
            int(queries.z),
            int(queries.w)};
}

__device__ __forceinline__ int keys_before(uint32_t place_smem) {
    return load_smem_4(place_smem + 12);
}

// The blocks of a sequence's queries, whose first row is number `offset` of those of all sequences.
template <typename Config>
struct SequenceBlocks : Blocks<Config> {
    int offset = 0;

    __device__ __forceinline__ explicit SequenceBlocks(const BackwardKernelArgs &args)
        : Blocks<Config>(args) {}
    __device__ __forceinline__ SequenceBlocks(const BackwardKernelArgs &args,
                                              const SequencePlace &place)
        : Blocks<Config>(args) {
        this->rows = place.q_rows;
        this->before = place.q_before;
        this->shift = place.shift + (Config::value.window ? args.window_right : 0);
        offset = place.q_first;
    }
};

// Where all heads have the same lengths, and in a kernel for sequences: the blocks that meet a tile
// of keys, whose place is in shared memory; the rows of these keys in whole tiles; the index of a
// query in statistics and sums of dQ, where the heads of a sequence follow each other.
template <typename Config>
__device__ __forceinline__ Blocks<Config> at_place(const Blocks<Config> &of_head,
                                                   const BackwardKernelArgs &, uint32_t) {
    return of_head;
}
template <typename Config>
__device__ __forceinline__ SequenceBlocks<Config>
at_place(const SequenceBlocks<Config> &, const BackwardKernelArgs &args, uint32_t place_smem) {
    return SequenceBlocks<Config>(args, load_sequence_place(place_smem));
}
template <int B_c, typename Config>
__device__ __forceinline__ int key_rows(const BackwardKernelArgs &args, const Blocks<Config> &) {
    return padded_keys<B_c>(args.len_k);
}
template <int B_c, typename Config>
__device__ __forceinline__ int key_rows(const BackwardKernelArgs &args,
                                        const SequenceBlocks<Config> &blocks) {
    return blocks.rows + blocks.shift - (Config::value.window ? args.window_right : 0);
}
template <typename Config>
__device__ __forceinline__ int64_t row_index(const BackwardKernelArgs &args, TilePlace place,
                                             const Blocks<Config> &blocks) {
    return row_index(args, place, blocks.rows);
}
template <typename Config>
__device__ __forceinline__ int64_t row_index(const BackwardKernelArgs &args, TilePlace place,
                                             const SequenceBlocks<Config> &blocks) {
    return int64_t(blocks.offset) * args.heads + int64_t(place.head) * blocks.rows + place.row;
}

// Loads a tile of keys, as load_tile does.
template <uint32_t kBytes>
__device__ __forceinline__ void load_keys(uint32_t tile_smem, const CUtensorMap &tensor,
                                          uint32_t barrier, const SequencePlace &place) {
    barrier_expect(barrier, place.row < 0 ? 0 : kBytes);
    if (place.row >= 0) {
        tma_load_tile(tile_smem, tensor, barrier,
                      {place.row - place.before, place.head, place.batch});
    }
}

// As Loader, for tiles of sequences. Registers are scarce: places are read again from shared
// memory.
template <typename Config>
struct SequenceLoader {
    using Blocks = SequenceBlocks<Config>;
    static constexpr BackwardKernelConfig cfg = Config::value;
    static constexpr int B_r = cfg.B_r, B_c = cfg.B_c;
    const BackwardKernelArgs &args;
    const Layout<Config> &smem;
    const Blocks &of_head; // as Loader has: a tile's own are in its place
    Ring<cfg.slots> ring; // of blocks
    Ring<kTileSlots> next_tile;
    // With turns, none is left where begins fall: see set_counter.
    int taken = cfg.in_turn && load_acquire(args.next_tile) >= args.tiles ? args.tiles : blockIdx.x;
    int left = 0;
    TilePlace queries;

    __device__ __forceinline__ uint32_t
    loaded() const { // the place of the tile, in the slot before
        static_assert(kTileSlots == 2);
        return smem.places_smem + (next_tile.slot ^ 1) * smem.kTilePlace;
    }
    __device__ __forceinline__ void take_tile() {
        taken = atomicAdd(args.next_tile, 1) + gridDim.x;
    }
    __device__ __forceinline__ void load_next(const Ring<kTileSlots> &tile, bool V_is_free) {
        // K of the tile behind the present one has a slot, but not that of a third.
        if (left == 0 && (next_tile.slot != tile.slot || next_tile.lap == tile.lap)) {
            barrier_wait(next_tile.barrier(smem.K_empty), next_tile.lap ^ 1);
            auto find = [&] {
                return place_in_sequence<cfg.causal, cfg.in_turn, B_r, B_c>(args, taken);
            };
            SequencePlace place = find();
            while (place.row < 0 && taken < args.tiles) {
                take_tile();
                place = find();
            }
            store_place(smem.places_smem + next_tile.slot * smem.kTilePlace, place);
            load_keys<Layout<Config>::kKeyBytes>(smem.K_smem + next_tile.slot * smem.kKeyBytes,
                                                 args.K, next_tile.barrier(smem.K_full), place);
            next_tile.advance();
            const Blocks blocks(args, place);
            queries = {blocks.first(place.row) * B_r, place.head * args.heads_per_kv,
                       place.q_begin};
            left = place.row < 0 ? 0
                                 : (blocks.end(place.row + B_c - kWgmmaM) * B_r - queries.row) /
                                       B_r * args.heads_per_kv;
        }
        if (left > 0) {
            const SequencePlace place = load_sequence_place(loaded());
            const Blocks blocks(args, place);
            const int64_t row = row_index(args, queries, blocks);
            const TilePlace Q_place = {queries.row - blocks.before, queries.head, queries.batch};
            load_pair<Layout<Config>::kQueryBytes>(ring, smem.full, smem.empty, smem.QdO_smem,
                                                   args.Q, args.dO, Q_place, smem.statistics_smem,
                                                   args.statistics + 2 * row);
            if ((queries.row += B_r) == blocks.end(place.row + B_c - kWgmmaM) * B_r) {
                queries = {blocks.first(place.row) * B_r, queries.head + 1, queries.batch};
            }
            if (--left == 0) { // the answer comes while a block is computed
                take_tile();
            }
        }
        if (V_is_free) {
            load_keys<Layout<Config>::kKeyBytes>(smem.V_smem, args.V, smem.V_full,
                                                 load_sequence_place(loaded()));
        }
    }
};

// The types of a kernel for heads of the same lengths, or for sequences.
template <typename Config, bool kVarlen = Config::value.varlen>
struct Lengths {
    using Blocks = ::Blocks<Config>;
    using Loader = ::Loader<Config, Blocks>;
};
template <typename Config>
struct Lengths<Config, true> {
    using Blocks = SequenceBlocks<Config>;
    using Loader = SequenceLoader<Config>;
};

// The query of a row of a block of statistics and sums of dQ: its number in its sequence, and the
// length of that. Where a sequence has a block more than its heads need, the length is 0.
struct QueryPlace : TilePlace {
    int length;
};
__device__ __forceinline__ QueryPlace query_place(const BackwardKernelArgs &args, int block,
                                                  int row) {
    const int first = block / args.heads * kWgmmaM;
    const int n = find_sequence<kWgmmaM>(args.cu_seqlens_q, args.n_sequences, first);
    const Rows own = rows_of<kWgmmaM, 1>(args.cu_seqlens_q, n, args.len_q);
    const int own_blocks = own.all / kWgmmaM;
    block -= own.first / kWgmmaM * args.heads; // of the sequence's, of which each head has some
    const int head = block / own_blocks;
    return {{block % own_blocks * kWgmmaM + row - own.before, head, own.begin},
            block >= 0 && head < args.heads ? own.all - own.before : 0};
}

// Sets the counter of tiles, by one thread block. Where begins fall, tiles may be missing for whose
// turn others would wait: then none is left from the first on, as otherwise only at the end.
template <typename Config>
__device__ __forceinline__ void set_counter(const BackwardKernelArgs &args) {
    constexpr bool kAsks = Config::value.varlen && Config::value.in_turn;
    bool falls = false;
    for (int n = threadIdx.x; kAsks && n < args.n_sequences; n += kDeltaThreads) {
        falls |= args.cu_seqlens_q[n] > args.cu_seqlens_q[n + 1];
        falls |= args.cu_seqlens_k[n] > args.cu_seqlens_k[n + 1];
    }
    falls = kAsks && __syncthreads_or(falls);
    if (threadIdx.x == 0) {
        *args.next_tile = falls ? args.tiles : 0;
    }
}

// As store_statistics.
template <DType kDType, bool kSoftcap, int d_head = kDHead>
__device__ __forceinline__ void store_statistics_of_sequences(const BackwardKernelArgs &args) {
    constexpr int kLanes = d_head / 8;
    const int64_t row = int64_t(blockIdx.x) * kDeltaRowsOf<d_head> + threadIdx.x / kLanes;
    const QueryPlace query = query_place(args, row / kWgmmaM, row % kWgmmaM);
    const bool exists = query.row >= 0 && query.row < query.length; // if not, as Q and dO 0
    const TilePlace place = exists ? TilePlace(query) : TilePlace{0};
    const float delta = row_delta<kDType, d_head>(args, place);
    if (threadIdx.x % kLanes == 0) {
        const int64_t lse = int64_t(place.head) * args.len_q + place.batch + place.row;
        float *statistics = args.statistics + row / kWgmmaM * 2 * kWgmmaM + row % kWgmmaM;
        statistics[0] = exists ? -load_lse(args, lse) / (kSoftcap ? 1 : args.scale) : 0;
        statistics[kWgmmaM] = exists ? -delta : 0;
    }
}

// As round_sums.
template <DType kDType, int d_head = kDHead>
__device__ __forceinline__ void round_sums_of_sequences(const BackwardKernelArgs &args) {
    float dQ_rmem[d_head / 2];
    load_sums(dQ_rmem, sums_of<d_head>(args, int64_t(blockIdx.x) * kWgmmaM));
    const QueryPlace query = query_place(args, blockIdx.x, 0);
    store_sums<kDType, true>(args.dQ_gmem, args.dQ_strides, query, threadIdx.x / 32 * kWarpRows,
                             dQ_rmem, args.softmax_scale, query.length);
}
