#pragma once
// Step 4 of the backward family: two warpgroups share what is copied. Parent: b3.
//
// What changed
//   1. A thread block owns 128 queries (dq_kernel) or 128 keys (dkdv_kernel), 64 for each of two
//      warpgroups, which multiply them with the same tiles.
//   2. One thread block per SM has all registers: 240 per thread that computes.
//   3. dq_kernel walks 128 keys at a time, as many as dkdv_kernel owns.
//
// Why: for 64 x 64 scores 16 KiB are copied instead of 32. With 128 keys wgmma of S and dP read 96
// bytes of shared memory per cycle instead of 128, which is all that an SM has.
// Expected: 350 TFLOP/s. The two warpgroups are free to drift apart, as the two thread blocks
// of b3 were: one multiplies while the other computes exponentials.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 4096, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 128: 460, 1.45. Cost: 168
// registers per thread, 128 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: on an H200 1% faster than b3 at lengths 512 and 1024, and 6 to 8% from 2048 on.
//
// Phases of dq_kernel; those of dkdv_kernel are the same with queries and keys exchanged
//   1. barriers
//   2. the producer: Q, dO, K_j, V_j: global → shared
//   3. S = Q @ K^T, dP = dO @ V^T
//   4. P = 2^(S - LSE), dS = P · (dP - delta)
//   5. dQ += dS @ K
//   6. dQ · softmax_scale: registers → shared → global

#include "kernels/backward/parts.cuh"

namespace b4 {

// LSE as a logarithm to base 2, and delta, of queries that are rows: g and g + 8 of a lane.
struct OfRows {
    float lse[2], delta[2];

    __device__ static constexpr int index(int i) { return i / 2 % 2; } // of accumulator i
    __device__ __forceinline__ void load(const BackwardKernelArgs &args, int64_t first) {
        const int64_t row = first + threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 4;
        for (int half = 0; half < 2; ++half) {
            lse[half] = load_lse(args, row + 8 * half);
            delta[half] = args.delta[row + 8 * half];
        }
    }
};

// The same of queries that are columns: 8n + 2t and 8n + 2t + 1 of a lane.
template <int kQueries>
struct OfColumns {
    float lse[kQueries / 4], delta[kQueries / 4];

    __device__ static constexpr int index(int i) { return i / 4 * 2 + i % 2; } // of accumulator i
    __device__ __forceinline__ void load(const BackwardKernelArgs &args, int64_t first) {
        const int64_t row = first + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < kQueries / 4; ++i) {
            lse[i] = load_lse(args, row + i / 2 * 8 + i % 2);
            delta[i] = args.delta[row + i / 2 * 8 + i % 2];
        }
    }
};

// 4. P = 2^(S · scale - LSE) in the place of S, dS = P · (dP - delta) in that of dP.
template <int kCount, typename Queries>
__device__ __forceinline__ void weigh(float (&S_rmem)[kCount], float (&dP_rmem)[kCount],
                                      float scale, const Queries &queries) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int query = queries.index(i);
        S_rmem[i] = exp2_approx(fmaf(S_rmem[i], scale, -queries.lse[query]));
        dP_rmem[i] = S_rmem[i] * (dP_rmem[i] - queries.delta[query]);
    }
}

// Loads a tile of each of two tensors into the next slot of a ring, once it is empty.
template <uint32_t kBytes, int kSlots>
__device__ __forceinline__ void load_pair(Ring<kSlots> &ring, uint32_t full, uint32_t empty,
                                          uint32_t slots_smem, const CUtensorMap &one,
                                          const CUtensorMap &other, TilePlace place) {
    const uint32_t slot_smem = slots_smem + ring.slot * 2 * kBytes;
    barrier_wait(ring.barrier(empty), ring.lap ^ 1);
    barrier_expect(ring.barrier(full), 2 * kBytes);
    tma_load_tile(slot_smem, one, ring.barrier(full), place);
    tma_load_tile(slot_smem + kBytes, other, ring.barrier(full), place);
    ring.advance();
}

template <typename Config>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ BackwardKernelArgs args) {
    store_delta<Config::value.dtype>(args);
}

