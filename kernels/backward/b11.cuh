#pragma once
// Step 11 of the backward family: any lengths. Parent: b10.
//
// What changed
//   1. Statistics and sums of dQ have rows for whole blocks of each head. TMA fills rows outside of
//      Q, K, V and dO with zeros, and statistics of such queries are 0, so they add 0 to dK and dV.
//   2. A key behind the end has a logit of 0, and e^(0 - LSE) is infinite where all logits are low.
//      Where the exponent was a product it is a product and a sum: a key adds 0 or -infinity.
//   3. Causal blocks of queries begin (len_k - len_q) % 64 rows before a head's first query. So the
//      diagonal runs through corners of blocks, and the mask and the skipped block are b10's.
//   4. dQ, too, is stored from registers: TMA stores no box that begins before the tensor.
//
// Why: b10 takes one length of 64 or 128. Blocks that do not fit cost what whole ones do: 1000
// queries and keys take 16 · 8 blocks of 64 x 128, 4.9% more scores than they have. A block has the
// same 32 instructions for its exponents, FFMA instead of FMUL. If blocks began at the first query,
// the diagonal would cross two blocks of each warpgroup, and none could be skipped: with 16 tiles a
// head, 17 blocks per tile instead of 16.5.
// Expected: at whole blocks the TFLOP/s of b10, within noise. Any other length takes as long as the
// next whole one.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 4096, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 128: 552, 1.73. Cost: 168
// registers per thread, 225 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: on an H200 up to 4% slower than b10 at whole blocks. Other lengths were not measured.
//
// Phases of gradients_kernel: as b10.

#include "kernels/backward/parts.cuh"

namespace b11 {

constexpr int kScoreSlots = 2; // of dS
constexpr int kTileSlots = 2; // of K and of places

// The place of a tile of keys by its number. Behind the last tile the row is -1.
template <int B_c, bool kCausal>
__device__ __forceinline__ TilePlace tile_place(const BackwardKernelArgs &args, int tile) {
    const int rows = padded_keys<B_c>(args.len_k);
    return tile >= args.tiles ? TilePlace{-1}
           : kCausal          ? causal_place<B_c>(args, rows, tile)
                              : own_place<B_c>(rows, args.heads / args.heads_per_kv, tile);
}

template <typename Config>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ BackwardKernelArgs args) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *args.next_tile = 0;
    }
    clear_sums(args);
    store_statistics<Config::value.dtype, Config::value.causal>(args);
}

template <typename Config>
__global__ void __launch_bounds__(kWarpgroup)
    convert_kernel(const __grid_constant__ BackwardKernelArgs args) {
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
            return {q_rows - (seen - i % seen) * B_r, keys.head * args.heads_per_kv + i / seen,
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
                TilePlace Q_place = block_place(place, next++);
                const int64_t row = row_index(args, Q_place, q_rows);
                Q_place.row -= before;
                load_pair<kTileBytes<B_r>>(ring, full, empty, QdO_smem, args.Q, args.dO, Q_place,
                                           statistics_smem, args.statistics + 2 * row);
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
                sums = sums_of(args, row_index(args, block_place(own, head * seen), q_rows));
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

} // namespace b11
