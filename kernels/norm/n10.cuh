#pragma once
// Step 10 of the layer_norm family: rows that just fill the registers, as in a8. Parent: n8.
//
// What changed
//   1. Where a row begins at a multiple of 16 bytes and has just the elements that the registers of
//      a thread block hold, it has code of its own, in whole_rows.cuh. All threads have as many
//      elements: Chan's formula needs no shares, and no load and no store has a predicate.
//   2. Other rows are taken as in n7, with streaming stores.
//
// Why: a probe on an H200 with such rows alone had 96 to 97% of a copy's speed in layer norm at
// 8192 and 16384, where n8 has 90%. In n8 each of 8 levels of a tree has an RCP, three shuffles and
// about 15 other instructions in a chain, and each chunk has a branch around its squares.
// Expected, as a share of a copy: 96% from 8192 to 32768.
//
// benchmark:begin
// benchmark:end
// Verdict: On an H200 2 points of a copy's speed more than n8 at 16384, and 3 less at 32768: n4 and
// n8 stay ahead.
//
// Phases: 1 x to registers, 2 mean and rstd, 3 y.

#include "elements.cuh"
#include "kernels/norm/arguments.cuh"
#include "kernels/norm/whole_rows.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "predicated.cuh"
#include "streaming.cuh"
#include "unpack_again.cuh"

namespace n10 {

// Some elements of a row: their number, their mean, and the sum of their squared distances from it.
struct Moments {
    float n, mean, M2;
};

// Combines a and b by Chan's formula. n · share · d is multiplied before the second d, since d² may
// overflow where a or b has no elements. The mean is the sum where a or b has an infinity.
__device__ __forceinline__ Moments combine(Moments a, Moments b) {
    const float n = a.n + b.n, share = n > 0.0f ? b.n * reciprocal_approx(n) : 0.0f;
    const float d = b.mean - a.mean, mean = fmaf(d, share, a.mean);
    return {n, mean == mean ? mean : a.mean + b.mean, fmaf(a.n * share * d, d, a.M2 + b.M2)};
}

__device__ __forceinline__ Moments shuffle_xor(Moments value, int lanes) {
    return {__shfl_xor_sync(0xffffffff, value.n, lanes),
            __shfl_xor_sync(0xffffffff, value.mean, lanes),
            __shfl_xor_sync(0xffffffff, value.M2, lanes)};
}

// Combines the values of the kThreads threads of a row and returns the result to each: by a tree
// over the lanes of each warp, then by one over the row's warps, if it has several. smem: (warps of
// the block).
template <int kThreads>
__device__ __forceinline__ Moments row_moments(Moments value, float origin, Moments *smem) {
#pragma unroll
    for (int lanes = 1; lanes < kThreads && lanes < 32; lanes *= 2) {
        value = combine(value, shuffle_xor(value, lanes));
    }
    value.mean += origin; // rounding changes means of warps far less than the bound of rstd
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
            value = combine(value, shuffle_xor(value, lanes));
        }
    }
    return value;
}

// Returns `sum` with the elements of a chunk added to it.
template <DType kDType>
__device__ __forceinline__ float add_chunk(float sum, uint4 chunk) {
    float x_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(x_rmem, chunk);
#pragma unroll
    for (const float x : x_rmem) {
        sum += x;
    }
    return sum;
}

// Returns `squares` with (x - mean)² of the elements of a chunk added to it; adds x - mean to
// `rest`.
template <DType kDType>
__device__ __forceinline__ float add_squares(float squares, float &rest, uint4 chunk, float mean,
                                             uint32_t zero = 0) {
    float x_rmem[kChunkElements<kDType>];
    unpack_chunk_again<kDType>(x_rmem, chunk, zero);
#pragma unroll
    for (const float x : x_rmem) {
        rest += x - mean;
        squares = fmaf(x - mean, x - mean, squares);
    }
    return squares;
}

// Whether a vector begins at a multiple of 16 bytes with this element, or is left out.
template <typename T>
__device__ __forceinline__ bool has_chunks_at(const T *gmem, int element) {
    return gmem == nullptr || elements_to_boundary(gmem + element) == 0;
}

