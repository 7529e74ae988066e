#pragma once
// Parts of the family's kernels that no step is about, or a step before: slots of tiles in shared
// memory, which are filled for all thread blocks of a cluster and emptied by their warps; P as an
// operand; softcap; sinks.

#include <cuda.h>

#include "elements.cuh"
#include "kernels/general/arguments.cuh"
#include "kernels/general/sequences.cuh"
#include "memory.cuh"
#include "sm90/cluster.cuh"
#include "sm90/exact_rows.cuh"
#include "sm90/launch.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/softmax.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

constexpr int kWarpRows = kWgmmaM / 4;
constexpr int kFewKeys = 64; // of block 0, for a warpgroup that sees no more of them

// Begins to load the rows of a tile at `place`, from a column on: of its piece, or of all. Into
// each thread block whose bit is set in `blocks`, if given.
__device__ __forceinline__ void load_columns(uint32_t tile_smem, const CUtensorMap &tensor,
                                             uint32_t barrier, int column, TilePlace place) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(tile_smem),
                 "l"(&tensor), "r"(barrier), "r"(column), "r"(place.row), "r"(0), "r"(place.head),
                 "r"(place.batch)
                 : "memory");
}
__device__ __forceinline__ void load_columns(uint32_t tile_smem, const CUtensorMap &tensor,
                                             uint32_t barrier, int column, TilePlace place,
                                             uint16_t blocks) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(tile_smem),
                 "l"(&tensor), "r"(barrier), "r"(column), "r"(place.row), "r"(0), "r"(place.head),
                 "r"(place.batch), "h"(blocks)
                 : "memory");
}

// kSlots slots of tiles (kRows, kColumns), in turn, with a barrier that says full and one that says
// empty for each. A role has a copy, whose ring is at the slot that the role comes to next.
// kBlocks: thread blocks of the cluster.
template <int kSlots, int kRows, int kColumns, int kBlocks>
struct Slots {
    static constexpr int kPieces = (kColumns + kPiece - 1) / kPiece;
    static constexpr uint32_t kBytes = kPieces * piece_bytes(kRows);
    static constexpr uint32_t kAllBytes = kSlots * kBytes;
    static constexpr uint32_t kBarriersBytes = 2 * kSlots * kBarrierBytes;
    uint32_t tiles, full, empty; // addresses
    Ring<kSlots> ring;

    __device__ __forceinline__ Slots(uint32_t tiles, uint32_t barriers)
        : tiles(tiles), full(barriers), empty(barriers + kSlots * kBarrierBytes) {}

    __device__ __forceinline__ void init_barriers(int readers) const {
        ring.init_barriers(full, empty, readers);
    }
    // The distance from the first slot to the next one in turn, in the units of a descriptor.
    __device__ __forceinline__ uint32_t step() const { return ring.slot * (kBytes / 16); }
    __device__ __forceinline__ void wait_full() const {
        barrier_wait(ring.barrier(full), ring.lap);
    }
    __device__ __forceinline__ void wait_empty() const {
        barrier_wait(ring.barrier(empty), ring.lap ^ 1);
    }
    __device__ __forceinline__ void wait_all_empty() const { wait_until_empty(ring, empty); }

    // One arrival per warp: after its own wait the wgmma of its rows no longer read the slot.
    __device__ __forceinline__ void release(int lane) {
        if (lane == 0) {
            cluster_barrier_arrive(in_block(ring.barrier(empty), 0));
        }
        ring.advance();
    }
    // Leaves a tile out. Without the wait a warp may arrive twice in a lap.
    __device__ __forceinline__ void skip(int lane) {
        wait_full();
        release(lane);
    }
    // The next tile, once the slot is empty in each block, into the same slot of each.
    __device__ __forceinline__ void load(const CUtensorMap &tensor, TilePlace place) {
        wait_empty();
        expect(kBytes);
        copy(tensor, place, (1 << kBlocks) - 1);
        ring.advance();
    }
    // Each block's own tile, the first at `place`, the next one `apart` from it, and the place
    // itself. If there is no tile (row -1), only the place is sent.
    template <typename Place = TilePlace>
    __device__ __forceinline__ void load_with_places(const CUtensorMap &tensor, Place place,
                                                     TilePlace apart, uint32_t places) {
        wait_empty();
        const bool has_tile = place.row >= 0;
        for (int block = 0; block < kBlocks; ++block) {
            const uint32_t barrier = in_block(ring.barrier(full), block);
            cluster_barrier_expect(barrier, has_tile ? kPlaceBytes + kBytes : kPlaceBytes);
            send_place(in_block(places + ring.slot * kPlaceBytes, block), place, barrier);
            if (has_tile) {
                copy(tensor, place, 1 << block);
            }
            place.row += has_tile ? apart.row : 0;
            place.head += apart.head;
        }
        ring.advance();
    }

