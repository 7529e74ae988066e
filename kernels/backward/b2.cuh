#pragma once
// Step 2 of the backward family: P and dS stay in registers. Parent: b1.
//
// What changed
//   1. dq_kernel rounds dS to 16 bits in registers. An accumulator has the layout of operand A
//      already, as P has in h2.
//   2. dkdv_kernel computes S^T = K @ Q^T and dP^T = V @ dO^T, in which keys are rows. So P^T and
//      dS^T are operands A of dV and dK without being transposed.
//   3. A query is now a column of dkdv_kernel's scores. A lane needs LSE and delta of 16 queries
//      instead of 2.
//
// Why: for 64 x 64 scores the warps of b1 stored three tiles of 8 KiB by stmatrix, and wgmma read
// these 24 KiB again. In between the 128 threads of each kernel met at a barrier.
// Expected: 220 TFLOP/s.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 4096, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 64: 415, 1.34. Cost: 235
// registers per thread, 64 KiB of shared memory per block, 2 blocks per SM.
// benchmark:end
// Verdict: on an H200 2 to 4% faster than b1, where half as much again was expected: P and dS in
// shared memory hid behind other thread blocks.
//
// Phases of dq_kernel; those of dkdv_kernel are the same with queries and keys exchanged
//   1. barriers; Q, dO: global → shared
//   2. K_j, V_j: global → shared
//   3. S = Q @ K^T, dP = dO @ V^T
//   4. P = 2^(S - LSE), dS = P · (dP - delta)
//   5. dQ += dS @ K
//   6. dQ · softmax_scale: registers → shared → global

#include "kernels/backward/parts.cuh"

namespace b2 {

// LSE as a logarithm to base 2, and delta, of queries that are rows: g and g + 8 of a lane.
struct OfRows {
    float lse[2], delta[2];

    __device__ static constexpr int index(int i) { return i / 2 % 2; } // of accumulator i
    __device__ __forceinline__ void load(const BackwardKernelArgs &args, int64_t first) {
        const int64_t row = first + threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 4;
        for (int half = 0; half < 2; ++half) {
            lse[half] = load_lse(args, row + 8 * half);
            delta[half] = args.delta[row + 8 * half];
        }
    }
};

// The same of queries that are columns: 8n + 2t and 8n + 2t + 1 of a lane.
template <int kQueries>
struct OfColumns {
    float lse[kQueries / 4], delta[kQueries / 4];

    __device__ static constexpr int index(int i) { return i / 4 * 2 + i % 2; } // of accumulator i
    __device__ __forceinline__ void load(const BackwardKernelArgs &args, int64_t first) {
        const int64_t row = first + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < kQueries / 4; ++i) {
            lse[i] = load_lse(args, row + i / 2 * 8 + i % 2);
            delta[i] = args.delta[row + i / 2 * 8 + i % 2];
        }
    }
};

// 4. P = 2^(S · scale - LSE) in the place of S, dS = P · (dP - delta) in that of dP.
template <int kCount, typename Queries>
__device__ __forceinline__ void weigh(float (&S_rmem)[kCount], float (&dP_rmem)[kCount],
                                      float scale, const Queries &queries) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int query = queries.index(i);
        S_rmem[i] = exp2_approx(fmaf(S_rmem[i], scale, -queries.lse[query]));
        dP_rmem[i] = S_rmem[i] * (dP_rmem[i] - queries.delta[query]);
    }
}

template <typename Config>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ BackwardKernelArgs args) {
    store_delta<Config::value.dtype>(args);
}

