#pragma once
// Step 1 of the backward_sync family: the base. The gradients dQ, dK and dV of attention.
//
//   S = Q K^T · scale    P = e^(S - LSE)    dP = dO V^T    δ = Σ_d dO ∘ O    dS = P ∘ (dP - δ)
//   dQ = dS K · scale    dK = dS^T Q · scale    dV = P^T dO
//
// The forward pass has P nowhere in memory, and so the backward pass computes it again, from Q, K
// and the LSE. dQ is a sum over keys, dK and dV are sums over queries. A thread block that kept all
// three would need every query and every key.
//
// The parts
//   1. Three launches. delta_kernel writes δ and the scaled LSE of each query. In dq_kernel a
//      thread block has a tile of queries and walks the keys; in dkdv_kernel it has a tile of keys
//      and walks the queries of all heads that share them. Each sum stays in the registers of one
//      thread block: there is no atomic addition, and results are the same in every run.
//   2. A warp has 16 rows of the tile. In dkdv_kernel it computes S^T and dP^T, so that P^T and
//      dS^T are operands of the next products as they lie in registers.
//   3. ldmatrix reads Q, K and dO along their rows for one product, and transposed for another,
//      from one copy in shared memory.
//   4. Any lengths, grouped heads and a scale come with the call. Masks, softcap and sequences of
//      various lengths are compiled in.
//
// Why it is slow: S and dP are computed twice, so seven products do the work of five. A fragment of
// 16 x 16 elements of B, 512 bytes, serves two mma of 16 x 8 x 16. An A100's SM takes 4 cycles for
// the two, and its shared memory carries 512 bytes in 4 cycles. S and dP need A's fragments on top,
// half as many with 32 columns: 4 products at 1.5 and 3 at 1 are 9 units of shared memory. On an
// H100 one unit per product would be 2 · 1024 FLOP per cycle and SM, 460 TFLOP/s at 1.7 GHz.
// Every block of copies is waited for before any of its products, by 8 warps per SM.
// Expected: at most 5/9 of 460 TFLOP/s, 255; with the waits 90 to 130, at length 2048 on an H100.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 2048, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 32: 204, 0.74. Cost: 243
// registers per thread, 48 KiB of shared memory per block, 2 blocks per SM.
// benchmark:end
// Verdict: 204 TFLOP/s on an H200 at length 2048, 70% of PyTorch's flash backend; far above what
// was expected.
//
// Phases, of dq_kernel: 1 Q, dO, 2 K, V, 3 S, dP, 4 dS, 5 dQ, 6 store. Of dkdv_kernel: 1 K, V, 2 Q,
// dO, 3 S^T, dP^T, 4 P^T, dS^T, 5 dV, dK, 6 store.

#include "cp_async.cuh"
#include "kernels/backward_sync/arguments.cuh"
#include "kernels/backward_sync/parts.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

namespace p1 {

// C (16, kTiles * 8) += A (16, d_head) @ B (kTiles * 8, d_head)^T. A's rows are those of a warp in
// a tile of kARows.
template <typename Kernels, int kARows, int kTiles>
__device__ __forceinline__ void multiply_rows(float (&C_rmem)[1][kTiles][4], uint32_t A_smem,
                                              uint32_t B_smem, const uint32_t (&lane_offset)[4],
                                              const uint32_t (&B_lane_offset)[4]) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.d_head);
#pragma unroll
    for (int k = 0; k < cfg.d_head / kMmaK; ++k) {
        uint32_t A_rmem[1][4];
        ldmatrix_x4(A_rmem[0], fragment_address<kARows, kColumns>(A_smem, lane_offset, 0, k));
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
            uint32_t B_rmem[4];
            ldmatrix_x4(B_rmem, fragment_address<kTiles * kMmaN, kColumns>(B_smem, B_lane_offset,
                                                                           n * kMmaK, k));
            add_product<cfg.dtype>(C_rmem, A_rmem, B_rmem, n);
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
        multiply_rows<Kernels, B_r>(S_rmem, Q_smem + warp_offset, K_smem, lane_offset,
                                    K_lane_offset);
        multiply_rows<Kernels, B_r>(dP_rmem, dO_smem + warp_offset, V_smem, lane_offset,
                                    K_lane_offset);

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
    cp_async_wait<0>(); // a tile that sees no key has waited for nothing

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

    float dK_rmem[1][kOwnColumns / kMmaN][4] = {}, dV_rmem[1][kOwnColumns / kMmaN][4] = {};
    const int last_row = min(tile.first_row + B_r, tile.n_rows) - 1;
    const int first = max(tile.first_row + queries.first, 0) / B_c * B_c;
    const int end = min(last_row + queries.last + 1, tile.n_columns);
    auto copy_block = [&](int head, const Statistics *statistics, int query) {
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
            const int own = query + threadIdx.x;
            of_column[threadIdx.x] =
                own < tile.n_columns ? statistics[own] : Statistics{INFINITY, 0};
        }
    };
    for (int i = 0; i < args.heads_per_kv; ++i) {
        const int head = blockIdx.y * args.heads_per_kv + i;
        const Statistics *statistics =
            statistics_of(args, gridDim.y * args.heads_per_kv, head) + tile.column_begin;
        for (int query = first; query < end; query += B_c) {
            // 2. Q, dO and the statistics: global → shared, zeros past the end
            __syncthreads(); // no warp reads the block before this one any more
            copy_block(head, statistics, query);
            cp_async_wait<0>();
            __syncthreads(); // a warp reads what other warps have copied

            // 3. S^T = K @ Q^T, dP^T = V @ dO^T
            float S_rmem[1][B_c / kMmaN][4] = {}, dP_rmem[1][B_c / kMmaN][4] = {};
            multiply_rows<Kernels, B_r>(S_rmem, K_smem + warp_offset, Q_smem, lane_offset,
                                        Q_lane_offset);
            multiply_rows<Kernels, B_r>(dP_rmem, V_smem + warp_offset, dO_smem, lane_offset,
                                        Q_lane_offset);

            // 4. P^T, dS^T = P^T (dP^T - δ), 0 where a query does not see a key
#pragma unroll
            for (int n = 0; n < B_c / kMmaN; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    find_dS<Kernels>(S_rmem[0][n][i], dP_rmem[0][n][i],
                                     of_column[n * kMmaN + lane % 4 * 2 + i % 2], args);
                }
            }
            if (query + B_c > tile.first_row + queries.last + 1 ||
                query < tile.first_row + B_r - 1 + queries.first) {
                hide(S_rmem, dP_rmem, queries, tile.n_columns, tile.first_row + warp_row, query);
            }

            // 5. dV += P^T @ dO, dK += dS^T @ Q
            multiply_columns<Kernels>(dV_rmem, S_rmem, dO_smem + warp_pieces, lane_offset);
            multiply_columns<Kernels>(dK_rmem, dP_rmem, Q_smem + warp_pieces, lane_offset);
        }
    }
    cp_async_wait<0>(); // a tile that no query sees has waited for nothing

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

} // namespace p1
