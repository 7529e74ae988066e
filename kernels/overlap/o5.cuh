#pragma once
// Step 5 of the overlap family: row sums by mma. Parent: o4.
//
// What changed
//   1. l is P @ 1: one more column tile of the product, whose B operand is a constant. The lanes'
//      own sums and the sum over the quad at the end are gone.
//   2. So l sums P as P @ V does, rounded to 16 bits.
//
// Why: 64 FADD per thread and block of keys become 2 row tiles · 4 k-tiles = 8 mma, 3% more mma.
// The FADD form a chain that ptxas leaves to the end of the block, where they hide nothing.
// Expected: a gain, since a warp's stretch without mma becomes shorter.
//
// benchmark:begin
// Measured in bursts (NVIDIA H100 80GB HBM3, CUDA 13.0, bf16), TFLOP/s at length 4096, and share
// of PyTorch's flash backend in the harmonic mean over lengths. B_r 128, B_c 64, 4 warps: 472,
// 1.28. Cost: 255 registers per thread, 96 KiB of shared memory per block, 2 blocks per SM.
// benchmark:end
// Verdict: a gain of 6.2%, to 128% of PyTorch's flash backend: as large as that of o2.
//
// Phases: as o4; 5 finds l, too.

#include "cp_async.cuh"
#include "kernels/overlap/arguments.cuh"
#include "ldmatrix.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "numeric.cuh"

namespace o5 {

constexpr int kDHead = 128;
constexpr int kDTiles = kDHead / kMmaK;
constexpr int kChunk = 8; // elements in 16 bytes: one copy of a thread, one row of ldmatrix
constexpr int kChunkBytes = kChunk * sizeof(Element);
constexpr int kPiece = 64; // columns of a piece: rows of 128 bytes, all 32 banks once
constexpr int kThreadsPerRow = kPiece / kChunk;
constexpr int kAhead = 2; // ldmatrix of K or V that run ahead of their mma
constexpr int kRing = kAhead + 1; // fragments in registers: one in use, the others being loaded

constexpr float kSoftmaxScale = 0.08838834764831845f * kLog2e; // log2(e) / sqrt(d_head)
constexpr float kMaxGrowth = 8; // P is at most 2^8; fp16 reaches almost 2^16

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

// C (kRowTiles * 16, 16) += A (kRowTiles * 16, 16) @ B (16, 16), in pair n of C's column tiles. One
// ldmatrix_x4 of K or V loads B.
template <DType kDType, int kRowTiles, int kTiles>
__device__ __forceinline__ void add_product(float (&C_rmem)[kRowTiles][kTiles][4],
                                            const uint32_t (&A_rmem)[kRowTiles][4],
                                            const uint32_t (&B_rmem)[4], int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            mma_m16n8k16<kDType>(C_rmem[i][2 * n + half], A_rmem[i], B_rmem[2 * half],
                                 B_rmem[2 * half + 1]);
        }
    }
}

// scaled_m, maximum · scale of the rows of one row tile, takes in S where that raises it by more
// than kMaxGrowth. rescale is the factor for l and O, 1 where scaled_m stays. Returns whether a
// row's scaled_m has grown.
template <int kKeyTiles>
__device__ __forceinline__ bool update_maximum(const float (&S_rmem)[kKeyTiles][4],
                                               float (&scaled_m)[2], float (&rescale)[2]) {
    bool grown = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) { // rows g and g + 8 of the accumulator
        float m = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
            m = fmaxf(m, fmaxf(S_rmem[n][2 * half], S_rmem[n][2 * half + 1]));
        }
        const float old_m = scaled_m[half];
        const float new_m = fmaxf(quad_max(m) * kSoftmaxScale, old_m);
        // true in the first block, too, where old_m is -infinity, and for NaN
        const bool grows = !(new_m - old_m <= kMaxGrowth);
        scaled_m[half] = grows ? new_m : old_m;
        rescale[half] = exp2_approx(old_m - scaled_m[half]);
        grown |= grows;
    }
    return grown;
}