template <typename Config>
__global__ void __launch_bounds__(kWarpgroup, 1)
    dq_kernel(const __grid_constant__ BackwardKernelArgs args) {
    constexpr BackwardKernelConfig cfg = Config::value;
    static_assert(cfg.d_head == kDHead, "the kernels are written for d_head 128");
    static_assert(cfg.B_r == kWgmmaM && cfg.B_c == kPiece, "one warpgroup, one piece of keys");

    constexpr int B_r = cfg.B_r, B_c = cfg.B_c;
    constexpr int kKeySteps = B_c / kWgmmaK;

    extern __shared__ __align__(kPatternBytes) Element smem[];
    const uint32_t Q_smem = smem_address(smem); // (B_r, d_head)
    const uint32_t dO_smem = Q_smem + kTileBytes<B_r>; // (B_r, d_head)
    const uint32_t K_smem = dO_smem + kTileBytes<B_r>; // (B_c, d_head)
    const uint32_t V_smem = K_smem + kTileBytes<B_c>; // (B_c, d_head)
    const uint32_t own_full = V_smem + kTileBytes<B_c>, full = own_full + kBarrierBytes;

    const int warp_row = threadIdx.x / 32 * kWarpRows;
    const TilePlace place = own_place<B_r>(args.len_q, args.heads);
    const int key_blocks = args.len_k / B_c;

    // 1. barriers; Q, dO: global → shared
    if (threadIdx.x == 0) {
        barrier_init(own_full, 1);
        barrier_init(full, 1);
        barrier_init_fence();
        barrier_expect(own_full, 2 * kTileBytes<B_r>);
        tma_load_tile(Q_smem, args.Q, own_full, place);
        tma_load_tile(dO_smem, args.dO, own_full, place);
    }
    __syncthreads(); // no thread waits at a barrier that is not initialised

    const uint32_t Q = wgmma_descriptor(Q_smem), dO = wgmma_descriptor(dO_smem);
    const uint32_t K = wgmma_descriptor(K_smem), V = wgmma_descriptor(V_smem);
    const uint32_t K_rows = wgmma_descriptor(K_smem, piece_bytes(B_c));
    float S_rmem[B_c / 2], dP_rmem[B_c / 2], dQ_rmem[kDHead / 2] = {};
    uint32_t dS_rmem[kKeySteps][4];
    OfRows queries;
    queries.load(args, row_index(args, place));
    barrier_wait(own_full, 0);

    for (int j = 0; j < key_blocks; ++j) {
        // 2. K_j, V_j: global → shared
        if (threadIdx.x == 0) {
            const TilePlace K_place = {j * B_c, place.head / args.heads_per_kv, place.batch};
            barrier_expect(full, 2 * kTileBytes<B_c>);
            tma_load_tile(K_smem, args.K, full, K_place);
            tma_load_tile(V_smem, args.V, full, K_place);
        }

        // 3. S = Q @ K^T, dP = dO @ V^T
        barrier_wait(full, j % 2);
        hold(S_rmem);
        hold(dP_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(S_rmem, Q + column_step<B_r>(k), K + column_step<B_c>(k), k > 0);
        }
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(dP_rmem, dO + column_step<B_r>(k), V + column_step<B_c>(k), k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(S_rmem);
        hold(dP_rmem);

        // 4. P = 2^(S - LSE), dS = P · (dP - delta)
        weigh(S_rmem, dP_rmem, args.scale, queries);
#pragma unroll
        for (int k = 0; k < kKeySteps; ++k) {
            pack_fragment<cfg.dtype>(dS_rmem[k], dP_rmem, k);
        }

        // 5. dQ += dS @ K
        hold(dQ_rmem);
        hold(dS_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeySteps; ++k) {
            wgmma<cfg.dtype>(dQ_rmem, dS_rmem[k], K_rows + row_step(k), true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(dQ_rmem);
        hold(dS_rmem);
        __syncthreads(); // K and V may be written again
    }

    // 6. dQ · softmax_scale: registers → shared → global; each warp through its rows of Q
    store_rows<cfg.dtype, B_r>(args.dQ, place, Q_smem, warp_row, dQ_rmem, args.softmax_scale);
    tma_store_wait_read(); // after its end another thread block may have this memory
}

template <typename Config>
__global__ void __launch_bounds__(kWarpgroup, 1)
    dkdv_kernel(const __grid_constant__ BackwardKernelArgs args) {
    constexpr BackwardKernelConfig cfg = Config::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c;
    constexpr int kQuerySteps = B_r / kWgmmaK;

    extern __shared__ __align__(kPatternBytes) Element smem[];
    const uint32_t K_smem = smem_address(smem); // (B_c, d_head)
    const uint32_t V_smem = K_smem + kTileBytes<B_c>; // (B_c, d_head)
    const uint32_t Q_smem = V_smem + kTileBytes<B_c>; // (B_r, d_head)
    const uint32_t dO_smem = Q_smem + kTileBytes<B_r>; // (B_r, d_head)
    const uint32_t own_full = dO_smem + kTileBytes<B_r>, full = own_full + kBarrierBytes;

    const int warp_row = threadIdx.x / 32 * kWarpRows;
    const int q_blocks = args.len_q / B_r;
    const TilePlace place = own_place<B_c>(args.len_k, args.heads / args.heads_per_kv);
    const TilePlace first = {0, place.head * args.heads_per_kv, place.batch}; // of the queries
    // The queries of all heads that share these keys; in LSE and delta they follow each other.
    const int blocks = q_blocks * args.heads_per_kv;

    // 1. barriers; K, V: global → shared
    if (threadIdx.x == 0) {
        barrier_init(own_full, 1);
        barrier_init(full, 1);
        barrier_init_fence();
        barrier_expect(own_full, 2 * kTileBytes<B_c>);
        tma_load_tile(K_smem, args.K, own_full, place);
        tma_load_tile(V_smem, args.V, own_full, place);
    }
    __syncthreads(); // no thread waits at a barrier that is not initialised

    const uint32_t Q = wgmma_descriptor(Q_smem), dO = wgmma_descriptor(dO_smem);
    const uint32_t K = wgmma_descriptor(K_smem), V = wgmma_descriptor(V_smem);
    const uint32_t Q_rows = wgmma_descriptor(Q_smem, piece_bytes(B_r));
    const uint32_t dO_rows = wgmma_descriptor(dO_smem, piece_bytes(B_r));
    float S_rmem[B_r / 2], dP_rmem[B_r / 2], dK_rmem[kDHead / 2] = {}, dV_rmem[kDHead / 2] = {};
    uint32_t P_rmem[kQuerySteps][4], dS_rmem[kQuerySteps][4]; // transposed, as S and dP are
    OfColumns<B_r> queries;
    barrier_wait(own_full, 0);

    for (int i = 0; i < blocks; ++i) {
        // 2. Q_i, dO_i: global → shared
        if (threadIdx.x == 0) {
            const TilePlace Q_place = {i % q_blocks * B_r, first.head + i / q_blocks, place.batch};
            barrier_expect(full, 2 * kTileBytes<B_r>);
            tma_load_tile(Q_smem, args.Q, full, Q_place);
            tma_load_tile(dO_smem, args.dO, full, Q_place);
        }
        queries.load(args, row_index(args, first) + int64_t(i) * B_r);

        // 3. S^T = K @ Q^T, dP^T = V @ dO^T
        barrier_wait(full, i % 2);
        hold(S_rmem);
        hold(dP_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(S_rmem, K + column_step<B_c>(k), Q + column_step<B_r>(k), k > 0);
        }
#pragma unroll
        for (int k = 0; k < kDSteps; ++k) {
            wgmma<cfg.dtype>(dP_rmem, V + column_step<B_c>(k), dO + column_step<B_r>(k), k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(S_rmem);
        hold(dP_rmem);

        // 4. P = 2^(S - LSE), dS = P · (dP - delta)
        weigh(S_rmem, dP_rmem, args.scale, queries);
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            pack_fragment<cfg.dtype>(P_rmem[k], S_rmem, k);
            pack_fragment<cfg.dtype>(dS_rmem[k], dP_rmem, k);
        }

        // 5. dV += P^T @ dO, dK += dS^T @ Q
        hold(dV_rmem);
        hold(dK_rmem);
        hold(P_rmem);
        hold(dS_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            wgmma<cfg.dtype>(dV_rmem, P_rmem[k], dO_rows + row_step(k), true);
        }
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            wgmma<cfg.dtype>(dK_rmem, dS_rmem[k], Q_rows + row_step(k), true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(dV_rmem);
        hold(dK_rmem);
        hold(P_rmem);
        hold(dS_rmem);
        __syncthreads(); // Q and dO may be written again
    }

    // 6. dV, dK · softmax_scale: registers → shared → global; each warp through its rows of V and K
    store_rows<cfg.dtype, B_c>(args.dV, place, V_smem, warp_row, dV_rmem, 1);
    store_rows<cfg.dtype, B_c>(args.dK, place, K_smem, warp_row, dK_rmem, args.softmax_scale);
    tma_store_wait_read(); // after its end another thread block may have this memory
}

} // namespace b2