template <typename Config>
__global__ void __launch_bounds__((Config::value.B_c / kWgmmaM + 1) * kWarpgroup, 1)
    dq_kernel(const __grid_constant__ BackwardKernelArgs args) {
    constexpr BackwardKernelConfig cfg = Config::value;
    static_assert(cfg.d_head == kDHead, "the kernels are written for d_head 128");
    static_assert(cfg.B_r == kWgmmaM, "the queries of a warpgroup");

    constexpr int B_r = cfg.B_r, B_c = cfg.B_c;
    constexpr int kConsumers = B_c / kWgmmaM, kKeySteps = B_c / kWgmmaK;
    constexpr int kOwn = kConsumers * B_r; // queries

    extern __shared__ __align__(kPatternBytes) Element smem[];
    const uint32_t Q_smem = smem_address(smem); // (warpgroups, B_r, d_head)
    const uint32_t dO_smem = Q_smem + kTileBytes<kOwn>; // (warpgroups, B_r, d_head)
    const uint32_t KV_smem = dO_smem + kTileBytes<kOwn>; // (slots, 2, B_c, d_head)
    const uint32_t own_full = KV_smem + cfg.slots * 2 * kTileBytes<B_c>;
    const uint32_t full = own_full + kBarrierBytes; // one per slot, like the others
    const uint32_t empty = full + cfg.slots * kBarrierBytes;

    const int warpgroup = threadIdx.x / kWarpgroup, lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x % kWarpgroup / 32 * kWarpRows;
    TilePlace place = own_place<kOwn>(args.len_q, args.heads);
    const int key_blocks = args.len_k / B_c;
    Ring<cfg.slots> ring;

    // 1. barriers
    if (threadIdx.x == 0) {
        barrier_init(own_full, 1);
        ring.init_barriers(full, empty, kOwn / kWarpRows); // by one arrival per warp
        barrier_init_fence();
    }
    __syncthreads(); // no thread waits at a barrier that is not initialised

    // 2. the producer: Q, dO, K_j, V_j: global → shared
    if (warpgroup == kConsumers) {
        give_registers<24>();
        if (threadIdx.x == kConsumers * kWarpgroup) {
            barrier_expect(own_full, 2 * kTileBytes<kOwn>);
            for (int tile = 0; tile < kConsumers; ++tile, place.row += B_r) {
                tma_load_tile(Q_smem + tile * kTileBytes<B_r>, args.Q, own_full, place);
                tma_load_tile(dO_smem + tile * kTileBytes<B_r>, args.dO, own_full, place);
            }
            for (int j = 0; j < key_blocks; ++j) {
                const TilePlace K_place = {j * B_c, place.head / args.heads_per_kv, place.batch};
                load_pair<kTileBytes<B_c>>(ring, full, empty, KV_smem, args.K, args.V, K_place);
            }
        }
        return;
    }
    take_registers<240>();

    const uint32_t own = warp_uniform(warpgroup * (kTileBytes<B_r> / 16));
    const uint32_t Q = wgmma_descriptor(Q_smem) + own, dO = wgmma_descriptor(dO_smem) + own;
    const uint32_t K_0 = wgmma_descriptor(KV_smem);
    const uint32_t K_rows_0 = wgmma_descriptor(KV_smem, piece_bytes(B_c));
    float S_rmem[B_c / 2], dP_rmem[B_c / 2], dQ_rmem[kDHead / 2] = {};
    uint32_t dS_rmem[kKeySteps][4];
    OfRows queries;
    queries.load(args, row_index(args, place));
    barrier_wait(own_full, 0);

    for (int j = 0; j < key_blocks; ++j) {
        // 3. S = Q @ K^T, dP = dO @ V^T
        const uint32_t slot = warp_uniform(ring.slot * (2 * kTileBytes<B_c> / 16));
        const uint32_t K = K_0 + slot, V = K + kTileBytes<B_c> / 16, K_rows = K_rows_0 + slot;
        barrier_wait(ring.barrier(full), ring.lap);
        hold(S_rmem);
        hold(dP_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(S_rmem, Q + column_step<B_r>(k), K + column_step<B_c>(k), k > 0);
        }
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(dP_rmem, dO + column_step<B_r>(k), V + column_step<B_c>(k), k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(S_rmem);
        hold(dP_rmem);

        // 4. P = 2^(S - LSE), dS = P · (dP - delta)
        weigh(S_rmem, dP_rmem, args.scale, queries);
#pragma unroll
        for (int k = 0; k < kKeySteps; ++k) {
            pack_fragment<cfg.dtype>(dS_rmem[k], dP_rmem, k);
        }

        // 5. dQ += dS @ K
        hold(dQ_rmem);
        hold(dS_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeySteps; ++k) {
            wgmma<cfg.dtype>(dQ_rmem, dS_rmem[k], K_rows + row_step(k), true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(dQ_rmem);
        hold(dS_rmem);
        release(ring, empty, lane);
    }

    // 6. dQ · softmax_scale: registers → shared → global; each warp through its rows of Q
    place.row += warpgroup * B_r;
    store_rows<cfg.dtype, B_r>(args.dQ, place, Q_smem + warpgroup * kTileBytes<B_r>, warp_row,
                               dQ_rmem, args.softmax_scale);
    tma_store_wait_read(); // after its end another thread block may have this memory
}

template <typename Config>
__global__ void __launch_bounds__((Config::value.B_c / kWgmmaM + 1) * kWarpgroup, 1)
    dkdv_kernel(const __grid_constant__ BackwardKernelArgs args) {
    constexpr BackwardKernelConfig cfg = Config::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c;
    constexpr int kConsumers = B_c / kWgmmaM, kQuerySteps = B_r / kWgmmaK;

    extern __shared__ __align__(kPatternBytes) Element smem[];
    const uint32_t K_smem = smem_address(smem); // (B_c, d_head)
    const uint32_t V_smem = K_smem + kTileBytes<B_c>; // (B_c, d_head)
    const uint32_t QdO_smem = V_smem + kTileBytes<B_c>; // (slots, 2, B_r, d_head)
    const uint32_t own_full = QdO_smem + cfg.slots * 2 * kTileBytes<B_r>;
    const uint32_t full = own_full + kBarrierBytes; // one per slot, like the others
    const uint32_t empty = full + cfg.slots * kBarrierBytes;

    const int warpgroup = threadIdx.x / kWarpgroup, lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * kWarpRows;
    const int q_blocks = args.len_q / B_r;
    const TilePlace place = own_place<B_c>(args.len_k, args.heads / args.heads_per_kv);
    const TilePlace first = {0, place.head * args.heads_per_kv, place.batch}; // of the queries
    // The queries of all heads that share these keys; in LSE and delta they follow each other.
    const int blocks = q_blocks * args.heads_per_kv;
    Ring<cfg.slots> ring;

    // 1. barriers
    if (threadIdx.x == 0) {
        barrier_init(own_full, 1);
        ring.init_barriers(full, empty, B_c / kWarpRows); // by one arrival per warp
        barrier_init_fence();
    }
    __syncthreads(); // no thread waits at a barrier that is not initialised

    // 2. the producer: K, V, Q_i, dO_i: global → shared
    if (warpgroup == kConsumers) {
        give_registers<24>();
        if (threadIdx.x == kConsumers * kWarpgroup) {
            barrier_expect(own_full, 2 * kTileBytes<B_c>);
            tma_load_tile(K_smem, args.K, own_full, place);
            tma_load_tile(V_smem, args.V, own_full, place);
            for (int i = 0; i < blocks; ++i) {
                const TilePlace Q_place = {i % q_blocks * B_r, first.head + i / q_blocks,
                                           place.batch};
                load_pair<kTileBytes<B_r>>(ring, full, empty, QdO_smem, args.Q, args.dO, Q_place);
            }
        }
        return;
    }
    take_registers<240>();

    const uint32_t own = warp_uniform(warpgroup * (piece_bytes(kWgmmaM) / 16));
    const uint32_t K = wgmma_descriptor(K_smem) + own, V = wgmma_descriptor(V_smem) + own;
    const uint32_t Q_0 = wgmma_descriptor(QdO_smem);
    const uint32_t Q_rows_0 = wgmma_descriptor(QdO_smem, piece_bytes(B_r));
    float S_rmem[B_r / 2], dP_rmem[B_r / 2], dK_rmem[kDHead / 2] = {}, dV_rmem[kDHead / 2] = {};
    uint32_t P_rmem[kQuerySteps][4], dS_rmem[kQuerySteps][4]; // transposed, as S and dP are
    OfColumns<B_r> queries;
    barrier_wait(own_full, 0);

    for (int i = 0; i < blocks; ++i) {
        queries.load(args, row_index(args, first) + int64_t(i) * B_r);

        // 3. S^T = K @ Q^T, dP^T = V @ dO^T
        const uint32_t slot = warp_uniform(ring.slot * (2 * kTileBytes<B_r> / 16));
        const uint32_t Q = Q_0 + slot, dO = Q + kTileBytes<B_r> / 16;
        const uint32_t Q_rows = Q_rows_0 + slot, dO_rows = Q_rows + kTileBytes<B_r> / 16;
        barrier_wait(ring.barrier(full), ring.lap);
        hold(S_rmem);
        hold(dP_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(S_rmem, K + column_step<B_c>(k), Q + column_step<B_r>(k), k > 0);
        }
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(dP_rmem, V + column_step<B_c>(k), dO + column_step<B_r>(k), k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(S_rmem);
        hold(dP_rmem);

        // 4. P = 2^(S - LSE), dS = P · (dP - delta)
        weigh(S_rmem, dP_rmem, args.scale, queries);
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            pack_fragment<cfg.dtype>(P_rmem[k], S_rmem, k);
            pack_fragment<cfg.dtype>(dS_rmem[k], dP_rmem, k);
        }

        // 5. dV += P^T @ dO, dK += dS^T @ Q
        hold(dV_rmem);
        hold(dK_rmem);
        hold(P_rmem);
        hold(dS_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            wgmma<cfg.dtype>(dV_rmem, P_rmem[k], dO_rows + row_step(k), true);
        }
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            wgmma<cfg.dtype>(dK_rmem, dS_rmem[k], Q_rows + row_step(k), true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(dV_rmem);
        hold(dK_rmem);
        hold(P_rmem);
        hold(dS_rmem);
        release(ring, empty, lane);
    }

    // 6. dV, dK · softmax_scale: registers → shared → global; each warp through its rows of V and K
    store_rows<cfg.dtype, B_c>(args.dV, place, V_smem, warp_row, dV_rmem, 1);
    store_rows<cfg.dtype, B_c>(args.dK, place, K_smem, warp_row, dK_rmem, args.softmax_scale);
    tma_store_wait_read(); // after its end another thread block may have this memory
}

} // namespace b4
