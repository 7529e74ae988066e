#pragma once
// Thread blocks of a cluster run at the same time and reach each other's shared memory: mapped to
// the rank of another thread block, an address stands for the same place in its memory.

#include <cstdint>
#include <cuda.h>

#include "sm90/arguments.cuh"
#include "sm90/exact_rows.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"

constexpr int kClusterBlocks = 2;

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ uint32_t in_block(uint32_t address, uint32_t rank) {
    uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// A barrier of all threads of the cluster that have not ended.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\t"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// The same without a release. Fences such as barrier_init_fence must have released all writes that
// other threads read. With .release each thread would wait for all of its writes, as far as L2.
__device__ __forceinline__ void cluster_sync_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n\t"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// Orders the writes that this thread has made or seen before its next arrival, for the cluster.
__device__ __forceinline__ void cluster_fence() {
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
}

// Arrives at a barrier in any thread block of the cluster. The arrival follows reads by wgmma,
// which have ended, and no stores: with .release.cluster it would wait for all stores, as far as
// L2.
__device__ __forceinline__ void cluster_barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void cluster_barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

// Sends a place to the shared memory of another thread block, for load_place. Its bytes are counted
// at a barrier there.
__device__ __forceinline__ void send_place(uint32_t dst_smem, TilePlace place, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                 "[%0], {%2, %3, %4, %4}, [%1];" ::"r"(dst_smem),
                 "r"(barrier), "r"(place.row), "r"(place.head), "r"(place.batch)
                 : "memory");
}

// Begins to load a tile once, into the same place of each thread block whose bit is set in
// `blocks`. Its bytes are counted at the same barrier of each.
__device__ __forceinline__ void tma_load_tile(uint32_t tile_smem, const CUtensorMap &tensor,
                                              uint32_t barrier, TilePlace place, uint16_t blocks) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %3, %5, %6}], [%2], %7;" ::"r"(tile_smem),
                 "l"(&tensor), "r"(barrier), "r"(0), "r"(place.row), "r"(place.head),
                 "r"(place.batch), "h"(blocks)
                 : "memory");
}

// The same for all thread blocks, into the next slot of a ring of tiles, once it is empty in each.
template <uint32_t kTileBytes, int kSlots>
__device__ __forceinline__ void tma_load_slots(Ring<kSlots> &ring, uint32_t full, uint32_t empty,
                                               uint32_t tiles_smem, const CUtensorMap &tensor,
                                               TilePlace place) {
    barrier_wait(ring.barrier(empty), ring.lap ^ 1);
#pragma unroll
    for (int block = 0; block < kClusterBlocks; ++block) {
        cluster_barrier_expect(in_block(ring.barrier(full), block), kTileBytes);
    }
    tma_load_tile(tiles_smem + ring.slot * kTileBytes, tensor, ring.barrier(full), place,
                  (1 << kClusterBlocks) - 1);
    ring.advance();
}

// Loads each thread block's own tile: the first at `place`, the next one `apart` from it. The place
// of the tile comes with its bytes. If there is no tile (row -1), only the place is sent.
template <uint32_t kTileBytes, int kSlots>
__device__ __forceinline__ void tma_load_with_places(Ring<kSlots> &ring, uint32_t full,
                                                     uint32_t empty, uint32_t tiles_smem,
                                                     const CUtensorMap &tensor, TilePlace place,
                                                     TilePlace apart, uint32_t places_smem) {
    barrier_wait(ring.barrier(empty), ring.lap ^ 1);
    const bool has_tile = place.row >= 0;
    for (int block = 0; block < kClusterBlocks; ++block) {
        const uint32_t block_full = in_block(ring.barrier(full), block);
        cluster_barrier_expect(block_full, kPlaceBytes + (has_tile ? kTileBytes : 0));
        send_place(in_block(places_smem + ring.slot * kPlaceBytes, block), place, block_full);
        if (has_tile) {
            tma_load_tile(tiles_smem + ring.slot * kTileBytes, tensor, ring.barrier(full), place,
                          1 << block);
        }
        place.row += has_tile ? apart.row : 0;
        place.head += apart.head;
    }
    ring.advance();
}

// The distance from the tile of a cluster's first thread block to the tile of the second: one head
// if heads that share K and V come in pairs, else B_r rows.
template <int B_r>
__device__ __forceinline__ TilePlace blocks_apart(const HopperKernelArgs &args) {
    return args.heads_per_kv % kClusterBlocks == 0 ? TilePlace{0, 1} : TilePlace{B_r, 0};
}

// The place where the first thread block of a cluster begins with the tile of this number.
template <int B_r, Edges kEdges>
__device__ __forceinline__ TilePlace cluster_place(int tile, const HopperKernelArgs &args) {
    const TilePlace apart = blocks_apart<B_r>(args);
    auto [block, head] = tile_index<B_r, kEdges>(tile, args);
    head *= 1 + apart.head;
    return {block * (B_r + apart.row), head % args.heads, head / args.heads};
}

// exact_tiles for a thread block of a cluster.
template <DType kDType, int kDHead, int B_r, Edges kEdges, bool kDynamic>
__device__ __forceinline__ void exact_cluster_tiles(const HopperKernelArgs &args, uint32_t bits,
                                                    int warp_row, float scale) {
    const TilePlace apart = blocks_apart<B_r>(args);
    auto place_of = [&](int tile) {
        TilePlace place = cluster_place<B_r, kEdges>(tile, args);
        place.row += cluster_rank() * apart.row + warp_row;
        place.head += cluster_rank() * apart.head;
        return place;
    };
    exact_tiles<kDType, kDHead, kEdges, kDynamic, kClusterBlocks>(args, bits, place_of, scale);
}
