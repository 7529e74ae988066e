#pragma once
// Step 1 of the norm_backward_cluster family: a cluster per row.
// Parent in the story: w1; no line of it is left.
//
// dx, dweight and dbias of layer norm along wide rows, or with `rms` without the mean and dbias.
//
// What changed
//   1. A row has a cluster of 2, 4 or 8 thread blocks on as many SMs. Each block has a part of the
//      row, and the same columns of all rows of the cluster.
//   2. The sums of warps go to the block's first warp, and from there to all blocks of the cluster.
//      An mbarrier of each block counts their bytes.
//   3. While the sums of a row are on their way, dx of the row before it is computed. Shared memory
//      has three rows: these two, and one that is on its way.
//
// Why: a thread keeps two sums per column. At a width of 32768 these are 256 KiB, all registers of
// an SM. w1 takes such rows in tiles and reads x and dy twice, 10 bytes per element instead of 6.
// Half of a row has 128 KiB of sums and 64 KiB of x and dy. Three of these and 32 KiB of weight are
// 224 of the 227 KiB of shared memory.
//   64 KiB and more are in flight per SM at any time. At 4.2 TB/s an H200 has 3.1 µs for such a
// part of a row. An exchange takes about 1 µs, for which a1 waits.
//   st.async needs no release: in a1 the threads that send wait until their stores have reached L2.
// Only the first warp waits for the others' sums; they go on with the row before.
//   The sums of row n + 4 have the place of those of row n. A block that sends them has the sums of
// row n + 2. Each block sent these when its warps had begun row n + 2, behind dx of row n.
//   A GPC has up to 18 SMs, and some have fewer than 16: a cluster that waits for the end of
// another doubles the time. The driver tells how many run at the same time.
//   dx is not read again: its stores are the first to leave L2.
// Expected, as a share of a copy on an H200: 88% at widths of 16384 (2 blocks) to 131072 (8). The
// sums of the clusters take 17 MB to L2 and back, 4% of the time.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 88% of a copy's speed at widths of 32768 and 65536, with twice the rows 91
// and 92%; RMS norm 93 and 94%. e4 and q1 have 31 to 57%.
//
// Phases: rows_kernel 1 sums of the next row, 2 dx and sums of columns, 3 partial; combine_kernel 4
// dweight and dbias.

#include "cp_async.cuh"
#include "elements.cuh"
#include "kernels/norm_backward/chunks.cuh"
#include "kernels/norm_backward/cluster.cuh"
#include "memory.cuh"
#include "sm90/cluster.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"

namespace nc1 {

constexpr int kStages = 3; // rows in shared memory
constexpr int kTurns = 4; // rows whose sums have a place

// Writes two sums to the shared memory of a block of the cluster, whose barrier counts their bytes.
__device__ __forceinline__ void send(uint32_t dst_smem, float2 sums, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 "
                 "[%0], {%2, %3}, [%1];" ::"r"(dst_smem),
                 "r"(barrier), "f"(sums.x), "f"(sums.y)
                 : "memory");
}

// The sums of a row that a cluster has, for one row after the other.
template <int kBlocks, int kWarps, int kSums>
struct ClusterSums {
    float2 *warps_smem; // (2, kWarps): sums of the block's warps
    float2 *blocks_smem; // (kTurns, kBlocks): sums of the cluster's blocks
    uint64_t *barriers; // (kTurns)

    // Before the first row; a cluster barrier must follow.
    __device__ __forceinline__ void init_barriers() const {
        for (int slot = 0; slot < kTurns; ++slot) {
            barrier_init(smem_address(barriers + slot), kBlocks + 1);
        }
        barrier_init_fence();
    }
    // Sends the sums of the block's threads, of the n-th row. Warps but the first wait for none.
    __device__ __forceinline__ void send_sums(float2 value, uint32_t n) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float2 *own_smem = warps_smem + n % 2 * kWarps; // (kWarps)
        value = lane_sums<32, kSums>(value);
        if (lane == 0) {
            own_smem[warp] = value;
        }
        if (warp > 0) {
            named_arrive(1 + n % 2, kWarps * 32); // the first warp may read
            return;
        }
        named_sync(1 + n % 2, kWarps * 32);
        value = lane_sums<kWarps, kSums>(own_smem[lane % kWarps]);
        const uint32_t barrier = smem_address(barriers + n % kTurns);
        __syncwarp(); // warps write there again behind this row's phase, when all lanes have read
        if (lane == 0) {
            barrier_expect(barrier, kBlocks * sizeof(float2));
        }
        if (lane < kBlocks) {
            const float2 *dst_smem = blocks_smem + n % kTurns * kBlocks + cluster_rank();
            send(in_block(smem_address(dst_smem), lane), value, in_block(barrier, lane));
            cluster_barrier_arrive(in_block(barrier, lane)); // the block has read older sums
        }
    }
    // Returns the sums over all threads of the cluster to each, with the same bits.
    __device__ __forceinline__ float2 receive_sums(uint32_t n) const {
        barrier_wait(smem_address(barriers + n % kTurns), n / kTurns % 2);
        float2 sums = {};
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            const float2 other = blocks_smem[n % kTurns * kBlocks + block];
            sums = {sums.x + other.x, sums.y + other.y};
        }
        return sums;
    }
};

