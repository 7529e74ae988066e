#pragma once
// Step 2 of the joint family: norm and rotary embedding in one pass. Parent: jo1.
//
// What changed
//   1. The chunk of a lane has 4 whole pairs. norm_kernel turns them before it stores them, so that
//      Q and K are rounded once instead of twice.
//   2. Two launches instead of three: rotary_kernel is left out.
//
// Why: of a sample of 186 + 64 tokens of width 128 jo1 moves 702 KB in bf16, of which its rotary
// kernel reads and writes 4 · 186 · 256 bytes, 190 KB. 27% of the bytes go, and one of three
// launches. The table of 186 · 64 bytes stays in L1 and L2.
// Expected, on an H100 at batch 64: 20% less time than jo1, since the exponentials of attention
// stay; at batch 1, 6 us instead of 8.
//
// benchmark:begin
// benchmark:end
// Verdict: kept: calls take it. On an H200 32 us at a batch of 64 with 186 + 64 tokens, 6.8 at a
// batch of 1; torch.compile 59 and 15.5.
//
// Phases: norm: 1 the row, 2 rstd, 3 pairs, store; attention: 4 Q, 5 K, V, 6 S, 7 P, 8 O, 9 store.

#include "cp_async.cuh"
#include "kernels/joint/arguments.cuh"
#include "kernels/joint/parts.cuh"

namespace jo2 {

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    norm_kernel(const __grid_constant__ JointKernelArgs args) {
    constexpr JointKernelConfig cfg = Kernels::value;

    // 1. The row: of a sample's n_queries + n_keys rows the first n_queries are those of q
    const int n_queries = args.length + args.context_queries, n_keys = args.length + args.context;
    const unsigned row = (blockIdx.x * unsigned(cfg.n_threads()) + threadIdx.x) / 32;
    const int sample = row / (n_queries + n_keys);
    if (sample >= args.batch) {
        return;
    }
    int token = row % (n_queries + n_keys);
    const bool is_q = token < n_queries;
    token -= is_q ? 0 : n_queries;
    const int n_chunks = args.heads * (cfg.d_head / kChunk);
    const Element *row_gmem =
        is_q ? q_row_gmem(args, sample, token) : k_row_gmem(args, sample, token);
    const Element *weight_gmem = is_q ? q_weight_gmem(args, token) : k_weight_gmem(args, token);
    auto *normed_gmem = static_cast<uint4 *>(is_q ? args.Q_normed : args.K_normed) +
                        (int64_t(sample) * (is_q ? n_queries : n_keys) + token) * n_chunks;

    // 2. rstd = 1 / sqrt(mean of x² + eps)
    const float rstd = row_rstd<cfg.dtype>(row_gmem, n_chunks, args.eps);

    // 3. x · rstd · weight, turned: the row is read again, from L1
#pragma unroll 1
    for (int chunk = threadIdx.x % 32; chunk < n_chunks; chunk += 32) {
        float x_rmem[kChunk];
        load_chunk<cfg.dtype>(x_rmem, row_gmem, chunk);
        scale_chunk<cfg.dtype>(x_rmem, rstd, weight_gmem, chunk);
        if (args.rotary != nullptr && token < args.length) {
            turn_chunk<cfg.d_head>(x_rmem, args.rotary, token, chunk);
        }
        store_gmem_16(normed_gmem + chunk, pack_chunk<cfg.dtype>(x_rmem));
    }
}

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
    const int head = blockIdx.y, sample = blockIdx.z, width = args.heads * kDHead;
    const int n_queries = args.length + args.context_queries, n_keys = args.length + args.context;
    const int first_query = (blockIdx.x * cfg.n_warps + warp) * kMmaM;

    // 4. Q: global → registers; rows behind the last query are copies of it
    uint32_t Q_rmem[kDHead / kMmaK][1][4]; // (16, d_head)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query = min(first_query + half * 8 + lane / 4, n_queries - 1);
        const auto *row_gmem = reinterpret_cast<const uint32_t *>(
            static_cast<const Element *>(args.Q_normed) +
            (int64_t(sample) * n_queries + query) * width + head * kDHead);
#pragma unroll
        for (int i = 0; i < kDHead / kMmaN; ++i) {
            Q_rmem[i / 2][0][i % 2 * 2 + half] = row_gmem[i * 4 + lane % 4];
        }
    }

    float O_rmem[1][kDHead / kMmaN][4] = {};
    Statistics statistics;
    for (int key = 0; key < n_keys; key += B_c) {
        // 5. K, V: global → shared; zeros behind the last key
        __syncthreads(); // no warp reads the block before this one any more
#pragma unroll
        for (int first = 0; first < B_c * kHeadChunks; first += cfg.n_threads()) {
            const int i = first + threadIdx.x;
            if (i >= B_c * kHeadChunks) {
                break;
            }
            const int row = i / kHeadChunks, column = i % kHeadChunks * kChunk;
            const int token = min(key + row, n_keys - 1);
            const int bytes = key + row < n_keys ? kChunkBytes : 0;
            const uint32_t offset = smem_offset<kDHead>(row, column);
            cp_async_16(K_smem + offset,
                        static_cast<const Element *>(args.K_normed) +
                            (int64_t(sample) * n_keys + token) * width + head * kDHead + column,
                        bytes);
            cp_async_16(V_smem + offset, v_row_gmem(args, sample, token) + head * kDHead + column,
                        bytes);
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads(); // a warp reads rows that other warps have copied
        if (first_query >= n_queries) {
            continue; // a warp without queries copies alone
        }

        // 6. S = Q @ K^T
        float S_rmem[1][B_c / kMmaN][4] = {};
        multiply_QK<Kernels>(S_rmem, Q_rmem, K_smem, K_lane_offset);
        if (key + B_c > n_keys) {
            hide_keys(S_rmem, n_keys - key);
        }

        // 7. P = 2^(S · scale - m)
        update(statistics, S_rmem, O_rmem, args.scale);
        uint32_t P_rmem[B_c / kMmaK][1][4];
        round_P<cfg.dtype>(P_rmem, S_rmem);

        // 8. O += P @ V
        multiply_PV<Kernels>(O_rmem, P_rmem, V_smem, lane_offset);
    }

    // 9. O / l: registers → global
    store_O<cfg.dtype>(O_rmem, statistics, args, head, first_query, n_queries);
}

} // namespace jo2
