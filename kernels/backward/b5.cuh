#pragma once
// Step 5 of the backward family: dK, dV and dQ in one kernel. Parent: b4.
//
// What changed
//   1. dq_kernel is left out. gradients_kernel, which was dkdv_kernel, stores dS in two slots of
//      shared memory too. The two warpgroups take turns: of each second block one of them
//      multiplies dS of both by K.
//   2. It adds this part of dQ to sums in fp32, which lie in memory in the order of accumulators.
//   3. delta_kernel clears the sums, and convert_kernel makes dQ of them.
//
// Why: five products instead of seven. For 64 x 128 scores they take 2560 cycles of the tensor
// cores instead of 3584. The price is 32 KiB of additions for these scores, 13 bytes per cycle and
// SM, and 1024 bytes per query to clear the sums and to read them. A buffer that is cleared before
// delta_kernel would cost the same bytes and one more launch. Thread blocks add in any order, so
// that two calls may differ in the last bits of dQ.
// Expected: 400 TFLOP/s at length 8192 instead of 350. A warpgroup has four products of its own and
// half of dQ's in a row, and waits for the other's dS.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 4096, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 128: 501, 1.55. Cost: 168
// registers per thread, 160 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: on an H200 4% faster than b4 at length 512 and 6 to 10% from 1024 on, half of what was
// expected at 8192. Seven products cost less than their share.
//
// Phases of gradients_kernel
//   1. barriers
//   2. the producer: K, V, Q_i, dO_i: global → shared
//   3. S^T = K @ Q^T, dP^T = V @ dO^T
//   4. P = 2^(S - LSE), dS = P · (dP - delta)
//   5. dS: registers → shared
//   6. dV += P^T @ dO, dK += dS^T @ Q
//   7. every second block: dQ_i += dS @ K
//   8. dV, dK · softmax_scale: registers → shared → global

#include "kernels/backward/parts.cuh"

namespace b5 {

constexpr int kScoreSlots = 2; // of dS

// LSE as a logarithm to base 2, and delta, of queries that are columns: 8n + 2t and 8n + 2t + 1 of
// a lane.
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
    constexpr int kFours = kDeltaRows * kDHead / 4;
    float4 *sums = reinterpret_cast<float4 *>(args.dQ_sums) + int64_t(blockIdx.x) * kFours;
#pragma unroll
    for (int i = 0; i < kFours; i += kDeltaThreads) {
        store_gmem_16(sums + i + threadIdx.x, make_uint4(0, 0, 0, 0));
    }
    store_delta<Config::value.dtype>(args);
}

template <typename Config>
__global__ void __launch_bounds__(kWarpgroup)
    convert_kernel(const __grid_constant__ BackwardKernelArgs args) {
    constexpr BackwardKernelConfig cfg = Config::value;
    extern __shared__ __align__(kPatternBytes) Element smem[]; // (B_r, d_head)
    convert_sums<cfg.dtype, cfg.B_r>(args, smem_address(smem));
}

