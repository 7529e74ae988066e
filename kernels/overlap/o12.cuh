#pragma once
// Step 12 of the overlap family: head sizes. Parent: o11.
//
// What changed
//   1. d_head is 64, 96, 128, 192 or 256. Tiles are cut into pieces of 64 columns, and at 96 of 32.
//   2. In a piece of 32 columns a row has 64 bytes. Two rows lie in all banks once, and permute
//      their four chunks alike.
//   3. The functions that limit and hide logits are in tiles.cuh now.
//
// Why: a thread has kRowTiles · (d_head / 2 + B_c / 2) registers of O and S: 128 at d_head 64 and
// 192 at 128 with two row tiles, and with one 144 at 256 and 120 at 192. Shared memory takes
// (B_r + 4 · B_c) · d_head · 2 bytes: 48 KB at 64, 72 KB at 96 and 96 KB from 128 on, where B_r is
// 64 and B_c 48 or 32 for the larger ones. Pieces of 64 columns would take 96 KB at 96, so that an
// SM of sm_80 would hold one thread block instead of two.
// Expected: the machine code of o11 at d_head 128. At 64 a block of keys has half of its mma and as
// many exponentials, so that less than the speed of 128 is left; at 256 warps of 16 rows load K and
// V from shared memory twice as often per mma.
//
// benchmark:begin
// benchmark:end
// Verdict: not measured yet.
//
// Phases: as o11.

#include "cp_async.cuh"
#include "kernels/overlap/arguments.cuh"
#include "kernels/overlap/tiles.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "numeric.cuh"

namespace o12 {

constexpr int kAhead = 2; // ldmatrix of K or V that run ahead of their mma
constexpr int kRing = kAhead + 1; // fragments in registers: one in use, the others being loaded

constexpr float kLowest = -3.4028235e38f; // of all finite numbers
constexpr float kMaxGrowth = 8; // P is at most 2^8; fp16 reaches almost 2^16

// scaled_m, maximum · scale of the rows of one row tile, takes in S where that raises it by more
// than kMaxGrowth. rescale is the factor for l and O, 1 where scaled_m stays. Returns whether a
// row's scaled_m has grown.
template <int kKeyTiles>
__device__ __forceinline__ bool update_maximum(const float (&S_rmem)[kKeyTiles][4], float scale,
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
        const float new_m = fmaxf(quad_max(m) * scale, old_m);
        // true in the first block with a key that the row sees, where old_m is kLowest, and for NaN
        const bool grows = !(new_m - old_m <= kMaxGrowth);
        scaled_m[half] = grows ? new_m : old_m;
        rescale[half] = exp2_approx(old_m - scaled_m[half]);
        grown |= grows;
    }
    return grown;
}

// k-tile k of P = 2^(S · scale - scaled_m), in the layout of mma's A operand. If asked for, exact_l
// takes in this lane's part of the sums of P, which is not yet rounded.
template <DType kDType, bool kSums, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void
exponentiate(uint32_t (&P_rmem)[kRowTiles][4], float (&exact_l)[kRowTiles][2],
             const float (&S_rmem)[kRowTiles][kKeyTiles][4], float scale,
             const float (&scaled_m)[kRowTiles][2], int k) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float *S = &S_rmem[i][2 * k + n][2 * half];
                const float P0 = exp2_approx(fmaf(S[0], scale, -scaled_m[i][half]));
                const float P1 = exp2_approx(fmaf(S[1], scale, -scaled_m[i][half]));
                P_rmem[i][n * 2 + half] = pack<kDType>(P0, P1);
                if constexpr (kSums) {
                    exact_l[i][half] += P0 + P1;
                }
            }
        }
    }
}

