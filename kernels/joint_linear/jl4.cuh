#pragma once
// Step 4 of the joint_linear family: activations. Parent: jl3.
//
// What changed
//   1. y = GELU(x W^T + b) where a call asks for it: x · Φ(x) in fp32, before y is rounded.
//   2. x passes SiLU, x / (1 + e^-x), where a call asks for it: a thread replaces its chunks of a
//      tile in shared memory, rounded to the dtype, before the product.
//
// Why: between the two layers of a feed-forward stands GELU, and SiLU before the layer that makes
// shift, scale and gate from a condition. In PyTorch each is a launch that reads and writes all of
// the tensor: 32 MB of hidden features for 16,000 tokens at batch 64, whose layer moves 20 MB.
//   1 - Φ(|x|) is 2 to the power of a polynomial of |x| of degree 6, since the logarithm of the
// normal distribution's tail is smooth. Its coefficients make the largest error of x · Φ(x) small,
// 3.3e-7 in fp32; that of 0.5 x (1 + erff(x / sqrt(2))) is 4.4e-7. GELU has 10 instructions per
// element, one of them MUFU; with erff() PTX has 27, and a branch. The tile of 64 x 128 outputs has
// 64 elements per lane of 4 warps: GELU adds 640 instructions to the 550 that jl3 was to have.
//   Both are chosen by an argument: a layer without activations has two branches more per tile.
// Expected on an H200 at batch 64: 8 us for the first layer of the feed-forward, as long as without
// GELU and half of PyTorch's two launches.
//
// benchmark:begin
// benchmark:end
// Verdict: On an H200 at batch 64 14.6 us for the first layer of the feed-forward, nearly twice
// what was expected; PyTorch's two launches take 26.8 us.
//
// Phases: as jl2.

#include "cp_async.cuh"
#include "elements.cuh"
#include "kernels/joint_linear/arguments.cuh"
#include "kernels/joint_linear/parts.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma_tiles.cuh"
#include "numeric.cuh"
#include "predicated.cuh"

namespace jl4 {

constexpr int kGeluOfY = 1, kSiluOfX = 2; // of the argument `activations`

// x · Φ(x) = max(x, 0) - |x| · (1 - Φ(|x|)), where Φ is the distribution function of the normal
// distribution. From 15 on the last factor is 2^-127, which is flushed to zero.
__device__ __forceinline__ float gelu(float x) {
    float size; // a NaN stays one
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(size) : "f"(fabsf(x)), "f"(15.0f));
    float exponent = fmaf(size, 2.8394119e-5f, -7.2647660e-4f);
    exponent = fmaf(exponent, size, 7.9339184e-3f);
    exponent = fmaf(exponent, size, -5.3173184e-2f);
    exponent = fmaf(exponent, size, -0.45895967f);
    exponent = fmaf(exponent, size, -1.1511365f);
    exponent = fmaf(exponent, size, -1.0f); // of 1 - Φ(0) = 1/2
    return fmaf(-size, exp2_approx(exponent), fmaxf(x, 0.0f));
}

__device__ __forceinline__ void store_smem_16(uint32_t dst_smem, uint4 chunk) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst_smem), "r"(chunk.x),
                 "r"(chunk.y), "r"(chunk.z), "r"(chunk.w)
                 : "memory");
}

// x = x / (1 + e^-x) in a tile of so many pieces: shared → registers → shared.
template <typename Kernels>
__device__ __forceinline__ void apply_silu(uint32_t x_smem, int pieces) {
    constexpr JointLinearKernelConfig cfg = Kernels::value;
    constexpr int kPieceBytes = cfg.B_r * kPiece * int(sizeof(Element));
#pragma unroll 1
    for (int i = threadIdx.x * kChunkBytes; i < pieces * kPieceBytes;
         i += cfg.n_threads() * kChunkBytes) {
        float x_rmem[kChunk];
        unpack_chunk<cfg.dtype>(x_rmem, load_smem_16(x_smem + i));
#pragma unroll
        for (float &x : x_rmem) {
            x *= reciprocal_approx(1.0f + exp2_approx(-x * kLog2e));
        }
        store_smem_16(x_smem + i, pack_chunk<cfg.dtype>(x_rmem));
    }
}

// y (warp_rows, warp_columns) += x @ W^T over a piece of x and of W.
template <typename Kernels, int kRowTiles, int kTiles>
__device__ __forceinline__ void
multiply_piece(float (&y_rmem)[kRowTiles][kTiles][4], uint32_t x_smem, uint32_t W_smem,
               const uint32_t (&x_lane_offset)[4], const uint32_t (&W_lane_offset)[4],
               const Place &place) {
    constexpr JointLinearKernelConfig cfg = Kernels::value;
#pragma unroll
    for (int k = 0; k < kPiece / kMmaK; ++k) {
        uint32_t x_rmem[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            ldmatrix_x4(x_rmem[i],
                        fragment_address<cfg.B_r>(x_smem, x_lane_offset, place.row + i * kMmaM, k));
        }
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
            uint32_t W_rmem[4];
            ldmatrix_x4(W_rmem, fragment_address<cfg.B_c>(W_smem, W_lane_offset,
                                                          place.column + n * kMmaK, k));
            add_product<cfg.dtype>(y_rmem, x_rmem, W_rmem, n);
        }
    }
}

