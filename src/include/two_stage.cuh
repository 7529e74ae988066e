#pragma once
// Kernel 16's main loop for `kv_stages` 2: two buffers each for K and V. No step of the sixteen,
// but what autotuning may choose for the last one; docs/tuning.md has what was tried and measured.
//
// Beside the loop in forward_kernel.cuh
//   1. One barrier a block of keys instead of four, between S = Q @ K^T and the softmax. Behind it
//      K_{j-1} and V_j have landed and two buffers are free: copies have a whole block's time.
//   2. Fragments come through a ring, one ldmatrix at a time and kAhead of them before their mma's
//      turn, also from one product into the next: none begins by waiting for its first operands.
//      Double-buffered k-tiles hold 48 registers for that (32 rows a warp); the ring and Q, 28.
//   3. lazy_rescale: l and O are rescaled only when a row's maximum has grown by more than
//      kMaxGrowth powers of two. Until then P may exceed 1, but P, l and O are relative to the same
//      m, and O / l is what it would have been. Saves 128 FMUL a block of keys.
//   4. mma_row_sum: l is P @ 1, one more column tile for mma instead of 64 FADD that ptxas leaves
//      to the end of the block, where they hide nothing. It sums P as P @ V does: rounded.
// Cost: 512 · B_c bytes of shared memory.

#include "cp_async.cuh"
#include "flash_attention.cuh"
#include "ldmatrix.cuh"
#include "mma.cuh"
#include "numeric.cuh"

namespace v16 {

constexpr int kAhead = 2; // ldmatrix of K or V before their mma's turn
constexpr int kRing = kAhead + 1; // fragments in registers: one in use, the others on their way
constexpr float kMaxGrowth = 8; // P stays below 2^8: fp16 has room to 2^16

// scaled_m, the rows' maximum · scale of one row tile, takes in S, unless lazy and not worth it;
// rescale is what l and O must be multiplied by. Returns whether that is anything but 1.
template <bool kLazy, int kKeyTiles>
__device__ __forceinline__ bool update_maximum(const float (&S_rmem)[kKeyTiles][4],
                                               float (&scaled_m)[2], float (&rescale)[2]) {
    bool grown = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) { // rows g and g + 8 of the accumulator
        float m = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
            m = fmaxf(m, fmaxf(S_rmem[n][2 * half], S_rmem[n][2 * half + 1]));
        }
        const float old_m = scaled_m[half];
        const float new_m = fmaxf(quad_max(m) * kSoftmaxScale, old_m);
        // written so that the first block, where old_m is -infinity, counts as growth
        const bool grows = !kLazy || !(new_m - old_m <= kMaxGrowth);
        scaled_m[half] = grows ? new_m : old_m;
        rescale[half] = exp2_approx(old_m - scaled_m[half]);
        grown |= grows;
    }
    return grown;
}

// P's k-tile k = 2^(S · scale - scaled_m), in mma's layout of A. l sums P unless mma does.
template <DType kDType, bool kSum, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void
exponentiate(uint32_t (&P_rmem)[kRowTiles][4], const float (&S_rmem)[kRowTiles][kKeyTiles][4],
             const float (&scaled_m)[kRowTiles][2], float (&l_rmem)[kRowTiles][2], int k) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float *S = &S_rmem[i][2 * k + n][2 * half];
                const float P0 = exp2_approx(fmaf(S[0], kSoftmaxScale, -scaled_m[i][half]));
                const float P1 = exp2_approx(fmaf(S[1], kSoftmaxScale, -scaled_m[i][half]));
                if constexpr (kSum) {
                    l_rmem[i][half] += P0 + P1;
                }
                P_rmem[i][n * 2 + half] = pack<kDType>(P0, P1);
            }
        }
    }
}

