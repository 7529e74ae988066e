#pragma once
// Step 9: fragments in the order that mma reads. Parent: v8.
//
// What changed
//   1. The lanes of ldmatrix name the rows of K in another order: columns 0-7 and 8-15 of rows 0-7,
//      then of rows 8-15.
//   2. One function multiplies for both products, since fragments of K and V now look alike.
//
// Why: ldmatrix.x4 writes four neighbouring registers, and mma reads B from an aligned pair. In A's
// order a pair of K is registers 0 and 2, or 1 and 3, so each of the 32 ldmatrix of K per block of
// keys needs 3 or 4 moves. In the new order the pairs are registers 0 and 1, 2 and 3, and nothing
// is copied.
// Expected: about 100 MOV and IMAD.MOV fewer per block of keys, for 128 mma.
//
// benchmark:begin
// Measured in bursts (NVIDIA H100 80GB HBM3, CUDA 13.0, bf16), TFLOP/s at length 4096, and share
// of PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 64, 4 warps: 351,
// 0.97. Cost: 167 registers per thread, 48 KiB of shared memory per block, 3 blocks per SM. B_r
// 128, B_c 64, 4 warps: 394, 1.07. Cost: 255 registers per thread, 40 bytes of it spilled, 64 KiB
// of shared memory per block, 2 blocks per SM.
// benchmark:end
// Verdict: the moves are gone. B_r 64 waits for shared memory and gains little, 97% of PyTorch's
// flash backend instead of 96%. B_r 128 gains 6%, to 107%: a warp alone needs 9% fewer cycles.
//
// Phases: as v4.

#include "cp_async.cuh"
#include "flash_attention.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "numeric.cuh"

namespace v9 {

constexpr int kDHead = 128;
constexpr int kDTiles = kDHead / kMmaK;
constexpr int kChunk = 8; // elements in 16 bytes: one copy of a thread, one row of ldmatrix
constexpr int kChunkBytes = kChunk * sizeof(Element);
constexpr int kThreadsPerRow = kDHead / kChunk;
constexpr float kSoftmaxScale = 0.08838834764831845f * kLog2e; // log2(e) / sqrt(d_head)

// Byte offset of (row, col) in a tile in shared memory: rows of 256 bytes. The row permutes its
// 16-byte chunks, so that the chunks of one column in 8 rows lie in all 32 banks.
__device__ __forceinline__ uint32_t smem_offset(int row, int col) {
    const int chunk = col / kChunk ^ row % 8;
    return (row * kDHead + chunk * kChunk + col % kChunk) * sizeof(Element);
}

// Offset of a thread's part of a tile, in elements. 16 neighbouring threads share a row of 256
// bytes.
__device__ __forceinline__ int64_t thread_offset(int64_t row_stride) {
    return threadIdx.x / kThreadsPerRow * row_stride + threadIdx.x % kThreadsPerRow * kChunk;
}

// Starts the copy of a (kRows, d_head) tile; thread_gmem points to this thread's first element.
// With src_bytes 0 the copy reads nothing: it is the one after the loop's last block. A branch
// around it is slower, because it splits the code that ptxas may reorder.
template <int kRows, int kThreads>
__device__ __forceinline__ void copy_tile_async(uint32_t tile_smem, const Element *thread_gmem,
                                                int64_t row_stride, int src_bytes = 16) {
    constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
    const int row = threadIdx.x / kThreadsPerRow, col = threadIdx.x % kThreadsPerRow * kChunk;
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsPerPass) {
        cp_async_16(tile_smem + smem_offset(row + i, col), thread_gmem, src_bytes);
        thread_gmem += kRowsPerPass * row_stride;
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

__device__ __forceinline__ uint32_t fragment_address(uint32_t tile_smem,
                                                     const uint32_t (&lane_offset)[4], int row,
                                                     int k) {
    return tile_smem + lane_offset[k % 4] + (row * kDHead + k / 4 * 64) * sizeof(Element);
}

// Fragments of the rows of Q or K from X_smem on: kTiles k-tiles of d_head from tile k0 on.
template <int kTiles, int kPieces>
__device__ __forceinline__ void load_fragments(uint32_t (&X_rmem)[kTiles][kPieces][4],
                                               uint32_t X_smem, const uint32_t (&lane_offset)[4],
                                               int k0) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            ldmatrix_x4(X_rmem[k][i], fragment_address(X_smem, lane_offset, i * 16, k0 + k));
        }
    }
}

