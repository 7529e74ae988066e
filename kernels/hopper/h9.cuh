#pragma once
// Step 9 of the hopper family: descriptors that ptxas knows to be uniform. Parent: h8.
//
// What changed
//   1. The descriptor of a slot goes through a shuffle that gives all lanes the value of lane 0.
//      The value is the same in all lanes anyway, but only now does ptxas know it.
//
// Why: HGMMA reads descriptors from uniform registers, which a warp has once for all lanes. The
// slot of a ring is found at run time, in ordinary registers. If ptxas does not see that all lanes
// agree, it moves both words of every descriptor to uniform registers (R2UR) before each HGMMA, and
// the tensor cores wait between them. It also computes the rest of the address per lane.
// Expected: a few R2UR in the loop instead of 16. In a test kernel (H100) the tensor pipe went from
// 80% to 96% busy. ptxas decides: the same loop with the keys in another order was spared.
//
// benchmark:begin
// Measured in bursts (NVIDIA H100 80GB HBM3, CUDA 13.0, bf16), TFLOP/s at length 4096, and share
// of PyTorch's flash backend in the harmonic mean over lengths. B_r 128, B_c 128, 8 warps: 736,
// 1.86. Cost: 168 registers per thread, 160 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: no gain: 185.8% of flash, 186.9% before. The loop has one R2UR instead of 16: evidently
// the tensor cores did not wait for these moves. The later steps keep the shuffles.
//
// Phases
//   1. barriers
//   2. the producer: Q, K_j, V_j: global → shared
//   3. S = Q @ K_0^T, P = 2^(S - m)
//   4. S = Q @ K_j^T, O += P @ V_{j-1}
//   5. m, l, P = 2^(S - m), O = O · rescale if m has changed
//   6. O += P @ V
//   7. O / l: registers → shared → global

#include "flash_attention.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "sm90/arguments.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace h9 {

constexpr int kDHead = 128;
constexpr int kDPieces = kDHead / kPiece;
constexpr int kDSteps = kDHead / kWgmmaK;
constexpr int kWarpRows = kWgmmaM / 4;

constexpr float kSoftmaxScale = 0.08838834764831845f * kLog2e; // log2(e) / sqrt(d_head)
constexpr float kMaxGrowth = 8; // P stays below 2^8: fp16 has room to 2^16

