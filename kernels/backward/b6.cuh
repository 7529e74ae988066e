#pragma once
// Step 6 of the backward family: a third warpgroup multiplies dS by K. Parent: b5.
//
// What changed
//   1. The producer's warpgroup computes dQ, too: two products of 64 columns each, one after the
//      other. The warpgroups that have dS no longer take turns, and wait for no other's dS.
//   2. They have 216 registers instead of 240, which leave 72 for the third. 216 have no room for
//      S beside dP: P is computed first and kept in 16 bits, and dS is computed from the rounded P.
//   3. Q and dO have three slots: a warpgroup that also multiplies loads two blocks ahead. Block i
//      goes into the slot of block i - 3, which is empty as soon as dS of block i - 2 is there.
//
// Why: a warpgroup of b5 has in a row the four products for its 64 keys, 1024 cycles, every second
// time dQ's 512 and 16 additions, and about 600 cycles of other instructions. Both together use the
// tensor cores only as far as one multiplies while the other does not. With three each has fewer
// products in a row, and two can multiply beside the exponentials of a third. The price: products
// with 64 columns read 128 bytes of shared memory per cycle, where 128 columns read 96.
// Expected: 470 TFLOP/s at length 8192 instead of 400.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 4096, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 128: 525, 1.63. Cost: 168
// registers per thread, 192 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: on an H200 2% faster than b5 at length 512 and 5 to 7% from 1024 on, a third of what was
// expected, and not behind cuDNN.
//
// Phases of gradients_kernel
//   1. barriers
//   2. the third warpgroup: K, V, Q_i, dO_i: global → shared; dQ_i += dS_i @ K
//   3. S^T = K @ Q^T
//   4. P = 2^(S - LSE)
//   5. dP^T = V @ dO^T
//   6. dS = P · (dP - delta): registers → shared
//   7. dV += P^T @ dO, dK += dS^T @ Q
//   8. dV, dK · softmax_scale: registers → shared → global

#include "kernels/backward/parts.cuh"

namespace b6 {

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

// 4. P = 2^(S · scale - LSE) in the place of S.
template <int kCount, typename Queries>
__device__ __forceinline__ void exponentiate(float (&S_rmem)[kCount], float scale,
                                             const Queries &queries) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        S_rmem[i] = exp2_approx(fmaf(S_rmem[i], scale, -queries.lse[queries.index(i)]));
    }
}