// k-tile k of P = 2^(S · scale - scaled_m), in the layout of mma's A operand.
template <DType kDType, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void exponentiate(uint32_t (&P_rmem)[kRowTiles][4],
                                             const float (&S_rmem)[kRowTiles][kKeyTiles][4],
                                             const float (&scaled_m)[kRowTiles][2], int k) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float *S = &S_rmem[i][2 * k + n][2 * half];
                const float P0 = exp2_approx(fmaf(S[0], kSoftmaxScale, -scaled_m[i][half]));
                const float P1 = exp2_approx(fmaf(S[1], kSoftmaxScale, -scaled_m[i][half]));
                P_rmem[i][n * 2 + half] = pack<kDType>(P0, P1);
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
    constexpr int kKeyTiles = B_c / kMmaN, kKeyPairs = B_c / kMmaK;
    constexpr int kOTiles = kDHead / kMmaN;
    constexpr int kQKSteps = kDTiles * kKeyPairs, kPVSteps = kKeyPairs * kDTiles;
    constexpr uint32_t kStage = 2 * B_c * kDHead * sizeof(Element); // K_0, V_0, K_1, V_1
    constexpr uint32_t kOnes = cfg.dtype == DType::FP16 ? 0x3c003c00 : 0x3f803f80; // 1.0 twice

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
    int key = args.len_k - B_c; // the first key of block j

    // Copies the block at `key`, where X_gmem points, and moves X_gmem to the block before it. An
    // address computed from `key` is slower: see `ring_by_key` in docs/tuning.md.
    auto copy = [&](uint32_t tile_smem, const Element *&X_gmem, int stride, int key) {
        copy_tile_async<B_c, kThreads>(tile_smem, X_gmem, 0, stride, key >= 0 ? 16 : 0);
        X_gmem -= int64_t(B_c) * stride;
    };
    // Loads: k-tile k of the warp's rows of Q; one ldmatrix of K or V, 16 keys and 16 columns
    uint32_t Q_rmem[2][kRowTiles][4], K_rmem[kRing][4], V_rmem[kRing][4];
    auto load_Q = [&](int k) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            ldmatrix_x4(Q_rmem[k % 2][i],
                        fragment_address<B_r>(warp_Q_smem, lane_offset, i * kMmaM, k));
        }
    };
    auto load_K = [&](uint32_t stage, int step) {
        ldmatrix_x4(K_rmem[step % kRing],
                    fragment_address<B_c>(K_smem + stage, K_lane_offset, step % kKeyPairs * kMmaK,
                                          step / kKeyPairs));
    };
    auto load_V = [&](uint32_t stage, int step) {
        ldmatrix_x4_trans(V_rmem[step % kRing],
                          fragment_address<B_c>(V_smem + stage, lane_offset, step / kDTiles * kMmaK,
                                                step % kDTiles));
    };

    // 1. Q: global → shared; the last K and V follow, then the K before them
    copy_tile_async<B_r, kThreads>(Q_smem, Q_gmem, first_row, Q_stride);
    cp_async_commit();
    copy_tile_async<B_c, kThreads>(K_smem, K_gmem, key, K_stride);
    cp_async_commit();
    copy_tile_async<B_c, kThreads>(V_smem, V_gmem, key, V_stride);
    cp_async_commit();
    K_gmem += int64_t(key - B_c) * K_stride;
    V_gmem += int64_t(key - B_c) * V_stride;
    copy(K_smem + kStage, K_gmem, K_stride, key - B_c);
    cp_async_commit();
    cp_async_wait<2>(); // Q and K_j have landed, V_j and K_{j-1} may be in flight
    __syncthreads(); // a warp reads rows that other warps have copied
    load_Q(0);
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
        load_K(0, step);
    }

    float O_rmem[kRowTiles][kOTiles][4] = {};
    float L_rmem[kRowTiles][4] = {}; // P @ 1: each column holds l
    float scaled_m[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        scaled_m[i][0] = scaled_m[i][1] = -INFINITY;
    }
    uint32_t stage = 0;
    do {
        // 2. S = Q @ K^T
        float S_rmem[kRowTiles][kKeyTiles][4] = {};
#pragma unroll
        for (int step = 0; step < kQKSteps; ++step) {
            const int k = step / kKeyPairs, n = step % kKeyPairs;
            if (n == 0 && k + 1 < kDTiles) {
                load_Q(k + 1);
            }
            if (step + kAhead < kQKSteps) {
                load_K(stage, step + kAhead);
            }
            add_product<cfg.dtype>(S_rmem, Q_rmem[k % 2], K_rmem[step % kRing], n);
        }

        // 3. V_{j-1} and K_{j-2}: global → shared, in flight until the next block's barrier
        cp_async_wait<0>(); // V_j and K_{j-1} have landed
        __syncthreads(); // no warp reads K_j or V_{j+1} any more
#pragma unroll
        for (int step = 0; step < kAhead; ++step) {
            load_V(stage, step); // ahead of 16 copies on the same path
        }
        copy(V_smem + (stage ^ kStage), V_gmem, V_stride, key - B_c);
        copy(K_smem + stage, K_gmem, K_stride, key - 2 * B_c);
        cp_async_commit();

        // 4. m; l = l · rescale, O = O · rescale if a row's maximum has grown much
        float rescale[kRowTiles][2];
        bool grown = false;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            grown |= update_maximum(S_rmem[i], scaled_m[i], rescale[i]);
        }
        if (__any_sync(0xffffffff, grown)) {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    L_rmem[i][2 * half] *= rescale[i][half];
                    L_rmem[i][2 * half + 1] *= rescale[i][half];
#pragma unroll
                    for (int n = 0; n < kOTiles; ++n) {
                        O_rmem[i][n][2 * half] *= rescale[i][half];
                        O_rmem[i][n][2 * half + 1] *= rescale[i][half];
                    }
                }
            }
        }

        // 5. P = 2^(S - m), l += P @ 1, O += P @ V, a k-tile of keys at a time
        uint32_t P_rmem[kKeyPairs][kRowTiles][4];
#pragma unroll
        for (int step = 0; step < kPVSteps; ++step) {
            const int k = step / kDTiles, n = step % kDTiles;
            if (n == 0) {
                exponentiate<cfg.dtype>(P_rmem[k], S_rmem, scaled_m, k);
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) {
                    mma_m16n8k16<cfg.dtype>(L_rmem[i], P_rmem[k][i], kOnes, kOnes);
                }
            }
            if (step + kAhead < kPVSteps) {
                load_V(stage, step + kAhead);
            } else { // the first fragments of the next Q @ K^T
                if (step + kAhead == kPVSteps) {
                    load_Q(0);
                }
                load_K(stage ^ kStage, step + kAhead - kPVSteps);
            }
            add_product<cfg.dtype>(O_rmem, P_rmem[k], V_rmem[step % kRing], n);
        }
        stage ^= kStage;
        key -= B_c;
    } while (key >= 0);

    // 6. O = O / l, registers → shared
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
            const float inverse_l = reciprocal_approx(L_rmem[i][2 * half]);
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

    // 7. O: shared → global, 8 lanes per row of 128 bytes
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

} // namespace o5