// A chunk of weight or bias; `missing` throughout if a call leaves the vector out. kIsGiven: it and
// the chunk exist.
template <DType kDType, bool kIsGiven>
__device__ __forceinline__ void load_chunk(float (&rmem)[kChunkElements<kDType>],
                                           const ElementOf<kDType> *gmem, int element,
                                           float missing, bool exists) {
    if constexpr (kIsGiven) {
        uint4 chunk; // in the order of the text, so that few are in registers
        asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                     : "l"(gmem + element));
        unpack_chunk<kDType>(rmem, chunk);
    } else {
#pragma unroll
        for (float &value : rmem) {
            value = missing;
        }
        const uint4 otherwise = pack_chunk<kDType>(rmem);
        unpack_chunk<kDType>(rmem,
                             load_gmem_16_if(exists && gmem != nullptr, gmem + element, otherwise));
    }
}

// y = (x - mean) · rstd · weight + bias for the chunk of x that begins at an element of the row.
// kIsUsual: weight, bias and the chunk exist.
template <DType kDType, bool kIsUsual = false>
__device__ __forceinline__ uint4 norm_chunk(uint4 chunk, float mean, float rstd,
                                            const ElementOf<kDType> *weight_gmem,
                                            const ElementOf<kDType> *bias_gmem, int element,
                                            uint32_t zero = 0, bool exists = true) {
    constexpr int kChunk = kChunkElements<kDType>;
    float x_rmem[kChunk], weight_rmem[kChunk], bias_rmem[kChunk];
    unpack_chunk_again<kDType>(x_rmem, chunk, zero);
    load_chunk<kDType, kIsUsual>(weight_rmem, weight_gmem, element, 1.0f, exists);
    load_chunk<kDType, kIsUsual>(bias_rmem, bias_gmem, element, 0.0f, exists);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        x_rmem[j] = fmaf((x_rmem[j] - mean) * rstd, weight_rmem[j], bias_rmem[j]);
    }
    return pack_chunk<kDType>(x_rmem);
}

// y = (x - mean) · rstd · weight + bias for one element of the row.
template <DType kDType>
__device__ __forceinline__ ElementOf<kDType>
norm_element(float x, float mean, float rstd, const ElementOf<kDType> *weight_gmem,
             const ElementOf<kDType> *bias_gmem, int element) {
    const float weight = weight_gmem ? to_float<kDType>(__ldg(weight_gmem + element)) : 1.0f;
    const float bias = bias_gmem ? to_float<kDType>(__ldg(bias_gmem + element)) : 0.0f;
    return from_float<kDType>(fmaf((x - mean) * rstd, weight, bias));
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads(), Kernels::value.blocks_per_sm())
    layer_norm_kernel(const __grid_constant__ NormKernelArgs args) {
    constexpr LayerNormKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.chunks >= 1 && cfg.chunks <= 16 &&
                      cfg.chunks * 4 + 48 <= 65536 / cfg.n_threads(),
                  "a chunk is 4 registers, the rest of the kernel up to 48, and an SM has 65536");
    static_assert(cfg.row_threads >= 8 && cfg.row_threads <= cfg.n_threads() &&
                      (cfg.row_threads & (cfg.row_threads - 1)) == 0,
                  "the tree over the threads of a row is one over the lanes of a warp");

    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.threads_per_row(), kChunks = cfg.chunks;
    constexpr int kRows = cfg.n_threads() / kThreads; // of the block
    constexpr int kChunk = kChunkElements<kDType>;
    constexpr int kEdges = (2 * (kChunk - 1) + kThreads - 1) / kThreads; // of a thread

    extern __shared__ Moments smem[]; // (warps)
    const int64_t row = int64_t(blockIdx.x) * kRows + (kRows > 1 ? threadIdx.x / kThreads : 0);
    const int thread = kRows > 1 ? threadIdx.x % kThreads : threadIdx.x; // of those with the row
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
    const uint32_t zero = args.rows >> 31; // 0, which the compiler does not know
    if (kRows == 1 && width == kThreads * kChunks * kChunk && head == 0 &&
        elements_to_boundary(y_gmem) == 0 && weight_gmem != nullptr && bias_gmem != nullptr &&
        has_chunks_at(weight_gmem, 0) && has_chunks_at(bias_gmem, 0)) {
        uint4 x_rmem[kChunks];
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            x_rmem[k] = whole::load_x(x_chunks_gmem + thread + k * kThreads);
        }
        const auto [mean, M2] = whole::block_moments<kDType, false, kThreads>(x_rmem, smem, zero);
        const float rstd = rsqrtf(__fdividef(M2, width) + args.eps);
        if (thread == 0 && args.mean != nullptr) {
            args.mean[row] = mean;
        }
        if (thread == 0 && args.rstd != nullptr) {
            args.rstd[row] = rstd;
        }
        whole::store_y<kDType, false, kThreads>(
            reinterpret_cast<uint4 *>(y_gmem) + thread, x_rmem, mean, rstd,
            reinterpret_cast<const uint4 *>(weight_gmem) + thread,
            reinterpret_cast<const uint4 *>(bias_gmem) + thread, zero);
        return;
    }

    // 1. x: global → registers; 0 where there is no chunk
    float x_edges[kEdges];
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        const int n = thread + k * kThreads;
        x_edges[k] = n < n_edges ? to_float<kDType>(__ldg(x_gmem + edge(n))) : 0.0f;
    }
    uint4 x_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        x_rmem[k] = load_gmem_16_once_if(i < n_chunks, x_chunks_gmem + i, uint4{});
    }
    const int first_rest = thread + kChunks * kThreads; // the first chunk not in registers

    // 2. mean = Σ x / width and rstd = 1 / sqrt(Σ (x - mean)² / width + eps); at first those of the
    // thread's elements
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        sum += x_edges[k];
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        sum = add_chunk<kDType>(sum, x_rmem[k]); // nothing, where there is no chunk
    }
