#pragma once
// Optimistic maximum: o5 without a maximum in the steady state. docs/tuning.md has what was
// expected of it and what came out.
//
// What changed
//   1. m is the first block's maximum, and stays. S of all later blocks is exponentiated against it
//      without being looked at.
//   2. One look behind the loop: a P that was too large is in its row's sum, and stays there. Then
//      the tile is computed again as o5 does it.
//
// Why: per block of keys and warp 64 FMNMX, 8 SHFL, a vote and its branch are gone, which no
// exponential of the block can overtake.
//
// How exact: as o5. Where a later maximum is far over m, P is large, which is a matter of the
// exponent: bf16 and fp32 have room to 2^127. fp16 has to 2^16; what is over that is infinity, and
// so is the sum. Where all later ones are far below m, P is small as in any online softmax. l is 1
// at least, from m's own key.
//
// Cost: a register more than there are, loaded again once per block; tiles computed twice.

#include "kernels/overlap/o5.cuh"

#include <type_traits>

namespace optimistic {

using namespace o5;

constexpr float kMaxSum = 0x1p64f; // of l; O stays finite while V is below 2^63

// The block's tile of O. Returns false, and has stored nothing, if that takes a maximum per block.
template <typename Config, bool kOptimistic>
__device__ __forceinline__ bool compute_tile(const OverlapKernelArgs &args) {
    constexpr OverlapKernelConfig cfg = Config::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kThreads = cfg.n_threads();
    constexpr int kRowTiles = B_r / cfg.n_warps / kMmaM; // of a warp
    constexpr int kKeyTiles = B_c / kMmaN, kKeyPairs = B_c / kMmaK;
    constexpr int kOTiles = kDHead / kMmaN;
    constexpr int kQKSteps = kDTiles * kKeyPairs, kPVSteps = kKeyPairs * kDTiles;
    constexpr uint32_t kStage = 2 * B_c * kDHead * sizeof(Element); // K_0, V_0, K_1, V_1
    constexpr uint32_t kOnes = cfg.dtype == DType::FP16 ? 0x3c003c00 : 0x3f803f80; // two of 1.0

    extern __shared__ __align__(128) Element smem[];
    const uint32_t Q_smem = smem_address(smem); // (B_r, d_head)
    const uint32_t K_smem = Q_smem + B_r * kDHead * int(sizeof(Element)); // (B_c, d_head)
    const uint32_t V_smem = K_smem + B_c * kDHead * int(sizeof(Element)); // (B_c, d_head)

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp * kRowTiles * kMmaM;
    const uint32_t warp_Q_smem = Q_smem + warp_row * kPiece * int(sizeof(Element));
    uint32_t lane_offset[4], K_lane_offset[4];
    set_lane_offsets(lane_offset, K_lane_offset);

    // Where the config fixes a stride, it holds for all four tensors; else they are read.
    constexpr int kStride = cfg.static_row_stride;
    const int Q_stride = kStride ? kStride : args.Q_strides.row;
    const int K_stride = kStride ? kStride : args.K_strides.row;
    const int V_stride = kStride ? kStride : args.V_strides.row;
    const int64_t O_stride = kStride ? kStride : args.O_strides.row;

    const int first_row = blockIdx.x * B_r;
    const Element *Q_gmem = head_gmem(args.Q, args.Q_strides) + thread_offset(Q_stride);
    const Element *K_gmem = head_gmem(args.K, args.K_strides) + thread_offset(K_stride);
    const Element *V_gmem = head_gmem(args.V, args.V_strides) + thread_offset(V_stride);
    int key = args.len_k - B_c; // the first key of block j

    // The block at `key`, where X_gmem points; then X_gmem points at the one before.
    auto copy = [&](uint32_t tile_smem, const Element *&X_gmem, int stride, int key) {
        copy_tile_async<B_c, kThreads>(tile_smem, X_gmem, 0, stride, key >= 0 ? 16 : 0);
        X_gmem -= int64_t(B_c) * stride;
    };
    // One ldmatrix: k-tile k of the warp's rows of Q; of K and V the step's 16 keys and 16 columns
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
                    fragment_address<B_c>(K_smem + stage, K_lane_offset, step % kKeyPairs * kMmaK,
                                          step / kKeyPairs));
    };
    auto load_V = [&](uint32_t stage, int step) {
        ldmatrix_x4_trans(V_rmem[step % kRing],
                          fragment_address<B_c>(V_smem + stage, lane_offset, step / kDTiles * kMmaK,
                                                step % kDTiles));
    };

    // 1. Q: global → shared; the last K and V come behind it, then the K before
    copy_tile_async<B_r, kThreads>(Q_smem, Q_gmem, first_row, Q_stride);
    cp_async_commit();
    copy_tile_async<B_c, kThreads>(K_smem, K_gmem, key, K_stride);
    cp_async_commit();
    copy_tile_async<B_c, kThreads>(V_smem, V_gmem, key, V_stride);
    cp_async_commit();
    K_gmem += int64_t(key - B_c) * K_stride;
    V_gmem += int64_t(key - B_c) * V_stride;
    copy(K_smem + kStage, K_gmem, K_stride, key - B_c);
    cp_async_commit();
    cp_async_wait<2>(); // Q and K_j have landed, V_j and K_{j-1} may be on their way
    __syncthreads(); // a warp reads rows that other warps have copied
    load_Q(0);
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
        load_K(0, step);
    }

    float O_rmem[kRowTiles][kOTiles][4] = {};
    float L_rmem[kRowTiles][4] = {}; // P @ 1: all columns are l
    float scaled_m[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        scaled_m[i][0] = scaled_m[i][1] = -INFINITY;
    }
    uint32_t stage = 0;
    auto process_block = [&](auto takes_maximum) {
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
            add_product<cfg.dtype>(S_rmem, Q_rmem[k % 2], K_rmem[step % kRing], n);
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

        if constexpr (takes_maximum) {
            // 4. m; l = l · rescale, O = O · rescale if a row's maximum has grown much
            float rescale[kRowTiles][2];
            bool grown = false;
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                grown |= update_maximum(S_rmem[i], scaled_m[i], rescale[i]);
            }
            if (__any_sync(0xffffffff, grown)) {
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        L_rmem[i][2 * half] *= rescale[i][half];
                        L_rmem[i][2 * half + 1] *= rescale[i][half];
#pragma unroll
                        for (int n = 0; n < kOTiles; ++n) {
                            O_rmem[i][n][2 * half] *= rescale[i][half];
                            O_rmem[i][n][2 * half + 1] *= rescale[i][half];
                        }
                    }
                }
            }
        }

        // 5. P = 2^(S - m), l += P @ 1, O += P @ V, a k-tile of keys at a time
        uint32_t P_rmem[kKeyPairs][kRowTiles][4];
