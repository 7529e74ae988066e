#pragma once
// Step 1 of the softmax_backward family: the base, with the threads and rows of s4 of softmax.
//
// With y = softmax(x) and the gradient dy of y, the gradient of x is, along each row,
//   dx = y · (dy - Σ y · dy)
//
// The parts
//   1. The threads of a row load chunks of y and of dy, and keep both in registers, twice as many
//      as in s4. They read neither again, unless the row is longer than they hold.
//   2. A tree over the threads adds up the sum, and keeps what each addition rounds off. dy less
//   the
//      sum cancels, and what is left of it may be no larger than such a rounding.
//   3. Where rows of y, dy and dx begin at different offsets from a multiple of 16 bytes, they are
//      taken one element after the other, and read twice.
//
// Why: the formula in PyTorch's operators in fp32 converts, multiplies, adds up and subtracts in
// passes of their own. In bf16 they move 60 bytes per element, where y, dy and dx have 6.
//   At 4 chunks of each, 32 lanes hold a row of 1024 elements in 32 registers per thread. At 80
// registers in all an SM has 6 blocks of 128 threads, with 96 KB in flight. 3.35 TB/s of an H100
// need 8.2 KB at a latency of 650 ns.
//   Cost: 7 operations per level of the tree instead of one, 35 for a row of a warp.
// Expected: 90% of a copy of as many bytes at widths from 64 to 65536, with threads by width.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 the speed of a copy from a width of 128 to 32768, 90% at 64 and 84% at 65536.
//
// Phases: 1 y and dy to registers, 2 Σ y · dy, 3 dx.

#include "elements.cuh"
#include "kernels/rows_backward/arguments.cuh"
#include "memory.cuh"

namespace f1 {

// A sum is `value` + `rest`.
struct __align__(8) Sum {
    float value, rest;
};

// a + b without an error of rounding in `value`: `rest` takes what `value` leaves. The order of a
// and b does not matter, so all lanes of a tree get the same bits.
__device__ __forceinline__ Sum add(Sum a, Sum b) {
    const float value = a.value + b.value, of_b = value - a.value;
    const float lost = (a.value - (value - of_b)) + (b.value - of_b);
    return {value, a.rest + b.rest + lost};
}

__device__ __forceinline__ Sum shuffle_xor(Sum sum, int lanes) {
    return {__shfl_xor_sync(0xffffffff, sum.value, lanes),
            __shfl_xor_sync(0xffffffff, sum.rest, lanes)};
}

// Adds up the values of the threads of a row and returns the sum to each: by a tree over the lanes
// of each warp, then by one over the warps of the row. smem (warps of the block) is for rows of
// several warps. All threads of the block must call it.
template <int kRowThreads>
__device__ __forceinline__ Sum row_reduce(float value, Sum *smem) {
    Sum sum = {value, 0.0f};
#pragma unroll
    for (int lanes = 1; lanes < 32 && lanes < kRowThreads; lanes *= 2) {
        sum = add(sum, shuffle_xor(sum, lanes));
    }
    if constexpr (kRowThreads > 32) {
        constexpr int kWarps = kRowThreads / 32;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) {
            smem[warp] = sum;
        }
        __syncthreads(); // a warp reads what the others have written
        sum = smem[warp / kWarps * kWarps + lane % kWarps];
#pragma unroll
        for (int lanes = 1; lanes < kWarps; lanes *= 2) {
            sum = add(sum, shuffle_xor(sum, lanes));
        }
    }
    // of an infinity less an infinity
    return {sum.value, isnan(sum.rest) ? 0.0f : sum.rest};
}

// dx = y · (dy - Σ y · dy)
__device__ __forceinline__ float gradient(float y, float dy, Sum sum) {
    return y * (dy - sum.value - sum.rest);
}

// Returns `sum` + Σ y · dy over a chunk of each.
template <DType kDType>
__device__ __forceinline__ float add_chunk(float sum, uint4 y_chunk, uint4 dy_chunk) {
    float y_rmem[kChunkElements<kDType>], dy_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(y_rmem, y_chunk);
    unpack_chunk<kDType>(dy_rmem, dy_chunk);
#pragma unroll
    for (int i = 0; i < kChunkElements<kDType>; ++i) {
        sum = fmaf(y_rmem[i], dy_rmem[i], sum);
    }
    return sum;
}

