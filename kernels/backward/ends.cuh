#pragma once
// The work before the main kernel and behind it, of one block of 64 queries. Blocks are numbered
// over all heads.

#include "kernels/backward/sequences.cuh"

// From the last block of queries to the first.
__device__ __forceinline__ int block_from_end() {
    return gridDim.x - 1 - blockIdx.x;
}

// A query by its block and its row there.
struct Query {
    TilePlace place; // of a query that exists
    bool exists;
    int64_t lse; // its index
};
template <typename Config>
__device__ __forceinline__ Query query_of(const BackwardKernelArgs &args, int block, int row) {
    constexpr bool kCausal = Config::value.causal;
    if constexpr (Config::value.varlen) {
        const QueryPlace query = query_place(args, block, row);
        const bool exists = query.row >= 0 && query.row < query.length;
        const TilePlace place = exists ? TilePlace(query) : TilePlace{0};
        return {place, exists, int64_t(place.head) * args.len_q + place.batch + place.row};
    } else {
        TilePlace place = own_place<kWgmmaM>(padded_rows<kCausal>(args), args.heads, block);
        place.row += row - rows_before<kCausal>(args);
        const bool exists = place.row >= 0 && place.row < args.len_q;
        place.row = exists ? place.row : 0;
        return {place, exists, row_index(args, place)};
    }
}

// The chunk of a row that a lane has, of dO or O.
template <int d_head>
__device__ __forceinline__ uint4 load_chunk(const void *tensor, const TensorStrides &strides,
                                            TilePlace place) {
    const Element *row = static_cast<const Element *>(tensor) + place.batch * strides.batch +
                         place.row * strides.row + place.head * strides.head;
    return *reinterpret_cast<const uint4 *>(row + threadIdx.x % (d_head / 8) * 8);
}
template <DType kDType, int kLanes>
__device__ __forceinline__ float delta_of(uint4 dO, uint4 O) {
    float dO_rmem[8], O_rmem[8], sum = 0;
    unpack_chunk<kDType>(dO_rmem, dO);
    unpack_chunk<kDType>(O_rmem, O);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sum = fmaf(dO_rmem[i], O_rmem[i], sum);
    }
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    }
    return sum;
}

// Before the main kernel: clears the sums of dQ and the turns of a block, and stores its
// statistics. A thread has all its loads in flight, of four rows, or with 64 columns of two.
template <typename Config>
__device__ __forceinline__ void prepare_block(const BackwardKernelArgs &args, int block) {
    constexpr BackwardKernelConfig cfg = Config::value;
    constexpr int kLanes = cfg.d_head / 8, kRows = kDeltaThreads / kLanes;
    constexpr int kTimes = kWgmmaM / kRows, kFours = kWgmmaM * cfg.d_head / 4;
    const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
    if (cfg.in_turn && threadIdx.x < kTurns) {
        args.turns[block * kTurns + threadIdx.x] = 0;
    }
    Query queries[kTimes];
    uint4 dO[kTimes], O[kTimes];
    float lse[kTimes];
#pragma unroll
    for (int n = 0; n < kTimes; ++n) {
        queries[n] = query_of<Config>(args, block, n * kRows + row);
        dO[n] = load_chunk<cfg.d_head>(args.dO_gmem, args.dO_strides, queries[n].place);
        O[n] = load_chunk<cfg.d_head>(args.O_gmem, args.O_strides, queries[n].place);
        lse[n] = args.lse[queries[n].lse];
    }
    float4 *sums = reinterpret_cast<float4 *>(args.dQ_sums) + int64_t(block) * kFours;
#pragma unroll
    for (int i = 0; i < kFours; i += kDeltaThreads) {
        store_gmem_16(sums + i + threadIdx.x, make_uint4(0, 0, 0, 0));
    }
    float *statistics = args.statistics + int64_t(block) * 2 * kWgmmaM + row;
#pragma unroll
    for (int n = 0; n < kTimes; ++n, statistics += kRows) {
        const float delta = delta_of<cfg.dtype, kLanes>(dO[n], O[n]);
        if (lane == 0) { // where there is no query all is 0, as Q and dO are
            const float first = -to_base_2(lse[n]) / (cfg.softcap ? 1 : args.scale);
            statistics[0] = queries[n].exists ? first : 0;
            statistics[kWgmmaM] = queries[n].exists ? -delta : 0;
        }
    }
}

// Behind it: rounds the sums of a block, times softmax_scale, to 16 bits and stores them.
template <typename Config>
__device__ __forceinline__ void round_block(const BackwardKernelArgs &args, int block) {
    constexpr BackwardKernelConfig cfg = Config::value;
    float dQ_rmem[cfg.d_head / 2];
    load_sums(dQ_rmem, sums_of<cfg.d_head>(args, int64_t(block) * kWgmmaM));
    TilePlace place;
    int length = args.len_q;
    if constexpr (cfg.varlen) {
        const QueryPlace query = query_place(args, block, 0);
        place = query;
        length = query.length;
    } else {
        place = own_place<kWgmmaM>(padded_rows<cfg.causal>(args), args.heads, block);
        place.row -= rows_before<cfg.causal>(args); // TMA could not store from there on
    }
    store_sums<cfg.dtype, true>(args.dQ_gmem, args.dQ_strides, place, threadIdx.x / 32 * kWarpRows,
                                dQ_rmem, args.softmax_scale, length);
}
