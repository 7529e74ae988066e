#pragma once
// Step 1 of the hopper family: TMA and wgmma. Parent in the story: v16; no line of it is left.
//
// What changed
//   1. The tensor memory accelerator (TMA) copies tiles: one thread issues one instruction per
//      tile. With cp.async 128 threads would issue 16 copies each per tile, and compute their
//      addresses.
//   2. wgmma multiplies 64 rows at a time and reads Q, K and V from shared memory: no ldmatrix, and
//      no fragments of Q, K and V in registers.
//   3. P goes through shared memory too. Copies, products and softmax run one after the other.
//
// Why: mma.sync reaches two thirds of the 4096 FLOP per cycle of an SM, wgmma reaches all of them.
// Per block of 128 keys a warp issues 16 wgmma for its 16 rows instead of 256 mma and 144 ldmatrix.
// Expected: 200 to 300 TFLOP/s, a guess, because the tensor cores idle while S becomes P.
//
// benchmark:begin
// Measured in bursts (NVIDIA H100 80GB HBM3, CUDA 13.0, bf16), TFLOP/s at length 4096, and share
// of PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 128, 4 warps: 527,
// 1.38. Cost: 158 registers per thread, 96 KiB of shared memory per block, 2 blocks per SM.
// benchmark:end
// Verdict: 138% of flash, although each phase waits for the one before. The guess was far too low,
// probably because two thread blocks share an SM, and one multiplies while the other waits.
//
// Phases
//   1. barriers; Q: global → shared
//   2. K_j, V_j: global → shared
//   3. S = Q @ K^T
//   4. m, l, P = 2^(S - m), O = O · rescale
//   5. P: registers → shared
//   6. O += P @ V
//   7. O / l: registers → shared → global

#include "flash_attention.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "sm90/arguments.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace h1 {

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
    static_assert(cfg.B_r == kWgmmaM, "one warpgroup");

    constexpr int B_r = cfg.B_r, B_c = cfg.B_c;
    constexpr int kPVSteps = B_c / kWgmmaK;
    constexpr uint32_t kQBytes = kDPieces * piece_bytes(B_r);
    constexpr uint32_t kKVBytes = kDPieces * piece_bytes(B_c);

    extern __shared__ __align__(kPatternBytes) Element smem[];
    const uint32_t Q_smem = smem_address(smem); // (B_r, d_head)
    const uint32_t K_smem = Q_smem + kQBytes; // (B_c, d_head)
    const uint32_t V_smem = K_smem + kKVBytes; // (B_c, d_head)
    const uint32_t P_smem = V_smem + kKVBytes; // (B_r, B_c)
    const uint32_t Q_full = P_smem + B_c / kPiece * piece_bytes(B_r);
    const uint32_t K_full = Q_full + kBarrierBytes, V_full = K_full + kBarrierBytes;

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

    const uint32_t Q = wgmma_descriptor(Q_smem), K = wgmma_descriptor(K_smem);
    const uint32_t P = wgmma_descriptor(P_smem);
    const uint32_t V = wgmma_descriptor(V_smem, piece_bytes(B_c));
    float O_rmem[kDHead / 2] = {}, S_rmem[B_c / 2];
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

        // 5. P: registers → shared
#pragma unroll
        for (int k = 0; k < kPVSteps; ++k) {
            uint32_t P_rmem[4];
            pack_fragment<cfg.dtype>(P_rmem, S_rmem, k);
            store_fragment<B_r>(P_smem, warp_row, k, P_rmem);
        }
        fence_async_proxy();
        __syncthreads(); // wgmma reads the rows of P that all warps have written

        // 6. O += P @ V
        barrier_wait(V_full, j % 2);
        hold(O_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kPVSteps; ++k) {
            wgmma<cfg.dtype, true>(O_rmem, P + column_step<B_r>(k), V + row_step(k), true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(O_rmem);
        __syncthreads(); // K, V and P may be written again
    }

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
}

} // namespace h1
