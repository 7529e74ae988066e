#pragma once
// Step 14 of the hopper family: K is loaded before V. Parent: h13.
//
// What changed
//   1. The producer loads K_{j+1} before V_j, the order in which they are multiplied, and K has a
//      third slot. At the end of a tile it loads K_0 of the next one before the last V.
//
// Why: since h7 Q @ K_{j+1}^T comes before P @ V_j, but K_{j+1} was loaded after V_j, and had to
// wait for a slot. While K_{j+1} is multiplied, K_{j+2} can be on its way only with a third slot.
// Expected: 1 to 2% at lengths 512 and 1024, where the first blocks of a tile are waited for.
//
// benchmark:begin
// Measured in bursts (NVIDIA H100 80GB HBM3, CUDA 13.0, bf16), TFLOP/s at length 4096, and share
// of PyTorch's flash backend in the harmonic mean over lengths. B_r 128, B_c 128, 8 warps: 799,
// 2.12. Cost: 168 registers per thread, 224 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: 1.3% faster than h13: 3 to 4% at lengths 512 and 1024, nothing from 2048 on.
//
// Phases
//   1. barriers
//   2. the producer: Q, K_{j+1}, V_j: global → shared
//   3. S = Q @ K_0^T, P = 2^(S - m), of the first tile
//   4. S = Q @ K_j^T, O += P @ V_{j-1}
//   5. l, P = 2^(S - m), O = O · rescale if m has changed
//   6. S = Q @ K_0^T of the next tile, O += P @ V
//   7. O / l: registers → shared → global
//   8. rows that left the range of fp32, computed again

#include "flash_attention.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "sm90/arguments.cuh"
#include "sm90/exact_rows.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace h14 {

constexpr int kDHead = 128;
constexpr int kQSlots = 2;
constexpr int kDPieces = kDHead / kPiece;
constexpr int kDSteps = kDHead / kWgmmaK;
constexpr int kWarpRows = kWgmmaM / 4;

constexpr float kSoftmaxScale = 0.08838834764831845f * kLog2e; // log2(e) / sqrt(d_head)
constexpr float kMaxSum = 1 << 15; // of a lane's sum of P over a block: fp16 holds up to 65504
constexpr float kMaxRescale = 100; // of k, by which m grows: 2^-k is a normal number
constexpr float kMaxL = 1e30; // of a row's l: 1 / l is a normal number

// S becomes P = 2^(S · scale - m), not yet rounded; sum is this lane's part of each row's sum.
template <int kCount>
__device__ __forceinline__ void exponentiate(float (&S_rmem)[kCount], const float (&m)[2],
                                             float (&sum)[2]) {
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        S_rmem[i] = exp2_approx(fmaf(S_rmem[i], kSoftmaxScale, -m[i / 2 % 2]));
        sum[i / 2 % 2] += S_rmem[i];
    }
}

// The first block of a tile: m is its rows' maximum · scale.
template <int kCount>
__device__ __forceinline__ void softmax_first(float (&S_rmem)[kCount], float (&m)[2],
                                              float (&l)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) { // rows g and g + 8
        float own_m = -INFINITY;
#pragma unroll
        for (int i = 2 * half; i < kCount; i += 4) {
            own_m = fmaxf(own_m, fmaxf(S_rmem[i], S_rmem[i + 1]));
        }
        m[half] = quad_max(own_m) * kSoftmaxScale;
    }
    exponentiate(S_rmem, m, l);
}

// All later blocks. Returns whether m has changed in any row of the warp; if so, O must be
// multiplied by rescale. A row that has left the range of fp32 keeps l = NaN, in one lane at least.
template <int kCount>
__device__ __forceinline__ bool softmax(float (&S_rmem)[kCount], float (&m)[2], float (&l)[2],
                                        float (&rescale)[2]) {
    float sum[2];
    exponentiate(S_rmem, m, sum);
    const bool grows = !(sum[0] <= kMaxSum && sum[1] <= kMaxSum); // true for NaN
    if (!__any_sync(0xffffffff, grows)) {
        l[0] += sum[0];
        l[1] += sum[1];
        return false;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        l[half] += sum[half];
        const float k = quad_max(fmaxf(log2_approx(l[half]), 0));
        m[half] += k;
        rescale[half] = exp2_approx(-k);
        l[half] *= k < kMaxRescale ? rescale[half] : NAN;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        S_rmem[i] *= rescale[i / 2 % 2];
    }
    return true;
}

