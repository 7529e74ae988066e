#pragma once
// Step 5: double-buffered fragments. Parent: v4.
//
// What changed
//   1. Two sets of fragments: the ldmatrix of the next k-tile stand before the mma of this k-tile.
//
// Why: an mma waits for the ldmatrix that loads its operands. With the next k-tile loaded ahead, 8
// mma (S) or 16 (O) lie between a load and its use. In the source that takes 20 registers per
// thread more for S and 32 more for O.
// Expected: little or no gain, since ptxas has moved the loads of v4 already. Where it has not, the
// distance grows.
//
// benchmark:begin
// Measured in bursts (NVIDIA H100 80GB HBM3, CUDA 13.0, bf16), TFLOP/s at length 4096, and share
// of PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 64, 4 warps: 324,
// 0.89. Cost: 242 registers per thread, 48 KiB of shared memory per block, 2 blocks per SM.
// benchmark:end
// Verdict: no gain on an H100: 89% of PyTorch's flash backend, as v4. ptxas does this by itself.
//
// Phases: as v4.

#include "cp_async.cuh"
#include "flash_attention.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "numeric.cuh"

namespace v5 {

constexpr int kDHead = 128;
constexpr int kDTiles = kDHead / kMmaK;
constexpr int kChunk = 8; // elements in 16 bytes: one copy of a thread, one row of ldmatrix
constexpr int kThreadsPerRow = kDHead / kChunk;
constexpr float kSoftmaxScale = 0.08838834764831845f; // 1 / sqrt(d_head)

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

// The address that this lane gives to ldmatrix for the 16 x 16 piece at (row, col). The piece's
// four 8 x 8 matrices have the order of mma's A operand: rows 0-7 and 8-15 of columns 0-7, then of
// columns 8-15.
__device__ __forceinline__ uint32_t fragment_address(uint32_t tile_smem, int row, int col) {
    const int lane = threadIdx.x % 32;
    return tile_smem + smem_offset(row + lane % 16, col + lane / 16 * kChunk);
}

// Fragments of Q or K: kPieces · 16 rows from `row` on, kTiles k-tiles of d_head from tile k0 on.
template <int kTiles, int kPieces>
__device__ __forceinline__ void load_fragments(uint32_t (&X_rmem)[kTiles][kPieces][4],
                                               uint32_t X_smem, int row, int k0) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            ldmatrix_x4(X_rmem[k][i], fragment_address(X_smem, row + i * 16, (k0 + k) * kMmaK));
        }
    }
}

// Fragments of V: kTiles k-tiles of keys from tile k0 on, all of d_head. The load transposes them,
// since mma wants its B operand by columns.
template <int kTiles>
__device__ __forceinline__ void load_V_fragments(uint32_t (&V_rmem)[kTiles][kDTiles][4],
                                                 uint32_t V_smem, int k0) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
        for (int n = 0; n < kDTiles; ++n) {
            ldmatrix_x4_trans(V_rmem[k][n], fragment_address(V_smem, (k0 + k) * kMmaK, n * 16));
        }
    }
}

// S (kRowTiles * 16, kKeyTiles * 8) += Q @ K^T over kTiles k-tiles of d_head
template <DType kDType, int kTiles, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void add_Q_Kt(float (&S_rmem)[kRowTiles][kKeyTiles][4],
                                         const uint32_t (&Q_rmem)[kTiles][kRowTiles][4],
                                         const uint32_t (&K_rmem)[kTiles][kKeyTiles / 2][4]) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                // In A's order the two halves of a k-tile are two registers apart.
                mma_m16n8k16<kDType>(S_rmem[i][n], Q_rmem[k][i], K_rmem[k][n / 2][n % 2],
                                     K_rmem[k][n / 2][n % 2 + 2]);
            }
        }
    }
}

// O (kRowTiles * 16, d_head) += P @ V over kTiles k-tiles of keys, which begin at k-tile k0 of P
template <DType kDType, int kTiles, int kRowTiles, int kPTiles>
__device__ __forceinline__ void add_P_V(float (&O_rmem)[kRowTiles][kDHead / kMmaN][4],
                                        const uint32_t (&P_rmem)[kPTiles][kRowTiles][4],
                                        const uint32_t (&V_rmem)[kTiles][kDTiles][4], int k0) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
        for (int n = 0; n < kDHead / kMmaN; ++n) {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_m16n8k16<kDType>(O_rmem[i][n], P_rmem[k0 + k][i], V_rmem[k][n / 2][n % 2 * 2],
                                     V_rmem[k][n / 2][n % 2 * 2 + 1]);
            }
        }
    }
}

// S becomes P = exp(S · scale - m), not yet divided by l. m and l of the rows take in this block.
// The sums so far, l and O, are relative to the old m, so they are rescaled to the new one.
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
                float *S = &S_rmem[i][n][2 * half];
                S[0] *= kSoftmaxScale;
                S[1] *= kSoftmaxScale;
                m[half] = fmaxf(m[half], fmaxf(S[0], S[1]));
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            m[half] = quad_max(m[half]);
            const float rescale = exp2_approx((m_rmem[i][half] - m[half]) * kLog2e);
            m_rmem[i][half] = m[half];
            l_rmem[i][half] *= rescale;
#pragma unroll
            for (int n = 0; n < kDHead / kMmaN; ++n) {
                O_rmem[i][n][2 * half] *= rescale;
                O_rmem[i][n][2 * half + 1] *= rescale;
            }
        }
        // l sums this lane's columns only; the sums of a quad are added once, at the end.
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float *S = &S_rmem[i][n][2 * half];
                S[0] = exp2_approx((S[0] - m[half]) * kLog2e);
                S[1] = exp2_approx((S[1] - m[half]) * kLog2e);
                l_rmem[i][half] += S[0] + S[1];
            }
        }
    }
}