// dx for a chunk of y and one of dy.
template <DType kDType>
__device__ __forceinline__ uint4 gradient_chunk(uint4 y_chunk, uint4 dy_chunk, Sum sum) {
    float y_rmem[kChunkElements<kDType>], dy_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(y_rmem, y_chunk);
    unpack_chunk<kDType>(dy_rmem, dy_chunk);
#pragma unroll
    for (int i = 0; i < kChunkElements<kDType>; ++i) {
        dy_rmem[i] = gradient(y_rmem[i], dy_rmem[i], sum);
    }
    return pack_chunk<kDType>(dy_rmem);
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    softmax_backward_kernel(const __grid_constant__ RowsBackwardKernelArgs args) {
    constexpr SoftmaxBackwardKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(
        cfg.chunks >= 1 && cfg.chunks <= 16 && cfg.chunks * 8 + 48 <= 65536 / cfg.n_threads(),
        "a chunk of y and one of dy are 8 registers, the rest of the kernel up to 48, and "
        "an SM has 65536");
    static_assert(cfg.row_threads >= 8 && (cfg.row_threads & (cfg.row_threads - 1)) == 0 &&
                      cfg.row_threads <= cfg.n_threads(),
                  "the tree over the threads of a row is one over lanes, then one over warps");

    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.row_threads, kChunks = cfg.chunks;
    constexpr int kChunk = kChunkElements<kDType>;
    constexpr int kEdges = (2 * (kChunk - 1) + kThreads - 1) / kThreads; // of a thread, at most

    extern __shared__ Sum smem[]; // (warps of the block)

    const int thread = threadIdx.x % kThreads; // of the row
    const int64_t row = int64_t(blockIdx.x) * cfg.block_rows() + threadIdx.x / kThreads;
    const int width = row < args.rows ? args.width : 0; // the last block may have rows too many
    const auto *y_gmem = static_cast<const ElementOf<kDType> *>(args.y) + row * args.y_stride;
    const auto *dy_gmem = static_cast<const ElementOf<kDType> *>(args.dy) + row * args.dy_stride;
    auto *dx_gmem = static_cast<ElementOf<kDType> *>(args.dx) + row * args.dx_stride;

    // A row is a head, chunks that begin at multiples of 16 bytes, and a tail. Head and tail have
    // less than a chunk each, together at most 14 elements. Where the rows begin at different
    // offsets, no chunk of one is a chunk of the others, and the row has no chunks here.
    const int offset = elements_to_boundary(y_gmem);
    const bool has_chunks =
        elements_to_boundary(dy_gmem) == offset && elements_to_boundary(dx_gmem) == offset;
    const int head = min(offset, width);
    const int n_chunks = has_chunks ? (width - head) / kChunk : 0;
    const int n_edges = has_chunks ? width - n_chunks * kChunk : 0;
    // Where edge i is in the row.
    const auto place = [&](int i) { return i < head ? i : i + n_chunks * kChunk; };
    const auto *y_chunks_gmem = reinterpret_cast<const uint4 *>(y_gmem + head); // (n_chunks)
    const auto *dy_chunks_gmem = reinterpret_cast<const uint4 *>(dy_gmem + head); // (n_chunks)

    // 1. y, dy: global → registers; 0 where there is no chunk
    float y_edges[kEdges], dy_edges[kEdges];
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        const int i = thread + k * kThreads;
        y_edges[k] = i < n_edges ? to_float<kDType>(__ldg(y_gmem + place(i))) : 0.0f;
        dy_edges[k] = i < n_edges ? to_float<kDType>(__ldg(dy_gmem + place(i))) : 0.0f;
    }
    uint4 y_rmem[kChunks], dy_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        y_rmem[k] = i < n_chunks ? __ldg(y_chunks_gmem + i) : uint4{};
        dy_rmem[k] = i < n_chunks ? __ldg(dy_chunks_gmem + i) : uint4{};
    }
    const int first_rest = thread + kChunks * kThreads; // the first chunk not in registers

    // 2. sum = Σ y · dy
    float own = 0.0f; // of this thread
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        own = fmaf(y_edges[k], dy_edges[k], own);
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        own = add_chunk<kDType>(own, y_rmem[k], dy_rmem[k]);
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        own = add_chunk<kDType>(own, __ldg(y_chunks_gmem + i), __ldg(dy_chunks_gmem + i));
    }
    if (!has_chunks) {
        for (int i = thread; i < width; i += kThreads) {
            const float y = to_float<kDType>(__ldg(y_gmem + i));
            own = fmaf(y, to_float<kDType>(__ldg(dy_gmem + i)), own);
        }
    }
    const Sum sum = row_reduce<kThreads>(own, smem);

    // 3. dx = y · (dy - sum)
    if (!has_chunks) {
        for (int i = thread; i < width; i += kThreads) {
            const float y = to_float<kDType>(__ldg(y_gmem + i));
            const float dy = to_float<kDType>(__ldg(dy_gmem + i));
            dx_gmem[i] = from_float<kDType>(gradient(y, dy, sum));
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        if (const int i = thread + k * kThreads; i < n_edges) {
            dx_gmem[place(i)] = from_float<kDType>(gradient(y_edges[k], dy_edges[k], sum));
        }
    }
    auto *dx_chunks_gmem = reinterpret_cast<uint4 *>(dx_gmem + head); // (n_chunks)
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        if (i < n_chunks) {
            store_gmem_16(dx_chunks_gmem + i, gradient_chunk<kDType>(y_rmem[k], dy_rmem[k], sum));
        }
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        const uint4 y_chunk = __ldg(y_chunks_gmem + i), dy_chunk = __ldg(dy_chunks_gmem + i);
        store_gmem_16(dx_chunks_gmem + i, gradient_chunk<kDType>(y_chunk, dy_chunk, sum));
    }
}

} // namespace f1
