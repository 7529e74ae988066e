#pragma once
// Step 13 of the backward family: programmatic launches. Parent: b12.
//
// What changed
//   1. The thread blocks of a launch may begin while the launch before it ends. They wait for it.
//   2. The order of tiles, the turns and the layout of shared memory have moved to headers.
//
// Why: three launches follow each other, and the start of each takes about two microseconds. At
// length 512 a pass of 16 384 queries and 16 heads takes 490 of them. All threads wait, since a
// launch reads what the one before it stores, and clears what that one reads.
// Expected: 1% more TFLOP/s at length 512, half of that at 1024, and no change of long ones.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 4096, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 128: 571, 1.78. Cost: 168
// registers per thread, 225 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: on an H200 within noise of b12, with as many gains as losses of up to 2%.
//
// Phases of gradients_kernel: as b10; 1 also waits for the launch before.

#include "kernels/backward/parts.cuh"
#include "sm90/launch.cuh"

namespace b13 {

template <typename Config>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ BackwardKernelArgs args) {
    let_next_launch_begin();
    wait_for_launch_before(); // it may read what is cleared here
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *args.next_tile = 0;
    }
    if (Config::value.in_turn && threadIdx.x == 0) {
        static_assert(kTurns == kWgmmaM / kDeltaRows);
        args.turns[blockIdx.x] = 0;
    }
    clear_sums(args);
    store_statistics<Config::value.dtype, Config::value.causal>(args);
}

