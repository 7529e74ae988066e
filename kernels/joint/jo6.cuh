#pragma once
// Step 6 of the joint family: as many lanes per row as it has chunks. Parent: jo2.
//
// What changed
//   1. A row of 128 elements has 16 lanes of the norm kernel, and a warp two rows. Rows of up to 64
//      elements have 8 lanes, rows of more than 128 a warp.
//   2. A lane keeps its first chunk in registers from the sum of squares to the store. jo2 reads
//      the row again, from L1.
//
// Why: of a row of 128 elements jo2's warp has 16 lanes without a chunk. It issues about 250
// instructions for the row, most of them for addresses. 250 queries and 250 keys of 64 samples are
// 32,000 rows, 15,000 cycles of the schedulers of an H200, 9 us. 16 MB in and out of L2 take 4 us.
// Expected, on an H200 at batch 64: 5 us less than jo2, 27 instead of 32; at batch 1 no change.
//
// benchmark:begin
// benchmark:end
// Verdict: not measured by itself; it is in jo9.
//
// Phases: norm: 1 the row, 2 rstd, 3 pairs, store; attention: 4 Q, 5 K, V, 6 S, 7 P, 8 O, 9 store.

#include "cp_async.cuh"
#include "kernels/joint/arguments.cuh"
#include "kernels/joint/parts.cuh"

namespace jo6 {

__device__ __forceinline__ float sum_of_squares(const float (&x_rmem)[kChunk]) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        squares = fmaf(x_rmem[i], x_rmem[i], squares);
    }
    return squares;
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    norm_kernel(const __grid_constant__ JointKernelArgs args) {
    constexpr JointKernelConfig cfg = Kernels::value;

    // 1. The row: of a sample's n_queries + n_keys rows the first n_queries are those of q. A row
    // has as many lanes as chunks, or the next power of two from 8 to 32
    const int n_queries = args.length + args.context_queries, n_keys = args.length + args.context;
    const int n_chunks = args.heads * (cfg.d_head / kChunk);
    const int log_lanes = n_chunks > 16 ? 5 : n_chunks > 8 ? 4 : 3;
    const unsigned row = (blockIdx.x * unsigned(cfg.n_threads()) + threadIdx.x) >> log_lanes;
    const int lane = threadIdx.x & ((1 << log_lanes) - 1); // of the row
    const int sample = row / (n_queries + n_keys);
    const bool is_row = sample < args.batch; // other lanes add up with their warp
    int token = row % (n_queries + n_keys);
    const bool is_q = token < n_queries;
    token -= is_q ? 0 : n_queries;
    const Element *row_gmem =
        is_q ? q_row_gmem(args, sample, token) : k_row_gmem(args, sample, token);
    const Element *weight_gmem = is_q ? q_weight_gmem(args, token) : k_weight_gmem(args, token);
    auto *normed_gmem = static_cast<uint4 *>(is_q ? args.Q_normed : args.K_normed) +
                        (int64_t(sample) * (is_q ? n_queries : n_keys) + token) * n_chunks;

    // 2. rstd = 1 / sqrt(mean of x² + eps)
    float x_rmem[kChunk] = {}; // the lane's first chunk
    if (is_row && lane < n_chunks) {
        load_chunk<cfg.dtype>(x_rmem, row_gmem, lane);
    }
    float squares = sum_of_squares(x_rmem);
#pragma unroll 1
    for (int chunk = lane + 32; is_row && chunk < n_chunks; chunk += 32) {
        float more_rmem[kChunk];
        load_chunk<cfg.dtype>(more_rmem, row_gmem, chunk);
        squares += sum_of_squares(more_rmem);
    }
#pragma unroll
    for (int log = 0; log < 5; ++log) {
        squares += log < log_lanes ? __shfl_xor_sync(0xffffffff, squares, 1 << log) : 0;
    }
    const float rstd = rsqrtf(squares / (n_chunks * kChunk) + args.eps);

    // 3. x · rstd · weight, turned: chunks behind the first are read again, from L1
#pragma unroll 1
    for (int chunk = lane; is_row && chunk < n_chunks; chunk += 32) {
        if (chunk >= 32) {
            load_chunk<cfg.dtype>(x_rmem, row_gmem, chunk);
        }
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

} // namespace jo6
