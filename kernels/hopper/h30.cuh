#pragma once
// Step 30 of the hopper family: a tile is taken late. Parent: h29.
//
// What changed
//   1. The producer takes the next tile after all loads of this one, not before its first keys.
//
// Why: the cluster that takes a long tile last ends last. A tile that is taken when the one before
// begins waits for up to two tiles. The counter answers after 900 cycles, and the next slot is free
// 2048 cycles later, so taking late delays no load.
// Expected: in one causal sequence of 4096 with 16 heads the busiest cluster has 3.1% more work
// than the mean instead of 7.4%: 4% there, 1% at 8192, within 1% in batches.
//
// benchmark:begin
// Measured in bursts (NVIDIA H100 80GB HBM3, CUDA 13.0, bf16), TFLOP/s at length 4096, and share
// of PyTorch's flash backend in the harmonic mean over lengths. B_r 128, B_c 128, 8 warps: 827,
// 2.17. Cost: 168 registers per thread, 224 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: no gain that the clock can tell: 605 TFLOP/s for one causal sequence of 4096, 601
// before. Without a mask 216.8% of flash, 217.2% before.
//
// Phases
//   1. barriers
//   2. the producer: Q, K_{j+1}, V_j: global → shared of both blocks; block 0: last visible keys
//   3. S = Q @ K_0^T, -inf where masked, P = 2^(S - m), of the first tile
//   4. S = Q @ K_j^T; O / l and LSE of the last tile: registers → shared → global; O += P @ V_{j-1}
//   5. l, P = 2^(S - m); in fp16 m, P, O = O · rescale if m must grow
//   6. S = Q @ K_0^T of the next tile, O += P @ V
//   7. rows that left the range of fp32, computed again

#include "flash_attention.cuh"
#include "memory.cuh"
#include "sm90/arguments.cuh"
#include "sm90/cluster.cuh"
#include "sm90/exact_rows.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/softmax.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace h30 {

constexpr int kDHead = 128;
constexpr int kQSlots = 2;
constexpr int kDPieces = kDHead / kPiece;
constexpr int kDSteps = kDHead / kWgmmaK;
constexpr int kWarpRows = kWgmmaM / 4;