// y += b, GELU and the norm of y, if the stream has them. A lane has columns 2t and 2t + 1 of every
// eight, of rows g and g + 8. The warps of a row exchange their sums of squares.
template <typename Kernels, int kRowTiles, int kTiles>
__device__ __forceinline__ void
add_bias_and_norm(float (&y_rmem)[kRowTiles][kTiles][4], const Stream &stream, uint32_t bias_smem,
                  float (&squares_smem)[Kernels::value.B_r][Kernels::value.column_warps()],
                  int activations, float eps, const Place &place) {
    constexpr JointLinearKernelConfig cfg = Kernels::value;
    constexpr int kColumnWarps = cfg.column_warps();
    const int lane = threadIdx.x % 32;
    const int own_column = place.column + lane % 4 * 2, own_row = place.row + lane / 4;

    // 4. y += b
    if (stream.bias != nullptr) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float2 bias = load_pair<cfg.dtype>(bias_smem, own_column + n * kMmaN);
#pragma unroll
            for (int i = 0; i < kRowTiles * 2; ++i) {
                y_rmem[i / 2][n][i % 2 * 2] += bias.x;
                y_rmem[i / 2][n][i % 2 * 2 + 1] += bias.y;
            }
        }
    }
    if (activations & kGeluOfY) {
#pragma unroll
        for (int i = 0; i < kRowTiles * kTiles * 4; ++i) {
            float &y = y_rmem[i / 4 / kTiles][i / 4 % kTiles][i % 4];
            y = gelu(y);
        }
    }
    if (stream.norm_weight == nullptr) {
        return;
    }
    float squares[kRowTiles][2] = {};
#pragma unroll
    for (int i = 0; i < kRowTiles * kTiles * 4; ++i) {
        const float y = y_rmem[i / 4 / kTiles][i / 4 % kTiles][i % 4];
        float &sum = squares[i / 4 / kTiles][i % 4 / 2];
        sum = fmaf(y, y, sum);
    }

    // 5. y *= rstd · weight of the norm, rstd = 1 / sqrt(mean of y² + eps)
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) {
        const float sum = quad_sum(squares[i / 2][i % 2]);
        if (lane % 4 == 0) {
            squares_smem[own_row + i * (kMmaM / 2)][threadIdx.x / 32 % kColumnWarps] = sum;
        }
    }
    __syncthreads(); // a warp reads the sums of the other warps of its rows
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kColumnWarps; ++w) {
            sum += squares_smem[own_row + i * (kMmaM / 2)][w];
        }
        squares[i / 2][i % 2] = rsqrtf(sum / stream.out_features + eps);
    }
    const uint32_t norm_smem = bias_smem + cfg.B_c * int(sizeof(Element)); // behind the bias
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const float2 weight = load_pair<cfg.dtype>(norm_smem, own_column + n * kMmaN);
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i) {
            y_rmem[i / 2][n][i % 2 * 2] *= squares[i / 2][i % 2] * weight.x;
            y_rmem[i / 2][n][i % 2 * 2 + 1] *= squares[i / 2][i % 2] * weight.y;
        }
    }
}

// y of a thread block: registers → shared → global, in whole chunks of rows.
template <typename Kernels, int kRowTiles, int kTiles>
__device__ __forceinline__ void store_y(const float (&y_rmem)[kRowTiles][kTiles][4],
                                        uint32_t y_smem, const Stream &stream, int first_row,
                                        int first_out, const Place &place) {
    constexpr JointLinearKernelConfig cfg = Kernels::value;
    constexpr int B_r = cfg.B_r, kThreads = cfg.n_threads();
    const int lane = threadIdx.x % 32;

    // 6. y, rounded: registers → shared. Rows 8 apart have their chunks in the same order
    const int own_row = place.row + lane / 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const int column = place.column + lane % 4 * 2 + n * kMmaN;
        const uint32_t pair_smem =
            y_smem + piece_offset<B_r>(column / kPiece) + smem_offset(own_row, column % kPiece);
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i) {
            const float *y = &y_rmem[i / 2][n][i % 2 * 2];
            store_smem_4(pair_smem + smem_offset(i * (kMmaM / 2), 0), pack<cfg.dtype>(y[0], y[1]));
        }
    }
    __syncthreads(); // a thread stores what other warps have computed

    // 7. Shared → global
    constexpr int kRowChunks = cfg.B_c / kChunk, kPass = kThreads / kRowChunks;
    static_assert(kThreads % kRowChunks == 0 && kPass % 8 == 0 && B_r % kPass == 0,
                  "a thread has chunks of one column, in rows that have them in the same order");
    const int row = threadIdx.x / kRowChunks, column = threadIdx.x % kRowChunks * kChunk;
    const uint32_t chunk_smem =
        y_smem + piece_offset<B_r>(column / kPiece) + smem_offset(row, column % kPiece);
    Element *chunk_gmem =
        stream.y + int64_t(first_row + row) * stream.y_stride + first_out + column;
    const int rows = first_out + column < stream.out_features ? stream.rows - first_row - row : 0;
