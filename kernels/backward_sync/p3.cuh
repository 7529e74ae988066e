#pragma once
// Step 3 of the backward_sync family: the next block in flight. Parent: p2.
//
// What changed
//   1. Shared memory has two blocks of the walk: one is multiplied while the next is copied.
//   2. They take the place of the thread block's own tiles, which are in registers by then.
//   3. The statistics of queries are copied by cp.async too, 8 bytes per query.
//   4. dq_kernel is compiled for 8 warps per SM. dkdv_kernel finds its tile again for the stores,
//   since its loop has no registers for all of a tile with variable lengths.
//   At d_head 256 the own tiles stay, and there is room for one block: it is copied as in p2.
//
// Why: in p2 a thread block waits about 600 cycles for each block, and 400 for 16 KB at 40 bytes
// per cycle. Only the other thread block of the SM multiplies then. Both have 2048 cycles of mma in
// a block of dkdv_kernel and 1536 in one of dq_kernel, longer than the copies of the next block
// take. So a ring of two hides the wait. One barrier per block says that it is here and that the
// one before it is read. Shared memory falls from 48.25 to 32.5 KB at d_head 128; a ring beside the
// own tiles would take 64.5 KB, and leave an RTX 4090 one thread block per SM instead of two.
// Expected: 1.2 to 1.4 times as fast as p2 on an H100.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 2048, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 32: 241, 0.86. Cost: 255
// registers per thread, 32 KiB of shared memory per block, 2 blocks per SM.
// benchmark:end
// Verdict: on an H200 10 to 13% faster than p2.
//
// Phases: as p2; phase 2 is for the next block.

#include "cp_async.cuh"
#include "kernels/backward_sync/arguments.cuh"
#include "kernels/backward_sync/parts.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

namespace p3 {

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

// P = 2^(S · scale - lse) in S's place, dS = P (dP - δ) in dP's, of one element.
template <typename Kernels>
__device__ __forceinline__ void find_dS(float &S, float &dP, Statistics query,
                                        const BackwardSyncKernelArgs &args) {
    float slope = 1;
    if constexpr (Kernels::value.softcap) {
        asm("tanh.approx.f32 %0, %1;" : "=f"(S) : "f"(S * args.scale_in_cap));
        slope = fmaf(-S, S, 1.0f); // of tanh
    }
    S = exp2_approx(fmaf(S, args.scale, -query.lse));
    dP = S * (dP - query.delta) * slope;
}

template <typename Kernels>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ BackwardSyncKernelArgs args) {
    write_statistics<Kernels>(args);
}