// S becomes P = 2^(S · scale - m), not yet rounded, and l grows by this lane's part of each row's
// sum. m is the rows' maximum · scale, or up to kMaxGrowth below it. Returns whether m has changed
// in any row of the warp; if so, O must be multiplied by rescale.
template <int kCount>
__device__ __forceinline__ bool softmax(float (&S_rmem)[kCount], float (&m)[2], float (&l)[2],
                                        float (&rescale)[2]) {
    float own_m[2];
    bool grows = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) { // rows g and g + 8
        own_m[half] = -INFINITY;
#pragma unroll
        for (int i = 2 * half; i < kCount; i += 4) {
            own_m[half] = fmaxf(own_m[half], fmaxf(S_rmem[i], S_rmem[i + 1]));
        }
        own_m[half] *= kSoftmaxScale;
        // written so that the first block, where m is -infinity, counts as growth
        grows |= !(own_m[half] - m[half] <= kMaxGrowth);
    }
    grows = __any_sync(0xffffffff, grows);
    if (grows) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float old_m = m[half];
            m[half] = fmaxf(old_m, quad_max(own_m[half]));
            rescale[half] = exp2_approx(old_m - m[half]);
            l[half] *= rescale[half];
        }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int half = i / 2 % 2;
        S_rmem[i] = exp2_approx(fmaf(S_rmem[i], kSoftmaxScale, -m[half]));
        l[half] += S_rmem[i];
    }
    return grows;
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
    const uint32_t Q_smem = smem_address(smem); // (B_r, d_head)
    const uint32_t K_smem = Q_smem + kQBytes; // (K_slots, B_c, d_head)
    const uint32_t V_smem = K_smem + cfg.K_slots * kKVBytes; // (V_slots, B_c, d_head)
    const uint32_t Q_full = V_smem + cfg.V_slots * kKVBytes;
    const uint32_t K_full = Q_full + kBarrierBytes; // one per slot, like the others
    const uint32_t K_empty = K_full + cfg.K_slots * kBarrierBytes;
    const uint32_t V_full = K_empty + cfg.K_slots * kBarrierBytes;
    const uint32_t V_empty = V_full + cfg.V_slots * kBarrierBytes;

    const int warpgroup = threadIdx.x / kWarpgroup; // its rows begin at 64 · warpgroup
    const int warp_row = threadIdx.x / 32 * kWarpRows, lane = threadIdx.x % 32;
    const TilePlace place = tile_place<B_r>(blockIdx.x, args);
    const int key_blocks = args.len_k / B_c;
    Ring<cfg.K_slots> K_ring;
    Ring<cfg.V_slots> V_ring;

    // 1. barriers
    if (threadIdx.x == 0) {
        barrier_init(Q_full, 1);
        K_ring.init_barriers(K_full, K_empty, kConsumerWarps);
        V_ring.init_barriers(V_full, V_empty, kConsumerWarps);
        barrier_init_fence();
    }
    __syncthreads(); // no thread waits at a barrier that is not initialised

    // 2. the producer: Q, K_j, V_j: global → shared
    if (warpgroup == kConsumers) {
        give_registers<24>();
        if (threadIdx.x == kConsumers * kWarpgroup) {
            barrier_expect(Q_full, kQBytes);
            tma_load_tile(Q_smem, args.Q, Q_full, place);
            for (int j = 0; j < key_blocks; ++j) {
                tma_load_slot<kKVBytes>(K_ring, K_full, K_empty, K_smem, args.K,
                                        {j * B_c, place.head, place.batch});
                tma_load_slot<kKVBytes>(V_ring, V_full, V_empty, V_smem, args.V,
                                        {j * B_c, place.head, place.batch});
            }
        }
        return;
    }
    take_registers<240>();

    // One arrival per warp: after its own wait the wgmma of its rows no longer read the slot.
    auto release = [&](uint32_t empty) {
        if (lane == 0) {
            barrier_arrive(empty);
        }
    };
    const uint32_t Q = warp_uniform(wgmma_descriptor(Q_smem + warpgroup * piece_bytes(kWgmmaM)));
    const uint32_t K_0 = wgmma_descriptor(K_smem);
    const uint32_t V_0 = wgmma_descriptor(V_smem, piece_bytes(B_c));
    float O_rmem[kDHead / 2] = {}, S_rmem[B_c / 2];
    uint32_t P_rmem[kPVSteps][4];
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, rescale[2];
    barrier_wait(Q_full, 0);

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
    auto issue_S = [&] { // S = Q @ K^T
        const uint32_t K = warp_uniform(K_0 + K_ring.slot * (kKVBytes / 16));
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
    auto issue_O = [&] { // O += P @ V
        const uint32_t V = warp_uniform(V_0 + V_ring.slot * (kKVBytes / 16));
        barrier_wait(V_ring.barrier(V_full), V_ring.lap);
        hold(O_rmem);
        hold(P_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kPVSteps; ++k) {
            wgmma<cfg.dtype>(O_rmem, P_rmem[k], V + row_step(k), true);
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
    auto compute_tile = [&] {
        // 3. S = Q @ K_0^T, P = 2^(S - m)
        issue_S();
        wgmma_wait<0>();
        finish_S();
        softmax(S_rmem, m, l, rescale);
        pack_P();

        for (int j = 1; j < key_blocks; ++j) {
            // 4. S = Q @ K_j^T, O += P @ V_{j-1}
            take_turn();
            issue_S();
            issue_O();
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
        }

        // 6. O += P @ V
        issue_O();
        wgmma_wait<0>();
        finish_O();

        // 7. O / l: registers → shared → global; each warp stores its rows through those of Q
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            l[half] = reciprocal_approx(quad_sum(l[half]));
        }
        scale_rows(O_rmem, l);
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            uint32_t packed[4];
            pack_fragment<cfg.dtype>(packed, O_rmem, k);
            store_fragment<B_r>(Q_smem, warp_row, k, packed);
        }
        fence_async_proxy();
        __syncwarp(); // one lane stores the rows that all lanes have written
        if (lane == 0) {
#pragma unroll
            for (int piece = 0; piece < kDPieces; ++piece) {
                tma_store_piece(args.O, Q_smem + piece * piece_bytes(B_r) + warp_row * kRowBytes,
                                place.row + warp_row, piece, place.head, place.batch);
            }
            tma_store_commit();
            tma_store_wait_read(); // after its end another thread block may have this memory
        }
    };
    compute_tile();
    if (warpgroup == 0) {
        take_turn(); // the turn left over: no barrier may stay half complete
    }
}

} // namespace h9
