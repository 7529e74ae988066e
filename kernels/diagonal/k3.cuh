#pragma once
// Step 3 of the diagonal family: a warp per piece of a row. Parent: k2.
//
// What changed
//   1. A warp takes a piece of a row by itself: `chunks` chunks per lane. A thread block has a
//      piece for each of its warps, of one row or of several.
//   2. A lane loads all of its chunks before it multiplies the first.
//
// Why: k2 gives the 256 threads of a block to a row of 64 elements, which has 8 chunks. Here the
// row gets 32 threads. The 64 warps of an SM have 8 KB in flight instead of 1, where 3.35 TB/s of
// an H100 need 8.2 KB.
//   A row of 4096 elements in bf16 takes 4 warps with 4 chunks per lane. The row's number and the
// addresses are paid once for 4 chunks, and a quarter as many blocks are launched.
// Expected, of 3.35 TB/s at 4 bytes per element: 60% at a width of 64, six times k2; 90% from 1024
// on, 5 points more than k2.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of a[:, None] *
// B in the harmonic mean over widths. 8 warps: 4,074, 1.84. Cost: 32 registers per thread, 0 bytes
// of shared memory per block, 8 blocks per SM.
// benchmark:end
// Verdict: 96% of a copy's speed from a width of 1024 on, on an H200, 88% at 256 and 34% at 64.
//
// Phases: 1 the row, 2 B to registers, 3 C = a · B.

#include "elements.cuh"
#include "kernels/diagonal/arguments.cuh"
#include "memory.cuh"

namespace k3 {

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
    static_assert(cfg.chunks >= 1 && cfg.chunks <= 16, "a chunk is 4 registers");

    constexpr DType kDType = cfg.dtype;
    constexpr int kChunk = kChunkElements<kDType>, kChunks = cfg.chunks;

    // 1. The row: warp 7 of rows of 3 pieces has piece 1 of row 2
    const int lane = threadIdx.x % 32;
    const unsigned warp = blockIdx.x * cfg.n_warps + threadIdx.x / 32; // at most 2^31 + 30
    const int64_t row = warp / unsigned(args.pieces);
    const int piece = int(warp % unsigned(args.pieces));
    if (row >= args.rows) {
        return;
    }
    const auto *a_gmem = static_cast<const ElementOf<kDType> *>(args.a) + row * args.a_stride;
    const auto *b_gmem = static_cast<const ElementOf<kDType> *>(args.b) + row * args.b_stride;
    auto *c_gmem = static_cast<ElementOf<kDType> *>(args.c) + row * args.c_stride;
    const float a = to_float<kDType>(__ldg(a_gmem));

    // A row of B is a head, chunks that begin at multiples of 16 bytes, and a tail. Head and tail
    // have less than a chunk each, together at most 14 elements, so no lane has more than one.
    const int head = min(elements_to_boundary(b_gmem), args.width);
    const int n_chunks = (args.width - head) / kChunk;
    if (piece == 0 && lane < args.width - n_chunks * kChunk) {
        const int edge = lane + (lane < head ? 0 : n_chunks * kChunk);
        c_gmem[edge] = scaled<kDType>(a, __ldg(b_gmem + edge));
    }

    const int first = piece * 32 * kChunks; // chunk of the piece
    b_gmem += head;
    c_gmem += head;
    if (elements_to_boundary(b_gmem) != elements_to_boundary(c_gmem)) {
        // Lanes that stored a chunk element by element would touch each sector of C up to 8 times.
        // Here neighbouring lanes store neighbouring elements.
        for (int k = 0; k < kChunk * kChunks; ++k) {
            const int64_t i = int64_t(first) * kChunk + k * 32 + lane;
            if (i < int64_t(n_chunks) * kChunk) {
                c_gmem[i] = scaled<kDType>(a, __ldg(b_gmem + i));
            }
        }
        return;
    }

    // 2. B to registers
    uint4 b_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = first + k * 32 + lane;
        if (i < n_chunks) {
            b_rmem[k] = __ldg(reinterpret_cast<const uint4 *>(b_gmem) + i);
        }
    }

    // 3. C = a · B
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = first + k * 32 + lane;
        if (i < n_chunks) {
            store_gmem_16(reinterpret_cast<uint4 *>(c_gmem) + i,
                          scaled_chunk<kDType>(a, b_rmem[k]));
        }
    }
}

} // namespace k3
