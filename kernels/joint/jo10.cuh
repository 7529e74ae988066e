#pragma once
// Step 10 of the joint family: scale and maximum in the product. Parent: jo9.
//
// What changed
//   1. The norm kernel multiplies Q by the scale, in fp32 before it rounds. In fp16 P = 2^(S ·
//   scale)
//      stays, since Q · scale may be more than fp16 holds.
//   2. The accumulators of S begin with -m instead of 0, from registers that all tensor
//      instructions of a warp share. S is less than m already where 2^S is taken.
//   3. A row without a key that counts, l = 0, has no maximum yet. A sum of 0 is a reason to begin
//      again, too.
//
// Why: of the 78 instructions that jo9 issues for 16 queries and 32 keys, 16 multiply S by the
// scale and subtract m. Of the 58 that are left 16 are exponentials, 10 products, 8 conversions.
// An empty asm keeps nvcc from seeing that two of the four registers of -m are equal. It would copy
// them into the accumulators of each product, 14 instructions.
// Expected, on an H200 at batch 64: 1 us less than jo9; at batch 1 no change.
//
// benchmark:begin
// benchmark:end
// Verdict: kept. On an H200 0 to 4% faster than jo9: 5.9 us at batch 1 with a context of 64,
// where jo9 takes 6.1.
//
// Phases: norm: 1 the row, 2 rstd, 3 pairs, store; attention: 4 Q, 5 K, V, 6 S, 7 P, 8 O,
// 9 overflow, 10 store.

#include "cp_async.cuh"
#include "kernels/joint/arguments.cuh"
#include "kernels/joint/parts.cuh"

namespace jo10 {

constexpr int kKeys = 32; // of S at once
constexpr float kMostL = 0x1p100f; // 1 / l is a normal number
template <DType kDType>
constexpr bool kFolds = kDType == DType::BF16; // the scale into Q; fp16 might not hold it
template <DType kDType>
constexpr uint32_t kOnes = kDType == DType::BF16 ? 0x3f803f80 : 0x3c003c00; // two

// Thread blocks per SM: 32 warps with 64 registers per thread, where O is small.
constexpr int blocks_per_SM(const JointKernelConfig &cfg) {
    return cfg.d_head == 16 ? 32 / cfg.n_warps : 1;
}

template <DType kDType>
__device__ __forceinline__ float scaled(float S, float scale) {
    return kFolds<kDType> ? S : S * scale;
}

// m of each row at least the maximum of its S; S and O follow. While no key counts, m may be less.
template <DType kDType, int kTiles, int kOTiles>
__device__ __forceinline__ void follow(float (&start)[4], float (&S_rmem)[1][kTiles][4],
                                       float (&O_rmem)[1][kOTiles][4], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool is_first = O_rmem[0][kOTiles - 1][half * 2] == 0; // l
        float more = is_first ? -INFINITY : 0;
#pragma unroll
        for (int n = 0; n < kTiles * 2; ++n) {
            more = fmaxf(more, S_rmem[0][n / 2][half * 2 + n % 2]);
        }
        more = quad_max(more);
        more = more == -INFINITY ? 0 : more;
        start[half * 2] = start[half * 2 + 1] -= more;
#pragma unroll
        for (int n = 0; n < kTiles * 2; ++n) {
            S_rmem[0][n / 2][half * 2 + n % 2] -= more;
        }
        const float rescale = is_first ? 1 : exp2_approx(-scaled<kDType>(more, scale));
#pragma unroll
        for (int n = 0; n < kOTiles; ++n) {
            O_rmem[0][n][half * 2] *= rescale;
            O_rmem[0][n][half * 2 + 1] *= rescale;
        }
    }
}

// P in the place of S.
template <DType kDType, int kTiles>
__device__ __forceinline__ void exponentiate(float (&S_rmem)[1][kTiles][4], float scale) {
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) {
        float &S = S_rmem[0][i / 4][i % 4];
        S = exp2_approx(scaled<kDType>(S, scale));
    }
}

// As before the first keys.
template <int kOTiles>
__device__ __forceinline__ void clear(float (&start)[4], float (&O_rmem)[1][kOTiles][4]) {
    start[0] = start[1] = start[2] = start[3] = 0;
#pragma unroll
    for (int i = 0; i < kOTiles * 4; ++i) {
        O_rmem[0][i / 4][i % 4] = 0;
    }
}

// Whether a P, a sum of them or O was over what its format holds: inf or NaN, or l near it.
template <int kOTiles>
__device__ __forceinline__ bool is_over(const float (&O_rmem)[1][kOTiles][4]) {
    const float (&l)[4] = O_rmem[0][kOTiles - 1];
    bool is_within = l[0] > 0 && l[0] < kMostL && l[2] > 0 && l[2] < kMostL;
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
    float rstd = rsqrtf(squares / (n_chunks * kChunk) + args.eps);
    rstd *= kFolds<cfg.dtype> && is_q ? args.scale : 1;

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

    float O_rmem[1][kDHead / kMmaN + 1][4] = {}; // and l, in each of the last 8 columns
    float start[4] = {}; // -m, as accumulators of S have it
    bool follows = false; // m, the maximum of all keys so far
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

            // 6. S = Q @ K^T - m
            float S_rmem[1][kKeys / kMmaN][4];
#pragma unroll
            for (int i = 0; i < kKeys / 2; ++i) {
                S_rmem[0][i / 4][i % 4] = start[i % 4];
            }
            multiply_QK<Kernels>(S_rmem, Q_rmem, K_smem + offset, K_lane_offset);
            if (first + kKeys > n) {
                hide_keys(S_rmem, n - first);
            }

            // 7. P = 2^(S · scale - m), m of the first 32 keys
            if (follows || key + first == 0) {
                follow<cfg.dtype>(start, S_rmem, O_rmem, args.scale);
                asm volatile("" : "+f"(start[0]), "+f"(start[1]), "+f"(start[2]), "+f"(start[3]));
            }
            exponentiate<cfg.dtype>(S_rmem, args.scale);
            uint32_t P_rmem[kKeys / kMmaK][1][4];
            round_P<cfg.dtype>(P_rmem, S_rmem);

            // 8. O += P @ V, l += P @ ones
            multiply_PV<Kernels>(O_rmem, P_rmem, V_smem + offset, lane_offset);
#pragma unroll
            for (int k = 0; k < kKeys / kMmaK; ++k) {
                mma_m16n8k16<cfg.dtype>(O_rmem[0][kDHead / kMmaN], P_rmem[k][0], kOnes<cfg.dtype>,
                                        kOnes<cfg.dtype>);
            }
        }

        // 9. Once more from the first keys on, where m follows, if a P of any warp was too large
        if (key + B_c >= n_keys && __syncthreads_or(!follows && n > 0 && is_over(O_rmem))) {
            follows = true;
            key = -B_c;
            clear(start, O_rmem);
        }
    }

    // 10. O / l: registers → global
    const auto &l_rmem = O_rmem[0][kDHead / kMmaN]; // each of four lanes has the sum
    store_O<cfg.dtype>(reinterpret_cast<float (&)[1][kDHead / kMmaN][4]>(O_rmem),
                       {{}, {l_rmem[0] / 4, l_rmem[2] / 4}}, args, head, first_query, n_queries);
}

} // namespace jo10
