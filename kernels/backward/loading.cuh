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

// Passes on the next block of queries for a warp: it reads none of it, and its dS is 0.
template <int B_r, uint32_t kScoreBytes, int kSlots, int kScoreSlots>
__device__ __forceinline__ void pass_on(Ring<kSlots> &next, uint32_t full, uint32_t empty,
                                        Ring<kScoreSlots> &dS_ring, uint32_t dS_full,
                                        uint32_t dS_empty, uint32_t dS_own_smem, int warp_row) {
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
}
