#pragma once
// Step 12 of the decode family: L2 before the wait. Parent: d11.
//
// What changed
//   1. Where neither lengths nor pages nor rows of the cache come from memory, a thread block finds
//      its share before it waits for the launch before it. Then it begins to load its first blocks
//      of keys into L2, as many as its ring has slots.
//   2. No value is used before the wait: L2 is where the stores of all SMs meet, so what the launch
//      before stores later is in L2 as well when the ring is filled.
//
// Why: a small call takes most of its time from the end of the launch before to the first keys in
// its ring. That is 1 us until the wait is over, 0.4 for the share, 0.5 for the tensor maps and 0.8
// for DRAM. All but the first pass before the wait here. DRAM has work while the last thread blocks
// of the launch before add up parts.
// Expected: 1.5 to 2 us less than d11 at any size, if one launch follows the other.
//
// benchmark:begin
// benchmark:end
// Verdict: kept. On an H200 123.5 us at 16 sequences of 8192 keys and 5.8 for one of 1024, where
// d7 takes 130.8 and 9.0.
//
// Phases: as d11.

#include "kernels/decode/arguments.cuh"
#include "kernels/decode/arrivals.cuh"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/scores.cuh"
#include "kernels/decode/sums.cuh"
#include "kernels/decode/tiles.cuh"
#include "sm90/launch.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/wgmma_narrow.cuh"

namespace d12 {

constexpr int kLeastUnits = 2; // of a share, so that no part is larger than the keys that it is of

// Equal shares, in a grid (tiles of a group, shares of such a tile). A unit is a block of keys for
// the tile of this thread block in its group. Units are counted along the blocks of a tile, the
// groups of a sequence, and the sequences.
template <int B_r, int B_c>
struct Shares {
    const DecodeKernelArgs &args;
    int groups; // of a sequence
    int units; // of all sequences
    int share; // units of a thread block

    // By all lanes of a warp.
    __device__ __forceinline__ explicit Shares(const DecodeKernelArgs &args) : args(args) {
        const int tiles = (args.len_q * args.heads_per_kv + B_r - 1) / B_r * args.kv_heads;
        groups = tiles / int(gridDim.x);
        units = 0;
        for (int sequence = threadIdx.x % 32; sequence < args.batch; sequence += 32) {
            units += groups * units_of(sequence);
        }
        units = __reduce_add_sync(0xffffffff, units);
        share = max((units + int(gridDim.y) - 1) / int(gridDim.y), kLeastUnits);
    }

    __device__ __forceinline__ int first_key(int len_k) const {
        return max(len_k - args.len_q - args.window_left, 0) / B_c * B_c;
    }
    __device__ __forceinline__ int units_of(int sequence) const {
        const int len_k = keys_of(sequence, args);
        return max((len_k - first_key(len_k) + B_c - 1) / B_c, 1);
    }
};

// A unit of a share, and the way to the next.
template <int B_r, int B_c>
struct Unit {
    const Shares<B_r, B_c> &shares;
    int left; // units from here to the end of the share
    int sequence, group; // of the sequence
    int own, of_tile; // among the units of the tile, and their number
    int begin, all_begin,
        all_end; // the first key that some row of the tile sees, those that all do
    bool is_first = true; // of the share
    Queries<B_r> queries;

    // The unit of this number, the first of at most `left`. By all lanes of a warp.
    __device__ __forceinline__ Unit(const Shares<B_r, B_c> &shares, int number, int left)
        : shares(shares), left(min(left, shares.units - number)), sequence(0), group(0), own(0),
          of_tile(1), queries(shares.args, 0, 0) {
        const int lane = threadIdx.x % 32;
        for (int first = 0; exists() && first < shares.args.batch; first += 32) {
            const bool has = first + lane < shares.args.batch;
            const int own_units = has ? shares.units_of(first + lane) : 0;
            int end = shares.groups * own_units; // the sum of this sequence and those before
#pragma unroll
            for (int lanes = 1; lanes < 32; lanes *= 2) {
                const int before = __shfl_up_sync(0xffffffff, end, lanes);
                end += lane >= lanes ? before : 0;
            }
            const uint32_t behind = __ballot_sync(0xffffffff, end > number);
            const int found = behind ? __ffs(behind) - 1 : 31;
            const int begin = __shfl_sync(0xffffffff, end - shares.groups * own_units, found);
            if (behind) {
                of_tile = __shfl_sync(0xffffffff, own_units, found);
                sequence = first + found;
                group = (number - begin) / of_tile;
                own = (number - begin) % of_tile;
                begin_tile();
                break;
            }
            number -= __shfl_sync(0xffffffff, end, 31);
        }
    }

