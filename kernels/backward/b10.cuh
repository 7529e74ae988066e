#pragma once
// Step 10 of the backward family: causal. Parent: b9.
//
// What changed
//   1. A config may be causal, with the mask aligned to the bottom right. A tile of keys begins
//   with
//      the first block of queries that sees its first key. S is masked in the first block alone.
//   2. No query of that block sees a key of the second warpgroup, which passes the block on: its dS
//      is 0. Each query head that shares the keys begins so.
//   3. Causal tiles come longest first within a group of heads, whose tensors stay in the L2 cache.
//
// Why: at length 2048 a head has 16 tiles, which see 32, 30, … 2 blocks of queries: 17 on average.
// The second warpgroup leaves one out, so that 16.5 are computed, where 16 are half of all. K, V,
// Q, dO and the sums of dQ of a head are 3 MB. The tiles of 64 heads in the order of their lengths
// would reach over 192 MB, four times the cache, and load each block of queries from memory.
// delta_kernel and convert_kernel take as long as without a mask.
// Expected: of the TFLOP/s without a mask 63% at length 1024, 78% at 2048, 89% at 8192. Without a
// mask the same as b9.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 4096, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 128: 576, 1.76. Cost: 168
// registers per thread, 225 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: on an H200 at most 3% slower than b9 without a mask. With one b17, whose mask is the
// same, has 63% of its TFLOP/s without at length 512, 75% at 1024, 84% at 2048 and 96% at 8192,
// more than expected, and 13 to 15% more than cuDNN's.
//
// Phases of gradients_kernel
//   1. barriers
//   2. the third warpgroup: places, K, V, Q_i, dO_i, LSE, delta: → shared; dQ_i += dS_i @ K
//   3. S^T = K @ Q^T - LSE, of the next block
//   4. P = 2^S, 0 where masked
//   5. dP^T = V @ dO^T - delta, dV += P^T @ dO
//   6. dS = P · dP: registers → shared
//   7. dK += dS^T @ Q
//   8. dV, dK · softmax_scale: registers → global

#include "kernels/backward/parts.cuh"

