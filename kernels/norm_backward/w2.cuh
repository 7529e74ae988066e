#pragma once
// Step 2 of the norm_backward_staged family: dx leaves L2, as y of a7 does. Parent: w1.
//
// What changed
//   1. Where rows have whole chunks, dx is stored by st.global.cs, which lets L2 drop its lines
//      before others (streaming).
//
// Why: a third of the bytes are dx, which no block reads. In L2 its lines take the place of x and
// dy on their way. In a probe on an H200 such stores of y took layer norm from 92% of a copy's
// speed to 96% at 32768, and from 91% to 96 or 97% at 16384 and 8192. A norm stores half of its
// bytes, and its backward pass a third.
// Expected, as a share of a copy: 1 to 2% more than w1.
//
// benchmark:begin
// benchmark:end
// Verdict: On an H200 97 to 98% of a copy's speed at 4096 and 8192, up to 1 point more than w1.
//
// Phases: rows_kernel 1 copies, 2 sums, 3 dx and sums of columns, 4 partial; combine_kernel 5
// dweight and dbias.

#include "cp_async.cuh"
#include "elements.cuh"
#include "kernels/norm_backward/chunks.cuh"
#include "kernels/norm_backward/staged.cuh"
#include "memory.cuh"

namespace w2 {

// Adds the values of the kThreads threads of a row and returns the sums to each: by a tree over the
// lanes of each warp, then by one over the row's warps, if it has several. smem: (warps of the
// block).
template <int kThreads, int kSums>
__device__ __forceinline__ float2 row_sums(float2 value, float2 *smem) {
    value = lane_sums<(kThreads < 32 ? kThreads : 32), kSums>(value);
    if constexpr (kThreads > 32) {
        constexpr int kWarps = kThreads / 32; // of a row
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) {
            smem[warp] = value;
        }
        __syncthreads(); // a warp reads what the others have written
        value = lane_sums<kWarps, kSums>(smem[warp / kWarps * kWarps + lane % kWarps]);
    }
    return value;
}

// Adds the sums of those lanes of a warp that have the same columns: each kThreads-th.
template <int kThreads, int kChunk>
__device__ __forceinline__ void add_lanes(float (&rmem)[kChunk]) {
#pragma unroll
    for (int lanes = kThreads; lanes < 32; lanes *= 2) {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            rmem[j] += __shfl_xor_sync(0xffffffff, rmem[j], lanes);
        }
    }
}

// Whether all rows begin at multiples of 16 bytes, have whole chunks, and fit into the registers;
// and the chunks between two rows of a thread are a number of 32 bits.
template <NormBackwardStagedKernelConfig cfg>
__device__ __forceinline__ bool has_whole_chunks(const NormBackwardKernelArgs &args) {
    constexpr int kChunk = kChunkElements<cfg.dtype>;
    constexpr int kRows = cfg.n_threads() / cfg.threads_per_row();
    const auto address = [](const void *gmem) { return reinterpret_cast<uintptr_t>(gmem); };
    return (address(args.dy) | address(args.x) | address(args.dx) | address(args.weight)) %
                   kChunkBytes ==
               0 &&
           (args.dy_stride | args.x_stride | args.dx_stride | args.width) % kChunk == 0 &&
           args.width <= cfg.tile() &&
           max(max(args.dy_stride, args.x_stride), args.dx_stride) / kChunk * gridDim.x * kRows <=
               0x7fffffff;
}