#pragma unroll
    for (int i = 0; i < B_r; i += kPass) {
        const uint4 chunk = load_smem_16(chunk_smem + smem_offset(i, 0));
        store_gmem_16_if(i < rows, chunk_gmem, chunk);
        chunk_gmem += kPass * stream.y_stride;
    }
}

// Thread blocks per SM: 16 warps with 128 registers per thread, or 12 with 168 for 64 sums.
constexpr int blocks_per_SM(const JointLinearKernelConfig &cfg) {
    const int sums = cfg.warp_rows * cfg.warp_columns() / 32;
    const int warps = sums > 64 ? cfg.n_warps : sums > 32 ? 12 : 16;
    return warps > cfg.n_warps ? warps / cfg.n_warps : 1;
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads(), blocks_per_SM(Kernels::value))
    linear_kernel(const __grid_constant__ JointLinearKernelArgs args) {
    constexpr JointLinearKernelConfig cfg = Kernels::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kThreads = cfg.n_threads();
    constexpr int kRowTiles = cfg.warp_rows / kMmaM, kTiles = cfg.warp_columns() / kMmaN;
    static_assert(B_c / kChunk <= kThreads, "a thread copies one chunk of the bias at most");

    // W (B_c, depth); two buffers of x (B_r, depth), in which y (B_r, B_c) follows
    extern __shared__ __align__(128) Element smem[];
    constexpr int kBufferBytes = B_r * cfg.depth * int(sizeof(Element));
    const uint32_t W_smem = smem_address(smem);
    const uint32_t buffers_smem = W_smem + B_c * cfg.depth * int(sizeof(Element));
    const uint32_t bias_smem = W_smem + cfg.piece_bytes(); // (2, B_c): weights of the norm, too
    auto &squares_smem = *reinterpret_cast<float (*)[B_r][cfg.column_warps()]>(
        smem + cfg.piece_bytes() / sizeof(Element) + 2 * B_c);

    // 1. The tiles: all columns of some rows are neighbours in the grid, so that x comes from L2
    const bool is_context = int(blockIdx.x) >= args.blocks;
    const Stream stream = stream_of(args, is_context);
    const int slot = blockIdx.x - (is_context ? args.blocks : 0);
    const int column_tiles = (stream.out_features + B_c - 1) / B_c;
    const int first_tile = slot / column_tiles * args.turns, first_out = slot % column_tiles * B_c;
    const int tiles = min(args.turns, (stream.rows + B_r - 1) / B_r - first_tile);

    // 2. W and two tiles of x: global → shared
    const auto copy_async = [&](int tile) {
#pragma unroll 1
        for (int piece = 0; tile < tiles && piece * kPiece < stream.in_features; ++piece) {
            const uint32_t x_smem = buffers_smem + tile % 2 * kBufferBytes;
            copy_piece<B_r, kThreads>(x_smem + piece_offset<B_r>(piece), stream.x, stream.x_stride,
                                      (first_tile + tile) * B_r, stream.rows, piece * kPiece,
                                      stream.in_features);
        }
        cp_async_commit();
    };
    copy_vectors<B_c>(bias_smem, stream, first_out);
#pragma unroll 1
    for (int piece = 0; piece * kPiece < stream.in_features; ++piece) {
        copy_piece<B_c, kThreads>(W_smem + piece_offset<B_c>(piece), stream.weight,
                                  stream.weight_stride, first_out, stream.out_features,
                                  piece * kPiece, stream.in_features);
    }
    copy_async(0);
    copy_async(1);

    const Place place = warp_place<Kernels>();
    uint32_t x_lane_offset[4], W_lane_offset[4];
    set_lane_offsets(x_lane_offset, W_lane_offset);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        cp_async_wait<1>();
        __syncthreads(); // a warp reads what others have copied

        // 3. y = x @ W^T
        const uint32_t x_smem = buffers_smem + tile % 2 * kBufferBytes;
        if (args.activations & kSiluOfX) {
            apply_silu<Kernels>(x_smem, (stream.in_features + kPiece - 1) / kPiece);
            __syncthreads(); // a warp reads what others have replaced
        }
        float y_rmem[kRowTiles][kTiles][4] = {}; // (warp_rows, warp_columns)
#pragma unroll 1
        for (int piece = 0; piece * kPiece < stream.in_features; ++piece) {
            multiply_piece<Kernels>(y_rmem, x_smem + piece_offset<B_r>(piece),
                                    W_smem + piece_offset<B_c>(piece), x_lane_offset, W_lane_offset,
                                    place);
        }
        add_bias_and_norm<Kernels>(y_rmem, stream, bias_smem, squares_smem, args.activations,
                                   args.eps, place);
        __syncthreads(); // no warp reads this x any more
        store_y<Kernels>(y_rmem, x_smem, stream, (first_tile + tile) * B_r, first_out, place);
        __syncthreads(); // nor this y
        copy_async(tile + 2);
    }
}

} // namespace jl4
