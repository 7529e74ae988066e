#pragma once
// Step 1 of the overlap family: v16 cut down to the large tile. Parent: v16.
//
// What changed
//   1. Code for other tiles is gone: Q kept in registers, whole tiles of fragments, single buffers
//      of fragments. One k-tile is loaded at a time, ahead of the mma of the one before.
//   2. The config has the tile's shape and the row stride, nothing else.
//
// Why: the large tile has 128 rows of Q and 64 keys for 4 warps, 32 rows per warp. K and V are read
// from shared memory half as often as with 16 rows per warp. Q would take 64 registers per thread
// beside the 192 of S and O, so it is read again for every block of keys. Shared memory and the
// tensor cores then need equally long: 8 warps · (80 ldmatrix · 4 + 64 wavefronts of copies) = 3072
// cycles per block of keys, and 8 · 256 mma · 1.5 = 3072. From here on the question is whether both
// work at once.
// Expected: no change. The PTX is that of v16 at the large tile, except for names.
//
// benchmark:begin
// Measured in bursts (NVIDIA H100 80GB HBM3, CUDA 13.0, bf16), TFLOP/s at length 4096, and share
// of PyTorch's flash backend in the harmonic mean over lengths. B_r 128, B_c 64, 4 warps: 414,
// 1.13. Cost: 255 registers per thread, 40 bytes of it spilled, 64 KiB of shared memory per block,
// 2 blocks per SM.
// benchmark:end
// Verdict: no gain, as expected: 113% of PyTorch's flash backend, the base of this family.
//
// Phases: 1 Q to shared memory, then the last K and V. For each block of keys, from the last to the
// first: 2 S = Q @ K^T, 3 copy of the next K, 4 m, l, P = softmax(S), 5 O += P @ V, 6 copy of the
// next V. Then 7 O / l to shared memory, 8 O to global memory.

#include "cp_async.cuh"
#include "kernels/overlap/arguments.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "numeric.cuh"

#include <type_traits>

namespace o1 {

constexpr int kDHead = 128;
constexpr int kDTiles = kDHead / kMmaK;
constexpr int kChunk = 8; // elements in 16 bytes: one copy of a thread, one row of ldmatrix
constexpr int kChunkBytes = kChunk * sizeof(Element);
constexpr int kPiece = 64; // columns of a piece: rows of 128 bytes, all 32 banks once
constexpr int kThreadsPerRow = kPiece / kChunk;

constexpr float kSoftmaxScale = 0.08838834764831845f * kLog2e; // log2(e) / sqrt(d_head)

// Byte offset of (row, col) in a piece of a tile in shared memory: rows of 128 bytes. The row
// permutes its 16-byte chunks, so that the chunks of one column in 8 rows lie in all 32 banks.
__device__ __forceinline__ uint32_t smem_offset(int row, int col) {
    const int chunk = col / kChunk ^ row % 8;
    return (row * kPiece + chunk * kChunk + col % kChunk) * sizeof(Element);
}

// The pieces of a tile of kRows rows lie one after the other.
template <int kRows>
__device__ constexpr int piece_offset(int piece) {
    return piece * kRows * kPiece * int(sizeof(Element));
}

// Offset of a thread's part of a tile, in elements. 8 neighbouring threads share the 128 bytes of a
// row in one piece, and copy the same columns of the other piece.
__device__ __forceinline__ int64_t thread_offset(int64_t row_stride) {
    return threadIdx.x / kThreadsPerRow * row_stride + threadIdx.x % kThreadsPerRow * kChunk;
}

// Starts the copy of the (kRows, d_head) tile at row first_row of X; X_gmem points to this thread's
// first element of X. An address base + index · stride is one IMAD.WIDE as long as both factors
// have 32 bits. With src_bytes 0 the copy reads nothing: it is the one after the loop's last block.
// A branch around it is slower, because it splits the code that ptxas may reorder.
template <int kRows, int kThreads>
__device__ __forceinline__ void copy_tile_async(uint32_t tile_smem, const Element *X_gmem,
                                                int first_row, int row_stride, int src_bytes = 16) {
    constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
    const int row = threadIdx.x / kThreadsPerRow, col = threadIdx.x % kThreadsPerRow * kChunk;
    const Element *src_gmem = X_gmem + int64_t(first_row) * row_stride;
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsPerPass) {
#pragma unroll
        for (int piece = 0; piece < kDHead / kPiece; ++piece) {
            cp_async_16_L2_128B(tile_smem + piece_offset<kRows>(piece) + smem_offset(row + i, col),
                                src_gmem + piece * kPiece, src_bytes);
        }
        src_gmem += kRowsPerPass * row_stride;
    }
}

