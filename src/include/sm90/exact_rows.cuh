#pragma once
// Attention for the 16 rows of a warp, computed again exactly: mma.sync on fragments straight from
// global memory, with a maximum of the rows per 16 keys. Slow, small, and hardly ever needed.

#include "flash_attention.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "sm90/arguments.cuh"

// Two elements of one row, or one element of each of two rows, as a register of a fragment. Only
// the first `rows` of the two rows are read; the others count as zeros.
__device__ __forceinline__ uint32_t load_pair(const Element *first) {
    return *reinterpret_cast<const uint32_t *>(first);
}
__device__ __forceinline__ uint32_t load_pair(const Element *first, int64_t stride, int rows = 2) {
    return (rows > 0 ? first[0] : 0) | (rows > 1 ? uint32_t(first[stride]) << 16 : 0);
}

// tanh(x) in one MUFU.TANH.
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Columns col … + 8 · kTiles - 1 of O, in rows place.row … + 15. With column 0 the LSE of the rows
// is stored too, if asked for. scale: log2(e) · softmax_scale, or log2(e) · softcap if kSoftcap.
// The fragments are as in mma.cuh.
template <DType kDType, int kDHead, int kTiles, Edges kEdges, bool kSoftcap = false, typename Args,
          typename Place, typename Sinks = NoSinks>
__device__ __forceinline__ void exact_columns(const Args &args, Place place, float scale, int col,
                                              Sinks sinks = {}) {
    constexpr bool kWhole = kEdges == Edges::kNone;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    TilePlace keys = keys_of(place, args);
    keys.head = kWhole ? place.head : keys.head;
    const auto head_of = [&](const void *tensor, const TensorStrides &strides, TilePlace at,
                             int rows) {
        return static_cast<const Element *>(tensor) + row_0(place, at.batch, rows, strides) +
               at.head * strides.head;
    };
    const int64_t Q_row = args.Q_strides.row, K_row = args.K_strides.row;
    const int64_t V_row = args.V_strides.row, O_row = args.O_strides.row;
    const Element *Q_gmem = head_of(args.Q_gmem, args.Q_strides, place, args.len_q) + 2 * t;
    const Element *K_gmem = head_of(args.K_gmem, args.K_strides, keys, args.len_k) + 2 * t;
    const Element *V_gmem = head_of(args.V_gmem, args.V_strides, keys, args.len_k) + col + g;
    const Element *O_head = head_of(args.O_gmem, args.O_strides, place, args.len_q);
    Element *O_gmem = const_cast<Element *>(O_head) + col + 2 * t;
    const int rows[2] = {place.row + g, place.row + g + 8};
    int visible[2], first[2]; // the end and the begin of the keys that a row sees
    const Element *Q_rows[2]; // the last row stands for rows past it, which are not stored
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        visible[half] = visible_keys<kEdges>(rows[half], args);
        first[half] = first_visible_key<kEdges>(rows[half], args);
        Q_rows[half] = Q_gmem + (kWhole ? rows[half] : min(rows[half], args.len_q - 1)) * Q_row;
    }
    const int seen_first = first_visible_key<kEdges>(place.row, args) - keys.row;
    const int begin = keys.row + (max(seen_first, 0) & -kMmaK);
    const int end = visible_keys<kEdges>(place.row + 15, args);

    // m is finite: as long as all keys are at -infinity, each P is 0 and not NaN
    float O_rmem[kTiles][4] = {}, m[2] = {-1e30f, -1e30f}, l[2] = {};
#pragma unroll 1
    for (int key = begin; key < end; key += kMmaK) {
        // S = Q @ K^T for 16 keys
        float S_rmem[2][4] = {};
#pragma unroll 1
        for (int k = 0; k < kDHead; k += kMmaK) {
            const uint32_t Q_rmem[4] = {load_pair(Q_rows[0] + k), load_pair(Q_rows[1] + k),
                                        load_pair(Q_rows[0] + k + 8), load_pair(Q_rows[1] + k + 8)};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int row = key + n * kMmaN + g;
                const Element *K = K_gmem + (kWhole ? row : min(row, args.len_k - 1)) * K_row + k;
                mma_m16n8k16<kDType>(S_rmem[n], Q_rmem, load_pair(K), load_pair(K + 8));
            }
        }
        // m, l, P = 2^(S - m), O = O · rescale
        uint32_t P_rmem[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float *S = &S_rmem[0][2 * half], *S_8 = &S_rmem[1][2 * half];
            if constexpr (kSoftcap) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    S[i] = tanh_approx(S[i] * args.scale_in_cap);
                    S_8[i] = tanh_approx(S_8[i] * args.scale_in_cap);
                }
            }
