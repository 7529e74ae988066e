#pragma once
// Step 10 of the general family: one tile of Q. Parent: g9.
//
// What changed
//   1. A config may have one slot of Q. Its warps give it back behind the last S of a tile, so the
//      next Q is on its way while O of this tile is computed.
//   2. O is stored from registers then, without a slot: four lanes that have a row exchange
//      columns, and store 64 bytes of it at once.
//   3. The last V of a tile is loaded before the next Q, and not behind the next K.
//
// Why: at d_head 256 a slot of Q is 64 KB of 227. With two, a block of 64 keys has two slots of K
// and one of V: each V is waited for. With one there are two of both, of 80 keys. Q is read from
// shared memory for each block of keys, so 80 keys instead of 64 save a tenth of these bytes.
// The price: the first S of a tile no longer runs beside the last O of the one before, and a load
// of Q, a microsecond, is hidden by one block of O alone.
// Expected: 5% at 8192 keys, where the tile before had 128 blocks of keys, and nothing at 512.
//
// benchmark:begin
// benchmark:end
// Verdict: on an H200, d_head 256 without a mask, 7% more than g9 at 2048 keys, 12% at 8192.
//
// Phases: as g8.

#include <type_traits>

#include "kernels/general/parts.cuh"

namespace g10 {

template <typename Config>
struct Tile : TileSizes<Config> {
    using Place = std::conditional_t<Config::value.varlen, SequencePlace, TilePlace>;
    static constexpr bool kOneQ = Config::value.Q_slots == 1;
    static_assert(!kOneQ || !Config::value.ping_pong, "no turn ends with a tile");
    // Three warpgroups have too few registers to keep O.
    static constexpr bool kStoresLate = TileSizes<Config>::kConsumers < 3 && !kOneQ;
};

// 2. the producer: Q, K_{j+1}, V_j: global → shared
template <typename T>
struct Producer {
    const GeneralKernelArgs &args;
    const Scheduler<T> &scheduler;
    Memory<T> smem;
    TilePlace V_place = {-1}; // of the next V: row is its first key, -1 if there is none

    __device__ __forceinline__ void load_V() {
        if (V_place.row >= 0) {
            smem.V.load(args.V, V_place);
        }
        V_place.row = -1;
    }
    __device__ __forceinline__ void run() {
        for (int tile = blockIdx.x / T::kBlocks; tile < args.tiles; tile = scheduler.next(tile)) {
            const auto place = scheduler.place(tile);
            if (T::cfg.varlen && place.row < 0) {
                continue;
            }
            const int end = place.row + scheduler.apart.row + T::B_r;
            const int first_key = keys_of(place, args).row;
            const int blocks = scheduler.key_blocks(end, first_key);
            if (!T::kOneQ) {
                smem.Q.load_with_places(args.Q, place, scheduler.apart, smem.places);
            }
            for (int j = blocks - 1; j >= scheduler.first_block(place.row, first_key); --j) {
                const TilePlace K_place = keys_of(place, args, j * T::B_c);
                smem.K.load(args.K, K_place);
                if (T::kOneQ && j == blocks - 1) { // its slot is empty later than that of K
                    smem.Q.load_with_places(args.Q, place, scheduler.apart, smem.places);
                }
                load_V();
                V_place = K_place;
            }
            if (T::kOneQ) {
                load_V();
            }
        }
        load_V();
        cluster_fence(); // the list of taken tiles, for rows that are computed again
        smem.Q.load_with_places(args.Q, {-1}, scheduler.apart, smem.places); // no more tiles:
        if (!T::kOneQ) { // else it is empty already
            smem.Q
                .wait_empty(); // the last tile's, next in turn; this block stays until all are back
        }
        smem.K.wait_all_empty();
        smem.V.wait_all_empty();
    }
};

// Accumulators and rows are references: as members ptxas would serialise wgmma (C7515), because
// they stay in memory with all other members until their loops are unrolled.
template <typename T>
struct Consumer {
    const GeneralKernelArgs &args;
    const Scheduler<T> &scheduler;
    Memory<T> smem;
    float (&O_rmem)[T::kDV / 2], (&S_rmem)[T::B_c / 2];
    uint32_t (&P_rmem)[T::kPVSteps][4];
    float (&m)[2], (&l)[2], (&O_m)[2], (&O_l)[2]; // of S and of O