  private:
    __device__ __forceinline__ void expect(uint32_t bytes) const {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            cluster_barrier_expect(in_block(ring.barrier(full), block), bytes);
        }
    }
    // Begins to copy a tile into the blocks whose bit is set. One copy takes all pieces of 64
    // columns. If the last is not whole, each is copied alone, and columns past the end are zeros.
    __device__ __forceinline__ void copy(const CUtensorMap &tensor, TilePlace place,
                                         uint16_t blocks) const {
        constexpr int kCopies = kColumns % kPiece == 0 ? 1 : kPieces;
        const uint32_t tile = tiles + ring.slot * kBytes, barrier = ring.barrier(full);
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            if constexpr (kBlocks == 1) {
                load_columns(tile + i * piece_bytes(kRows), tensor, barrier, i * kPiece, place);
            } else {
                load_columns(tile + i * piece_bytes(kRows), tensor, barrier, i * kPiece, place,
                             blocks);
            }
        }
    }
};

// The sizes of a config's tiles, and the edges that they cross, as steps have had them since g7.
template <typename Config>
struct TileSizes {
    static constexpr GeneralKernelConfig cfg = Config::value;
    static constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kPVSteps = B_c / kWgmmaK;
    static constexpr int kBlocks = cfg.cluster, kQSlots = cfg.Q_slots; // blocks of a cluster
    static constexpr int kConsumers = B_r / kWgmmaM; // warpgroups that compute
    static constexpr bool kMoves = cfg.causal || cfg.window; // each row's last key is another one
    static constexpr bool kDiffer = cfg.causal || cfg.varlen; // tiles, in their numbers of keys
    static constexpr Edges kOrder = cfg.causal ? Edges::kCausal : Edges::kTensors;
    static constexpr Edges kEdges = cfg.window ? Edges::kWindow : kOrder;
    // Most blocks that only others see: they keep their slots while a warpgroup waits for the next.
    static constexpr int kMostUnseen = kMoves ? (kBlocks * B_r - kWgmmaM + B_c - 1) / B_c : 0;
    static constexpr bool kFew = kMoves && B_c == 2 * kFewKeys;
    static constexpr int kDHead = cfg.d_head, kDV = cfg.v_columns(), kDSteps = kDHead / kWgmmaK;
    static_assert(kDHead % kWgmmaK == 0 && kDV <= kDHead, "O takes the place of Q");
    static_assert(!cfg.varlen || kBlocks == 1, "the next tile may be another sequence's");
    static_assert(kMostUnseen < cfg.K_slots && kMostUnseen <= cfg.V_slots, "others need these");
};

// The order of tiles. Two blocks of a cluster take the tile of one number together: the same rows
// of two heads that share K and V, or else two tiles of one head, one above the other.
template <typename T>
struct Scheduler {
    const GeneralKernelArgs &args;
    const int rank = cluster_rank();
    const TilePlace apart = // from the first block's to the second's
        T::kBlocks == 1 ? TilePlace{0, 0} : blocks_apart<T::B_r>(args);

    __device__ __forceinline__ auto place(int tile) const { // where the first block begins
        if constexpr (T::cfg.varlen) { // all heads, which have the same length, of a slot
            return find_tile<T::B_r, T::cfg.causal>(tile / args.heads, tile % args.heads, args);
        } else {
            auto [block, head] = tile_index<T::B_r, T::kOrder>(tile, args);
            head *= 1 + apart.head;
            return TilePlace{block * (T::B_r + apart.row), head % args.heads, head / args.heads};
        }
    }
    // Tiles that differ come from a counter, if there is one.
    __device__ __forceinline__ int next(int tile) const {
        return take_tile<T::kDiffer, T::kBlocks>(tile, args);
    }
    // The end of the keys that a query sees; of rows up to `end` that of the blocks of keys, and of
    // rows from `query` on the first of these. Block 0 begins at first_key.
    __device__ __forceinline__ int keys(int query) const {
        return visible_keys<T::kEdges>(query, args);
    }
    __device__ __forceinline__ int key_blocks(int end, int first_key) const {
        return seen_blocks<T::B_c, T::kEdges>(end, args, first_key);
    }
    __device__ __forceinline__ int first_block(int query, int first_key) const {
        return max(first_visible_key<T::kEdges>(query, args) - first_key, 0) / T::B_c;
    }
};

