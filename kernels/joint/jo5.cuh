#pragma once
// Step 5 of the joint family: several rows per warp. Parent: jo4.
//
// What changed
//   1. A row of the 128 columns of a thread block has 16 lanes, with a chunk of 8 elements each,
//   and
//      a warp norms two rows at once. 64 columns have 8 lanes, and a warp has four rows.
//
// Why: in jo4 half of the lanes have no chunk, and a warp waits for one row after the other: for
// its loads, five shuffles, the loads of the weights and of the table, about 600 cycles. Two rows
// at once wait for the same, with one shuffle less.
// Expected, on an H100: the 24 turns of jo4's 16 warps become 12, and a thread block takes 24,000
// cycles instead of 31,000: at batch 64 14 us instead of 18.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 36 us at a batch of 64, where jo2 takes 32; ahead of jo2 for 64 tokens
// without a context.
//
// Phases: 1 Q, K, V, 2 S, 3 P, 4 O, 5 store.

#include "cp_async.cuh"
#include "kernels/joint/arguments.cuh"
#include "kernels/joint/parts.cuh"

namespace jo5 {

// Lanes that have a row of so many chunks: a power of two, so that a warp has whole rows.
constexpr int lanes_of(int chunks) {
    int lanes = 1;
    while (lanes < chunks) {
        lanes *= 2;
    }
    return lanes;
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    attention_kernel(const __grid_constant__ JointKernelArgs args) {
    constexpr JointKernelConfig cfg = Kernels::value;
    constexpr int B_c = cfg.B_c, kDHead = cfg.d_head, kHeadChunks = kDHead / kChunk;
    constexpr int kHeads = cfg.columns / kDHead, kChunks = kHeads * kHeadChunks;
    constexpr int B_r = cfg.B_r, kTiles = B_r / kMmaM * kHeads / cfg.n_warps;
    constexpr int kHeadBytes = cfg.smem_bytes() / kHeads;
    constexpr int kLanes = lanes_of(kChunks), kRows = 32 / kLanes; // of a warp, at once

    extern __shared__ __align__(128) Element smem[]; // of each head K, Q, V and an unused row
    const uint32_t K_smem = smem_address(smem); // (B_c, d_head)
    const uint32_t Q_smem = K_smem + B_c * kDHead * int(sizeof(Element)); // (B_r, d_head)
    const uint32_t V_smem = Q_smem + B_r * kDHead * int(sizeof(Element)); // (B_c, d_head)
    uint32_t lane_offset[4], K_lane_offset[4];
    set_lane_offsets<kDHead>(lane_offset, K_lane_offset);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % kLanes; // of a row
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
        for (int row = threadIdx.x / kLanes; row < (key > 0 ? B_c : B_c + B_r);
             row += cfg.n_warps * kRows) {
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
            const float rstd = row_rstd<cfg.dtype, kLanes>(row_gmem, n_chunks, args.eps);
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

} // namespace jo5
