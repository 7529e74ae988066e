#pragma once
// Step 1 of the diagonal_backward family: the base. Both gradients in one read.
//
// C = diag(a) @ B is C[i, j] = a[i] · B[i, j]. With the gradient dC of C, the gradients are
//   da[i] = Σ_j dC[i, j] · B[i, j]      dB[i, j] = a[i] · dC[i, j]
//
// The parts
//   1. A row has `row_threads` threads, from 8 to those of the block, and a block has several rows.
//      A thread takes chunks of 16 bytes, `chunks` of B and as many of dC at once.
//   2. dB is stored while da is added up, so that dC is read once for both. Nothing of a row is
//   kept.
//   3. A tree over the threads of a row adds up da, in one order: every call gives the same bits.
//   4. Where rows of B, dC and dB begin at different offsets from a multiple of 16 bytes, they are
//      taken one element after the other. Without dB its rows count as those of dC.
//
// Why: PyTorch's operators in fp32 convert B and dC, multiply and add up, and another kernel reads
// dC again for dB. In bf16 they move 32 bytes per element, where B, dC and dB have 6.
//   At 64 registers per thread an SM has 32 warps. With 4 chunks of B and 4 of dC per lane it has
// 128 KB in flight, where 3.35 TB/s of an H100 need 8.2 KB at a latency of 650 ns.
// Expected: 90% of a copy of as many bytes from a width of 256 on, 60% at 64, where 8 of 32 lanes
// have a chunk.
//
// benchmark:begin
// benchmark:end
// Verdict: not measured yet.
//
// Phases: 1 the row, 2 da and dB, 3 da to memory.

#include "elements.cuh"
#include "kernels/diagonal_backward/arguments.cuh"
#include "memory.cuh"

namespace i1 {

// Adds up the values of the threads of a row and returns the sum to each: by a tree over the lanes
// of each warp, then by one over the warps of the row. smem (warps of the block) is for rows of
// several warps. All threads of the block must call it.
template <int kRowThreads>
__device__ __forceinline__ float row_reduce(float value, float *smem) {
#pragma unroll
    for (int lanes = 1; lanes < 32 && lanes < kRowThreads; lanes *= 2) {
        value += __shfl_xor_sync(0xffffffff, value, lanes);
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
            value += __shfl_xor_sync(0xffffffff, value, lanes);
        }
    }
    return value;
}

// Returns `sum` + Σ dC · B over a chunk of each.
template <DType kDType>
__device__ __forceinline__ float add_chunk(float sum, uint4 b_chunk, uint4 dc_chunk) {
    float b_rmem[kChunkElements<kDType>], dc_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(b_rmem, b_chunk);
    unpack_chunk<kDType>(dc_rmem, dc_chunk);
#pragma unroll
    for (int i = 0; i < kChunkElements<kDType>; ++i) {
        sum = fmaf(b_rmem[i], dc_rmem[i], sum);
    }
    return sum;
}

// a · dC for a chunk of dC.
template <DType kDType>
__device__ __forceinline__ uint4 scaled_chunk(float a, uint4 chunk) {
    float dc_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(dc_rmem, chunk);
#pragma unroll
    for (float &dc : dc_rmem) {
        dc *= a;
    }
    return pack_chunk<kDType>(dc_rmem);
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    diagonal_backward_kernel(const __grid_constant__ DiagonalBackwardKernelArgs args) {
    constexpr DiagonalBackwardKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.row_threads >= 8 && (cfg.row_threads & (cfg.row_threads - 1)) == 0 &&
                      cfg.row_threads <= cfg.n_threads(),
                  "the tree over the threads of a row is one over lanes, then one over warps");

    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.row_threads, kChunks = cfg.chunks;
    constexpr int kChunk = kChunkElements<kDType>;

    extern __shared__ float smem[]; // (warps of the block)

    // 1. The row. The last block may have rows too many, of width 0 here.
    const int thread = threadIdx.x % kThreads; // of the row
    const int64_t row = int64_t(blockIdx.x) * cfg.block_rows() + threadIdx.x / kThreads;
    const bool is_row = row < args.rows;
    const int width = is_row ? args.width : 0;
    const auto *a_gmem = static_cast<const ElementOf<kDType> *>(args.a);
    const auto *b_gmem = static_cast<const ElementOf<kDType> *>(args.b) + row * args.b_stride;
    const auto *dc_gmem = static_cast<const ElementOf<kDType> *>(args.dc) + row * args.dc_stride;
    auto *db_gmem = static_cast<ElementOf<kDType> *>(args.db) + row * args.db_stride;
    const bool has_db = args.db != nullptr;
    const float a = is_row ? to_float<kDType>(__ldg(a_gmem + row)) : 0.0f;

    // A row is a head, chunks that begin at multiples of 16 bytes, and a tail. Where the rows begin
    // at different offsets, no chunk of one is a chunk of the others, and all of the row is head.
    const int offset = elements_to_boundary(dc_gmem);
    const bool has_chunks = elements_to_boundary(b_gmem) == offset &&
                            (!has_db || elements_to_boundary(db_gmem) == offset);
    const int head = has_chunks ? min(offset, width) : width;
    const int n_chunks = (width - head) / kChunk;
    const auto *b_chunks_gmem = reinterpret_cast<const uint4 *>(b_gmem + head); // (n_chunks)
    const auto *dc_chunks_gmem = reinterpret_cast<const uint4 *>(dc_gmem + head); // (n_chunks)
    auto *db_chunks_gmem = reinterpret_cast<uint4 *>(db_gmem + head); // (n_chunks)

    // 2. da = Σ dC · B, dB = a · dC
    float sum = 0.0f;
    for (int first = thread; first < n_chunks; first += kChunks * kThreads) {
        uint4 b_rmem[kChunks], dc_rmem[kChunks]; // 0 behind the last chunk
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const int i = first + k * kThreads;
            b_rmem[k] = i < n_chunks ? __ldg(b_chunks_gmem + i) : uint4{};
            dc_rmem[k] = i < n_chunks ? __ldg(dc_chunks_gmem + i) : uint4{};
        }
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const int i = first + k * kThreads;
            sum = add_chunk<kDType>(sum, b_rmem[k], dc_rmem[k]);
            if (has_db && i < n_chunks) {
                store_gmem_16(db_chunks_gmem + i, scaled_chunk<kDType>(a, dc_rmem[k]));
            }
        }
    }
    for (int edge = thread; edge < width - n_chunks * kChunk; edge += kThreads) {
        const int i = edge + (edge < head ? 0 : n_chunks * kChunk);
        const float dc = to_float<kDType>(__ldg(dc_gmem + i));
        sum = fmaf(to_float<kDType>(__ldg(b_gmem + i)), dc, sum);
        if (has_db) {
            db_gmem[i] = from_float<kDType>(a * dc);
        }
    }
    sum = row_reduce<kThreads>(sum, smem);

    // 3. da: registers → global
    if (is_row && thread == 0) {
        static_cast<ElementOf<kDType> *>(args.da)[row] = from_float<kDType>(sum);
    }
}

} // namespace i1
