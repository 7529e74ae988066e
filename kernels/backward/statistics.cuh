#pragma once
// LSE and delta of queries, which delta_kernel stores.

#include "elements.cuh"
#include "kernels/backward/places.cuh"
#include "numeric.cuh"

// LSE of a query as a logarithm to base 2. A query that sees no key has -infinity, for which
// +infinity makes its P 0.
__device__ __forceinline__ float to_base_2(float lse) {
    return lse == -INFINITY ? INFINITY : lse * kLog2e;
}
__device__ __forceinline__ float load_lse(const BackwardKernelArgs &args, int64_t row) {
    return to_base_2(args.lse[row]);
}

// delta of a query is the sum of its dO · O. 16 lanes have 8 columns each, or of 64 columns 8
// lanes.
constexpr int kDeltaThreads = 256, kDeltaLanes = kDHead / 8;
template <int d_head>
constexpr int kDeltaRowsOf = kDeltaThreads * 8 / d_head; // of a thread block
constexpr int kDeltaRows = kDeltaRowsOf<kDHead>;
__device__ __forceinline__ TilePlace delta_place(const BackwardKernelArgs &args) {
    TilePlace place = own_place<kDeltaRows>(args.len_q, args.heads);
    place.row += threadIdx.x / kDeltaLanes;
    return place;
}
template <DType kDType, int d_head = kDHead>
__device__ __forceinline__ float row_delta(const BackwardKernelArgs &args, TilePlace place) {
    constexpr int kLanes = d_head / 8;
    const int column = threadIdx.x % kLanes * 8;
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
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
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

// Stores what S and dP of a query begin with, of a thread block of delta_kernel, in padded rows.
// With a softcap -LSE to base 2, which exponents of P begin with, takes the place of the former.
template <DType kDType, bool kCausal, bool kSoftcap = false, int d_head = kDHead>
__device__ __forceinline__ void store_statistics(const BackwardKernelArgs &args) {
    const int rows = padded_rows<kCausal>(args);
    TilePlace place = own_place<kDeltaRowsOf<d_head>>(rows, args.heads);
    place.row += threadIdx.x / (d_head / 8);
    const int64_t row = row_index(args, place, rows);
    const int query = place.row - rows_before<kCausal>(args);
    const bool exists = query >= 0 && query < args.len_q; // if not, all is 0, as Q and dO are
    place.row = exists ? query : 0;
    const float delta = row_delta<kDType, d_head>(args, place);
    if (threadIdx.x % (d_head / 8) == 0) {
        float *statistics = args.statistics + row / kWgmmaM * 2 * kWgmmaM + row % kWgmmaM;
        statistics[0] =
            exists ? -load_lse(args, row_index(args, place)) / (kSoftcap ? 1 : args.scale) : 0;
        statistics[kWgmmaM] = exists ? -delta : 0;
    }
}