template <typename Config>
__global__ void __launch_bounds__(Config::value.n_threads(), min_blocks(Config::value))
    forward_kernel(const __grid_constant__ OverlapKernelArgs args) {
    constexpr OverlapKernelConfig cfg = Config::value;
    constexpr int kDHead = cfg.d_head, kDTiles = kDHead / kMmaK;
    constexpr int kColumns = piece_columns(kDHead), kThreadsPerRow = kColumns / kChunk;
    static_assert(kDHead % kColumns == 0, "tiles are cut into whole pieces");
    static_assert(cfg.B_r % (cfg.n_warps * kMmaM) == 0 && cfg.B_c % kMmaK == 0,
                  "a warp takes whole 16-row tiles of Q, and P whole k-tiles of keys");
    static_assert(cfg.B_r % (cfg.n_threads() / kThreadsPerRow) == 0 &&
                      cfg.B_c % (cfg.n_threads() / kThreadsPerRow) == 0,
                  "every thread copies the same number of chunks of a tile");
    static_assert(cfg.static_row_stride >= 0);

    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kThreads = cfg.n_threads();
    constexpr int kRowTiles = B_r / cfg.n_warps / kMmaM; // per warp
    constexpr int kKeyTiles = B_c / kMmaN, kKeyPairs = B_c / kMmaK;
    constexpr int kOTiles = kDHead / kMmaN;
    constexpr int kQKSteps = kDTiles * kKeyPairs, kPVSteps = kKeyPairs * kDTiles;
    constexpr uint32_t kStage = 2 * B_c * kDHead * sizeof(Element); // K_0, V_0, K_1, V_1
    constexpr uint32_t kOnes = cfg.dtype == DType::FP16 ? 0x3c003c00 : 0x3f803f80; // 1.0 twice

    extern __shared__ __align__(128) Element smem[];
    const uint32_t Q_smem = smem_address(smem); // (B_r, d_head)
    const uint32_t K_smem = Q_smem + B_r * kDHead * int(sizeof(Element)); // (B_c, d_head)
    const uint32_t V_smem = K_smem + B_c * kDHead * int(sizeof(Element)); // (B_c, d_head)

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp * kRowTiles * kMmaM;
    const uint32_t warp_Q_smem = Q_smem + warp_row * kColumns * int(sizeof(Element));
    uint32_t lane_offset[4], K_lane_offset[4];
    set_lane_offsets<kColumns>(lane_offset, K_lane_offset);

    // A stride in the config holds for all four tensors; without one, their strides are read.
    constexpr int kStride = cfg.static_row_stride;
    const int Q_stride = kStride ? kStride : args.Q_strides.row;
    const int K_stride = kStride ? kStride : args.K_strides.row;
    const int V_stride = kStride ? kStride : args.V_strides.row;
    const int64_t O_stride = kStride ? kStride : args.O_strides.row;

    // The keys that a query sees end here. In causal attention the mask is aligned to the bottom
    // right: query i sees key j if j <= i + len_k - len_q. A number below 1 means no key. Rows past
    // len_q see more, and are not stored.
    auto visible_end = [&](int query) {
        const int right = cfg.window && !cfg.causal ? args.window_right : 0;
        return args.len_k + (cfg.window || cfg.causal ? query + 1 - args.len_q + right : 0);
    };
    // They begin here, or at 0.
    auto visible_begin = [&](int query) {
        return cfg.window ? query - args.len_q + args.len_k - args.window_left : 0;
    };
    // causal tiles of a head: the longest first
    auto row_of_block = [&](int block) {
        return (cfg.causal ? int(gridDim.x) - 1 - block : block) * B_r;
    };
    const int first_row = row_of_block(blockIdx.x);
    const int last_query = min(first_row + B_r, args.len_q) - 1;
    const Element *Q_gmem = head_gmem(args.Q, args.Q_strides) + thread_offset<kColumns>(Q_stride);
    const Element *K_gmem =
        kv_head_gmem(args.K, args.K_strides, args.heads_per_kv) + thread_offset<kColumns>(K_stride);
    const Element *V_gmem =
        kv_head_gmem(args.V, args.V_strides, args.heads_per_kv) + thread_offset<kColumns>(V_stride);
    // the first key of block j; a tile has one block at least, though all of it may be hidden
    int key = (max(min(visible_end(last_query), args.len_k), 1) - 1) / B_c * B_c;

    // Copies the block at `key`, where X_gmem points, and moves X_gmem to the block before it. An
    // address computed from `key` is slower: see `ring_by_key` in docs/tuning.md.
    auto copy = [&](uint32_t tile_smem, const Element *&X_gmem, int stride, int keys_left) {
        copy_tile_async<B_c, kDHead, kThreads>(tile_smem, X_gmem, 0, stride,
                                               [&](int) { return keys_left >= 0 ? 16 : 0; });
        X_gmem -= int64_t(B_c) * stride;
    };
    // Loads: k-tile k of the warp's rows of Q; one ldmatrix of K or V, 16 keys and 16 columns
    uint32_t Q_rmem[2][kRowTiles][4], K_rmem[kRing][4], V_rmem[kRing][4];
    auto load_Q = [&](int k) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            ldmatrix_x4(Q_rmem[k % 2][i],
                        fragment_address<B_r, kColumns>(warp_Q_smem, lane_offset, i * kMmaM, k));
        }
    };
    auto load_K = [&](uint32_t stage, int step) {
        ldmatrix_x4(K_rmem[step % kRing],
                    fragment_address<B_c, kColumns>(K_smem + stage, K_lane_offset,
                                                    step % kKeyPairs * kMmaK, step / kKeyPairs));
    };
    auto load_V = [&](uint32_t stage, int step) {
        ldmatrix_x4_trans(V_rmem[step % kRing],
                          fragment_address<B_c, kColumns>(V_smem + stage, lane_offset,
                                                          step / kDTiles * kMmaK, step % kDTiles));
    };

    // 1. Q: global → shared; the last K and V follow, then the K before them
    auto is_query = [&](int row) { return first_row + row < args.len_q ? 16 : 0; };
    auto is_key = [&](int row) { return key + row < args.len_k ? 16 : 0; };
    copy_tile_async<B_r, kDHead, kThreads>(Q_smem, Q_gmem, first_row, Q_stride, is_query);
    cp_async_commit();
    copy_tile_async<B_c, kDHead, kThreads>(K_smem, K_gmem, key, K_stride, is_key);
    cp_async_commit();
    copy_tile_async<B_c, kDHead, kThreads>(V_smem, V_gmem, key, V_stride, is_key);
    cp_async_commit();
    K_gmem += int64_t(key - B_c) * K_stride;
    V_gmem += int64_t(key - B_c) * V_stride;
    copy(K_smem + kStage, K_gmem, K_stride,
         key - B_c - max(visible_begin(first_row), 0) / B_c * B_c);
    cp_async_commit();
    cp_async_wait<2>(); // Q and K_j have landed, V_j and K_{j-1} may be in flight
    __syncthreads(); // a warp reads rows that other warps have copied
    load_Q(0);
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
        load_K(0, step);
    }

    float O_rmem[kRowTiles][kOTiles][4] = {};
    float L_rmem[kRowTiles][4] = {}; // P @ 1: each column holds l
    float scaled_m[kRowTiles][2], exact_l[kRowTiles][2] = {}; // of this lane's columns
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        scaled_m[i][0] = scaled_m[i][1] = kLowest;
    }
    uint32_t stage = 0;
    bool is_done;
    do {
        // 2. S = Q @ K^T, limited by tanh, -inf where a row sees no key
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

        if constexpr (cfg.softcap) {
            limit(S_rmem, args.scale_in_cap);
        }
        const int row_anew = cfg.window || cfg.causal ? row_of_block(block_index_anew()) : 0;
        if (key + B_c > visible_end(row_anew)) {
            hide_columns<cfg.window || cfg.causal, false>(S_rmem, visible_end(row_anew) - key);
        }
        if constexpr (cfg.window) {
            if (key + B_c > args.len_k) {
                hide_columns<false, false>(S_rmem, args.len_k - key);
            }
            if (key < visible_begin(row_anew + B_r - 1)) {
                hide_columns<true, true>(S_rmem, visible_begin(row_anew) - key);
            }
        }
        const int first_key = max(visible_begin(row_anew), 0) / B_c * B_c; // of the last block

        // 3. V_{j-1} and K_{j-2}: global → shared, in flight until the next block's barrier
        cp_async_wait<0>(); // V_j and K_{j-1} have landed
        __syncthreads(); // no warp reads K_j or V_{j+1} any more
#pragma unroll
        for (int step = 0; step < kAhead; ++step) {
            load_V(stage, step); // ahead of 16 copies on the same path
        }
        copy(V_smem + (stage ^ kStage), V_gmem, V_stride, key - B_c - first_key);
        copy(K_smem + stage, K_gmem, K_stride, key - 2 * B_c - first_key);
        cp_async_commit();

        // 4. m; l = l · rescale, O = O · rescale if a row's maximum has grown much
        float rescale[kRowTiles][2];
        bool grown = false;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            grown |= update_maximum(S_rmem[i], args.scale, scaled_m[i], rescale[i]);
        }
        if (__any_sync(0xffffffff, grown)) {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    exact_l[i][half] *= rescale[i][half];
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

        // 5. P = 2^(S - m), l += P @ 1, O += P @ V, a k-tile of keys at a time
        uint32_t P_rmem[kKeyPairs][kRowTiles][4];
#pragma unroll
        for (int step = 0; step < kPVSteps; ++step) {
            const int k = step / kDTiles, n = step % kDTiles;
            if (n == 0) {
                exponentiate<cfg.dtype, cfg.lse>(P_rmem[k], exact_l, S_rmem, args.scale, scaled_m,
                                                 k);
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
        is_done = key < first_key;
    } while (!is_done);

    // 6. l = l + 2^(sink - m); LSE = (m + log2(l)) · ln(2), registers → global; O = O / l,
    // registers → shared
    const float sink =
        args.sinks == nullptr ? -INFINITY : to_float<cfg.dtype>(args.sinks[blockIdx.y]) * kLog2e;
    float *head_lse = args.lse + (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * args.len_q;
    __syncwarp(); // O takes the place of this warp's own rows of Q
    const uint32_t O_smem = Q_smem;
    // Row g of 8 has chunk n of a row at n ^ g. So n flips the bits of g · 16 in the lane's own
    // offset; the bits above them count rows, those below words. A store's address is one XOR with
    // a constant, without a shift.
    constexpr int kChunks = kColumns / kChunk; // of a row of a piece
    const uint32_t O_lane_smem = warp_Q_smem + smem_offset<kColumns>(lane / 4, lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = first_row + warp_row + i * kMmaM + half * 8 + lane / 4;
            const bool sees = !(cfg.window || cfg.causal) || visible_end(query) > 0;
            const float m = fmaxf(scaled_m[i][half], sink); // l and O follow it by one factor
            const float rescale = exp2_approx(scaled_m[i][half] - m),
                        P_sink = exp2_approx(sink - m);
            const float l = fmaf(L_rmem[i][2 * half], rescale, P_sink);
            const float inverse_l = sees ? rescale * reciprocal_approx(l) : 0;
            if constexpr (cfg.lse) {
                const float l = fmaf(quad_sum(exact_l[i][half]), rescale, P_sink);
                if (args.lse != nullptr && lane % 4 == 0 && query < args.len_q) {
                    head_lse[query] = (m + log2_approx(l)) * kLn2;
                }
            }
#pragma unroll
            for (int n = 0; n < kOTiles; ++n) {
                const float *O = &O_rmem[i][n][2 * half];
                store_smem_4((O_lane_smem ^ n % kChunks * kChunkBytes) +
                                 (i * kMmaM + half * 8) * kColumns * int(sizeof(Element)) +
                                 piece_offset<B_r, kColumns>(n / kChunks),
                             pack<cfg.dtype>(O[0] * inverse_l, O[1] * inverse_l));
            }
        }
    }
    __syncwarp(); // a lane reads what other lanes of its warp have written

    // 7. O: shared → global, 8 lanes per row of 128 bytes
    constexpr int kRowsPerPass = 32 / kThreadsPerRow;
    const int row = warp_row + lane / kThreadsPerRow, col = lane % kThreadsPerRow * kChunk;
    Element *O_gmem = head_gmem(args.O, args.O_strides) + (first_row + row) * O_stride + col;
#pragma unroll
    for (int i = 0; i < kRowTiles * kMmaM; i += kRowsPerPass) {
        if (first_row + row + i < args.len_q) {
#pragma unroll
            for (int piece = 0; piece < kDHead / kColumns; ++piece) {
                store_gmem_16_streaming(O_gmem + piece * kColumns,
                                        load_smem_16(O_smem + piece_offset<B_r, kColumns>(piece) +
                                                     smem_offset<kColumns>(row + i, col)));
            }
        }
        O_gmem += kRowsPerPass * O_stride;
    }
}

} // namespace o12
