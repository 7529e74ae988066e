#pragma once
// Step 1 of the add_norm family: the sum in registers.
//
// sum = x + residual, rounded, and its layer norm y, or RMS norm with `rms`.
//
// What changed
//   1. An addition and n4 are one kernel. A thread adds its chunks in fp32, and rounds the sums to
//      the dtype. It stores these, and keeps them in registers for the norm.
//   2. Rows that begin at multiples of 16 bytes in all four matrices, and have whole chunks, are
//      loaded and stored with predicates, as in n6. Rows at other elements are taken one element
//      after the other.
//   3. Of a row that is longer than the registers, each phase adds the rest again.
//
// Why: an addition by itself reads two elements and writes one, and a norm reads it again: 10 bytes
// per element of bf16, in two launches. Here it is 8 bytes in one launch. The norm is that of the
// rounded sum, which the backward pass reads.
//   4 chunks of each matrix are 128 bytes per thread in flight, 112 KB per SM with 7 blocks of 128
// threads. An H200 needs about 16 KB of x and residual per SM and microsecond.
// Expected, as a share of a copy of as many bytes: 90% at widths of 1024 to 4096, and 1.2 times the
// speed of an addition and a norm.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 93 to 100% of a copy's speed at widths of 64 to 8192, 91% at 16384; from
// 32768 on, where rows are read again, 53, 44 and 32%.
//
// Phases: 1 sum, 2 mean, 3 rstd, 4 y.

#include "elements.cuh"
#include "kernels/add_norm/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "predicated.cuh"

