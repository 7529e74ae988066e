#pragma once
// The parts that no step of the backward family is about, or a step before: the places of blocks,
// the sums of dO · O, and the way of accumulators to global memory.

#include "elements.cuh"
#include "flash_attention.cuh"
#include "kernels/backward/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

constexpr int kDHead = 128;
constexpr int kDPieces = kDHead / kPiece;
constexpr int kDSteps = kDHead / kWgmmaK;
constexpr int kWarpRows = kWgmmaM / 4;
template <int kRows>
constexpr uint32_t kTileBytes = kDPieces * piece_bytes(kRows); // a tile (kRows, d_head)

// The place of kRows of a head's rows, by default of those of the thread block. Blocks of one head
// are neighbours, so they find the head's other tensors in the L2 cache.
template <int kRows>
__device__ __forceinline__ TilePlace own_place(int length, int heads, uint32_t tile = blockIdx.x) {
    const int blocks = length / kRows, head = tile / blocks;
    return {int(tile % blocks) * kRows, head % heads, head / heads};
}

// The place of a tile of keys by its number. Behind the last tile the row is -1.
template <int kRows>
__device__ __forceinline__ TilePlace tile_place(const BackwardKernelArgs &args, int tile) {
    return tile < args.tiles ? own_place<kRows>(args.len_k, args.heads / args.heads_per_kv, tile)
                             : TilePlace{-1};
}

// The same of a causal tile, of `length` keys in tiles of kRows, in the order of step b10.
template <int kRows>
__device__ __forceinline__ TilePlace causal_place(const BackwardKernelArgs &args, int length,
                                                  int tile) {
    const int kv_heads = args.heads / args.heads_per_kv, head_tiles = length / kRows;
    const int before = args.tiles / head_tiles - args.last_heads; // heads of the other groups
    const int group = tile / (args.head_group * head_tiles) * args.head_group;
    const int first = tile < before * head_tiles ? group : before;
    const int heads = first < before ? min(args.head_group, before - first) : args.last_heads;
    tile -= first * head_tiles;
    const int head = first + tile % heads;
    return {tile / heads * kRows, head % kv_heads, head / kv_heads};
}

// The index of a query in LSE and delta, and where a head has another number of rows.
__device__ __forceinline__ int64_t row_index(const BackwardKernelArgs &args, TilePlace place) {
    return (int64_t(place.batch) * args.heads + place.head) * args.len_q + place.row;
}
__device__ __forceinline__ int64_t row_index(const BackwardKernelArgs &args, TilePlace place,
                                             int rows) {
    return (int64_t(place.batch) * args.heads + place.head) * rows + place.row;
}

// LSE of a query as a logarithm to base 2. A query that sees no key has -infinity, for which
// +infinity makes its P 0.
__device__ __forceinline__ float load_lse(const BackwardKernelArgs &args, int64_t row) {
    const float lse = args.lse[row];
    return lse == -INFINITY ? INFINITY : lse * kLog2e;
}

// delta of a query is the sum of its dO · O. 16 lanes have 8 columns each.
constexpr int kDeltaThreads = 256, kDeltaLanes = kDHead / 8;
constexpr int kDeltaRows = kDeltaThreads / kDeltaLanes; // of a thread block
__device__ __forceinline__ TilePlace delta_place(const BackwardKernelArgs &args) {
    TilePlace place = own_place<kDeltaRows>(args.len_q, args.heads);
    place.row += threadIdx.x / kDeltaLanes;
    return place;
}
template <DType kDType>
__device__ __forceinline__ float row_delta(const BackwardKernelArgs &args, TilePlace place) {
    const int column = threadIdx.x % kDeltaLanes * 8;
    auto load = [&](float (&x_rmem)[8], const void *tensor, const TensorStrides &strides) {
        const Element *row = static_cast<const Element *>(tensor) + place.batch * strides.batch +
                             place.row * strides.row + place.head * strides.head;
        unpack_chunk<kDType>(x_rmem, *reinterpret_cast<const uint4 *>(row + column));
    };
    float dO_rmem[8], O_rmem[8], sum = 0;
    load(dO_rmem, args.dO_gmem, args.dO_strides);
    load(O_rmem, args.O_gmem, args.O_strides);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sum = fmaf(dO_rmem[i], O_rmem[i], sum);
    }