// 6. dS = P · (dP - delta) in the place of dP. P_rmem[k][i] has P of 8k + 2i and 8k + 2i + 1.
template <DType kDType, int kSteps, typename Queries>
__device__ __forceinline__ void weigh(const uint32_t (&P_rmem)[kSteps][4],
                                      float (&dP_rmem)[8 * kSteps], const Queries &queries) {
#pragma unroll
    for (int i = 0; i < 8 * kSteps; ++i) {
        const float P = to_float<kDType>(Element(P_rmem[i / 8][i / 2 % 4] >> i % 2 * 16));
        dP_rmem[i] = P * (dP_rmem[i] - queries.delta[queries.index(i)]);
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
    static_assert(cfg.B_r == kWgmmaM, "the queries of the third warpgroup");

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

    const uint32_t dS_0 = wgmma_descriptor(dS_smem);
    const uint32_t K_rows = wgmma_descriptor(K_smem, piece_bytes(B_c));

    // 2. the third warpgroup: K, V, Q_i, dO_i: global → shared; dQ_i += dS_i @ K
    if (warpgroup == kConsumers) {
        give_registers<72>();
        const bool loads = threadIdx.x == kConsumers * kWarpgroup;
        if (loads) {
            barrier_expect(own_full, 2 * kTileBytes<B_c>);
            tma_load_tile(K_smem, args.K, own_full, place);
            tma_load_tile(V_smem, args.V, own_full, place);
        }
        float dQ_rmem[kPiece / 2];
        for (int i = 1 - cfg.slots; i < blocks; ++i) {
            if (i >= 0) {
                barrier_wait(dS_ring.barrier(dS_full), dS_ring.lap);
            }
            if (const int next = i + cfg.slots - 1; loads && next < blocks) {
                const TilePlace Q_place = {next % q_blocks * B_r, first.head + next / q_blocks,
                                           place.batch};
                load_pair<kTileBytes<B_r>>(ring, full, empty, QdO_smem, args.Q, args.dO, Q_place);
            }
            __syncwarp(); // wgmma takes whole warps
            if (i < 0) {
                continue; // nothing but loads
            }
            const uint32_t dS = warp_uniform(dS_0 + dS_ring.slot * (kScoreBytes / 16));
            float4 *sums = sums_of(args, row_index(args, first) + int64_t(i) * B_r);
#pragma unroll
            for (int piece = 0; piece < kDPieces; ++piece, sums += kPiece / 8 * kWarpgroup) {
                hold(dQ_rmem);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < kKeySteps; ++k) {
                    const uint32_t K = K_rows + piece * (piece_bytes(B_c) / 16) + row_step(k);
                    wgmma<cfg.dtype, true>(dQ_rmem, dS + column_step<B_r>(k), K, k > 0);
                }
                wgmma_commit();
                wgmma_wait<0>();
                hold(dQ_rmem);
                add(sums, dQ_rmem);
            }
            release(dS_ring, dS_empty, lane);
        }
        return;
    }
    take_registers<216>();

    const uint32_t own = warp_uniform(warpgroup * (piece_bytes(kWgmmaM) / 16));
    const uint32_t K = wgmma_descriptor(K_smem) + own, V = wgmma_descriptor(V_smem) + own;
    const uint32_t Q_0 = wgmma_descriptor(QdO_smem);
    const uint32_t Q_rows_0 = wgmma_descriptor(QdO_smem, piece_bytes(B_r));
    const uint32_t dS_own_smem = dS_smem + warpgroup * piece_bytes(B_r);
    float S_rmem[B_r / 2], dP_rmem[B_r / 2], dK_rmem[kDHead / 2] = {}, dV_rmem[kDHead / 2] = {};
    uint32_t P_rmem[kQuerySteps][4], dS_rmem[kQuerySteps][4]; // transposed, as S and dP are
    OfColumns<B_r> queries;
    barrier_wait(own_full, 0);

    for (int i = 0; i < blocks; ++i) {
        queries.load(args, row_index(args, first) + int64_t(i) * B_r);

        // 3. S^T = K @ Q^T
        const uint32_t slot = warp_uniform(ring.slot * (2 * kTileBytes<B_r> / 16));
        const uint32_t Q = Q_0 + slot, dO = Q + kTileBytes<B_r> / 16;
        const uint32_t Q_rows = Q_rows_0 + slot, dO_rows = Q_rows + kTileBytes<B_r> / 16;
        barrier_wait(ring.barrier(full), ring.lap);
        hold(S_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(S_rmem, K + column_step<B_c>(k), Q + column_step<B_r>(k), k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(S_rmem);

        // 4. P = 2^(S - LSE)
        exponentiate(S_rmem, args.scale, queries);
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            pack_fragment<cfg.dtype>(P_rmem[k], S_rmem, k);
        }

        // 5. dP^T = V @ dO^T
        hold(dP_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(dP_rmem, V + column_step<B_c>(k), dO + column_step<B_r>(k), k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(dP_rmem);

        // 6. dS = P · (dP - delta): registers → shared
        weigh<cfg.dtype>(P_rmem, dP_rmem, queries);
        barrier_wait(dS_ring.barrier(dS_empty), dS_ring.lap ^ 1);
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            pack_fragment<cfg.dtype>(dS_rmem[k], dP_rmem, k);
            store_transposed<B_r>(dS_own_smem + dS_ring.slot * kScoreBytes, warp_row % kWgmmaM, k,
                                  dS_rmem[k]);
        }
        fence_async_proxy();
        __syncwarp(); // one lane arrives for what all lanes have written
        release(dS_ring, dS_full, lane);

        // 7. dV += P^T @ dO, dK += dS^T @ Q
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

    // 8. dV, dK · softmax_scale: registers → shared → global; each warp through its rows of V and K
    store_rows<cfg.dtype, B_c>(args.dV, place, V_smem, warp_row, dV_rmem, 1);
    wait_until_empty(dS_ring, dS_empty); // then the third warpgroup no longer reads K
    store_rows<cfg.dtype, B_c>(args.dK, place, K_smem, warp_row, dK_rmem, args.softmax_scale);
    tma_store_wait_read(); // after its end another thread block may have this memory
}

} // namespace b6
