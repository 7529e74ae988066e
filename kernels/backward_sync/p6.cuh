#pragma once
// Step 6 of the backward_sync family: two products side by side. Parent: p5.
//
// What changed
//   1. While a warp multiplies 16 queries for dV or dK, it finds S or dP of the next 16: a step of
//   each by turns.
//   2. Beside the last 16 queries of a block it finds its part of dQ of the block before, in turns
//   likewise. Before the first block dS is zeros, which are added to a sum, so that no branch parts
//   the two products.
//
// Why: a scheduler has two warps, and one of them often waits at a barrier. In p5 each step of S
// or dP is 4 mma that add to the sums of the step before. It takes the latency of mma, about 33
// cycles, where the tensor cores need 24, and a step of dQ waits for its own ldmatrix too. Per 32
// queries a warp has 24 such steps: here 16 of them lie beside 4 mma of dV or dK that wait for no
// sums. The work is the same: 3840 cycles of mma and 4480 of shared memory per 64 x 128 scores,
// for which p5 takes about 9000 cycles. S or dP needs 16 registers more beside dV or dK.
// Expected: 1.1 times as fast as p5.
//
// benchmark:begin
// benchmark:end
// Verdict: not measured yet.
//
// Phases of gradients_kernel: as in p5; 3 of the next part, or 6, runs beside 5.

#include "cp_async.cuh"
#include "kernels/backward_sync/arguments.cuh"
#include "kernels/backward_sync/parts.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

namespace p6 {

// A (kRowTiles * 16, d_head): a warp's rows of a tile of kRows. All steps of d_head stay in
// registers, or the one that was read last.
template <typename Kernels, int kRows, int kRowTiles = 1>
struct OwnRows {
    static constexpr int kSteps = Kernels::value.d_head / kMmaK;
    static constexpr int kHeld = Kernels::value.holds_rows() ? kSteps : 1;
    uint32_t A_smem, A_rmem[kHeld][kRowTiles][4];

    __device__ __forceinline__ void read(const uint32_t (&lane_offset)[4], int k) {
        constexpr int kColumns = piece_columns(Kernels::value.d_head);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            ldmatrix_x4(A_rmem[k % kHeld][i],
                        fragment_address<kRows, kColumns>(A_smem, lane_offset, i * kMmaM, k));
        }
    }

    __device__ __forceinline__ void hold(const uint32_t (&lane_offset)[4]) {
#pragma unroll
        for (int k = 0; kHeld > 1 && k < kSteps; ++k) {
            read(lane_offset, k);
        }
    }
};

// S (kRowTiles * 16, kTiles * 8) += A (kRowTiles * 16, d_head) @ B (kTiles * 8, d_head)^T, steps
// begin to end - 1 of d_head. B is rows of a tile of B_c.
template <typename Kernels, int kRows, int kRowTiles, int kTiles>
__device__ __forceinline__ void
multiply_rows(float (&S_rmem)[kRowTiles][kTiles][4], OwnRows<Kernels, kRows, kRowTiles> &A,
              uint32_t B_smem, const uint32_t (&lane_offset)[4], const uint32_t (&B_lane_offset)[4],
              int begin, int end) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.d_head);
    constexpr int kHeld = OwnRows<Kernels, kRows, kRowTiles>::kHeld;
#pragma unroll
    for (int k = begin; k < end; ++k) {
        if constexpr (!cfg.holds_rows()) {
            A.read(lane_offset, k);
        }
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
            const uint32_t offset =
                fragment_address<cfg.B_c, kColumns>(0, B_lane_offset, n * kMmaK, k);
            uint32_t B_rmem[4];
            ldmatrix_x4(B_rmem, B_smem + offset);
            add_product<cfg.dtype>(S_rmem, A.A_rmem[k % kHeld], B_rmem, n);
        }
    }
}