#pragma unroll
    for (int lanes = 1; lanes < kDeltaLanes; lanes *= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    }
    return sum;
}
template <DType kDType>
__device__ __forceinline__ void store_delta(const BackwardKernelArgs &args) {
    const TilePlace place = delta_place(args);
    const float delta = row_delta<kDType>(args, place);
    if (threadIdx.x % kDeltaLanes == 0) {
        args.delta[row_index(args, place)] = delta;
    }
}

// The first values of sums whose columns are queries: columns 8n + 2t and 8n + 2t + 1 of a lane.
template <int kCount>
__device__ __forceinline__ void begin(float (&D_rmem)[kCount], const float *of_queries) {
    const float2 *pairs = reinterpret_cast<const float2 *>(of_queries) + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const float2 pair = pairs[i];
        D_rmem[i] = D_rmem[i + 2] = pair.x;
        D_rmem[i + 1] = D_rmem[i + 3] = pair.y;
    }
}

// Logits of keys behind the query become -infinity in a block on the diagonal. Rows are keys, the
// warp's from warp_row on; columns are queries.
template <int kCount>
__device__ __forceinline__ void hide_keys(float (&S_rmem)[kCount], int warp_row) {
    const int lane = threadIdx.x % 32, first = warp_row + lane / 4 - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i / 4 * 8 + i % 2 < first + i / 2 % 2 * 8) {
            S_rmem[i] = -INFINITY;
        }
    }
}

// P = 2^(S · scale) in the place of S.
template <int kCount>
__device__ __forceinline__ void exponentiate(float (&S_rmem)[kCount], float scale) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        S_rmem[i] = exp2_approx(S_rmem[i] * scale);
    }
}

// Keeps all of P before what follows: a warp barrier whose mask comes from P, as in h18. No P has a
// sign, so the mask is always all lanes, but ptxas cannot know that.
template <int kCount>
__device__ __forceinline__ void keep_before(const float (&P_rmem)[kCount]) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        bits |= __float_as_uint(P_rmem[i]);
    }
    __syncwarp(__ballot_sync(0xffffffff, int(bits) >= 0));
}

// dS = P · dP in the place of dP. P_rmem[k][i] has P of 8k + 2i and 8k + 2i + 1.
template <DType kDType, int kSteps>
__device__ __forceinline__ void weigh(const uint32_t (&P_rmem)[kSteps][4],
                                      float (&dP_rmem)[8 * kSteps]) {
#pragma unroll
    for (int i = 0; i < 8 * kSteps; ++i) {
        dP_rmem[i] *= to_float<kDType>(Element(P_rmem[i / 8][i / 2 % 4] >> i % 2 * 16));
    }
}

// Stores accumulators (16, 16) of a warp, packed in 16 bits, transposed: column 16k + r of theirs
// becomes row 16k + r of a tile of kRows rows, in columns column … column + 15. Lane n gives the
// address of row n % 8 of the n / 8-th of four matrices (8, 8), whose order is that of `packed`.
template <int kRows>
__device__ __forceinline__ void store_transposed(uint32_t tile_smem, int column, int k,
                                                 const uint32_t (&packed)[4]) {
    const int lane = threadIdx.x % 32;
    const int row = 16 * k + lane / 16 * 8 + lane % 8;
    const int chunk = (column / 8 + lane / 8 % 2) ^ row % 8;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     tile_smem + row * kRowBytes + chunk * kChunkBytes),
                 "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                 : "memory");
}