template <typename Config>
__global__ void __launch_bounds__(kWarpgroup)
    convert_kernel(const __grid_constant__ BackwardKernelArgs args) {
    let_next_launch_begin();
    wait_for_launch_before();
    round_sums<Config::value.dtype, Config::value.causal>(args);
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
    const Layout<Config> layout(smem_address(smem));
    const auto [K_smem, V_smem, QdO_smem, dS_smem, statistics_smem, places_smem, V_full, K_full,
                K_empty, full, empty, dS_full, dS_empty] = layout;

    const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup), lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32, warp_row = warp * kWarpRows;
    // Row i of a head's queries sees key j if j <= i + shift. Where a warpgroup has no key, it
    // takes a block that sees none.
    const int q_rows = padded_rows<cfg.causal>(args), before = rows_before<cfg.causal>(args);
    const int shift = cfg.causal ? args.len_k - args.len_q - before : args.len_k + B_c;
    auto blocks_that_see = [&](int key) { return max((q_rows - max(key - shift, 0)) / B_r, 1); };
    Ring<cfg.slots> ring;
    Ring<kTileSlots> tile, next_tile; // the present tile's slot, and that or one behind it
    Ring<kScoreSlots> dS_ring;

    // 1. barriers
    if (threadIdx.x == 0) {
        layout.init_barriers();
    }
    __syncthreads(); // no thread waits at a barrier that is not initialised
    let_next_launch_begin();
    wait_for_launch_before();

    const uint32_t dS_0 = wgmma_descriptor(dS_smem);
    const uint32_t K_rows = wgmma_descriptor(K_smem, piece_bytes(B_c));

    // 2. the third warpgroup: places, K, V, Q_i, dO_i, LSE, delta: → shared; dQ_i += dS_i @ K
    if (warpgroup == kConsumers) {
        give_registers<72>();
        const bool loads = threadIdx.x == kConsumers * kWarpgroup;
        // The first block of queries that sees a tile's keys, of the first head.
        auto first_block = [&](TilePlace keys) -> TilePlace {
            return {q_rows - blocks_that_see(keys.row) * B_r, keys.head * args.heads_per_kv,
                    keys.batch};
        };
        // What is loaded: a tile, its next block, and the blocks that are left.
        int taken = blockIdx.x, left = 0;
        TilePlace place, queries;
        auto load_next = [&](bool V_is_free) {
            // K of the tile behind the present one has a slot, but not that of a third.
            if (left == 0 && (next_tile.slot != tile.slot || next_tile.lap == tile.lap)) {
                place = place_of_keys<B_c, cfg.causal, cfg.in_turn>(args, taken);
                load_with_place<kTileBytes<B_c>>(next_tile, K_full, K_empty, K_smem, args.K,
                                                 places_smem, place);
                queries = first_block(place);
                left = place.row < 0 ? 0 : blocks_that_see(place.row) * args.heads_per_kv;
            }
            if (left > 0) {
                const int64_t row = row_index(args, queries, q_rows);
                const TilePlace Q_place = {queries.row - before, queries.head, queries.batch};
                load_pair<kTileBytes<B_r>>(ring, full, empty, QdO_smem, args.Q, args.dO, Q_place,
                                           statistics_smem, args.statistics + 2 * row);
                if ((queries.row += B_r) == q_rows) { // the next head follows
                    queries = {first_block(place).row, queries.head + 1, queries.batch};
                }
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
        auto take_turn_at = [&](int block, const float4 *sums_of_block, bool ends) {
            const int key = load_place(places_smem + tile.slot * kPlaceBytes).row;
            take_turn<B_c, cfg.causal>(args, key, block, sums_of_block, q_rows, shift, ends);
        };
        auto add_block = [&](int block, bool begins, bool is_last) {
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
                if (cfg.in_turn && piece == 0 && (begins || block % kTurnBlocks == 0)) {
                    take_turn_at(block, sums, false);
                }
                wgmma_wait<0>();
                hold(dQ_rmem);
                add(sums, dQ_rmem);
            }
            release(dS_ring, dS_empty, lane);
            if (cfg.in_turn && ((block + 1) % kTurnBlocks == 0 || block + 1 == q_rows / B_r)) {
                take_turn_at(block, sums - B_r * kDHead / 4, true);
            }
        };
        for (TilePlace own; (own = wait_for_place(tile, K_full, places_smem)).row >= 0;) {
            const int blocks = q_rows / B_r,
                      unseen = cfg.causal ? blocks - blocks_that_see(own.row) : 0;
            sums = sums_of(args, row_index(args, first_block(own), q_rows));
            int block = unseen;
            for (int left = (blocks - unseen) * args.heads_per_kv; left > 0; --left) {
                add_block(block, block == unseen, left == 1);
                if (++block == blocks) { // the next head follows
                    block = unseen;
                    sums += unseen * (B_r * kDHead / 4);
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
        pass_on<B_r, kScoreBytes>(next, full, empty, dS_ring, dS_full, dS_empty, dS_own_smem,
                                  warp_row);
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
    float mask[2]; // of a warp's keys g and g + 8
    auto compute_block = [&](int head, int i) {
        // 4. P = 2^S, 0 where masked, beside dK of the block before
        if (cfg.causal && i == 0 && key >= shift) {
            hide_keys(S_rmem, key < args.len_k ? warp_row % kWgmmaM : kWgmmaM);
        }
        exponentiate(S_rmem, args.scale, mask);
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
        const TilePlace place = wait_for_place(tile, K_full, places_smem);
        const int n_keys = args.len_k - place.row - warp_row; // the diagonal hides those behind
        mask[0] = cfg.causal || lane / 4 < n_keys ? 0 : -INFINITY;
        mask[1] = cfg.causal || lane / 4 + 8 < n_keys ? 0 : -INFINITY;
        key = place.row + warpgroup * kWgmmaM;
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
        store_sums<cfg.dtype, true>(args.dV_gmem, args.dV_strides, place, warp_row, dV_rmem, 1,
                                    args.len_k);
        store_sums<cfg.dtype, true>(args.dK_gmem, args.dK_strides, place, warp_row, dK_rmem,
                                    args.softmax_scale, args.len_k);
        __syncwarp(); // one lane arrives for what all lanes have read
        release(tile, K_empty, lane);
    }
}

} // namespace b13