// Fragments of V: kTiles k-tiles of keys from tile k0 on, all of d_head. The load transposes them,
// since mma wants its B operand by columns.
template <int kTiles>
__device__ __forceinline__ void load_V_fragments(uint32_t (&V_rmem)[kTiles][kDTiles][4],
                                                 uint32_t V_smem, const uint32_t (&lane_offset)[4],
                                                 int k0) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
        for (int n = 0; n < kDTiles; ++n) {
            ldmatrix_x4_trans(V_rmem[k][n],
                              fragment_address(V_smem, lane_offset, (k0 + k) * kMmaK, n));
        }
    }
}

// C (kRowTiles * 16, kPairs * 16) += A @ B over the kTiles k-tiles of B, which begin at k-tile k0
// of A. It serves Q @ K^T and P @ V, since fragments of K and V have the same order.
template <DType kDType, int kATiles, int kTiles, int kRowTiles, int kPairs>
__device__ __forceinline__ void add_product(float (&C_rmem)[kRowTiles][2 * kPairs][4],
                                            const uint32_t (&A_rmem)[kATiles][kRowTiles][4],
                                            const uint32_t (&B_rmem)[kTiles][kPairs][4], int k0) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
        for (int n = 0; n < 2 * kPairs; ++n) {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_m16n8k16<kDType>(C_rmem[i][n], A_rmem[k0 + k][i], B_rmem[k][n / 2][n % 2 * 2],
                                     B_rmem[k][n / 2][n % 2 * 2 + 1]);
            }
        }
    }
}

// S becomes P = 2^(S · scale - m · scale), not yet divided by l; m is the maximum of S before
// scaling. m and l of the rows take in this block. The sums so far, l and O, are relative to the
// old m, so they are rescaled to the new one.
template <int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void online_softmax(float (&S_rmem)[kRowTiles][kKeyTiles][4],
                                               float (&O_rmem)[kRowTiles][kDHead / kMmaN][4],
                                               float (&m_rmem)[kRowTiles][2],
                                               float (&l_rmem)[kRowTiles][2]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        float m[2] = {m_rmem[i][0], m_rmem[i][1]}; // of rows g and g + 8 of the accumulator
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
            const float rescale = exp2_approx((m_rmem[i][half] - m[half]) * kSoftmaxScale);
            m_rmem[i][half] = m[half];
            l_rmem[i][half] *= rescale;
#pragma unroll
            for (int n = 0; n < kDHead / kMmaN; ++n) {
                O_rmem[i][n][2 * half] *= rescale;
                O_rmem[i][n][2 * half + 1] *= rescale;
            }
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
                l_rmem[i][half] += S[0] + S[1];
            }
        }
    }
}

// Thread blocks that an SM is to hold. Warps with 16 rows and 64 keys need at most 168 registers
// per thread: twelve warps per SM. Warps with larger tiles need up to 255: eight warps. Without a
// bound ptxas takes too many in one version, and in another so few that it gives up overlap.
constexpr int min_blocks(FlashForwardKernelConfig cfg) {
    const int warps = cfg.B_r / cfg.n_warps == kMmaM && cfg.B_c <= 64 ? 12 : 8;
    return warps > cfg.n_warps ? warps / cfg.n_warps : 1;
}