// Rounds 16 rows of a warp, times a factor, to 16 bits and stores them through rows warp_row …
// warp_row + 15 of a tile of kRows rows in shared memory that nothing else reads any more. One lane
// issues the copies as one group.
template <DType kDType, int kRows>
__device__ __forceinline__ void store_rows(const CUtensorMap &tensor, TilePlace place,
                                           uint32_t tile_smem, int warp_row,
                                           float (&D_rmem)[kDHead / 2], float factor) {
    scale_rows(D_rmem, {factor, factor});
#pragma unroll
    for (int k = 0; k < kDSteps; ++k) {
        uint32_t packed[4];
        pack_fragment<kDType>(packed, D_rmem, k);
        store_fragment<kRows>(tile_smem, warp_row, k, packed);
    }
    fence_async_proxy();
    __syncwarp(); // one lane stores the rows that all lanes have written
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int piece = 0; piece < kDPieces; ++piece) {
            tma_store_piece(tensor, tile_smem + piece * piece_bytes(kRows) + warp_row * kRowBytes,
                            place.row + warp_row, piece, place.head, place.batch);
        }
        tma_store_commit();
    }
}

// Loads a tile, if there is one: if not, the row of its place is -1, and the barrier's phase ends
// without it.
template <uint32_t kBytes>
__device__ __forceinline__ void load_tile(uint32_t tile_smem, const CUtensorMap &tensor,
                                          uint32_t barrier, TilePlace place) {
    barrier_expect(barrier, place.row < 0 ? 0 : kBytes);
    if (place.row >= 0) {
        tma_load_tile(tile_smem, tensor, barrier, place);
    }
}

// The same into the next slot of a ring, once it is empty. The place goes with the tile.
template <uint32_t kBytes, int kSlots>
__device__ __forceinline__ void load_with_place(Ring<kSlots> &ring, uint32_t full, uint32_t empty,
                                                uint32_t slots_smem, const CUtensorMap &tensor,
                                                uint32_t places_smem, TilePlace place) {
    barrier_wait(ring.barrier(empty), ring.lap ^ 1);
    store_place(places_smem + ring.slot * kPlaceBytes, place);
    load_tile<kBytes>(slots_smem + ring.slot * kBytes, tensor, ring.barrier(full), place);
    ring.advance();
}

// Waits for a tile and returns its place.
template <int kSlots>
__device__ __forceinline__ TilePlace wait_for_place(const Ring<kSlots> &ring, uint32_t full,
                                                    uint32_t places_smem) {
    barrier_wait(ring.barrier(full), ring.lap);
    return load_place(places_smem + ring.slot * kPlaceBytes);
}

constexpr uint32_t kStatisticsBytes = 2 * kWgmmaM * sizeof(float); // of 64 queries
// Loads a tile of each of two tensors into the next slot of a ring, once it is empty, and the
// statistics of its queries.
template <uint32_t kBytes, int kSlots>
__device__ __forceinline__ void load_pair(Ring<kSlots> &ring, uint32_t full, uint32_t empty,
                                          uint32_t slots_smem, const CUtensorMap &one,
                                          const CUtensorMap &other, TilePlace place,
                                          uint32_t statistics_smem, const float *statistics) {
    const uint32_t slot_smem = slots_smem + ring.slot * 2 * kBytes;
    barrier_wait(ring.barrier(empty), ring.lap ^ 1);
    barrier_expect(ring.barrier(full), 2 * kBytes + kStatisticsBytes);
    tma_load_tile(slot_smem, one, ring.barrier(full), place);
    tma_load_tile(slot_smem + kBytes, other, ring.barrier(full), place);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(statistics_smem + ring.slot * kStatisticsBytes),
                 "l"(statistics), "n"(kStatisticsBytes), "r"(ring.barrier(full))
                 : "memory");
    ring.advance();
}

// Gives a slot back, which the wgmma of this warp's rows no longer read, or hands one over.
template <int kSlots>
__device__ __forceinline__ void release(Ring<kSlots> &ring, uint32_t empty, int lane) {
    if (lane == 0) {
        barrier_arrive(ring.barrier(empty));
    }
    ring.advance();
}

