#pragma once
// Step 1 of the adaptive_norm family: the gated sum in registers.
//
// sum = x + gate · change, rounded, and y = LN(sum) · (1 + scale) + shift, where LN is layer norm
// without weights, and gate, scale and shift are vectors of a row's sample.
//
// What changed
//   1. Product, sum, norm, scale and shift are one kernel, and so are a sequence and its context.
//      Without a change the sum is x, and without scale and shift y is the sum.
//   2. Threads keep the chunks of a row in registers, as in an1. Of a row of 128 columns 16 lanes
//      have a chunk each, so that a warp has two rows.
//   3. gate is loaded along with x and change; scale and shift behind the sum, whose registers have
//      become free, and they arrive during the reductions.
//
// Why: in PyTorch these are six launches for each stream, and each reads and writes all rows:
// 26 bytes per element of bf16 beside the vectors. Here it is 8 bytes, or 4 without a change. The
// 16,000 rows of 186 and 64 tokens at batch 64 and width 128 are 4.1 MB per matrix, 16 MB in all.
//   The vectors gate, scale and shift have 256 bytes per sample each, and come from L1 for most
// rows. x and change are read once and do not stay there.
// Expected on an H200 at batch 64: 5 us with a change, a launch's 2 us and the copy of 16 MB, and
// 3.5 us without.
//
// benchmark:begin
// benchmark:end
// Verdict: On an H200 at batch 64 6.2 us with a change and 4.4 us without, where torch.compile
// takes 10.0 and 6.4; at batch 1024 as fast as torch.compile.
//
// Phases: 1 sum, 2 mean, 3 rstd, 4 y.

#include "elements.cuh"
#include "kernels/adaptive_norm/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "predicated.cuh"

namespace ad1 {

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

// A row of one of the two streams. Pointers are to its first element, or null.
struct Row {
    const Element *x, *change, *gate, *scale, *shift;
    Element *y, *sum;
    int width; // 0 behind the last row: all lanes take part in a shuffle
};

// n: the number of the row among those of its stream. Row 186 of sequences of 186 tokens is the
// first of sample 1. Of each pair of arguments the whole thread block takes one, before any
// product.
__device__ __forceinline__ Row row_of(const AdaptiveNormKernelArgs &args, bool is_context, int n) {
    const auto either = [&](auto own, auto context) { return is_context ? context : own; };
    const int length = either(args.length, args.context_length);
    const int sample = n / length, token = n - sample * length;
    const auto vector = [&](const void *gmem, int64_t batch_stride) {
        return gmem == nullptr ? nullptr
                               : static_cast<const Element *>(gmem) + sample * batch_stride;
    };
    const auto matrix = [&](const void *gmem, int64_t batch_stride, int64_t row_stride) {
        return gmem == nullptr ? nullptr : vector(gmem, batch_stride) + token * row_stride;
    };
    return {
        matrix(either(args.x, args.context_x),
               either(args.x_batch_stride, args.context_x_batch_stride),
               either(args.x_row_stride, args.context_x_row_stride)),
        matrix(either(args.change, args.context_change),
               either(args.change_batch_stride, args.context_change_batch_stride),
               either(args.change_row_stride, args.context_change_row_stride)),
        vector(either(args.gate, args.context_gate),
               either(args.gate_batch_stride, args.context_gate_batch_stride)),
        vector(either(args.scale, args.context_scale),
               either(args.scale_batch_stride, args.context_scale_batch_stride)),
        vector(either(args.shift, args.context_shift),
               either(args.shift_batch_stride, args.context_shift_batch_stride)),
        const_cast<Element *>(matrix(either(args.y, args.context_y),
                                     either(args.y_batch_stride, args.context_y_batch_stride),
                                     either(args.y_row_stride, args.context_y_row_stride))),
        const_cast<Element *>(matrix(either(args.sum, args.context_sum),
                                     either(args.sum_batch_stride, args.context_sum_batch_stride),
                                     either(args.sum_row_stride, args.context_sum_row_stride))),
        n < either(args.rows, args.context_rows) ? either(args.width, args.context_width) : 0,
    };
}

// The rounded x + gate · change of a chunk.
template <DType kDType>
__device__ __forceinline__ uint4 add_gated(uint4 x, uint4 gate, uint4 change) {
    constexpr int kChunk = kChunkElements<kDType>;
    float sum_rmem[kChunk], gate_rmem[kChunk], change_rmem[kChunk];
    unpack_chunk<kDType>(sum_rmem, x);
    unpack_chunk<kDType>(gate_rmem, gate);
    unpack_chunk<kDType>(change_rmem, change);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        sum_rmem[j] = fmaf(gate_rmem[j], change_rmem[j], sum_rmem[j]);
    }
    return pack_chunk<kDType>(sum_rmem);
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    adaptive_norm_kernel(const __grid_constant__ AdaptiveNormKernelArgs args) {
    constexpr AdaptiveNormKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.chunks >= 1 && cfg.chunks <= 8 &&
                      cfg.chunks * 12 + 48 <= 65536 / cfg.n_threads(),
                  "a chunk is 12 registers of x, change and gate, or of the sum, scale and shift, "
                  "the rest of the kernel up to 48, and an SM has 65536");
    static_assert(cfg.row_threads >= 8 && cfg.row_threads <= cfg.n_threads() &&
                      (cfg.row_threads & (cfg.row_threads - 1)) == 0,
                  "the tree over the threads of a row is one over the lanes of a warp");

    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.threads_per_row(), kChunks = cfg.chunks;
    constexpr int kChunk = kChunkElements<kDType>, kRows = cfg.n_threads() / kThreads;

