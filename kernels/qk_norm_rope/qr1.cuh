#pragma once
// Step 1 of the qk_norm_rope family: norm, rotary embedding and the joint sequence in one pass.
//
// Q and K of a sequence and of its context, each normed over the whole width, all heads together,
// Q and K of the sequence turned by rotary embedding, and both streams, with V, side by side in
// memory as attention reads them.
//
// The parts
//   1. A sample has rows of Q, of K and, with a context, of V: n_queries + 2 · n_keys. One grid
//      has the rows of all samples. `row_threads` threads have a row, as in r1.
//   2. Each thread keeps `chunks` chunks of 16 bytes in registers, so that a row is read once.
//   3. A chunk has 4 whole pairs, which are turned in fp32 before the row is rounded, once.
//   4. Chunks of a thread are 8 · row_threads elements apart. Where that is a multiple of d_head,
//      they have the same pairs of their heads, whose angles are loaded once for all.
//
// Why: PyTorch has up to 4 norms, 2 rotations of 8 operators each and 3 concatenations, 23
// launches. In bf16 with 24 heads of 128 a token has 18 KB of Q, K and V. Read and written once,
// these are 37 KB, and 87 MB of 2 samples of 1024 + 154 tokens, which a copy moves in 21 us on an
// H200.
//   A chunk of x needs 32 bytes of the table. Of 24 heads of 128, loaded for each chunk, they are
// 12 KB per row from L1, twice x; with 3 chunks of a thread and one load they are 4 KB.
// Expected on an H200: 85% of a copy's speed at 24 heads of 128; a third of PyTorch's time.
//
// benchmark:begin
// benchmark:end
// Verdict: On an H200 84 to 88% of a copy's speed at 24 heads of 128; torch.compile takes 2.7 to
// 3.3 times as long, PyTorch's operators 12 to 17 times.
//
// Phases: 1 the row, 2 x to registers, 3 rstd, 4 norm, pairs, store.

#include "elements.cuh"
#include "kernels/qk_norm_rope/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "predicated.cuh"

namespace qr1 {

// Adds the values of the kThreads threads of a row and returns the sum to each: by a tree over the
// lanes of each warp, then by one over the row's warps, if it has several. smem: (warps of the
// block).
template <int kThreads>
__device__ __forceinline__ float row_sum(float value, float *smem) {
#pragma unroll
    for (int lanes = 1; lanes < kThreads && lanes < 32; lanes *= 2) {
        value += __shfl_xor_sync(0xffffffff, value, lanes);
    }
    if constexpr (kThreads > 32) {
        constexpr int kWarps = kThreads / 32; // of a row
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) {
            smem[warp] = value;
        }
        __syncthreads(); // a warp reads what the others have written
        value = smem[warp / kWarps * kWarps + lane % kWarps];
#pragma unroll
        for (int lanes = 1; lanes < kWarps; lanes *= 2) {
            value += __shfl_xor_sync(0xffffffff, value, lanes);
        }
    }
    return value;
}

// Returns `squares` with x² of the elements of a chunk added to it.
template <DType kDType>
__device__ __forceinline__ float add_squares(float squares, uint4 chunk) {
    float x_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(x_rmem, chunk);
#pragma unroll
    for (const float x : x_rmem) {
        squares = fmaf(x, x, squares);
    }
    return squares;
}

