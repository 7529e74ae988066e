#pragma once
// Step 1 of the joint_cluster family: a cluster has the heads of a sample. Parent: jo9.
// Its norm_kernel is left out.
//
// Attention of MMDiT's block in one launch without buffers: RMS norm of q and k over the whole
// width, rotary embedding of the sequence, and attention of sequence and context together.
//
// What changed
//   1. The thread blocks of a sample's heads, 1 to 8, are a cluster. Each copies its head's columns
//      of Q, K and V to shared memory, adds up the squares of its part of each row, and reads the
//      sums of the other heads from their shared memory.
//   2. Each block norms and turns its rows in their place. All keys of a head are there, so that a
//      warp whose P overflow begins again alone.
//
// Why: jo9's first launch reads q and k, and writes Q and K to L2; its second one reads these. At a
// batch of 64 this takes 5.1 us of 20.9 on an H200, at a batch of 1 a launch of 5.5 us in all.
//   Here a block of 16 warps has 256 queries and 250 keys, two chunks of 16 bytes per thread. The
// norm needs a float per row from each of 8 blocks: 4 loads per thread and chunk. jo3 reads all
// heads of a row for that, eight times as much.
//   The cluster has two barriers. The second one keeps blocks from ending while others read their
// sums; it has ended long before a block waits for it. An SM has two blocks, of two clusters: one
// computes while the other waits. A GPC of 16 SMs has room for 4 clusters, so that the 64 samples
// take 8 GPCs two rounds.
//   With more queries than a block has, each block norms the keys once more.
// Expected, on an H200: 17.5 us at batch 64, where attention takes 16, and 4.5 at batch 1.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 24.9 us for 186 tokens at batch 64, where jo10 takes 18.7. For 64 tokens
// it takes 7.5, the fastest of all, and calls take it there.
//
// Phases: 1 Q, K, V, 2 squares, 3 norm, pairs, 4 Q, 5 S, 6 P, 7 O, 8 overflow, 9 store.

#include "cp_async.cuh"
#include "kernels/joint/cluster.cuh"
#include "kernels/joint/cluster_parts.cuh"
#include "kernels/joint/parts.cuh"

namespace jc1 {

constexpr int kKeys = 32; // of S at once
constexpr float kLeastM = -0x1p127f; // finite, also where all of S is -infinity
constexpr float kMostL = 0x1p100f; // 1 / l is a normal number
template <DType kDType>
constexpr uint32_t kOnes = kDType == DType::BF16 ? 0x3f803f80 : 0x3c003c00; // two

// Thread blocks per SM: 32 warps with 64 registers per thread, where O is small.
constexpr int blocks_per_SM(const JointClusterKernelConfig &cfg) {
    return cfg.d_head == 16 ? 32 / cfg.n_warps : 1;
}

// m of each row at least the maximum · scale of S; O and l follow.
template <int kTiles, int kOTiles>
__device__ __forceinline__ void follow(float (&m)[2], const float (&S_rmem)[1][kTiles][4],
                                       float (&O_rmem)[1][kOTiles][4], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = -INFINITY;
#pragma unroll
        for (int n = 0; n < kTiles * 2; ++n) {
            largest = fmaxf(largest, S_rmem[0][n / 2][half * 2 + n % 2]);
        }
        const float next_m = fmaxf(quad_max(largest) * scale, m[half]);
        const float rescale = exp2_approx(m[half] - next_m);
        m[half] = next_m;
#pragma unroll
        for (int n = 0; n < kOTiles; ++n) {
            O_rmem[0][n][half * 2] *= rescale;
            O_rmem[0][n][half * 2 + 1] *= rescale;
        }
    }
}

// P in the place of S.
template <int kTiles>
__device__ __forceinline__ void exponentiate(const float (&m)[2], float (&S_rmem)[1][kTiles][4],
                                             float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kTiles * 2; ++n) {
            float &S = S_rmem[0][n / 2][half * 2 + n % 2];
            S = exp2_approx(fmaf(S, scale, -m[half]));
        }
    }
}

// As before the first keys.
template <int kOTiles>
__device__ __forceinline__ void clear(float (&m)[2], float (&O_rmem)[1][kOTiles][4]) {
    m[0] = m[1] = kLeastM;
#pragma unroll
    for (int i = 0; i < kOTiles * 4; ++i) {
        O_rmem[0][i / 4][i % 4] = 0;
    }
}

