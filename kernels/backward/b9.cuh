#pragma once
// Step 9 of the backward family: persistent thread blocks. Parent: b8.
//
// What changed
//   1. There are as many thread blocks as SMs. Each takes one tile of 128 keys after the other from
//      a counter in memory, which delta_kernel sets to 0. The thread that loads asks for a tile
//      when it has loaded the last block of the one before, and writes its place beside its K.
//   2. K and the place have two slots. The ring of Q and dO and the early S run on into the next
//      tile. V has one slot: it is loaded when all warps have computed dP of the last block.
//   3. dV and dK go from registers to global memory. The four lanes of a row exchange what they
//      have, so that they store 64 bytes of it at once.
//
// Why: a thread block of b8 waits for its first K, V and Q and ends with the last dQ and two
// stores, one after the other: estimated 1500 cycles at each end, in which the tensor cores have
// little to do. A block of queries takes about 3400 cycles, so a tile takes 27,000 at length 512.
// 64 heads of 512 are 256 tiles, 2 per SM. Now the end of one tile runs beside the begin of the
// next: 3000 cycles less of 60,000. At 1024 an SM has 4 tiles of 54,000, and 9000 less of 230,000.
// Stores through shared memory would wait for the last dQ, which reads K, and the next K for them.
// Expected: 5% more TFLOP/s at length 512, 4% at 1024, 1% at 8192.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 4096, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 128: 571, 1.78. Cost: 168
// registers per thread, 225 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: on an H200 6% faster than b8 at length 512, and within 1.5% elsewhere.
//
// Phases of gradients_kernel
//   1. barriers
//   2. the third warpgroup: places, K, V, Q_i, dO_i, LSE, delta: → shared; dQ_i += dS_i @ K
//   3. S^T = K @ Q^T - LSE, of the next block
//   4. P = 2^S
//   5. dP^T = V @ dO^T - delta, dV += P^T @ dO
//   6. dS = P · dP: registers → shared
//   7. dK += dS^T @ Q
//   8. dV, dK · softmax_scale: registers → global

#include "kernels/backward/parts.cuh"

namespace b9 {

constexpr int kScoreSlots = 2; // of dS
constexpr int kTileSlots = 2; // of K and of places

// Keeps all of P before what follows: a warp barrier whose mask comes from P, as in h18. No P has a
// sign, so the mask is always all lanes, but ptxas cannot know that.
template <int kCount>
__device__ __forceinline__ void keep_before(const float (&P_rmem)[kCount]) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        bits |= __float_as_uint(P_rmem[i]);
    }
    __syncwarp(__ballot_sync(0xffffffff, int(bits) >= 0));
}

template <typename Config>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ BackwardKernelArgs args) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *args.next_tile = 0;
    }
    constexpr int kFours = kDeltaRows * kDHead / 4;
    float4 *sums = reinterpret_cast<float4 *>(args.dQ_sums) + int64_t(blockIdx.x) * kFours;