    extern __shared__ float smem[]; // (2, warps): sums of squares, then of elements

    const bool is_context = int(blockIdx.x) >= args.blocks;
    const int block = blockIdx.x - (is_context ? args.blocks : 0);
    const Row row = row_of(args, is_context, block * kRows + int(threadIdx.x) / kThreads);
    const int thread = threadIdx.x % kThreads; // of those that have the row
    const auto first_of = [&](int k) { return (thread + k * kThreads) * kChunk; };
    const uint4 zeros = make_uint4(0, 0, 0, 0); // NVRTC loads those of uint4{} from memory

    // 1. sum = x + gate · change; zeros behind the end of the row
    uint4 sum_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        sum_rmem[k] = load_gmem_16_once_if(first_of(k) < row.width, row.x + first_of(k), zeros);
    }
    if (row.change != nullptr) {
        uint4 change_rmem[kChunks], gate_rmem[kChunks];
#pragma unroll
        for (int k = 0; k < kChunks; ++k) { // all loads before the first product
            const bool exists = first_of(k) < row.width;
            change_rmem[k] = load_gmem_16_once_if(exists, row.change + first_of(k), zeros);
            gate_rmem[k] = load_gmem_16_if(exists, row.gate + first_of(k), zeros);
        }
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            sum_rmem[k] = add_gated<kDType>(sum_rmem[k], gate_rmem[k], change_rmem[k]);
        }
    }
    Element *sum_gmem = row.scale == nullptr && row.sum == nullptr ? row.y : row.sum;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        store_gmem_16_if(sum_gmem != nullptr && first_of(k) < row.width, sum_gmem + first_of(k),
                         sum_rmem[k]);
    }
    if (row.scale == nullptr) {
        // y is the sum, stored above unless a call asks for both
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            store_gmem_16_if(row.sum != nullptr && first_of(k) < row.width, row.y + first_of(k),
                             sum_rmem[k]);
        }
        return;
    }
    uint4 scale_rmem[kChunks], shift_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const bool exists = first_of(k) < row.width;
        scale_rmem[k] = load_gmem_16_if(exists, row.scale + first_of(k), zeros);
        shift_rmem[k] = load_gmem_16_if(exists, row.shift + first_of(k), zeros);
    }

    // 2. mean = Σ sum / width
    const float width = is_context ? args.context_width : args.width;
    float mean = 0.0f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        float elements_rmem[kChunk];
        unpack_chunk<kDType>(elements_rmem, sum_rmem[k]);
#pragma unroll
        for (const float element : elements_rmem) {
            mean += element; // nothing, where there is no chunk
        }
    }
    mean = row_sum<kThreads>(mean, smem + cfg.n_warps) / width;

    // 3. rstd = 1 / sqrt(Σ (sum - mean)² / width + eps)
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        float elements_rmem[kChunk];
        unpack_chunk<kDType>(elements_rmem, sum_rmem[k]);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            const float rest = first_of(k) < row.width ? elements_rmem[j] - mean : 0.0f;
            squares = fmaf(rest, rest, squares); // (0 - mean)² does not count
        }
    }
    const float rstd = rsqrtf(row_sum<kThreads>(squares, smem) / width + args.eps);

    // 4. y = (sum - mean) · rstd · (1 + scale) + shift
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        float y_rmem[kChunk], scale_elements[kChunk], shift_elements[kChunk];
        unpack_chunk<kDType>(y_rmem, sum_rmem[k]);
        unpack_chunk<kDType>(scale_elements, scale_rmem[k]);
        unpack_chunk<kDType>(shift_elements, shift_rmem[k]);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            y_rmem[j] =
                fmaf((y_rmem[j] - mean) * rstd, 1.0f + scale_elements[j], shift_elements[j]);
        }
        store_gmem_16_if(first_of(k) < row.width, row.y + first_of(k), pack_chunk<kDType>(y_rmem));
    }
}

} // namespace ad1