// Whether a P, a sum of them or O was over what its format holds: inf or NaN, or l near it.
template <int kOTiles>
__device__ __forceinline__ bool is_over(const float (&O_rmem)[1][kOTiles][4]) {
    bool is_within = O_rmem[0][kOTiles - 1][0] < kMostL && O_rmem[0][kOTiles - 1][2] < kMostL;
#pragma unroll
    for (int i = 0; i < kOTiles * 4; ++i) {
        is_within &= fabsf(O_rmem[0][i / 4][i % 4]) < INFINITY;
    }
    return !is_within;
}

__device__ __forceinline__ float sum_of_squares(const float (&x_rmem)[kChunk]) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        squares = fmaf(x_rmem[i], x_rmem[i], squares);
    }
    return squares;
}

template <typename Kernels>
__global__ void __cluster_dims__(1, Kernels::value.cluster_blocks, 1)
    __launch_bounds__(Kernels::value.n_threads(), blocks_per_SM(Kernels::value))
        attention_kernel(const __grid_constant__ JointKernelArgs args) {
    constexpr JointClusterKernelConfig cfg = Kernels::value;
    constexpr int B_r = cfg.n_warps * kMmaM; // queries of a thread block
    constexpr int B_c = cfg.B_c, kDHead = cfg.d_head, kHeadChunks = kDHead / kChunk;
    constexpr int kRows = cfg.n_threads() / kHeadChunks; // that a thread block copies at once
    // Blocks whose sums a lane adds up.
    constexpr int kRanks = (cfg.cluster_blocks + kHeadChunks - 1) / kHeadChunks;

    extern __shared__ __align__(128) Element smem[];
    const uint32_t Q_smem = smem_address(smem); // (B_r, d_head)
    const uint32_t K_smem = Q_smem + B_r * kDHead * int(sizeof(Element)); // (B_c, d_head)
    const uint32_t V_smem = K_smem + B_c * kDHead * int(sizeof(Element)); // (B_c, d_head)
    const uint32_t squares_smem = V_smem + B_c * kDHead * int(sizeof(Element)); // (B_r + B_c)
    uint32_t lane_offset[4], K_lane_offset[4];
    set_lane_offsets<kDHead>(lane_offset, K_lane_offset);
    const int head = blockIdx.y, sample = blockIdx.z; // head is the block's rank in its cluster
    const int n_queries = args.length + args.context_queries, n_keys = args.length + args.context;
    if (head >= args.heads) {
        return; // no barrier of the cluster waits for threads that have ended
    }
    const int n_rows = B_r + (n_keys + kKeys - 1) / kKeys * kKeys; // of Q and, behind them, of K
    const int lane = threadIdx.x % kHeadChunks, column = lane * kChunk; // of every row of a thread
    const int chunk = head * kHeadChunks + lane;
    const int block_query = blockIdx.x * B_r; // the first
    const auto token_of = [&](int row) { return row < B_r ? block_query + row : row - B_r; };
    const auto exists = [&](int row) { return token_of(row) < (row < B_r ? n_queries : n_keys); };

    // 1. Q, K, V: global → shared; zeros behind the last query and key
#pragma unroll 1
    for (int row = threadIdx.x / kHeadChunks; row < n_rows; row += kRows) {
        const int token = exists(row) ? token_of(row) : 0, bytes = exists(row) ? kChunkBytes : 0;
        const Element *row_gmem =
            row < B_r ? q_row_gmem(args, sample, token) : k_row_gmem(args, sample, token);
        cp_async_16(Q_smem + smem_offset<kDHead>(row, column), row_gmem + chunk * kChunk, bytes);
        if (row >= B_r) {
            cp_async_16(V_smem + smem_offset<kDHead>(row - B_r, column),
                        v_row_gmem(args, sample, token) + chunk * kChunk, bytes);
        }
    }
    cp_async_commit();
    cp_async_wait<0>();

    // 2. Σ x² of this head's part of each row, by the threads that have copied it
#pragma unroll 2
    for (int row = threadIdx.x / kHeadChunks; row < n_rows; row += kRows) {
        float x_rmem[kChunk];
        unpack_chunk<cfg.dtype>(x_rmem, load_smem_16(Q_smem + smem_offset<kDHead>(row, column)));
        const float squares = lanes_sum<kHeadChunks>(sum_of_squares(x_rmem));
        if (lane == 0) {
            store_smem_4(squares_smem + row * int(sizeof(float)), __float_as_uint(squares));
        }
    }
    cluster_arrive();
    cluster_wait(); // all heads have written their sums

    // 3. x · rstd · weight, turned: in the place of x
#pragma unroll 2
    for (int row = threadIdx.x / kHeadChunks; row < n_rows; row += kRows) {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < kRanks; ++i) {
            const int rank = lane + i * kHeadChunks; // behind the last head, it is read twice
            const uint32_t sums_smem = in_block(squares_smem, min(rank, args.heads - 1));
            const float sum = load_cluster(sums_smem + row * int(sizeof(float)));
            squares += rank < args.heads ? sum : 0;
        }
        squares = lanes_sum<kHeadChunks>(squares);
        const float rstd = rsqrtf(squares / (args.heads * kDHead) + args.eps);
        if (exists(row)) {
            const int token = token_of(row);
            const uint32_t x_smem = Q_smem + smem_offset<kDHead>(row, column);
            float x_rmem[kChunk];
            unpack_chunk<cfg.dtype>(x_rmem, load_smem_16(x_smem));
            scale_chunk<cfg.dtype>(
                x_rmem, rstd, row < B_r ? q_weight_gmem(args, token) : k_weight_gmem(args, token),
                chunk);
            if (args.rotary != nullptr && token < args.length) {
                turn_chunk<kDHead>(x_rmem, args.rotary, token, chunk);
            }
            store_smem_16(x_smem, pack_chunk<cfg.dtype>(x_rmem));
        }
    }
    cluster_arrive(); // this thread has read the sums of all heads
    __syncthreads(); // a warp reads rows that other warps have copied and turned

    // 4. Q: shared → registers
    const int warp_row = threadIdx.x / 32 * kMmaM, first_query = block_query + warp_row;
    uint32_t Q_rmem[kDHead / kMmaK][1][4]; // (16, d_head)
