#pragma once
// Step 1 of the joint family: the base. Joint attention of a sequence and its context, between the
// projections, by three kernels: norm, rotary embedding, attention.
//
//   Q = turned(q / rms(q) · weight)    K likewise    O = softmax(Q K^T · scale) V
//
// Queries and keys of a sample are the tokens of the sequence and behind them those of the context,
// each with norm weights of its own. The norm is over all heads together. Rotary embedding turns
// the sequence's pairs of elements alone.
//
// The parts
//   1. Norm: a warp has a row of q or k, adds up its squares and stores Q or K in a buffer, in
//      which sequence and context lie one behind the other.
//   2. Rotary embedding: a thread turns the 4 pairs of 16 bytes of the buffers, in place.
//   3. Attention: a thread block has 64 queries of a head, each of its warps 16, whose fragment of
//      Q stays in registers. S of a head of 16 is one `mma` per 8 keys. Blocks of 64 keys of K and
//      V are copied to shared memory by all threads; rows of 32 bytes keep ldmatrix free of
//      conflicts where each four rows swap their two chunks.
//
// Why it is slow: Q and K go through memory twice before attention reads them. In bf16, of a sample
// of 186 + 64 tokens of width 128, 64 KB per tensor, the norm reads and writes 256 KB, rotary
// embedding 190 KB; attention reads Q, K, V and writes O, 256 KB. At batch 64 that is 45 MB, 13 us
// at 3.35 TB/s. The 32 million exponentials of attention, 16 per clock and SM of an H100, take 9
// us. PyTorch's operators take two dozen launches: 4 norms, 8 or so per rotated tensor, 3
// concatenations, attention.
// Expected, on an H100 at batch 64: 25 us, and 8 us for the three launches at batch 1, in a graph.
//
// benchmark:begin
// benchmark:end
// Verdict: not measured yet.
//
// Phases: norm: 1 the row, 2 rstd, 3 store; rotary: 4 the pairs; attention: 5 Q, 6 K, V, 7 S, 8 P,
// 9 O, 10 store.

#include "cp_async.cuh"
#include "kernels/joint/arguments.cuh"
#include "kernels/joint/parts.cuh"

namespace jo1 {

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

    // 3. x · rstd · weight: the row is read again, from L1
#pragma unroll 1
    for (int chunk = threadIdx.x % 32; chunk < n_chunks; chunk += 32) {
        float x_rmem[kChunk];
        load_chunk<cfg.dtype>(x_rmem, row_gmem, chunk);
        scale_chunk<cfg.dtype>(x_rmem, rstd, weight_gmem, chunk);
        store_gmem_16(normed_gmem + chunk, pack_chunk<cfg.dtype>(x_rmem));
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    rotary_kernel(const __grid_constant__ JointKernelArgs args) {
    constexpr JointKernelConfig cfg = Kernels::value;

    // 4. A chunk of a token of the sequence: first all of Q, then all of K
    const int n_chunks = args.heads * (cfg.d_head / kChunk);
    const unsigned thread = blockIdx.x * unsigned(cfg.n_threads()) + threadIdx.x;
    const int chunk = thread % n_chunks;
    const int token = thread / n_chunks % args.length;
    int sample = thread / n_chunks / args.length;
    const bool is_q = sample < args.batch;
    sample -= is_q ? 0 : args.batch;
    if (sample >= args.batch) {
        return;
    }
    const int n_tokens = args.length + (is_q ? args.context_queries : args.context);
    auto *normed_gmem = static_cast<uint4 *>(is_q ? args.Q_normed : args.K_normed) +
                        (int64_t(sample) * n_tokens + token) * n_chunks + chunk;
    float x_rmem[kChunk];
    unpack_chunk<cfg.dtype>(x_rmem, *normed_gmem);
    turn_chunk<cfg.d_head>(x_rmem, args.rotary, token, chunk);
    store_gmem_16(normed_gmem, pack_chunk<cfg.dtype>(x_rmem));
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

    // 5. Q: global → registers; rows behind the last query are copies of it
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
        // 6. K, V: global → shared; zeros behind the last key
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

        // 7. S = Q @ K^T
        float S_rmem[1][B_c / kMmaN][4] = {};
        multiply_QK<Kernels>(S_rmem, Q_rmem, K_smem, K_lane_offset);
        if (key + B_c > n_keys) {
            hide_keys(S_rmem, n_keys - key);
        }

        // 8. P = 2^(S · scale - m)
        update(statistics, S_rmem, O_rmem, args.scale);
        uint32_t P_rmem[B_c / kMmaK][1][4];
        round_P<cfg.dtype>(P_rmem, S_rmem);

        // 9. O += P @ V
        multiply_PV<Kernels>(O_rmem, P_rmem, V_smem, lane_offset);
    }

    // 10. O / l: registers → global
    store_O<cfg.dtype>(O_rmem, statistics, args, head, first_query, n_queries);
}

} // namespace jo1
