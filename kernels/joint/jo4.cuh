#pragma once
// Step 4 of the joint family: a thread block has all heads. Parent: jo3.
//
// What changed
//   1. A thread block has B_r queries of all heads in `columns`, which are the 8 heads of 16 of the
//      target. Each warp has one head of kTiles times 16 queries.
//   2. One norm of a row of q or k serves all heads: each lane norms and turns 8 elements of its
//      own, where jo3 has 2 lanes that do. The lanes copy the row of v as well.
//   3. Q lies in shared memory beside K and V, so that a warp keeps only O, m and l of its tiles.
//      An unused row behind each head keeps the 8 lanes of a store in different banks.
//
// Why: of a sample of 186 + 64 tokens, width 128, bf16, 64 KB per tensor, jo3 reads q and k once
// per head and v once, 1,088 KB, and norms 8 · (256 + 256) rows. Here two thread blocks of 128
// queries read q once, k and v twice, 320 KB, and norm 2 · (128 + 256) rows, 5.3 times fewer. There
// is one launch, as in jo3. To read k and v once, a thread block would need all 256 queries: 128
// pairs of a head and 16 queries, 8 per warp, whose O, m and l take 96 of the 128 registers.
// K and V of all keys take 2 · 250 · 256 bytes, 125 KB, over the 99 KB of sm_86. Blocks of 32 keys
// with the online softmax of jo3 take 16 KB, and Q 32 KB, for a context of any length.
// The price is fewer thread blocks: 2 instead of 8 at batch 1, and 128 at batch 64, one wave on 132
// SMs, instead of 512, four waves.
// Expected, on an H100 at 1.75 GHz: an SM takes a cycle for 16 exponentials, and a warp about 600
// cycles for a row, one row after the other. jo3's expectation left these out. A thread block takes
// 24 · 600 + 128 · 256 · 8 / 16 = 31,000 cycles, one of jo3 32 · 600 + 256 · 256 / 16 = 23,000. So
// at batch 64 18 us instead of jo3's 53. At batch 1 18 us instead of 13, but 9 us with a B_r of 32,
// which has 8 thread blocks of 18 rows per warp.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 30 us at a batch of 8 with 186 + 64 tokens, where jo3 takes 33 and jo2 10.
//
// Phases: 1 Q, K, V, 2 S, 3 P, 4 O, 5 store.

#include "cp_async.cuh"
#include "kernels/joint/arguments.cuh"
#include "kernels/joint/parts.cuh"

