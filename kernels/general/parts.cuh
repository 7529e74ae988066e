#pragma once
// Parts of the family's kernels that no step is about: slots of tiles in shared memory, which are
// filled for both thread blocks of a cluster and emptied by their warps; P as an operand.

#include <cuda.h>

#include "kernels/general/arguments.cuh"
#include "memory.cuh"
#include "sm90/cluster.cuh"
#include "sm90/exact_rows.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/softmax.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

constexpr int kWarpRows = kWgmmaM / 4;

// kSlots slots of kBytes each, in turn, with a barrier that says full and one that says empty for
// each. A role has a copy, whose ring is at the slot that the role comes to next.
template <int kSlots, uint32_t kBytes>
struct Slots {
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
        tma_load_slots<kBytes>(ring, full, empty, tiles, tensor, place);
    }
    // Each thread block's own tile, the first at `place`, the next one `apart` from it, and the
    // place itself. If there is no tile (row -1), only the place is sent.
    __device__ __forceinline__ void load_with_places(const CUtensorMap &tensor, TilePlace place,
                                                     TilePlace apart, uint32_t places) {
        tma_load_with_places<kBytes>(ring, full, empty, tiles, tensor, place, apart, places);
    }
};

// Shared memory, and the slots that a role comes to next. T: the sizes of a step's tiles.
template <typename T>
struct Memory {
    Slots<T::kQSlots, T::kQBytes> Q; // (kQSlots, B_r, d_head)
    Slots<T::cfg.K_slots, T::kKVBytes> K; // (K_slots, B_c, d_head)
    Slots<T::cfg.V_slots, T::kKVBytes> V; // (V_slots, B_c, d_head)
    uint32_t places; // one per slot of Q

    __device__ __forceinline__ Memory(uint32_t smem)
        : Q(smem, smem + Q.kAllBytes + K.kAllBytes + V.kAllBytes),
          K(Q.tiles + Q.kAllBytes, Q.full + Q.kBarriersBytes),
          V(K.tiles + K.kAllBytes, K.full + K.kBarriersBytes), places(V.full + V.kBarriersBytes) {}

    // A slot is empty when all warps that compute have given it back.
    __device__ __forceinline__ void init_barriers() const {
        constexpr int kReaders = kClusterBlocks * T::kConsumers * kWarpgroup / 32;
        Q.init_barriers(kReaders);
        K.init_barriers(kReaders);
        V.init_barriers(kReaders);
        barrier_init_fence();
    }
};

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
