#pragma once
// Step 2 of the qk_norm_rope family: Q, K and V of a token have the same threads. Parent: qr1.
//
// What changed
//   1. `row_threads` threads have a token, with its rows of Q, K and V, instead of one row. They
//      have 3 chunks in flight where qr1 has one.
//   2. The sums of Q and K go through one tree side by side, and one exchange between warps.
//   3. The angles of a pair are loaded for Q and K together.
//
// Why: a thread of qr1 takes about 100 instructions to find its row, and waits for the sum of one
// row at a time. With one head of 128 a row has 16 chunks, 2 for each of 8 threads: the search is
// half of the work. A token has 3 rows, and the search is done once.
//   Cost: 12 registers per chunk instead of 4, so that an SM has fewer threads with as many bytes
// in flight.
// Expected on an H200: 20% less time than qr1 at one or two heads of 128; no change at 24 heads.
//
// benchmark:begin
// benchmark:end
// Verdict: On an H200 9% less time than qr1 at one head of 128, 3% at two; within 8% of it either
// way at 24 heads.
//
// Phases: 1 the token, 2 x to registers, 3 rstd, 4 norm, pairs, store.

#include "elements.cuh"
#include "kernels/qk_norm_rope/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "predicated.cuh"

namespace qr2 {

// Adds the values of Q and of K of the kThreads threads of a token and returns the sums to each: by
// trees over the lanes of each warp, then by trees over the token's warps, if it has several. smem:
// (warps of the block).
template <int kThreads>
__device__ __forceinline__ float2 row_sums(float2 value, float2 *smem) {
#pragma unroll
    for (int lanes = 1; lanes < kThreads && lanes < 32; lanes *= 2) {
        value.x += __shfl_xor_sync(0xffffffff, value.x, lanes);
        value.y += __shfl_xor_sync(0xffffffff, value.y, lanes);
    }
    if constexpr (kThreads > 32) {
        constexpr int kWarps = kThreads / 32; // of a token
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) {
            smem[warp] = value;
        }
        __syncthreads(); // a warp reads what the others have written
        value = smem[warp / kWarps * kWarps + lane % kWarps];
#pragma unroll
        for (int lanes = 1; lanes < kWarps; lanes *= 2) {
            value.x += __shfl_xor_sync(0xffffffff, value.x, lanes);
            value.y += __shfl_xor_sync(0xffffffff, value.y, lanes);
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
    constexpr int kTokens = cfg.n_threads() / kThreads; // of the block
    constexpr int kChunk = kChunkElements<kDType>;

    extern __shared__ float2 smem[];

    // 1. The token: with a length of 5, token 7 is the third of the context
    const int n_queries = args.length + args.context_queries, n_keys = args.length + args.context;
    const unsigned row = blockIdx.x * unsigned(kTokens) + threadIdx.x / kThreads;
    const int thread = threadIdx.x % kThreads; // of those that have the token
    const int sample = row / unsigned(n_keys), token = row % unsigned(n_keys);
    const bool is_row = sample < args.batch; // other threads add up with their warp
    const bool is_own = token < args.length; // of the sequence
    const int n_chunks = is_row ? args.heads * (args.d_head / kChunk) : 0;
    const int chunks_of[3] = {token < n_queries ? n_chunks : 0, n_chunks,
                              args.joint_v == nullptr ? 0 : n_chunks}; // of Q, K and V
    const auto row_of = [&](const void *x, const RowStrides &own, const void *of_context,
                            const RowStrides &context) {
        const int64_t offset = is_own
                                   ? sample * own.batch + token * own.row
                                   : sample * context.batch + (token - args.length) * context.row;
        return static_cast<const Element *>(is_own ? x : of_context) + offset; // (width)
    };
    const Element *x_gmem[3] = {
        row_of(args.q, args.q_strides, args.context_q, args.context_q_strides),
        row_of(args.k, args.k_strides, args.context_k, args.context_k_strides),
        row_of(args.v, args.v_strides, args.context_v, args.context_v_strides)};

    // 2. x: global → registers; 0 where there is no chunk
    uint4 x_rmem[3][kChunks];
#pragma unroll
    for (int part = 0; part < 3; ++part) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const int i = thread + k * kThreads;
            x_rmem[part][k] =
                load_gmem_16_once_if(i < chunks_of[part], x_gmem[part] + i * kChunk, uint4{});
        }
    }

    // 3. rstd = 1 / sqrt(mean of x² + eps) of Q and K
    float2 squares = {};
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        squares.x = add_squares<kDType>(squares.x, x_rmem[0][k]);
        squares.y = add_squares<kDType>(squares.y, x_rmem[1][k]);
    }
    const int width = args.heads * args.d_head;
    const float2 sums = row_sums<kThreads>(squares, smem);
    const float rstd[2] = {rsqrtf(sums.x / width + args.eps), rsqrtf(sums.y / width + args.eps)};

    // 4. x · rstd · weight, turned by the angles of its position; V as it is
    const auto joint_row_of = [&](void *y, const RowStrides &strides) {
        return static_cast<Element *>(y) + sample * strides.batch + token * strides.row; // (width)
    };
    Element *y_gmem[3] = {joint_row_of(args.joint_q, args.joint_q_strides),
                          joint_row_of(args.joint_k, args.joint_k_strides),
                          joint_row_of(args.joint_v, args.joint_v_strides)};
    const void *weight_gmem[2] = {is_own ? args.q_weight : args.context_q_weight,
                                  is_own ? args.k_weight : args.context_k_weight}; // (width)
    const bool turns = args.rotary != nullptr && is_own;
    const int step = kThreads * kChunk % args.d_head; // from a chunk of the thread to its next
    int column = thread * kChunk % args.d_head; // in its head
    float4 angles[2] = {}; // cosine and sine of 4 pairs
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        if (turns && i < n_chunks && (k == 0 || step != 0)) {
            const auto *table_gmem = reinterpret_cast<const float4 *>(
                args.rotary + int64_t(token) * args.d_head + column);
            angles[0] = __ldg(table_gmem);
            angles[1] = __ldg(table_gmem + 1);
        } // else the chunk before it has the same pairs
#pragma unroll
        for (int part = 0; part < 3; ++part) {
            if (i >= chunks_of[part]) {
                continue;
            }
            uint4 chunk = x_rmem[part][k];
            if (part < 2) {
                float y_rmem[kChunk], weight_rmem[kChunk];
                unpack_chunk<kDType>(y_rmem, chunk);
                unpack_chunk<kDType>(weight_rmem,
                                     __ldg(static_cast<const uint4 *>(weight_gmem[part]) + i));
#pragma unroll
                for (int j = 0; j < kChunk; ++j) {
                    y_rmem[j] = y_rmem[j] * rstd[part] * weight_rmem[j];
                }
                if (turns) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float *pairs = y_rmem + 4 * half;
                        turn(pairs[0], pairs[1], angles[half].x, angles[half].y);
                        turn(pairs[2], pairs[3], angles[half].z, angles[half].w);
                    }
                }
                chunk = pack_chunk<kDType>(y_rmem);
            }
            store_gmem_16(y_gmem[part] + i * kChunk, chunk);
        }
        column += step;
        column -= column >= args.d_head ? args.d_head : 0;
    }
}

} // namespace qr2
