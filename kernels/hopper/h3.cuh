#pragma once
// Step 3 of the hopper family: two warpgroups share K and V. Parent: h2.
//
// What changed
//   1. A thread block has 128 rows of Q, 64 for each of its two warpgroups, which multiply them by
//      the same tiles of K and V.
//
// Why: a block of 128 keys is 64 KiB out of the L2 cache, and one warpgroup computes 64 rows · 128
// keys · 128 columns · 4 = 4.2 MFLOP with it. At 600 TFLOP/s the SMs would read 9.4 TB/s; two
// warpgroups per tile halve that. Two warpgroups can also keep the tensor cores of all four
// quarters of an SM busy; one reaches 90%.
// Expected: little by itself. h2 has two warpgroups per SM as well, in two thread blocks that do
// not wait for each other. The two of h3 wait at every barrier of their thread block, and multiply
// at the same time.
//
// benchmark:begin
// Measured in bursts (NVIDIA H100 80GB HBM3, CUDA 13.0, bf16), TFLOP/s at length 4096, and share
// of PyTorch's flash backend in the harmonic mean over lengths. B_r 128, B_c 128, 8 warps: 446,
// 1.15. Cost: 157 registers per thread, 96 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: a loss of 19% against h2: both warpgroups wait for the same copy. h4 removes that wait.
//
// Phases
//   1. barriers; Q: global → shared
//   2. K_j, V_j: global → shared
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

namespace h3 {

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
    constexpr int kPVSteps = B_c / kWgmmaK;
    constexpr uint32_t kQBytes = kDPieces * piece_bytes(B_r);
    constexpr uint32_t kKVBytes = kDPieces * piece_bytes(B_c);

    extern __shared__ __align__(kPatternBytes) Element smem[];
    const uint32_t Q_smem = smem_address(smem); // (B_r, d_head)
    const uint32_t K_smem = Q_smem + kQBytes; // (B_c, d_head)
    const uint32_t V_smem = K_smem + kKVBytes; // (B_c, d_head)
    const uint32_t Q_full = V_smem + kKVBytes;
    const uint32_t K_full = Q_full + kBarrierBytes, V_full = K_full + kBarrierBytes;

    const int warpgroup = threadIdx.x / kWarpgroup; // its rows begin at 64 · warpgroup
    const int warp_row = threadIdx.x / 32 * kWarpRows, lane = threadIdx.x % 32;
    const TilePlace place = tile_place<B_r>(blockIdx.x, args);

    // 1. barriers; Q: global → shared
    if (threadIdx.x == 0) {
        barrier_init(Q_full, 1);
        barrier_init(K_full, 1);
        barrier_init(V_full, 1);
        barrier_init_fence();
        barrier_expect(Q_full, kQBytes);
        tma_load_tile(Q_smem, args.Q, Q_full, place);
    }
    __syncthreads(); // no thread waits at a barrier that is not initialised

    const uint32_t Q = wgmma_descriptor(Q_smem + warpgroup * piece_bytes(kWgmmaM));
    const uint32_t K = wgmma_descriptor(K_smem);
    const uint32_t V = wgmma_descriptor(V_smem, piece_bytes(B_c));
    float O_rmem[kDHead / 2] = {}, S_rmem[B_c / 2];
    uint32_t P_rmem[kPVSteps][4];
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, rescale[2];
    barrier_wait(Q_full, 0);

    for (int j = 0; j < args.len_k / B_c; ++j) {
        // 2. K_j, V_j: global → shared
        if (threadIdx.x == 0) {
            barrier_expect(K_full, kKVBytes);
            tma_load_tile(K_smem, args.K, K_full, {j * B_c, place.head, place.batch});
            barrier_expect(V_full, kKVBytes);
            tma_load_tile(V_smem, args.V, V_full, {j * B_c, place.head, place.batch});
        }

        // 3. S = Q @ K^T
        barrier_wait(K_full, j % 2);
        hold(S_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(S_rmem, Q + column_step<B_r>(k), K + column_step<B_c>(k), k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(S_rmem);

        // 4. m, l, P = 2^(S - m), O = O · rescale
        softmax(S_rmem, m, l, rescale);
        scale_rows(O_rmem, rescale);
#pragma unroll
        for (int k = 0; k < kPVSteps; ++k) {
            pack_fragment<cfg.dtype>(P_rmem[k], S_rmem, k);
        }

        // 5. O += P @ V
        barrier_wait(V_full, j % 2);
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
        __syncthreads(); // K and V may be written again
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

} // namespace h3
