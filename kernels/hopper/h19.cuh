#pragma once
// Step 19 of the hopper family: any number of queries and of keys. Parent: h18.
//
// What changed
//   1. Blocks of keys are taken from the last to the first. In the last one, which now comes first,
//      columns past the end of K become -infinity before the maximum.
//   2. Softmax has moved to sm90/softmax.cuh unchanged.
//
// Why: TMA loads zeros from outside of a tensor and stores nothing there, so tiles of Q, V and O
// may reach past the end. Only in S a zero is wrong: it would add 2^(0 - m) to l. The first block
// of keys has its own code already, for the maximum, so a mask there costs the loop nothing.
// Expected: the speed of h18 at lengths of whole blocks.
//
// benchmark:begin
// Measured in bursts (NVIDIA H100 80GB HBM3, CUDA 13.0, bf16), TFLOP/s at length 4096, and share
// of PyTorch's flash backend in the harmonic mean over lengths. B_r 128, B_c 128, 8 warps: 820,
// 2.15. Cost: 168 registers per thread, 224 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: no change beyond the noise at lengths of whole blocks (215.2% of flash, 216.3% before),
// though 2048 to 7680 lose about 1%. Other lengths pay for the unused part of the last block.
//
// Phases
//   1. barriers
//   2. the producer: Q, K_{j+1}, V_j: global → shared; block 0 has the last keys
//   3. S = Q @ K_0^T, -inf past the end of K, P = 2^(S - m), of the first tile
//   4. S = Q @ K_j^T; O / l of the last tile: registers → shared → global; O += P @ V_{j-1}
//   5. l, P = 2^(S - m); in fp16 m, P, O = O · rescale if m must grow
//   6. S = Q @ K_0^T of the next tile, O += P @ V
//   7. rows that left the range of fp32, computed again

#include "flash_attention.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "sm90/arguments.cuh"
#include "sm90/exact_rows.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/softmax.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace h19 {

constexpr int kDHead = 128;
constexpr int kQSlots = 2;
constexpr int kDPieces = kDHead / kPiece;
constexpr int kDSteps = kDHead / kWgmmaK;
constexpr int kWarpRows = kWgmmaM / 4;

constexpr float kSoftmaxScale = 0.08838834764831845f * kLog2e; // log2(e) / sqrt(d_head)

