#pragma once
// Step 4 of the rms_norm family: rows that just fill the registers, as in a8. Parent: r3.
//
// What changed
//   1. Where rows begin at multiples of 16 bytes and have just the elements that the registers of
//      their threads hold, with a weight and no bias, they have code of their own, in
//      whole_rows.cuh: no load and no store has a predicate.
//   2. Blocks in which a row does not exist take r3's code.
//
// Why: a probe on an H200 with such rows alone had 98% of a copy's speed at 16384, where r3 has
// 96%, and 100% from 64 to 1024, where it has 88 to 98%. r3 asks for each chunk whether it exists.
// Expected, as a share of a copy: 97% from 64 to 16384, 96% at 32768.
//
// benchmark:begin
// benchmark:end
// Verdict: On an H200 98% of a copy's speed at 16384, where r1 has 95% and r3 93%; as r3 up to
// 1024; 92% at 32768, 4 points less than r3.
//
// Phases: 1 x to registers, 2 rstd, 3 y; each for all rows of a thread, or for one.

#include "elements.cuh"
#include "kernels/norm/arguments.cuh"
#include "kernels/norm/whole_rows.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "predicated.cuh"
#include "streaming.cuh"
#include "unpack_again.cuh"

namespace r4 {

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

// Adds the values of the kThreads lanes of each row and returns the sums to each.
template <int kThreads, int kRows>
__device__ __forceinline__ void lane_sums(float (&sums)[kRows]) {
#pragma unroll
    for (int lanes = 1; lanes < kThreads; lanes *= 2) {
#pragma unroll
        for (float &sum : sums) {
            sum += __shfl_xor_sync(0xffffffff, sum, lanes);
        }
    }
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

// Whether a vector begins at a multiple of 16 bytes with this element, or is left out.
template <typename T>
__device__ __forceinline__ bool has_chunks_at(const T *gmem, int element) {
    return gmem == nullptr || elements_to_boundary(gmem + element) == 0;
}

// A chunk of weight or bias; `missing` throughout if a call leaves the vector out.
template <DType kDType>
__device__ __forceinline__ void load_chunk(float (&rmem)[kChunkElements<kDType>],
                                           const ElementOf<kDType> *gmem, int element,
                                           float missing) {
    if (gmem != nullptr) {
        unpack_chunk<kDType>(rmem, __ldg(reinterpret_cast<const uint4 *>(gmem + element)));
        return;
    }
#pragma unroll
    for (float &value : rmem) {
        value = missing;
    }
}

// y = x · rstd · weight + bias for the chunk of x that begins at an element of the row.
template <DType kDType>
__device__ __forceinline__ uint4 norm_chunk(uint4 chunk, float rstd,
                                            const ElementOf<kDType> *weight_gmem,
                                            const ElementOf<kDType> *bias_gmem, int element) {
    constexpr int kChunk = kChunkElements<kDType>;
    float x_rmem[kChunk], weight_rmem[kChunk], bias_rmem[kChunk];
    unpack_chunk<kDType>(x_rmem, chunk);
    load_chunk<kDType>(weight_rmem, weight_gmem, element, 1.0f);
    load_chunk<kDType>(bias_rmem, bias_gmem, element, 0.0f);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        x_rmem[j] = fmaf(x_rmem[j] * rstd, weight_rmem[j], bias_rmem[j]);
    }
    return pack_chunk<kDType>(x_rmem);
}

// y = x · rstd · weight + bias for one element of the row.
template <DType kDType>
__device__ __forceinline__ ElementOf<kDType>
norm_element(float x, float rstd, const ElementOf<kDType> *weight_gmem,
             const ElementOf<kDType> *bias_gmem, int element) {
    const float weight = weight_gmem ? to_float<kDType>(__ldg(weight_gmem + element)) : 1.0f;
    const float bias = bias_gmem ? to_float<kDType>(__ldg(bias_gmem + element)) : 0.0f;
    return from_float<kDType>(fmaf(x * rstd, weight, bias));
}

// Whether all rows begin at multiples of 16 bytes, have whole chunks, and fit into the registers.
template <RmsNormKernelConfig cfg>
__device__ __forceinline__ bool has_whole_chunks(const NormKernelArgs &args) {
    constexpr int kChunk = kChunkElements<cfg.dtype>;
    const auto address = [](const void *gmem) { return reinterpret_cast<uintptr_t>(gmem); };
    return (address(args.x) | address(args.y) | address(args.weight) | address(args.bias)) %
                   kChunkBytes ==
               0 &&
           (args.x_stride | args.y_stride | args.width) % kChunk == 0 &&
           args.width <= cfg.chunks * cfg.threads_per_row() * kChunk;
}

// y of the rows of all threads, which have whole chunks.
// smem: (kRows, warps).
template <RmsNormKernelConfig cfg>
__device__ __forceinline__ void norm_rows(const NormKernelArgs &args, float *smem) {
    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.threads_per_row(), kChunks = cfg.chunks;
    constexpr int kRows = cfg.rows_in_flight, kChunk = kChunkElements<kDType>;
    constexpr int kApart = cfg.n_threads() / kThreads; // from a row of a thread to the next

    const unsigned row = blockIdx.x * (kRows * kApart) + threadIdx.x / kThreads; // the first
    const int rows = args.rows - row; // from that one on, if it exists
    const int thread = threadIdx.x % kThreads; // of those that have the row
    const int n_chunks = args.width / kChunk;
    const auto has_chunk = [&](int r, int k) {
        return r * kApart < rows && thread + k * kThreads < n_chunks;
    };
    const int first = thread * kChunk; // element of the row
    const auto *x_gmem =
        static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride + first;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + row * args.y_stride + first;
    const auto *weight_gmem = static_cast<const ElementOf<kDType> *>(args.weight); // (width)
    const auto *bias_gmem = static_cast<const ElementOf<kDType> *>(args.bias); // (width)
    const uint32_t zero = args.width >> 31; // of a width above 0

    // 1. x: global → registers; 0 where there is no chunk
    uint4 x_rmem[kRows][kChunks];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const auto *chunk = x_gmem + r * kApart * args.x_stride + k * kThreads * kChunk;
            x_rmem[r][k] = load_gmem_16_once_if(has_chunk(r, k), chunk, uint4{});
        }
    }

    // 2. rstd = 1 / sqrt(Σ x² / width + eps)
    const float inverse_width = reciprocal_approx(args.width);
    float rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        rstd[r] = 0.0f;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            rstd[r] = add_squares<kDType>(rstd[r], x_rmem[r][k]);
        }
    }
    lane_sums < kThreads<32 ? kThreads : 32>(rstd);
    if constexpr (kThreads > 32) {
        constexpr int kWarps = kThreads / 32; // of a row
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < kRows && lane == 0; ++r) {
            smem[r * cfg.n_warps + warp] = rstd[r];
        }
        __syncthreads(); // a warp reads what the others have written
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            rstd[r] = smem[r * cfg.n_warps + warp / kWarps * kWarps + lane % kWarps];
        }
        lane_sums<kWarps>(rstd);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        rstd[r] = rsqrtf(fmaf(rstd[r], inverse_width, args.eps));
    }

    // 3. y = x · rstd · weight + bias, for the same columns of all rows
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = min(thread + k * kThreads, n_chunks - 1) * kChunk;
        float weight_rmem[kChunk], bias_rmem[kChunk];
        load_chunk<kDType>(weight_rmem, weight_gmem, i, 1.0f);
        load_chunk<kDType>(bias_rmem, bias_gmem, i, 0.0f);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float y_rmem[kChunk];
            unpack_chunk_again<kDType>(y_rmem, x_rmem[r][k], zero);
