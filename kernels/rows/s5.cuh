#pragma once
// Step 5 of the softmax family: several rows of a thread in flight, as in n6. Parent: s4.
//
// What changed
//   1. A thread has a part of `rows_in_flight` rows, at the same columns. It loads all of them
//      before the first maximum.
//   2. This takes rows that begin at multiples of 16 bytes, have whole chunks and fit into the
//      registers of up to 32 lanes. Its loads and stores have predicates instead of branches, so
//      that ptxas keeps them together. s4's code takes other rows, in turn.
//   3. The maximum m is known before the first exponential: a tree for m, then one for l. Each
//      exponential is computed once, and stays in a register until l is known.
//
// Why: at a width of 64 a thread of s4 has one chunk of 16 bytes, and an SM with 1280 threads has
// 20 KB in flight, where an H200 needs 16 KB of x per SM and microsecond. 4 rows are 64 bytes per
// thread.
//   s4 computes exponentials of a chunk against its own maximum, 8 and one to rescale l, one more
// at each level of the tree, and 8 for y: 20 at 8 threads per row. 2^24 chunks take 88 us at 16 per
// SM and cycle, where a copy takes 127. s5 computes 8. A tree of maxima and one of sums have 2
// instructions per level each; a level of s4 has about 10.
//   375 instructions of SASS take 4 chunks. Cost: 8 registers for each chunk in 16 bits.
// Expected, as a share of a copy: 95% at widths of 64 and 128; as s4 from 256 on.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 97% of a copy's speed at widths of 64 and 128, where s4 has 73% and 93%; as
// s4 at 256 and 1024.
//
// Phases: 1 x to registers, 2 m, 3 l, 4 y; each for all rows of a thread, or for one.

#include "elements.cuh"
#include "kernels/rows/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "predicated.cuh"

namespace s5 {

constexpr float kLowest = -3.402823466e38f; // the lowest finite fp32

// e^(x - m). The product with log2(e) is not folded into one FFMA, x · log2(e) - m · log2(e), since
// m · log2(e) overflows where |m| exceeds 2.3e38.
__device__ __forceinline__ float exponential(float x, float m) {
    return exp2_approx((x - m) * kLog2e);
}

// A chunk of -inf.
template <DType kDType>
__device__ __forceinline__ uint4 minus_infinity() {
    float x_rmem[kChunkElements<kDType>];
#pragma unroll
    for (float &x : x_rmem) {
        x = -INFINITY;
    }
    return pack_chunk<kDType>(x_rmem);
}

// m = max(x) and l = Σ e^(x - m) over some elements of a row; kLowest and 0 over no element.
struct __align__(8) Partial {
    float m, l;
};

// Combines a and b. The larger m stays, so that one of the two factors is 1 and is left out. The
// order of a and b does not matter, so all lanes of a tree get the same bits.
__device__ __forceinline__ Partial combine(Partial a, Partial b) {
    const bool a_is_lower = a.m < b.m;
    const Partial lower = a_is_lower ? a : b, upper = a_is_lower ? b : a;
    return {upper.m, fmaf(lower.l, exponential(lower.m, upper.m), upper.l)};
}

__device__ __forceinline__ Partial shuffle_xor(Partial value, int lanes) {
    return {__shfl_xor_sync(0xffffffff, value.m, lanes),
            __shfl_xor_sync(0xffffffff, value.l, lanes)};
}

// Combines the values of the threads of a row and returns the result to each: by a tree over the
// lanes of each warp, then by one over the warps of the row. smem (warps of the block) is for rows
// of several warps. All threads of the block must call it.
template <int kRowThreads>
__device__ __forceinline__ Partial row_reduce(Partial value, Partial *smem) {
#pragma unroll
    for (int lanes = 1; lanes < 32 && lanes < kRowThreads; lanes *= 2) {
        value = combine(value, shuffle_xor(value, lanes));
    }
    if constexpr (kRowThreads > 32) {
        constexpr int kWarps = kRowThreads / 32;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) {
            smem[warp] = value;
        }
        __syncthreads(); // a warp reads what the others have written
        value = smem[warp / kWarps * kWarps + lane % kWarps];
#pragma unroll
        for (int lanes = 1; lanes < kWarps; lanes *= 2) {
            value = combine(value, shuffle_xor(value, lanes));
        }
    }
    return value;
}

// Returns `partial` extended by a chunk of x.
template <DType kDType>
__device__ __forceinline__ Partial add_chunk(Partial partial, uint4 chunk) {
    float x_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(x_rmem, chunk);
    float m = partial.m;
#pragma unroll
    for (const float x : x_rmem) {
        m = fmaxf(m, x);
    }
    float l = partial.l * exponential(partial.m, m);
#pragma unroll
    for (const float x : x_rmem) {
        l += exponential(x, m);
    }
    return {m, l};
}

