#pragma once
// Step 5 of the hopper family: a producer. Parent: h4.
//
// What changed
//   1. A third warpgroup is the producer: one of its threads issues all copies. It keeps 24 of its
//      168 registers per thread, and the two warpgroups that compute have 240.
//   2. Full and empty barriers replace the barrier of the thread block: a slot is full when its
//      bytes have arrived, and empty when all warps that compute have multiplied by it.
//
// Why: behind the barrier of h4 both warpgroups multiply at the same time and compute exponentials
// at the same time, when the tensor cores idle. Now each warpgroup goes at its own pace, up to two
// blocks of keys apart.
// Expected: 540 TFLOP/s at length 16384 and tensor cores 63% busy, as in a test kernel on an H100,
// written before this step.
//
// benchmark:begin
// Measured in bursts (NVIDIA H100 80GB HBM3, CUDA 13.0, bf16), TFLOP/s at length 4096, and share
// of PyTorch's flash backend in the harmonic mean over lengths. B_r 128, B_c 128, 8 warps: 615,
// 1.59. Cost: 168 registers per thread, 160 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: 3.9% faster than h4. The producer allows the warpgroups to be out of step, but does not
// keep them so.
//
// Phases
//   1. barriers
//   2. the producer: Q, K_j, V_j: global → shared
//   3. S = Q @ K^T
//   4. m, l, P = 2^(S - m), O = O · rescale
//   5. O += P @ V
//   6. O / l: registers → shared → global

#include "flash_attention.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "sm90/arguments.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace h5 {

constexpr int kDHead = 128;
constexpr int kDPieces = kDHead / kPiece;
constexpr int kDSteps = kDHead / kWgmmaK;
constexpr int kWarpRows = kWgmmaM / 4;

constexpr float kSoftmaxScale = 0.08838834764831845f * kLog2e; // log2(e) / sqrt(d_head)

// Takes a block of keys into m, the rows' maximum · scale, and l, this lane's part of each row's
// sum. S becomes P = 2^(S · scale - m), not yet rounded. O must be multiplied by rescale.
template <int kCount>
__device__ __forceinline__ void softmax(float (&S_rmem)[kCount], float (&m)[2], float (&l)[2],
                                        float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) { // rows g and g + 8
        float block_m = -INFINITY;
#pragma unroll
        for (int i = 2 * half; i < kCount; i += 4) {
            block_m = fmaxf(block_m, fmaxf(S_rmem[i], S_rmem[i + 1]));
        }
        const float old_m = m[half];
        m[half] = fmaxf(old_m, quad_max(block_m) * kSoftmaxScale);
        rescale[half] = exp2_approx(old_m - m[half]);
        l[half] *= rescale[half];
#pragma unroll
        for (int i = 2 * half; i < kCount; i += 4) {
            S_rmem[i] = exp2_approx(fmaf(S_rmem[i], kSoftmaxScale, -m[half]));
            S_rmem[i + 1] = exp2_approx(fmaf(S_rmem[i + 1], kSoftmaxScale, -m[half]));
            l[half] += S_rmem[i] + S_rmem[i + 1];
        }
    }
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
    const uint32_t Q = wgmma_descriptor(Q_smem + warpgroup * piece_bytes(kWgmmaM));
    const uint32_t K_0 = wgmma_descriptor(K_smem);
    const uint32_t V_0 = wgmma_descriptor(V_smem, piece_bytes(B_c));
    float O_rmem[kDHead / 2] = {}, S_rmem[B_c / 2];
    uint32_t P_rmem[kPVSteps][4];
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, rescale[2];
    barrier_wait(Q_full, 0);

    for (int j = 0; j < key_blocks; ++j) {
        // 3. S = Q @ K^T
        const uint32_t K = K_0 + K_ring.slot * (kKVBytes / 16);
        barrier_wait(K_ring.barrier(K_full), K_ring.lap);
        hold(S_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(S_rmem, Q + column_step<B_r>(k), K + column_step<B_c>(k), k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(S_rmem);
        release(K_ring.barrier(K_empty));
        K_ring.advance();

        // 4. m, l, P = 2^(S - m), O = O · rescale
        softmax(S_rmem, m, l, rescale);
        scale_rows(O_rmem, rescale);
#pragma unroll
        for (int k = 0; k < kPVSteps; ++k) {
            pack_fragment<cfg.dtype>(P_rmem[k], S_rmem, k);
        }

        // 5. O += P @ V
        const uint32_t V = V_0 + V_ring.slot * (kKVBytes / 16);
        barrier_wait(V_ring.barrier(V_full), V_ring.lap);
        hold(O_rmem);
        hold(P_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kPVSteps; ++k) {
            wgmma<cfg.dtype>(O_rmem, P_rmem[k], V + row_step(k), true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(O_rmem);
        hold(P_rmem);
        release(V_ring.barrier(V_empty));
        V_ring.advance();
    }

    // 6. O / l: registers → shared → global; each warp stores its rows through those of Q
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
}

} // namespace h5
