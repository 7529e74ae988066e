#pragma once
// Shared memory of gradients_kernel, of thread blocks that take one tile of keys after the other.

#include "kernels/backward/places.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/tma.cuh"

constexpr uint32_t kStatisticsBytes = 2 * kWgmmaM * sizeof(float); // of 64 queries
constexpr int kScoreSlots = 2, kTileSlots = 2; // of dS; of K and of places

// Addresses of tiles, statistics, places and barriers, of which each slot has one.
template <typename Config>
struct Layout {
    static constexpr BackwardKernelConfig cfg = Config::value;
    static constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kConsumers = B_c / kWgmmaM;
    static constexpr uint32_t kScoreBytes = kConsumers * piece_bytes(B_r);
    static constexpr uint32_t kQueryBytes = kTileBytes<B_r, cfg.d_head>; // of a tile of Q or dO
    static constexpr uint32_t kKeyBytes = kTileBytes<B_c, cfg.d_head>; // of a tile of K or V
    static constexpr int kTilePlace = cfg.varlen ? 2 * kPlaceBytes : kPlaceBytes; // of a tile
    uint32_t K_smem; // (kTileSlots, B_c, d_head)
    uint32_t V_smem; // (B_c, d_head)
    uint32_t QdO_smem; // (slots, 2, B_r, d_head)
    uint32_t dS_smem; // (kScoreSlots, B_r, B_c)
    uint32_t statistics_smem; // (slots, 2, B_r)
    uint32_t places_smem; // (kTileSlots)
    uint32_t V_full, K_full, K_empty, full, empty, dS_full, dS_empty;

    __device__ __forceinline__ explicit Layout(uint32_t smem)
        : K_smem(smem), V_smem(K_smem + kTileSlots * kKeyBytes), QdO_smem(V_smem + kKeyBytes),
          dS_smem(QdO_smem + cfg.slots * 2 * kQueryBytes),
          statistics_smem(dS_smem + kScoreSlots * kScoreBytes),
          places_smem(statistics_smem + cfg.slots * kStatisticsBytes),
          V_full(places_smem + kTileSlots * kTilePlace), K_full(V_full + kBarrierBytes),
          K_empty(K_full + kTileSlots * kBarrierBytes), full(K_empty + kTileSlots * kBarrierBytes),
          empty(full + cfg.slots * kBarrierBytes), dS_full(empty + cfg.slots * kBarrierBytes),
          dS_empty(dS_full + kScoreSlots * kBarrierBytes) {}

    // By one thread, before any other thread uses one.
    __device__ __forceinline__ void init_barriers() const {
        barrier_init(V_full, 1);
        Ring<kTileSlots>().init_barriers(K_full, K_empty, (kConsumers + 1) * kWarpgroup / 32);
        Ring<cfg.slots>().init_barriers(full, empty, B_c / kWarpRows); // by one arrival per warp
        for (int i = 0; i < kScoreSlots; ++i) {
            barrier_init(dS_full + i * kBarrierBytes, B_c / kWarpRows);
            barrier_init(dS_empty + i * kBarrierBytes, kWarpgroup / 32);
        }
        barrier_init_fence();
    }
};