// Shared memory, and the slots that a role comes to next. T: the sizes of a step's tiles.
template <typename T>
struct Memory {
    Slots<T::kQSlots, T::B_r, T::kDHead, T::kBlocks> Q;
    Slots<T::cfg.K_slots, T::B_c, T::kDHead, T::kBlocks> K;
    Slots<T::cfg.V_slots, T::B_c, T::kDV, T::kBlocks> V;
    uint32_t places; // one per slot of Q

    __device__ __forceinline__ Memory(uint32_t smem)
        : Q(smem, smem + Q.kAllBytes + K.kAllBytes + V.kAllBytes),
          K(Q.tiles + Q.kAllBytes, Q.full + Q.kBarriersBytes),
          V(K.tiles + K.kAllBytes, K.full + K.kBarriersBytes), places(V.full + V.kBarriersBytes) {}

    // The place of the tile in a slot of Q.
    __device__ __forceinline__ auto place(uint32_t slot) const {
        const uint4 place = load_smem_16(places + slot * kPlaceBytes);
        if constexpr (T::cfg.varlen) {
            return SequencePlace{{int(place.x), int(place.y), int(place.z)}, int(place.w)};
        } else {
            return TilePlace{int(place.x), int(place.y), int(place.z)};
        }
    }
    // A slot is empty when all warps that compute have given it back.
    __device__ __forceinline__ void init_barriers() const {
        constexpr int kReaders = T::kBlocks * T::kConsumers * kWarpgroup / 32;
        Q.init_barriers(kReaders);
        K.init_barriers(kReaders);
        V.init_barriers(kReaders);
        barrier_init_fence();
    }
};

// Keys that a row does not see become -infinity. The columns of S are the keys from first_key on,
// its rows g and g + 8 are `query` and the eighth behind it.
template <Edges kEdges, int kCount>
__device__ __forceinline__ void hide_keys(float (&S_rmem)[kCount], const GeneralKernelArgs &args,
                                          int query, int first_key) {
    const int end[2] = {visible_keys<kEdges>(query, args) - first_key,
                        visible_keys<kEdges>(query + 8, args) - first_key};
    hide_columns(S_rmem, end);
    if constexpr (kEdges == Edges::kWindow) {
        const int begin = first_visible_key<kEdges>(query, args) - first_key - threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (i / 4 * 8 + i % 2 - i / 2 % 2 * 8 < begin) {
                S_rmem[i] = -INFINITY;
            }
        }
    }
}

// S rounded as operand A of P @ V. Columns that S lacks and P has are 0; returns whether there are
// any.
template <DType kDType, int kSteps, int kCount>
__device__ __forceinline__ bool pack_rows(uint32_t (&P_rmem)[kSteps][4],
                                          const float (&S_rmem)[kCount]) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        if (8 * k >= kCount) {
            P_rmem[k][0] = P_rmem[k][1] = P_rmem[k][2] = P_rmem[k][3] = 0;
        } else {
            pack_fragment<kDType>(P_rmem[k], S_rmem, k);
        }
    }
    return kCount < 8 * kSteps;
}

// Rounds O of the 16 rows of a warp to 16 bits and stores it through rows of a tile in shared
// memory that no other warp uses: store_rows of sm90/arguments.cuh for any kColumns, the last of
// which are clipped where they end within a piece.
template <DType kDType, int B_r, int kColumns>
__device__ __forceinline__ void store_columns(const GeneralKernelArgs &args, TilePlace place,
                                              uint32_t tile_smem, int warp_row,
                                              const float (&O_rmem)[kColumns / 2]) {
    constexpr int kPieces = (kColumns + kPiece - 1) / kPiece;
    constexpr bool kWhole = kColumns % kPiece == 0;
#pragma unroll
    for (int k = 0; k < kColumns / kWgmmaK; ++k) {
        uint32_t packed[4];
        pack_fragment<kDType>(packed, O_rmem, k);
        store_fragment<B_r>(tile_smem, warp_row, k, packed);
    }
    fence_async_proxy();
    __syncwarp(); // one lane stores the rows that all lanes have written
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
                         "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&args.O),
                         "r"(tile_smem + i * piece_bytes(B_r) + warp_row * kRowBytes),
                         "r"(kWhole ? 0 : i * kPiece), "r"(place.row + warp_row),
                         "r"(kWhole ? i : 0), "r"(place.head), "r"(place.batch)
                         : "memory");
        }
        tma_store_commit();
    }
}