// (x + iy) · (cos + i sin) of two neighbouring elements.
__device__ __forceinline__ void turn(float &x, float &y, float cosine, float sine) {
    const float real = x * cosine - y * sine;
    y = x * sine + y * cosine;
    x = real;
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    qk_norm_rope_kernel(const __grid_constant__ QkNormRopeKernelArgs args) {
    constexpr QkNormRopeKernelConfig cfg = Kernels::value;
    static_assert(cfg.row_threads >= 8 && cfg.row_threads <= cfg.n_threads() &&
                      (cfg.row_threads & (cfg.row_threads - 1)) == 0,
                  "the tree over the threads of a row is one over the lanes of a warp");
    constexpr DType kDType = cfg.dtype;
    static_assert(kDType != DType::FP32, "a chunk is 8 elements");
    constexpr int kThreads = cfg.row_threads, kChunks = cfg.chunks;
    constexpr int kRows = cfg.n_threads() / kThreads; // of the block
    constexpr int kChunk = kChunkElements<kDType>;

    extern __shared__ float smem[];

    // 1. The row: with 5 queries and 7 keys of a sample, rows 0 to 4 are those of Q, 5 to 11 those
    // of K, 12 to 18 those of V
    const int n_queries = args.length + args.context_queries, n_keys = args.length + args.context;
    const unsigned of_sample = n_queries + (args.joint_v == nullptr ? n_keys : 2 * n_keys);
    const unsigned row = blockIdx.x * unsigned(kRows) + threadIdx.x / kThreads;
    const int thread = threadIdx.x % kThreads; // of those that have the row
    const int sample = row / of_sample;
    int token = row % of_sample;
    const bool is_row = sample < args.batch; // other threads add up with their warp
    const bool is_q = token < n_queries, is_v = token >= n_queries + n_keys;
    token -= is_q ? 0 : is_v ? n_queries + n_keys : n_queries;
    const bool is_own = token < args.length; // of the sequence
    const int n_chunks = is_row ? args.heads * (args.d_head / kChunk) : 0;

    const void *x = is_q ? args.q : is_v ? args.v : args.k;
    const void *of_context = is_q ? args.context_q : is_v ? args.context_v : args.context_k;
    const RowStrides &x_strides = is_own ? (is_q   ? args.q_strides
                                            : is_v ? args.v_strides
                                                   : args.k_strides)
                                         : (is_q   ? args.context_q_strides
                                            : is_v ? args.context_v_strides
                                                   : args.context_k_strides);
    const auto *x_gmem = static_cast<const Element *>(is_own ? x : of_context) +
                         sample * x_strides.batch +
                         (is_own ? token : token - args.length) * x_strides.row; // (width)
    const RowStrides &y_strides = is_q   ? args.joint_q_strides
                                  : is_v ? args.joint_v_strides
                                         : args.joint_k_strides;
    auto *y_gmem = static_cast<Element *>(is_q   ? args.joint_q
                                          : is_v ? args.joint_v
                                                 : args.joint_k) +
                   sample * y_strides.batch + token * y_strides.row; // (width)
    const auto *weight_gmem = static_cast<const Element *>(
        is_own ? (is_q ? args.q_weight : args.k_weight)
               : (is_q ? args.context_q_weight : args.context_k_weight)); // (width)

    // 2. x: global → registers; 0 where there is no chunk
    uint4 x_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        x_rmem[k] = load_gmem_16_once_if(i < n_chunks, x_gmem + i * kChunk, uint4{});
    }

    // 3. rstd = 1 / sqrt(mean of x² + eps), also of V, which has no use for it
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        squares = add_squares<kDType>(squares, x_rmem[k]); // nothing, where there is no chunk
    }
    const int width = args.heads * args.d_head;
    const float rstd = rsqrtf(row_sum<kThreads>(squares, smem) / width + args.eps);

    // 4. x · rstd · weight, turned by the angles of its position; V as it is
    const bool turns = args.rotary != nullptr && is_own && !is_v;
    const int step = kThreads * kChunk % args.d_head; // from a chunk of the thread to its next
    int column = thread * kChunk % args.d_head; // in its head
    float4 angles[2] = {}; // cosine and sine of 4 pairs
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        if (i < n_chunks) {
            uint4 chunk = x_rmem[k];
            if (!is_v) {
                float y_rmem[kChunk], weight_rmem[kChunk];
                unpack_chunk<kDType>(y_rmem, chunk);
                unpack_chunk<kDType>(weight_rmem,
                                     __ldg(reinterpret_cast<const uint4 *>(weight_gmem) + i));
#pragma unroll
                for (int j = 0; j < kChunk; ++j) {
                    y_rmem[j] = y_rmem[j] * rstd * weight_rmem[j];
                }
                if (turns) {
                    if (k == 0 || step != 0) { // else the chunk before it has the same pairs
                        const auto *table_gmem = reinterpret_cast<const float4 *>(
                            args.rotary + int64_t(token) * args.d_head + column);
                        angles[0] = __ldg(table_gmem);
                        angles[1] = __ldg(table_gmem + 1);
                    }
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float *pairs = y_rmem + 4 * half;
                        turn(pairs[0], pairs[1], angles[half].x, angles[half].y);
                        turn(pairs[2], pairs[3], angles[half].z, angles[half].w);
                    }
                }
                chunk = pack_chunk<kDType>(y_rmem);
            }
            store_gmem_16(y_gmem + i * kChunk, chunk);
        }
        column += step;
        column -= column >= args.d_head ? args.d_head : 0;
    }
}

} // namespace qr1