#pragma unroll
        for (int step = 0; step < kPVSteps; ++step) {
            const int k = step / kDTiles, n = step % kDTiles;
            if (n == 0) {
                exponentiate<cfg.dtype>(P_rmem[k], S_rmem, scaled_m, k);
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) {
                    mma_m16n8k16<cfg.dtype>(L_rmem[i], P_rmem[k][i], kOnes, kOnes);
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
            add_product<cfg.dtype>(O_rmem, P_rmem[k], V_rmem[step % kRing], n);
        }
        stage ^= kStage;
        key -= B_c;
    };

    do {
        process_block(std::true_type{});
    } while (!kOptimistic && key >= 0);
    while (key >= 0) {
        process_block(std::false_type{});
    }
    if constexpr (kOptimistic) {
        bool too_large = false; // written so that NaN is
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            too_large |= !(L_rmem[i][0] <= kMaxSum) || !(L_rmem[i][2] <= kMaxSum);
        }
        cp_async_wait<0>(); // no copy writes to K's and V's buffers any more
        // All warps of the block, which share K and V, must know, and be through with them.
        if (__syncthreads_or(too_large)) {
            return false;
        }
    }

    // 6. O = O / l, registers → shared
    __syncwarp(); // O takes the place of this warp's own rows of Q
    const uint32_t O_smem = Q_smem;
    // Row g of 8 has chunk n of a row at n ^ g: n flips the bits of g · 16 in the lane's own
    // offset, which stands above them by whole rows and below by words. One XOR with a constant, no
    // shift.
    const uint32_t O_lane_smem = warp_Q_smem + smem_offset(lane / 4, lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float inverse_l = reciprocal_approx(L_rmem[i][2 * half]);
#pragma unroll
            for (int n = 0; n < kOTiles; ++n) {
                const float *O = &O_rmem[i][n][2 * half];
                store_smem_4((O_lane_smem ^ n % 8 * kChunkBytes) +
                                 (i * kMmaM + half * 8) * kPiece * int(sizeof(Element)) +
                                 piece_offset<B_r>(n / 8),
                             pack<cfg.dtype>(O[0] * inverse_l, O[1] * inverse_l));
            }
        }
    }
    __syncwarp(); // a lane reads what other lanes of its warp have written

    // 7. O: shared → global, 8 lanes a row of 128 bytes
    constexpr int kRowsPerPass = 32 / kThreadsPerRow;
    const int row = warp_row + lane / kThreadsPerRow, col = lane % kThreadsPerRow * kChunk;
    Element *O_gmem = head_gmem(args.O, args.O_strides) + (first_row + row) * O_stride + col;
#pragma unroll
    for (int i = 0; i < kRowTiles * kMmaM; i += kRowsPerPass) {
#pragma unroll
        for (int piece = 0; piece < kDHead / kPiece; ++piece) {
            store_gmem_16_streaming(
                O_gmem + piece * kPiece,
                load_smem_16(O_smem + piece_offset<B_r>(piece) + smem_offset(row + i, col)));
        }
        O_gmem += kRowsPerPass * O_stride;
    }
    return true;
}

// Not inlined: what is computed twice is not to be kept in registers.
template <typename Config>
__device__ __noinline__ void compute_tile_again(const OverlapKernelArgs &args) {
    compute_tile<Config, false>(args);
}

template <typename Config>
__global__ void __launch_bounds__(Config::value.n_threads(), min_blocks(Config::value))
    forward_kernel(const __grid_constant__ OverlapKernelArgs args) {
    if (!compute_tile<Config, true>(args)) {
        compute_tile_again<Config>(args);
    }
}

} // namespace optimistic