// Rounds O of the 16 rows of a warp to 16 bits and stores those that the tensor has, without shared
// memory. The four lanes that have a row store 64 bytes of it at once.
template <DType kDType, int kColumns, typename Place>
__device__ __forceinline__ void store_from_registers(const GeneralKernelArgs &args, Place place,
                                                     int warp_row,
                                                     const float (&O_rmem)[kColumns / 2]) {
    const int lane = threadIdx.x % 32, own = place.row + warp_row + lane / 4;
    Element *row = static_cast<Element *>(args.O_gmem) +
                   row_0(place, place.batch, args.len_q, args.O_strides) +
                   place.head * args.O_strides.head + own * args.O_strides.row + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 16) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t packed[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int column = i + 4 * n + 2 * half;
                packed[n] = pack<kDType>(O_rmem[column], O_rmem[column + 1]);
            }
            exchange(packed);
            if (own + half * 8 < args.len_q) {
                store_gmem_16(row + half * 8 * args.O_strides.row + 2 * i,
                              make_uint4(packed[0], packed[1], packed[2], packed[3]));
            }
        }
    }
}

// What a warp knows of a tile. T: the sizes of a step's tiles.
template <typename T>
struct TileState {
    int n = -1; // index among the tiles of this block
    int key_blocks = 0, unseen_blocks = 0; // seen (0: no tile), and skipped before them
    int first_key = 0, first_block = 0; // of its sequence, and of what the cluster's rows see
    int query = 0; // the lane's row g
    uint32_t Q_slot = 0;

    __device__ __forceinline__ int end_of(int j) const { // the end of the keys of block j
        return first_key + (first_block + key_blocks - j) * T::B_c;
    }
    // Row i of the warpgroup. Tiles of sequences of various lengths begin at any row.
    __device__ __forceinline__ int row(int i) const {
        const int before = threadIdx.x / 32 % 4 * kWarpRows + threadIdx.x % 32 / 4;
        return T::cfg.varlen ? query - before + i : (query & -kWgmmaM) | i;
    }
    // Keys before block j - 1, up to the end of block j, that the warpgroup's first row cannot see.
    __device__ __forceinline__ int unseen(int j, const GeneralKernelArgs &args) const {
        return end_of(j) - visible_keys<T::kEdges>(row(0), args);
    }
    // Whether the window of the warpgroup's last row begins behind the first key of block j.
    __device__ __forceinline__ bool begins_behind(int j, const GeneralKernelArgs &args) const {
        return first_visible_key<T::kEdges>(row(kWgmmaM - 1), args) > end_of(j + 1);
    }
};

template <bool kSoftcap, int kCount>
__device__ __forceinline__ void limit(float (&S_rmem)[kCount], float scale) { // S = tanh(S · scale)
#pragma unroll
    for (int i = 0; kSoftcap && i < kCount; ++i) {
        S_rmem[i] = tanh_approx(S_rmem[i] * scale);
    }
}

// The sinks of a call, if it brought any.
template <DType kDType>
struct Sinks {
    const Element *sinks; // (heads), or null

    __device__ __forceinline__ float of(int head) const {
        return sinks == nullptr ? -INFINITY : to_float<kDType>(sinks[head]) * kLog2e;
    }
    // l = l + 2^(sink - m), relative to the larger of both exponents, which m becomes. Returns the
    // factor by which O follows. Without a key l is 0 before, and the LSE is the sink.
    __device__ __forceinline__ float add(float sink, float &m, float &l) const {
        const float old_m = m;
        m = fmaxf(m, sink);
        const float rescale = exp2_approx(old_m - m);
        l = fmaf(l, rescale, exp2_approx(sink - m));
        return rescale;
    }
};

// The 16 rows of a warp that begin at place_of(tile), computed again, for each tile n of a thread
// block whose bit n % 32 is set: exact_tiles of sm90/exact_rows.cuh for a d_v of its own.
template <typename T, typename PlaceOf, typename Sinks = NoSinks>
__device__ __forceinline__ void compute_again(const GeneralKernelArgs &args, uint32_t bits,
                                              PlaceOf &&place_of, Sinks sinks = {}) {
    constexpr int kTiles = 2;
    constexpr bool kDiffer = T::cfg.causal || T::cfg.varlen; // tiles
    for (int tile = blockIdx.x / T::kBlocks, n = -1; tile < args.tiles;
         tile += kDiffer ? 1 : gridDim.x / T::kBlocks) {
        if (took_tile<kDiffer, T::kBlocks>(tile, args) &&
            (!T::cfg.varlen || place_of(tile).row >= 0) && bits >> ++n % 32 & 1) {
#pragma unroll 1
            for (int col = 0; col < T::kDV; col += kTiles * kMmaN) {
                exact_columns<T::cfg.dtype, T::kDHead, kTiles, T::kEdges, T::cfg.softcap>(
                    args, place_of(tile), args.scale, col, sinks);
            }
        }
    }
}
