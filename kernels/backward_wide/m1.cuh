#pragma once
// Step 1 of the backward_wide family, d_head 256. Parent: b13. The same work in another form.
//
// What changed
//   1. A warpgroup has a gradient instead of 64 keys: the first computes S, P and dV, the second
//      dP, dS and dK, the third dQ. P reaches the second through shared memory, in register order.
//   2. A warp of a fourth warpgroup issues the copies.
//   3. S and dP of the next block are issued behind dV and dK, and K of a tile has one slot.
//
// Why: 64 rows of one gradient are 128 registers per thread at 256 columns, so a thread has room
// for one. Two slots of Q and dO and a tile of K and V are 192 KB of 227: a slot must be given back
// before the block in the other ends, and the next tile's K has no room. A block of 64 queries and
// 64 keys is 2560 cycles of the tensor pipe. In shared memory its products take 2048, Q and dO 512,
// additions 512, P, dS and statistics 320: 3392. Its additions to dQ are 64 KB, of which the L2
// cache takes 13.5 bytes per cycle from each of 132 SMs: 4855.
// Expected: the additions bind, at half of the tensor pipe: 430 to 480 TFLOP/s at length 4096.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 2048, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 64: 415, 1.57. Cost: 128
// registers per thread, 225 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: on an H200 302 and 415 TFLOP/s at lengths 512 and 2048, 28 and 17% more than cuDNN.
// Other lengths were not measured.
//
// Phases of gradients_kernel
//   1. barriers
//   2. the producer: K, V, Q_i, dO_i, LSE, delta: global → shared
//   3. the warpgroup of dQ: dQ_i += dS_i @ K
//   4. S^T = K @ Q^T - LSE, or dP^T = V @ dO^T - delta
//   5. P = 2^S, 0 where masked, or dS = P · dP: registers → shared
//   6. dV += P^T @ dO, or dK += dS^T @ Q
//   7. dV, or dK · softmax_scale: registers → global

#include "kernels/backward/parts.cuh"
#include "kernels/backward_wide/arguments.cuh"
#include "kernels/backward_wide/scores.cuh"
#include "sm90/launch.cuh"

namespace m1 {

constexpr int d_head = 256, B_r = kWgmmaM, B_c = kWgmmaM; // queries and keys of a block
constexpr int kDSteps = d_head / kWgmmaK, kDPieces = d_head / kPiece;
constexpr int kSteps = kWgmmaM / kWgmmaK; // of the queries, or the keys, of a block
constexpr uint32_t kBlockBytes = kTileBytes<kWgmmaM, d_head>, kScoreBytes = piece_bytes(B_r);
constexpr uint32_t kHalfBytes = kBlockBytes / 2; // of a block: half of its columns
enum Warpgroup { kOfV, kOfK, kOfQ, kProducer, kWarpgroups };

template <typename Config>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ BackwardKernelArgs args) {
    let_next_launch_begin();
    wait_for_launch_before(); // it may read what is cleared here
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *args.next_tile = 0;
    }
    constexpr int kSharers = B_r / kDeltaRowsOf<d_head> / kTurns; // thread blocks for one turn
    if (Config::value.in_turn && threadIdx.x == 0 && blockIdx.x % kSharers == 0) {
        args.turns[blockIdx.x / kSharers] = 0;
    }
    clear_sums(args);
    store_statistics<Config::value.dtype, Config::value.causal, false, d_head>(args);
}

template <typename Config>
__global__ void __launch_bounds__(kWarpgroup)
    convert_kernel(const __grid_constant__ BackwardKernelArgs args) {
    let_next_launch_begin();
    wait_for_launch_before();
    round_sums<Config::value.dtype, Config::value.causal, d_head>(args);
}

