#pragma once
// Step 8 of the decode family: pieces of a fixed size. Parent: d5.
//
// What changed
//   1. A piece has keys_per_piece keys, the same number in every sequence, and pieces begin at
//      multiples of it from key 0 on. Thread block z of a tile has the z-th piece of which the
//      tile sees a key.
//   2. A thread block without a piece ends at once, and combine_kernel adds up as many parts as the
//      tile has pieces, in their order.
//   3. The host passes the size: the call's own, or 1024 keys.
//
// Why: d5 cuts a sequence into as many pieces as the SMs have room for, which depends on the batch.
// Sums in fp32 depend on the cuts, so the last bits of a result depend on the other sequences. With
// cuts at fixed keys they do not. A part is 4 KB, written and read again, 8 KB beside the 128 KB of
// 256 keys: 6% more bytes, 1.6% at 1024 keys.
// Expected: 16 x 8192 keys on an H100 at 1024 keys per piece 5% slower than d5: 2% of bytes, 2 us
// of 90 for the second kernel. Where a sequence is much shorter than its table most thread blocks
// of the grid end at once, 1 us for each 132 · 8 of them.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200 140 us at 16 sequences of 8192 keys in pieces of 1024, 10% more than a
// copy; calls take d13.
//
// Phases: as d5.

#include "kernels/decode/arguments.cuh"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/scores.cuh"
#include "kernels/decode/sums.cuh"
#include "kernels/decode/tiles.cuh"
#include "sm90/launch.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/wgmma_narrow.cuh"

namespace d8 {

// The pieces of which a tile sees a key: `count` of them, from number `first` on. Keys 100 to 299
// in pieces of 128 are in three, 0 to 2.
struct Pieces {
    int first, count;

    template <int B_r>
    __device__ __forceinline__ Pieces(const Queries<B_r> &queries, const DecodeKernelArgs &args) {
        const int begin = queries.begin(args), end = queries.end(args);
        first = begin / args.keys_per_piece;
        count = begin < end ? (end - 1) / args.keys_per_piece - first + 1 : 0;
    }
};

// The parts of all pieces of this thread block's tile.
template <typename Config>
__device__ __forceinline__ Sums<Config::value.B_r, Config::value.d_head>
parts_of(const Pieces &pieces, const DecodeKernelArgs &args) {
    using Parts = Sums<Config::value.B_r, Config::value.d_head>;
    const int64_t tile = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
    return {args.parts + tile * args.pieces * Parts::kFloats, pieces.count};
}

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

    const Pieces pieces(queries, args);
    const int own = (pieces.first + int(blockIdx.z)) * args.keys_per_piece; // of this thread block
    const int first = max(own, queries.begin(args) / B_c * B_c);
    const int end = min(own + args.keys_per_piece, queries.end(args));
    Ring<cfg.slots> ring;

    let_next_launch_begin();
    if (args.pieces > 1 && int(blockIdx.z) >= pieces.count) {
        return; // combine_kernel reads no part of it
    }

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

    // 7. O, LSE, or this piece's part of them: shared → global
    if (args.pieces > 1) {
        store_part<kConsumers>(parts_of<Config>(pieces, args), blockIdx.z, sums);
    } else {
        store_outputs<cfg.dtype, kConsumers>(sums, queries, args);
    }
}

template <typename Config>
__global__ void __launch_bounds__(kWarpgroup)
    combine_kernel(const __grid_constant__ DecodeKernelArgs args) {
    constexpr DecodeKernelConfig cfg = Config::value;

    // 1. O, LSE: parts → global
    wait_for_launch_before(); // the parts are complete
    const Queries<cfg.B_r> queries(args);
    const Pieces pieces(queries, args);
    store_outputs<cfg.dtype, kWarpgroup>(parts_of<Config>(pieces, args), queries, args);
}

} // namespace d8