#pragma unroll
    for (int i = 0; i < kFours; i += kDeltaThreads) {
        store_gmem_16(sums + i + threadIdx.x, make_uint4(0, 0, 0, 0));
    }
    const TilePlace place = delta_place(args);
    const float delta = row_delta<Config::value.dtype>(args, place);
    if (threadIdx.x % kDeltaLanes == 0) {
        const int64_t row = row_index(args, place);
        float *statistics = args.statistics + row / kWgmmaM * 2 * kWgmmaM + row % kWgmmaM;
        statistics[0] = -load_lse(args, row) / args.scale;
        statistics[kWgmmaM] = -delta;
    }
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
    const uint32_t K_smem = smem_address(smem); // (kTileSlots, B_c, d_head)
    const uint32_t V_smem = K_smem + kTileSlots * kTileBytes<B_c>; // (B_c, d_head)
    const uint32_t QdO_smem = V_smem + kTileBytes<B_c>; // (slots, 2, B_r, d_head)
    const uint32_t dS_smem = QdO_smem + cfg.slots * 2 * kTileBytes<B_r>; // (slots, B_r, B_c)
    const uint32_t statistics_smem = dS_smem + kScoreSlots * kScoreBytes; // (slots, 2, B_r)
    const uint32_t places_smem = statistics_smem + cfg.slots * kStatisticsBytes; // (kTileSlots)
    const uint32_t V_full = places_smem + kTileSlots * kPlaceBytes;
    const uint32_t K_full = V_full + kBarrierBytes; // one per slot, like the others
    const uint32_t K_empty = K_full + kTileSlots * kBarrierBytes;
    const uint32_t full = K_empty + kTileSlots * kBarrierBytes;
    const uint32_t empty = full + cfg.slots * kBarrierBytes;
    const uint32_t dS_full = empty + cfg.slots * kBarrierBytes;
    const uint32_t dS_empty = dS_full + kScoreSlots * kBarrierBytes;

    const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup), lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * kWarpRows;
    const int q_blocks = args.len_q / B_r;
    // The queries of all heads that share a tile's keys; in LSE and delta they follow each other.
    const int blocks = q_blocks * args.heads_per_kv;
    Ring<cfg.slots> ring;
    Ring<kTileSlots> tile, next_tile; // the present tile's slot, and that or one behind it
    Ring<kScoreSlots> dS_ring;

    // 1. barriers
    if (threadIdx.x == 0) {
        barrier_init(V_full, 1);
        tile.init_barriers(K_full, K_empty, (kConsumers + 1) * kWarpgroup / 32);
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

    // 2. the third warpgroup: places, K, V, Q_i, dO_i, LSE, delta: → shared; dQ_i += dS_i @ K
    if (warpgroup == kConsumers) {
        give_registers<72>();
        const bool loads = threadIdx.x == kConsumers * kWarpgroup;
        // What is loaded: a tile, and its next block.
        int taken = blockIdx.x, next = blocks;
        TilePlace place;
        auto load_next = [&](bool V_is_free) {
            // K of the tile behind the present one has a slot, but not that of a third.
            if (next == blocks && (next_tile.slot != tile.slot || next_tile.lap == tile.lap)) {
                place = tile_place<B_c>(args, taken);
                load_with_place<kTileBytes<B_c>>(next_tile, K_full, K_empty, K_smem, args.K,
                                                 places_smem, place);
                next = place.row < 0 ? blocks : 0;
            }
            if (next < blocks) {
                const TilePlace Q_place = {next % q_blocks * B_r,
                                           place.head * args.heads_per_kv + next / q_blocks,
                                           place.batch};
                load_pair<kTileBytes<B_r>>(ring, full, empty, QdO_smem, args.Q, args.dO, Q_place,
                                           statistics_smem,
                                           args.statistics + 2 * row_index(args, Q_place));
                if (++next == blocks) { // the answer comes while a block is computed
                    taken = atomicAdd(args.next_tile, 1) + gridDim.x;
                }
            }
            if (V_is_free) {
                load_tile<kTileBytes<B_c>>(V_smem, args.V, V_full, place);
            }
        };
        for (int i = 1; loads && i < cfg.slots; ++i) {
            load_next(i == 1);
        }
        float dQ_rmem[kPiece / 2];
        float4 *sums = nullptr; // of the next block; those of a tile's blocks follow each other
        auto add_block = [&](bool is_last) {
            barrier_wait(dS_ring.barrier(dS_full), dS_ring.lap);
            if (loads) {
                load_next(is_last); // V has been read, since all of dS is there
            }
            __syncwarp(); // wgmma takes whole warps
            const uint32_t K_slot = K_rows + warp_uniform(tile.slot * (kTileBytes<B_c> / 16));
            const uint32_t dS = warp_uniform(dS_0 + dS_ring.slot * (kScoreBytes / 16));
#pragma unroll
            for (int piece = 0; piece < kDPieces; ++piece, sums += kPiece / 8 * kWarpgroup) {
                hold(dQ_rmem);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < kKeySteps; ++k) {
                    const uint32_t K = K_slot + piece * (piece_bytes(B_c) / 16) + row_step(k);
                    wgmma<cfg.dtype, true>(dQ_rmem, dS + column_step<B_r>(k), K, k > 0);
                }
                wgmma_commit();
                wgmma_wait<0>();
                hold(dQ_rmem);
                add(sums, dQ_rmem);
            }
            release(dS_ring, dS_empty, lane);
        };
        for (TilePlace own; (own = wait_for_place(tile, K_full, places_smem)).row >= 0;) {
            sums = sums_of(args, row_index(args, {0, own.head * args.heads_per_kv, own.batch}));
            for (int i = 0; i < blocks; ++i) {
                add_block(i + 1 == blocks);
            }
            release(tile, K_empty, lane);
        }
        return;
    }
    take_registers<216>();

    const uint32_t own = warp_uniform(warpgroup * (piece_bytes(kWgmmaM) / 16));
    const uint32_t K_0 = wgmma_descriptor(K_smem) + own, V = wgmma_descriptor(V_smem) + own;
    const uint32_t Q_0 = wgmma_descriptor(QdO_smem);
    const uint32_t Q_rows_0 = wgmma_descriptor(QdO_smem, piece_bytes(B_r));
    const uint32_t dS_own_smem = dS_smem + warpgroup * piece_bytes(B_r);
    float S_rmem[B_r / 2], dP_rmem[B_r / 2], dK_rmem[kDHead / 2] = {}, dV_rmem[kDHead / 2] = {};
    uint32_t P_rmem[kQuerySteps][4], dS_rmem[kQuerySteps][4]; // transposed, as S and dP are
    const float *statistics =
        reinterpret_cast<const float *>(smem) + (statistics_smem - K_smem) / 4;

    // 3. S^T = K @ Q^T - LSE, of the next block
    Ring<cfg.slots> next; // ring or one slot ahead of it
    bool more = true; // blocks, in this tile or the next
    auto multiply_S = [&] {
        const uint32_t K = K_0 + warp_uniform(next_tile.slot * (kTileBytes<B_c> / 16));
        const uint32_t Q = Q_0 + warp_uniform(next.slot * (2 * kTileBytes<B_r> / 16));
        barrier_wait(next.barrier(full), next.lap);
        begin(S_rmem, statistics + next.slot * 2 * B_r);
        hold(S_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(S_rmem, K + column_step<B_c>(k), Q + column_step<B_r>(k), true);
        }
        wgmma_commit();
    };
    wait_for_place(tile, K_full, places_smem);
    multiply_S();
    wgmma_wait<0>();
    hold(S_rmem);

    auto compute_block = [&](int i) {
        // 4. P = 2^S, beside dK of the block before
        exponentiate(S_rmem, args.scale);
        keep_before(S_rmem);
        wgmma_wait<0>();
        hold(dK_rmem);
        hold(dS_rmem);
        if (i > 0) {
            release(ring, empty, lane);
        }
        const uint32_t slot = warp_uniform(ring.slot * (2 * kTileBytes<B_r> / 16));
        const uint32_t dO = Q_0 + slot + kTileBytes<B_r> / 16;
        const uint32_t Q_rows = Q_rows_0 + slot, dO_rows = Q_rows + kTileBytes<B_r> / 16;
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            pack_fragment<cfg.dtype>(P_rmem[k], S_rmem, k);
        }

        // 5. dP^T = V @ dO^T - delta, dV += P^T @ dO
        begin(dP_rmem, statistics + ring.slot * 2 * B_r + B_r);
        hold(dP_rmem);
        hold(dV_rmem);
        hold(P_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(dP_rmem, V + column_step<B_c>(k), dO + column_step<B_r>(k), true);
        }
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            wgmma<cfg.dtype>(dV_rmem, P_rmem[k], dO_rows + row_step(k), true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(dP_rmem);
        hold(dV_rmem);
        hold(P_rmem);

        // 6. dS = P · dP: registers → shared
        weigh<cfg.dtype>(P_rmem, dP_rmem);
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

        // 3. S^T of the next block, in the next tile; after the last once more, for nothing
        if (i + 1 == blocks) {
            next_tile.advance();
            more = wait_for_place(next_tile, K_full, places_smem).row >= 0;
            next_tile = more ? next_tile : tile;
        }
        if (more) {
            next.advance();
        }
        multiply_S();

        // 7. dK += dS^T @ Q
        hold(dK_rmem);
        hold(dS_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            wgmma<cfg.dtype>(dK_rmem, dS_rmem[k], Q_rows + row_step(k), true);
        }
        wgmma_commit();
        wgmma_wait<1>(); // S
        hold(S_rmem);
    };
    while (more) {
        barrier_wait(V_full, tile.slot); // the lap of its one slot, since K has two
        for (int i = 0; i < blocks; ++i) {
            compute_block(i);
        }
        wgmma_wait<0>();
        hold(dK_rmem);
        hold(dS_rmem);
        release(ring, empty, lane);

        // 8. dV, dK · softmax_scale: registers → global
        const TilePlace place = wait_for_place(tile, K_full, places_smem);
        store_sums<cfg.dtype>(args.dV_gmem, args.dV_strides, place, warp_row, dV_rmem, 1);
        store_sums<cfg.dtype>(args.dK_gmem, args.dK_strides, place, warp_row, dK_rmem,
                              args.softmax_scale);
        __syncwarp(); // one lane arrives for what all lanes have read
        release(tile, K_empty, lane);
    }
}

} // namespace b9
