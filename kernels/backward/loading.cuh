#pragma once
// The way of tiles, of their places and of statistics to shared memory, and the slots there.

#include "kernels/backward/layout.cuh"
#include "kernels/backward/places.cuh"
#include "kernels/backward/scores.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"

// Loads a tile, if there is one: if not, the row of its place is -1, and the barrier's phase ends
// without it.
template <uint32_t kBytes>
__device__ __forceinline__ void load_tile(uint32_t tile_smem, const CUtensorMap &tensor,
                                          uint32_t barrier, TilePlace place) {
    barrier_expect(barrier, place.row < 0 ? 0 : kBytes);
    if (place.row >= 0) {
        tma_load_tile(tile_smem, tensor, barrier, place);
    }
}

// The same into the next slot of a ring, once it is empty. The place goes with the tile.
template <uint32_t kBytes, int kSlots>
__device__ __forceinline__ void load_with_place(Ring<kSlots> &ring, uint32_t full, uint32_t empty,
                                                uint32_t slots_smem, const CUtensorMap &tensor,
                                                uint32_t places_smem, TilePlace place) {
    barrier_wait(ring.barrier(empty), ring.lap ^ 1);
    store_place(places_smem + ring.slot * kPlaceBytes, place);
    load_tile<kBytes>(slots_smem + ring.slot * kBytes, tensor, ring.barrier(full), place);
    ring.advance();
}

// Waits for a tile and returns its place.
template <int kSlots>
__device__ __forceinline__ TilePlace wait_for_place(const Ring<kSlots> &ring, uint32_t full,
                                                    uint32_t places_smem) {
    barrier_wait(ring.barrier(full), ring.lap);
    return load_place(places_smem + ring.slot * kPlaceBytes);
}

// Loads a tile of each of two tensors into the next slot of a ring, once it is empty, and the
// statistics of its queries.
template <uint32_t kBytes, int kSlots>
__device__ __forceinline__ void load_pair(Ring<kSlots> &ring, uint32_t full, uint32_t empty,
                                          uint32_t slots_smem, const CUtensorMap &one,
                                          const CUtensorMap &other, TilePlace place,
                                          uint32_t statistics_smem, const float *statistics) {
    const uint32_t slot_smem = slots_smem + ring.slot * 2 * kBytes;
    barrier_wait(ring.barrier(empty), ring.lap ^ 1);
    barrier_expect(ring.barrier(full), 2 * kBytes + kStatisticsBytes);
    tma_load_tile(slot_smem, one, ring.barrier(full), place);
    tma_load_tile(slot_smem + kBytes, other, ring.barrier(full), place);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(statistics_smem + ring.slot * kStatisticsBytes),
                 "l"(statistics), "n"(kStatisticsBytes), "r"(ring.barrier(full))
                 : "memory");
    ring.advance();
}

// Gives a slot back, which the wgmma of this warp's rows no longer read, or hands one over.
template <int kSlots>
__device__ __forceinline__ void release(Ring<kSlots> &ring, uint32_t empty, int lane) {
    if (lane == 0) {
        barrier_arrive(ring.barrier(empty));
    }
    ring.advance();
}

// Passes on the next `count` blocks of queries for a warp: it reads none of them, and its dS is 0.
template <int B_r, uint32_t kScoreBytes, int kSlots, int kScoreSlots>
__device__ __forceinline__ void
pass_on(Ring<kSlots> &next, uint32_t full, uint32_t empty, Ring<kScoreSlots> &dS_ring,
        uint32_t dS_full, uint32_t dS_empty, uint32_t dS_own_smem, int warp_row, int count = 1) {
    do {
        barrier_wait(next.barrier(full), next.lap); // or a warp may arrive twice in a lap
        barrier_wait(dS_ring.barrier(dS_empty), dS_ring.lap ^ 1);
#pragma unroll
        for (int k = 0; k < B_r / kWgmmaK; ++k) {
            store_transposed<B_r>(dS_own_smem + dS_ring.slot * kScoreBytes, warp_row % kWgmmaM, k,
                                  {0, 0, 0, 0});
        }
        fence_async_proxy();
        __syncwarp(); // one lane arrives for what all lanes have written
        release(dS_ring, dS_full, threadIdx.x % 32);
        release(next, empty, threadIdx.x % 32);
    } while (--count > 0);
}

// The loads of one thread for tiles of keys and the blocks of queries that see them, in the order
// in which all roles come to them. Blocks: which blocks see a tile.
template <typename Config, typename Blocks>
struct Loader {
    static constexpr BackwardKernelConfig cfg = Config::value;
    static constexpr int B_r = cfg.B_r, B_c = cfg.B_c;
    const BackwardKernelArgs &args;
    const Layout<Config> &smem;
    const Blocks &blocks;
    Ring<cfg.slots> ring; // of blocks
    Ring<kTileSlots> next_tile;
    // What is loaded: a tile, its next block, and the blocks that are left.
    int taken = blockIdx.x, left = 0;
    TilePlace place, queries;

    __device__ __forceinline__ TilePlace first_block() const { // of the first head
        return {blocks.first(place.row) * B_r, place.head * args.heads_per_kv, place.batch};
    }
    __device__ __forceinline__ int end_row() const { // of each head's blocks
        return blocks.end(place.row + B_c - kWgmmaM) * B_r;
    }
    // Loads the next block of queries, and before the first of a tile its K. tile: the slot of the
    // tile that is computed.
    __device__ __forceinline__ void load_next(const Ring<kTileSlots> &tile, bool V_is_free) {
        // K of the tile behind the present one has a slot, but not that of a third.
        if (left == 0 && (next_tile.slot != tile.slot || next_tile.lap == tile.lap)) {
            place = place_of_keys<B_c, cfg.causal, cfg.in_turn>(args, taken);
            load_with_place<Layout<Config>::kKeyBytes>(
                next_tile, smem.K_full, smem.K_empty, smem.K_smem, args.K, smem.places_smem, place);
            queries = first_block();
            left = place.row < 0 ? 0 : (end_row() - queries.row) / B_r * args.heads_per_kv;
        }
        if (left > 0) {
            const int64_t row = row_index(args, queries, blocks.rows);
            const TilePlace Q_place = {queries.row - blocks.before, queries.head, queries.batch};
            load_pair<Layout<Config>::kQueryBytes>(ring, smem.full, smem.empty, smem.QdO_smem,
                                                   args.Q, args.dO, Q_place, smem.statistics_smem,
                                                   args.statistics + 2 * row);
            if ((queries.row += B_r) == end_row()) { // the next head follows
                queries = {first_block().row, queries.head + 1, queries.batch};
            }
            if (--left == 0) { // the answer comes while a block is computed
                taken = atomicAdd(args.next_tile, 1) + gridDim.x;
            }
        }
        if (V_is_free) {
            load_tile<Layout<Config>::kKeyBytes>(smem.V_smem, args.V, smem.V_full, place);
        }
    }
};
