#pragma once
// Step 3 of the decode_sync family: a cache in pages. Parent: c2.
//
// What changed
//   1. K and V may lie in pages of any number of keys, from 1 on. A table has the page of each
//      block of so many keys of a sequence. Without a table a sequence's row of the cache is its
//      only page.
//   2. Each lane knows page and place of one key of a block, and a copy asks the lane of its row.
//      They are looked up a block ahead of the copy: a load from the table has the latency of L2.
//
// Why: a server's sequences grow by a key at a time and end at any time. In rows as long as the
// longest sequence most of the memory would be empty; in pages at most a page per sequence is. A
// block of 16 keys costs one division, one load from the table and, per row of its copy, two
// shuffles: some 60 instructions of a warp beside 8 KB. The table has 4 bytes per page.
// Expected: the speed of c2 within 3% at pages of 16 and more; within 10% at pages of one key,
// whose rows of 256 bytes are two lines each.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at length 8192, and share of a copy that
// moves the same bytes, the measured ceiling in the harmonic mean over lengths. B_c 16, 4 warps:
// 3,747, 0.89. Cost: 128 registers per thread, 68 KiB of shared memory per block, 3 blocks per SM.
// benchmark:end
// Verdict: on an H200 7% to 9% slower than c2 without pages.
//
// Phases: as c2.

#include "cp_async.cuh"
#include "kernels/decode_sync/arguments.cuh"
#include "kernels/decode_sync/parts.cuh"
#include "memory.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

namespace c3 {

// Of a key: its page, or its sequence's row of the cache; and its number there. The page is -1
// where the sequence has no such key, or a window hides it from all of the tile: its page may be
// none.
struct Place {
    int page, slot;
};

// The place of the key that this lane looks up, in the block at `key`.
template <typename Kernels>
__device__ __forceinline__ Place find_place(const DecodeSyncKernelArgs &args,
                                            const Queries &queries, int key) {
    key += threadIdx.x % 32 % Kernels::value.B_c;
    if (key < queries.begin_of(0, args) || key >= queries.len_k) {
        return {-1, 0};
    }
    if (args.block_table == nullptr) {
        return {row_of_cache(args.cache_batch_idx, queries), key};
    }
    const int block = key / args.page_size;
    return {args.block_table[int64_t(queries.sequence) * args.table_blocks + block],
            key - block * args.page_size};
}

// Starts a warp's copy of a block of keys; X_gmem points to the head's first row. Rows without a
// page become zeros.
template <typename Kernels>
__device__ __forceinline__ void copy_block(uint32_t X_smem, const Element *X_gmem,
                                           const TensorStrides &strides, Place place) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.d_head), kLanesPerRow = kColumns / kChunk;
    const int lane = threadIdx.x % 32, column = lane % kLanesPerRow * kChunk;