#pragma unroll
            for (int j = 0; j < kChunk; ++j) {
                y_rmem[j] = fmaf(y_rmem[j] * rstd[r], weight_rmem[j], bias_rmem[j]);
            }
            auto *chunk = y_gmem + r * kApart * args.y_stride + k * kThreads * kChunk;
            store_gmem_16_streaming_if(has_chunk(r, k), chunk, pack_chunk<kDType>(y_rmem));
        }
    }
#pragma unroll
    for (int r = 0; r < kRows && thread == 0 && args.rstd != nullptr && r * kApart < rows; ++r) {
        args.rstd[row + r * kApart] = rstd[r];
    }
}

// y of rows that just fill the registers; all rows of the block exist. smem: (warps).
template <RmsNormKernelConfig cfg>
__device__ __forceinline__ void norm_whole_row(const NormKernelArgs &args, float *smem) {
    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.threads_per_row(), kChunks = cfg.chunks;
    constexpr int kChunk = kChunkElements<kDType>, kApart = cfg.n_threads() / kThreads;
    const int64_t row = int64_t(blockIdx.x) * kApart + threadIdx.x / kThreads;
    const int thread = threadIdx.x % kThreads; // of those that have the row
    const uint4 *x_gmem =
        static_cast<const uint4 *>(args.x) + row * args.x_stride / kChunk + thread;
    uint4 x_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        x_rmem[k] = whole::load_x(x_gmem + k * kThreads);
    }
    const uint32_t zero = args.rows >> 31; // 0, which the compiler does not know
    const float squares = whole::block_moments<kDType, true, kThreads>(x_rmem, smem, zero).y;
    const float rstd = rsqrtf(__fdividef(squares, args.width) + args.eps);
    whole::store_y<kDType, true, kThreads>(
        static_cast<uint4 *>(args.y) + row * args.y_stride / kChunk + thread, x_rmem, 0.0f, rstd,
        static_cast<const uint4 *>(args.weight) + thread, nullptr, zero);
    if (thread == 0 && args.rstd != nullptr) {
        args.rstd[row] = rstd;
    }
}