// Adds the values of all threads of the block and returns the sums to each. smem: (kWarps).
template <int kWarps, int kSums>
__device__ __forceinline__ float2 block_sums(float2 value, float2 *smem) {
    value = lane_sums<32, kSums>(value);
    if (threadIdx.x % 32 == 0) {
        smem[threadIdx.x / 32] = value;
    }
    __syncthreads(); // a warp reads what the others have written
    return lane_sums<kWarps, kSums>(smem[threadIdx.x % kWarps]);
}

// Whether all rows begin at multiples of 16 bytes, have whole chunks, and fit into the registers of
// a cluster; and the chunks between two of its rows are a number of 32 bits.
template <NormBackwardClusterKernelConfig cfg>
__device__ __forceinline__ bool has_whole_chunks(const NormBackwardKernelArgs &args) {
    constexpr int kChunk = kChunkElements<cfg.dtype>;
    const auto address = [](const void *gmem) { return reinterpret_cast<uintptr_t>(gmem); };
    return (address(args.dy) | address(args.x) | address(args.dx) | address(args.weight)) %
                   kChunkBytes ==
               0 &&
           (args.dy_stride | args.x_stride | args.dx_stride | args.width) % kChunk == 0 &&
           args.width <= cfg.cluster_blocks * cfg.tile() &&
           max(max(args.dy_stride, args.x_stride), args.dx_stride) / kChunk * gridDim.x <=
               0x7fffffff;
}

// dx of the cluster's rows, which have whole chunks; sums of the columns of `own` chunks of the
// block from `begin` on.
template <NormBackwardClusterKernelConfig cfg>
__device__ __forceinline__ void
walk_whole_rows(float (&dweight_rmem)[cfg.chunks][kChunkElements<cfg.dtype>],
                float (&dbias_rmem)[cfg.chunks][kChunkElements<cfg.dtype>],
                const NormBackwardKernelArgs &args, uint4 *rows_smem, int begin, int own) {
    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.n_threads(), kChunks = cfg.chunks;
    constexpr int kBlocks = cfg.cluster_blocks, kWarps = cfg.n_warps;
    constexpr int kChunk = kChunkElements<kDType>;

    auto *barriers =
        reinterpret_cast<uint64_t *>(rows_smem + (2 * kStages + 1) * kChunks * kThreads);
    auto *sums_smem = reinterpret_cast<float2 *>(barriers + kTurns);
    const ClusterSums<kBlocks, kWarps, cfg.rms ? 1 : 2> cluster_sums{
        sums_smem, sums_smem + 2 * kWarps, barriers};
    if (threadIdx.x == 0) {
        cluster_sums.init_barriers();
    }

    const uint32_t apart = gridDim.x / kBlocks; // clusters
    const int thread = threadIdx.x;
    uint32_t row = blockIdx.x / kBlocks;
    const float inverse_width = 1.0f / args.width;
    // The thread's first chunk of its row, and the chunks from there to that of its next row.
    const auto chunk_of = [&](const void *gmem, int64_t stride) {
        return static_cast<const uint4 *>(gmem) + row * (stride / kChunk) + begin + thread;
    };
    const uint4 *dy_gmem = chunk_of(args.dy, args.dy_stride);
    const uint4 *x_gmem = chunk_of(args.x, args.x_stride);
    uint4 *dx_gmem = const_cast<uint4 *>(chunk_of(args.dx, args.dx_stride));
    const int dy_step = args.dy_stride / kChunk * apart, x_step = args.x_stride / kChunk * apart;
    const int dx_step = args.dx_stride / kChunk * apart;

    // Each thread copies and reads its own chunks, so that no barrier is due: dy, then x; weight.
    constexpr uint32_t kRow = kThreads * kChunkBytes, kSlot = 2 * kChunks * kRow;
    const uint32_t slots_smem = smem_address(rows_smem + thread);
    const uint32_t weight_smem = slots_smem + kStages * kSlot;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        rows_smem[(2 * kStages * kChunks + k) * kThreads + thread] =
            load_weight<kDType>(static_cast<const ElementOf<kDType> *>(args.weight),
                                (begin + i) * kChunk, i < own ? args.width : 0, true);
    }
    const auto begin_copies = [&](uint32_t row, uint32_t slot_smem) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) { // zeros where there is no chunk
            const bool has_chunk = row < uint32_t(args.rows) && thread + k * kThreads < own;
            const int bytes = has_chunk ? kChunkBytes : 0;
            cp_async_16(slot_smem + k * kRow, dy_gmem + k * kThreads, bytes);
            cp_async_16(slot_smem + kSlot / 2 + k * kRow, x_gmem + k * kThreads, bytes);
        }
        cp_async_commit();
        dy_gmem += dy_step;
        x_gmem += x_step;
    };
    const auto read_chunk = [&](int k, uint32_t slot_smem, float mean, float rstd) {
        return Chunk<kDType>(load_smem_16(slot_smem + k * kRow),
                             load_smem_16(slot_smem + kSlot / 2 + k * kRow),
                             load_smem_16(weight_smem + k * kRow), mean, rstd);
    };
    const auto load = [&](const float *gmem, uint32_t row) {
        return row < uint32_t(args.rows) ? __ldg(gmem + row) : 0.0f;
    };
    const auto load_mean = [&](uint32_t row) { return cfg.rms ? 0.0f : load(args.mean, row); };

    // 1. Σ g and Σ g · (x - mean) of the n-th row of the cluster, where g has the factor rstd
    const auto send_sums = [&](uint32_t n, uint32_t slot_smem, float mean, float rstd) {
        float2 sums = {};
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            read_chunk(k, slot_smem, mean, rstd).add_to(sums);
        }
        cluster_sums.send_sums(sums, n);
    };
