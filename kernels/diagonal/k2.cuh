#pragma once
// Step 2 of the diagonal family: 16 bytes per lane. Parent: k1.
//
// What changed
//   1. A thread loads and stores a chunk of 16 bytes, 8 elements of 16 bits or 4 of fp32.
//   2. A row need not begin at a multiple of 16 bytes. The elements before the first boundary and
//      behind the last chunk are taken one by one, each by a thread of the row's first block.
//   3. Where the rows of B and C begin at different offsets from such a boundary, no chunk of B is
//      a chunk of C. Such a piece is taken one element after the other, as in k1.
//
// Why: the loads of 2048 threads have 32 KB in flight instead of 4, where 3.35 TB/s of an H100 need
// 8.2 KB per SM. The row's number, the addresses and the branches are paid once for 8 elements.
//   A row of 64 elements has 8 chunks. 248 of 256 threads have none, and the 8 blocks of an SM have
// 1 KB in flight, as in k1.
// Expected, of 3.35 TB/s at 4 bytes per element: 85% from a width of 4096 on; at 64 still 10%. In
// fp32 85%, too.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of a[:, None] *
// B in the harmonic mean over widths. 8 warps: 3,738, 0.63. Cost: 32 registers per thread, 0 bytes
// of shared memory per block, 8 blocks per SM.
// benchmark:end
// Verdict: 88 to 91% of a copy's speed from a width of 4096 on, on an H200; 6% at 64.
//
// Phases: 1 the row, 2 C = a · B.

#include "elements.cuh"
#include "kernels/diagonal/arguments.cuh"
#include "memory.cuh"

namespace k2 {

template <DType kDType>
__device__ __forceinline__ ElementOf<kDType> scaled(float a, ElementOf<kDType> b) {
    return from_float<kDType>(a * to_float<kDType>(b));
}

// a · B for a chunk of B.
template <DType kDType>
__device__ __forceinline__ uint4 scaled_chunk(float a, uint4 chunk) {
    float b_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(b_rmem, chunk);
#pragma unroll
    for (float &b : b_rmem) {
        b *= a;
    }
    return pack_chunk<kDType>(b_rmem);
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    diagonal_kernel(const __grid_constant__ DiagonalKernelArgs args) {
    constexpr DiagonalKernelConfig cfg = Kernels::value;
    static_assert(cfg.chunks == 0, "a lane has several chunks from k3 on");

    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.n_threads(), kChunk = kChunkElements<kDType>;

    // 1. The row: block 7 of rows of 3 pieces has piece 1 of row 2
    const int64_t row = blockIdx.x / unsigned(args.pieces);
    const int piece = int(blockIdx.x % unsigned(args.pieces));
    const auto *a_gmem = static_cast<const ElementOf<kDType> *>(args.a) + row * args.a_stride;
    const auto *b_gmem = static_cast<const ElementOf<kDType> *>(args.b) + row * args.b_stride;
    auto *c_gmem = static_cast<ElementOf<kDType> *>(args.c) + row * args.c_stride;
    const float a = to_float<kDType>(__ldg(a_gmem));

    // A row of B is a head, chunks that begin at multiples of 16 bytes, and a tail. Head and tail
    // have less than a chunk each, together at most 14 elements, so no thread has more than one.
    const int head = min(elements_to_boundary(b_gmem), args.width);
    const int n_chunks = (args.width - head) / kChunk;
    if (piece == 0 && int(threadIdx.x) < args.width - n_chunks * kChunk) {
        const int edge = threadIdx.x + (int(threadIdx.x) < head ? 0 : n_chunks * kChunk);
        c_gmem[edge] = scaled<kDType>(a, __ldg(b_gmem + edge));
    }

    // 2. C = a · B
    const int first = piece * kThreads; // chunk of the piece
    b_gmem += head;
    c_gmem += head;
    if (elements_to_boundary(b_gmem) != elements_to_boundary(c_gmem)) {
        // Threads that stored a chunk element by element would touch each sector of C up to 8
        // times. Here neighbouring threads store neighbouring elements.
        for (int k = 0; k < kChunk; ++k) {
            const int64_t i = int64_t(first) * kChunk + k * kThreads + threadIdx.x;
            if (i < int64_t(n_chunks) * kChunk) {
                c_gmem[i] = scaled<kDType>(a, __ldg(b_gmem + i));
            }
        }
        return;
    }
    const int i = first + threadIdx.x;
    if (i < n_chunks) {
        const uint4 chunk = __ldg(reinterpret_cast<const uint4 *>(b_gmem) + i);
        store_gmem_16(reinterpret_cast<uint4 *>(c_gmem) + i, scaled_chunk<kDType>(a, chunk));
    }
}

} // namespace k2