namespace an1 {

// Adds the values of the kThreads threads of a row and returns the sum to each: by a tree over the
// lanes of each warp, then by one over the row's warps, if it has several. Each call needs its own
// smem (warps of the block).
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

// Returns `total` with the elements of a chunk added to it.
template <DType kDType>
__device__ __forceinline__ float add_chunk(float total, uint4 chunk) {
    float sum_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(sum_rmem, chunk);
#pragma unroll
    for (const float sum : sum_rmem) {
        total += sum;
    }
    return total;
}

// Returns `squares` with (sum - mean)² of the first `count` elements of a chunk added to it.
template <DType kDType>
__device__ __forceinline__ float add_squares(float squares, uint4 chunk, float mean, int count) {
    float sum_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(sum_rmem, chunk);
#pragma unroll
    for (int j = 0; j < kChunkElements<kDType>; ++j) {
        const float rest = j < count ? sum_rmem[j] - mean : 0.0f; // (0 - mean)² does not count
        squares = fmaf(rest, rest, squares);
    }
    return squares;
}

// Whether all rows of a matrix begin at multiples of 16 bytes; a vector has stride 0.
__device__ __forceinline__ bool is_aligned(const void *gmem, int64_t stride_bytes) {
    return (reinterpret_cast<uintptr_t>(gmem) | stride_bytes) % kChunkBytes == 0;
}

// The elements of a row from `first` on, in fp32; `otherwise` where the row or the vector has none.
// aligned: chunks begin at multiples of 16 bytes, and none ends behind its row.
template <DType kDType>
__device__ __forceinline__ void load_chunk(float (&rmem)[kChunkElements<kDType>],
                                           const ElementOf<kDType> *gmem, int first, int width,
                                           bool aligned, float otherwise) {
    if (aligned && gmem != nullptr && first < width) {
        unpack_chunk<kDType>(rmem, __ldg(reinterpret_cast<const uint4 *>(gmem + first)));
        return;
    }
#pragma unroll
    for (int j = 0; j < kChunkElements<kDType>; ++j) {
        const bool exists = gmem != nullptr && first + j < width;
        rmem[j] = exists ? to_float<kDType>(__ldg(gmem + first + j)) : otherwise;
    }
}

// Stores the elements of a chunk that the row has.
template <DType kDType>
__device__ __forceinline__ void store_chunk(ElementOf<kDType> *row_gmem,
                                            const float (&rmem)[kChunkElements<kDType>], int first,
                                            int width, bool aligned) {
    if (aligned) {
        store_gmem_16_if(first < width, row_gmem + first, pack_chunk<kDType>(rmem));
        return;
    }
#pragma unroll
    for (int j = 0; j < kChunkElements<kDType>; ++j) {
        if (first + j < width) {
            row_gmem[first + j] = from_float<kDType>(rmem[j]);
        }
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    add_norm_kernel(const __grid_constant__ AddNormKernelArgs args) {
    constexpr AddNormKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.chunks >= 1 && cfg.chunks <= 8 &&
                      cfg.chunks * 12 + 48 <= 65536 / cfg.n_threads(),
                  "a chunk is 8 registers of x and residual and 4 of addresses, the rest of the "
                  "kernel up to 48, and an SM has 65536");
    static_assert(cfg.row_threads >= 8 && cfg.row_threads <= cfg.n_threads() &&
                      (cfg.row_threads & (cfg.row_threads - 1)) == 0,
                  "the tree over the threads of a row is one over the lanes of a warp");

    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.threads_per_row(), kChunks = cfg.chunks;
    constexpr int kChunk = kChunkElements<kDType>;
    constexpr int kBytes = int(sizeof(ElementOf<kDType>));

    extern __shared__ float smem[]; // (1 or 2, warps): sums of squares, then of elements

    const int64_t row = int64_t(blockIdx.x) * (cfg.n_threads() / kThreads) + threadIdx.x / kThreads;
    const int thread = threadIdx.x % kThreads; // of those that have the row
    const int width = row < args.rows ? args.width : 0; // all lanes take part in a shuffle
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride;
    const auto *residual_gmem =
        static_cast<const ElementOf<kDType> *>(args.residual) + row * args.residual_stride;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + row * args.y_stride;
    auto *sum_gmem = static_cast<ElementOf<kDType> *>(args.sum) + row * args.sum_stride;
    const auto *weight_gmem = static_cast<const ElementOf<kDType> *>(args.weight); // (width)
    const auto *bias_gmem = static_cast<const ElementOf<kDType> *>(args.bias); // (width)
    const bool aligned = is_aligned(args.x, args.x_stride * kBytes) &&
                         is_aligned(args.residual, args.residual_stride * kBytes) &&
                         is_aligned(args.y, args.y_stride * kBytes) &&
                         is_aligned(args.sum, args.sum_stride * kBytes) &&
                         is_aligned(args.weight, 0) && is_aligned(args.bias, 0) &&
                         args.width % kChunk == 0;

    // The rounded sum of a chunk, zeros behind the end of the row.
    const auto sum_of = [&](int first) {
        float x_rmem[kChunk], residual_rmem[kChunk];
        load_chunk<kDType>(x_rmem, x_gmem, first, width, aligned, 0.0f);
        load_chunk<kDType>(residual_rmem, residual_gmem, first, width, aligned, 0.0f);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            x_rmem[j] += residual_rmem[j];
        }
        return pack_chunk<kDType>(x_rmem);
    };
    const auto store_sum = [&](uint4 chunk, int first) {
        float sum_rmem[kChunk];
        unpack_chunk<kDType>(sum_rmem, chunk);
        store_chunk<kDType>(sum_gmem, sum_rmem, first, width, aligned);
    };
    const auto first_of = [&](int k) { return (thread + k * kThreads) * kChunk; };

    // 1. sum = x + residual
    uint4 sum_rmem[kChunks];
    if (aligned) {
        const uint4 zeros = make_uint4(0, 0, 0, 0); // NVRTC loads those of uint4{} from memory
        uint4 residual_rmem[kChunks];
#pragma unroll
        for (int k = 0; k < kChunks; ++k) { // all loads before the first addition
            const bool exists = first_of(k) < width;
            sum_rmem[k] = load_gmem_16_if(exists, x_gmem + first_of(k), zeros);
            residual_rmem[k] = load_gmem_16_if(exists, residual_gmem + first_of(k), zeros);
        }
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            float x_elements[kChunk], residual_elements[kChunk];
            unpack_chunk<kDType>(x_elements, sum_rmem[k]);
            unpack_chunk<kDType>(residual_elements, residual_rmem[k]);
#pragma unroll
            for (int j = 0; j < kChunk; ++j) {
                x_elements[j] += residual_elements[j];
            }
            sum_rmem[k] = pack_chunk<kDType>(x_elements);
            store_gmem_16_if(first_of(k) < width, sum_gmem + first_of(k), sum_rmem[k]);
        }
    } else {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            sum_rmem[k] = sum_of(first_of(k));
            store_sum(sum_rmem[k], first_of(k));
        }
    }
    for (int first = first_of(kChunks); first < width; first += kThreads * kChunk) {
        store_sum(sum_of(first), first);
    }

    // 2. mean = Σ sum / width
    float mean = 0.0f;
    if constexpr (!cfg.rms) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            mean = add_chunk<kDType>(mean, sum_rmem[k]); // nothing, where there is no chunk
        }
        for (int first = first_of(kChunks); first < width; first += kThreads * kChunk) {
            mean = add_chunk<kDType>(mean, sum_of(first));
        }
        mean = row_sum<kThreads>(mean, smem + cfg.n_warps) / args.width;
    }

    // 3. rstd = 1 / sqrt(Σ (sum - mean)² / width + eps)
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        squares = add_squares<kDType>(squares, sum_rmem[k], mean, width - first_of(k));
    }
    for (int first = first_of(kChunks); first < width; first += kThreads * kChunk) {
        squares = add_squares<kDType>(squares, sum_of(first), mean, width - first);
    }
    const float rstd = rsqrtf(row_sum<kThreads>(squares, smem) / args.width + args.eps);

    // 4. y = (sum - mean) · rstd · weight + bias
    if (row >= args.rows) {
        return;
    }
    if (thread == 0 && args.mean != nullptr) {
        args.mean[row] = mean;
    }
    if (thread == 0 && args.rstd != nullptr) {
        args.rstd[row] = rstd;
    }
    const auto store_y = [&](uint4 chunk, int first) {
        if (first >= width) {
            return;
        }
        float y_rmem[kChunk], weight_rmem[kChunk], bias_rmem[kChunk];
        unpack_chunk<kDType>(y_rmem, chunk);
        load_chunk<kDType>(weight_rmem, weight_gmem, first, width, aligned, 1.0f);
        load_chunk<kDType>(bias_rmem, bias_gmem, first, width, aligned, 0.0f);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            y_rmem[j] = fmaf((y_rmem[j] - mean) * rstd, weight_rmem[j], bias_rmem[j]);
        }
        store_chunk<kDType>(y_gmem, y_rmem, first, width, aligned);
    };
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        store_y(sum_rmem[k], first_of(k));
    }
    for (int first = first_of(kChunks); first < width; first += kThreads * kChunk) {
        store_y(sum_of(first), first);
    }
}

} // namespace an1