// y of a row of any length, which may begin at any element. Its chunks are read again, from L1, so
// that the rows above have more registers. smem: (warps of the block).
template <RmsNormKernelConfig cfg>
__device__ __forceinline__ void norm_row(const NormKernelArgs &args, int64_t row, float *smem) {
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.rows_in_flight >= 1 && cfg.chunks >= 1 && cfg.chunks <= 16 &&
                      cfg.chunks * cfg.rows_in_flight * 4 + 48 <= 65536 / cfg.n_threads(),
                  "a chunk is 4 registers, the rest of the kernel up to 48, and an SM has 65536");
    static_assert(cfg.row_threads >= 8 && cfg.row_threads <= cfg.n_threads() &&
                      (cfg.row_threads & (cfg.row_threads - 1)) == 0,
                  "the tree over the threads of a row is one over the lanes of a warp");

    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.threads_per_row();
    constexpr int kChunk = kChunkElements<kDType>;
    constexpr int kEdges = (2 * (kChunk - 1) + kThreads - 1) / kThreads; // of a thread

    const int thread = threadIdx.x % kThreads; // of those that have the row
    const int width = row < args.rows ? args.width : 0;
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + row * args.y_stride;
    const auto *weight_gmem = static_cast<const ElementOf<kDType> *>(args.weight); // (width)
    const auto *bias_gmem = static_cast<const ElementOf<kDType> *>(args.bias); // (width)

    // A row of x is a head, chunks that begin at multiples of 16 bytes, and a tail. Head and tail
    // have less than a chunk each, together at most 14 elements of 16 bits: one per thread, or two
    // where 8 threads have the row.
    const int head = min(elements_to_boundary(x_gmem), width);
    const int n_chunks = (width - head) / kChunk;
    const int n_edges = width - n_chunks * kChunk;
    const auto edge = [&](int n) { // the place in the row of the n-th element of head and tail
        return n + (n < head ? 0 : n_chunks * kChunk);
    };
    const auto *x_chunks_gmem = reinterpret_cast<const uint4 *>(x_gmem + head); // (n_chunks)

    // 1. head and tail: global → registers
    float x_edges[kEdges];
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        const int n = thread + k * kThreads;
        x_edges[k] = n < n_edges ? to_float<kDType>(__ldg(x_gmem + edge(n))) : 0.0f;
    }

    // 2. rstd = 1 / sqrt(Σ x² / width + eps)
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        squares = fmaf(x_edges[k], x_edges[k], squares);
    }
#pragma unroll 1
    for (int i = thread; i < n_chunks; i += kThreads) {
        squares = add_squares<kDType>(squares, __ldg(x_chunks_gmem + i));
    }
    const float rstd = rsqrtf(row_sum<kThreads>(squares, smem) / width + args.eps);

    // 3. y = x · rstd · weight + bias
    if (row >= args.rows) {
        return;
    }
    if (thread == 0 && args.rstd != nullptr) {
        args.rstd[row] = rstd;
    }
    if (!has_chunks_at(y_gmem, head) || !has_chunks_at(weight_gmem, head) ||
        !has_chunks_at(bias_gmem, head)) {
        // Neighbouring threads take neighbouring elements, as in n1, and read x again.
        for (int i = thread; i < width; i += kThreads) {
            const float x = to_float<kDType>(__ldg(x_gmem + i));
            y_gmem[i] = norm_element<kDType>(x, rstd, weight_gmem, bias_gmem, i);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        const int n = thread + k * kThreads, i = edge(n);
        if (n < n_edges) {
            y_gmem[i] = norm_element<kDType>(x_edges[k], rstd, weight_gmem, bias_gmem, i);
        }
    }
    auto *y_chunks_gmem = reinterpret_cast<uint4 *>(y_gmem + head); // (n_chunks)
#pragma unroll 1
    for (int i = thread; i < n_chunks; i += kThreads) {
        const uint4 chunk = __ldg(x_chunks_gmem + i);
        store_gmem_16_streaming(
            y_chunks_gmem + i,
            norm_chunk<kDType>(chunk, rstd, weight_gmem, bias_gmem, head + i * kChunk));
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads(), Kernels::value.blocks_per_sm())
    rms_norm_kernel(const __grid_constant__ NormKernelArgs args) {
    constexpr RmsNormKernelConfig cfg = Kernels::value;
    constexpr int kRows = cfg.rows_in_flight, kApart = cfg.n_threads() / cfg.threads_per_row();
    extern __shared__ float smem[]; // (kRows, warps)
    if (kRows == 1 &&
        args.width == cfg.chunks * cfg.threads_per_row() * kChunkElements<cfg.dtype> &&
        has_whole_chunks<cfg>(args) && args.weight != nullptr && args.bias == nullptr &&
        (blockIdx.x + 1) * kApart <= unsigned(args.rows)) {
        norm_whole_row<cfg>(args, smem);
        return;
    }
    if (has_whole_chunks<cfg>(args)) {
        norm_rows<cfg>(args, smem);
        return;
    }
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
        const int64_t row = (int64_t(blockIdx.x) * kRows + r) * kApart;
        norm_row<cfg>(args, row + threadIdx.x / cfg.threads_per_row(), smem + r * cfg.n_warps);
    }
}

} // namespace r4