#pragma unroll
    for (int slot = 0; slot < kStages; ++slot) {
        begin_copies(row + slot * apart, slots_smem + slot * kSlot);
    }
    float mean = load_mean(row), mean_next = load_mean(row + apart);
    float rstd = load(args.rstd, row), rstd_next = load(args.rstd, row + apart);
    cluster_sync(); // no block sends to one that has not begun, or to a barrier that is not ready
    cp_async_wait<kStages - 1>();
    send_sums(0, slots_smem, mean, rstd);

    uint32_t slot_smem = slots_smem;
    for (uint32_t n = 0; row < uint32_t(args.rows); ++n, row += apart) {
        const uint32_t next_smem =
            slot_smem == slots_smem + (kStages - 1) * kSlot ? slots_smem : slot_smem + kSlot;
        const float mean_far = load_mean(row + 2 * apart);
        const float rstd_far = load(args.rstd, row + 2 * apart);
        if (row + apart < uint32_t(args.rows)) {
            cp_async_wait<1>(); // of the three rows on their way the next one has come
            send_sums(n + 1, next_smem, mean_next, rstd_next);
        }

        // 2. dx = g - mean_g - (x - mean) · slope, and sums of columns
        const float2 sums = cluster_sums.receive_sums(n);
        const float mean_g = cfg.rms ? 0.0f : sums.x * inverse_width;
        const float slope = sums.y * inverse_width * rstd * rstd;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const Chunk<kDType> chunk = read_chunk(k, slot_smem, mean, rstd);
            chunk.add_to(dweight_rmem[k], dbias_rmem[k], rstd);
            float dx_rmem[kChunk];
            chunk.gradient(dx_rmem, mean_g, slope);
            if (thread + k * kThreads < own) {
                store_gmem_16_streaming(dx_gmem + k * kThreads, pack_chunk<kDType>(dx_rmem));
            }
        }
        dx_gmem += dx_step;
        begin_copies(row + kStages * apart, slot_smem);
        slot_smem = next_smem;
        mean = mean_next;
        rstd = rstd_next;
        mean_next = mean_far;
        rstd_next = rstd_far;
    }
}

