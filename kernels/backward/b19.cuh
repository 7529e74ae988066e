#pragma once
// Step 19 of the backward family: turns end late. Parent: b18.
//
// What changed
//   1. A warp ends its turn at a pair of blocks of queries when dS of the next pair is there, not
//      right behind its additions to the pair.
//
// Why: a turn ends with a release, which waits until all additions of the warp are done: about 1 us
// behind them, in which the last warpgroup issues nothing. It has 4 us for a pair. While it waits
// for the next dS, the additions arrive. The tile that has the next turn is two blocks behind, and
// does not wait longer.
// Expected: with turns 8% more TFLOP/s at length 512, half of what turns take there.
//
// benchmark:begin
// benchmark:end
// Verdict: not measured yet.
//
// Phases of gradients_kernel: as b16, whose third warpgroup is the last.

#include "kernels/backward/ends.cuh"
#include "kernels/backward/parts.cuh"
#include "kernels/backward/sequences.cuh"
#include "sm90/launch.cuh"

namespace b19 {

template <typename Config>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ BackwardKernelArgs args) {
    let_next_launch_begin();
    wait_for_launch_before(); // it may read what is cleared here
    if (blockIdx.x == 0) {
        set_counter<Config>(args);
    }
    prepare_block<Config>(args, block_from_end());
}

template <typename Config>
__global__ void __launch_bounds__(kWarpgroup)
    convert_kernel(const __grid_constant__ BackwardKernelArgs args) {
    let_next_launch_begin();
    wait_for_launch_before();
    round_block<Config>(args, block_from_end());
}