template <typename Config>
__global__ void __launch_bounds__(Config::value.n_threads(), 1)
    forward_kernel(const __grid_constant__ HopperKernelArgs args) {
    constexpr HopperKernelConfig cfg = Config::value;
    static_assert(cfg.d_head == kDHead, "the kernels are written for d_head 128");
    static_assert(cfg.B_r % kWgmmaM == 0, "64 rows for each warpgroup");

    constexpr int B_r = cfg.B_r, B_c = cfg.B_c;
    constexpr int kConsumers = B_r / kWgmmaM, kPVSteps = B_c / kWgmmaK; // warpgroups that compute
    constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
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
    const int key_blocks = args.len_k / B_c;
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
                const TilePlace place = tile_place<B_r>(tile, args);
                tma_load_slot<kQBytes>(Q_ring, Q_full, Q_empty, Q_smem, args.Q, place);
                for (int j = 0; j < key_blocks; ++j) {
                    tma_load_slot<kKVBytes>(K_ring, K_full, K_empty, K_smem, args.K,
                                            {j * B_c, place.head, place.batch});
                    if (V_place.row >= 0) {
                        load_V();
                    }
                    V_place = {j * B_c, place.head, place.batch};
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
    // through this warp's rows of the slot of Q
    auto store_O = [&](int tile, int n, uint32_t slot, const float (&l)[2]) {
        const uint32_t O_smem = Q_smem + slot * kQBytes;
        const TilePlace place = tile_place<B_r>(tile, args);
        float inverse_l[2];
        bool fits = true;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float row_l = quad_sum(l[half]);
            fits &= row_l < kMaxL; // false for NaN
            inverse_l[half] = reciprocal_approx(row_l);
        }
        if (!__all_sync(0xffffffff, fits && all_finite(O_rmem))) {
            again |= 1u << n % 32;
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
        stored_empty = Q_empty + slot * kBarrierBytes;
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

    if (warpgroup == kConsumers - 1) {
        end_turn(); // the first turn is warpgroup 0's
    }

    // 3. S = Q @ K_0^T, P = 2^(S - m), of the first tile
    barrier_wait(Q_full, 0);
    issue_S();
    wgmma_wait<0>();
    finish_S();
    softmax_first(S_rmem, m, l);
    pack_P();

    for (int tile = blockIdx.x, n = 0; tile < args.tiles; tile += gridDim.x, ++n) {
        for (int j = 1; j < key_blocks; ++j) {
            // 4. S = Q @ K_j^T, O += P @ V_{j-1}
            take_turn();
            issue_S();
            issue_O(j - 1);
            end_turn();
            wgmma_wait<1>();
            finish_S();

            // 5. m, l, P = 2^(S - m), O = O · rescale if m has changed
            const bool grows = softmax(S_rmem, m, l, rescale);
            wgmma_wait<0>();
            finish_O();
            if (grows) {
                scale_rows(O_rmem, rescale);
            }
            pack_P();
            release_stored();
        }

        // 6. S = Q @ K_0^T of the next tile, O += P @ V
        const float tile_l[2] = {l[0], l[1]};
        const uint32_t O_slot = Q_ring.slot;
        Q_ring.advance();
        const bool has_next = tile + gridDim.x < args.tiles;
        release_stored(); // if this tile has one block of keys
        if (has_next) {
            barrier_wait(Q_ring.barrier(Q_full), Q_ring.lap);
            take_turn();
            issue_S();
            issue_O(key_blocks - 1);
            end_turn();
            wgmma_wait<1>();
            finish_S();
            softmax_first(S_rmem, m, l);
        } else {
            issue_O(key_blocks - 1);
        }
        wgmma_wait<0>();
        finish_O();
        if (has_next) {
            pack_P();
        }

        // 7. O / l: registers → shared → global
        store_O(tile, n, O_slot, tile_l);
    }
    if (warpgroup == 0) {
        take_turn(); // the turn left over: no barrier may stay half complete
    }
    release_stored(); // after its end another thread block may have this memory

    // 8. rows that left the range of fp32, computed again
    if (again) {
        if (lane == 0) {
            tma_store_wait(); // the stores of O have ended, and can be overwritten
        }
        __syncwarp();
        exact_tiles<cfg.dtype, kDHead, B_r>(args, again, warp_row, kSoftmaxScale);
    }
}

} // namespace h14