// dx of the block's rows, which have whole chunks; sums of their columns.
template <NormBackwardStagedKernelConfig cfg>
__device__ __forceinline__ void
walk_whole_rows(float (&dweight_rmem)[cfg.chunks][kChunkElements<cfg.dtype>],
                float (&dbias_rmem)[cfg.chunks][kChunkElements<cfg.dtype>],
                const NormBackwardKernelArgs &args, float2 *sums_smem, uint4 *rows_smem) {
    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.threads_per_row(), kChunks = cfg.chunks;
    constexpr int kChunk = kChunkElements<kDType>, kRows = cfg.n_threads() / kThreads;
    constexpr int kStages = cfg.staged_rows;

    const uint32_t apart = gridDim.x * kRows; // from a row of a thread to the next
    const int thread = threadIdx.x % kThreads, n_chunks = args.width / kChunk;
    uint32_t row = blockIdx.x * kRows + threadIdx.x / kThreads;
    const float inverse_width = 1.0f / args.width;
    // The thread's first chunk of its row, and the chunks from there to that of its next row.
    const auto chunk_of = [&](const void *gmem, int64_t stride) {
        return static_cast<const uint4 *>(gmem) + row * (stride / kChunk) + thread;
    };
    const uint4 *dy_gmem = chunk_of(args.dy, args.dy_stride);
    const uint4 *x_gmem = chunk_of(args.x, args.x_stride);
    uint4 *dx_gmem = const_cast<uint4 *>(chunk_of(args.dx, args.dx_stride));
    const int dy_step = args.dy_stride / kChunk * apart, x_step = args.x_stride / kChunk * apart;
    const int dx_step = args.dx_stride / kChunk * apart;
    uint4 weight_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int first = (thread + k * kThreads) * kChunk;
        weight_rmem[k] = load_weight<kDType>(static_cast<const ElementOf<kDType> *>(args.weight),
                                             first, args.width, true);
    }

    // Each thread copies and reads its own chunks, so that no barrier is due: dy, then x.
    constexpr uint32_t kRow = cfg.n_threads() * kChunkBytes, kSlot = 2 * kChunks * kRow;
    const uint32_t slots_smem = smem_address(rows_smem + threadIdx.x);
    const uint32_t weight_smem = slots_smem + kStages * kSlot;
    if constexpr (kChunks > 1) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            rows_smem[(2 * kStages * kChunks + k) * cfg.n_threads() + threadIdx.x] = weight_rmem[k];
        }
    }
    const auto begin_copies = [&](uint32_t row, uint32_t slot_smem) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) { // zeros where there is no chunk
            const bool has_chunk = row < uint32_t(args.rows) && thread + k * kThreads < n_chunks;
            const int bytes = has_chunk ? kChunkBytes : 0;
            cp_async_16(slot_smem + k * kRow, dy_gmem + k * kThreads, bytes);
            cp_async_16(slot_smem + kSlot / 2 + k * kRow, x_gmem + k * kThreads, bytes);
        }
        cp_async_commit();
        dy_gmem += dy_step;
        x_gmem += x_step;
    };