template <typename Config>
__global__ void __launch_bounds__(Config::value.n_threads(), 1)
    forward_kernel(const __grid_constant__ HopperKernelArgs args) {
    constexpr HopperKernelConfig cfg = Config::value;
    static_assert(cfg.d_head == kDHead, "the kernels are written for d_head 128");
    static_assert(cfg.B_r % kWgmmaM == 0, "64 rows for each warpgroup");

    constexpr int B_r = cfg.B_r, B_c = cfg.B_c;
    constexpr int kConsumers = B_r / kWgmmaM, kPVSteps = B_c / kWgmmaK; // warpgroups that compute
    constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
    constexpr bool kStoresLate = kConsumers < 3; // three have too few registers to keep O
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

    const int warpgroup = threadIdx.x / kWarpgroup; // its rows begin at 64 · warpgroup
    const int warp_row = threadIdx.x / 32 * kWarpRows, lane = threadIdx.x % 32;
    const int key_blocks = (args.len_k + B_c - 1) / B_c;
    const int last_keys = args.len_k - (key_blocks - 1) * B_c; // keys of the last block, 1 to B_c
    Ring<kQSlots> Q_ring;
    Ring<cfg.K_slots> K_ring;
    Ring<cfg.V_slots> V_ring;

    // 1. barriers
    if (threadIdx.x == 0) {
        Q_ring.init_barriers(Q_full, Q_empty, kConsumerWarps);
        K_ring.init_barriers(K_full, K_empty, kConsumerWarps);
        V_ring.init_barriers(V_full, V_empty, kConsumerWarps);
        barrier_init_fence();
    }
    __syncthreads(); // no thread waits at a barrier that is not initialised

    // 2. the producer: Q, K_{j+1}, V_j: global → shared
    if (warpgroup == kConsumers) {
        give_registers<kConsumers == 3 ? 32 : 24>();
        if (threadIdx.x == kConsumers * kWarpgroup) {
            TilePlace V_place = {-1}; // of the next V: row is its first key, -1 if there is none
            auto load_V = [&] {
                tma_load_slot<kKVBytes>(V_ring, V_full, V_empty, V_smem, args.V, V_place);
            };
            for (int tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
                const TilePlace place = tile_place<B_r, Edges::kTensors>(tile, args);
                tma_load_slot<kQBytes>(Q_ring, Q_full, Q_empty, Q_smem, args.Q, place);
                for (int j = 0; j < key_blocks; ++j) {
                    const TilePlace K_place = {(key_blocks - 1 - j) * B_c, place.head, place.batch};
                    tma_load_slot<kKVBytes>(K_ring, K_full, K_empty, K_smem, args.K, K_place);
                    if (V_place.row >= 0) {
                        load_V();
                    }
                    V_place = K_place;
                }
            }
            load_V();
        }
        return;
    }
    take_registers<kConsumers == 3 ? 160 : 240>(); // together at most the 65536 of an SM

    // One arrival per warp: after its own wait the wgmma of its rows no longer read the slot.
    auto release = [&](uint32_t empty) {
        if (lane == 0) {
            barrier_arrive(empty);
        }
    };
    const uint32_t Q_0 = wgmma_descriptor(Q_smem + warpgroup * piece_bytes(kWgmmaM));
    const uint32_t K_0 = wgmma_descriptor(K_smem);
    const uint32_t V_0 = wgmma_descriptor(V_smem, piece_bytes(B_c));
    float O_rmem[kDHead / 2], S_rmem[B_c / 2];
    uint32_t P_rmem[kPVSteps][4];
    float m[2], l[2], rescale[2];

    auto end_turn = [&] {
        if (cfg.ping_pong) {
            named_arrive(1 + (warpgroup + 1) % kConsumers, 2 * kWarpgroup);
        }
    };
    auto take_turn = [&] {
        if (cfg.ping_pong) {
            named_sync(1 + warpgroup, 2 * kWarpgroup);
        }
    };
    uint32_t stored_empty = 0; // the barrier of the slot that O is stored from, 0 for none
    auto release_stored = [&] {
        if (stored_empty && lane == 0) {
            tma_store_wait_read(); // the next Q may be loaded now
            barrier_arrive(stored_empty);
        }
        stored_empty = 0;
    };
    uint32_t again = 0; // bit n % 32: this warp computes its rows of the n-th tile again
    // The tile that is computed but not stored: its number, -1 if none; its slot of Q; its l.
    int O_tile = -1, O_n = 0;
    uint32_t O_slot = 0;
    float O_l[2] = {};
    auto store_O = [&] { // through this warp's rows of the slot of Q
        if (O_tile < 0) {
            return;
        }
        const uint32_t O_smem = Q_smem + O_slot * kQBytes;
        const TilePlace place = tile_place<B_r, Edges::kTensors>(O_tile, args);
        float inverse_l[2];
        bool fits = true;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float row_l = quad_sum(O_l[half]);
            fits &= row_l < kMaxL; // false for NaN
            inverse_l[half] = reciprocal_approx(row_l);
        }
        if (!__all_sync(0xffffffff, fits && all_finite(O_rmem))) {
            again |= 1u << O_n % 32;
        }
        scale_rows(O_rmem, inverse_l);
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            uint32_t packed[4];
            pack_fragment<cfg.dtype>(packed, O_rmem, k);
            store_fragment<B_r>(O_smem, warp_row, k, packed);
        }
        fence_async_proxy();
        __syncwarp(); // one lane stores the rows that all lanes have written
        if (lane == 0) {
#pragma unroll
            for (int piece = 0; piece < kDPieces; ++piece) {
                tma_store_piece(args.O, O_smem + piece * piece_bytes(B_r) + warp_row * kRowBytes,
                                place.row + warp_row, piece, place.head, place.batch);
            }
            tma_store_commit();
        }
        stored_empty = Q_empty + O_slot * kBarrierBytes;
        O_tile = -1;
    };
    auto issue_S = [&] { // S = Q @ K^T
        const uint32_t K = warp_uniform(K_0 + K_ring.slot * (kKVBytes / 16));
        const uint32_t Q = warp_uniform(Q_0 + Q_ring.slot * (kQBytes / 16));
        barrier_wait(K_ring.barrier(K_full), K_ring.lap);
        hold(S_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(S_rmem, Q + column_step<B_r>(k), K + column_step<B_c>(k), k > 0);
        }
        wgmma_commit();
    };
    auto finish_S = [&] {
        hold(S_rmem);
        release(K_ring.barrier(K_empty));
        K_ring.advance();
    };
    auto issue_O = [&](int j) { // O += P @ V_j
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
        for (int k = 0; k < kPVSteps; ++k) {
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
    auto pack_P = [&] {
#pragma unroll
        for (int k = 0; k < kPVSteps; ++k) {
            pack_fragment<cfg.dtype>(P_rmem[k], S_rmem, k);
        }
    };
    auto softmax_0 = [&] { // of block 0 of a tile
        if (last_keys < B_c) {
            hide_columns(S_rmem, {last_keys, last_keys});
        }
        softmax_first(S_rmem, kSoftmaxScale, m, l);
    };
    auto next_block = [&](int j) {
        // 4. S = Q @ K_j^T; O / l of the last tile; O += P @ V_{j-1}
        take_turn();
        issue_S();
        issue_O(j - 1);
        wgmma_wait<1>();
        finish_S();

        // 5. l, P = 2^(S - m); in fp16 m, P, O = O · rescale if m must grow
        const bool grows = softmax<cfg.dtype>(S_rmem, kSoftmaxScale, m, l);
        wgmma_wait<0>();
        finish_O();
        if (grows) {
            grow(S_rmem, m, l, rescale);
            scale_rows(O_rmem, rescale);
        }
        pack_P();
        release_stored();
    };

    if (warpgroup == kConsumers - 1) {
        end_turn(); // the first turn is warpgroup 0's
    }

    // 3. S = Q @ K_0^T, P = 2^(S - m), of the first tile
    barrier_wait(Q_full, 0);
    issue_S();
    wgmma_wait<0>();
    finish_S();
    softmax_0();
    pack_P();

    for (int tile = blockIdx.x, n = 0; tile < args.tiles; tile += gridDim.x, ++n) {
        if (key_blocks > 1) {
            next_block(1);
        }
        for (int j = 2; j < key_blocks; ++j) {
            next_block(j);
        }

        // 6. S = Q @ K_0^T of the next tile, O += P @ V
        if (key_blocks == 1) {
            store_O();
        }
        release_stored(); // the Q of the next tile may wait for this slot
        O_slot = Q_ring.slot;
        O_l[0] = l[0];
        O_l[1] = l[1];
        Q_ring.advance();
        const bool has_next = tile + gridDim.x < args.tiles;
        if (has_next) {
            barrier_wait(Q_ring.barrier(Q_full), Q_ring.lap);
            take_turn();
            issue_S();
            issue_O(key_blocks - 1);
            wgmma_wait<1>();
            finish_S();
            softmax_0();
        } else {
            take_turn();
            issue_O(key_blocks - 1);
        }
        wgmma_wait<0>();
        finish_O();
        if (has_next) {
            pack_P();
        }
        O_tile = tile;
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
        exact_tiles<cfg.dtype, kDHead, B_r, Edges::kTensors>(args, again, warp_row, kSoftmaxScale);
    }
}

} // namespace h19