template <typename Config>
__global__ void __launch_bounds__((Config::value.B_c / kWgmmaM + 1) * kWarpgroup, 1)
    gradients_kernel(const __grid_constant__ BackwardKernelArgs args) {
    constexpr BackwardKernelConfig cfg = Config::value;
    static_assert(cfg.d_head == kDHead, "the kernels are written for d_head 128");
    static_assert(cfg.B_r == kWgmmaM, "the queries of a warpgroup");

    constexpr int B_r = cfg.B_r, B_c = cfg.B_c;
    constexpr int kConsumers = B_c / kWgmmaM, kQuerySteps = B_r / kWgmmaK;
    constexpr int kKeySteps = B_c / kWgmmaK;
    constexpr uint32_t kScoreBytes = kConsumers * piece_bytes(B_r);

    extern __shared__ __align__(kPatternBytes) Element smem[];
    const uint32_t K_smem = smem_address(smem); // (B_c, d_head)
    const uint32_t V_smem = K_smem + kTileBytes<B_c>; // (B_c, d_head)
    const uint32_t QdO_smem = V_smem + kTileBytes<B_c>; // (slots, 2, B_r, d_head)
    const uint32_t dS_smem = QdO_smem + cfg.slots * 2 * kTileBytes<B_r>; // (slots, B_r, B_c)
    const uint32_t own_full = dS_smem + kScoreSlots * kScoreBytes;
    const uint32_t full = own_full + kBarrierBytes; // one per slot, like the others
    const uint32_t empty = full + cfg.slots * kBarrierBytes;
    const uint32_t dS_full = empty + cfg.slots * kBarrierBytes;
    const uint32_t dS_empty = dS_full + kScoreSlots * kBarrierBytes;

    const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup), lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * kWarpRows;
    const int q_blocks = args.len_q / B_r;
    const TilePlace place = own_place<B_c>(args.len_k, args.heads / args.heads_per_kv);
    const TilePlace first = {0, place.head * args.heads_per_kv, place.batch}; // of the queries
    // The queries of all heads that share these keys; in LSE and delta they follow each other.
    const int blocks = q_blocks * args.heads_per_kv;
    Ring<cfg.slots> ring;
    Ring<kScoreSlots> dS_ring;

    // 1. barriers
    if (threadIdx.x == 0) {
        barrier_init(own_full, 1);
        ring.init_barriers(full, empty, B_c / kWarpRows); // by one arrival per warp
        for (int i = 0; i < kScoreSlots; ++i) {
            barrier_init(dS_full + i * kBarrierBytes, B_c / kWarpRows);
            barrier_init(dS_empty + i * kBarrierBytes, kWarpgroup / 32);
        }
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
    const uint32_t dS_0 = wgmma_descriptor(dS_smem);
    const uint32_t K_rows = wgmma_descriptor(K_smem, piece_bytes(B_c));
    const uint32_t dS_own_smem = dS_smem + warpgroup * piece_bytes(B_r);
    float S_rmem[B_r / 2], dP_rmem[B_r / 2], dK_rmem[kDHead / 2] = {}, dV_rmem[kDHead / 2] = {};
    float dQ_rmem[kDHead / 2];
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

        // 5. dS: registers → shared
        barrier_wait(dS_ring.barrier(dS_empty), dS_ring.lap ^ 1);
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            store_transposed<B_r>(dS_own_smem + dS_ring.slot * kScoreBytes, warp_row % kWgmmaM, k,
                                  dS_rmem[k]);
        }
        fence_async_proxy();
        __syncwarp(); // one lane arrives for what all lanes have written
        if (lane == 0) {
            barrier_arrive(dS_ring.barrier(dS_full));
        }

        // 6. dV += P^T @ dO, dK += dS^T @ Q
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

        // 7. every second block: dQ_i += dS @ K
        if (i % kConsumers == warpgroup) {
            barrier_wait(dS_ring.barrier(dS_full), dS_ring.lap);
            const uint32_t dS = warp_uniform(dS_0 + dS_ring.slot * (kScoreBytes / 16));
            hold(dQ_rmem);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kKeySteps; ++k) {
                wgmma<cfg.dtype, true>(dQ_rmem, dS + column_step<B_r>(k), K_rows + row_step(k),
                                       k > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
            hold(dQ_rmem);
            if (lane == 0) {
                barrier_arrive(dS_ring.barrier(dS_empty));
            }
            add(sums_of(args, row_index(args, first) + int64_t(i) * B_r), dQ_rmem);
        }
        dS_ring.advance();
    }

    // 8. dV, dK · softmax_scale: registers → shared → global; each warp through its rows of V and K
    store_rows<cfg.dtype, B_c>(args.dV, place, V_smem, warp_row, dV_rmem, 1);
    wait_until_empty(dS_ring, dS_empty); // then no warpgroup reads K any more
    store_rows<cfg.dtype, B_c>(args.dK, place, K_smem, warp_row, dK_rmem, args.softmax_scale);
    tma_store_wait_read(); // after its end another thread block may have this memory
}

} // namespace b5