#pragma unroll
    for (int slot = 0; slot < kStages - 1; ++slot) {
        begin_copies(row + slot * apart, slots_smem + slot * kSlot);
    }
    const auto load = [&](const float *gmem, uint32_t row) {
        return row < uint32_t(args.rows) ? __ldg(gmem + row) : 0.0f;
    };
    const auto load_mean = [&](uint32_t row) { return cfg.rms ? 0.0f : load(args.mean, row); };
    // Of the next row, and of the one behind it: a register is moved when its load has ended.
    float mean_next = load_mean(row), mean_far = load_mean(row + apart);
    float rstd_next = load(args.rstd, row), rstd_far = load(args.rstd, row + apart);

    int parity = 0;
    uint32_t slot_smem = slots_smem, free_smem = slots_smem + (kStages - 1) * kSlot;
    for (uint32_t first_row = blockIdx.x * kRows; first_row < uint32_t(args.rows);
         first_row += apart, row += apart, parity ^= 1) {
        const bool has_row = row < uint32_t(args.rows); // all lanes take part in a shuffle
        const float mean = mean_next, rstd = rstd_next;

        // 1. The row has come. The slot of the row before it takes one that is kStages - 1 rows
        // behind it.
        cp_async_wait<kStages - 2>();
        begin_copies(row + (kStages - 1) * apart, free_smem);
        mean_next = mean_far;
        rstd_next = rstd_far;
        mean_far = load_mean(row + 2 * apart);
        rstd_far = load(args.rstd, row + 2 * apart);
        uint4 dy_rmem[kChunks], x_rmem[kChunks];
        const auto read = [&](int k) {
            if constexpr (kChunks > 1) {
                weight_rmem[k] = load_smem_16(weight_smem + k * kRow);
            }
            dy_rmem[k] = load_smem_16(slot_smem + k * kRow);
            x_rmem[k] = load_smem_16(slot_smem + kSlot / 2 + k * kRow);
        };

        // 2. Σ g and Σ g · (x - mean), where g has the factor rstd
        float2 sums = {};
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            read(k);
            const Chunk<kDType> chunk(dy_rmem[k], x_rmem[k], weight_rmem[k], mean, rstd);
            chunk.add_to(sums);
        }
        sums = row_sums<kThreads, cfg.rms ? 1 : 2>(sums, sums_smem + parity * cfg.n_warps);
        __syncwarp(); // ptxas reads the chunks again behind it, and keeps none in registers

        // 3. dx = g - mean_g - (x - mean) · slope, and sums of columns
        const float mean_g = cfg.rms ? 0.0f : sums.x * inverse_width;
        const float slope = sums.y * inverse_width * rstd * rstd;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            if constexpr (kChunks > 1) {
                read(k); // again: registers for several chunks would cost warps
            }
            const Chunk<kDType> chunk(dy_rmem[k], x_rmem[k], weight_rmem[k], mean, rstd);
            chunk.add_to(dweight_rmem[k], dbias_rmem[k], rstd);
            float dx_rmem[kChunk];
            chunk.gradient(dx_rmem, mean_g, slope);
            if (has_row && thread + k * kThreads < n_chunks) {
                store_gmem_16_streaming(dx_gmem + k * kThreads, pack_chunk<kDType>(dx_rmem));
            }
        }
        dx_gmem += dx_step;
        free_smem = slot_smem;
        slot_smem =
            slot_smem + kSlot == slots_smem + kStages * kSlot ? slots_smem : slot_smem + kSlot;
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads(), Kernels::value.blocks_per_sm())
    rows_kernel(const __grid_constant__ NormBackwardKernelArgs args) {
    constexpr NormBackwardStagedKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 1 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.chunks >= 1 && cfg.registers() <= 255 &&
                      cfg.registers() <= 65536 / cfg.n_threads(),
                  "sums and chunks are in registers, of which an SM has 65536");
    static_assert(cfg.staged_rows >= 2, "a row that is read, and one on its way");
    static_assert(cfg.row_threads >= 8 && cfg.row_threads <= cfg.n_threads() &&
                      (cfg.row_threads & (cfg.row_threads - 1)) == 0,
                  "the tree over the threads of a row is one over the lanes of a warp");

    constexpr DType kDType = cfg.dtype;
    constexpr int kWarps = cfg.n_warps, kThreads = cfg.threads_per_row(), kChunks = cfg.chunks;
    constexpr int kChunk = kChunkElements<kDType>, kTile = cfg.tile();
    constexpr int kRows = cfg.n_threads() / kThreads; // of the block, at a time
    constexpr int kGroup = kThreads < 32 ? 32 : kThreads; // threads of whole warps with rows
    constexpr int kGroups = cfg.n_threads() / kGroup, kSums = cfg.rms ? 1 : 2;

    extern __shared__ uint4 rows_smem[]; // (stages, 2, kChunks, threads), (kChunks, threads)

    float2 *sums_smem = reinterpret_cast<float2 *>(rows_smem + (2 * cfg.staged_rows + 1) * kChunks *
                                                                   cfg.n_threads());
    // sums_smem (2, kWarps): even and odd rows
    float *columns_smem = reinterpret_cast<float *>(sums_smem + 2 * kWarps); // (kSums, kTile)

    const int thread = threadIdx.x % kThreads; // of those that have the row
    const int padded = (args.width + 7) / 8 * 8;
    const auto *dy_gmem = static_cast<const ElementOf<kDType> *>(args.dy);
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x);
    const auto *weight_gmem = static_cast<const ElementOf<kDType> *>(args.weight); // (width)
    auto *dx_gmem = static_cast<ElementOf<kDType> *>(args.dx);
    float *row_sums_gmem = args.row_sums; // (rows, kSums): first Σ g · (x - mean)
    const bool aligned = is_aligned(dy_gmem, args.dy_stride) && is_aligned(x_gmem, args.x_stride) &&
                         is_aligned(dx_gmem, args.dx_stride) && is_aligned(weight_gmem, 0) &&
                         args.width % kChunk == 0;
    const bool is_whole = has_whole_chunks<cfg>(args);
    const float inverse_width = 1.0f / args.width;

    for (int begin = 0; begin < args.width; begin += kTile) { // of a tile of columns
        float dweight_rmem[kChunks][kChunk] = {}, dbias_rmem[kChunks][kChunk] = {};
        int parity = 0;
        int64_t first_row = int64_t(blockIdx.x) * kRows;
        if (is_whole) {
            walk_whole_rows<cfg>(dweight_rmem, dbias_rmem, args, sums_smem, rows_smem);
            first_row = args.rows;
        }
        for (; first_row < args.rows; first_row += int64_t(gridDim.x) * kRows, parity ^= 1) {
            const int64_t row = first_row + threadIdx.x / kThreads;
            const int width = row < args.rows ? args.width : 0; // all lanes take part in a shuffle
            const auto *dy_row = dy_gmem + row * args.dy_stride;
            const auto *x_row = x_gmem + row * args.x_stride;
            auto *dx_row = dx_gmem + row * args.dx_stride;
            const float mean = !cfg.rms && width > 0 ? __ldg(args.mean + row) : 0.0f;
            const float rstd = width > 0 ? __ldg(args.rstd + row) : 0.0f;

            // 2. Σ g and Σ g · (x - mean)
            float2 sums = {};
            if (begin == 0) {
                walk_row<kDType, kThreads>(sums, dy_row, x_row, weight_gmem, thread * kChunk, width,
                                           aligned, mean, rstd);
                sums = row_sums<kThreads, cfg.rms ? 1 : 2>(sums, sums_smem + parity * kWarps);
                if (kTile < width && thread == 0) {
                    row_sums_gmem[row * kSums + kSums - 1] = sums.x;
                    row_sums_gmem[row * kSums] = sums.y;
                }
            } else if (width > 0) {
                sums = {row_sums_gmem[row * kSums + kSums - 1], row_sums_gmem[row * kSums]};
            }

            // 3. dx = g - mean_g - (x - mean) · slope, and sums of columns
            const float mean_g = cfg.rms ? 0.0f : sums.x * inverse_width;
            const float slope = sums.y * inverse_width * rstd * rstd;
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                const int first = begin + (thread + k * kThreads) * kChunk;
                const Chunk<kDType> chunk(load_chunk<kDType>(dy_row, first, width, aligned),
                                          load_chunk<kDType>(x_row, first, width, aligned),
                                          load_weight<kDType>(weight_gmem, first, width, aligned),
                                          mean, rstd);
                chunk.add_to(dweight_rmem[k], dbias_rmem[k], rstd);
                float dx_rmem[kChunk];
                chunk.gradient(dx_rmem, mean_g, slope);
                store_chunk<kDType>(dx_row, dx_rmem, first, width, aligned);
            }
        }
        __syncthreads(); // the tiles behind this one read the sums of the rows

        // 4. partial: the sums of the block's rows, over lanes, then over warps in their order
        if (args.partial == nullptr) {
            continue;
        }
        float *dweight_gmem = args.partial + int64_t(blockIdx.x) * kSums * padded + begin;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            add_lanes<kThreads>(dweight_rmem[k]);
            if constexpr (!cfg.rms) {
                add_lanes<kThreads>(dbias_rmem[k]);
            }
        }
        for (int turn = 0; turn < kGroups; ++turn) {
            if (turn > 0) {
                __syncthreads(); // warps add to what those before them have written
            }
            if (threadIdx.x / kGroup != turn || threadIdx.x % kGroup >= kThreads) {
                continue;
            }
            const bool is_last = turn == kGroups - 1;
            float *dweight = is_last ? dweight_gmem : columns_smem;
            float *dbias = is_last ? dweight_gmem + padded : columns_smem + kTile;
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                const int first = (thread + k * kThreads) * kChunk; // of the tile
                if (turn > 0) {
                    add_stored<kChunk>(dweight_rmem[k], columns_smem + first);
                    add_stored<kChunk>(dbias_rmem[k], columns_smem + (kSums - 1) * kTile + first);
                }
                if (begin + first < args.width) {
                    store_sums<kChunk>(dweight + first, dweight_rmem[k]);
                    if constexpr (!cfg.rms) {
                        store_sums<kChunk>(dbias + first, dbias_rmem[k]);
                    }
                }
            }
        }
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(1024)
    combine_kernel(const __grid_constant__ NormBackwardKernelArgs args) {
    extern __shared__ float4 columns_smem[]; // (warps, 32)

    // 5. dweight and dbias: Σ partial
    add_parts<Kernels::value.dtype, Kernels::value.rms ? 1 : 2>(args, columns_smem);
}

} // namespace w2