// The sums of dQ of the 64 queries from `row` on, for a thread of a warpgroup: its 64 accumulators
// in groups of 4. The four of neighbouring threads are neighbours, so that a warp has 512 bytes.
__device__ __forceinline__ float4 *sums_of(const BackwardKernelArgs &args, int64_t row) {
    return reinterpret_cast<float4 *>(args.dQ_sums + row * kDHead) + threadIdx.x % kWarpgroup;
}

// Clears those of the rows of a thread block of delta_kernel.
__device__ __forceinline__ void clear_sums(const BackwardKernelArgs &args) {
    constexpr int kFours = kDeltaRows * kDHead / 4;
    float4 *sums = reinterpret_cast<float4 *>(args.dQ_sums) + int64_t(blockIdx.x) * kFours;
#pragma unroll
    for (int i = 0; i < kFours; i += kDeltaThreads) {
        store_gmem_16(sums + i + threadIdx.x, make_uint4(0, 0, 0, 0));
    }
}

// Adds a warpgroup's accumulators to the sums.
template <int kCount>
__device__ __forceinline__ void add(float4 *sums, const float (&D)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        asm volatile(
            "red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums + i / 4 * kWarpgroup),
            "f"(D[i]), "f"(D[i + 1]), "f"(D[i + 2]), "f"(D[i + 3])
            : "memory");
    }
}

// The sums of dQ of a thread block's queries as accumulators.
__device__ __forceinline__ void load_sums(float (&dQ_rmem)[kDHead / 2], const float4 *sums) {
#pragma unroll
    for (int i = 0; i < kDHead / 8; ++i) {
        const float4 four = sums[i * kWarpgroup];
        dQ_rmem[4 * i] = four.x, dQ_rmem[4 * i + 1] = four.y;
        dQ_rmem[4 * i + 2] = four.z, dQ_rmem[4 * i + 3] = four.w;
    }
}

// Rounds them, times softmax_scale, to 16 bits, and stores them through a tile in shared memory.
template <DType kDType, int B_r>
__device__ __forceinline__ void convert_sums(const BackwardKernelArgs &args, uint32_t tile_smem) {
    const TilePlace place = own_place<B_r>(args.len_q, args.heads);
    float dQ_rmem[kDHead / 2];
    load_sums(dQ_rmem, sums_of(args, row_index(args, place)));
    store_rows<kDType, B_r>(args.dQ, place, tile_smem, threadIdx.x / 32 * kWarpRows, dQ_rmem,
                            args.softmax_scale);
    tma_store_wait_read(); // after its end another thread block may have this memory
}

// Four lanes have 32 columns of a row, packed: lane t has columns 8n + 2t and 8n + 2t + 1 in
// packed[n]. Afterwards it has columns 8t … 8t + 7.
__device__ __forceinline__ void exchange(uint32_t (&packed)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < 4 - bit; i += 3 - bit) { // the pairs (i, i + bit)
            const uint32_t sent = upper ? packed[i] : packed[i + bit];
            const uint32_t got = __shfl_xor_sync(0xffffffff, sent, bit);
            packed[i] = upper ? got : packed[i];
            packed[i + bit] = upper ? packed[i + bit] : got;
        }
    }
}

// Rounds 16 rows of a warp, times a factor, to 16 bits, stores them from row place.row on, of rows
// 0 … length - 1 if there is a length, and makes the accumulators 0 for the next tile. The four
// lanes that have a row store 64 bytes of it at once.
template <DType kDType, bool kClips = false>
__device__ __forceinline__ void
store_sums(void *tensor, const TensorStrides &strides, TilePlace place, int warp_row,
           float (&D_rmem)[kDHead / 2], float factor, int length = 0) {
    const int lane = threadIdx.x % 32;
    Element *row = static_cast<Element *>(tensor) + place.batch * strides.batch +
                   (place.row + warp_row + lane / 4) * strides.row + place.head * strides.head +
                   lane % 4 * 8;
    scale_rows(D_rmem, {factor, factor});
#pragma unroll
    for (int i = 0; i < kDHead / 2; i += 16) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t packed[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                float &left = D_rmem[i + 4 * n + 2 * half],
                      &right = D_rmem[i + 4 * n + 2 * half + 1];
                packed[n] = pack<kDType>(left, right);
                left = right = 0;
            }
            exchange(packed);
            const int own = place.row + warp_row + lane / 4 + half * 8;
            if (!kClips || (own >= 0 && own < length)) {
                store_gmem_16(row + half * 8 * strides.row + 2 * i,
                              make_uint4(packed[0], packed[1], packed[2], packed[3]));
            }
        }
    }
}