#pragma unroll
            for (int i = 0; i < 2 && !kWhole; ++i) {
                const int column = key + 2 * t + i, column_8 = column + kMmaN;
                S[i] = column < visible[half] && column >= first[half] ? S[i] : -INFINITY;
                S_8[i] = column_8 < visible[half] && column_8 >= first[half] ? S_8[i] : -INFINITY;
            }
            const float old_m = m[half];
            m[half] =
                fmaxf(old_m, quad_max(fmaxf(fmaxf(S[0], S[1]), fmaxf(S_8[0], S_8[1]))) * scale);
            const float rescale = exp2_approx(old_m - m[half]);
            l[half] *= rescale;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                S[i] = exp2_approx(fmaf(S[i], scale, -m[half]));
                S_8[i] = exp2_approx(fmaf(S_8[i], scale, -m[half]));
                l[half] += S[i] + S_8[i];
            }
            P_rmem[half] = pack<kDType>(S[0], S[1]);
            P_rmem[half + 2] = pack<kDType>(S_8[0], S_8[1]);
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                O_rmem[n][2 * half] *= rescale;
                O_rmem[n][2 * half + 1] *= rescale;
            }
        }
        // O += P @ V
        const int row = key + 2 * t, left = kWhole ? kMmaK : args.len_k - row;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const Element *V = V_gmem + row * V_row + n * kMmaN;
            mma_m16n8k16<kDType>(O_rmem[n], P_rmem, load_pair(V, V_row, left),
                                 load_pair(V + 8 * V_row, V_row, left - 8));
        }
    }
    const float sink = sinks.of(place.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float row_l = quad_sum(l[half]);
        const float O_scale = sinks.add(sink, m[half], row_l);
        if (!kWhole && rows[half] >= args.len_q) {
            continue;
        }
        const float inverse_l = visible[half] > keys.row ? O_scale * reciprocal_approx(row_l) : 0;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            *reinterpret_cast<uint32_t *>(O_gmem + rows[half] * O_row + n * kMmaN) =
                pack<kDType>(O_rmem[n][2 * half] * inverse_l, O_rmem[n][2 * half + 1] * inverse_l);
        }
        if (!kWhole && args.lse != nullptr && col == 0 && t == 0) {
            store_lse(args, place, rows[half], m[half], row_l);
        }
    }
}

// O of rows place.row … + 15, a few columns at a time: the kernels that call this have no registers
// for more.
template <DType kDType, int kDHead, Edges kEdges>
__device__ __forceinline__ void exact_rows(const HopperKernelArgs &args, TilePlace place,
                                           float scale) {
    constexpr int kTiles = 2;
#pragma unroll 1
    for (int col = 0; col < kDHead; col += kTiles * kMmaN) {
        exact_columns<kDType, kDHead, kTiles, kEdges>(args, place, scale, col);
    }
}

// The 16 rows that begin at place_of(tile), for each tile n of a thread block whose bit n % 32 is
// set. A thread block of more than 32 tiles computes more rows than needed, with the same result.
template <DType kDType, int kDHead, Edges kEdges, bool kDynamic, int kBlocks, typename PlaceOf>
__device__ __forceinline__ void exact_tiles(const HopperKernelArgs &args, uint32_t bits,
                                            PlaceOf &&place_of, float scale) {
    for (int tile = blockIdx.x / kBlocks, n = -1; tile < args.tiles;
         tile += kDynamic ? 1 : gridDim.x / kBlocks) {
        if (took_tile<kDynamic, kBlocks>(tile, args) && bits >> ++n % 32 & 1) {
            exact_rows<kDType, kDHead, kEdges>(args, place_of(tile), scale);
        }
    }
}

// The same for tiles of B_r rows of one head: rows warp_row … + 15 of each.
template <DType kDType, int kDHead, int B_r, Edges kEdges = Edges::kNone, bool kDynamic = false,
          int kBlocks = 1>
__device__ __forceinline__ void exact_tiles(const HopperKernelArgs &args, uint32_t bits,
                                            int warp_row, float scale) {
    auto place_of = [&](int tile) {
        TilePlace place = tile_place<B_r, kEdges>(tile, args);
        place.row += warp_row;
        return place;
    };
    exact_tiles<kDType, kDHead, kEdges, kDynamic, kBlocks>(args, bits, place_of, scale);
}
