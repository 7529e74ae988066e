#pragma once
// Step 1: the base. FlashAttention-2's forward pass (arXiv 2307.08691) on tensor cores.
//
// A thread block computes B_r = 64 rows of Q of one head, each warp 16 of them. The loop goes over
// K and V in blocks of B_c = 64 keys. S and P never leave the registers.
//
// The parts
//   1. cp.async copies the tiles to shared memory, 16 bytes per thread, without passing registers.
//   2. ldmatrix loads them as fragments, four 8 x 8 matrices per instruction.
//   3. mma.m16n8k16 multiplies: 16-bit operands, fp32 sums.
//   4. The softmax runs on the accumulators. A row lies in four lanes, so two shuffles reduce it.
//   5. O is stored through shared memory, so that a warp stores whole rows, 16 bytes per lane.
//
// All fragments of a tile are loaded before the first is multiplied: 128 registers per thread for
// K, 128 for V.
//
// Why it is slow: a row of a tile has 256 bytes, twice around the 32 banks of 4 bytes. The 8 rows
// that ldmatrix reads for one matrix lie 256 bytes apart, all in the same 4 banks: 8 wavefronts
// instead of 1. Per block of keys a warp executes 64 ldmatrix.x4, 64 · 4 · 8 = 2048 wavefronts,
// where 256 would do. With 64 wavefronts for its copies, shared memory is busy for 2112 cycles. The
// SM's tensor cores need 128 · 1.5 = 192 cycles for its 128 mma.
// Expected: bound by shared memory; 192 / 2112, less than a tenth of what the tensor cores can do.
//
// benchmark:begin
// Measured in bursts (NVIDIA H100 80GB HBM3, CUDA 13.0, bf16), TFLOP/s at length 4096, and share
// of PyTorch's flash backend in the harmonic mean over lengths. B_r 64, B_c 64, 4 warps: 58, 0.16.
// Cost: 197 registers per thread, 48 KiB of shared memory per block, 2 blocks per SM.
// benchmark:end
// Verdict: right, and slow for this one reason: 16% of PyTorch's flash backend. It is the reference
// for all steps that follow.
//
// Phases: 1 Q to registers. For each block of keys: 2 K and V to shared memory, 3 S = Q @ K^T,
// 4 softmax, 5 O += P @ V. Then 6 O / l to shared memory, 7 O to global memory.

#include "cp_async.cuh"
#include "flash_attention.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "numeric.cuh"

namespace v1 {

constexpr int kDHead = 128;
constexpr int kDTiles = kDHead / kMmaK;
constexpr int kChunk = 8; // elements in 16 bytes: one copy of a thread, one row of ldmatrix
constexpr int kThreadsPerRow = kDHead / kChunk;
constexpr float kSoftmaxScale = 0.08838834764831845f; // 1 / sqrt(d_head)

// Byte offset of (row, col) in a tile in shared memory: rows of 256 bytes, one after the other.
__device__ __forceinline__ uint32_t smem_offset(int row, int col) {
    return (row * kDHead + col) * sizeof(Element);
}

// Offset of a thread's part of a tile, in elements. 16 neighbouring threads share a row of 256
// bytes.
__device__ __forceinline__ int64_t thread_offset(int64_t row_stride) {
    return threadIdx.x / kThreadsPerRow * row_stride + threadIdx.x % kThreadsPerRow * kChunk;
}

// Starts the copy of a (kRows, d_head) tile; thread_gmem points to this thread's first element.
template <int kRows, int kThreads>
__device__ __forceinline__ void copy_tile_async(uint32_t tile_smem, const Element *thread_gmem,
                                                int64_t row_stride) {
    constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
    const int row = threadIdx.x / kThreadsPerRow, col = threadIdx.x % kThreadsPerRow * kChunk;
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsPerPass) {
        cp_async_16(tile_smem + smem_offset(row + i, col), thread_gmem);
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
    static_assert(!cfg.swizzled, "shared memory is swizzled from v2 on");
    static_assert(cfg.async_copy && !cfg.eager_load_blocks, "blocks are loaded ahead from v3 on");
    static_assert(cfg.Q_mma_load_K_tiles == 0 && cfg.K_mma_load_K_tiles == 0 &&
                      cfg.V_mma_load_K_tiles == 0,
                  "fragments are loaded piece by piece from v4 on");
    static_assert(!cfg.mma_double_buffer_loads, "fragments are double-buffered from v5 on");
    static_assert(!cfg.optimized_softmax, "the softmax scale is folded into one FFMA from v6 on");
    static_assert(cfg.static_row_stride == 0, "the row stride can be a constant from v16 on");

    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kThreads = cfg.n_threads();
    constexpr int kRowTiles = B_r / cfg.n_warps / kMmaM; // 1: a warp has 16 rows of Q, S, P and O
    constexpr int kKeyTiles = B_c / kMmaN; // 8
    constexpr int kOTiles = kDHead / kMmaN; // 16

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

    // 1. Q: global → shared → registers, where it stays
    copy_tile_async<B_r, kThreads>(Q_smem, Q_gmem, args.Q_strides.row);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads(); // a warp reads rows that other warps have copied
    uint32_t Q_rmem[kDTiles][kRowTiles][4];
    load_fragments(Q_rmem, Q_smem, warp_row, 0);

    float O_rmem[kRowTiles][kOTiles][4] = {};
    float m_rmem[kRowTiles][2], l_rmem[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        m_rmem[i][0] = m_rmem[i][1] = -INFINITY;
        l_rmem[i][0] = l_rmem[i][1] = 0.0f;
    }

    for (int j = 0; j < n_blocks; ++j) {
        // 2. K_j and V_j: global → shared
        __syncthreads(); // no warp reads K_{j-1} and V_{j-1} any more
        copy_tile_async<B_c, kThreads>(K_smem, K_gmem, args.K_strides.row);
        cp_async_commit();
        copy_tile_async<B_c, kThreads>(V_smem, V_gmem, args.V_strides.row);
        cp_async_commit();
        K_gmem += B_c * args.K_strides.row;
        V_gmem += B_c * args.V_strides.row;

        // 3. S = Q @ K^T
        cp_async_wait<1>(); // K_j has landed, V_j may be in flight
        __syncthreads();
        float S_rmem[kRowTiles][kKeyTiles][4] = {};
        uint32_t K_rmem[kDTiles][kKeyTiles / 2][4]; // 128 registers
        load_fragments(K_rmem, K_smem, 0, 0);
        add_Q_Kt<cfg.dtype>(S_rmem, Q_rmem, K_rmem);

        // 4. m, l, P = softmax(S)
        uint32_t P_rmem[kKeyTiles / 2][kRowTiles][4];
        online_softmax(S_rmem, O_rmem, m_rmem, l_rmem);
        round_P<cfg.dtype>(P_rmem, S_rmem);

        // 5. O += P @ V
        cp_async_wait<0>();
        __syncthreads(); // V_j has landed for every thread
        uint32_t V_rmem[kKeyTiles / 2][kDTiles][4]; // 128 registers
        load_V_fragments(V_rmem, V_smem, 0);
        add_P_V<cfg.dtype>(O_rmem, P_rmem, V_rmem, 0);
    }

    // 6. O = O / l, registers → shared
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

    // 7. O: shared → global, 16 lanes per row of 256 bytes
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

} // namespace v1
