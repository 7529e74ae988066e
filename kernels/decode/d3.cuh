#pragma once
// Step 3 of the decode family: a producer and a ring. Parent: d2.
//
// What changed
//   1. A warp of its own issues the copies. A block of K and of V has a slot, and there are as many
//      slots as fit into shared memory: 6 of 32 KiB with d_head 128, 12 of 16, or 3 of 64.
//   2. A slot has two mbarriers: full when its bytes have come, empty when the four warps that read
//      it have arrived. No barrier of the thread block is left in the loop.
//   3. One or two warpgroups multiply. With two each takes every other block, and has an m, l and O
//      of its own; they meet at the end.
//
// Why: by Little's law 3.35 TB/s at a latency of 700 ns need 2.3 MB in flight, 18 KB per SM, and
// loaded memory has a longer latency. d2 has 32 KB in flight at first and nothing while it
// computes. The ring holds 192 KB of requests, which wait only for slots.
//   A block takes 2180 cycles of an SM's share of the bandwidth, and the chain of one warpgroup
// about 1000. So one warpgroup suffices; two are for tiles of many queries. One thread block has an
// SM for itself. With 3 slots two fit, of which one begins while the other ends.
// Expected: 2.9 TB/s at 16 x 8192, where 128 thread blocks have 128 of 132 SMs. One sequence of
// 8192 keys keeps 8 SMs busy, as before: at 64 bytes per cycle each, which an SM can take from L2,
// 0.8 TB/s at most.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at length 8192, and share of a copy that
// moves the same bytes, the measured ceiling in the harmonic mean over lengths. B_r 8, B_c 64:
// 4,425, 0.31. Cost: 54 registers per thread, 195 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: on an H200 35% less time than d2 at 16 x 8192 keys, and 6% more at 64 x 2048.
//
// Phases: 1 barriers, 2 the producer: K, V, 3 S, 4 P, 5 O, 6 sums, 7 store.

#include "kernels/decode/arguments.cuh"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/scores.cuh"
#include "kernels/decode/sums.cuh"
#include "kernels/decode/tiles.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/wgmma_narrow.cuh"

namespace d3 {

template <typename Config>
__global__ void __launch_bounds__(Config::value.n_threads(), 1)
    decode_kernel(const __grid_constant__ DecodeKernelArgs args) {
    constexpr DecodeKernelConfig cfg = Config::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kDHead = cfg.d_head;
    constexpr int kTiles = kDHead / kWgmmaM; // of the rows of O^T
    constexpr uint32_t kBlockBytes = kTileBytes<B_c, kDHead>;
    constexpr int kWarpgroups = cfg.warpgroups, kConsumers = kWarpgroups * kWarpgroup; // threads
    static_assert(B_c == kWgmmaM, "a warpgroup has a block of its own");

    extern __shared__ __align__(kPatternBytes) float smem[];
    const int warpgroup = threadIdx.x / kWarpgroup, lane = threadIdx.x % 32;
    const uint32_t KV_smem = smem_address(smem); // (slots, 2, B_c, d_head)
    const uint32_t Q_smem = KV_smem + cfg.slots * 2 * kBlockBytes; // (B_r, d_head)
    const uint32_t P_smem = Q_smem + kTileBytes<B_r, kDHead> +
                            warpgroup * piece_bytes(B_r); // (B_r, B_c), of this warpgroup
    const uint32_t exchanges = Q_smem + kTileBytes<B_r, kDHead> + kWarpgroups * piece_bytes(B_r);
    const uint32_t full = exchanges + kWarpgroups * 4 * B_r * int(sizeof(float)); // one per slot
    const uint32_t empty = full + cfg.slots * kBarrierBytes; // one per slot
    float *exchange =
        smem + (exchanges - KV_smem) / sizeof(float) + warpgroup * 4 * B_r; // (4, B_r)
    const Queries<B_r> queries(args);

    const int first = queries.begin(args) / B_c * B_c, end = queries.end(args);
    Ring<cfg.slots> ring;

    // 1. barriers
    if (threadIdx.x == 0) {
        ring.init_barriers(full, empty, 4); // by one arrival per warp of the warpgroup
        barrier_init_fence();
    }
    __syncthreads(); // no thread waits at a barrier that is not initialised

    // 2. the producer: K, V: global → shared
    if (warpgroup == kWarpgroups) {
        const int head = queries.kv_head, row = queries.cache_row(args);
        for (int block = first; block < end && lane == 0; block += B_c) {
            const uint32_t slot_smem = KV_smem + ring.slot * 2 * kBlockBytes;
            barrier_wait(ring.barrier(empty), ring.lap ^ 1);
            barrier_expect(ring.barrier(full), 2 * kBlockBytes);
            tma_load_tile(slot_smem, args.K, ring.barrier(full), {block, head, row});
            tma_load_tile(slot_smem + kBlockBytes, args.V, ring.barrier(full), {block, head, row});
            ring.advance();
        }
        return;
    }
    load_Q<kDHead>(Q_smem, queries, kConsumers, args);
    named_sync(kWarpgroups + 1, kConsumers); // Q is complete

    const uint32_t K_0 = wgmma_descriptor(KV_smem);
    const uint32_t Q = wgmma_descriptor(Q_smem), P = wgmma_descriptor(P_smem);
    float S_rmem[B_r / 2], O_rmem[kTiles][B_r / 2] = {};
    Statistics<B_r / 2> statistics;
    skip(ring, warpgroup); // the blocks of others
    for (int block = first + warpgroup * B_c; block < end; block += kWarpgroups * B_c) {
        const uint32_t K = warp_uniform(K_0 + ring.slot * (2 * kBlockBytes / 16));
        const uint32_t V = K + kBlockBytes / 16;
        barrier_wait(ring.barrier(full), ring.lap);

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
        statistics.update(S_rmem, O_rmem, args.scale, exchange, warpgroup + 1);
        store_P<cfg.dtype>(P_smem, S_rmem);
        fence_async_proxy(); // wgmma reads P
        if (block + B_c > queries.len_k) {
            clear_rows<B_c, kDHead>(KV_smem + (2 * ring.slot + 1) * kBlockBytes,
                                    queries.len_k - block);
        }
        named_sync(warpgroup + 1, kWarpgroup); // wgmma reads what all warps have written

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
        if (lane == 0) {
            barrier_arrive(ring.barrier(empty)); // this warp's product reads K and V no more
        }
        skip(ring, kWarpgroups);
    }

    // 6. m, l, O: registers → shared
    over_rows(statistics.l, exchange, warpgroup + 1, [](float x, float y) { return x + y; });
    const Sums<B_r, kDHead> sums = {smem, kWarpgroups};
    named_sync(kWarpgroups + 1, kConsumers); // no warp's product reads K and V any more
    store_sums(sums, warpgroup, statistics, O_rmem);
    named_sync(kWarpgroups + 1, kConsumers); // a thread reads what all have stored

    // 7. O, LSE: shared → global
    store_outputs<cfg.dtype, kConsumers>(sums, queries, args);
}

} // namespace d3
