#pragma once
// Step 4 of the diagonal family: B as one range of chunks. Parent: k3.
//
// What changed
//   1. The chunks of 16 bytes of all rows are one range. A block has n_threads · `chunks` of them
//      in a line, of as many rows as that is. Neighbouring lanes have neighbouring chunks, also
//      where one row ends and the next begins.
//   2. A chunk's row is its number times the inverse of a row's chunks, which each thread computes
//      once: a high product and a comparison instead of a division.
//   3. A lane reads the element of a for each of its chunks. Lanes of one row read the same one.
//   4. This takes rows that begin at multiples of 16 bytes and have whole chunks. Other rows are
//      taken in pieces by warps, as in k3, in a loop.
//
// Why: a row of 64 elements has 8 chunks in bf16, and k3 gives it a warp with 128 places. 24 of 32
// lanes wait, and the 64 warps of an SM have 8 KB in flight, where an H200 needs about 16 KB of B
// per SM and microsecond. A lane of k4 has 4 chunks at any width.
//   k3 divides to find a row number for 8 chunks, in each of 2^21 warps. k4 has 2^17 warps.
// Expected, as a share of a copy: 95% at every width from 64 on.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of a[:, None] *
// B in the harmonic mean over widths. 8 warps: 4,086, 2.43. Cost: 56 registers per thread, 0 bytes
// of shared memory per block, 4 blocks per SM.
// benchmark:end
// Verdict: on an H200 97% of a copy's speed at widths of 64 and 256, where k3 has 34% and 88%, and
// a point more than k3 at 1024 and 65536.
//
// Phases: 1 rows, 2 B and a to registers, 3 C = a · B.

#include "elements.cuh"
#include "kernels/diagonal/arguments.cuh"
#include "memory.cuh"

namespace k4 {

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

// Whether all rows begin at multiples of 16 bytes and have whole chunks.
template <DType kDType>
__device__ __forceinline__ bool has_whole_chunks(const DiagonalKernelArgs &args) {
    const auto address = [](const void *gmem) { return reinterpret_cast<uintptr_t>(gmem); };
    return (address(args.b) | address(args.c)) % kChunkBytes == 0 &&
           (args.b_stride | args.c_stride | args.width) % kChunkElements<kDType> == 0;
}

// C of the block's chunks, of rows of whole chunks.
template <DiagonalKernelConfig cfg>
__device__ __forceinline__ void scale_chunks(const DiagonalKernelArgs &args) {
    constexpr DType kDType = cfg.dtype;
    constexpr int kChunk = kChunkElements<kDType>, kChunks = cfg.chunks;
    constexpr int kThreads = cfg.n_threads();

    const auto *a_gmem = static_cast<const ElementOf<kDType> *>(args.a);
    const auto *b_gmem = static_cast<const ElementOf<kDType> *>(args.b);
    auto *c_gmem = static_cast<ElementOf<kDType> *>(args.c);
    const unsigned row_chunks = args.pieces, inverse = 0xffffffff / row_chunks;
    const unsigned first = blockIdx.x * (kThreads * kChunks) + threadIdx.x; // below 2^32

    // 1. Rows: chunk 13 of rows of 8 chunks has row 1 and column 5. The product may be one row
    // short, since `inverse` is rounded down.
    int64_t row[kChunks];
    int64_t column[kChunks]; // element of the row
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const unsigned n = first + k * kThreads;
        const unsigned low = __umulhi(n, inverse), rest = n - low * row_chunks;
        const bool is_short = rest >= row_chunks;
        row[k] = low + is_short;
        column[k] = (rest - (is_short ? row_chunks : 0)) * kChunk;
    }

    // 2. B and a to registers
    uint4 b_rmem[kChunks];
    ElementOf<kDType> a_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        if (row[k] < args.rows) {
            const auto *chunk = b_gmem + row[k] * args.b_stride + column[k];
            b_rmem[k] = __ldg(reinterpret_cast<const uint4 *>(chunk));
            a_rmem[k] = __ldg(a_gmem + row[k] * args.a_stride);
        }
    }

    // 3. C = a · B
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        if (row[k] < args.rows) {
            store_gmem_16(c_gmem + row[k] * args.c_stride + column[k],
                          scaled_chunk<kDType>(to_float<kDType>(a_rmem[k]), b_rmem[k]));
        }
    }
}

// C of a warp's piece of a row of any length, which may begin at any element, as in k3.
template <DiagonalKernelConfig cfg>
__device__ __forceinline__ void scale_piece(const DiagonalKernelArgs &args, int64_t row,
                                            int piece) {
    constexpr DType kDType = cfg.dtype;
    constexpr int kChunk = kChunkElements<kDType>, kChunks = cfg.chunks;

    const int lane = threadIdx.x % 32;
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

    uint4 b_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = first + k * 32 + lane;
        if (i < n_chunks) {
            b_rmem[k] = __ldg(reinterpret_cast<const uint4 *>(b_gmem) + i);
        }
    }

#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = first + k * 32 + lane;
        if (i < n_chunks) {
            store_gmem_16(reinterpret_cast<uint4 *>(c_gmem) + i,
                          scaled_chunk<kDType>(a, b_rmem[k]));
        }
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    diagonal_kernel(const __grid_constant__ DiagonalKernelArgs args) {
    constexpr DiagonalKernelConfig cfg = Kernels::value;
    static_assert(cfg.chunks >= 1 && cfg.chunks <= 16, "a chunk is 4 registers");
    if (has_whole_chunks<cfg.dtype>(args)) {
        scale_chunks<cfg>(args);
        return;
    }
    // Warp 7 of rows of 3 pieces has piece 1 of row 2; there may be fewer warps than pieces.
    const unsigned pieces = (args.pieces + 32 * cfg.chunks - 1) / (32 * cfg.chunks); // of a row
    const int64_t warps = int64_t(gridDim.x) * cfg.n_warps;
    int64_t warp = int64_t(blockIdx.x) * cfg.n_warps + threadIdx.x / 32;
    for (; warp < int64_t(args.rows) * pieces; warp += warps) {
        const unsigned row = unsigned(warp) / pieces; // below 2^31
        scale_piece<cfg>(args, row, int(unsigned(warp) - row * pieces));
    }
}

} // namespace k4
