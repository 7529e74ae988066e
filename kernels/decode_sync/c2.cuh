#pragma once
// Step 2 of the decode_sync family: the next blocks in flight. Parent: c1.
//
// What changed
//   1. A warp has room for several blocks of K and V, a ring. While it multiplies one, the others
//      are being copied; it waits for the oldest alone.
//   2. A block is copied into the place of the one that was multiplied last, as soon as the next
//      has landed. Copies, waits and places are the warp's own: still no barrier of the block.
//
// Why: bandwidth is bytes in flight over latency. At 600 to 800 ns under load an H100's 3.35 TB/s
// are 2.0 to 2.7 MB in flight, 15 to 20 KB per SM. c1 has 32 KB per SM while it waits and none
// while it multiplies. Here 32 KB stay in flight per thread block with two places, 64 KB with
// three.
// Expected: 1.5 times the speed of c1 at 16 x 8192 on an H100, 2.3 TB/s; as much for one sequence,
// whose 8 thread blocks are bound by their own latency: 0.4 TB/s.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at length 8192, and share of a copy that
// moves the same bytes, the measured ceiling in the harmonic mean over lengths. B_c 16, 4 warps:
// 3,996, 0.96. Cost: 124 registers per thread, 68 KiB of shared memory per block, 3 blocks per SM.
// benchmark:end
// Verdict: on an H200 25% faster than c1 at 16 x 8192 keys, and 6% slower at 64 x 2048.
//
// Phases: as c1; 2 also copies the blocks before the first.

#include "cp_async.cuh"
#include "kernels/decode_sync/arguments.cuh"
#include "kernels/decode_sync/parts.cuh"
#include "memory.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

namespace c2 {

// Starts a warp's copy of the block of keys at `key`; X_gmem points to the head's first key. Rows
// behind the sequence's end become zeros.
template <typename Kernels>
__device__ __forceinline__ void copy_block(uint32_t X_smem, const Element *X_gmem,
                                           int64_t row_stride, int key, int len_k) {
    constexpr auto cfg = Kernels::value;
    constexpr int kColumns = piece_columns(cfg.d_head), kLanesPerRow = kColumns / kChunk;
    const int lane = threadIdx.x % 32, column = lane % kLanesPerRow * kChunk;
#pragma unroll
    for (int i = 0; i < cfg.B_c; i += 32 / kLanesPerRow) {
        const int row = i + lane / kLanesPerRow;
        const bool exists = key + row < len_k;
        const Element *row_gmem = X_gmem + (exists ? (key + row) * row_stride + column : 0);
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

    const Element *K_gmem = cache_gmem(args.K, args.K_strides, queries, args.cache_batch_idx);
    const Element *V_gmem = cache_gmem(args.V, args.V_strides, queries, args.cache_batch_idx);
    float O_rmem[1][kDHead / kMmaN][4] = {};
    Statistics statistics;
    const int end = queries.end_of(queries.last_row(), args);
    const int first = queries.begin_of(0, args) / B_c * B_c;
    // 2. The first K and V: global → shared
    auto copy = [&](int stage, int key) {
        if (key < end) {
            const uint32_t stage_smem = K_smem + stage * 2 * kBlockBytes;
            copy_block<Kernels>(stage_smem, K_gmem, args.K_strides.row, key, queries.len_k);
            copy_block<Kernels>(stage_smem + kBlockBytes, V_gmem, args.V_strides.row, key,
                                queries.len_k);
        }
        cp_async_commit(); // of no copies, too: groups are counted
    };
    constexpr int kStep = cfg.n_warps * B_c;
    int key = first + warp * B_c, stage = 0;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        copy(i, key + i * kStep);
    }
    for (; key < end; key += kStep) {
        cp_async_wait<kStages - 2>();
        __syncwarp(); // a lane reads rows that other lanes have copied, and none the last block
        copy(stage == 0 ? kStages - 1 : stage - 1, key + (kStages - 1) * kStep);
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

} // namespace c2
