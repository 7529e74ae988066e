#pragma once
// Step 4 of the backward_sync family: dK, dV and dQ in one kernel. Parent: p3.
//
// What changed
//   1. dq_kernel is left out. gradients_kernel, which was dkdv_kernel, stores dS^T in two slots of
//      shared memory too. Behind the barrier of the next block each warp multiplies dS of all keys
//      by some columns of K, which has a place of its own in shared memory.
//   2. It adds this part of dQ to sums in fp32, which lie in memory in the order of accumulators.
//   3. delta_kernel clears the sums, and convert_kernel makes dQ of them.
//   4. A thread block has 128 keys and 8 warps at d_head 128, and 32 keys at 256.
//
// Why: five products instead of seven, and less shared memory, which limits p3. There 64 x 128
// scores take 512 KB of ldmatrix in dkdv_kernel, 384 KB in dq_kernel and 128 KB of copies: 8192
// cycles at 128 bytes per cycle, beside 5376 cycles of mma. Here they take 512 KB, 192 KB for dQ,
// 16 KB of dS, 32 KB of copies and 32 KB of additions: 6272 cycles, beside 3840 of mma. The price
// is 1024 bytes per query to clear the sums and to read them. Thread blocks add in any order, so
// that two calls may differ in the last bits of dQ. With 64 keys per thread block the variant with
// all options spills, and copies and additions are twice as many.
// Expected: 1.3 times as fast as p3 from length 2048 on, as the cycles of shared memory.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 2048, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 128, B_c 32: 246, 0.84. Cost: 254
// registers per thread, 80 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: on an H200 6% slower than p3 at length 512, and 2% faster at 2048.
//
// Phases of gradients_kernel: as dkdv_kernel of p3; 6 is dQ, and 7 stores dK and dV.

#include "cp_async.cuh"
#include "kernels/backward_sync/arguments.cuh"
#include "kernels/backward_sync/parts.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

namespace p4 {

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

// S (kRowTiles * 16, kTiles * 8) += A (kRowTiles * 16, d_head) @ B (kTiles * 8, d_head)^T, and
// dP += C @ D^T, a step of each in turns. B and D are rows of tiles of B_c.
template <typename Kernels, int kRows, int kRowTiles, int kTiles>
__device__ __forceinline__ void
multiply_rows(float (&S_rmem)[kRowTiles][kTiles][4], float (&dP_rmem)[kRowTiles][kTiles][4],
              OwnRows<Kernels, kRows, kRowTiles> &A, OwnRows<Kernels, kRows, kRowTiles> &C,
              uint32_t B_smem, uint32_t D_smem, const uint32_t (&lane_offset)[4],
              const uint32_t (&B_lane_offset)[4]) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.d_head);
    constexpr int kHeld = OwnRows<Kernels, kRows, kRowTiles>::kHeld;
#pragma unroll
    for (int k = 0; k < cfg.d_head / kMmaK; ++k) {
        if constexpr (!cfg.holds_rows()) {
            A.read(lane_offset, k);
            C.read(lane_offset, k);
        }
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
            const uint32_t offset =
                fragment_address<cfg.B_c, kColumns>(0, B_lane_offset, n * kMmaK, k);
            uint32_t B_rmem[4], D_rmem[4];
            ldmatrix_x4(B_rmem, B_smem + offset);
            ldmatrix_x4(D_rmem, D_smem + offset);
            add_product<cfg.dtype>(S_rmem, A.A_rmem[k % kHeld], B_rmem, n);
            add_product<cfg.dtype>(dP_rmem, C.A_rmem[k % kHeld], D_rmem, n);
        }
    }
}

// P = 2^(S · scale - lse) in S's place, dS = P (dP - δ) in dP's. A lane's first query is
// of_lane[0].
template <typename Kernels, int kRowTiles, int kTiles>
__device__ __forceinline__ void
find_dS(float (&S_rmem)[kRowTiles][kTiles][4], float (&dP_rmem)[kRowTiles][kTiles][4],
        const Statistics *of_lane, const BackwardSyncKernelArgs &args) {
#pragma unroll
    for (int i = 0; i < kRowTiles * kTiles * 4; ++i) {
        const int row_tile = i / 4 / kTiles, n = i / 4 % kTiles;
        const Statistics query = of_lane[n * kMmaN + i % 2];
        float &S = S_rmem[row_tile][n][i % 4], &dP = dP_rmem[row_tile][n][i % 4];
        float slope = 1;
        if constexpr (Kernels::value.softcap) {
            asm("tanh.approx.f32 %0, %1;" : "=f"(S) : "f"(S * args.scale_in_cap));
            slope = fmaf(-S, S, 1.0f); // of tanh
        }
        S = exp2_approx(fmaf(S, args.scale, -query.lse));
        dP = S * (dP - query.delta) * slope;
    }
}