// Two thread blocks of four warps per SM leave 255 registers per thread.
constexpr int kMinBlocks = 2;

template <typename Config>
__global__ void __launch_bounds__(Config::value.n_threads(), kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardKernelArgs args) {
    constexpr FlashForwardKernelConfig cfg = Config::value;
    static_assert(cfg.d_head == kDHead, "the kernels are written for d_head 128");
    static_assert(cfg.B_r == 64 && cfg.B_c == 64 && cfg.n_warps == 4,
                  "the tile shape becomes a parameter in v7");
    static_assert(cfg.swizzled, "shared memory is swizzled from v2 on");
    static_assert(cfg.async_copy && cfg.eager_load_blocks, "blocks are loaded ahead from v3 on");
    static_assert(cfg.Q_mma_load_K_tiles == 1 && cfg.K_mma_load_K_tiles == 1 &&
                      cfg.V_mma_load_K_tiles == 1,
                  "the number of k-tiles that are loaded at once becomes a parameter in v7");
    static_assert(cfg.mma_double_buffer_loads, "fragments are double-buffered from v5 on");
    static_assert(!cfg.optimized_softmax, "the softmax scale is folded into one FFMA from v6 on");
    static_assert(cfg.static_row_stride == 0, "the row stride can be a constant from v16 on");

    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kThreads = cfg.n_threads();
    constexpr int kRowTiles = B_r / cfg.n_warps / kMmaM; // 1: a warp has 16 rows of Q, S, P and O
    constexpr int kKeyTiles = B_c / kMmaN; // 8
    constexpr int kOTiles = kDHead / kMmaN; // 16
    constexpr int kQKLoad = cfg.K_mma_load_K_tiles, kVLoad = cfg.V_mma_load_K_tiles; // k-tiles

    extern __shared__ __align__(128) Element smem[];
    const uint32_t Q_smem = smem_address(smem); // (B_r, d_head)
    const uint32_t K_smem = Q_smem + B_r * kDHead * int(sizeof(Element)); // (B_c, d_head)
    const uint32_t V_smem = K_smem + B_c * kDHead * int(sizeof(Element)); // (B_c, d_head)

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp * kRowTiles * kMmaM;

    const int64_t first_row = int64_t(blockIdx.x) * B_r;
    const Element *Q_gmem = head_gmem(args.Q, args.Q_strides) + first_row * args.Q_strides.row +
                            thread_offset(args.Q_strides.row);
    const Element *K_gmem = head_gmem(args.K, args.K_strides) + thread_offset(args.K_strides.row);
    const Element *V_gmem = head_gmem(args.V, args.V_strides) + thread_offset(args.V_strides.row);
    const int n_blocks = args.seq_len / B_c;

    // 1. Q: global → shared; K_0 and V_0 follow
    copy_tile_async<B_r, kThreads>(Q_smem, Q_gmem, args.Q_strides.row);
    cp_async_commit();
    copy_tile_async<B_c, kThreads>(K_smem, K_gmem, args.K_strides.row);
    cp_async_commit();
    copy_tile_async<B_c, kThreads>(V_smem, V_gmem, args.V_strides.row);
    cp_async_commit();

    float O_rmem[kRowTiles][kOTiles][4] = {};
    float m_rmem[kRowTiles][2], l_rmem[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        m_rmem[i][0] = m_rmem[i][1] = -INFINITY;
        l_rmem[i][0] = l_rmem[i][1] = 0.0f;
    }

    for (int j = 0; j < n_blocks; ++j) {
        // 2. S = Q @ K^T
        cp_async_wait<1>(); // Q and K_j have landed, V_j may be in flight
        __syncthreads();
        float S_rmem[kRowTiles][kKeyTiles][4] = {};
        uint32_t Q_rmem[2][kQKLoad][kRowTiles][4], K_rmem[2][kQKLoad][kKeyTiles / 2][4]; // 8 + 32
        load_fragments(Q_rmem[0], Q_smem, warp_row, 0);
        load_fragments(K_rmem[0], K_smem, 0, 0);
#pragma unroll
        for (int step = 0; step < kDTiles / kQKLoad; ++step) {
            const int ahead = step + 1;
            if (ahead < kDTiles / kQKLoad) {
                load_fragments(Q_rmem[ahead % 2], Q_smem, warp_row, ahead * kQKLoad);
                load_fragments(K_rmem[ahead % 2], K_smem, 0, ahead * kQKLoad);
            }
            add_Q_Kt<cfg.dtype>(S_rmem, Q_rmem[step % 2], K_rmem[step % 2]);
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
        uint32_t V_rmem[2][kVLoad][kDTiles][4]; // 64 registers
        load_V_fragments(V_rmem[0], V_smem, 0);
#pragma unroll
        for (int step = 0; step < kKeyTiles / 2 / kVLoad; ++step) {
            const int ahead = step + 1;
            if (ahead < kKeyTiles / 2 / kVLoad) {
                load_V_fragments(V_rmem[ahead % 2], V_smem, ahead * kVLoad);
            }
            add_P_V<cfg.dtype>(O_rmem, P_rmem, V_rmem[step % 2], step * kVLoad);
        }

        // 6. V_{j+1}: global → shared, in flight during the next Q @ K^T and softmax
        V_gmem += B_c * args.V_strides.row;
        __syncthreads(); // no warp reads V_j any more
        copy_tile_async<B_c, kThreads>(V_smem, V_gmem, args.V_strides.row,
                                       j + 1 < n_blocks ? 16 : 0);
        cp_async_commit();
    }

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

} // namespace v5
