#pragma once
// Parts of the backward_sync family's kernels that no step is about: the tile of a thread block,
// the band of columns that its rows are multiplied with, a product with fragments, stores of these,
// the statistics of queries, and the sums of dQ.
//
// A thread block has a tile of rows and walks blocks of columns: in dq_kernel rows are queries and
// columns are keys, in dkdv_kernel rows are keys and columns are queries.

#include "elements.cuh"
#include "kernels/backward_sync/arguments.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

// Starts a copy of 8 bytes, which reads src_bytes (0 or 8) and writes zeros for the rest.
__device__ __forceinline__ void cp_async_8(uint32_t dst_smem, const void *src_gmem, int src_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst_smem), "l"(src_gmem),
                 "r"(src_bytes)
                 : "memory");
}

// threadIdx.x, read again each time: a long loop has no registers to keep what follows from it.
__device__ __forceinline__ unsigned thread_index() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// A tile in its sequence, which has n_rows and n_columns and begins at row_begin and column_begin
// of the tensors; and the number of the sequence.
struct Tile {
    int first_row, n_rows, n_columns, row_begin, column_begin, sequence;
};

// The tile of this thread block. Of sequences of various lengths number n has the thread blocks
// from begin / kRows + n on: as many as its rows need, or one more, whose tile begins past the
// rows. Begins that are no rows of the tensors, or fall, give no tile outside of them.
template <typename Kernels, int kRows>
__device__ __forceinline__ Tile find_tile(const int *row_begins, const int *column_begins,
                                          int n_sequences, int n_rows, int n_columns) {
    if constexpr (!Kernels::value.varlen) {
        return {int(blockIdx.x) * kRows, n_rows, n_columns, 0, 0, 0};
    }
    int n = 0, end = n_sequences; // the last n whose blocks begin with this one or before it
    while (end - n > 1) {
        const int middle = n + (end - n) / 2;
        (row_begins[middle] / kRows + middle <= int(blockIdx.x) ? n : end) = middle;
    }
    auto within = [](int begin, int least, int most) { return min(max(begin, least), most); };
    const int row_begin = within(row_begins[n], 0, n_rows);
    const int column_begin = within(column_begins[n], 0, n_columns);
    const int number = int(blockIdx.x) - n - row_begin / kRows;
    const int row_end = within(row_begins[n + 1], row_begin, n_rows);
    const int column_end = within(column_begins[n + 1], column_begin, n_columns);
    return {number < 0 ? n_rows : number * kRows,
            row_end - row_begin,
            column_end - column_begin,
            row_begin,
            column_begin,
            n};
}

// Row r meets the columns from r + first to r + last.
struct Band {
    int first, last;
};

// The keys that a query sees: masks are aligned to the bottom right.
template <typename Kernels>
__device__ __forceinline__ Band keys_of_query(const BackwardSyncKernelArgs &args, int len_q,
                                              int len_k) {
    constexpr auto cfg = Kernels::value;
    constexpr int kNone = 1 << 30; // further than any two rows
    const int own = len_k - len_q;
    return {cfg.window ? own - args.window_left : -kNone, cfg.causal   ? own
                                                          : cfg.window ? own + args.window_right
                                                                       : kNone};
}

// Elements of P and dS, the rows of a warp from `row` on and the columns from `column` on, become 0
// where a row does not meet the column, and with kRowsEnd in rows from n_rows on. A lane has
// columns 2t and 2t + 1 of every eight, of rows g and g + 8 of every 16.
template <bool kRowsEnd = false, int kRowTiles, int kTiles>
__device__ __forceinline__ void hide(float (&P_rmem)[kRowTiles][kTiles][4],
                                     float (&dS_rmem)[kRowTiles][kTiles][4], Band band,
                                     int n_columns, int row, int column, int n_rows = 0) {
    row += threadIdx.x % 32 / 4;
    column += threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2 * kRowTiles; ++half) {
        const int first = row + half * 8 + band.first - column;
        const int end = min(row + half * 8 + band.last + 1, n_columns) - column;
#pragma unroll
        for (int n = 0; n < kTiles * 2; ++n) {
            const int offset = n / 2 * kMmaN + n % 2, i = half % 2 * 2 + n % 2;
            const bool visible =
                offset >= first && offset < end && (!kRowsEnd || row + half * 8 < n_rows);
            float &P = P_rmem[half / 2][n / 2][i], &dS = dS_rmem[half / 2][n / 2][i];
            P = visible ? P : 0;
            dS = visible ? dS : 0;
        }
    }
}