template <typename Config>
__global__ void __launch_bounds__(Config::value.n_threads(), min_blocks(Config::value))
    forward_kernel(const __grid_constant__ ForwardKernelArgs args) {
    constexpr FlashForwardKernelConfig cfg = Config::value;
    static_assert(cfg.d_head == kDHead, "the kernels are written for d_head 128");
    static_assert(cfg.swizzled, "shared memory is swizzled from v2 on");
    static_assert(cfg.async_copy && cfg.eager_load_blocks, "blocks are loaded ahead from v3 on");
    static_assert(cfg.B_r % (cfg.n_warps * kMmaM) == 0 && cfg.B_c % kMmaK == 0,
                  "a warp takes whole 16-row tiles of Q, and P whole k-tiles of keys");
    static_assert(cfg.B_r % (cfg.n_threads() / kThreadsPerRow) == 0 &&
                      cfg.B_c % (cfg.n_threads() / kThreadsPerRow) == 0,
                  "every thread copies the same number of chunks of a tile");
    static_assert(cfg.Q_mma_load_K_tiles == 0 || cfg.Q_mma_load_K_tiles == cfg.K_mma_load_K_tiles,
                  "Q stays in registers (0) or is loaded along with K");
    static_assert(cfg.optimized_softmax, "the softmax scale is folded into one FFMA from v6 on");
    static_assert(cfg.static_row_stride == 0, "the row stride can be a constant from v16 on");

    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kThreads = cfg.n_threads();
    constexpr int kRowTiles = B_r / cfg.n_warps / kMmaM; // per warp
    constexpr int kKeyTiles = B_c / kMmaN;
    constexpr int kOTiles = kDHead / kMmaN;
    constexpr int kBuffers = cfg.mma_double_buffer_loads ? 2 : 1;
    constexpr int kQKLoad = cfg.K_mma_load_K_tiles ? cfg.K_mma_load_K_tiles : kDTiles;
    constexpr int kVLoad = cfg.V_mma_load_K_tiles ? cfg.V_mma_load_K_tiles : kKeyTiles / 2;
    constexpr int kQKSteps = kDTiles / kQKLoad, kPVSteps = kKeyTiles / 2 / kVLoad;
    constexpr bool kQResident = cfg.Q_mma_load_K_tiles == 0;

    extern __shared__ __align__(128) Element smem[];
    const uint32_t Q_smem = smem_address(smem); // (B_r, d_head)
    const uint32_t K_smem = Q_smem + B_r * kDHead * int(sizeof(Element)); // (B_c, d_head)
    const uint32_t V_smem = K_smem + B_c * kDHead * int(sizeof(Element)); // (B_c, d_head)

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp * kRowTiles * kMmaM;
    const uint32_t warp_Q_smem = Q_smem + warp_row * kDHead * int(sizeof(Element));
    uint32_t lane_offset[4], K_lane_offset[4];
    set_lane_offsets(lane_offset, K_lane_offset);

    const int64_t first_row = int64_t(blockIdx.x) * B_r;
    const Element *Q_gmem = head_gmem(args.Q, args.Q_strides) + first_row * args.Q_strides.row +
                            thread_offset(args.Q_strides.row);
    const Element *K_gmem = head_gmem(args.K, args.K_strides) + thread_offset(args.K_strides.row);
    const Element *V_gmem = head_gmem(args.V, args.V_strides) + thread_offset(args.V_strides.row);
    const int n_blocks = args.seq_len / B_c;

    // 1. Q: global → shared (→ registers); K_0 and V_0 follow
    copy_tile_async<B_r, kThreads>(Q_smem, Q_gmem, args.Q_strides.row);
    cp_async_commit();
    copy_tile_async<B_c, kThreads>(K_smem, K_gmem, args.K_strides.row);
    cp_async_commit();
    copy_tile_async<B_c, kThreads>(V_smem, V_gmem, args.V_strides.row);
    cp_async_commit();

    uint32_t Q_rmem[kQResident ? kQKSteps : kBuffers][kQKLoad][kRowTiles][4];
    if constexpr (kQResident) {
        cp_async_wait<2>();
        __syncthreads(); // a warp reads rows that other warps have copied
#pragma unroll
        for (int step = 0; step < kQKSteps; ++step) {
            load_fragments(Q_rmem[step], warp_Q_smem, lane_offset, step * kQKLoad);
        }
    }

    float O_rmem[kRowTiles][kOTiles][4] = {};
    float m_rmem[kRowTiles][2], l_rmem[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        m_rmem[i][0] = m_rmem[i][1] = -INFINITY;
        l_rmem[i][0] = l_rmem[i][1] = 0.0f;
    }

    int j = 0;
    do { // A test before the first block would make ptxas move the epilogue's addresses here, and
         // spill.
        // 2. S = Q @ K^T
        cp_async_wait<1>(); // Q and K_j have landed, V_j may be in flight
        __syncthreads();
        float S_rmem[kRowTiles][kKeyTiles][4] = {};
        uint32_t K_rmem[kBuffers][kQKLoad][kKeyTiles / 2][4];
#pragma unroll
        for (int ahead = 0; ahead < kQKSteps + kBuffers - 1; ++ahead) {
            if (ahead < kQKSteps) {
                if constexpr (!kQResident) {
                    load_fragments(Q_rmem[ahead % kBuffers], warp_Q_smem, lane_offset,
                                   ahead * kQKLoad);
                }
                load_fragments(K_rmem[ahead % kBuffers], K_smem, K_lane_offset, ahead * kQKLoad);
            }
            const int step = ahead - (kBuffers - 1);
            if (step >= 0) {
                add_product<cfg.dtype>(S_rmem, Q_rmem[kQResident ? step : step % kBuffers],
                                       K_rmem[step % kBuffers], 0);
            }
        }

        // 3. K_{j+1}: global → shared, in flight during softmax and P @ V
        K_gmem += B_c * args.K_strides.row;
        __syncthreads(); // no warp reads K_j any more
        copy_tile_async<B_c, kThreads>(K_smem, K_gmem, args.K_strides.row,
                                       j + 1 < n_blocks ? 16 : 0);
        cp_async_commit();

        // 4. m, l, P = softmax(S)
        uint32_t P_rmem[kKeyTiles / 2][kRowTiles][4];
        online_softmax(S_rmem, O_rmem, m_rmem, l_rmem);
        round_P<cfg.dtype>(P_rmem, S_rmem);

        // 5. O += P @ V
        cp_async_wait<1>(); // V_j has landed, K_{j+1} may be in flight
        __syncthreads();
        uint32_t V_rmem[kBuffers][kVLoad][kDTiles][4];
#pragma unroll
        for (int ahead = 0; ahead < kPVSteps + kBuffers - 1; ++ahead) {
            if (ahead < kPVSteps) {
                load_V_fragments(V_rmem[ahead % kBuffers], V_smem, lane_offset, ahead * kVLoad);
            }
            const int step = ahead - (kBuffers - 1);
            if (step >= 0) {
                add_product<cfg.dtype>(O_rmem, P_rmem, V_rmem[step % kBuffers], step * kVLoad);
            }
        }

        // 6. V_{j+1}: global → shared, in flight during the next Q @ K^T and softmax
        V_gmem += B_c * args.V_strides.row;
        __syncthreads(); // no warp reads V_j any more
        copy_tile_async<B_c, kThreads>(V_smem, V_gmem, args.V_strides.row,
                                       j + 1 < n_blocks ? 16 : 0);
        cp_async_commit();
    } while (++j < n_blocks);

    // 7. O = O / l, registers → shared
    __syncwarp(); // O takes the place of this warp's own rows of Q
    const uint32_t O_smem = Q_smem;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float l = quad_sum(l_rmem[i][half]);
            const int row = warp_row + i * kMmaM + half * 8 + lane / 4;
#pragma unroll
            for (int n = 0; n < kOTiles; ++n) {
                const float *O = &O_rmem[i][n][2 * half];
                store_smem_4(O_smem + smem_offset(row, n * kMmaN + lane % 4 * 2),
                             pack<cfg.dtype>(__fdividef(O[0], l), __fdividef(O[1], l)));
            }
        }
    }
    __syncwarp(); // a lane reads what other lanes of its warp have written

    // 8. O: shared → global, 16 lanes per row of 256 bytes
    constexpr int kRowsPerPass = 32 / kThreadsPerRow;
    const int row = warp_row + lane / kThreadsPerRow, col = lane % kThreadsPerRow * kChunk;
    Element *O_gmem =
        head_gmem(args.O, args.O_strides) + (first_row + row) * args.O_strides.row + col;
#pragma unroll
    for (int i = 0; i < kRowTiles * kMmaM; i += kRowsPerPass) {
        store_gmem_16(O_gmem, load_smem_16(O_smem + smem_offset(row + i, col)));
        O_gmem += kRowsPerPass * args.O_strides.row;
    }
}

} // namespace v9