    const Sinks<T::cfg.dtype> sinks{args.sinks};
    const int warpgroup = threadIdx.x / kWarpgroup; // its rows begin at 64 · warpgroup
    const int warp_row = threadIdx.x / 32 * kWarpRows, lane = threadIdx.x % 32;
    const uint32_t Q_0 = wgmma_descriptor(smem.Q.tiles + warpgroup * piece_bytes(kWgmmaM));
    const uint32_t K_0 = wgmma_descriptor(smem.K.tiles);
    const uint32_t V_0 = wgmma_descriptor(smem.V.tiles, piece_bytes(T::B_c));
    bool few_P = false; // P has only kFewKeys columns
    TileState<T> tile; // of S
    TileState<T> done; // of O: computed and not stored; n -1 if there is none
    uint32_t stored_empty = 0; // the barrier of the slot that O is stored from, 0 for none
    typename T::Place place; // of `tile`
    uint32_t again = 0; // bit n % 32: this warp computes its rows of the n-th tile again

    __device__ __forceinline__ void take_turn() { wait_for_turn<T::cfg.ping_pong>(warpgroup); }
    __device__ __forceinline__ void end_turn() {
        end_turn_of<T::cfg.ping_pong, T::kConsumers>(warpgroup);
    }
    __device__ __forceinline__ void release_stored() {
        if (stored_empty && lane == 0) {
            tma_store_wait_read(); // the next Q may be loaded now
            cluster_barrier_arrive(in_block(stored_empty, 0));
        }
        stored_empty = 0;
    }
    // O = O / l of tile `done`, which is at `place`.
    __device__ __forceinline__ void finish_rows(typename T::Place place) {
        float inverse_l[2];
        const bool fits = finish_sums<T::kEdges>(args, place, warp_row, O_m, O_l, inverse_l, sinks);
        if (!__all_sync(0xffffffff, fits && all_finite<4>(O_rmem))) {
            again |= 1u << done.n % 32;
        }
        scale_rows(O_rmem, inverse_l);
    }
    __device__ __forceinline__ void store_O() { // through this warp's rows of the slot of Q
        if (done.n < 0) {
            return;
        }
        const auto place = smem.place(done.Q_slot);
        const uint32_t O_smem = smem.Q.tiles + done.Q_slot * smem.Q.kBytes;
        finish_rows(place);
        store_columns<T::cfg.dtype, T::B_r, T::kDV>(args, place, O_smem, warp_row, O_rmem);
        stored_empty = smem.Q.empty + done.Q_slot * kBarrierBytes;
        done.n = -1;
    }
    // A slot that is the only one is given back here, the others when O has been stored.
    __device__ __forceinline__ void release_Q(int j) { // behind S of block j
        if (T::kOneQ && j == tile.key_blocks - 1) {
            __syncwarp(); // all lanes have read the place
            smem.Q.release(lane);
        }
    }
    __device__ __forceinline__ void issue_S(auto &S) { // S = Q @ K^T
        const uint32_t K = warp_uniform(K_0 + smem.K.step()), Q = warp_uniform(Q_0 + smem.Q.step());
        smem.K.wait_full();
        hold(S);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < T::kDSteps; ++k) {
            wgmma<T::cfg.dtype>(S, Q + column_step<T::B_r>(k), K + column_step<T::B_c>(k), k > 0);
        }
        wgmma_commit();
    }
    __device__ __forceinline__ void issue_O(int j, int steps) { // O += P @ V_j
        if (T::kStoresLate && j == 0) { // the other warpgroup's turn, while O is stored
            end_turn();
            store_O();
        }
        const uint32_t V = warp_uniform(V_0 + smem.V.step());
        smem.V.wait_full();
        hold(O_rmem);
        hold(P_rmem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < steps; ++k) {
            wgmma<T::cfg.dtype>(O_rmem, P_rmem[k], V + row_step(k), j > 0 || k > 0);
        }
        wgmma_commit();
        if (!T::kStoresLate || j > 0) {
            end_turn();
        }
    }
    __device__ __forceinline__ void finish_O() {
        hold(O_rmem);
        hold(P_rmem);
        smem.V.release(lane);
    }
    __device__ __forceinline__ void next_tile() {
        smem.Q.wait_full();
        place = smem.place(smem.Q.ring.slot);
        const int end = place.row + (1 - scheduler.rank) * scheduler.apart.row + T::B_r;
        const int first_key = tile.first_key = keys_of(place, args).row;
        tile.first_block = scheduler.first_block(end - scheduler.apart.row - T::B_r, first_key);
        tile.key_blocks =
            place.row < 0 ? 0 : scheduler.key_blocks(end, first_key) - tile.first_block;
        tile.query = place.row + warp_row + lane / 4;
        if (T::kMostUnseen > 0 && tile.key_blocks > 0) {
            const int own_end = place.row + (warpgroup + 1) * kWgmmaM;
            const int seen = scheduler.key_blocks(own_end, first_key) - tile.first_block;
            tile.unseen_blocks = __reduce_max_sync(0xffffffff, tile.key_blocks - seen); // in all
            tile.key_blocks -= tile.unseen_blocks;
            for (int i = 0; i < tile.unseen_blocks; ++i) {
                smem.K.skip(lane);
            }
        }
    }
    __device__ __forceinline__ void wait_for_others() { // until they have begun with the blocks
        for (int i = 0; i < tile.unseen_blocks; ++i) { // that only they see
            take_turn();
            end_turn();
            smem.V.skip(lane);
        }
    }
    __device__ __forceinline__ void next_block(int j, int steps) {
        // 4. S = Q @ K_j^T; O / l of the last tile; O += P @ V_{j-1}
        take_turn();
        issue_S(S_rmem);
        issue_O(j - 1, steps);
        wgmma_wait<1>();
        hold(S_rmem);
        smem.K.release(lane);
        release_Q(j);
        release_stored(); // the Q of the next tile may wait for this slot

        // 5. l, P = 2^(S - m); in fp16 m, P, O = O · rescale if m must grow
        float rescale[2];
        const bool raises =
            T::kMoves && j == 1 && __any_sync(0xffffffff, tile.unseen(1, args) >= 0);
        bool grows = false;
        limit<T::cfg.softcap>(S_rmem, args.scale_in_cap);
        if (raises || (T::cfg.window && tile.begins_behind(j, args))) {
            hide_keys<T::kEdges>(S_rmem, args, tile.query, tile.end_of(j + 1));
        }
        if (raises) { // for rows that have seen no key yet
            softmax_again(S_rmem, args.scale, m, l, rescale);
        } else {
            grows = softmax<T::cfg.dtype>(S_rmem, args.scale, m, l);
        }
        wgmma_wait<0>();
        finish_O();
        if (grows) {
            grow(S_rmem, m, l, rescale);
        }
        if (grows || raises) {
            scale_rows(O_rmem, rescale);
        }
        few_P = pack_rows<T::cfg.dtype>(P_rmem, S_rmem);
    }
    // A tile begins: S = Q @ K_0^T beside O += P @ V of the tile before, if any; then P.
    __device__ __forceinline__ void begin_with(auto &S, int last_j) {
        issue_S(S);
        if (last_j >= 0) {
            issue_O(last_j, T::kPVSteps);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        hold(S);
        smem.K.release(lane);
        release_Q(0);
        limit<T::cfg.softcap>(S, args.scale_in_cap);
        if (tile.unseen(0, args) > 0 || (T::cfg.window && tile.begins_behind(0, args))) {
            hide_keys<T::kEdges>(S, args, tile.query, tile.end_of(1));
        }
        softmax_first(S, args.scale, m, l);
        if (last_j >= 0) {
            wgmma_wait<0>();
            finish_O();
        }
        few_P = pack_rows<T::cfg.dtype>(P_rmem, S);
    }
    __device__ __forceinline__ void begin(int last_j) {
        const int seen = scheduler.keys(tile.row(kWgmmaM - 1));
        if (T::kFew && __all_sync(0xffffffff, seen - tile.end_of(1) <= kFewKeys)) { // of block 0
            float S_few[kFewKeys / 2];
            begin_with(S_few, last_j);
        } else {
            begin_with(S_rmem, last_j);
        }
    }
    __device__ __forceinline__ void run() {
        if (warpgroup == T::kConsumers - 1) {
            end_turn(); // the first turn is warpgroup 0's
        }
        // 3. S = Q @ K_0^T, P = 2^(S - m), of the first tile
        next_tile();
        if (T::cfg.varlen && tile.key_blocks == 0) { // all slots of this block were empty
            if (warpgroup == 0) {
                take_turn();
            }
            return;
        }
        begin(-1);
        for (int n = 0; tile.key_blocks > 0; ++n) {
            wait_for_others();
            if (tile.key_blocks > 1) {
                few_P ? next_block(1, kFewKeys / kWgmmaK) : next_block(1, T::kPVSteps);
            }
            for (int j = 2; j < tile.key_blocks; ++j) {
                next_block(j, T::kPVSteps);
            }

            // 6. S = Q @ K_0^T of the next tile, O += P @ V
            if (tile.key_blocks == 1 && !T::kOneQ) {
                store_O();
            }
            release_stored();
            tile.Q_slot = smem.Q.ring.slot;
            done = tile;
            for (int half = 0; half < 2; ++half) {
                O_m[half] = m[half];
                O_l[half] = l[half];
            }
            if constexpr (T::kOneQ) { // which is loaded meanwhile
                issue_O(done.key_blocks - 1, T::kPVSteps);
                wgmma_wait<0>();
                finish_O();
                done.n = n;
                finish_rows(place);
                store_from_registers<T::cfg.dtype, T::kDV>(args, place, warp_row, O_rmem);
                next_tile();
                if (tile.key_blocks > 0) {
                    begin(-1);
                }
                continue;
            }
            smem.Q.ring.advance();
            next_tile();
            take_turn();
            if (tile.key_blocks > 0) {
                begin(done.key_blocks - 1);
            } else {
                issue_O(done.key_blocks - 1, T::kPVSteps);
                wgmma_wait<0>();
                finish_O();
            }
            done.n = n;
            if (!T::kStoresLate) {
                store_O();
            }
        }
        if (!T::kOneQ) {
            store_O();
        }
        if (warpgroup == 0) {
            take_turn(); // the turn left over: no barrier may stay half complete
        }
        release_stored(); // after its end another thread block may have this memory

        // 7. rows that left the range of fp32, computed again
        if (again) {
            if (lane == 0) {
                tma_store_wait(); // the stores of O have ended, and can be overwritten
            }
            __syncwarp();
            auto place_of = [&](int number) {
                auto place = scheduler.place(number);
                if (T::cfg.varlen && place.row < 0) {
                    return place;
                }
                place.row += scheduler.rank * scheduler.apart.row + warp_row;
                place.head += scheduler.rank * scheduler.apart.head;
                return place;
            };
            compute_again<T>(args, again, place_of, sinks);
        }
    }
};

template <typename Config>
__global__ void __cluster_dims__(Config::value.cluster, 1, 1)
    __launch_bounds__(Config::value.n_threads(), 1)
        forward_kernel(const __grid_constant__ GeneralKernelArgs args) {
    using T = Tile<Config>;
    extern __shared__ __align__(kPatternBytes) Element shared[];
    const Memory<T> smem(smem_address(shared));
    const Scheduler<T> scheduler{args};

    // 1. barriers
    if (threadIdx.x == 0) {
        smem.init_barriers();
    }
    cluster_sync_relaxed(); // no thread waits at a barrier that is not initialised
    let_next_launch_begin();
    wait_for_launch_before(); // it may write what is read here, and read what is written

    if (threadIdx.x / kWarpgroup == T::kConsumers) {
        give_registers<(T::kConsumers > 2 ? 32 : T::kMoves || T::cfg.varlen ? 40 : 24)>();
        if (scheduler.rank == 0 && threadIdx.x == T::kConsumers * kWarpgroup) {
            Producer<T>{args, scheduler, smem}.run();
        }
        return;
    }
    constexpr int kRegisters[] = {240, T::kMoves || T::cfg.varlen ? 232 : 240, 160, 112};
    take_registers<kRegisters[T::kConsumers - 1]>();
    float O_rmem[T::kDV / 2], S_rmem[T::B_c / 2], m[2], l[2], O_m[2] = {}, O_l[2] = {};
    uint32_t P_rmem[T::kPVSteps][4];
    Consumer<T>{args, scheduler, smem, O_rmem, S_rmem, P_rmem, m, l, O_m, O_l}.run();
}

} // namespace g10