// y = e^(x - m) / l for a chunk of x.
template <DType kDType>
__device__ __forceinline__ uint4 softmax_chunk(uint4 chunk, float m, float inverse_l) {
    float x_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(x_rmem, chunk);
#pragma unroll
    for (float &x : x_rmem) {
        x = exponential(x, m) * inverse_l;
    }
    return pack_chunk<kDType>(x_rmem);
}

// Combines the values of the kThreads lanes of each row and returns the results to each.
template <int kThreads, int kRows, typename Combine>
__device__ __forceinline__ void lanes_reduce(float (&values)[kRows], Combine combined) {
#pragma unroll
    for (int lanes = 1; lanes < kThreads; lanes *= 2) {
#pragma unroll
        for (float &value : values) {
            value = combined(value, __shfl_xor_sync(0xffffffff, value, lanes));
        }
    }
}

// Whether all rows begin at multiples of 16 bytes, have whole chunks, and fit into the registers of
// as many lanes of a warp.
template <SoftmaxKernelConfig cfg>
__device__ __forceinline__ bool has_whole_chunks(const RowsKernelArgs &args) {
    constexpr int kChunk = kChunkElements<cfg.dtype>;
    const auto address = [](const void *gmem) { return reinterpret_cast<uintptr_t>(gmem); };
    return (address(args.x) | address(args.y)) % kChunkBytes == 0 &&
           (args.x_stride | args.y_stride | args.width) % kChunk == 0 &&
           args.width <= cfg.chunks * cfg.row_threads * kChunk && cfg.row_threads <= 32;
}

// y of the rows of all threads, which have whole chunks.
template <SoftmaxKernelConfig cfg>
__device__ __forceinline__ void softmax_rows(const RowsKernelArgs &args) {
    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.row_threads, kChunks = cfg.chunks;
    constexpr int kRows = cfg.rows_in_flight, kChunk = kChunkElements<kDType>;
    constexpr int kApart = cfg.n_threads() / kThreads; // from a row of a thread to the next

    const unsigned row = blockIdx.x * (kRows * kApart) + threadIdx.x / kThreads; // the first
    const int rows = args.rows - row; // from that one on, if it exists
    const int thread = threadIdx.x % kThreads; // of the row
    const int n_chunks = args.width / kChunk;
    const auto has_chunk = [&](int r, int k) {
        return r * kApart < rows && thread + k * kThreads < n_chunks;
    };
    const int first = thread * kChunk; // element of the row
    const auto *x_gmem =
        static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride + first;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + row * args.y_stride + first;

    // 1. x: global → registers; -inf where there is no chunk
    uint4 x_rmem[kRows][kChunks];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const auto *chunk = x_gmem + r * kApart * args.x_stride + k * kThreads * kChunk;
            x_rmem[r][k] = load_gmem_16_if(has_chunk(r, k), chunk, minus_infinity<kDType>());
        }
    }

    // 2. m = max(x)
    float e_rmem[kRows][kChunks][kChunk], m[kRows], l[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        m[r] = kLowest;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            unpack_chunk<kDType>(e_rmem[r][k], x_rmem[r][k]);
#pragma unroll
            for (const float x : e_rmem[r][k]) {
                m[r] = fmaxf(m[r], x);
            }
        }
    }
    lanes_reduce<kThreads>(m, [](float a, float b) { return fmaxf(a, b); });

    // 3. l = Σ e, where e = e^(x - m)
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
#pragma unroll
            for (float &e : e_rmem[r][k]) {
                e = exponential(e, m[r]);
                l[r] += e;
            }
        }
    }
    lanes_reduce<kThreads>(l, [](float a, float b) { return a + b; });

    // 4. y = e / l
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float inverse_l = reciprocal_approx(l[r]);
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
#pragma unroll
            for (float &e : e_rmem[r][k]) {
                e *= inverse_l;
            }
            auto *chunk = y_gmem + r * kApart * args.y_stride + k * kThreads * kChunk;
            store_gmem_16_if(has_chunk(r, k), chunk, pack_chunk<kDType>(e_rmem[r][k]));
        }
    }
}

