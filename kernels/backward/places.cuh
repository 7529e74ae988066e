#pragma once
// The tile sizes of the backward family, and the places of blocks: which rows of which head.

#include "kernels/backward/arguments.cuh"
#include "memory.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"

constexpr int kDHead = 128; // of the steps that have one head size
constexpr int kDPieces = kDHead / kPiece;
constexpr int kDSteps = kDHead / kWgmmaK;
constexpr int kWarpRows = kWgmmaM / 4;
template <int kRows, int d_head = kDHead>
constexpr uint32_t kTileBytes = d_head / kPiece * piece_bytes(kRows); // a tile (kRows, d_head)

// The place of kRows of a head's rows, by default of those of the thread block. Blocks of one head
// are neighbours, so they find the head's other tensors in the L2 cache.
template <int kRows>
__device__ __forceinline__ TilePlace own_place(int length, int heads, uint32_t tile = blockIdx.x) {
    const int blocks = length / kRows, head = tile / blocks;
    return {int(tile % blocks) * kRows, head % heads, head / heads};
}

// The place of a tile of keys by its number. Behind the last tile the row is -1.
template <int kRows>
__device__ __forceinline__ TilePlace tile_place(const BackwardKernelArgs &args, int tile) {
    return tile < args.tiles ? own_place<kRows>(args.len_k, args.heads / args.heads_per_kv, tile)
                             : TilePlace{-1};
}

// The same of a causal tile, of `length` keys in tiles of kRows, in the order of step b10.
template <int kRows>
__device__ __forceinline__ TilePlace causal_place(const BackwardKernelArgs &args, int length,
                                                  int tile) {
    const int kv_heads = args.heads / args.heads_per_kv, head_tiles = length / kRows;
    const int before = args.tiles / head_tiles - args.last_heads; // heads of the other groups
    const int group = tile / (args.head_group * head_tiles) * args.head_group;
    const int first = tile < before * head_tiles ? group : before;
    const int heads = first < before ? min(args.head_group, before - first) : args.last_heads;
    tile -= first * head_tiles;
    const int head = first + tile % heads;
    return {tile / heads * kRows, head % kv_heads, head / kv_heads};
}

// The index of a query in LSE and delta, and where a head has another number of rows.
__device__ __forceinline__ int64_t row_index(const BackwardKernelArgs &args, TilePlace place) {
    return (int64_t(place.batch) * args.heads + place.head) * args.len_q + place.row;
}
__device__ __forceinline__ int64_t row_index(const BackwardKernelArgs &args, TilePlace place,
                                             int rows) {
    return (int64_t(place.batch) * args.heads + place.head) * rows + place.row;
}

// Rows before the first query of a head, so that the diagonal runs through corners of blocks: 30 if
// len_q is 100 and len_k 130. Query 0 sees keys 0 … 30, and the first block has queries -30 … 33.
template <bool kCausal>
__device__ __forceinline__ int rows_before(const BackwardKernelArgs &args) {
    return kCausal ? uint32_t(args.len_k - args.len_q) % kWgmmaM : 0;
}

// Rows of a head in statistics and sums of dQ, in whole blocks.
template <bool kCausal>
__device__ __forceinline__ int padded_rows(const BackwardKernelArgs &args) {
    const int rows = rows_before<kCausal>(args) + args.len_q;
    return (rows + kWgmmaM - 1) / kWgmmaM * kWgmmaM;
}

// Rows of a head's keys, in whole tiles.
template <int B_c>
__device__ __forceinline__ int padded_keys(int keys) {
    return (keys + B_c - 1) / B_c * B_c;
}

// The blocks of a head's queries, in `rows` rows, and those that see 64 keys. Row i sees the keys
// from i + shift - width + 1 to i + shift.
template <typename Config>
struct Blocks {
    static constexpr BackwardKernelConfig cfg = Config::value;
    static constexpr bool kMoves = cfg.causal || cfg.window; // each row's last key is another one
    int rows, before, shift, width;

    __device__ __forceinline__ explicit Blocks(const BackwardKernelArgs &args)
        : rows(padded_rows<cfg.causal>(args)), before(rows_before<cfg.causal>(args)),
          shift(args.len_k - args.len_q - before + (cfg.window ? args.window_right : 0)),
          width(args.window_left + args.window_right + 1) {}

    // The first of those that see keys from `key` on, and their end. Where no row sees one, a block
    // stands for them that sees none.
    __device__ __forceinline__ int first(int key) const {
        return kMoves ? min(max(key - shift, 0), rows - 1) / kWgmmaM : 0;
    }
    __device__ __forceinline__ int end(int key) const {
        const int last = cfg.window ? key + kWgmmaM - 1 - shift + width - 1 : rows;
        return min(max(last / kWgmmaM, first(key)) + 1, rows / kWgmmaM);
    }
};

// The place of a tile of keys by its number, of any lengths. Behind the last tile the row is -1. In
// turn, the last keys of a group of heads come first.
template <int B_c, bool kCausal, bool kInTurn>
__device__ __forceinline__ TilePlace place_of_keys(const BackwardKernelArgs &args, int tile,
                                                   int rows) {
    if (tile >= args.tiles || !(kCausal || kInTurn)) {
        return tile < args.tiles ? own_place<B_c>(rows, args.heads / args.heads_per_kv, tile)
                                 : TilePlace{-1};
    }
    TilePlace place = causal_place<B_c>(args, rows, tile);
    place.row = kInTurn ? rows - B_c - place.row : place.row;
    return place;
}
template <int B_c, bool kCausal, bool kInTurn>
__device__ __forceinline__ TilePlace place_of_keys(const BackwardKernelArgs &args, int tile) {
    return place_of_keys<B_c, kCausal, kInTurn>(args, tile, padded_keys<B_c>(args.len_k));
}