// dQ += dS @ K, a warp's part of it, of a block whose dS^T is a tile (B_r, B_c)
template <typename Kernels>
__device__ __forceinline__ void add_dQ(const SumsOfWarp<Kernels> &dQ, uint32_t dS_smem,
                                       uint32_t K_smem) {
    using Sums = SumsOfWarp<Kernels>;
    constexpr auto cfg = Kernels::value;
    float dQ_rmem[Sums::kRowTiles][Sums::kTiles][4] = {};
#pragma unroll 1 // the fragments of all steps at once would spill
    for (int k = 0; k < cfg.B_r; k += kMmaK) {
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
    }
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
    constexpr int kRowWarps = cfg.row_warps(), kColumnWarps = cfg.column_warps();
    constexpr int kThreads = cfg.warps() * 32;
    constexpr int kPart = cfg.part();
    constexpr int kColumns = piece_columns(kDHead), kOwnColumns = kDHead / kColumnWarps;
    static_assert(kOwnColumns % kColumns == 0, "a warp has whole pieces of dK and dV");

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
    const int warp_row = warp % kRowWarps * kMmaM;
    const int warp_column = warp / kRowWarps * kOwnColumns; // of dK and dV
    const uint32_t warp_offset = warp_row * kColumns * int(sizeof(Element));
    const uint32_t warp_pieces = warp_column * B_c * int(sizeof(Element)); // of Q and dO
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
    OwnRows<Kernels, B_r> K = {K_smem + warp_offset}, V = {V_smem + warp_offset};
    K.hold(lane_offset);
    V.hold(lane_offset);

    float dK_rmem[1][kOwnColumns / kMmaN][4] = {}, dV_rmem[1][kOwnColumns / kMmaN][4] = {};
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
    uint32_t stage = 0, dS_slot = 0;
    // 6. dQ += dS @ K of the block before this one
    const int sum_row = (tile.column_begin / B_c + tile.sequence) * B_c; // of query 0
    auto add_dQ_before = [&](int i, int query) {
        const bool is_first = query == first; // of its head
        const int last = first + (end - 1 - first) / B_c * B_c;
        if (i > 0 || !is_first) {
            const SumsOfWarp<Kernels> dQ(args, blockIdx.y * args.heads_per_kv + i - is_first,
                                         sum_row + (is_first ? last : query - B_c));
            add_dQ(dQ, dS_smem + dS_slot, K_smem);
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
            add_dQ_before(i, query);
            dS_slot ^= kScores;

#pragma unroll
            for (int part = 0; part < B_c; part += kPart) {
                // 3. S^T = K @ Q^T, dP^T = V @ dO^T
                const uint32_t part_offset = part * kColumns * int(sizeof(Element));
                float S_rmem[1][kPart / kMmaN][4] = {}, dP_rmem[1][kPart / kMmaN][4] = {};
                multiply_rows(S_rmem, dP_rmem, K, V, Q_smem + part_offset, dO_smem + part_offset,
                              lane_offset, Q_lane_offset);

                // 4. P^T, dS^T = P^T (dP^T - δ), 0 where a query does not see a key
                find_dS<Kernels>(S_rmem, dP_rmem, of_column + part + lane % 4 * 2, args);
                if (query + B_c > tile.first_row + queries.last + 1 ||
                    query < tile.first_row + B_r - 1 + queries.first ||
                    tile.first_row + B_r > tile.n_rows) {
                    hide<true>(S_rmem, dP_rmem, queries, tile.n_columns, tile.first_row + warp_row,
                               query + part, tile.n_rows);
                }

                // 5. dS^T: registers → shared; dV += P^T @ dO, dK += dS^T @ Q
                uint32_t dS_rmem[kPart / kMmaK][1][4];
                round_P<cfg.dtype>(dS_rmem, dP_rmem);
                if (warp < kRowWarps) { // the others have the same dS^T
                    store_scores<Kernels>(dS_smem + dS_slot, warp_row, part, dS_rmem);
                }
                const uint32_t own_part = part_offset + warp_pieces;
                multiply_columns<Kernels>(dV_rmem, S_rmem, dO_smem + own_part, lane_offset);
                multiply_columns<Kernels>(dK_rmem, dS_rmem, Q_smem + own_part, lane_offset);
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
        add_dQ_before(args.heads_per_kv, first);
    }

    // 7. dK · scale, dV: registers → global
    tile = own_tile(); // found again, since the loop has no registers to keep all of it
    const int n_rows = tile.n_rows - tile.first_row - warp_row;
    auto first_gmem = [&](void *X, const TensorStrides &strides) {
        return head_gmem(X, strides) + (tile.row_begin + tile.first_row + warp_row) * strides.row +
               warp_column;
    };
    store_rows<cfg.dtype>(first_gmem(args.dK, args.dK_strides), args.dK_strides.row, n_rows,
                          dK_rmem, args.softmax_scale);
    store_rows<cfg.dtype>(first_gmem(args.dV, args.dV_strides), args.dV_strides.row, n_rows,
                          dV_rmem, 1.0f);
}

} // namespace p4
