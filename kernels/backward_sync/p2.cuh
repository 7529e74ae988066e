#pragma once
// Step 2 of the backward_sync family: own rows in registers. Parent: p1.
//
// What changed
//   1. Before its loop a warp reads its 16 rows of the thread block's own two tiles into registers:
//      of Q and dO, or of K and V. They are A in S and dP, the same for every block.
//   2. In dkdv_kernel S^T and dP^T have 16 queries at a time instead of 32.
//   3. Steps of S and dP take turns, so that four mma in a row do not wait for each other.
//   At d_head 256 the rows do not fit, and 1 and 2 are left out.
//
// Why: with blocks of 32 columns, p1 reads a fragment of A for every two of B. At d_head 128 a warp
// of dq_kernel has 64 ldmatrix for the 96 mma of a block, and a warp of dkdv_kernel 80 for 128. The
// 32 of A go: one ldmatrix serves two mma in all seven products. In the units of p1 that is 7
// instead of 9; shared memory alone allows 5/7 of 460 TFLOP/s, 329 instead of 255.
// A warp of 32 rows would have half as many fragments of B, but its dK and dV alone would fill 256
// registers per thread. 16 rows fill 128, K and V 64. S^T and dP^T of 32 queries fill 32 more: that
// spilled 12 bytes. Of 16 queries they fill 16, and fewer cost nothing where no block reads A.
// Expected: no spills; 144 ldmatrix per warp and pair of blocks become 112. The copies are waited
// for as before, and so the time falls by less than 2/9: 1.1 to 1.2 times as fast as p1.
// Cost: dq_kernel takes 226 registers per thread instead of 166, so that an SM of an A100 or H100
// has 8 of its warps instead of 12. dkdv_kernel has 8 as before.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 2048, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 32: 218, 0.77. Cost: 255
// registers per thread, 48 KiB of shared memory per block, 2 blocks per SM.
// benchmark:end
// Verdict: on an H200 3% faster than p1 at length 512, and 7% at 2048.
//
// Phases: as p1; phase 1 ends in registers.

#include "cp_async.cuh"
#include "kernels/backward_sync/arguments.cuh"
#include "kernels/backward_sync/parts.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

namespace p2 {

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

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.row_warps() * 32)
    dq_kernel(const __grid_constant__ BackwardSyncKernelArgs args) {
    constexpr BackwardSyncKernelConfig cfg = Kernels::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kDHead = cfg.d_head;
    constexpr int kThreads = cfg.row_warps() * 32;
    constexpr int kColumns = piece_columns(kDHead);

    extern __shared__ __align__(128) Element smem[];
    const uint32_t Q_smem = smem_address(smem); // (B_r, d_head)
    const uint32_t dO_smem = Q_smem + B_r * kDHead * int(sizeof(Element)); // (B_r, d_head)
    const uint32_t K_smem = dO_smem + B_r * kDHead * int(sizeof(Element)); // (B_c, d_head)
    const uint32_t V_smem = K_smem + B_c * kDHead * int(sizeof(Element)); // (B_c, d_head)

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
    auto copy_block = [&](int key) {
        auto key_bytes = [&](int row) { return key + row < tile.n_columns ? 16 : 0; };
        copy_tile_async<B_c, kDHead, kThreads>(K_smem, K_gmem, key, int(args.K_strides.row),
                                               key_bytes);
        copy_tile_async<B_c, kDHead, kThreads>(V_smem, V_gmem, key, int(args.V_strides.row),
                                               key_bytes);
        cp_async_commit();
    };
    for (int key = first; key < end; key += B_c) {
        // 2. K, V: global → shared
        __syncthreads(); // no warp reads the block before this one any more
        copy_block(key);
        cp_async_wait<0>();
        __syncthreads(); // a warp reads rows that other warps have copied

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
    }

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
    const uint32_t K_smem = smem_address(smem); // (B_r, d_head)
    const uint32_t V_smem = K_smem + B_r * kDHead * int(sizeof(Element)); // (B_r, d_head)
    const uint32_t Q_smem = V_smem + B_r * kDHead * int(sizeof(Element)); // (B_c, d_head)
    const uint32_t dO_smem = Q_smem + B_c * kDHead * int(sizeof(Element)); // (B_c, d_head)
    Statistics *of_column =
        reinterpret_cast<Statistics *>(smem + 2 * (B_r + B_c) * kDHead); // (B_c)

    const Tile tile = find_tile<Kernels, B_r>(args.cu_seqlens_k, args.cu_seqlens_q,
                                              args.n_sequences, args.len_k, args.len_q);
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
    auto copy_block = [&](int head, int query) {
        auto query_bytes = [&](int row) { return query + row < tile.n_columns ? 16 : 0; };
        auto copy_queries = [&](uint32_t X_smem, const void *X, const TensorStrides &strides) {
            const Element *X_gmem = static_cast<const Element *>(X) + blockIdx.z * strides.batch +
                                    head * strides.head + tile.column_begin * strides.row +
                                    thread_offset<kColumns>(strides.row);
            copy_tile_async<B_c, kDHead, kThreads>(X_smem, X_gmem, query, int(strides.row),
                                                   query_bytes);
        };
        copy_queries(Q_smem, args.Q, args.Q_strides);
        copy_queries(dO_smem, args.dO, args.dO_strides);
        cp_async_commit();
        if (threadIdx.x < B_c) {
            const Statistics *statistics =
                statistics_of(args, gridDim.y * args.heads_per_kv, head) + tile.column_begin;
            const int own = query + threadIdx.x;
            of_column[threadIdx.x] =
                own < tile.n_columns ? statistics[own] : Statistics{INFINITY, 0};
        }
    };
    for (int i = 0; i < args.heads_per_kv; ++i) {
        const int head = blockIdx.y * args.heads_per_kv + i;
        for (int query = first; query < end; query += B_c) {
            // 2. Q, dO and the statistics: global → shared, zeros past the end
            __syncthreads(); // no warp reads the block before this one any more
            copy_block(head, query);
            cp_async_wait<0>();
            __syncthreads(); // a warp reads what other warps have copied

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
        }
    }

    // 6. dK · scale, dV: registers → global
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

} // namespace p2