// C (kRowTiles * 16, kTiles * 8) += A (kRowTiles * 16, kSteps * 16) @ B (kSteps * 16, kTiles * 8).
// B is rows of a tile of B_c, in whole pieces.
template <typename Kernels, int kSteps, int kRowTiles, int kTiles>
__device__ __forceinline__ void multiply_columns(float (&C_rmem)[kRowTiles][kTiles][4],
                                                 const uint32_t (&A_rmem)[kSteps][kRowTiles][4],
                                                 uint32_t B_smem,
                                                 const uint32_t (&lane_offset)[4]) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.d_head);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
            uint32_t B_rmem[4];
            ldmatrix_x4_trans(
                B_rmem, fragment_address<cfg.B_c, kColumns>(B_smem, lane_offset, k * kMmaK, n));
            add_product<cfg.dtype>(C_rmem, A_rmem[k], B_rmem, n);
        }
    }
}

// The same of A in fp32, which is rounded here.
template <typename Kernels, int kRowTiles, int kATiles, int kTiles>
__device__ __forceinline__ void multiply_columns(float (&C_rmem)[kRowTiles][kTiles][4],
                                                 const float (&A_rmem)[kRowTiles][kATiles][4],
                                                 uint32_t B_smem,
                                                 const uint32_t (&lane_offset)[4]) {
    uint32_t A_rounded[kATiles / 2][kRowTiles][4];
    round_P<Kernels::value.dtype>(A_rounded, A_rmem);
    multiply_columns<Kernels>(C_rmem, A_rounded, B_smem, lane_offset);
}

// X = C · factor, registers → global: the first n_rows of a warp's rows; X_gmem points to the first
// element.
template <DType kDType, int kRowTiles, int kTiles>
__device__ __forceinline__ void store_rows(Element *X_gmem, int64_t row_stride, int n_rows,
                                           const float (&C_rmem)[kRowTiles][kTiles][4],
                                           float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2 * kRowTiles; ++half) {
        const int row = half * 8 + lane / 4;
        if (row < n_rows) {
            uint32_t *row_gmem =
                reinterpret_cast<uint32_t *>(X_gmem + row * row_stride + lane % 4 * 2);
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                const float *C = &C_rmem[half / 2][n][half % 2 * 2];
                row_gmem[n * kMmaN / 2] = pack<kDType>(C[0] * factor, C[1] * factor);
            }
        }
    }
}

// smem_offset of numbers without a sign, which takes fewer instructions.
template <int kColumns>
__device__ __forceinline__ uint32_t smem_offset(unsigned row, unsigned col) {
    const unsigned chunk = col / kChunk ^ row / (kPiece / kColumns) % (kColumns / kChunk);
    return (row * kColumns + chunk * kChunk + col % kChunk) * sizeof(Element);
}

// The address that a lane gives ldmatrix.trans for the 16 x 16 piece at (row, column) of a tile:
// for B, or with kIsA for A, of which the tile has the transpose. It takes no registers where it is
// not used, unlike the offsets of set_lane_offsets.
template <int kRows, int kColumns, bool kIsA = false>
__device__ __forceinline__ uint32_t transposed_address(uint32_t tile_smem, unsigned lane,
                                                       unsigned row, unsigned column) {
    const unsigned lane_row = kIsA ? lane / 16 * 8 + lane % 8 : lane % 16;
    const unsigned lane_column = column + (kIsA ? lane / 8 % 2 : lane / 16) * kChunk;
    return tile_smem + piece_offset<kRows, kColumns>(lane_column / kColumns) +
           smem_offset<kColumns>(lane_row, lane_column % kColumns) +
           row * kColumns * unsigned(sizeof(Element));
}