template <typename Config>
__global__ void __cluster_dims__(kClusterBlocks, 1, 1)
    __launch_bounds__(Config::value.n_threads(), 1)
        forward_kernel(const __grid_constant__ HopperKernelArgs args) {
    constexpr HopperKernelConfig cfg = Config::value;
    static_assert(cfg.d_head == kDHead, "the kernels are written for d_head 128");
    static_assert(cfg.B_r % kWgmmaM == 0, "64 rows for each warpgroup");

    constexpr int B_r = cfg.B_r, B_c = cfg.B_c;
    constexpr int kConsumers = B_r / kWgmmaM, kPVSteps = B_c / kWgmmaK; // warpgroups that compute
    constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
    constexpr bool kStoresLate = kConsumers < 3; // three have too few registers to keep O
    constexpr Edges kEdges = cfg.causal ? Edges::kCausal : Edges::kTensors;
    // Most blocks that only others see: they keep their slots while a warpgroup waits for the next.
    constexpr int kMostUnseen = cfg.causal ? (kClusterBlocks * B_r - kWgmmaM + B_c - 1) / B_c : 0;
    static_assert(kMostUnseen < cfg.K_slots && kMostUnseen <= cfg.V_slots, "others need these");
    constexpr int kFewKeys = 64; // of block 0, for a warpgroup that sees no more of them
    constexpr bool kFew = cfg.causal && B_c == 2 * kFewKeys;
    constexpr uint32_t kQBytes = kDPieces * piece_bytes(B_r);
    constexpr uint32_t kKVBytes = kDPieces * piece_bytes(B_c);

    extern __shared__ __align__(kPatternBytes) Element smem[];
    const uint32_t Q_smem = smem_address(smem); // (kQSlots, B_r, d_head)
    const uint32_t K_smem = Q_smem + kQSlots * kQBytes; // (K_slots, B_c, d_head)
    const uint32_t V_smem = K_smem + cfg.K_slots * kKVBytes; // (V_slots, B_c, d_head)
    const uint32_t Q_full = V_smem + cfg.V_slots * kKVBytes;
    const uint32_t Q_empty = Q_full + kQSlots * kBarrierBytes; // one per slot, like the others
    const uint32_t K_full = Q_empty + kQSlots * kBarrierBytes;
    const uint32_t K_empty = K_full + cfg.K_slots * kBarrierBytes;
    const uint32_t V_full = K_empty + cfg.K_slots * kBarrierBytes;
    const uint32_t V_empty = V_full + cfg.V_slots * kBarrierBytes;
    const uint32_t places_smem = V_empty + cfg.V_slots * kBarrierBytes; // one per slot of Q

    const int warpgroup = threadIdx.x / kWarpgroup; // its rows begin at 64 · warpgroup
    const int warp_row = threadIdx.x / 32 * kWarpRows, lane = threadIdx.x % 32;
    const int rank = cluster_rank();
    const TilePlace apart = blocks_apart<B_r>(args); // from the first block's tile to the second's
    auto key_blocks_before = [&](int end) { return seen_blocks<B_c, kEdges>(end, args); };
    Ring<kQSlots> Q_ring;
    Ring<cfg.K_slots> K_ring;
    Ring<cfg.V_slots> V_ring;

    // 1. barriers
    if (threadIdx.x == 0) {
        Q_ring.init_barriers(Q_full, Q_empty, kClusterBlocks * kConsumerWarps);
        K_ring.init_barriers(K_full, K_empty, kClusterBlocks * kConsumerWarps);
        V_ring.init_barriers(V_full, V_empty, kClusterBlocks * kConsumerWarps);
        barrier_init_fence();
    }
    cluster_sync_relaxed(); // no thread waits at a barrier that is not initialised

    // 2. the producer: Q, K_{j+1}, V_j: global → shared
    if (warpgroup == kConsumers) {
        give_registers<kConsumers == 3 ? 32 : cfg.causal ? 40 : 24>();
        if (rank == 0 && threadIdx.x == kConsumers * kWarpgroup) {
            TilePlace V_place = {-1}; // of the next V: row is its first key, -1 if there is none
            auto load_V = [&] {
                tma_load_slots<kKVBytes>(V_ring, V_full, V_empty, V_smem, args.V, V_place);
            };
            auto publish_tile = [&](TilePlace place) { // and load Q, to each block its own
                tma_load_with_places<kQBytes>(Q_ring, Q_full, Q_empty, Q_smem, args.Q, place, apart,
                                              places_smem);
            };
            for (int tile = blockIdx.x / kClusterBlocks, next; tile < args.tiles; tile = next) {
                const TilePlace place = cluster_place<B_r, kEdges>(tile, args);
                const int key_blocks = key_blocks_before(place.row + apart.row + B_r);
                publish_tile(place);
                for (int j = 0; j < key_blocks; ++j) {
                    const TilePlace K_place = {(key_blocks - 1 - j) * B_c,
                                               place.head / args.heads_per_kv, place.batch};
                    tma_load_slots<kKVBytes>(K_ring, K_full, K_empty, K_smem, args.K, K_place);
                    if (V_place.row >= 0) {
                        load_V();
                    }
                    V_place = K_place;
                }
                next = take_tile<cfg.causal, kClusterBlocks>(tile, args);
            }
            load_V();
            cluster_fence(); // the list of taken tiles, for rows that are computed again
            publish_tile({-1}); // no more tiles; this block stays until all slots are back:
            barrier_wait(Q_ring.barrier(Q_empty), Q_ring.lap ^ 1); // the last tile's, next in turn
            wait_until_empty(K_ring, K_empty);
            wait_until_empty(V_ring, V_empty);
        }
        return;
    }
    take_registers<kConsumers == 3 ? 160 : cfg.causal ? 232 : 240>(); // together at most 65536

    // One arrival per warp: after its own wait the wgmma of its rows no longer read the slot.
    auto release = [&](uint32_t empty) {
        if (lane == 0) {
            cluster_barrier_arrive(in_block(empty, 0));
        }
    };
    const uint32_t Q_0 = wgmma_descriptor(Q_smem + warpgroup * piece_bytes(kWgmmaM));
    const uint32_t K_0 = wgmma_descriptor(K_smem);
    const uint32_t V_0 = wgmma_descriptor(V_smem, piece_bytes(B_c));
    float O_rmem[kDHead / 2], S_rmem[B_c / 2];
    uint32_t P_rmem[kPVSteps][4];
    bool few_P = false; // P has only kFewKeys columns
    float m[2], l[2], rescale[2];

    auto end_turn = [&] { end_turn_of<cfg.ping_pong, kConsumers>(warpgroup); };
    auto take_turn = [&] { wait_for_turn<cfg.ping_pong>(warpgroup); };
    uint32_t stored_empty = 0; // the barrier of the slot that O is stored from, 0 for none
    auto release_stored = [&] {
        if (stored_empty && lane == 0) {
            tma_store_wait_read(); // the next Q may be loaded now
            cluster_barrier_arrive(in_block(stored_empty, 0));
        }
        stored_empty = 0;
    };
    uint32_t again = 0; // bit n % 32: this warp computes its rows of the n-th tile again
    // The tile that is computed but not stored: its index n, -1 if none; its slot of Q; m and l.
    int O_n = -1;
    uint32_t O_slot = 0;
    float O_m[2] = {}, O_l[2] = {};
    auto store_O = [&] { // through this warp's rows of the slot of Q
        if (O_n < 0) {
            return;
        }
        const uint32_t O_smem = Q_smem + O_slot * kQBytes;
        const TilePlace place = load_place(places_smem + O_slot * kPlaceBytes);
        float inverse_l[2];
        const bool fits = finish_sums<kEdges>(args, place, warp_row, O_m, O_l, inverse_l);
        if (!__all_sync(0xffffffff, fits && all_finite<4>(O_rmem))) {
            again |= 1u << O_n % 32;
        }
        scale_rows(O_rmem, inverse_l);
        store_rows<cfg.dtype, B_r>(args, place, O_smem, warp_row, O_rmem);
        stored_empty = Q_empty + O_slot * kBarrierBytes;
        O_n = -1;
    };
    auto issue_S = [&](auto &S) { // S = Q @ K^T
        const uint32_t K = warp_uniform(K_0 + K_ring.slot * (kKVBytes / 16));
        const uint32_t Q = warp_uniform(Q_0 + Q_ring.slot * (kQBytes / 16));
        barrier_wait(K_ring.barrier(K_full), K_ring.lap);
        hold(S);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(S, Q + column_step<B_r>(k), K + column_step<B_c>(k), k > 0);
        }
        wgmma_commit();
    };
    auto finish_S = [&](auto &S) {
        hold(S);
        release(K_ring.barrier(K_empty));
        K_ring.advance();
    };
    auto issue_O = [&](int j, int steps) { // O += P @ V_j
        if (kStoresLate && j == 0) { // the other warpgroup's turn, while O is stored
            end_turn();
            store_O();
        }
        const uint32_t V = warp_uniform(V_0 + V_ring.slot * (kKVBytes / 16));
        barrier_wait(V_ring.barrier(V_full), V_ring.lap);
        hold(O_rmem);
        hold(P_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < steps; ++k) {
            wgmma<cfg.dtype>(O_rmem, P_rmem[k], V + row_step(k), j > 0 || k > 0);
        }
        wgmma_commit();
        if (!kStoresLate || j > 0) {
            end_turn();
        }
    };
    auto finish_O = [&] {
        hold(O_rmem);
        hold(P_rmem);
        release(V_ring.barrier(V_empty));
        V_ring.advance();
    };
    auto pack_P = [&](auto &S) {
        few_P = sizeof(S) < sizeof(S_rmem);
#pragma unroll
        for (int k = 0; k < kPVSteps; ++k) {
            if (few_P && k >= kFewKeys / kWgmmaK) {
                P_rmem[k][0] = P_rmem[k][1] = P_rmem[k][2] = P_rmem[k][3] = 0;
            } else {
                pack_fragment<cfg.dtype>(P_rmem[k], S, k);
            }
        }
    };
    // The tile of S: blocks of keys seen (0: no tile) and skipped before them; the lane's row g.
    int key_blocks = 0, unseen_blocks = 0, query = 0;
    auto skip_block = [&](auto &ring, uint32_t full, uint32_t empty) {
        barrier_wait(ring.barrier(full), ring.lap); // or a warp may arrive twice in a lap
        release(ring.barrier(empty));
        ring.advance();
    };
    auto next_tile = [&] {
        barrier_wait(Q_ring.barrier(Q_full), Q_ring.lap);
        const TilePlace place = load_place(places_smem + Q_ring.slot * kPlaceBytes);
        key_blocks =
            place.row < 0 ? 0 : key_blocks_before(place.row + (1 - rank) * apart.row + B_r);
        query = place.row + warp_row + lane / 4;
        if (kMostUnseen > 0 && key_blocks > 0) {
            const int seen = key_blocks_before(place.row + (warpgroup + 1) * kWgmmaM);
            unseen_blocks = __reduce_max_sync(0xffffffff, key_blocks - seen); // in all lanes
            key_blocks -= unseen_blocks;
            for (int i = 0; i < unseen_blocks; ++i) {
                skip_block(K_ring, K_full, K_empty);
            }
        }
    };
    auto wait_for_others = [&] { // until they have begun with the blocks that only they see
        for (int i = 0; i < unseen_blocks; ++i) {
            take_turn();
            end_turn();
            skip_block(V_ring, V_full, V_empty);
        }
    };
    // Keys before block j - 1, up to the end of block j, that the warpgroup's first row cannot see.
    auto unseen = [&](int j) {
        return (key_blocks - j) * B_c - visible_keys<kEdges>(query & -kWgmmaM, args);
    };
    auto hide = [&](auto &S, int j) { // the keys of block j that a row does not see
        const int first_key = (key_blocks - 1 - j) * B_c;
        hide_columns(S, {visible_keys<kEdges>(query, args) - first_key,
                         visible_keys<kEdges>(query + 8, args) - first_key});
    };
    auto softmax_0 = [&](auto &S) {
        if (unseen(0) > 0) {
            hide(S, 0);
        }
        softmax_first(S, args.scale, m, l);
    };
    auto next_block = [&](int j, int steps) {
        // 4. S = Q @ K_j^T; O / l of the last tile; O += P @ V_{j-1}
        take_turn();
        issue_S(S_rmem);
        issue_O(j - 1, steps);
        wgmma_wait<1>();
        finish_S(S_rmem);
        release_stored(); // the Q of the next tile may wait for this slot

        // 5. l, P = 2^(S - m); in fp16 m, P, O = O · rescale if m must grow
        const bool raises = cfg.causal && j == 1 && __any_sync(0xffffffff, unseen(1) >= 0);
        bool grows = false;
        if (raises) { // for rows that have seen no key yet
            hide(S_rmem, 1);
            softmax_again(S_rmem, args.scale, m, l, rescale);
        } else {
            grows = softmax<cfg.dtype>(S_rmem, args.scale, m, l);
        }
        wgmma_wait<0>();
        finish_O();
        if (grows) {
            grow(S_rmem, m, l, rescale);
        }
        if (grows || raises) {
            scale_rows(O_rmem, rescale);
        }
        pack_P(S_rmem);
    };

    // A tile begins: S = Q @ K_0^T beside O += P @ V of the tile before, if any; then P.
    auto begin_with = [&](auto &S, int last_j) {
        issue_S(S);
        if (last_j >= 0) {
            issue_O(last_j, kPVSteps);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        finish_S(S);
        softmax_0(S);
        if (last_j >= 0) {
            wgmma_wait<0>();
            finish_O();
        }
        pack_P(S);
    };
    auto begin = [&](int last_j) {
        if constexpr (kFew) {
            const int seen = visible_keys<kEdges>(query | (kWgmmaM - 1), args); // by the last row
            if (__all_sync(0xffffffff, seen - (key_blocks - 1) * B_c <= kFewKeys)) {
                float S_few[kFewKeys / 2];
                return begin_with(S_few, last_j);
            }
        }
        begin_with(S_rmem, last_j);
    };

    if (warpgroup == kConsumers - 1) {
        end_turn(); // the first turn is warpgroup 0's
    }

    // 3. S = Q @ K_0^T, P = 2^(S - m), of the first tile
    next_tile();
    begin(-1);

    for (int n = 0; key_blocks > 0; ++n) {
        wait_for_others();
        if (key_blocks > 1 && few_P) {
            next_block(1, kFewKeys / kWgmmaK);
        } else if (key_blocks > 1) {
            next_block(1, kPVSteps);
        }
        for (int j = 2; j < key_blocks; ++j) {
            next_block(j, kPVSteps);
        }

        // 6. S = Q @ K_0^T of the next tile, O += P @ V
        if (key_blocks == 1) {
            store_O();
        }
        release_stored();
        O_slot = Q_ring.slot;
        for (int half = 0; half < 2; ++half) {
            O_m[half] = m[half];
            O_l[half] = l[half];
        }
        Q_ring.advance();
        const int last_j = key_blocks - 1;
        next_tile();
        take_turn();
        if (key_blocks > 0) {
            begin(last_j);
        } else {
            issue_O(last_j, kPVSteps);
            wgmma_wait<0>();
            finish_O();
        }
        O_n = n;
        if (!kStoresLate) {
            store_O();
        }
    }
    store_O();
    if (warpgroup == 0) {
        take_turn(); // the turn left over: no barrier may stay half complete
    }
    release_stored(); // after its end another thread block may have this memory

    // 7. rows that left the range of fp32, computed again
    if (again) {
        if (lane == 0) {
            tma_store_wait(); // the stores of O have ended, and can be overwritten
        }
        __syncwarp();
        exact_cluster_tiles<cfg.dtype, kDHead, B_r, kEdges, cfg.causal>(args, again, warp_row,
                                                                        args.scale);
    }
}

} // namespace h30