// Rows before the first query of a head, so that the diagonal runs through corners of blocks: 30 if
// len_q is 100 and len_k 130. Query 0 sees keys 0 … 30, and the first block has queries -30 … 33.
template <bool kCausal>
__device__ __forceinline__ int rows_before(const BackwardKernelArgs &args) {
    return kCausal ? uint32_t(args.len_k - args.len_q) % kWgmmaM : 0;
}

// Rows of a head in statistics and sums of dQ, in whole blocks.
template <bool kCausal>
__device__ __forceinline__ int padded_rows(const BackwardKernelArgs &args) {
    const int rows = rows_before<kCausal>(args) + args.len_q;
    return (rows + kWgmmaM - 1) / kWgmmaM * kWgmmaM;
}

// Rows of a head's keys, in whole tiles.
template <int B_c>
__device__ __forceinline__ int padded_keys(int keys) {
    return (keys + B_c - 1) / B_c * B_c;
}

// An integer that thread blocks of the whole GPU hand on with what was written before it.
__device__ __forceinline__ int load_acquire(const int *src_gmem) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(src_gmem) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(int *dst_gmem, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(dst_gmem), "r"(value) : "memory");
}

// P = 2^(S · scale + mask) in the place of S. Masks are those of keys g and g + 8 of a warp.
template <int kCount>
__device__ __forceinline__ void exponentiate(float (&S_rmem)[kCount], float scale,
                                             const float (&mask)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        S_rmem[i] = exp2_approx(fmaf(S_rmem[i], scale, mask[i / 2 % 2]));
    }
}

// Stores what S and dP of a query begin with, of a thread block of delta_kernel, in padded rows.
template <DType kDType, bool kCausal>
__device__ __forceinline__ void store_statistics(const BackwardKernelArgs &args) {
    const int rows = padded_rows<kCausal>(args);
    TilePlace place = own_place<kDeltaRows>(rows, args.heads);
    place.row += threadIdx.x / kDeltaLanes;
    const int64_t row = row_index(args, place, rows);
    const int query = place.row - rows_before<kCausal>(args);
    const bool exists = query >= 0 && query < args.len_q; // if not, all is 0, as Q and dO are
    place.row = exists ? query : 0;
    const float delta = row_delta<kDType>(args, place);
    if (threadIdx.x % kDeltaLanes == 0) {
        float *statistics = args.statistics + row / kWgmmaM * 2 * kWgmmaM + row % kWgmmaM;
        statistics[0] = exists ? -load_lse(args, row_index(args, place)) / args.scale : 0;
        statistics[kWgmmaM] = exists ? -delta : 0;
    }
}

// Rounds the sums of dQ of a thread block's queries, in padded rows, times softmax_scale, to 16
// bits and stores them.
template <DType kDType, bool kCausal>
__device__ __forceinline__ void round_sums(const BackwardKernelArgs &args) {
    const int rows = padded_rows<kCausal>(args);
    TilePlace place = own_place<kWgmmaM>(rows, args.heads);
    float dQ_rmem[kDHead / 2];
    load_sums(dQ_rmem, sums_of(args, row_index(args, place, rows)));
    place.row -= rows_before<kCausal>(args); // TMA could not store from a negative row on
    store_sums<kDType, true>(args.dQ_gmem, args.dQ_strides, place, threadIdx.x / 32 * kWarpRows,
                             dQ_rmem, args.softmax_scale, args.len_q);
}