// dS^T (kRowTiles * 16, kSteps * 16): registers → shared, at (row, column) of a tile of B_r rows
// and B_c columns
template <typename Kernels, int kSteps, int kRowTiles>
__device__ __forceinline__ void store_scores(uint32_t dS_smem, int row, int column,
                                             const uint32_t (&dS_rmem)[kSteps][kRowTiles][4]) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.B_c);
    const unsigned lane = thread_index() % 32;
    const uint32_t lane_smem = dS_smem + smem_offset<kColumns>(row + lane / 4, lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < kSteps * kRowTiles * 4; ++i) {
        const int k = i / 4 / kRowTiles, row_tile = i / 4 % kRowTiles;
        const int tile_row = row_tile * kMmaM + i % 2 * 8;
        const int tile_column = column + k * kMmaK + i / 2 % 2 * 8;
        store_smem_4((lane_smem ^ tile_column % kColumns * int(sizeof(Element))) +
                         piece_offset<cfg.B_r, kColumns>(tile_column / kColumns) +
                         tile_row * kColumns * int(sizeof(Element)),
                     dS_rmem[k][row_tile][i % 4]);
    }
}

__device__ __forceinline__ void store_smem_16(uint32_t dst_smem, const uint32_t (&value)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst_smem), "r"(value[0]),
                 "r"(value[1]), "r"(value[2]), "r"(value[3])
                 : "memory");
}

// Fragments of X: registers → shared. X_smem: a lane's place in a slot that half of the warps write
// and the other half read, 16 bytes per lane and fragment.
template <typename Kernels, int kSteps, int kRowTiles>
__device__ __forceinline__ void store_fragments(uint32_t X_smem,
                                                const uint32_t (&X_rmem)[kSteps][kRowTiles][4]) {
#pragma unroll
    for (int i = 0; i < kSteps * kRowTiles; ++i) {
        store_smem_16(X_smem + i * (Kernels::value.warps() / 2 * 32 * 16),
                      X_rmem[i / kRowTiles][i % kRowTiles]);
    }
}

// Waits for the other warp with this place; barrier 0 is that of __syncthreads.
template <typename Kernels>
__device__ __forceinline__ void pair_sync() {
    asm volatile("bar.sync %0, 64;" ::"r"(thread_index() / 32 % (Kernels::value.warps() / 2) + 1)
                 : "memory");
}

// Rounded fragments of X: shared → registers, as fp32
template <typename Kernels, int kRowTiles, int kTiles>
__device__ __forceinline__ void load_fragments(float (&X_rmem)[kRowTiles][kTiles][4],
                                               uint32_t X_smem) {
#pragma unroll
    for (int i = 0; i < kTiles / 2 * kRowTiles; ++i) {
        float X[kChunk]; // of two tiles
        unpack_chunk<Kernels::value.dtype>(
            X, load_smem_16(X_smem + i * (Kernels::value.warps() / 2 * 32 * 16)));
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            X_rmem[i % kRowTiles][i / kRowTiles * 2 + j / 4][j % 4] = X[j];
        }
    }
}

// The statistics of all queries of a batch and head; the grid's z is the batch.
__device__ __forceinline__ Statistics *statistics_of(const BackwardSyncKernelArgs &args, int heads,
                                                     int head) {
    return args.statistics + (int64_t(blockIdx.z) * heads + head) * args.len_q;
}

constexpr int kDeltaThreads = 128;

// Lanes that share a row of dO and O: each has 16 bytes, and they are a power of two.
__device__ constexpr int delta_lanes(int d_head) {
    return d_head <= 8 * kChunk ? 8 : d_head <= 16 * kChunk ? 16 : 32;
}