#pragma unroll
    for (int k = 0; k < kDHead / kMmaK; ++k) {
        ldmatrix_x4(Q_rmem[k][0], fragment_address<B_r, kDHead>(Q_smem, lane_offset, warp_row, k));
    }

    float O_rmem[1][kDHead / kMmaN + 1][4] = {}; // and l, in each of the last 8 columns
    float m[2] = {kLeastM, kLeastM};
    bool follows = false; // m, the maximum of all keys so far
    for (int key = 0; key < n_keys; key += B_c) { // all keys are in one block
        // A warp without queries has no keys either
        const int n = first_query < n_queries ? min(B_c, n_keys - key) : 0;
#pragma unroll 1
        for (int first = 0; first < n; first += kKeys) {
            const uint32_t offset = first * kDHead * int(sizeof(Element)); // of the 32 rows

            // 5. S = Q @ K^T
            float S_rmem[1][kKeys / kMmaN][4] = {};
            multiply_QK<Kernels>(S_rmem, Q_rmem, K_smem + offset, K_lane_offset);
            if (first + kKeys > n) {
                hide_keys(S_rmem, n - first);
            }

            // 6. P = 2^(S · scale - m), m of the first 32 keys
            if (follows || key + first == 0) {
                follow(m, S_rmem, O_rmem, args.scale);
            }
            exponentiate(m, S_rmem, args.scale);
            uint32_t P_rmem[kKeys / kMmaK][1][4];
            round_P<cfg.dtype>(P_rmem, S_rmem);

            // 7. O += P @ V, l += P @ ones
            multiply_PV<Kernels>(O_rmem, P_rmem, V_smem + offset, lane_offset);
#pragma unroll
            for (int k = 0; k < kKeys / kMmaK; ++k) {
                mma_m16n8k16<cfg.dtype>(O_rmem[0][kDHead / kMmaN], P_rmem[k][0], kOnes<cfg.dtype>,
                                        kOnes<cfg.dtype>);
            }
        }

        // 8. Once more, where m follows, if a P of this warp was too large
        if (key + B_c >= n_keys && __any_sync(0xffffffff, !follows && is_over(O_rmem))) {
            follows = true;
            key = -B_c;
            clear(m, O_rmem);
        }
    }

    // 9. O / l: registers → global
    const auto &l_rmem = O_rmem[0][kDHead / kMmaN]; // each of four lanes has the sum
    store_O<cfg.dtype>(reinterpret_cast<float (&)[1][kDHead / kMmaN][4]>(O_rmem),
                       {{m[0], m[1]}, {l_rmem[0] / 4, l_rmem[2] / 4}}, args, head, first_query,
                       n_queries);
    cluster_wait(); // no block ends before all have read its sums
}

} // namespace jc1
