#pragma once
// The tensor memory accelerator copies boxes of tensors. A tile (rows, d_head) lies in shared
// memory in pieces of 64 columns. A row of a piece has 128 bytes, whose 16-byte chunks are permuted
// by the row. One copy moves all pieces. The dimensions of a tensor are (column, row, piece, head,
// batch).

#include <cstdint>
#include <cuda.h>

#include "sm90/mbarrier.cuh"

struct TilePlace {
    int row = 0, head = 0, batch = 0; // without them NVRTC puts {-1} into memory, and loads it
};

// A place in shared memory, where one thread writes it and others read it.
constexpr int kPlaceBytes = 16;
__device__ __forceinline__ void store_place(uint32_t dst_smem, TilePlace place) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %3};" ::"r"(dst_smem), "r"(place.row),
                 "r"(place.head), "r"(place.batch)
                 : "memory");
}
__device__ __forceinline__ TilePlace load_place(uint32_t src_smem) {
    const uint4 place = load_smem_16(src_smem);
    return {int(place.x), int(place.y), int(place.z)};
}

// Begins to load the tile at `place`. Its bytes are counted at the barrier.
__device__ __forceinline__ void tma_load_tile(uint32_t tile_smem, const CUtensorMap &tensor,
                                              uint32_t barrier, TilePlace place) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %3, %5, %6}], [%2];" ::"r"(tile_smem),
                 "l"(&tensor), "r"(barrier), "r"(0), "r"(place.row), "r"(place.head),
                 "r"(place.batch)
                 : "memory");
}

// The same, into the next slot of a ring of tiles, once it is empty: at once in the first lap.
template <uint32_t kTileBytes, int kSlots>
__device__ __forceinline__ void tma_load_slot(Ring<kSlots> &ring, uint32_t full, uint32_t empty,
                                              uint32_t tiles_smem, const CUtensorMap &tensor,
                                              TilePlace place) {
    barrier_wait(ring.barrier(empty), ring.lap ^ 1);
    barrier_expect(ring.barrier(full), kTileBytes);
    tma_load_tile(tiles_smem + ring.slot * kTileBytes, tensor, ring.barrier(full), place);
    ring.advance();
}

// Begins to store one piece of some rows, as a part of the open group.
__device__ __forceinline__ void tma_store_piece(const CUtensorMap &tensor, uint32_t piece_smem,
                                                int row, int piece, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
                 "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&tensor),
                 "r"(piece_smem), "r"(0), "r"(row), "r"(piece), "r"(head), "r"(batch)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until the stores of this thread have read shared memory.
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until the stores of this thread have written global memory.
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// TMA and wgmma reach shared memory through the asynchronous proxy, loads and stores do not. Orders
// this thread's stores before later reads by TMA and wgmma.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