namespace b10 {

constexpr int kScoreSlots = 2; // of dS
constexpr int kTileSlots = 2; // of K and of places

// The place of a tile of keys by its number. Behind the last tile the row is -1. Causal tiles
// differ in length: in a group of heads, whose tensors fit into the L2 cache, the longest come
// first. The last group has more heads, so that the last tiles of all are short ones.
template <int B_c, bool kCausal>
__device__ __forceinline__ TilePlace tile_place(const BackwardKernelArgs &args, int tile) {
    if (!kCausal || tile >= args.tiles) {
        return tile_place<B_c>(args, tile);
    }
    const int kv_heads = args.heads / args.heads_per_kv, head_tiles = args.len_k / B_c;
    const int before = args.tiles / head_tiles - args.last_heads; // heads of the other groups
    const int group = tile / (args.head_group * head_tiles) * args.head_group;
    const int first = tile < before * head_tiles ? group : before;
    const int heads = first < before ? min(args.head_group, before - first) : args.last_heads;
    tile -= first * head_tiles;
    const int head = first + tile % heads;
    return {tile / heads * B_c, head % kv_heads, head / kv_heads};
}

template <typename Config>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ BackwardKernelArgs args) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *args.next_tile = 0;
    }
    clear_sums(args);
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
    // Query i sees key j if j <= i + shift.
    const int shift = cfg.causal ? args.len_k - args.len_q : args.len_k;
    auto blocks_that_see = [&](int key) { return (args.len_q - max(key - shift, 0)) / B_r; };
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
        // Block i of the queries of all heads that share a tile's keys.
        auto block_place = [&](TilePlace keys, int i) -> TilePlace {
            const int seen = blocks_that_see(keys.row);
            return {args.len_q - (seen - i % seen) * B_r, keys.head * args.heads_per_kv + i / seen,
                    keys.batch};
        };
        // What is loaded: a tile, its next block, and the blocks that are left.
        int taken = blockIdx.x, next = 0, left = 0;
        TilePlace place;
        auto load_next = [&](bool V_is_free) {
            // K of the tile behind the present one has a slot, but not that of a third.
            if (left == 0 && (next_tile.slot != tile.slot || next_tile.lap == tile.lap)) {
                place = tile_place<B_c, cfg.causal>(args, taken);
                load_with_place<kTileBytes<B_c>>(next_tile, K_full, K_empty, K_smem, args.K,
                                                 places_smem, place);
                next = 0;
                left = place.row < 0 ? 0 : blocks_that_see(place.row) * args.heads_per_kv;
            }
            if (left > 0) {
                const TilePlace Q_place = block_place(place, next++);
                load_pair<kTileBytes<B_r>>(ring, full, empty, QdO_smem, args.Q, args.dO, Q_place,
                                           statistics_smem,
                                           args.statistics + 2 * row_index(args, Q_place));
                if (--left == 0) { // the answer comes while a block is computed
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
        float4 *sums = nullptr; // of the next block; those of a head's blocks follow each other
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
            const int seen = blocks_that_see(own.row);
            for (int head = 0; head < args.heads_per_kv; ++head) {
                sums = sums_of(args, row_index(args, block_place(own, head * seen)));
                for (int i = 0; i < seen; ++i) {
                    add_block(head + 1 == args.heads_per_kv && i + 1 == seen);
                }
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
    // Passes on the next block, which does not see the keys of the second warpgroup: its dS is 0.
    auto skip_block = [&] {
        barrier_wait(next.barrier(full), next.lap); // or a warp may arrive twice in a lap
        barrier_wait(dS_ring.barrier(dS_empty), dS_ring.lap ^ 1);
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            store_transposed<B_r>(dS_own_smem + dS_ring.slot * kScoreBytes, warp_row % kWgmmaM, k,
                                  {0, 0, 0, 0});
        }
        fence_async_proxy();
        __syncwarp(); // one lane arrives for what all lanes have written
        release(dS_ring, dS_full, lane);
        release(next, empty, lane);
    };
    auto skips_first = [&](int key) {
        return cfg.causal && blocks_that_see(key + warpgroup * kWgmmaM) < blocks_that_see(key);
    };
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
    if (skips_first(wait_for_place(tile, K_full, places_smem).row)) {
        skip_block();
    }
    multiply_S();
    wgmma_wait<0>();
    hold(S_rmem);

    int key = 0, seen = 0; // the first key of this warpgroup, and the blocks per head that see it
    auto compute_block = [&](int head, int i) {
        // 4. P = 2^S, 0 where masked, beside dK of the block before
        if (cfg.causal && i == 0 && key >= shift) {
            hide_keys(S_rmem, warp_row % kWgmmaM);
        }
        exponentiate(S_rmem, args.scale);
        keep_before(S_rmem);
        wgmma_wait<0>();
        hold(dK_rmem);
        hold(dS_rmem);
        if (head + i > 0) {
            release(ring, empty, lane);
        }
        ring = next;
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
        bool skips = i + 1 == seen && skips_first(key - warpgroup * kWgmmaM);
        if (i + 1 == seen && head + 1 == args.heads_per_kv) {
            next_tile.advance();
            const int next_key = wait_for_place(next_tile, K_full, places_smem).row;
            more = next_key >= 0;
            skips = more && skips_first(next_key);
            next_tile = more ? next_tile : tile;
        }
        if (more) {
            next.advance();
        }
        if (skips) {
            skip_block();
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
        key = wait_for_place(tile, K_full, places_smem).row + warpgroup * kWgmmaM;
        seen = blocks_that_see(key);
        for (int head = 0; head < args.heads_per_kv; ++head) {
            for (int i = 0; i < seen; ++i) {
                compute_block(head, i);
            }
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

} // namespace b10
