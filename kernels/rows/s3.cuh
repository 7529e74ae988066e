#pragma once
// Step 3 of the softmax family: the row in registers, read once. Parent: s2.
//
// What changed
//   1. A thread loads `chunks` chunks of the row before it uses the first. It keeps them as they
//      are in memory: 4 registers each, 8 elements of 16 bits.
//   2. m and l are found together: a thread raises m chunk by chunk and multiplies l by
//      e^(old m - m), as online softmax does (arXiv 1805.02867). The threads' m and l are combined
//      in the same way, in one reduction with one barrier.
//   3. Chunks beyond those in registers add to m and l in the same way, and are read again for y.
//
// Why, in bytes per element of bf16 where the rows of all thread blocks exceed L2: s2 reads 3 · 2
// and writes 2, 8 in all. A row that the registers hold takes 2 + 2 = 4. 16 warps with 16 chunks
// hold 128 KiB, half of a row of 131072, and the rest is read twice: 1.5 · 2 + 2 = 5. Where rows
// stay in L1, each is loaded once instead of three times, and the threads wait once for the slowest
// warp instead of twice.
//   Cost: an exponential per chunk for the rescale, 1 per 8 elements of 16 bits, and one per level
// of the trees. Unpacked elements would take 8 registers per chunk instead of 4. The exponentials
// that s3 takes twice do not bind: 2.1 per element, and MUFU has time for 4.4.
// Expected, of 3.35 TB/s at 4 bytes per element: 90% from a width of 4096 to what the registers
// hold; 72%, 4/5 of that, at 131072.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of
// torch.softmax in the harmonic mean over widths. 8 warps: 3,418, 0.57. Cost: 40 registers per
// thread, 64 bytes of shared memory per block, 6 blocks per SM.
// benchmark:end
// Verdict: a clear gain where the row fits: with 4 chunks, 90% of 3.35 TB/s at a width of 4096, as
// expected. In the mean over widths only 58% of torch.softmax, since most threads have no chunk of
// a short row. The expectation for 131072, with 16 chunks, is untested.
//
// Phases: 1 x to registers, 2 m and l, 3 y.

#include "elements.cuh"
#include "kernels/rows/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"

namespace s3 {

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

// Combines the values of all threads of the block and returns the result to each: by a tree over
// the lanes of each warp, then by one over the warps. Each call needs its own smem (kWarps).
template <int kWarps>
__device__ __forceinline__ Partial block_reduce(Partial value, Partial *smem) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        value = combine(value, shuffle_xor(value, lanes));
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        smem[warp] = value;
    }
    __syncthreads(); // a warp reads what the others have written
    value = smem[lane % kWarps];
#pragma unroll
    for (int lanes = 1; lanes < kWarps; lanes *= 2) {
        value = combine(value, shuffle_xor(value, lanes));
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

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    softmax_kernel(const __grid_constant__ RowsKernelArgs args) {
    constexpr SoftmaxKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.chunks >= 1 && cfg.chunks <= 16 &&
                      cfg.chunks * 4 + 48 <= 65536 / cfg.n_threads(),
                  "a chunk is 4 registers, the rest of the kernel up to 48, and an SM has 65536");

    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.n_threads(), kChunks = cfg.chunks;
    constexpr int kChunk = kChunkElements<kDType>;

    extern __shared__ Partial smem[]; // (kWarps)

    const int64_t row = blockIdx.x;
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + row * args.y_stride;

    // A row of x is a head, chunks that begin at multiples of 16 bytes, and a tail. Head and tail
    // have less than a chunk each, together at most 14 elements, so no thread has more than one.
    const int head = min(elements_to_boundary(x_gmem), args.width);
    const int n_chunks = (args.width - head) / kChunk;
    const bool has_edge = threadIdx.x < args.width - n_chunks * kChunk;
    const int edge = threadIdx.x + (threadIdx.x < head ? 0 : n_chunks * kChunk);
    const auto *x_chunks_gmem = reinterpret_cast<const uint4 *>(x_gmem + head); // (n_chunks)

    // 1. x: global → registers; -inf where there is no chunk: it changes neither m nor l
    const float x_edge = has_edge ? to_float<kDType>(__ldg(x_gmem + edge)) : -INFINITY;
    uint4 x_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = threadIdx.x + k * kThreads;
        x_rmem[k] = i < n_chunks ? __ldg(x_chunks_gmem + i) : minus_infinity<kDType>();
    }
    const int first_rest = threadIdx.x + kChunks * kThreads; // the first chunk not in registers

    // 2. m = max(x), l = Σ e^(x - m)
    const float m_edge = fmaxf(kLowest, x_edge);
    Partial partial = {m_edge, exponential(x_edge, m_edge)};
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        partial = add_chunk<kDType>(partial, x_rmem[k]);
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        partial = add_chunk<kDType>(partial, __ldg(x_chunks_gmem + i));
    }
    const auto [m, l] = block_reduce<kWarps>(partial, smem);

    // 3. y = e^(x - m) / l
    const float inverse_l = reciprocal_approx(l);
    if (elements_to_boundary(y_gmem) != elements_to_boundary(x_gmem)) {
        // No chunk of x is a chunk of y. Threads that stored a chunk element by element would touch
        // each sector of y up to 8 times. Here neighbouring threads store neighbouring elements,
        // which touches a sector once, and read x again.
        for (int i = threadIdx.x; i < args.width; i += kThreads) {
            const float x = to_float<kDType>(__ldg(x_gmem + i));
            y_gmem[i] = from_float<kDType>(exponential(x, m) * inverse_l);
        }
        return;
    }
    if (has_edge) {
        y_gmem[edge] = from_float<kDType>(exponential(x_edge, m) * inverse_l);
    }
    auto *y_chunks_gmem = reinterpret_cast<uint4 *>(y_gmem + head); // (n_chunks)
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = threadIdx.x + k * kThreads;
        if (i < n_chunks) {
            store_gmem_16(y_chunks_gmem + i, softmax_chunk<kDType>(x_rmem[k], m, inverse_l));
        }
    }
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        const uint4 chunk = __ldg(x_chunks_gmem + i);
        store_gmem_16(y_chunks_gmem + i, softmax_chunk<kDType>(chunk, m, inverse_l));
    }
}

} // namespace s3
