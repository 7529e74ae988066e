#pragma once
// Step 9 of the decode family: one launch. Parent: d7.
//
// What changed
//   1. A thread block that has stored a part of a tile counts it, with release and acquire at the
//      scope of the GPU. The one that counts the last part adds up all of them, in their order: its
//      warpgroup does, while its producer goes on with the next tile.
//   2. The counter is an int per share, since no two tiles begin in one share and end in another.
//      The atomic instruction that counts the last part sets it to zero, for the next call.
//   3. combine_kernel is left out.
//
// Why: straight lines through the times at 8 and 32 heads of K (16 sequences of 8192 keys, an H200)
// give d7 4.60 TB/s and 13.6 us that do not depend on the bytes. They give d5, which has one launch
// there, 4.54 TB/s and 3 us. So the 8% are no bandwidth. The second kernel of d7 begins when all
// thread blocks of the first have ended. It finds the lengths and its share anew, and reads m and
// l, then O. No byte of K is loaded meanwhile, nor in the next call.
// Expected: 5 to 8 us less than d7 at any size: 16 x 8192 keys in 123 us instead of 131 on an H200,
// one sequence of 1024 in 6.5 instead of 9.
//
// benchmark:begin
// benchmark:end
// Verdict: not measured yet.
//
// Phases: as d7; 6 adds up the parts of a tile, too.

#include "kernels/decode/arguments.cuh"
#include "kernels/decode/arrivals.cuh"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/scores.cuh"
#include "kernels/decode/shares.cuh"
#include "kernels/decode/sums.cuh"
#include "kernels/decode/tiles.cuh"
#include "sm90/launch.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/wgmma_narrow.cuh"

namespace d9 {

// The parts of a unit's tile: `count` of them, and the share that has the first. No other tile
// begins in that share and ends in another.
struct Parts {
    int share, count;

    template <int B_r, int B_c>
    __device__ __forceinline__ explicit Parts(const Unit<B_r, B_c> &unit) {
        const int size = unit.shares.share;
        const int end = min((int(blockIdx.x) + 1) * size, unit.shares.units); // of this share
        const int first = end - unit.left - unit.block; // unit of the tile
        share = first / size;
        count = (first + unit.blocks - 1) / size - share + 1;
    }
};

template <typename Config>
__global__ void __launch_bounds__(Config::value.n_threads(), 1)
    decode_kernel(const __grid_constant__ DecodeKernelArgs args) {
    constexpr DecodeKernelConfig cfg = Config::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kDHead = cfg.d_head;
    constexpr int kTiles = kDHead / kWgmmaM; // of the rows of O^T
    constexpr uint32_t kBlockBytes = kTileBytes<B_c, kDHead>;
    constexpr int kWarpgroups = cfg.warpgroups, kConsumers = kWarpgroups * kWarpgroup; // threads
    static_assert(B_c == kWgmmaM && kWarpgroups == 1, "the warpgroup has all blocks");

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
    Ring<cfg.slots> ring;

    let_next_launch_begin();

    // 1. barriers
    if (threadIdx.x == 0) {
        ring.init_barriers(full, empty, 4); // by one arrival per warp of the warpgroup
        barrier_init_fence();
    }
    __syncthreads(); // no thread waits at a barrier that is not initialised
    wait_for_launch_before(); // what it stored is what this one reads
    const Shares<B_r, B_c> shares(args);
    Unit<B_r, B_c> unit(shares, blockIdx.x * shares.share, shares.share);

    // 2. the producer: K, V: global → shared
    if (warpgroup == kWarpgroups) {
        for (; unit.exists(); unit.advance()) {
            const uint32_t slot_smem = KV_smem + ring.slot * 2 * kBlockBytes;
            Box boxes[B_c / 32]; // of this lane
#pragma unroll
            for (int i = 0; i < B_c / 32; ++i) {
                boxes[i] = find_box(unit.queries, unit.key() + (i * 32 + lane) * args.box, args);
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
    const uint32_t K_0 = wgmma_descriptor(KV_smem);
    const uint32_t Q = wgmma_descriptor(Q_smem), P = wgmma_descriptor(P_smem);
    float S_rmem[B_r / 2], O_rmem[kTiles][B_r / 2];
    Statistics<B_r / 2> statistics;
    bool has_all = false; // keys of the tile
    for (; unit.exists(); unit.advance()) {
        const Queries<B_r> &queries = unit.queries;
        const int block = unit.key();
        if (unit.begins()) {
            load_Q<kDHead>(Q_smem, queries, kConsumers, args);
            named_sync(kWarpgroups + 1, kConsumers); // Q is complete
            has_all = unit.block == 0 && unit.left >= unit.blocks;
            statistics = {};
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                fill(O_rmem[tile], 0);
            }
        }
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

        // 6. O, LSE, or this share's part of them: registers → global
        if (unit.ends()) {
            over_rows(statistics.l, exchange, 1, [](float x, float y) { return x + y; });
            if (has_all) {
                store_rows<cfg.dtype>(statistics, O_rmem, queries, args);
            } else {
                const Sums<B_r, kDHead> all = {args.parts, 1};
                store_sums(all, unit.part(), statistics, O_rmem);
                const Parts parts(unit);
                if (is_last_to_arrive(args.arrivals + parts.share, parts.count, exchange, 1)) {
                    const int own = int(blockIdx.x) - parts.share; // behind the first part
                    store_sum_of_parts<cfg.dtype>(
                        Sums<B_r, kDHead>{all.O(unit.part() - own, 0), parts.count}, queries,
                        exchange, 1, args);
                }
            }
        }
    }
}

} // namespace d9
