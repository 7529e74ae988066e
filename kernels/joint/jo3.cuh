#pragma once
// Step 3 of the joint family: norm and rotary embedding while Q and K are loaded. Parent: jo2.
//
// What changed
//   1. Attention norms and turns Q and K while it loads them: a lane has whole pairs of its
//      fragment of Q, and 8 elements of a row of K. There is one launch, and there are no buffers.
//      norm_kernel is left out.
//   2. The norm is over all heads. So the thread block of one head reads whole rows for their rstd,
//      a warp per row.
//   3. A thread block has 16 warps, so that all 250 queries of a sample of 186 + 64 tokens share
//      each row of K that it norms.
//
// Why: of such a sample, of width 128, jo2 writes and reads 2 · 128 KB of Q and K in bf16, half of
// its 512 KB, and takes two launches. The price: each of 8 heads reads all of q and k, 8 · 128 KB,
// mostly from L2. At batch 64 that is 66 MB, 12 us at 5.5 TB/s. The squares of the 500 rows are
// 64,000 products per head, beside 62,500 exponentials, and as many conversions.
// Expected, on an H100: at batch 1 4 us instead of 6, since one launch goes; at batch 64 slower.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 81 us at a batch of 64, where jo2 takes 32.
//
// Phases: 1 Q, 2 K, V, 3 S, 4 P, 5 O, 6 store.

#include "cp_async.cuh"
#include "kernels/joint/arguments.cuh"
#include "kernels/joint/parts.cuh"

namespace jo3 {

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    attention_kernel(const __grid_constant__ JointKernelArgs args) {
    constexpr JointKernelConfig cfg = Kernels::value;
    constexpr int B_c = cfg.B_c, kDHead = cfg.d_head, kHeadChunks = kDHead / kChunk;

    extern __shared__ __align__(128) Element smem[];
    const uint32_t K_smem = smem_address(smem); // (B_c, d_head)
    const uint32_t V_smem = K_smem + B_c * kDHead * int(sizeof(Element)); // (B_c, d_head)
    uint32_t lane_offset[4], K_lane_offset[4];
    set_lane_offsets<kDHead>(lane_offset, K_lane_offset);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = blockIdx.y, sample = blockIdx.z;
    const int n_queries = args.length + args.context_queries, n_keys = args.length + args.context;
    const int first_query = (blockIdx.x * cfg.n_warps + warp) * kMmaM;

    // 1. Q: global → registers, normed and turned; rows behind the last query are copies of it
    const int n_chunks = args.heads * kHeadChunks;
    float rstd[2]; // of rows g and g + 8
#pragma unroll 1
    for (int i = 0; i < kMmaM; ++i) {
        const int query = min(first_query + i, n_queries - 1);
        const float found =
            row_rstd<cfg.dtype>(q_row_gmem(args, sample, query), n_chunks, args.eps);
        rstd[0] = i == lane / 4 ? found : rstd[0];
        rstd[1] = i == lane / 4 + 8 ? found : rstd[1];
    }
    uint32_t Q_rmem[kDHead / kMmaK][1][4]; // (16, d_head)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query = min(first_query + half * 8 + lane / 4, n_queries - 1);
        const Element *row_gmem = q_row_gmem(args, sample, query) + head * kDHead;
        const Element *weight_gmem = q_weight_gmem(args, query) + head * kDHead;
#pragma unroll
        for (int i = 0; i < kDHead / kMmaN; ++i) {
            const int column = i * kMmaN + lane % 4 * 2; // of a pair
            float x = to_float<cfg.dtype>(row_gmem[column]) * rstd[half] *
                      to_float<cfg.dtype>(weight_gmem[column]);
            float y = to_float<cfg.dtype>(row_gmem[column + 1]) * rstd[half] *
                      to_float<cfg.dtype>(weight_gmem[column + 1]);
            if (args.rotary != nullptr && query < args.length) {
                const float *angle_gmem = args.rotary + int64_t(query) * kDHead + column;
                turn(x, y, angle_gmem[0], angle_gmem[1]);
            }
            Q_rmem[i / 2][0][i % 2 * 2 + half] = pack<cfg.dtype>(x, y);
        }
    }

    float O_rmem[1][kDHead / kMmaN][4] = {};
    Statistics statistics;
    for (int key = 0; key < n_keys; key += B_c) {
        // 2. K, V: global → shared, K normed and turned; behind the last key V is zeros
        __syncthreads(); // no warp reads the block before this one any more
#pragma unroll
        for (int first = 0; first < B_c * kHeadChunks; first += cfg.n_threads()) {
            const int i = first + threadIdx.x;
            if (i >= B_c * kHeadChunks) {
                break;
            }
            const int row = i / kHeadChunks, column = i % kHeadChunks * kChunk;
            const int token = min(key + row, n_keys - 1);
            cp_async_16(V_smem + smem_offset<kDHead>(row, column),
                        v_row_gmem(args, sample, token) + head * kDHead + column,
                        key + row < n_keys ? kChunkBytes : 0);
        }
#pragma unroll 1 // a row takes a hundred instructions
        for (int row = warp; row < B_c; row += cfg.n_warps) {
            const int token = min(key + row, n_keys - 1);
            const Element *row_gmem = k_row_gmem(args, sample, token);
            const float k_rstd = row_rstd<cfg.dtype>(row_gmem, n_chunks, args.eps);
            if (lane < kHeadChunks) { // the head's own chunks are read again, from L1
                const int chunk = head * kHeadChunks + lane;
                float x_rmem[kChunk];
                load_chunk<cfg.dtype>(x_rmem, row_gmem, chunk);
                scale_chunk<cfg.dtype>(x_rmem, k_rstd, k_weight_gmem(args, token), chunk);
                if (args.rotary != nullptr && token < args.length) {
                    turn_chunk<kDHead>(x_rmem, args.rotary, token, chunk);
                }
                const uint32_t offset = smem_offset<kDHead>(row, lane * kChunk);
                *reinterpret_cast<uint4 *>(smem + offset / sizeof(Element)) =
                    pack_chunk<cfg.dtype>(x_rmem);
            }
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads(); // a warp reads rows that other warps have copied
        if (first_query >= n_queries) {
            continue; // a warp without queries copies alone
        }

        // 3. S = Q @ K^T
        float S_rmem[1][B_c / kMmaN][4] = {};
        multiply_QK<Kernels>(S_rmem, Q_rmem, K_smem, K_lane_offset);
        if (key + B_c > n_keys) {
            hide_keys(S_rmem, n_keys - key);
        }

        // 4. P = 2^(S · scale - m)
        update(statistics, S_rmem, O_rmem, args.scale);
        uint32_t P_rmem[B_c / kMmaK][1][4];
        round_P<cfg.dtype>(P_rmem, S_rmem);

        // 5. O += P @ V
        multiply_PV<Kernels>(O_rmem, P_rmem, V_smem, lane_offset);
    }

    // 6. O / l: registers → global
    store_O<cfg.dtype>(O_rmem, statistics, args, head, first_query, n_queries);
}

} // namespace jo3