// multiply_columns, with a step of another product after each 16 columns of C, so that mma need
// not wait for the fragments and the sums of one product.
template <typename Kernels, int kSteps, int kRowTiles, int kTiles, typename Step>
__device__ __forceinline__ void multiply_beside(float (&C_rmem)[kRowTiles][kTiles][4],
                                                const uint32_t (&A_rmem)[kSteps][kRowTiles][4],
                                                uint32_t B_smem, const uint32_t (&lane_offset)[4],
                                                Step step) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.d_head);
#pragma unroll
    for (int n = 0; n < kTiles / 2; ++n) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            uint32_t B_rmem[4];
            ldmatrix_x4_trans(
                B_rmem, fragment_address<cfg.B_c, kColumns>(B_smem, lane_offset, k * kMmaK, n));
            add_product<cfg.dtype>(C_rmem, A_rmem[k], B_rmem, n);
        }
        step(n);
    }
}

// P = 2^(S · scale - lse) in S's place. A lane's first query is of_lane[0]. To P_smem go the
// factors of dS: P, times the slope of tanh.
template <typename Kernels, int kRowTiles, int kTiles>
__device__ __forceinline__ void find_P(float (&S_rmem)[kRowTiles][kTiles][4], uint32_t P_smem,
                                       const Statistics *of_lane,
                                       const BackwardSyncKernelArgs &args) {
    float P_rmem[kRowTiles][kTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles * kTiles * 4; ++i) {
        const int row_tile = i / 4 / kTiles, n = i / 4 % kTiles;
        const Statistics query = of_lane[n * kMmaN + i % 2];
        float &S = S_rmem[row_tile][n][i % 4], &P = P_rmem[row_tile][n][i % 4];
        float slope = 1;
        if constexpr (Kernels::value.softcap) {
            asm("tanh.approx.f32 %0, %1;" : "=f"(S) : "f"(S * args.scale_in_cap));
            slope = fmaf(-S, S, 1.0f); // of tanh
        }
        S = exp2_approx(fmaf(S, args.scale, -query.lse));
        P = S * slope;
    }
    uint32_t P_rounded[kTiles / 2][kRowTiles][4];
    round_P<Kernels::value.dtype>(P_rounded, P_rmem);
    store_fragments<Kernels>(P_smem, P_rounded);
}

// dS = P (dP - δ) in dP's place, with the P that the other warp has stored.
template <typename Kernels, int kRowTiles, int kTiles>
__device__ __forceinline__ void find_dS(float (&dP_rmem)[kRowTiles][kTiles][4], uint32_t P_smem,
                                        const Statistics *of_lane) {
    float P_rmem[kRowTiles][kTiles][4];
    load_fragments<Kernels>(P_rmem, P_smem);
#pragma unroll
    for (int i = 0; i < kRowTiles * kTiles * 4; ++i) {
        const int row_tile = i / 4 / kTiles, n = i / 4 % kTiles;
        float &dP = dP_rmem[row_tile][n][i % 4];
        dP = P_rmem[row_tile][n][i % 4] * (dP - of_lane[n * kMmaN + i % 2].delta);
    }
}