template <typename Kernels>
__global__ void __cluster_dims__(Kernels::value.cluster_blocks, 1, 1)
    __launch_bounds__(Kernels::value.n_threads(), Kernels::value.blocks_per_sm())
        rows_kernel(const __grid_constant__ NormBackwardKernelArgs args) {
    constexpr NormBackwardClusterKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 8 && cfg.n_warps <= 16 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.cluster_blocks >= 2 && cfg.cluster_blocks <= 8, "portable clusters");
    static_assert(cfg.chunks >= 1 && cfg.registers() <= 65536 / cfg.n_threads(),
                  "sums are in registers, of which an SM has 65536");

    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.n_threads(), kChunks = cfg.chunks, kBlocks = cfg.cluster_blocks;
    constexpr int kChunk = kChunkElements<kDType>, kTile = cfg.tile(), kSums = cfg.rms ? 1 : 2;

    extern __shared__ uint4 rows_smem[]; // (kStages, 2, kChunks, threads), (kChunks, threads)

    const int rank = cluster_rank(), thread = threadIdx.x;
    const int padded = (args.width + 7) / 8 * 8;
    float *partial_gmem = args.partial + int64_t(blockIdx.x / kBlocks) * kSums * padded;
    float dweight_rmem[kChunks][kChunk] = {}, dbias_rmem[kChunks][kChunk] = {};

    // 3. partial: the sums of the cluster's rows, for the chunks of a thread from `begin` to `end`
    const auto store_partial = [&](int begin, int end, bool is_first) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const int first = (begin + thread + k * kThreads) * kChunk;
            if (args.partial == nullptr || first >= end) {
                continue;
            }
            if (!is_first) {
                add_stored<kChunk>(dweight_rmem[k], partial_gmem + first);
                add_stored<kChunk>(dbias_rmem[k], partial_gmem + (kSums - 1) * padded + first);
            }
            store_sums<kChunk>(partial_gmem + first, dweight_rmem[k]);
            if (!cfg.rms) {
                store_sums<kChunk>(partial_gmem + padded + first, dbias_rmem[k]);
            }
        }
    };

    // The part of a row that each block of the cluster has: whole chunks. A row of 125 chunks in 4
    // blocks: 32, 32, 32 and 29.
    if (has_whole_chunks<cfg>(args)) {
        const int n_chunks = args.width / kChunk, part = (n_chunks + kBlocks - 1) / kBlocks;
        const int begin = min(rank * part, n_chunks), own = min(part, n_chunks - begin);
        walk_whole_rows<cfg>(dweight_rmem, dbias_rmem, args, rows_smem, begin, own);
        store_partial(begin, (begin + own) * kChunk, true);
        return;
    }

    // Else each block has rows of its own, which it reads a second time behind their sums, as in
    // w1. The blocks of a cluster add their sums of columns one after the other.
    auto *sums_smem = reinterpret_cast<float2 *>(rows_smem); // (2, warps): even and odd rows
    const auto *dy_gmem = static_cast<const ElementOf<kDType> *>(args.dy);
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x);
    const auto *weight_gmem = static_cast<const ElementOf<kDType> *>(args.weight); // (width)
    auto *dx_gmem = static_cast<ElementOf<kDType> *>(args.dx);
    float *row_sums_gmem = args.row_sums; // (rows, kSums): first Σ g · (x - mean)
    const int width = args.width;
    const float inverse_width = 1.0f / width;
    const bool aligned = is_aligned(dy_gmem, args.dy_stride) && is_aligned(x_gmem, args.x_stride) &&
                         is_aligned(dx_gmem, args.dx_stride) && is_aligned(weight_gmem, 0) &&
                         width % kChunk == 0;
    for (int begin = 0; begin < width; begin += kTile) { // of a tile of columns
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
#pragma unroll
            for (int j = 0; j < kChunk; ++j) {
                dweight_rmem[k][j] = dbias_rmem[k][j] = 0.0f;
            }
        }
        int parity = 0;
        for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x, parity ^= 1) {
            const auto *dy_row = dy_gmem + row * args.dy_stride;
            const auto *x_row = x_gmem + row * args.x_stride;
            auto *dx_row = dx_gmem + row * args.dx_stride;
            const float mean = cfg.rms ? 0.0f : __ldg(args.mean + row),
                        rstd = __ldg(args.rstd + row);
            float2 sums = {};
            if (begin == 0) {
                walk_row<kDType, kThreads>(sums, dy_row, x_row, weight_gmem, thread * kChunk, width,
                                           aligned, mean, rstd);
                sums = block_sums<cfg.n_warps, kSums>(sums, sums_smem + parity * cfg.n_warps);
                if (kTile < width && thread == 0) {
                    row_sums_gmem[row * kSums + kSums - 1] = sums.x;
                    row_sums_gmem[row * kSums] = sums.y;
                }
            } else {
                sums = {row_sums_gmem[row * kSums + kSums - 1], row_sums_gmem[row * kSums]};
            }
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
        for (int turn = 0; turn < kBlocks; ++turn) {
            if (rank == turn) {
                store_partial(begin / kChunk, min(begin + kTile, width), turn == 0);
            }
            cluster_sync(); // the next block adds to what this one has written
        }
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(1024)
    combine_kernel(const __grid_constant__ NormBackwardKernelArgs args) {
    extern __shared__ float4 columns_smem[]; // (warps, 32)

    // 4. dweight and dbias: Σ partial
    add_parts<Kernels::value.dtype, Kernels::value.rms ? 1 : 2>(args, columns_smem);
}

} // namespace nc1
