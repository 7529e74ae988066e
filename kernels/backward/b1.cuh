#pragma once
// Step 1 of the backward family: TMA and wgmma. Parent in the story: p1; no line of it is left.
// One kernel computes dQ, another dK and dV, as in p1; the order of phases is that of h1.
//
// What changed
//   1. Of the scores the forward pass has kept one number per row, the LSE. S is computed again,
//      and P = exp(S - LSE) needs no maximum and no sum.
//   2. delta_kernel computes delta, the sum of dO · O of each query. With it dS = P · (dP - delta).
//   3. dQ is a sum over keys, dK and dV over queries. A thread block owns 64 queries (dq_kernel) or
//      64 keys (dkdv_kernel) and keeps its sums in registers. Nothing is added in memory.
//   4. P and dS go through shared memory, transposed where they multiply dO and Q.
//
// Why: both kernels compute S and dP, seven products instead of five. In return no sum of dQ in
// fp32 passes through memory, and every call gives the same bits. For 64 x 64 scores wgmma take
// 1792 cycles, of which 1280 count: at most 71% of the tensor cores' rate.
// Expected: 150 TFLOP/s, since copies, products and exponentials of a block take turns.
//
// benchmark:begin
// Measured sustained (NVIDIA H200, CUDA 13.0, bf16), TFLOP/s at length 4096, and share of
// PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 64: 408, 1.30. Cost: 222
// registers per thread, 80 KiB of shared memory per block, 2 blocks per SM.
// benchmark:end
// Verdict: 405 TFLOP/s on an H200 at length 8192, more than twice what was expected, and 28% more
// than PyTorch's flash backend. One warpgroup waits while the other thread blocks of its SM
// compute.
//
// Phases of dq_kernel; those of dkdv_kernel are the same with queries and keys exchanged
//   1. barriers; Q, dO: global → shared
//   2. K_j, V_j: global → shared
//   3. S = Q @ K^T, dP = dO @ V^T
//   4. P = 2^(S - LSE), dS = P · (dP - delta)
//   5. dS: registers → shared
//   6. dQ += dS @ K
//   7. dQ · softmax_scale: registers → shared → global

#include "kernels/backward/parts.cuh"

namespace b1 {

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
    const uint32_t dS_smem = V_smem + kTileBytes<B_c>; // (B_r, B_c)
    const uint32_t own_full = dS_smem + piece_bytes(B_r), full = own_full + kBarrierBytes;

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
    const uint32_t dS = wgmma_descriptor(dS_smem);
    const uint32_t K_rows = wgmma_descriptor(K_smem, piece_bytes(B_c));
    float S_rmem[B_c / 2], dP_rmem[B_c / 2], dQ_rmem[kDHead / 2] = {};
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

        // 5. dS: registers → shared
#pragma unroll
        for (int k = 0; k < kKeySteps; ++k) {
            uint32_t packed[4];
            pack_fragment<cfg.dtype>(packed, dP_rmem, k);
            store_fragment<B_r>(dS_smem, warp_row, k, packed);
        }
        fence_async_proxy();
        __syncthreads(); // wgmma reads the rows of dS that all warps have written

        // 6. dQ += dS @ K
        hold(dQ_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeySteps; ++k) {
            wgmma<cfg.dtype, true>(dQ_rmem, dS + column_step<B_r>(k), K_rows + row_step(k), true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(dQ_rmem);
        __syncthreads(); // K, V and dS may be written again
    }

    // 7. dQ · softmax_scale: registers → shared → global; each warp through its rows of Q
    store_rows<cfg.dtype, B_r>(args.dQ, place, Q_smem, warp_row, dQ_rmem, args.softmax_scale);
    tma_store_wait_read(); // after its end another thread block may have this memory
}

template <typename Config>
__global__ void __launch_bounds__(kWarpgroup, 1)
    dkdv_kernel(const __grid_constant__ BackwardKernelArgs args) {
    constexpr BackwardKernelConfig cfg = Config::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c;
    constexpr int kQuerySteps = B_r / kWgmmaK, kKeySteps = B_c / kWgmmaK;

    extern __shared__ __align__(kPatternBytes) Element smem[];
    const uint32_t K_smem = smem_address(smem); // (B_c, d_head)
    const uint32_t V_smem = K_smem + kTileBytes<B_c>; // (B_c, d_head)
    const uint32_t Q_smem = V_smem + kTileBytes<B_c>; // (B_r, d_head)
    const uint32_t dO_smem = Q_smem + kTileBytes<B_r>; // (B_r, d_head)
    const uint32_t P_smem = dO_smem + kTileBytes<B_r>; // P^T (B_c, B_r)
    const uint32_t dS_smem = P_smem + piece_bytes(B_c); // dS^T (B_c, B_r)
    const uint32_t own_full = dS_smem + piece_bytes(B_c), full = own_full + kBarrierBytes;

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
    const uint32_t P = wgmma_descriptor(P_smem), dS = wgmma_descriptor(dS_smem);
    const uint32_t Q_rows = wgmma_descriptor(Q_smem, piece_bytes(B_r));
    const uint32_t dO_rows = wgmma_descriptor(dO_smem, piece_bytes(B_r));
    float S_rmem[B_c / 2], dP_rmem[B_c / 2], dK_rmem[kDHead / 2] = {}, dV_rmem[kDHead / 2] = {};
    OfRows queries;
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

        // 3. S = Q @ K^T, dP = dO @ V^T
        barrier_wait(full, i % 2);
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

        // 5. P^T, dS^T: registers → shared
#pragma unroll
        for (int k = 0; k < kKeySteps; ++k) {
            uint32_t packed[4];
            pack_fragment<cfg.dtype>(packed, S_rmem, k);
            store_transposed<B_c>(P_smem, warp_row, k, packed);
            pack_fragment<cfg.dtype>(packed, dP_rmem, k);
            store_transposed<B_c>(dS_smem, warp_row, k, packed);
        }
        fence_async_proxy();
        __syncthreads(); // wgmma reads rows of P^T and dS^T that all warps have written

        // 6. dV += P^T @ dO, dK += dS^T @ Q
        hold(dV_rmem);
        hold(dK_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            wgmma<cfg.dtype, true>(dV_rmem, P + column_step<B_c>(k), dO_rows + row_step(k), true);
        }
#pragma unroll
        for (int k = 0; k < kQuerySteps; ++k) {
            wgmma<cfg.dtype, true>(dK_rmem, dS + column_step<B_c>(k), Q_rows + row_step(k), true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(dV_rmem);
        hold(dK_rmem);
        __syncthreads(); // Q, dO, P and dS may be written again
    }

    // 7. dV, dK · softmax_scale: registers → shared → global; each warp through its rows of V and K
    store_rows<cfg.dtype, B_c>(args.dV, place, V_smem, warp_row, dV_rmem, 1);
    store_rows<cfg.dtype, B_c>(args.dK, place, K_smem, warp_row, dK_rmem, args.softmax_scale);
    tma_store_wait_read(); // after its end another thread block may have this memory
}

} // namespace b1