#pragma unroll 1
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        sum = add_chunk<kDType>(sum, __ldg(x_chunks_gmem + i));
    }
    const auto own = [&](int n) { return (n - thread + kThreads - 1) / kThreads; }; // of n
    const float n = own(n_chunks) * kChunk + own(n_edges);
    const float own_mean = n > 0.0f ? __fdividef(sum, n) : 0.0f; // but for rounding
    float squares = 0.0f, rest = 0.0f;
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        if (thread + k * kThreads < n_edges) { // else (0 - own_mean)² would be added
            rest += x_edges[k] - own_mean;
            squares = fmaf(x_edges[k] - own_mean, x_edges[k] - own_mean, squares);
        }
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        if (thread + k * kThreads < n_chunks) {
            squares = add_squares<kDType>(squares, rest, x_rmem[k], own_mean, zero & 1);
        }
    }
#pragma unroll 1
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        squares = add_squares<kDType>(squares, rest, __ldg(x_chunks_gmem + i), own_mean);
    }
    // The lanes of a row count their means from that of the first, without its rounding.
    const float first_mean = __shfl_sync(0xffffffff, own_mean, 0, min(kThreads, 32));
    const float origin = fabsf(first_mean) < INFINITY ? first_mean : 0.0f;
    rest = rest == rest ? __fdividef(rest, n) : 0.0f;
    const float distance = n > 0.0f ? own_mean - origin + rest : 0.0f;
    const auto [_, mean, M2] = row_moments<kThreads>({n, distance, squares}, origin, smem);
    const float rstd = rsqrtf(__fdividef(M2, width) + args.eps);

    // 3. y = (x - mean) · rstd · weight + bias
    if (row >= args.rows) {
        return;
    }
    if (thread == 0 && args.mean != nullptr) {
        args.mean[row] = mean;
    }
    if (thread == 0 && args.rstd != nullptr) {
        args.rstd[row] = rstd;
    }
    if (!has_chunks_at(y_gmem, head) || !has_chunks_at(weight_gmem, head) ||
        !has_chunks_at(bias_gmem, head)) {
        // Neighbouring threads take neighbouring elements, as in n1, and read x again.
        for (int i = thread; i < width; i += kThreads) {
            const float x = to_float<kDType>(__ldg(x_gmem + i));
            y_gmem[i] = norm_element<kDType>(x, mean, rstd, weight_gmem, bias_gmem, i);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        const int n = thread + k * kThreads, i = edge(n);
        if (n < n_edges) {
            y_gmem[i] = norm_element<kDType>(x_edges[k], mean, rstd, weight_gmem, bias_gmem, i);
        }
    }
    auto *y_chunks_gmem = reinterpret_cast<uint4 *>(y_gmem + head); // (n_chunks)
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        store_gmem_16_streaming_if(i < n_chunks, y_chunks_gmem + i,
                                   norm_chunk<kDType>(x_rmem[k], mean, rstd, weight_gmem, bias_gmem,
                                                      head + i * kChunk, zero & 2, i < n_chunks));
    }
#pragma unroll 1
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        const uint4 chunk = __ldg(x_chunks_gmem + i);
        store_gmem_16_streaming(
            y_chunks_gmem + i,
            norm_chunk<kDType>(chunk, mean, rstd, weight_gmem, bias_gmem, head + i * kChunk));
    }
}

} // namespace n10
