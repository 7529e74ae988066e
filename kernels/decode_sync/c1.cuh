#pragma once
// Step 1 of the decode_sync family: the base. Attention of the last queries of a sequence on all of
// its keys, which lie in a cache.
//
//   O = softmax(Q K^T · scale) V
//
// Every byte of K and V is read once and serves the few queries that share it: 2 · 2 · d_head bytes
// per key for 4 · d_head FLOP per query. With 4 queries that is 4 FLOP per byte, where an H100 has
// 295 in its tensor cores. Only bytes count here.
//
// The parts
//   1. A thread block has one sequence and one head of K. The queries of all heads that share it
//      are rows of one tile of 16, which `mma` multiplies at once; rows that are none are zeros.
//   2. Each warp has blocks of 16 keys of its own, every fourth. It copies a block of K and V,
//      waits for it, and multiplies. So the loop has no barrier of the thread block.
//   3. Each warp has its own m, l and O. At the end they meet in shared memory.
//   4. Lengths, rows of the cache, masks, softcap, sinks and LSE come with the call.
//
// Why it is slow: a warp waits for the whole latency of each block, and nothing of it is in flight
// while it multiplies. A warp has 8 KB in flight, a thread block 32 KB; at 600 ns, 54 GB/s each.
// A batch of 16 with 8 heads is 128 thread blocks for 132 SMs: 7 TB/s would need half of that, but
// the latency grows under load, and products and the end of each wait are added to it. One
// sequence has 8 thread blocks: 124 SMs idle.
// Expected: half of a copy's speed at 16 x 8192 on an H100, 1.5 TB/s; one sequence 0.2 TB/s.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at length 8192, and share of a copy that
// moves the same bytes, the measured ceiling in the harmonic mean over lengths. B_c 16, 4 warps:
// 3,021, 0.85. Cost: 128 registers per thread, 36 KiB of shared memory per block, 4 blocks per SM.
// benchmark:end
// Verdict: on an H200 177 us for 16 sequences of 8192 keys, 123 for 64 of 2048, where cuDNN takes
// 119 and 122.
//
// Phases: 1 Q, 2 K, V, 3 S, 4 P, 5 O, 6 sum over warps, 7 store.

#include "cp_async.cuh"
#include "kernels/decode_sync/arguments.cuh"
#include "kernels/decode_sync/parts.cuh"
#include "memory.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"

namespace c1 {

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
    constexpr int kBlockBytes = B_c * kDHead * int(sizeof(Element));

    extern __shared__ __align__(128) Element smem[];
    const int warp = threadIdx.x / 32;
    const uint32_t Q_smem = smem_address(smem); // (16, d_head)
    const uint32_t K_smem = Q_smem + kRows * kDHead * int(sizeof(Element)) +
                            warp * 2 * kBlockBytes; // (B_c, d_head), of this warp
    const uint32_t V_smem = K_smem + kBlockBytes; // (B_c, d_head)

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
    for (int key = first + warp * B_c; key < end; key += cfg.n_warps * B_c) {
        // 2. K, V: global → shared
        __syncwarp(); // no lane reads the block before this one any more
        copy_block<Kernels>(K_smem, K_gmem, args.K_strides.row, key, queries.len_k);
        copy_block<Kernels>(V_smem, V_gmem, args.V_strides.row, key, queries.len_k);
        cp_async_commit();
        cp_async_wait<0>();
        __syncwarp(); // a lane reads rows that other lanes have copied

        // 3. S = Q @ K^T
        float S_rmem[1][B_c / kMmaN][4] = {};
        multiply_QK<Kernels>(S_rmem, Q_smem, K_smem, lane_offset, K_lane_offset);
        limit_and_hide(S_rmem, queries, args, key);

        // 4. P = 2^(S - m)
        update(statistics, S_rmem, O_rmem, args.scale);
        uint32_t P_rmem[B_c / kMmaK][1][4];
        round_P<cfg.dtype>(P_rmem, S_rmem);

        // 5. O += P @ V
        multiply_PV<Kernels>(O_rmem, P_rmem, V_smem, lane_offset);
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

} // namespace c1
