#pragma once
// Step 2 of the decode family: queries as the few columns of wgmma. Parent: d1.
//
// What changed
//   1. S^T = K @ Q^T: 64 keys are the rows of a warpgroup's wgmma, and the tile's queries its 8 to
//      64 columns. A tile of 8 may be 8 heads of a group, or 2 queries of 4 heads.
//   2. O^T = V^T @ P^T: 64 columns of V are the rows. wgmma reads V transposed out of shared
//   memory,
//      where it lies as in memory; P goes there as well, in 16 bits.
//   3. TMA copies a block of K and of V, and the warpgroup waits. Behind the end of a sequence the
//      cache may have NaN: P is 0 there, but 0 · NaN is not, so that these rows of V become zeros.
//   4. A query's keys are rows of all four warps: they exchange its maximum through shared memory.
//
// Why: with queries as rows, as in attention of many queries, 64 rows of wgmma would have 4 to 8
// queries. With keys as rows none is lost. A block of 64 keys takes 8 + 8 wgmma with 8 columns, and
// a warp executes 440 instructions instead of 1600, for 8 rows instead of 4. Every byte passes
// shared memory once in and once out: 2 · 15 of 128 bytes per cycle.
//   A thread has 40 registers instead of 175, and a thread block 35 KiB of shared memory, so 6
// thread blocks fit an SM: with enough sequences some copy while others compute.
// Expected: at 16 x 8192, one thread block per SM, 1.9 TB/s: 2180 cycles of bandwidth, 700 of
// latency, and about 1000 for the chain of products, exchange and softmax. 64 x 2048: 2.7 TB/s.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at length 8192, and share of a copy that
// moves the same bytes, the measured ceiling in the harmonic mean over lengths. B_r 8, B_c 64:
// 2,903, 0.18. Cost: 40 registers per thread, 35 KiB of shared memory per block, 6 blocks per SM.
// benchmark:end
// Verdict: on an H200 1.6 times as fast as d1; at 64 x 2048 keys ahead of cuDNN, 121 us and 122.
//
// Phases: 1 barriers, Q, 2 K, V, 3 S, 4 P, 5 O, 6 sums, 7 store.

#include "kernels/decode/arguments.cuh"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/scores.cuh"
#include "kernels/decode/sums.cuh"
#include "kernels/decode/tiles.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/wgmma_narrow.cuh"

namespace d2 {

template <typename Config>
__global__ void __launch_bounds__(Config::value.n_threads())
    decode_kernel(const __grid_constant__ DecodeKernelArgs args) {
    constexpr DecodeKernelConfig cfg = Config::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kDHead = cfg.d_head;
    constexpr int kTiles = kDHead / kWgmmaM; // of the rows of O^T
    constexpr uint32_t kBlockBytes = kTileBytes<B_c, kDHead>;
    static_assert(B_c == kWgmmaM, "one warpgroup");

    extern __shared__ __align__(kPatternBytes) float smem[];
    const uint32_t K_smem = smem_address(smem); // (B_c, d_head)
    const uint32_t V_smem = K_smem + kBlockBytes; // (B_c, d_head)
    const uint32_t Q_smem = V_smem + kBlockBytes; // (B_r, d_head)
    const uint32_t P_smem = Q_smem + kTileBytes<B_r, kDHead>; // (B_r, B_c)
    const uint32_t exchange_smem = P_smem + piece_bytes(B_r); // (4, B_r)
    const uint32_t full = exchange_smem + 4 * B_r * int(sizeof(float));
    float *exchange = smem + (exchange_smem - K_smem) / sizeof(float);
    const Queries<B_r> queries(args);

    // 1. barriers; Q: global → shared
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init_fence();
    }
    load_Q<kDHead>(Q_smem, queries, cfg.n_threads(), args);
    __syncthreads(); // the barrier is initialised, and Q is complete

    const uint32_t K = wgmma_descriptor(K_smem), V = wgmma_descriptor(V_smem);
    const uint32_t Q = wgmma_descriptor(Q_smem), P = wgmma_descriptor(P_smem);
    float S_rmem[B_r / 2], O_rmem[kTiles][B_r / 2] = {};
    Statistics<B_r / 2> statistics;
    const TilePlace place = {0, queries.kv_head, queries.cache_row(args)};
    const int end = queries.end(args);
    uint32_t parity = 0;
    for (int block = queries.begin(args) / B_c * B_c; block < end; block += B_c) {
        // 2. K, V: global → shared
        if (threadIdx.x == 0) {
            barrier_expect(full, 2 * kBlockBytes);
            tma_load_tile(K_smem, args.K, full, {block, place.head, place.batch});
            tma_load_tile(V_smem, args.V, full, {block, place.head, place.batch});
        }
        barrier_wait(full, parity);
        parity ^= 1;

        // 3. S^T = K @ Q^T
        hold(S_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDHead / kWgmmaK; ++k) {
            wgmma_narrow<cfg.dtype>(S_rmem, K + column_step<B_c>(k), Q + column_step<B_r>(k),
                                    k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(S_rmem);
        limit(S_rmem, args.scale_in_cap);
        if (!queries.see_all(block, B_c, args)) {
            hide(S_rmem, queries, block, args);
        }

        // 4. P^T = 2^(S^T - m): registers → shared
        statistics.update(S_rmem, O_rmem, args.scale, exchange, 1);
        store_P<cfg.dtype>(P_smem, S_rmem);
        fence_async_proxy(); // wgmma reads P
        if (block + B_c > queries.len_k) {
            clear_rows<B_c, kDHead>(V_smem, queries.len_k - block);
        }
        named_sync(1, kWarpgroup); // wgmma reads what all warps have written

        // 5. O^T += V^T @ P^T
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            hold(O_rmem[tile]);
        }
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < B_c / kWgmmaK; ++k) {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                wgmma_narrow<cfg.dtype, true>(O_rmem[tile],
                                              V + tile * (piece_bytes(B_c) / 16) + row_step(k),
                                              P + column_step<B_r>(k), true);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            hold(O_rmem[tile]);
        }
        __syncthreads(); // no warp's product reads K, V and P any more
    }

    // 6. m, l, O: registers → shared
    over_rows(statistics.l, exchange, 1, [](float x, float y) { return x + y; });
    const Sums<B_r, kDHead> sums = {smem, 1};
    store_sums(sums, 0, statistics, O_rmem);
    __syncthreads(); // a thread reads what all have stored

    // 7. O, LSE: shared → global
    store_outputs<cfg.dtype, cfg.n_threads()>(sums, queries, args);
}

} // namespace d2