// The lanes give ldmatrix the 32 rows of the four 8 x 8 matrices of a 16 x 16 piece. The order for
// mma's A operand and, transposed, for V: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
// The order for K: columns 0-7 and 8-15 of rows 0-7, then of rows 8-15, so that the two registers
// that one mma reads as B are neighbours. Piece k of a row has its chunks at (2k + column half) ^
// (lane % 8). Bits 0 and 1 of k flip bits 1 and 2 of the chunk; bit 3 of the chunk is not swizzled.
// So a lane has four offsets of each kind, and the rest of an address is known at compile time.
__device__ __forceinline__ void set_lane_offsets(uint32_t (&lane_offset)[4],
                                                 uint32_t (&K_lane_offset)[4]) {
    const int lane = threadIdx.x % 32;
    const int K_row = lane / 16 * 8 + lane % 8, K_col = lane / 8 % 2 * kChunk;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        lane_offset[k] = smem_offset(lane % 16, lane / 16 * kChunk) ^ k * 2 * kChunkBytes;
        K_lane_offset[k] = smem_offset(K_row, K_col) ^ k * 2 * kChunkBytes;
    }
}

template <int kRows>
__device__ __forceinline__ uint32_t fragment_address(uint32_t tile_smem,
                                                     const uint32_t (&lane_offset)[4], int row,
                                                     int k) {
    return tile_smem + lane_offset[k % 4] + row * kPiece * int(sizeof(Element)) +
           piece_offset<kRows>(k / 4);
}

// Fragments of the rows of Q or K from X_smem on: k-tile k of d_head.
template <int kRows, int kPieces>
__device__ __forceinline__ void load_fragments(uint32_t (&X_rmem)[kPieces][4], uint32_t X_smem,
                                               const uint32_t (&lane_offset)[4], int k) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        ldmatrix_x4(X_rmem[i], fragment_address<kRows>(X_smem, lane_offset, i * 16, k));
    }
}

// Fragments of V: k-tile k of keys, all of d_head. The load transposes them, since mma wants its B
// operand by columns.
template <int kRows>
__device__ __forceinline__ void load_V_fragments(uint32_t (&V_rmem)[kDTiles][4], uint32_t V_smem,
                                                 const uint32_t (&lane_offset)[4], int k) {
#pragma unroll
    for (int n = 0; n < kDTiles; ++n) {
        ldmatrix_x4_trans(V_rmem[n], fragment_address<kRows>(V_smem, lane_offset, k * kMmaK, n));
    }
}

// C (kRowTiles * 16, kPairs * 16) += A (kRowTiles * 16, 16) @ B (16, kPairs * 16). It serves Q @
// K^T and P @ V.
template <DType kDType, int kRowTiles, int kPairs>
__device__ __forceinline__ void add_product(float (&C_rmem)[kRowTiles][2 * kPairs][4],
                                            const uint32_t (&A_rmem)[kRowTiles][4],
                                            const uint32_t (&B_rmem)[kPairs][4]) {
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            mma_m16n8k16<kDType>(C_rmem[i][n], A_rmem[i], B_rmem[n / 2][n % 2 * 2],
                                 B_rmem[n / 2][n % 2 * 2 + 1]);
        }
    }
}

// S becomes P = 2^(S · scale - m · scale), not yet divided by l; m is the maximum of S before
// scaling. m and l of the rows take in this block. The sums so far, l and O, are relative to the
// old m, so they are rescaled to the new one. The first block has nothing before it.
template <bool kFirst, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void online_softmax(float (&S_rmem)[kRowTiles][kKeyTiles][4],
                                               float (&O_rmem)[kRowTiles][kDHead / kMmaN][4],
                                               float (&m_rmem)[kRowTiles][2],
                                               float (&l_rmem)[kRowTiles][2]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        float m[2] = {kFirst ? -INFINITY : m_rmem[i][0],
                      kFirst ? -INFINITY : m_rmem[i][1]}; // of rows g and g + 8 of the accumulator
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float *S = &S_rmem[i][n][2 * half];
                m[half] = fmaxf(m[half], fmaxf(S[0], S[1]));
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            m[half] = quad_max(m[half]);
            if constexpr (!kFirst) {
                const float rescale = exp2_approx((m_rmem[i][half] - m[half]) * kSoftmaxScale);
                l_rmem[i][half] *= rescale;
#pragma unroll
                for (int n = 0; n < kDHead / kMmaN; ++n) {
                    O_rmem[i][n][2 * half] *= rescale;
                    O_rmem[i][n][2 * half + 1] *= rescale;
                }
            }
            m_rmem[i][half] = m[half];
        }
        const float scaled_m[2] = {m[0] * kSoftmaxScale, m[1] * kSoftmaxScale};
        // l sums this lane's columns only; the sums of a quad are added once, at the end.
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float *S = &S_rmem[i][n][2 * half];
                S[0] = exp2_approx(fmaf(S[0], kSoftmaxScale, -scaled_m[half]));
                S[1] = exp2_approx(fmaf(S[1], kSoftmaxScale, -scaled_m[half]));
                if (kFirst && n == 0) {
                    l_rmem[i][half] = S[0] + S[1];
                } else {
                    l_rmem[i][half] += S[0] + S[1];
                }
            }
        }
    }
}