// dQ += dS @ K, a warp's part of it, of a block whose dS^T is a tile (B_r, B_c). `multiply` is
// given the steps, as many as d_head has.
template <typename Kernels, typename Multiply>
__device__ __forceinline__ void add_dQ(const SumsOfWarp<Kernels> &dQ, uint32_t dS_smem,
                                       uint32_t K_smem, Multiply multiply) {
    using Sums = SumsOfWarp<Kernels>;
    constexpr auto cfg = Kernels::value;
    float dQ_rmem[Sums::kRowTiles][Sums::kTiles][4] = {};
    auto add_keys = [&](int k) {
        uint32_t dS_rmem[Sums::kRowTiles][4];
#pragma unroll
        for (int i = 0; i < Sums::kRowTiles; ++i) {
            ldmatrix_x4_trans(dS_rmem[i], transposed_address<cfg.B_r, piece_columns(cfg.B_c), true>(
                                              dS_smem, dQ.lane, k, dQ.row + i * kMmaM));
        }
#pragma unroll
        for (int n = 0; n < Sums::kTiles / 2; ++n) {
            uint32_t K_rmem[4];
            ldmatrix_x4_trans(K_rmem, transposed_address<cfg.B_r, piece_columns(cfg.d_head)>(
                                          K_smem, dQ.lane, k, dQ.column + n * kMmaK));
            add_product<cfg.dtype>(dQ_rmem, dS_rmem, K_rmem, n);
        }
    };
    multiply([&](int step) {
#pragma unroll
        for (int k = step * kMmaK; k < cfg.B_r; k += cfg.d_head) {
            add_keys(k);
        }
    });
#pragma unroll
    for (int i = 0; i < Sums::kRowTiles * Sums::kTiles * 4; ++i) {
        const int row_tile = i / 4 / Sums::kTiles, n = i / 4 % Sums::kTiles;
        atomicAdd(dQ.accumulator(row_tile, n, i % 4), dQ_rmem[row_tile][n][i % 4]);
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ BackwardSyncKernelArgs args) {
    clear_sums<Kernels>(args);
    write_statistics<Kernels>(args);
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.warps() * 32)
    convert_kernel(const __grid_constant__ BackwardSyncKernelArgs args) {
    convert_sums<Kernels>(args);
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.warps() * 32)
    gradients_kernel(const __grid_constant__ BackwardSyncKernelArgs args) {
    constexpr BackwardSyncKernelConfig cfg = Kernels::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kDHead = cfg.d_head;
    constexpr int kPairs = cfg.warps() / 2, kRowTiles = B_r / kMmaM / kPairs;
    constexpr int kThreads = cfg.warps() * 32;
    constexpr int kPart = cfg.part();
    constexpr int kColumns = piece_columns(kDHead);

    extern __shared__ __align__(128) Element smem[];
    constexpr uint32_t kBlock = B_c * kDHead * sizeof(Element);
    constexpr uint32_t kStage = 2 * kBlock + B_c * sizeof(Statistics);
    constexpr uint32_t kNext = cfg.stages() == 2 ? kStage : 0; // from one stage to the other
    constexpr uint32_t kOwn = B_r * kDHead * sizeof(Element), kScores = B_r * B_c * sizeof(Element);
    const uint32_t ring_smem = smem_address(smem); // Q_0, dO_0, statistics, Q_1, dO_1, statistics
    // (B_r, d_head): before the ring has a block, its place
    const uint32_t V_smem = ring_smem + (cfg.holds_rows() ? 0 : kStage);
    const uint32_t K_smem = // (B_r, d_head)
        ring_smem + (cfg.holds_rows() ? max(2 * kStage, kOwn) : kStage + kOwn);
    const uint32_t dS_smem = K_smem + kOwn; // (2, B_r, B_c)
    const uint32_t P_smem = dS_smem + 2 * kScores; // (2, fragments of all pairs)

    auto own_tile = [&] {
        return find_tile<Kernels, B_r>(args.cu_seqlens_k, args.cu_seqlens_q, args.n_sequences,
                                       args.len_k, args.len_q);
    };
    Tile tile = own_tile();
    if (tile.first_row >= tile.n_rows) {
        return; // the block that a sequence may have too many
    }
    const Band keys = keys_of_query<Kernels>(args, tile.n_columns, tile.n_rows);
    const Band queries = {-keys.last, -keys.first}; // that see a key
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp % kPairs * kRowTiles * kMmaM;
    const bool finds_dK = warp >= kPairs; // or else dV
    const uint32_t warp_offset = warp_row * kColumns * int(sizeof(Element));
    uint32_t lane_offset[4], Q_lane_offset[4];
    set_lane_offsets<kColumns>(lane_offset, Q_lane_offset);

    // 1. K, V: global → shared
    auto key_bytes = [&](int row) { return tile.first_row + row < tile.n_rows ? 16 : 0; };
    auto copy_keys = [&](uint32_t X_smem, const void *X, const TensorStrides &strides) {
        const Element *X_gmem = head_gmem(X, strides) + tile.row_begin * strides.row +
                                thread_offset<kColumns>(strides.row);
        copy_tile_async<B_r, kDHead, kThreads>(X_smem, X_gmem, tile.first_row, int(strides.row),
                                               key_bytes);
    };
    copy_keys(K_smem, args.K, args.K_strides);
    copy_keys(V_smem, args.V, args.V_strides);
    cp_async_commit();

    cp_async_wait<0>();
    __syncthreads(); // a warp reads rows that other warps have copied
    OwnRows<Kernels, B_r, kRowTiles> own = {(finds_dK ? V_smem : K_smem) + warp_offset};
    own.hold(lane_offset);

    float sum_rmem[kRowTiles][kDHead / kMmaN][4] = {}; // dK or dV
    const int last_row = min(tile.first_row + B_r, tile.n_rows) - 1;
    const int first = max(tile.first_row + queries.first, 0) / B_c * B_c;
    const int end = min(last_row + queries.last + 1, tile.n_columns);
    // Of head i of the group; zeros past the end: with them P is 1, and dO and dS are 0.
    auto copy_block = [&](uint32_t stage, int i, int query) {
        const int head = blockIdx.y * args.heads_per_kv + i;
        auto query_bytes = [&](int row) {
            return i < args.heads_per_kv && query + row < end ? 16 : 0;
        };
        auto copy_queries = [&](uint32_t X_smem, const void *X, const TensorStrides &strides) {
            const Element *X_gmem = static_cast<const Element *>(X) + blockIdx.z * strides.batch +
                                    head * strides.head + tile.column_begin * strides.row +
                                    thread_offset<kColumns>(strides.row);
            copy_tile_async<B_c, kDHead, kThreads>(X_smem, X_gmem, query, int(strides.row),
                                                   query_bytes);
        };
        copy_queries(ring_smem + stage, args.Q, args.Q_strides);
        copy_queries(ring_smem + stage + kBlock, args.dO, args.dO_strides);
        if (threadIdx.x < B_c) {
            const Statistics *statistics =
                statistics_of(args, gridDim.y * args.heads_per_kv, head) + tile.column_begin;
            cp_async_8(ring_smem + stage + 2 * kBlock + threadIdx.x * sizeof(Statistics),
                       statistics + query + threadIdx.x, query_bytes(threadIdx.x) / 2);
        }
        cp_async_commit();
    };
    __syncthreads(); // no warp reads V in the ring's place any more
    copy_block(0, 0, first);
    for (uint32_t i = threadIdx.x * kChunkBytes; i < kScores; i += kThreads * kChunkBytes) {
        store_smem_16(dS_smem + i, {}); // dS before the first block
    }
    uint32_t stage = 0, dS_slot = 0;
    // 6. dQ += dS @ K of the block before this one
    const int sum_row = (tile.column_begin / B_c + tile.sequence) * B_c; // of query 0
    auto add_dQ_before = [&](int i, int query, uint32_t slot, auto multiply) {
        const bool is_first = query == first; // of its head
        const int last = first + (end - 1 - first) / B_c * B_c;
        const SumsOfWarp<Kernels> dQ(args, blockIdx.y * args.heads_per_kv + max(i - is_first, 0),
                                     sum_row + (is_first ? last : query - B_c));
        add_dQ(dQ, dS_smem + slot, K_smem, multiply);
    };
    auto all_steps = [](auto step) {
#pragma unroll
        for (int k = 0; k < kDHead / kMmaK; ++k) {
            step(k);
        }
    };
    for (int i = 0; i < args.heads_per_kv; ++i) {
        for (int query = first; query < end; query += B_c) {
            // 2. Q, dO and the statistics of the next block: global → shared
            const bool is_last = query + B_c >= end; // of its head
            const int next_head = i + is_last, next_query = is_last ? first : query + B_c;
            const uint32_t Q_smem = ring_smem + stage, dO_smem = Q_smem + kBlock; // (B_c, d_head)
            const Statistics *of_column = reinterpret_cast<const Statistics *>(
                smem + (stage + 2 * kBlock) / sizeof(Element)); // (B_c)
            cp_async_wait<0>();
            // this block and dS of the one before are here for every warp, and none reads that
            // block
            __syncthreads();
            stage ^= kNext;
            if constexpr (cfg.stages() == 2) {
                copy_block(stage, next_head, next_query);
            }
            dS_slot ^= kScores;

            // 3. S^T = K @ Q^T, or dP^T = V @ dO^T
            float S_rmem[kRowTiles][kPart / kMmaN][4];
            auto find_scores = [&](int part) {
                return [&, part](int k) {
#pragma unroll
                    for (int i = 0; k == 0 && i < kRowTiles * kPart / kMmaN * 4; ++i) {
                        S_rmem[i % kRowTiles][i / kRowTiles / 4][i / kRowTiles % 4] = 0;
                    }
                    const uint32_t part_offset = part * kColumns * int(sizeof(Element));
                    multiply_rows(S_rmem, own, (finds_dK ? dO_smem : Q_smem) + part_offset,
                                  lane_offset, Q_lane_offset, k, k + 1);
                };
            };
            all_steps(find_scores(0));
#pragma unroll
            for (int part = 0; part < B_c; part += kPart) {

                // 4. P^T, or dS^T = P^T (dP^T - δ), 0 where a query does not see a key
                const Statistics *of_lane = of_column + part + lane % 4 * 2;
                const uint32_t slot_smem = P_smem + thread_index() % (kThreads / 2) * 16 +
                                           part / kPart % 2 * B_r * kPart * int(sizeof(Element));
                if (!finds_dK) {
                    find_P<Kernels>(S_rmem, slot_smem, of_lane, args);
                }
                pair_sync<Kernels>(); // P is here, and the other slot is read
                if (finds_dK) {
                    find_dS<Kernels>(S_rmem, slot_smem, of_lane);
                }
                if (query + B_c > tile.first_row + queries.last + 1 ||
                    query < tile.first_row + B_r - 1 + queries.first ||
                    tile.first_row + B_r > tile.n_rows) {
                    hide<true>(S_rmem, S_rmem, queries, tile.n_columns, tile.first_row + warp_row,
                               query + part, tile.n_rows);
                }

                // 5. dS^T: registers → shared; dV += P^T @ dO, or dK += dS^T @ Q
                uint32_t scores_rmem[kPart / kMmaK][kRowTiles][4]; // P^T or dS^T
                round_P<cfg.dtype>(scores_rmem, S_rmem);
                if (finds_dK) {
                    store_scores<Kernels>(dS_smem + dS_slot, warp_row, part, scores_rmem);
                }
                auto multiply = [&](auto step) {
                    multiply_beside<Kernels>(sum_rmem, scores_rmem,
                                             (finds_dK ? Q_smem : dO_smem) +
                                                 part * kColumns * int(sizeof(Element)),
                                             lane_offset, step);
                };
                if (part + kPart < B_c) {
                    multiply(find_scores(part + kPart));
                } else {
                    add_dQ_before(i, query, dS_slot ^ kScores, multiply);
                }
            }
            if constexpr (cfg.stages() == 1) {
                __syncthreads(); // no warp reads this block any more
                copy_block(stage, next_head, next_query);
            }
        }
    }
    cp_async_wait<0>(); // zeros behind the last block
    __syncthreads(); // dS of the last block is here
    if (first < end) {
        add_dQ_before(args.heads_per_kv, first, dS_slot, all_steps);
    }

    // 7. dK · scale or dV: registers → global
    tile = own_tile(); // found again, since the loop has no registers to keep all of it
    const int n_rows = tile.n_rows - tile.first_row - warp_row;
    auto first_gmem = [&](void *X, const TensorStrides &strides) {
        return head_gmem(X, strides) + (tile.row_begin + tile.first_row + warp_row) * strides.row;
    };
    const TensorStrides &strides = finds_dK ? args.dK_strides : args.dV_strides;
    store_rows<cfg.dtype>(first_gmem(finds_dK ? args.dK : args.dV, strides), strides.row, n_rows,
                          sum_rmem, finds_dK ? args.softmax_scale : 1.0f);
}

} // namespace p6
