#pragma once
// Step 7 of the joint family: all keys of a head in shared memory at once. Parent: jo6.
//
// What changed
//   1. A thread block copies up to 256 keys of K and V, 16 KB for heads of 16, and waits for them
//      once. It has 16 warps, so that each sample and head of up to 256 queries is copied once.
//   2. A warp takes 32 keys at a time instead of 64, which halves the registers of S. A thread has
//      64 registers, and an SM 32 warps instead of 28.
//   3. m begins as a number instead of -infinity. Where the scores of all keys so far are
//      -infinity, P is 0 instead of NaN.
//
// Why: with 186 + 64 tokens each thread block of jo6 waits four times for a copy and eight times at
// a barrier, and four thread blocks copy the same keys: 54 instructions of each warp per copy. Of
// 1400 instructions that a warp issues for 16 queries 216 copy.
// Expected, on an H200 at batch 1, where no other thread block hides the waits: 1 us less. At batch
// 64 other warps hide them: no change.
//
// benchmark:begin
// benchmark:end
// Verdict: not measured by itself; it is in jo9.
//
// Phases: norm: 1 the row, 2 rstd, 3 pairs, store; attention: 4 Q, 5 K, V, 6 S, 7 P, 8 O, 9 store.

#include "cp_async.cuh"
#include "kernels/joint/arguments.cuh"
#include "kernels/joint/parts.cuh"

namespace jo7 {

constexpr int kKeys = 32; // of S at once
constexpr float kLeastM = -0x1p127f; // finite, also where all of S is -infinity

// Thread blocks per SM: 32 warps with 64 registers per thread, where O is small.
constexpr int blocks_per_SM(const JointKernelConfig &cfg) {
    return cfg.d_head == 16 ? 32 / cfg.n_warps : 1;
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
__global__ void __launch_bounds__(Kernels::value.n_threads(), blocks_per_SM(Kernels::value))
    attention_kernel(const __grid_constant__ JointKernelArgs args) {
    constexpr JointKernelConfig cfg = Kernels::value;
    constexpr int B_c = cfg.B_c, kDHead = cfg.d_head, kHeadChunks = kDHead / kChunk;
    constexpr int kRows = cfg.n_threads() / kHeadChunks; // that a thread block copies at once

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
    Statistics statistics{{kLeastM, kLeastM}, {0, 0}};
    for (int key = 0; key < n_keys; key += B_c) {
        // 5. K, V: global → shared; zeros behind the last key
        __syncthreads(); // no warp reads the block before this one any more
        const int column = threadIdx.x % kHeadChunks * kChunk; // of every row of a thread
        const Element *K_gmem = static_cast<const Element *>(args.K_normed) +
                                int64_t(sample) * n_keys * width + head * kDHead + column;
#pragma unroll 1
        for (int row = threadIdx.x / kHeadChunks; row < B_c; row += kRows) {
            const int token = min(key + row, n_keys - 1);
            const int bytes = key + row < n_keys ? kChunkBytes : 0;
            const uint32_t offset = smem_offset<kDHead>(row, column);
            cp_async_16(K_smem + offset, K_gmem + int64_t(token) * width, bytes);
            cp_async_16(V_smem + offset, v_row_gmem(args, sample, token) + head * kDHead + column,
                        bytes);
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads(); // a warp reads rows that other warps have copied

        // A warp without queries copies alone
        const int n = first_query < n_queries ? min(B_c, n_keys - key) : 0;
#pragma unroll 1
        for (int first = 0; first < n; first += kKeys) {
            const uint32_t offset = first * kDHead * int(sizeof(Element)); // of the 32 rows

            // 6. S = Q @ K^T
            float S_rmem[1][kKeys / kMmaN][4] = {};
            multiply_QK<Kernels>(S_rmem, Q_rmem, K_smem + offset, K_lane_offset);
            if (first + kKeys > n) {
                hide_keys(S_rmem, n - first);
            }

            // 7. P = 2^(S · scale - m)
            update(statistics, S_rmem, O_rmem, args.scale);
            uint32_t P_rmem[kKeys / kMmaK][1][4];
            round_P<cfg.dtype>(P_rmem, S_rmem);

            // 8. O += P @ V
            multiply_PV<Kernels>(O_rmem, P_rmem, V_smem + offset, lane_offset);
        }
    }

    // 9. O / l: registers → global
    store_O<cfg.dtype>(O_rmem, statistics, args, head, first_query, n_queries);
}

} // namespace jo7