    __device__ __forceinline__ void begin_tile() {
        queries = Queries<B_r>(shares.args, sequence, group * gridDim.x + blockIdx.x);
        begin = queries.begin(shares.args);
        all_begin = queries.begin_of(queries.last_row(), shares.args);
        all_end = queries.end_of(0, shares.args);
    }
    __device__ __forceinline__ bool exists() const { return left > 0; }
    // Whether it is the first or the last of its tile in this share.
    __device__ __forceinline__ bool begins() const { return is_first || own == 0; }
    __device__ __forceinline__ bool ends() const { return left == 1 || own == of_tile - 1; }
    __device__ __forceinline__ int key() const {
        return shares.first_key(queries.len_k) + own * B_c;
    }
    // Parts of keys are numbered by tile of a group, share, and group: those of a tile follow each
    // other, and no two have one number.
    __device__ __forceinline__ int part() const {
        const int of_row = gridDim.y + shares.args.batch * shares.groups;
        return blockIdx.x * of_row + blockIdx.y + sequence * shares.groups + group;
    }
    __device__ __forceinline__ void advance() {
        --left;
        is_first = false;
        if (++own == of_tile && exists()) {
            own = 0;
            if (++group == shares.groups) {
                group = 0;
                of_tile = shares.units_of(++sequence);
            }
            begin_tile();
        }
    }
};

// Begins to load the blocks of keys of the first units of a share into L2, by the lanes of a warp.
template <int kDHead, int B_r, int B_c>
__device__ __forceinline__ void prefetch_first(Unit<B_r, B_c> unit, int units,
                                               const DecodeKernelArgs &args) {
    for (int i = 0; i < units && unit.exists(); ++i) {
        const int row = threadIdx.x % 32 * args.box;
        if (row < B_c) {
            const Box box = find_box(unit.queries, unit.key() + row, unit.begin, args);
#pragma unroll
            for (int piece = 0; piece < kDHead / kPiece; ++piece) {
                prefetch_piece(args.K, piece, box);
                prefetch_piece(args.V, piece, box);
            }
        }
        unit.advance();
    }
}

// The parts of a unit's tile: `count` of them, and the share that has the first. No other tile
// begins in that share and ends in another.
struct Parts {
    int share, count;

    template <int B_r, int B_c>
    __device__ __forceinline__ explicit Parts(const Unit<B_r, B_c> &unit) {
        const int size = unit.shares.share;
        const int end = min((int(blockIdx.y) + 1) * size, unit.shares.units); // of this share
        const int first = end - unit.left - unit.own; // unit of the tile
        share = first / size;
        count = (first + unit.of_tile - 1) / size - share + 1;
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
    const bool is_planned = // without what the launch before may store
        args.cache_seqlens == nullptr && args.cache_batch_idx == nullptr &&
        args.block_table == nullptr;
    if (!is_planned) {
        wait_for_launch_before(); // what it stored is what this one reads
    }
    const Shares<B_r, B_c> shares(args);
    Unit<B_r, B_c> unit(shares, blockIdx.y * shares.share, shares.share);
    if (is_planned) {
        if (warpgroup == kWarpgroups) {
            prefetch_first<kDHead>(unit, cfg.slots, args);
        }
        wait_for_launch_before(); // L2 has what it stores from now on, too
    }

    // 2. the producer: K, V: global → shared
    if (warpgroup == kWarpgroups) {
        for (; unit.exists(); unit.advance()) {
            const uint32_t slot_smem = KV_smem + ring.slot * 2 * kBlockBytes;
            Box boxes[B_c / 32]; // of this lane
#pragma unroll
            for (int i = 0; i < B_c / 32; ++i) {
                const int key = unit.key() + (i * 32 + lane) * args.box;
                boxes[i] = find_box(unit.queries, key, unit.begin, args);
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
            has_all = unit.own == 0 && unit.left >= unit.of_tile;
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
        if (block < unit.all_begin || block + B_c > unit.all_end) {
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
                if (is_last_to_arrive(args.arrivals + blockIdx.x * gridDim.y + parts.share,
                                      parts.count, exchange, 1)) {
                    const int own = int(blockIdx.y) - parts.share; // behind the first part
                    store_sum_of_parts<cfg.dtype>(
                        Sums<B_r, kDHead>{all.O(unit.part() - own, 0), parts.count}, queries,
                        exchange, 1, args);
                }
            }
        }
    }
}

} // namespace d12