// Writes the statistics of queries, by thread blocks of kDeltaThreads.
template <typename Kernels>
__device__ __forceinline__ void write_statistics(const BackwardSyncKernelArgs &args) {
    constexpr auto cfg = Kernels::value;
    constexpr int kChunks = cfg.d_head / kChunk, kLanes = delta_lanes(cfg.d_head);
    const int query = blockIdx.x * (kDeltaThreads / kLanes) + threadIdx.x / kLanes;
    const int chunk = threadIdx.x % kLanes;

    float delta = 0;
    if (query < args.len_q && chunk < kChunks) {
        auto load = [&](const void *tensor, const TensorStrides &strides, float (&x_rmem)[kChunk]) {
            const Element *x = head_gmem(tensor, strides) + query * strides.row + chunk * kChunk;
            unpack_chunk<cfg.dtype>(x_rmem, __ldg(reinterpret_cast<const uint4 *>(x)));
        };
        float dO_rmem[kChunk], O_rmem[kChunk];
        load(args.dO, args.dO_strides, dO_rmem);
        load(args.O, args.O_strides, O_rmem);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            delta = fmaf(dO_rmem[i], O_rmem[i], delta);
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        delta += __shfl_xor_sync(0xffffffff, delta, lanes);
    }
    if (query < args.len_q && chunk == 0) {
        const int64_t first = (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * args.len_q;
        const float lse = args.lse[first + query];
        args.statistics[first + query] = {lse == -INFINITY ? INFINITY : lse * kLog2e, delta};
    }
}

// The sums of dQ, from p4 on. A warp has some rows and columns of a block of B_c queries, and the
// accumulators of these lie one after the other: one of all 32 lanes, then the next.
template <typename Kernels>
struct SumsOfWarp {
    static constexpr auto cfg = Kernels::value;
    static constexpr int kRows = cfg.B_c / cfg.query_warps(), kRowTiles = kRows / kMmaM;
    static constexpr int kColumns = cfg.d_head * cfg.query_warps() / cfg.warps();
    static constexpr int kTiles = kColumns / kMmaN;
    static_assert(kRows % kMmaM == 0 && kColumns % kMmaK == 0, "whole pieces of 16 x 16");
    const unsigned thread = thread_index(), warp = thread / 32, lane = thread % 32;
    const unsigned row = warp % cfg.query_warps() * kRows;
    const unsigned column = warp / cfg.query_warps() * kColumns;
    float *sums_gmem;

    // of the block that begins with `query` in the sums of a head
    __device__ __forceinline__ SumsOfWarp(const BackwardSyncKernelArgs &args, int head, int query) {
        const int64_t first = (int64_t(blockIdx.z) * args.heads + head) * args.sum_rows + query;
        sums_gmem = args.dQ_sums + first * cfg.d_head + warp * (kRows * kColumns) + lane;
    }

    __device__ __forceinline__ float *accumulator(int row_tile, int n, int i) const {
        return sums_gmem + ((row_tile * kTiles + n) * 4 + i) * 32;
    }
};

// Clears the sums of the rows of a thread block of delta_kernel.
template <typename Kernels>
__device__ __forceinline__ void clear_sums(const BackwardSyncKernelArgs &args) {
    constexpr auto cfg = Kernels::value;
    constexpr int kCount = kDeltaThreads / delta_lanes(cfg.d_head) * cfg.d_head;
    const int64_t head = int64_t(blockIdx.z) * args.heads + blockIdx.y;
    float *sums_gmem =
        args.dQ_sums + head * args.sum_rows * cfg.d_head + int64_t(blockIdx.x) * kCount;
    for (int i = threadIdx.x * 4; i < kCount; i += kDeltaThreads * 4) {
        store_gmem_16(sums_gmem + i, make_uint4(0, 0, 0, 0));
    }
}

// dQ of a thread block's queries: its sums times softmax_scale, rounded.
template <typename Kernels>
__device__ __forceinline__ void convert_sums(const BackwardSyncKernelArgs &args) {
    constexpr auto cfg = Kernels::value;
    using Sums = SumsOfWarp<Kernels>;
    const Tile tile = find_tile<Kernels, cfg.B_c>(args.cu_seqlens_q, args.cu_seqlens_k,
                                                  args.n_sequences, args.len_q, args.len_k);
    const Sums sums(args, blockIdx.y, blockIdx.x * cfg.B_c);
    float dQ_rmem[Sums::kRowTiles][Sums::kTiles][4];
#pragma unroll
    for (int i = 0; i < Sums::kRowTiles * Sums::kTiles * 4; ++i) {
        const int row_tile = i / 4 / Sums::kTiles, n = i / 4 % Sums::kTiles;
        dQ_rmem[row_tile][n][i % 4] = *sums.accumulator(row_tile, n, i % 4);
    }
    const int row = tile.first_row + sums.row;
    Element *dQ_gmem = head_gmem(args.dQ, args.dQ_strides) +
                       (tile.row_begin + row) * args.dQ_strides.row + sums.column;
    store_rows<cfg.dtype>(dQ_gmem, args.dQ_strides.row, tile.n_rows - row, dQ_rmem,
                          args.softmax_scale);
}