template <typename Config>
__global__ void __launch_bounds__((Config::value.B_c / kWgmmaM + 1) * kWarpgroup, 1)
    gradients_kernel(const __grid_constant__ BackwardKernelArgs args) {
    constexpr BackwardKernelConfig cfg = Config::value;
    static_assert(cfg.B_r == kWgmmaM, "the queries of the warpgroup that adds dQ");

    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, d_head = cfg.d_head;
    constexpr int kDSteps = d_head / kWgmmaK, kDPieces = d_head / kPiece, kKeySteps = B_c / kWgmmaK;
    constexpr int kConsumers = B_c / kWgmmaM, kQuerySteps = B_r / kWgmmaK;
    static_assert(kConsumers == 2 || !(cfg.window || cfg.softcap || cfg.varlen), "few registers");
    constexpr uint32_t kScoreBytes = kConsumers * piece_bytes(B_r);

    extern __shared__ __align__(kPatternBytes) Element smem[];
    const Layout<Config> layout(smem_address(smem));
    const auto [K_smem, V_smem, QdO_smem, dS_smem, statistics_smem, places_smem, V_full, K_full,
                K_empty, full, empty, dS_full, dS_empty] = layout;

    const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup), lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32, warp_row = warp * kWarpRows;
    using Blocks = typename Lengths<Config>::Blocks;
    constexpr bool kMoves = Blocks::kMoves; // a tile's first block is not that of all
    const Blocks of_head(args);
    auto place_in = [&](const auto &ring) { return places_smem + ring.slot * layout.kTilePlace; };
    auto wait_for_keys = [&](const auto &ring) {
        barrier_wait(ring.barrier(K_full), ring.lap);
        return load_place(place_in(ring));
    };
    auto blocks_of = [&](const auto &ring) { return at_place(of_head, args, place_in(ring)); };
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

    // 2. the last warpgroup: places, K, V, Q_i, dO_i, LSE, delta: → shared; dQ_i += dS_i @ K
    if (warpgroup == kConsumers) {
        give_registers<kConsumers == 2 ? 72 : 80>();
        const bool loads = threadIdx.x == kConsumers * kWarpgroup;
        typename Lengths<Config>::Loader loader{args, layout, of_head};
        for (int i = 1; loads && i < cfg.slots; ++i) {
            loader.load_next(tile, i == 1);
        }
        float dQ_rmem[kPiece / 2];
        float4 *sums = nullptr; // of the next block; those of a head's blocks follow each other
        auto own_key = [&] { return load_place(place_in(tile)).row; };
        auto take_turn_at = [&](int block, const float4 *sums_of_block, bool ends) {
            const Blocks blocks = blocks_of(tile);
            take_turn<B_c, kMoves, d_head>(args, own_key(), block, sums_of_block, blocks.rows,
                                           blocks.shift, ends, key_rows<B_c>(args, blocks));
        };
        // The first of this tile's blocks, and their end: they have no registers.
        auto first = [&] { return kMoves ? blocks_of(tile).first(own_key()) : 0; };
        auto end = [&] {
            const Blocks blocks = blocks_of(tile);
            return cfg.window ? blocks.end(own_key() + B_c - kWgmmaM) : blocks.rows / B_r;
        };
        auto add_block = [&](int block, bool is_last) {
            barrier_wait(dS_ring.barrier(dS_full), dS_ring.lap);
            if (loads) {
                loader.load_next(tile, is_last); // V has been read, since all of dS is there
            }
            if (cfg.in_turn && block % kTurnBlocks == 0 && block != first()) {
                take_turn_at(block - 1, sums - B_r * d_head / 4, true);
            }
            __syncwarp(); // wgmma takes whole warps
            const uint32_t K_slot = K_rows + warp_uniform(tile.slot * (layout.kKeyBytes / 16));
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
                if (cfg.in_turn && piece == 0 && (block % kTurnBlocks == 0 || block == first())) {
                    take_turn_at(block, sums, false);
                }
                wgmma_wait<0>();
                hold(dQ_rmem);
                add(sums, dQ_rmem);
            }
            release(dS_ring, dS_empty, lane);
            if (cfg.in_turn && block + 1 == end()) {
                take_turn_at(block, sums - B_r * d_head / 4, true);
            }
        };
        for (TilePlace own; (own = wait_for_keys(tile)).row >= 0;) {
            const Blocks blocks = blocks_of(tile);
            int block = blocks.first(own.row), left = (end() - block) * args.heads_per_kv;
            const TilePlace queries = {block * B_r, own.head * args.heads_per_kv, own.batch};
            sums = sums_of<d_head>(args, row_index(args, queries, blocks));
            for (; left > 0; --left) {
                add_block(block, left == 1);
                if (++block == end()) { // the next head follows
                    block = first();
                    sums += (blocks_of(tile).rows / B_r - end() + block) * (B_r * d_head / 4);
                }
            }
            __syncwarp(); // one lane arrives for what all lanes have read
            release(tile, K_empty, lane);
        }
        return;
    }
    take_registers<kConsumers == 2 ? 216 : 144>();

    const uint32_t own = warp_uniform(warpgroup * (piece_bytes(kWgmmaM) / 16));
    const uint32_t K_0 = wgmma_descriptor(K_smem) + own, V = wgmma_descriptor(V_smem) + own;
    const uint32_t Q_0 = wgmma_descriptor(QdO_smem);
    const uint32_t Q_rows_0 = wgmma_descriptor(QdO_smem, piece_bytes(B_r));
    const uint32_t dS_own_smem = dS_smem + warpgroup * piece_bytes(B_r);
    float S_rmem[B_r / 2], dP_rmem[B_r / 2], dK_rmem[d_head / 2] = {}, dV_rmem[d_head / 2] = {};
    uint32_t P_rmem[kQuerySteps][4], dS_rmem[kQuerySteps][4]; // transposed, as S and dP are
    uint32_t weight_rmem[kQuerySteps][4]; // P times the derivative of tanh
    const float *statistics =
        reinterpret_cast<const float *>(smem) + (statistics_smem - K_smem) / 4;

    // 3. S^T = K @ Q^T - LSE, of the next block
    Ring<cfg.slots> next; // ring or one slot ahead of it
    bool more = true; // blocks, in this tile or the next
    // Passes on the next blocks, which do not see the keys of this warpgroup: their dS is 0.
    auto skip_blocks = [&] {
        int count = 1; // of two warpgroups
        if constexpr (kConsumers > 2) {
            const int first_key = load_place(place_in(next_tile)).row;
            count = of_head.first(first_key + warpgroup * kWgmmaM) - of_head.first(first_key);
        }
        pass_on<B_r, kScoreBytes>(next, full, empty, dS_ring, dS_full, dS_empty, dS_own_smem,
                                  warp_row, count);
    };
    // Of the blocks of a tile, whether this warpgroup's first is not the first, and the first
    // warpgroup's last not the last.
    Blocks blocks = of_head;
    auto skips_first = [&](int tile_key, const Blocks &blocks) {
        return kMoves && blocks.first(tile_key + warpgroup * kWgmmaM) > blocks.first(tile_key);
    };
    auto skips_last = [&](int key) {
        return cfg.window &&
               blocks.end(key) < blocks.end(key + (kConsumers - 1 - warpgroup) * kWgmmaM);
    };
    auto multiply_S = [&] {
        const uint32_t K = K_0 + warp_uniform(next_tile.slot * (layout.kKeyBytes / 16));
        const uint32_t Q = Q_0 + warp_uniform(next.slot * (2 * layout.kQueryBytes / 16));
        barrier_wait(next.barrier(full), next.lap);
        if (!cfg.softcap) {
            begin(S_rmem, statistics + next.slot * 2 * B_r);
        }
        hold(S_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            const bool adds = !cfg.softcap || k > 0;
            wgmma<cfg.dtype>(S_rmem, K + column_step<B_c>(k), Q + column_step<B_r>(k), adds);
        }
        wgmma_commit();
    };
    const int first_key = wait_for_keys(tile).row;
    if (cfg.varlen && first_key < 0) { // no sequence has a tile for this thread block
        return;
    }
    if (skips_first(first_key, blocks_of(tile))) {
        skip_blocks();
    }
    multiply_S();
    wgmma_wait<0>();
    hold(S_rmem);

    int key = 0, seen = 0; // the first key of this warpgroup, and the blocks per head that see it
    int first_query = 0; // of the first of these, from the first query on that sees the key
    float mask[2]; // of a warp's keys g and g + 8
    auto compute_block = [&](int head, int i) {
        // 4. P = 2^S, 0 where masked, beside dK of the block before
        if (cfg.softcap) {
            limit(S_rmem, args.scale_in_cap);
        }
        const int query = first_query + i * B_r; // behind the first that sees the first key
        if (cfg.window && (query < kWgmmaM - 1 || query > blocks.width - B_r)) {
            hide(S_rmem, warp_row % kWgmmaM - query, blocks.width);
        }
        if (cfg.causal && !cfg.window && i == 0 && key >= blocks.shift) {
            hide_keys(S_rmem, cfg.varlen || key < args.len_k ? warp_row % kWgmmaM : kWgmmaM);
        }
        if (cfg.softcap) {
            weigh_P<cfg.dtype>(S_rmem, args.scale, statistics + next.slot * 2 * B_r, mask);
        } else {
            exponentiate(S_rmem, args.scale, mask);
        }
        keep_before(S_rmem);
        wgmma_wait<0>();
        hold(dK_rmem);
        hold(dS_rmem);
        if (head + i > 0) {
            release(ring, empty, lane);
        }
        ring = next;
        const uint32_t slot = warp_uniform(ring.slot * (2 * layout.kQueryBytes / 16));
        const uint32_t dO = Q_0 + slot + layout.kQueryBytes / 16;
        const uint32_t Q_rows = Q_rows_0 + slot, dO_rows = Q_rows + layout.kQueryBytes / 16;
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            if (!cfg.softcap) {
                pack_fragment<cfg.dtype>(P_rmem[k], S_rmem, k);
            }
            for (int n = 0; cfg.softcap && n < 4; ++n) {
                P_rmem[k][n] = __float_as_uint(S_rmem[8 * k + 2 * n]);
                weight_rmem[k][n] = __float_as_uint(S_rmem[8 * k + 2 * n + 1]);
            }
        }

        // 5. dP^T = V @ dO^T - delta, dV += P^T @ dO
        auto hold_dV = [&] {
            hold(dV_rmem);
            hold(P_rmem);
        };
        auto multiply_dV = [&] {
#pragma unroll
            for (int k = 0; k < kQuerySteps; ++k) {
                wgmma<cfg.dtype>(dV_rmem, P_rmem[k], dO_rows + row_step(k), true);
            }
        };
        if (cfg.softcap) { // dP takes the place of P
            hold_dV();
            wgmma_fence();
            multiply_dV();
            wgmma_commit();
            wgmma_wait<0>();
            hold_dV();
        }
        begin(dP_rmem, statistics + ring.slot * 2 * B_r + B_r);
        hold(dP_rmem);
        if (!cfg.softcap) {
            hold_dV();
        }
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(dP_rmem, V + column_step<B_c>(k), dO + column_step<B_r>(k), true);
        }
        if (!cfg.softcap) {
            multiply_dV();
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(dP_rmem);
        if (!cfg.softcap) {
            hold_dV();
        }

        // 6. dS = P · dP: registers → shared
        weigh<cfg.dtype>(cfg.softcap ? weight_rmem : P_rmem, dP_rmem);
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
        const bool passes_last = i + 1 == seen && skips_last(key);
        bool skips =
            passes_last || (i + 1 == seen && skips_first(key - warpgroup * kWgmmaM, blocks));
        if (i + 1 == seen && head + 1 == args.heads_per_kv) {
            next_tile.advance();
            const int next_key = wait_for_keys(next_tile).row;
            more = next_key >= 0;
            skips = passes_last || (more && skips_first(next_key, blocks_of(next_tile)));
            next_tile = more ? next_tile : tile;
        }
        if (more || passes_last) {
            next.advance();
        }
        if (skips) {
            skip_blocks();
        }
        if (passes_last && !more) {
            next = ring;
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
        TilePlace place = wait_for_keys(tile);
        blocks = blocks_of(tile);
        const int n_keys = args.len_k - place.row - warp_row; // the diagonal hides those behind
        mask[0] = (cfg.causal && !cfg.window) || lane / 4 < n_keys ? 0 : -INFINITY;
        mask[1] = (cfg.causal && !cfg.window) || lane / 4 + 8 < n_keys ? 0 : -INFINITY;
        if (cfg.varlen) { // keys are missing in front of the first instead
            const int before = keys_before(place_in(tile)) - place.row - warp_row;
            mask[0] = lane / 4 < before ? -INFINITY : 0;
            mask[1] = lane / 4 + 8 < before ? -INFINITY : 0;
        }
        key = place.row + warpgroup * kWgmmaM;
        seen = blocks.end(key) - blocks.first(key);
        first_query = blocks.first(key) * B_r - key + blocks.shift;
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
        place.row -= cfg.varlen ? keys_before(place_in(tile)) : 0;
        store_sums<cfg.dtype, true>(args.dV_gmem, args.dV_strides, place, warp_row, dV_rmem, 1,
                                    args.len_k);
        store_sums<cfg.dtype, true>(args.dK_gmem, args.dK_strides, place, warp_row, dK_rmem,
                                    args.softmax_scale, args.len_k);
        __syncwarp(); // one lane arrives for what all lanes have read
        release(tile, K_empty, lane);
    }
}

} // namespace b19