// Thread blocks that an SM is to hold. Warps with 16 rows and 64 keys need at most 168 registers
// per thread: twelve warps per SM. Warps with larger tiles need up to 255: eight warps. Without a
// bound ptxas takes too many in one version, and in another so few that it gives up overlap.
constexpr int min_blocks(OverlapKernelConfig cfg) {
    const int warps = cfg.B_r / cfg.n_warps == kMmaM && cfg.B_c <= 64 ? 12 : 8;
    return warps > cfg.n_warps ? warps / cfg.n_warps : 1;
}

template <typename Config>
__global__ void __launch_bounds__(Config::value.n_threads(), min_blocks(Config::value))
    forward_kernel(const __grid_constant__ OverlapKernelArgs args) {
    constexpr OverlapKernelConfig cfg = Config::value;
    static_assert(cfg.d_head == kDHead, "the kernels are written for d_head 128");
    static_assert(cfg.B_r % (cfg.n_warps * kMmaM) == 0 && cfg.B_c % kMmaK == 0,
                  "a warp takes whole 16-row tiles of Q, and P whole k-tiles of keys");
    static_assert(cfg.B_r % (cfg.n_threads() / kThreadsPerRow) == 0 &&
                      cfg.B_c % (cfg.n_threads() / kThreadsPerRow) == 0,
                  "every thread copies the same number of chunks of a tile");
    static_assert(cfg.static_row_stride >= 0);

    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kThreads = cfg.n_threads();
    constexpr int kRowTiles = B_r / cfg.n_warps / kMmaM; // per warp
    constexpr int kKeyTiles = B_c / kMmaN;
    constexpr int kOTiles = kDHead / kMmaN;
    constexpr int kBuffers = 2; // of fragments in registers: one in use, one being loaded
    constexpr int kQKSteps = kDTiles, kPVSteps = kKeyTiles / 2;

    extern __shared__ __align__(128) Element smem[];
    const uint32_t Q_smem = smem_address(smem); // (B_r, d_head)
    const uint32_t K_smem = Q_smem + B_r * kDHead * int(sizeof(Element)); // (B_c, d_head)
    const uint32_t V_smem = K_smem + B_c * kDHead * int(sizeof(Element)); // (B_c, d_head)

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp * kRowTiles * kMmaM;
    const uint32_t warp_Q_smem = Q_smem + warp_row * kPiece * int(sizeof(Element));
    uint32_t lane_offset[4], K_lane_offset[4];
    set_lane_offsets(lane_offset, K_lane_offset);

    // A stride in the config holds for all four tensors; without one, their strides are read.
    constexpr int kStride = cfg.static_row_stride;
    const int Q_stride = kStride ? kStride : args.Q_strides.row;
    const int K_stride = kStride ? kStride : args.K_strides.row;
    const int V_stride = kStride ? kStride : args.V_strides.row;
    const int64_t O_stride = kStride ? kStride : args.O_strides.row;

    const int first_row = blockIdx.x * B_r;
    const Element *Q_gmem = head_gmem(args.Q, args.Q_strides) + thread_offset(Q_stride);
    const Element *K_gmem = head_gmem(args.K, args.K_strides) + thread_offset(K_stride);
    const Element *V_gmem = head_gmem(args.V, args.V_strides) + thread_offset(V_stride);
    int next_key = args.len_k - B_c; // the first key of the block that is loaded next

    // 1. Q: global → shared; the last K and V follow
    copy_tile_async<B_r, kThreads>(Q_smem, Q_gmem, first_row, Q_stride);
    cp_async_commit();
    copy_tile_async<B_c, kThreads>(K_smem, K_gmem, next_key, K_stride);
    cp_async_commit();
    copy_tile_async<B_c, kThreads>(V_smem, V_gmem, next_key, V_stride);
    cp_async_commit();

    float O_rmem[kRowTiles][kOTiles][4] = {}; // a constant in the first block, no register
    float m_rmem[kRowTiles][2], l_rmem[kRowTiles][2];
    auto process_block = [&](auto first) {
        next_key -= B_c;
        // 2. S = Q @ K^T
        cp_async_wait<1>(); // Q and K_j have landed, V_j may be in flight
        __syncthreads(); // a warp reads rows that other warps have copied
        float S_rmem[kRowTiles][kKeyTiles][4] = {};
        uint32_t Q_rmem[kBuffers][kRowTiles][4], K_rmem[kBuffers][kKeyTiles / 2][4];
#pragma unroll
        for (int ahead = 0; ahead < kQKSteps + kBuffers - 1; ++ahead) {
            if (ahead < kQKSteps) {
                load_fragments<B_r>(Q_rmem[ahead % kBuffers], warp_Q_smem, lane_offset, ahead);
                load_fragments<B_c>(K_rmem[ahead % kBuffers], K_smem, K_lane_offset, ahead);
            }
            const int step = ahead - (kBuffers - 1);
            if (step >= 0) {
                add_product<cfg.dtype>(S_rmem, Q_rmem[step % kBuffers], K_rmem[step % kBuffers]);
            }
        }

        // 3. K_{j-1}: global → shared, in flight during softmax and P @ V
        __syncthreads(); // no warp reads K_j any more
        copy_tile_async<B_c, kThreads>(K_smem, K_gmem, next_key, K_stride, next_key >= 0 ? 16 : 0);
        cp_async_commit();

        // 4. m, l, P = softmax(S)
        uint32_t P_rmem[kKeyTiles / 2][kRowTiles][4];
        online_softmax<first.value>(S_rmem, O_rmem, m_rmem, l_rmem);
        round_P<cfg.dtype>(P_rmem, S_rmem);

        // 5. O += P @ V
        cp_async_wait<1>(); // V_j has landed, K_{j-1} may be in flight
        __syncthreads();
        uint32_t V_rmem[kBuffers][kDTiles][4];
#pragma unroll
        for (int ahead = 0; ahead < kPVSteps + kBuffers - 1; ++ahead) {
            if (ahead < kPVSteps) {
                load_V_fragments<B_c>(V_rmem[ahead % kBuffers], V_smem, lane_offset, ahead);
            }
            const int step = ahead - (kBuffers - 1);
            if (step >= 0) {
                add_product<cfg.dtype>(O_rmem, P_rmem[step], V_rmem[step % kBuffers]);
            }
        }

        // 6. V_{j-1}: global → shared, in flight during the next Q @ K^T and softmax
        __syncthreads(); // no warp reads V_j any more
        copy_tile_async<B_c, kThreads>(V_smem, V_gmem, next_key, V_stride, next_key >= 0 ? 16 : 0);
        cp_async_commit();
    };
    process_block(std::true_type{});
    while (next_key >= 0) {
        process_block(std::false_type{});
    }

    // 7. O = O / l, registers → shared
    __syncwarp(); // O takes the place of this warp's own rows of Q
    const uint32_t O_smem = Q_smem;
    // Row g of 8 has chunk n of a row at n ^ g. So n flips the bits of g · 16 in the lane's own
    // offset; the bits above them count rows, those below words. A store's address is one XOR with
    // a constant, without a shift.
    const uint32_t O_lane_smem = warp_Q_smem + smem_offset(lane / 4, lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float inverse_l = reciprocal_approx(quad_sum(l_rmem[i][half]));
#pragma unroll
            for (int n = 0; n < kOTiles; ++n) {
                const float *O = &O_rmem[i][n][2 * half];
                store_smem_4((O_lane_smem ^ n % 8 * kChunkBytes) +
                                 (i * kMmaM + half * 8) * kPiece * int(sizeof(Element)) +
                                 piece_offset<B_r>(n / 8),
                             pack<cfg.dtype>(O[0] * inverse_l, O[1] * inverse_l));
            }
        }
    }
    __syncwarp(); // a lane reads what other lanes of its warp have written

    // 8. O: shared → global, 8 lanes per row of 128 bytes
    constexpr int kRowsPerPass = 32 / kThreadsPerRow;
    const int row = warp_row + lane / kThreadsPerRow, col = lane % kThreadsPerRow * kChunk;
    Element *O_gmem = head_gmem(args.O, args.O_strides) + (first_row + row) * O_stride + col;
#pragma unroll
    for (int i = 0; i < kRowTiles * kMmaM; i += kRowsPerPass) {
#pragma unroll
        for (int piece = 0; piece < kDHead / kPiece; ++piece) {
            store_gmem_16_streaming(
                O_gmem + piece * kPiece,
                load_smem_16(O_smem + piece_offset<B_r>(piece) + smem_offset(row + i, col)));
        }
        O_gmem += kRowsPerPass * O_stride;
    }
}

} // namespace o1