#pragma unroll
    for (int i = 0; i < cfg.B_c; i += 32 / kLanesPerRow) {
        const int row = i + lane / kLanesPerRow;
        const int page = __shfl_sync(0xffffffff, place.page, row);
        const int slot = __shfl_sync(0xffffffff, place.slot, row);
        const bool exists = page >= 0;
        const Element *row_gmem =
            X_gmem + (exists ? page * strides.batch + slot * strides.row + column : 0);
#pragma unroll
        for (int piece = 0; piece < cfg.d_head / kColumns; ++piece) {
            cp_async_16_L2_128B(X_smem + piece_offset<cfg.B_c, kColumns>(piece) +
                                    smem_offset<kColumns>(row, column),
                                row_gmem + piece * kColumns, exists ? 16 : 0);
        }
    }
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    decode_kernel(const __grid_constant__ DecodeSyncKernelArgs args) {
    constexpr DecodeSyncKernelConfig cfg = Kernels::value;
    constexpr int B_c = cfg.B_c, kDHead = cfg.d_head, kColumns = piece_columns(kDHead);
    constexpr int kBlockBytes = B_c * kDHead * int(sizeof(Element)), kStages = cfg.stages;

    extern __shared__ __align__(128) Element smem[];
    const int warp = threadIdx.x / 32;
    const uint32_t Q_smem = smem_address(smem); // (16, d_head)
    const uint32_t K_smem = Q_smem + kRows * kDHead * int(sizeof(Element)) +
                            warp * kStages * 2 * kBlockBytes; // K_0, V_0, K_1, V_1, of this warp

    const Queries queries(args);
    uint32_t lane_offset[4], K_lane_offset[4];
    set_lane_offsets<kColumns>(lane_offset, K_lane_offset);

    // 1. Q: global → shared
    copy_queries<Kernels>(Q_smem, queries, args);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads(); // a warp reads rows that other warps have copied

    const Element *K_gmem =
        static_cast<const Element *>(args.K) + queries.kv_head * args.K_strides.head;
    const Element *V_gmem =
        static_cast<const Element *>(args.V) + queries.kv_head * args.V_strides.head;
    float O_rmem[1][kDHead / kMmaN][4] = {};
    Statistics statistics;
    const int end = queries.end_of(queries.last_row(), args);
    const int first = queries.begin_of(0, args) / B_c * B_c;
    // 2. The first K and V: global → shared
    auto copy = [&](int stage, int key, Place place) {
        if (key < end) {
            const uint32_t stage_smem = K_smem + stage * 2 * kBlockBytes;
            copy_block<Kernels>(stage_smem, K_gmem, args.K_strides, place);
            copy_block<Kernels>(stage_smem + kBlockBytes, V_gmem, args.V_strides, place);
        }
        cp_async_commit(); // of no copies, too: groups are counted
    };
    constexpr int kStep = cfg.n_warps * B_c;
    int key = first + warp * B_c, stage = 0;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        copy(i, key + i * kStep, find_place<Kernels>(args, queries, key + i * kStep));
    }
    Place next_place = find_place<Kernels>(args, queries, key + (kStages - 1) * kStep);
    for (; key < end; key += kStep) {
        cp_async_wait<kStages - 2>();
        __syncwarp(); // a lane reads rows that other lanes have copied, and none the last block
        copy(stage == 0 ? kStages - 1 : stage - 1, key + (kStages - 1) * kStep, next_place);
        next_place = find_place<Kernels>(args, queries, key + kStages * kStep);
        const uint32_t stage_smem = K_smem + stage * 2 * kBlockBytes;

        // 3. S = Q @ K^T
        float S_rmem[1][B_c / kMmaN][4] = {};
        multiply_QK<Kernels>(S_rmem, Q_smem, stage_smem, lane_offset, K_lane_offset);
        limit_and_hide(S_rmem, queries, args, key);

        // 4. P = 2^(S - m)
        update(statistics, S_rmem, O_rmem, args.scale);
        uint32_t P_rmem[B_c / kMmaK][1][4];
        round_P<cfg.dtype>(P_rmem, S_rmem);

        // 5. O += P @ V
        multiply_PV<Kernels>(O_rmem, P_rmem, stage_smem + kBlockBytes, lane_offset);
        stage = stage == kStages - 1 ? 0 : stage + 1;
    }

    // 6. m, l, O of the warps: registers → shared
    const Sums<Kernels> sums = {reinterpret_cast<float *>(smem)};
    __syncthreads(); // no warp reads Q or its block any more
    sums.store(statistics, O_rmem);
    __syncthreads(); // a thread reads what all warps have stored

    // 7. O, LSE: shared → global
    constexpr int kChunks = kDHead / kChunk;
    for (int i = threadIdx.x; i < kRows * kChunks; i += cfg.n_threads()) {
        const int row = i / kChunks, column = i % kChunks * kChunk;
        if (queries.has(row)) {
            const float2 m_and_l = sums.of_row(row);
            float own_rmem[kChunk] = {};
            sums.add_up(own_rmem, row, column, m_and_l.x);
            store_output<cfg.dtype>(own_rmem, m_and_l, queries.sequence, queries.query(row),
                                    queries.head(row), column, args);
        }
    }
}

} // namespace c3