// C (kRowTiles * 16, 16) += A (kRowTiles * 16, 16) @ B (16, 16): what one ldmatrix_x4 of B serves.
template <DType kDType, int kRowTiles, int kTiles>
__device__ __forceinline__ void add_tile_product(float (&C_rmem)[kRowTiles][kTiles][4],
                                                 const uint32_t (&A_rmem)[kRowTiles][4],
                                                 const uint32_t (&B_rmem)[4], int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            mma_m16n8k16<kDType>(C_rmem[i][2 * n + half], A_rmem[i], B_rmem[2 * half],
                                 B_rmem[2 * half + 1]);
        }
    }
}

template <typename Config>
struct TwoStageLoop {
    // O (warp's rows, d_head), not yet divided by l, and l of all keys. K_smem and V_smem are the
    // first buffers; the second ones lie kStage bytes behind. Q and the last block of K and V are
    // on their way, in three groups of copies.
    template <int kRowTiles>
    static __device__ __forceinline__ void
    run(float (&O_rmem)[kRowTiles][kDHead / kMmaN][4], float (&l_rmem)[kRowTiles][2],
        uint32_t warp_Q_smem, uint32_t K_smem, uint32_t V_smem, const uint32_t (&lane_offset)[4],
        const uint32_t (&K_lane_offset)[4], const Element *K_gmem, int K_stride,
        const Element *V_gmem, int V_stride, int first_key) {
        constexpr FlashForwardKernelConfig cfg = Config::value;
        constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kThreads = cfg.n_threads();
        constexpr int kKeyTiles = B_c / kMmaN, kKeyPairs = B_c / kMmaK;
        constexpr int kQKSteps = kDTiles * kKeyPairs, kPVSteps = kKeyPairs * kDTiles;
        constexpr uint32_t kStage = 2 * B_c * kDHead * sizeof(Element);
        constexpr uint32_t kOnes = cfg.dtype == DType::FP16 ? 0x3c003c00 : 0x3f803f80; // two of 1.0
        static_assert(cfg.Q_mma_load_K_tiles == 1 && cfg.K_mma_load_K_tiles == 1 &&
                          cfg.V_mma_load_K_tiles == 1 && cfg.mma_double_buffer_loads,
                      "fragments come one ldmatrix at a time, ahead of their use");

        uint32_t Q_rmem[2][kRowTiles][4], K_rmem[kRing][4], V_rmem[kRing][4];
        auto load_Q = [&](int k) {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                ldmatrix_x4(Q_rmem[k % 2][i],
                            fragment_address<B_r>(warp_Q_smem, lane_offset, i * kMmaM, k));
            }
        };
        auto load_K = [&](uint32_t stage, int step) {
            ldmatrix_x4(K_rmem[step % kRing],
                        fragment_address<B_c>(K_smem + stage, K_lane_offset,
                                              step % kKeyPairs * kMmaK, step / kKeyPairs));
        };
        auto load_V = [&](uint32_t stage, int step) {
            ldmatrix_x4_trans(V_rmem[step % kRing],
                              fragment_address<B_c>(V_smem + stage, lane_offset,
                                                    step / kDTiles * kMmaK, step % kDTiles));
        };
        // The block at `key`, where X_gmem points; then X_gmem points at the one before. Faster
        // than an address from `key`: see `ring_by_key` in docs/tuning.md.
        auto copy = [&](uint32_t tile_smem, const Element *&X_gmem, int stride, int key) {
            copy_tile_async<B_c, kThreads>(tile_smem, X_gmem, 0, stride, key >= 0 ? 16 : 0);
            X_gmem -= int64_t(B_c) * stride;
        };

        K_gmem += int64_t(first_key - B_c) * K_stride;
        V_gmem += int64_t(first_key - B_c) * V_stride;
        copy(K_smem + kStage, K_gmem, K_stride, first_key - B_c);
        cp_async_commit();
        cp_async_wait<2>(); // Q and K_j have landed, V_j and K_{j-1} may be on their way
        __syncthreads(); // a warp reads rows that other warps have copied
        load_Q(0);
#pragma unroll
        for (int step = 0; step < kAhead; ++step) {
            load_K(0, step);
        }

