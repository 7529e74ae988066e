#pragma once
// Tiles of Q, K, V and of the sums in shared memory.

#include "kernels/decode/queries.cuh"
#include "kernels/decode/scores.cuh"
#include "kernels/decode/sums.cuh"
#include "sm90/roles.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"

template <int kRows, int kDHead>
constexpr uint32_t kTileBytes = kDHead / kPiece * piece_bytes(kRows);

__device__ __forceinline__ void store_smem_16(uint32_t dst_smem, uint4 value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst_smem), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

// Q of a tile: global → shared, by `threads` threads; zeros for rows that do not exist.
template <int kDHead, int B_r>
__device__ __forceinline__ void load_Q(uint32_t Q_smem, const Queries<B_r> &queries, int threads,
                                       const DecodeKernelArgs &args) {
    constexpr int kChunks = kDHead / kChunk, kPerRow = kPiece / kChunk;
    for (int i = threadIdx.x; i < B_r * kChunks; i += threads) {
        const int row = i / kChunks, chunk = i % kChunks;
        store_smem_16(Q_smem + chunk / kPerRow * piece_bytes(B_r) + row * kRowBytes +
                          (chunk % kPerRow ^ row % 8) * kChunkBytes,
                      queries.load_Q(row, chunk * kChunk, args));
    }
    fence_async_proxy(); // wgmma reads Q
}

// Zeros in the rows of a tile of V from `first` on, by the threads of a warpgroup: what lies behind
// a sequence's end may be NaN, and 0 · NaN is NaN.
template <int B_c, int kDHead>
__device__ __forceinline__ void clear_rows(uint32_t V_smem, int first) {
    constexpr int kPerRow = kPiece / kChunk;
    for (int i = threadIdx.x % kWarpgroup; i < (B_c - first) * kPerRow; i += kWarpgroup) {
#pragma unroll
        for (int piece = 0; piece < kDHead / kPiece; ++piece) {
            store_smem_16(V_smem + piece * piece_bytes(B_c) + first * kRowBytes + i * kChunkBytes,
                          {0, 0, 0, 0});
        }
    }
    fence_async_proxy(); // wgmma reads V
}

// m, l and O of a warpgroup: registers → one part of the sums.
template <int B_r, int kDHead, int kTiles, int kCount>
__device__ __forceinline__ void store_sums(const Sums<B_r, kDHead> &sums, int part,
                                           const Statistics<kCount> &statistics,
                                           const float (&O_rmem)[kTiles][kCount]) {
    const int row = threadIdx.x / 32 % 4 * (kWgmmaM / 4) + threadIdx.x % 32 / 4; // of O^T
#pragma unroll
    for (int own = 0; own < kCount / 2; ++own) {
        const int query = column_of(own), i = own / 2 * 4 + own % 2;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            float *O = sums.O(part, query) + tile * kWgmmaM + row;
            O[0] = O_rmem[tile][i];
            O[8] = O_rmem[tile][i + 2];
        }
        if (row == 0) {
            sums.m(part, query) = statistics.m[own];
            sums.l(part, query) = statistics.l[own];
        }
    }
}

// O and LSE of a tile, by the warpgroup that has seen all its keys: registers → global.
template <DType kDType, int B_r, int kTiles, int kCount>
__device__ __forceinline__ void
store_rows(const Statistics<kCount> &statistics, const float (&O_rmem)[kTiles][kCount],
           const Queries<B_r> &queries, const DecodeKernelArgs &args) {
    const int column = threadIdx.x / 32 % 4 * (kWgmmaM / 4) + threadIdx.x % 32 / 4; // of O
#pragma unroll
    for (int own = 0; own < kCount / 2; ++own) {
        const int row = column_of(own), i = own / 2 * 4 + own % 2;
        if (queries.has(row)) {
            const float2 m_and_l = {statistics.m[own], statistics.l[own]};
            const float factor = finish_row<kDType>(m_and_l, queries, row, column == 0, args);
            Element *O_gmem = queries.O(row, args) + column;
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                O_gmem[tile * kWgmmaM] = from_float<kDType>(O_rmem[tile][i] * factor);
                O_gmem[tile * kWgmmaM + 8] = from_float<kDType>(O_rmem[tile][i + 2] * factor);
            }
        }
    }
}

template <int kSlots>
__device__ __forceinline__ void skip(Ring<kSlots> &ring, int slots) {
    for (int i = 0; i < slots; ++i) {
        ring.advance();
    }
}

// Keys of one head that TMA copies at once, in pieces of 64 columns: the first is `row` of a page,
// or of a row of the cache.
struct Box {
    int row, head, page;
};

// The box whose first key is `key`. Behind the sequence's end, and where a window hides its keys
// from the tile, its page is one behind the last, where TMA reads nothing and writes zeros.
// `begin`: the first key that the tile sees.
template <int B_r>
__device__ __forceinline__ Box find_box(const Queries<B_r> &queries, int key, int begin,
                                        const DecodeKernelArgs &args) {
    if (key + args.box <= begin || key >= queries.len_k) {
        return {0, queries.kv_head, args.pages};
    }
    if (args.block_table == nullptr) {
        return {key, queries.kv_head, queries.cache_row(args)};
    }
    const int block = key / args.page_size;
    return {key - block * args.page_size, queries.kv_head,
            args.block_table[int64_t(queries.sequence) * args.table_blocks + block]};
}

template <int B_r>
__device__ __forceinline__ Box find_box(const Queries<B_r> &queries, int key,
                                        const DecodeKernelArgs &args) {
    return find_box(queries, key, queries.begin(args), args);
}

// Begins to load a box to the rows of a tile from `row` on.
template <int B_c, int kDHead>
__device__ __forceinline__ void load_box(uint32_t tile_smem, const CUtensorMap &tensor,
                                         uint32_t barrier, int row, const Box &box) {
#pragma unroll
    for (int piece = 0; piece < kDHead / kPiece; ++piece) {
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::"
                     "bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(
                         tile_smem + piece * piece_bytes(B_c) + row * kRowBytes),
                     "l"(&tensor), "r"(barrier), "r"(0), "r"(box.row), "r"(piece), "r"(box.head),
                     "r"(box.page)
                     : "memory");
    }
}

// Begins to load one piece of the columns of a box into L2.
__device__ __forceinline__ void prefetch_piece(const CUtensorMap &tensor, int piece,
                                               const Box &box) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(
            &tensor),
        "r"(0), "r"(box.row), "r"(piece), "r"(box.head), "r"(box.page)
        : "memory");
}