template <typename Config>
__global__ void __launch_bounds__(kWarpgroups *kWarpgroup, 1)
    gradients_kernel(const __grid_constant__ BackwardKernelArgs args) {
    constexpr BackwardWideKernelConfig cfg = Config::value;
    static_assert(cfg.d_head == d_head && cfg.B_r == B_r && cfg.B_c == B_c);

    extern __shared__ __align__(kPatternBytes) Element smem[];
    const uint32_t K_smem = smem_address(smem); // (B_c, d_head)
    const uint32_t V_smem = K_smem + kBlockBytes; // (B_c, d_head)
    const uint32_t QdO_smem = V_smem + kBlockBytes; // (slots, 2, B_r, d_head)
    const uint32_t P_smem = QdO_smem + cfg.slots * 2 * kBlockBytes; // (kScoreSlots, 4, threads, 8)
    const uint32_t dS_smem = P_smem + kScoreSlots * kScoreBytes; // (kScoreSlots, B_r, B_c)
    const uint32_t statistics_smem = dS_smem + kScoreSlots * kScoreBytes; // (slots, 2, B_r)
    const uint32_t K_place = statistics_smem + cfg.slots * kStatisticsBytes;
    const uint32_t V_place = K_place + kPlaceBytes;
    const uint32_t K_full = V_place + kPlaceBytes, V_full = K_full + kBarrierBytes;
    const uint32_t K_empty = V_full + kBarrierBytes, V_empty = K_empty + kBarrierBytes;
    const uint32_t full = V_empty + kBarrierBytes; // one per slot, like the others
    const uint32_t empty = full + cfg.slots * kBarrierBytes;
    const uint32_t P_full = empty + cfg.slots * kBarrierBytes;
    const uint32_t P_empty = P_full + kScoreSlots * kBarrierBytes;
    const uint32_t dS_full = P_empty + kScoreSlots * kBarrierBytes;
    const uint32_t dS_empty = dS_full + kScoreSlots * kBarrierBytes;

    const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup), lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % kTurns, warp_row = warp * kWarpRows;
    // Row i of a head's queries sees key j if j <= i + shift. A tile that no query sees takes a
    // block all the same.
    const int q_rows = padded_rows<cfg.causal>(args), before = rows_before<cfg.causal>(args);
    const int shift = cfg.causal ? args.len_k - args.len_q - before : args.len_k + B_c;
    auto blocks_that_see = [&](int key) { return max((q_rows - max(key - shift, 0)) / B_r, 1); };
    Ring<cfg.slots> ring, past; // the next block, and that whose sum is not complete
    Ring<1> tile, V_tile; // the next tile, for the producer that of K
    Ring<kScoreSlots> P_ring, dS_ring;

    // 1. barriers
    constexpr int kWarps = kWarpgroup / 32; // of a warpgroup, each of which arrives once
    if (threadIdx.x == 0) {
        tile.init_barriers(K_full, K_empty, 2 * kWarps); // those of dV and dQ
        V_tile.init_barriers(V_full, V_empty, kWarps); // those of dK
        ring.init_barriers(full, empty, 2 * kWarps); // those of dV and dK
        for (int i = 0; i < 2 * kScoreSlots; ++i) { // full, then empty
            barrier_init(P_full + i * kBarrierBytes, kWarps);
            barrier_init(dS_full + i * kBarrierBytes, kWarps);
        }
        barrier_init_fence();
    }
    __syncthreads(); // no thread waits at a barrier that is not initialised
    let_next_launch_begin();
    wait_for_launch_before();

    // 2. the producer: K, V, Q_i, dO_i, LSE, delta: global → shared
    if (warpgroup == kProducer) {
        give_registers<24>();
        bool more = threadIdx.x == kProducer * kWarpgroup;
        for (int taken = blockIdx.x; more; taken = atomicAdd(args.next_tile, 1) + gridDim.x) {
            const TilePlace place = place_of_keys<B_c, cfg.causal, cfg.in_turn>(args, taken);
            const int unseen = q_rows - blocks_that_see(place.row) * B_r; // rows of a head
            TilePlace queries = {unseen, place.head * args.heads_per_kv, place.batch};
            auto load_block = [&] {
                const int64_t row = row_index(args, queries, q_rows);
                const TilePlace Q_place = {queries.row - before, queries.head, queries.batch};
                load_pair<kBlockBytes>(ring, full, empty, QdO_smem, args.Q, args.dO, Q_place,
                                       statistics_smem, args.statistics + 2 * row);
                if ((queries.row += B_r) == q_rows) { // the next head follows
                    queries = {unseen, queries.head + 1, queries.batch};
                }
            };
            more = place.row >= 0;
            if (more) { // its slot is empty before V and K are
                load_block();
            }
            load_with_place<kBlockBytes>(V_tile, V_full, V_empty, V_smem, args.V, V_place, place);
            load_with_place<kBlockBytes>(tile, K_full, K_empty, K_smem, args.K, K_place, place);
            while (more && queries.head < (place.head + 1) * args.heads_per_kv) {
                load_block();
            }
        }
        return;
    }

    // 3. the warpgroup of dQ: dQ_i += dS_i @ K
    if (warpgroup == kOfQ) {
        give_registers<72>();
        const uint32_t dS_0 = wgmma_descriptor(dS_smem);
        const uint32_t K_rows = wgmma_descriptor(K_smem, piece_bytes(B_c));
        float dQ_rmem[kPiece / 2];
        float4 *sums = nullptr; // of the next block; those of a head's blocks follow each other
        auto take_turn_at = [&](int key, int block, const float4 *sums_of_block, bool ends) {
            take_turn<B_c, cfg.causal, d_head>(args, key, block, sums_of_block, q_rows, shift,
                                               ends);
        };
        auto add_block = [&](int key, int block, bool begins, bool is_last) {
            barrier_wait(dS_ring.barrier(dS_full), dS_ring.lap);
            const uint32_t dS = warp_uniform(dS_0 + dS_ring.slot * (kScoreBytes / 16));
#pragma unroll
            for (int piece = 0; piece < kDPieces; ++piece, sums += kPiece / 8 * kWarpgroup) {
                hold(dQ_rmem);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < kSteps; ++k) {
                    const uint32_t K = K_rows + piece * (piece_bytes(B_c) / 16) + row_step(k);
                    wgmma<cfg.dtype, true>(dQ_rmem, dS + column_step<B_r>(k), K, k > 0);
                }
                wgmma_commit();
                if (cfg.in_turn && piece == 0 && (begins || block % kTurnBlocks == 0)) {
                    take_turn_at(key, block, sums, false);
                }
                wgmma_wait<0>();
                hold(dQ_rmem);
                add(sums, dQ_rmem);
            }
            release(dS_ring, dS_empty, lane);
            if (cfg.in_turn && ((block + 1) % kTurnBlocks == 0 || is_last)) {
                take_turn_at(key, block, sums - B_r * d_head / 4, true);
            }
        };
        for (TilePlace own; (own = wait_for_place(tile, K_full, K_place)).row >= 0;) {
            const int blocks = q_rows / B_r, unseen = blocks - blocks_that_see(own.row);
            for (int head = 0; head < args.heads_per_kv; ++head) {
                sums = sums_of<d_head>(
                    args,
                    row_index(args, {unseen * B_r, own.head * args.heads_per_kv + head, own.batch},
                              q_rows));
#pragma unroll 1
                for (int block = unseen; block < blocks; ++block) {
                    add_block(own.row, block, block == unseen, block + 1 == blocks);
                }
            }
            __syncwarp(); // one lane arrives for what all lanes have read
            release(tile, K_empty, lane);
        }
        return;
    }
    take_registers<208>();

    // K and Q, then dO; or V and dO, then Q
    const bool of_V = warpgroup == kOfV;
    const uint32_t own_full = of_V ? K_full : V_full, own_empty = of_V ? K_empty : V_empty;
    const uint32_t own_place = of_V ? K_place : V_place;
    const uint32_t own = warp_uniform(wgmma_descriptor(of_V ? K_smem : V_smem));
    const uint32_t Q_smem = QdO_smem, dO_smem = QdO_smem + kBlockBytes;
    const uint32_t columns_0 = wgmma_descriptor(of_V ? Q_smem : dO_smem);
    const uint32_t rows_0 = wgmma_descriptor(of_V ? dO_smem : Q_smem, piece_bytes(B_r));
    const uint32_t P_own_smem = P_smem + threadIdx.x % kWarpgroup * kChunkBytes;
    const float *statistics =
        reinterpret_cast<const float *>(smem) + (statistics_smem - K_smem) / 4 + warpgroup * B_r;
    float S_rmem[B_r / 2], sums_rmem[2][d_head / 4] = {}; // S or dP, then P or dS; dV or dK
    uint32_t P_rmem[kSteps][4]; // or dS; transposed, as S and dP are

    // 4. S^T = K @ Q^T - LSE, or dP^T = V @ dO^T - delta, of the next block
    auto multiply = [&] {
        const uint32_t columns = warp_uniform(columns_0 + ring.slot * (2 * kBlockBytes / 16));
        barrier_wait(ring.barrier(full), ring.lap);
        begin(S_rmem, statistics + ring.slot * 2 * B_r);
        hold(S_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(S_rmem, own + column_step<B_c>(k), columns + column_step<B_r>(k),
                             true);
        }
        wgmma_commit();
        ring.advance();
    };
    for (TilePlace place; (place = wait_for_place(tile, own_full, own_place)).row >= 0;) {
        const int n_keys = args.len_k - place.row - warp_row; // the diagonal hides those behind
        const float mask[2] = {cfg.causal || lane / 4 < n_keys ? 0 : -INFINITY,
                               cfg.causal || lane / 4 + 8 < n_keys ? 0 : -INFINITY};
        const int seen = blocks_that_see(place.row);
        multiply();
        wgmma_wait<0>();
        hold(S_rmem);
        auto compute_block = [&](int i, bool is_last) {
            // 5. P = 2^S, 0 where masked, or dS = P · dP: registers → shared
            if (of_V) {
                if (cfg.causal && i == 0 && place.row >= shift) {
                    hide_keys(S_rmem, place.row < args.len_k ? warp_row : kWgmmaM);
                }
                exponentiate(S_rmem, args.scale, mask);
            } else {
                barrier_wait(P_ring.barrier(P_full), P_ring.lap);
#pragma unroll
                for (int k = 0; k < kSteps; ++k) {
                    weigh<cfg.dtype>(load_smem_16(P_own_smem + P_ring.slot * kScoreBytes +
                                                  k * kWarpgroup * kChunkBytes),
                                     S_rmem, k);
                }
                __syncwarp(); // one lane arrives for what all lanes have read
                release(P_ring, P_empty, lane);
            }
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                pack_fragment<cfg.dtype>(P_rmem[k], S_rmem, k);
            }
            if (of_V) {
                barrier_wait(P_ring.barrier(P_empty), P_ring.lap ^ 1);
#pragma unroll
                for (int k = 0; k < kSteps; ++k) {
                    store_smem_16(P_own_smem + P_ring.slot * kScoreBytes +
                                      k * kWarpgroup * kChunkBytes,
                                  P_rmem[k]);
                }
                __syncwarp(); // one lane arrives for what all lanes have written
                release(P_ring, P_full, lane);
            } else {
                barrier_wait(dS_ring.barrier(dS_empty), dS_ring.lap ^ 1);
#pragma unroll
                for (int k = 0; k < kSteps; ++k) {
                    store_transposed<B_r>(dS_smem + dS_ring.slot * kScoreBytes, warp_row, k,
                                          P_rmem[k]);
                }
                fence_async_proxy();
                __syncwarp(); // one lane arrives for what all lanes have written
                release(dS_ring, dS_full, lane);
            }

            // 6. dV += P^T @ dO, or dK += dS^T @ Q
            const uint32_t rows = warp_uniform(rows_0 + past.slot * (2 * kBlockBytes / 16));
            hold(sums_rmem[0]);
            hold(sums_rmem[1]);
            hold(P_rmem);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                wgmma<cfg.dtype>(sums_rmem[0], P_rmem[k], rows + row_step(k), true);
                wgmma<cfg.dtype>(sums_rmem[1], P_rmem[k], rows + kHalfBytes / 16 + row_step(k),
                                 true);
            }
            wgmma_commit();
            if (is_last) {
                wgmma_wait<0>();
            } else {
                multiply(); // behind dV or dK, which must not wait for a block that is loaded
                wgmma_wait<1>(); // dV or dK
            }
            hold(sums_rmem[0]);
            hold(sums_rmem[1]);
            hold(P_rmem);
            release(past, empty, lane);
            wgmma_wait<0>();
            hold(S_rmem);
        };
        for (int head = 0; head < args.heads_per_kv; ++head) {
            for (int i = 0; i < seen; ++i) {
                compute_block(i, i + 1 == seen && head + 1 == args.heads_per_kv);
            }
        }
        __syncwarp(); // one lane arrives for what all lanes have read
        release(tile, own_empty, lane);

        // 7. dV, or dK · softmax_scale: registers → global
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = half * d_head / 2;
            if (of_V) {
                store_sums<cfg.dtype, true>(static_cast<Element *>(args.dV_gmem) + column,
                                            args.dV_strides, place, warp_row, sums_rmem[half], 1,
                                            args.len_k);
            } else {
                store_sums<cfg.dtype, true>(static_cast<Element *>(args.dK_gmem) + column,
                                            args.dK_strides, place, warp_row, sums_rmem[half],
                                            args.softmax_scale, args.len_k);
            }
        }
    }
}

} // namespace m1