        float scaled_m[kRowTiles][2];
        float L_rmem[kRowTiles][4] = {}; // all columns of P @ 1 are l
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                scaled_m[i][half] = -INFINITY;
                l_rmem[i][half] = 0;
            }
        }
        uint32_t stage = 0;
        int key = first_key;
        do {
            // 2. S = Q @ K^T
            float S_rmem[kRowTiles][kKeyTiles][4] = {};
#pragma unroll
            for (int step = 0; step < kQKSteps; ++step) {
                const int k = step / kKeyPairs, n = step % kKeyPairs;
                if (n == 0 && k + 1 < kDTiles) {
                    load_Q(k + 1);
                }
                if (step + kAhead < kQKSteps) {
                    load_K(stage, step + kAhead);
                }
                add_tile_product<cfg.dtype>(S_rmem, Q_rmem[k % 2], K_rmem[step % kRing], n);
            }

            // 3. V_{j-1} and K_{j-2}: global → shared, in flight until the next block's barrier
            cp_async_wait<0>(); // V_j and K_{j-1} have landed
            __syncthreads(); // no warp reads K_j or V_{j+1} any more
#pragma unroll
            for (int step = 0; step < kAhead; ++step) {
                load_V(stage, step); // before 16 copies that go the same way
            }
            copy(V_smem + (stage ^ kStage), V_gmem, V_stride, key - B_c);
            copy(K_smem + stage, K_gmem, K_stride, key - 2 * B_c);
            cp_async_commit();

            // 4. m, l = l · rescale, O = O · rescale
            float rescale[kRowTiles][2];
            bool grown = false;
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                grown |= update_maximum<cfg.lazy_rescale>(S_rmem[i], scaled_m[i], rescale[i]);
            }
            if (!cfg.lazy_rescale || __any_sync(0xffffffff, grown)) {
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        if constexpr (cfg.mma_row_sum) {
                            L_rmem[i][2 * half] *= rescale[i][half];
                            L_rmem[i][2 * half + 1] *= rescale[i][half];
                        } else {
                            l_rmem[i][half] *= rescale[i][half];
                        }
#pragma unroll
                        for (int n = 0; n < kDHead / kMmaN; ++n) {
                            O_rmem[i][n][2 * half] *= rescale[i][half];
                            O_rmem[i][n][2 * half + 1] *= rescale[i][half];
                        }
                    }
                }
            }

            // 5. P = 2^(S - m), O += P @ V, a k-tile of keys at a time
            uint32_t P_rmem[kKeyPairs][kRowTiles][4];
#pragma unroll
            for (int step = 0; step < kPVSteps; ++step) {
                const int k = step / kDTiles, n = step % kDTiles;
                if (n == 0) {
                    exponentiate<cfg.dtype, !cfg.mma_row_sum>(P_rmem[k], S_rmem, scaled_m, l_rmem,
                                                              k);
                    if constexpr (cfg.mma_row_sum) {
#pragma unroll
                        for (int i = 0; i < kRowTiles; ++i) {
                            mma_m16n8k16<cfg.dtype>(L_rmem[i], P_rmem[k][i], kOnes, kOnes);
                        }
                    }
                }
                if (step + kAhead < kPVSteps) {
                    load_V(stage, step + kAhead);
                } else { // the first fragments of the next Q @ K^T
                    if (step + kAhead == kPVSteps) {
                        load_Q(0);
                    }
                    load_K(stage ^ kStage, step + kAhead - kPVSteps);
                }
                add_tile_product<cfg.dtype>(O_rmem, P_rmem[k], V_rmem[step % kRing], n);
            }
            stage ^= kStage;
            key -= B_c;
        } while (key >= 0);

#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                l_rmem[i][half] = cfg.mma_row_sum ? L_rmem[i][2 * half] : quad_sum(l_rmem[i][half]);
            }
        }
    }
};

} // namespace v16