namespace jo4 {

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    attention_kernel(const __grid_constant__ JointKernelArgs args) {
    constexpr JointKernelConfig cfg = Kernels::value;
    constexpr int B_c = cfg.B_c, kDHead = cfg.d_head, kHeadChunks = kDHead / kChunk;
    constexpr int kHeads = cfg.columns / kDHead, kChunks = kHeads * kHeadChunks;
    constexpr int B_r = cfg.B_r, kTiles = B_r / kMmaM * kHeads / cfg.n_warps;
    constexpr int kHeadBytes = cfg.smem_bytes() / kHeads;

    extern __shared__ __align__(128) Element smem[]; // of each head K, Q, V and an unused row
    const uint32_t K_smem = smem_address(smem); // (B_c, d_head)
    const uint32_t Q_smem = K_smem + B_c * kDHead * int(sizeof(Element)); // (B_r, d_head)
    const uint32_t V_smem = Q_smem + B_r * kDHead * int(sizeof(Element)); // (B_c, d_head)
    uint32_t lane_offset[4], K_lane_offset[4];
    set_lane_offsets<kDHead>(lane_offset, K_lane_offset);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = blockIdx.y * kHeads + warp % kHeads, sample = blockIdx.z;
    const int n_queries = args.length + args.context_queries, n_keys = args.length + args.context;
    const int first_row = warp / kHeads * (kTiles * kMmaM);
    const int first_query = head < args.heads ? blockIdx.x * B_r + first_row : n_queries;
    const int n_chunks = args.heads * kHeadChunks;
    const int chunk = min(blockIdx.y * kChunks + lane, n_chunks - 1); // this lane's of a row
    const uint32_t head_offset = warp % kHeads * kHeadBytes;

    float O_rmem[kTiles][1][kDHead / kMmaN][4] = {};
    Statistics statistics[kTiles];
    for (int key = 0; key < n_keys; key += B_c) {
        // 1. K, V: global → shared, K normed and turned; behind the last key V is zeros. Along with
        // the first block Q, in the rows behind K; behind the last query are copies of it
        __syncthreads(); // no warp reads the block before this one any more
#pragma unroll 1 // a row takes a hundred instructions
        for (int row = warp; row < (key > 0 ? B_c : B_c + B_r); row += cfg.n_warps) {
            const bool is_q = row >= B_c;
            const int token = is_q ? min(blockIdx.x * B_r + row - B_c, n_queries - 1)
                                   : min(key + row, n_keys - 1);
            const uint32_t offset = smem_offset<kDHead>(row, lane % kHeadChunks * kChunk) +
                                    lane / kHeadChunks * kHeadBytes;
            if (lane < kChunks && !is_q) {
                cp_async_16(V_smem + offset, v_row_gmem(args, sample, token) + chunk * kChunk,
                            key + row < n_keys ? kChunkBytes : 0);
            }
            const Element *row_gmem =
                is_q ? q_row_gmem(args, sample, token) : k_row_gmem(args, sample, token);
            const Element *weight_gmem =
                is_q ? q_weight_gmem(args, token) : k_weight_gmem(args, token);
            const float rstd = row_rstd<cfg.dtype>(row_gmem, n_chunks, args.eps);
            if (lane < kChunks) { // the chunks are read again, from L1
                float x_rmem[kChunk];
                load_chunk<cfg.dtype>(x_rmem, row_gmem, chunk);
                scale_chunk<cfg.dtype>(x_rmem, rstd, weight_gmem, chunk);
                if (args.rotary != nullptr && token < args.length) {
                    turn_chunk<kDHead>(x_rmem, args.rotary, token, chunk);
                }
                *reinterpret_cast<uint4 *>(smem + offset / sizeof(Element)) =
                    pack_chunk<cfg.dtype>(x_rmem);
            }
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads(); // a warp reads rows that other warps have normed and copied
        if (first_query >= n_queries) {
            continue; // a warp without queries copies alone
        }

#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            // 2. S = Q @ K^T
            uint32_t Q_rmem[kDHead / kMmaK][1][4]; // (16, d_head)
#pragma unroll
            for (int k = 0; k < kDHead / kMmaK; ++k) {
                ldmatrix_x4(Q_rmem[k][0],
                            fragment_address<B_r, kDHead>(Q_smem + head_offset, lane_offset,
                                                          first_row + tile * kMmaM, k));
            }
            float S_rmem[1][B_c / kMmaN][4] = {};
            multiply_QK<Kernels>(S_rmem, Q_rmem, K_smem + head_offset, K_lane_offset);
            if (key + B_c > n_keys) {
                hide_keys(S_rmem, n_keys - key);
            }

            // 3. P = 2^(S · scale - m)
            update(statistics[tile], S_rmem, O_rmem[tile], args.scale);
            uint32_t P_rmem[B_c / kMmaK][1][4];
            round_P<cfg.dtype>(P_rmem, S_rmem);

            // 4. O += P @ V
            multiply_PV<Kernels>(O_rmem[tile], P_rmem, V_smem + head_offset, lane_offset);
        }
    }

    // 5. O / l: registers → global
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        store_O<cfg.dtype>(O_rmem[tile], statistics[tile], args, head, first_query + tile * kMmaM,
                           n_queries);
    }
}

} // namespace jo4