// y of a row of any length, which may begin at any element, as in s4. smem: (warps of the block).
template <SoftmaxKernelConfig cfg>
__device__ __forceinline__ void softmax_row(const RowsKernelArgs &args, int64_t row,
                                            Partial *smem) {
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.chunks >= 1 && cfg.rows_in_flight >= 1 &&
                      cfg.chunks * cfg.rows_in_flight * 8 + 48 <= 65536 / cfg.n_threads(),
                  "a chunk is 8 registers, the rest of the kernel up to 48, and an SM has 65536");
    static_assert(cfg.row_threads >= 8 && (cfg.row_threads & (cfg.row_threads - 1)) == 0 &&
                      cfg.row_threads <= cfg.n_threads(),
                  "the tree over the threads of a row is one over lanes, then one over warps");

    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.row_threads, kChunks = cfg.chunks;
    constexpr int kChunk = kChunkElements<kDType>;
    constexpr int kEdges = (2 * (kChunk - 1) + kThreads - 1) / kThreads; // of a thread, at most

    const int thread = threadIdx.x % kThreads; // of the row
    const int width = row < args.rows ? args.width : 0; // the last block may have rows too many
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + row * args.y_stride;

    // A row of x is a head, chunks that begin at multiples of 16 bytes, and a tail. Head and tail
    // have less than a chunk each, together at most 14 elements.
    const int head = min(elements_to_boundary(x_gmem), width);
    const int n_chunks = (width - head) / kChunk;
    const int n_edges = width - n_chunks * kChunk;
    // Where edge i is in the row.
    const auto place = [&](int i) { return i < head ? i : i + n_chunks * kChunk; };
    const auto *x_chunks_gmem = reinterpret_cast<const uint4 *>(x_gmem + head); // (n_chunks)

    // 1. x: global → registers; -inf where there is no chunk: it changes neither m nor l
    float x_edges[kEdges];
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        const int i = thread + k * kThreads;
        x_edges[k] = i < n_edges ? to_float<kDType>(__ldg(x_gmem + place(i))) : -INFINITY;
    }
    uint4 x_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        x_rmem[k] = i < n_chunks ? __ldg(x_chunks_gmem + i) : minus_infinity<kDType>();
    }
    const int first_rest = thread + kChunks * kThreads; // the first chunk not in registers

    // 2. m = max(x), l = Σ e^(x - m)
    Partial partial = {kLowest, 0.0f};
#pragma unroll
    for (const float x : x_edges) {
        const float m = fmaxf(kLowest, x);
        partial = combine(partial, {m, exponential(x, m)});
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        partial = add_chunk<kDType>(partial, x_rmem[k]);
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        partial = add_chunk<kDType>(partial, __ldg(x_chunks_gmem + i));
    }
    const auto [m, l] = row_reduce<kThreads>(partial, smem);

    // 3. y = e^(x - m) / l
    const float inverse_l = reciprocal_approx(l);
    if (elements_to_boundary(y_gmem) != elements_to_boundary(x_gmem)) {
        // No chunk of x is a chunk of y. Threads that stored a chunk element by element would touch
        // each sector of y up to 8 times. Here neighbouring threads store neighbouring elements,
        // which touches a sector once, and read x again.
        for (int i = thread; i < width; i += kThreads) {
            const float x = to_float<kDType>(__ldg(x_gmem + i));
            y_gmem[i] = from_float<kDType>(exponential(x, m) * inverse_l);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        if (const int i = thread + k * kThreads; i < n_edges) {
            y_gmem[place(i)] = from_float<kDType>(exponential(x_edges[k], m) * inverse_l);
        }
    }
    auto *y_chunks_gmem = reinterpret_cast<uint4 *>(y_gmem + head); // (n_chunks)
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        if (i < n_chunks) {
            store_gmem_16(y_chunks_gmem + i, softmax_chunk<kDType>(x_rmem[k], m, inverse_l));
        }
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        const uint4 chunk = __ldg(x_chunks_gmem + i);
        store_gmem_16(y_chunks_gmem + i, softmax_chunk<kDType>(chunk, m, inverse_l));
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads(), Kernels::value.blocks_per_sm())
    softmax_kernel(const __grid_constant__ RowsKernelArgs args) {
    constexpr SoftmaxKernelConfig cfg = Kernels::value;
    constexpr int kRows = cfg.rows_in_flight, kApart = cfg.n_threads() / cfg.row_threads;
    extern __shared__ Partial smem[]; // (kRows, warps)
    if (has_whole_chunks<cfg>(args)) {
        softmax_rows<cfg>(args);
        return;
    }
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
        const int64_t row = (int64_t(blockIdx.x) * kRows + r) * kApart;
        softmax_row<cfg>(args, row + threadIdx.x / cfg.row_threads, smem + r * cfg.n_warps);
    }
}

} // namespace s5