// For 8 warps per SM: ptxas would aim at 12 at d_head 96, with 168 registers, and spill.
template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.row_warps() * 32, 8 / Kernels::value.row_warps())
    dq_kernel(const __grid_constant__ BackwardSyncKernelArgs args) {
    constexpr BackwardSyncKernelConfig cfg = Kernels::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kDHead = cfg.d_head;
    constexpr int kThreads = cfg.row_warps() * 32;
    constexpr int kColumns = piece_columns(kDHead);

    extern __shared__ __align__(128) Element smem[];
    constexpr uint32_t kBlock = B_c * kDHead * sizeof(Element), kStage = 2 * kBlock;
    constexpr uint32_t kNext = cfg.stages() == 2 ? kStage : 0; // from one stage to the other
    const uint32_t ring_smem = smem_address(smem); // K_0, V_0, K_1, V_1: (B_c, d_head) each
    // (B_r, d_head) each: before the ring has a block, its place
    const uint32_t Q_smem = ring_smem + (cfg.holds_rows() ? 0 : kStage);
    const uint32_t dO_smem = Q_smem + B_r * kDHead * int(sizeof(Element));

    const Tile tile = find_tile<Kernels, B_r>(args.cu_seqlens_q, args.cu_seqlens_k,
                                              args.n_sequences, args.len_q, args.len_k);
    if (tile.first_row >= tile.n_rows) {
        return; // the block that a sequence may have too many
    }
    const Band keys = keys_of_query<Kernels>(args, tile.n_rows, tile.n_columns);
    const int warp_row = threadIdx.x / 32 * kMmaM, lane = threadIdx.x % 32;
    const uint32_t warp_offset = warp_row * kColumns * int(sizeof(Element));
    uint32_t lane_offset[4], K_lane_offset[4];
    set_lane_offsets<kColumns>(lane_offset, K_lane_offset);

    // 1. Q, dO: global → shared
    auto query_bytes = [&](int row) { return tile.first_row + row < tile.n_rows ? 16 : 0; };
    auto copy_queries = [&](uint32_t X_smem, const void *X, const TensorStrides &strides) {
        const Element *X_gmem = head_gmem(X, strides) + tile.row_begin * strides.row +
                                thread_offset<kColumns>(strides.row);
        copy_tile_async<B_r, kDHead, kThreads>(X_smem, X_gmem, tile.first_row, int(strides.row),
                                               query_bytes);
    };
    copy_queries(Q_smem, args.Q, args.Q_strides);
    copy_queries(dO_smem, args.dO, args.dO_strides);
    cp_async_commit();

    Statistics of_row[2]; // of rows g and g + 8 of the warp
    const Statistics *statistics = statistics_of(args, gridDim.y, blockIdx.y) + tile.row_begin;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query = tile.first_row + warp_row + half * 8 + lane / 4;
        of_row[half] = query < tile.n_rows ? statistics[query] : Statistics{INFINITY, 0};
    }

    const Element *K_gmem = kv_head_gmem(args.K, args.K_strides, args.heads_per_kv) +
                            tile.column_begin * args.K_strides.row +
                            thread_offset<kColumns>(args.K_strides.row);
    const Element *V_gmem = kv_head_gmem(args.V, args.V_strides, args.heads_per_kv) +
                            tile.column_begin * args.V_strides.row +
                            thread_offset<kColumns>(args.V_strides.row);
    cp_async_wait<0>();
    __syncthreads(); // a warp reads rows that other warps have copied
    OwnRows<Kernels, B_r> Q = {Q_smem + warp_offset}, dO = {dO_smem + warp_offset};
    Q.hold(lane_offset);
    dO.hold(lane_offset);

    float dQ_rmem[1][kDHead / kMmaN][4] = {};
    const int last_row = min(tile.first_row + B_r, tile.n_rows) - 1;
    const int end = min(last_row + keys.last + 1, tile.n_columns);
    const int first = max(tile.first_row + keys.first, 0) / B_c * B_c;
    auto copy_block = [&](uint32_t stage, int key) { // zeros past the end
        auto key_bytes = [&](int row) { return key + row < end ? 16 : 0; };
        copy_tile_async<B_c, kDHead, kThreads>(ring_smem + stage, K_gmem, key,
                                               int(args.K_strides.row), key_bytes);
        copy_tile_async<B_c, kDHead, kThreads>(ring_smem + stage + kBlock, V_gmem, key,
                                               int(args.V_strides.row), key_bytes);
        cp_async_commit();
    };
    __syncthreads(); // no warp reads Q and dO in the ring's place any more
    copy_block(0, first);
    uint32_t stage = 0;
    for (int key = first; key < end; key += B_c) {
        // 2. K, V of the next block: global → shared
        const uint32_t K_smem = ring_smem + stage, V_smem = K_smem + kBlock; // (B_c, d_head)
        cp_async_wait<0>();
        __syncthreads(); // this block is here for every warp, and no warp reads the one before it
        stage ^= kNext;
        if constexpr (cfg.stages() == 2) {
            copy_block(stage, key + B_c);
        }

        // 3. S = Q @ K^T, dP = dO @ V^T
        float S_rmem[1][B_c / kMmaN][4] = {}, dP_rmem[1][B_c / kMmaN][4] = {};
        multiply_rows(S_rmem, dP_rmem, Q, dO, K_smem, V_smem, lane_offset, K_lane_offset);

        // 4. dS = P (dP - δ), 0 where a query does not see a key
#pragma unroll
        for (int n = 0; n < B_c / kMmaN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                find_dS<Kernels>(S_rmem[0][n][i], dP_rmem[0][n][i], of_row[i / 2], args);
            }
        }
        if (key + B_c > min(tile.first_row + keys.last + 1, tile.n_columns) ||
            key < tile.first_row + B_r - 1 + keys.first) {
            hide(S_rmem, dP_rmem, keys, tile.n_columns, tile.first_row + warp_row, key);
        }

        // 5. dQ += dS @ K
        multiply_columns<Kernels>(dQ_rmem, dP_rmem, K_smem, lane_offset);
        if constexpr (cfg.stages() == 1) {
            __syncthreads(); // no warp reads this block any more
            copy_block(stage, key + B_c);
        }
    }

    cp_async_wait<0>(); // zeros behind the last block

    // 6. dQ · scale: registers → global
    Element *dQ_gmem = head_gmem(args.dQ, args.dQ_strides) +
                       (tile.row_begin + tile.first_row + warp_row) * args.dQ_strides.row;
    store_rows<cfg.dtype>(dQ_gmem, args.dQ_strides.row, tile.n_rows - tile.first_row - warp_row,
                          dQ_rmem, args.softmax_scale);
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.row_warps() * Kernels::value.column_warps() * 32)
    dkdv_kernel(const __grid_constant__ BackwardSyncKernelArgs args) {
    constexpr BackwardSyncKernelConfig cfg = Kernels::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kDHead = cfg.d_head;
    constexpr int kRowWarps = cfg.row_warps(), kColumnWarps = cfg.column_warps();
    constexpr int kThreads = kRowWarps * kColumnWarps * 32;
    constexpr int kPart = cfg.part();
    constexpr int kColumns = piece_columns(kDHead), kOwnColumns = kDHead / kColumnWarps;
    static_assert(kOwnColumns % kColumns == 0, "a warp has whole pieces of dK and dV");

    extern __shared__ __align__(128) Element smem[];
    constexpr uint32_t kBlock = B_c * kDHead * sizeof(Element);
    constexpr uint32_t kStage = 2 * kBlock + B_c * sizeof(Statistics);
    constexpr uint32_t kNext = cfg.stages() == 2 ? kStage : 0; // from one stage to the other
    const uint32_t ring_smem = smem_address(smem); // Q_0, dO_0, statistics, Q_1, dO_1, statistics
    // (B_r, d_head) each: before the ring has a block, its place
    const uint32_t K_smem = ring_smem + (cfg.holds_rows() ? 0 : kStage);
    const uint32_t V_smem = K_smem + B_r * kDHead * int(sizeof(Element));

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
    __syncthreads(); // no warp reads K and V in the ring's place any more
    copy_block(0, 0, first);
    uint32_t stage = 0;
    for (int i = 0; i < args.heads_per_kv; ++i) {
        for (int query = first; query < end; query += B_c) {
            // 2. Q, dO and the statistics of the next block: global → shared
            const bool is_last = query + B_c >= end; // of its head
            const int next_head = i + is_last, next_query = is_last ? first : query + B_c;
            const uint32_t Q_smem = ring_smem + stage, dO_smem = Q_smem + kBlock; // (B_c, d_head)
            const Statistics *of_column = reinterpret_cast<const Statistics *>(
                smem + (stage + 2 * kBlock) / sizeof(Element)); // (B_c)
            cp_async_wait<0>();
            __syncthreads(); // this block is here for every warp, and none reads the one before it
            stage ^= kNext;
            if constexpr (cfg.stages() == 2) {
                copy_block(stage, next_head, next_query);
            }

#pragma unroll
            for (int part = 0; part < B_c; part += kPart) {
                // 3. S^T = K @ Q^T, dP^T = V @ dO^T
                const uint32_t part_offset = part * kColumns * int(sizeof(Element));
                float S_rmem[1][kPart / kMmaN][4] = {}, dP_rmem[1][kPart / kMmaN][4] = {};
                multiply_rows(S_rmem, dP_rmem, K, V, Q_smem + part_offset, dO_smem + part_offset,
                              lane_offset, Q_lane_offset);

                // 4. P^T, dS^T = P^T (dP^T - δ), 0 where a query does not see a key
#pragma unroll
                for (int n = 0; n < kPart / kMmaN; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        find_dS<Kernels>(S_rmem[0][n][i], dP_rmem[0][n][i],
                                         of_column[part + n * kMmaN + lane % 4 * 2 + i % 2], args);
                    }
                }
                if (query + B_c > tile.first_row + queries.last + 1 ||
                    query < tile.first_row + B_r - 1 + queries.first) {
                    hide(S_rmem, dP_rmem, queries, tile.n_columns, tile.first_row + warp_row,
                         query + part);
                }

                // 5. dV += P^T @ dO, dK += dS^T @ Q
                const uint32_t own_part = part_offset + warp_pieces;
                multiply_columns<Kernels>(dV_rmem, S_rmem, dO_smem + own_part, lane_offset);
                multiply_columns<Kernels>(dK_rmem, dP_rmem, Q_smem + own_part, lane_offset);
            }
            if constexpr (cfg.stages() == 1) {
                __syncthreads(); // no warp reads this block any more
                copy_block(stage, next_head, next_query);
            }
        }
    }
    cp_async_wait<0>(); // zeros behind the last block

    // 6. dK · scale, dV: registers → global
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

} // namespace p3
