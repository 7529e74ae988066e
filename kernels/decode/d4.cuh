#pragma once
// Step 4 of the decode family: pages by TMA. Parent: d3.
//
// What changed
//   1. The last dimension of the tensor maps is the page, and a box is as many keys of 64 columns
//      as divide both a block and a page: 64 of a page of 256 or of a cache without pages, 16 of a
//      page of 16 or 48, 1 of a page of 3. So no box crosses a page's end, whatever the page size.
//   2. Each lane of the producer looks up the page of a box's first key, and issues the copies of
//      that box. It looks up before it waits for the slot.
//   3. The box of a key behind the sequence's end, or of keys that a window hides, has a page
//      behind the last: TMA fills its place with zeros, and reads nothing.
//
// Why: boxes of one piece of 64 columns may begin at any row of a tile, since the swizzle follows
// the address. A block of 64 keys is 4 boxes without pages, 16 with pages of 16, and 256 with pages
// of 1: one per 136 cycles and one per 8 of the 2180 cycles that its bytes take. Copies by cp.async
// would be 2048 of 16 bytes, with an address each.
// Expected: as d3 without pages; within 2% of that with pages of 16 and 64; 2 TB/s with pages of 1,
// where rows of 128 bytes are read in no order.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at length 8192, and share of a copy that
// moves the same bytes, the measured ceiling in the harmonic mean over lengths. B_r 8, B_c 64:
// 4,406, 0.30. Cost: 54 registers per thread, 195 KiB of shared memory per block, 1 block per SM.
// benchmark:end
// Verdict: on an H200 within 1% of d3 at 16 x 8192 keys. Pages of 16 cost d5 15%, of 64 2%.
//
// Phases: as d3.

#include "kernels/decode/arguments.cuh"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/scores.cuh"
#include "kernels/decode/sums.cuh"
#include "kernels/decode/tiles.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/wgmma_narrow.cuh"

namespace d4 {

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
        for (int block = first; block < end; block += B_c) {
            const uint32_t slot_smem = KV_smem + ring.slot * 2 * kBlockBytes;
            Box boxes[B_c / 32]; // of this lane
#pragma unroll
            for (int i = 0; i < B_c / 32; ++i) {
                boxes[i] = find_box(queries, block + (i * 32 + lane) * args.box, args);
            }
            if (lane == 0) {
                barrier_wait(ring.barrier(empty), ring.lap ^ 1);
                barrier_expect(ring.barrier(full), 2 * kBlockBytes);
            }
            __syncwarp(); // the slot is empty, and the bytes are expected
#pragma unroll
            for (int i = 0; i < B_c / 32; ++i) {
                const int row = (i * 32 + lane) * args.box;
                if (row < B_c) {
                    load_box<B_c, kDHead>(slot_smem, args.K, ring.barrier(full), row, boxes[i]);
                    load_box<B_c, kDHead>(slot_smem + kBlockBytes, args.V, ring.barrier(full), row,
                                          boxes[i]);
                }
            }
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

} // namespace d4
