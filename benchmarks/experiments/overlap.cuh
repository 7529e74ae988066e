#pragma once
// Other main loops for version 16's kernel: what was tried on the way to src/include/two_stage.cuh,
// failures included. docs/tuning.md says why each was tried and what came out.
//
// An experiment is a config that names its loop:
//     struct pipelined {
//         static constexpr FlashForwardKernelConfig value = {...};
//         using Loop = experiments::Pipelined<value>;
//     };
// and v16::forward_kernel<pipelined>, which loads Q, walks K and V backwards and stores O, is then
// run with it. Without a Loop it is version 16's own. The list is in overlap.py.
//
// All have two buffers each for K and V, and one barrier a block of keys. They differ in where that
// stands, in which order S = Q @ K^T, softmax and O += P @ V follow each other, and in how operands
// come from shared memory.

#include "forward_kernel.cuh"

#include <utility>

namespace experiments {

// What version 16 gives its loop. Buffers are named by their distance from the first, 0 or kStage.
template <FlashForwardKernelConfig cfg>
struct Operands {
    static constexpr int kRowTiles = cfg.B_r / cfg.n_warps / kMmaM; // of a warp
    static constexpr uint32_t kTile = cfg.B_c * v16::kDHead * sizeof(Element); // bytes
    static constexpr uint32_t kStage = 2 * kTile; // K_0, V_0, K_1, V_1

    uint32_t warp_Q_smem, K_smem, V_smem;
    uint32_t lane_offset[4], K_lane_offset[4];
    const Element *K_gmem, *V_gmem;
    int K_stride, V_stride;

    // k-tile k of the warp's rows of Q
    __device__ __forceinline__ void load_Q(uint32_t (&Q_rmem)[kRowTiles][4], int k) const {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            ldmatrix_x4(Q_rmem[i],
                        v16::fragment_address<cfg.B_r>(warp_Q_smem, lane_offset, i * kMmaM, k));
        }
    }
    // 16 keys from row on, k-tile k, of a tile of kRows
    template <int kRows = cfg.B_c>
    __device__ __forceinline__ void load_K(uint32_t (&K_rmem)[4], uint32_t tile_smem, int row,
                                           int k) const {
        ldmatrix_x4(K_rmem, v16::fragment_address<kRows>(tile_smem, K_lane_offset, row, k));
    }
    // 16 keys from row on, columns 16 * n on
    __device__ __forceinline__ void load_V(uint32_t (&V_rmem)[4], uint32_t stage, int row,
                                           int n) const {
        ldmatrix_x4_trans(V_rmem,
                          v16::fragment_address<cfg.B_c>(V_smem + stage, lane_offset, row, n));
    }
    // kRows keys from `key` on; nothing is read before the first key
    template <int kRows = cfg.B_c>
    __device__ __forceinline__ void copy_K(uint32_t tile_smem, int key) const {
        v16::copy_tile_async<kRows, cfg.n_threads()>(tile_smem, K_gmem, key, K_stride,
                                                     key >= 0 ? 16 : 0);
    }
    __device__ __forceinline__ void copy_V(uint32_t stage, int key) const {
        v16::copy_tile_async<cfg.B_c, cfg.n_threads()>(V_smem + stage, V_gmem, key, V_stride,
                                                       key >= 0 ? 16 : 0);
    }
};

// m and l of a warp's rows.
template <FlashForwardKernelConfig cfg>
struct Softmax {
    static constexpr int kRowTiles = Operands<cfg>::kRowTiles;
    static constexpr uint32_t kOnes = cfg.dtype == DType::FP16 ? 0x3c003c00 : 0x3f803f80;

    float scaled_m[kRowTiles][2];
    float l[kRowTiles][2]; // of this lane's columns
    float L[kRowTiles][4] = {}; // P @ 1: all columns are l
    float rescale[kRowTiles][2];
    bool grown = false; // rescale is not 1 everywhere

    __device__ __forceinline__ Softmax() {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                scaled_m[i][half] = -INFINITY;
                l[i][half] = 0;
                rescale[i][half] = 1;
            }
        }
    }
    // m takes in S; what l and O are then to be multiplied by
    template <int kKeyTiles>
    __device__ __forceinline__ void take(const float (&S_rmem)[kRowTiles][kKeyTiles][4]) {
        grown = false;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            grown |= v16::update_maximum<cfg.lazy_rescale>(S_rmem[i], scaled_m[i], rescale[i]);
        }
        if constexpr (!cfg.lazy_rescale) {
            grown = true;
        }
    }
    // Has an element of S grown by more than kMaxGrowth powers of two over its row's m? Asked of
    // the lanes' own columns, without the shuffles of a row's maximum. The same in all lanes.
    template <int kKeyTiles>
    __device__ __forceinline__ bool outgrows(const float (&S_rmem)[kRowTiles][kKeyTiles][4]) const {
        bool grows = false;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float m = -INFINITY;
#pragma unroll
                for (int n = 0; n < kKeyTiles; ++n) {
                    m = fmaxf(m, fmaxf(S_rmem[i][n][2 * half], S_rmem[i][n][2 * half + 1]));
                }
                // written so that the first block, where m is -infinity, counts as growth
                grows |= !(m * v16::kSoftmaxScale <= scaled_m[i][half] + v16::kMaxGrowth);
            }
        }
        return __any_sync(0xffffffff, grows);
    }
    __device__ __forceinline__ void rescale_l() {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                l[i][half] *= rescale[i][half];
                L[i][2 * half] *= rescale[i][half];
                L[i][2 * half + 1] *= rescale[i][half];
            }
        }
    }
    template <int kTiles>
    __device__ __forceinline__ void rescale_O(float (&O_rmem)[kRowTiles][kTiles][4]) const {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    O_rmem[i][n][e] *= rescale[i][e / 2];
                }
            }
        }
    }
    // does O have to be multiplied? The same answer in all lanes
    __device__ __forceinline__ bool must_rescale() const {
        return !cfg.lazy_rescale || __any_sync(0xffffffff, grown);
    }
    // P's k-tile k, added to l
    template <int kKeyTiles>
    __device__ __forceinline__ void exponentiate(uint32_t (&P_rmem)[kRowTiles][4],
                                                 const float (&S_rmem)[kRowTiles][kKeyTiles][4],
                                                 int k) {
        v16::exponentiate<cfg.dtype, !cfg.mma_row_sum>(P_rmem, S_rmem, scaled_m, l, k);
        if constexpr (cfg.mma_row_sum) {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_m16n8k16<cfg.dtype>(L[i], P_rmem[i], kOnes, kOnes);
            }
        }
    }
    __device__ __forceinline__ void finish(float (&l_rmem)[kRowTiles][2]) const {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                l_rmem[i][half] = cfg.mma_row_sum ? L[i][2 * half] : quad_sum(l[i][half]);
            }
        }
    }
};

template <int kRowTiles>
using OutputTile = float[kRowTiles][v16::kDHead / kMmaN][4]; // O (warp's rows, d_head)

// S (warp's rows, kKeyTiles * 8) = Q @ K^T for the keys of a tile of kRows from row on. The first
// kResident k-tiles of Q are in registers; all else is loaded right before its mma, and ptxas may
// move it up.
template <int kRows, FlashForwardKernelConfig cfg, int kResident, int kKeyTiles>
__device__ __forceinline__ void
compute_scores(float (&S_rmem)[Operands<cfg>::kRowTiles][kKeyTiles][4],
               uint32_t (&Q_resident)[kResident + 1][Operands<cfg>::kRowTiles][4],
               const Operands<cfg> &operands, uint32_t K_tile_smem, int row) {
    constexpr int kRowTiles = Operands<cfg>::kRowTiles;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                S_rmem[i][n][e] = 0;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < v16::kDTiles; ++k) {
        uint32_t Q_rmem[kRowTiles][4];
        if (k >= kResident) {
            operands.load_Q(Q_rmem, k);
        }
#pragma unroll
        for (int n = 0; n < kKeyTiles / 2; ++n) {
            uint32_t K_rmem[4];
            operands.template load_K<kRows>(K_rmem, K_tile_smem, row + n * kMmaK, k);
            v16::add_tile_product<cfg.dtype>(
                S_rmem, k < kResident ? Q_resident[k < kResident ? k : 0] : Q_rmem, K_rmem, n);
        }
    }
}

// O += P @ V for P's k-tile of the 16 keys from row on.
template <FlashForwardKernelConfig cfg>
__device__ __forceinline__ void add_values(OutputTile<Operands<cfg>::kRowTiles> &O_rmem,
                                           const uint32_t (&P_rmem)[Operands<cfg>::kRowTiles][4],
                                           const Operands<cfg> &operands, uint32_t stage, int row) {
#pragma unroll
    for (int n = 0; n < v16::kDTiles; ++n) {
        uint32_t V_rmem[4];
        operands.load_V(V_rmem, stage, row, n);
        v16::add_tile_product<cfg.dtype>(O_rmem, P_rmem, V_rmem, n);
    }
}

// The one-stage loop's products, a k-tile of fragments ahead, but two buffers and one barrier.
template <FlashForwardKernelConfig cfg>
struct WholeTiles {
    static __device__ __forceinline__ void run(OutputTile<Operands<cfg>::kRowTiles> &O_rmem,
                                               Softmax<cfg> &softmax, const Operands<cfg> &operands,
                                               int key) {
        constexpr int B_c = cfg.B_c, kRowTiles = Operands<cfg>::kRowTiles;
        constexpr int kKeyPairs = B_c / kMmaK;
        uint32_t stage = 0;
        do {
            cp_async_wait<0>(); // Q, K_j and V_j have landed
            __syncthreads(); // no warp reads K_{j+1} or V_{j+1} any more
            const uint32_t K_tile_smem = operands.K_smem + stage;
            const uint32_t next = stage ^ Operands<cfg>::kStage;
            operands.copy_K(operands.K_smem + next, key - B_c);
            operands.copy_V(next, key - B_c);
            cp_async_commit();

            float S_rmem[kRowTiles][B_c / kMmaN][4] = {};
            uint32_t Q_rmem[2][1][kRowTiles][4], K_rmem[2][1][kKeyPairs][4];
#pragma unroll
            for (int ahead = 0; ahead <= v16::kDTiles; ++ahead) {
                if (ahead < v16::kDTiles) {
                    v16::load_fragments<cfg.B_r>(Q_rmem[ahead % 2], operands.warp_Q_smem,
                                                 operands.lane_offset, ahead);
                    v16::load_fragments<B_c>(K_rmem[ahead % 2], K_tile_smem, operands.K_lane_offset,
                                             ahead);
                }
                if (ahead > 0) {
                    v16::add_product<cfg.dtype>(S_rmem, Q_rmem[(ahead - 1) % 2],
                                                K_rmem[(ahead - 1) % 2], 0);
                }
            }
            softmax.take(S_rmem);
            if (softmax.must_rescale()) {
                softmax.rescale_l();
                softmax.rescale_O(O_rmem);
            }
            uint32_t P_rmem[kKeyPairs][kRowTiles][4];
#pragma unroll
            for (int k = 0; k < kKeyPairs; ++k) {
                softmax.exponentiate(P_rmem[k], S_rmem, k);
            }
            uint32_t V_rmem[2][1][v16::kDTiles][4];
#pragma unroll
            for (int ahead = 0; ahead <= kKeyPairs; ++ahead) {
                if (ahead < kKeyPairs) {
                    v16::load_V_fragments<B_c>(V_rmem[ahead % 2], operands.V_smem + stage,
                                               operands.lane_offset, ahead);
                }
                if (ahead > 0) {
                    v16::add_product<cfg.dtype>(O_rmem, P_rmem, V_rmem[(ahead - 1) % 2], ahead - 1);
                }
            }
            stage = next;
            key -= B_c;
        } while (key >= 0);
    }
};

// S of the next block before P @ V of this one, so that its softmax has mma to hide behind.
template <FlashForwardKernelConfig cfg, int kResident = 0>
struct Pipelined {
    static __device__ __forceinline__ void run(OutputTile<Operands<cfg>::kRowTiles> &O_rmem,
                                               Softmax<cfg> &softmax, const Operands<cfg> &operands,
                                               int key) {
        constexpr int B_c = cfg.B_c, kRowTiles = Operands<cfg>::kRowTiles;
        constexpr int kKeyPairs = B_c / kMmaK;
        constexpr uint32_t kStage = Operands<cfg>::kStage;
        float S_rmem[kRowTiles][B_c / kMmaN][4];
        uint32_t P_rmem[kKeyPairs][kRowTiles][4], Q_resident[kResident + 1][kRowTiles][4];

        operands.copy_K(operands.K_smem + kStage, key - B_c);
        cp_async_commit();
        cp_async_wait<2>(); // Q and K_j have landed
        __syncthreads(); // a warp reads rows that other warps have copied
#pragma unroll
        for (int k = 0; k < kResident; ++k) {
            operands.load_Q(Q_resident[k], k);
        }
        compute_scores<B_c, cfg, kResident>(S_rmem, Q_resident, operands, operands.K_smem, 0);
        softmax.take(S_rmem);
#pragma unroll
        for (int k = 0; k < kKeyPairs; ++k) {
            softmax.exponentiate(P_rmem[k], S_rmem, k);
        }
        uint32_t stage = 0; // of V_j; K_{j-1} is in the other
        for (; key > 0; key -= B_c, stage ^= kStage) {
            cp_async_wait<0>(); // V_j and K_{j-1} have landed
            __syncthreads(); // no warp reads V_{j+1} or K_j any more
            operands.copy_V(stage ^ kStage, key - B_c);
            operands.copy_K(operands.K_smem + stage, key - 2 * B_c);
            cp_async_commit();
            if (softmax.must_rescale()) {
                softmax.rescale_O(O_rmem); // to m_j, which P_j refers to
            }
            compute_scores<B_c, cfg, kResident>(S_rmem, Q_resident, operands,
                                                operands.K_smem + (stage ^ kStage), 0);
            add_values(O_rmem, P_rmem[0], operands, stage, 0);
            softmax.take(S_rmem);
            softmax.rescale_l();
            uint32_t P_next_rmem[kKeyPairs][kRowTiles][4];
#pragma unroll
            for (int k = 1; k < kKeyPairs; ++k) {
                softmax.exponentiate(P_next_rmem[k - 1], S_rmem, k - 1);
                add_values(O_rmem, P_rmem[k], operands, stage, k * kMmaK);
            }
            softmax.exponentiate(P_next_rmem[kKeyPairs - 1], S_rmem, kKeyPairs - 1);
#pragma unroll
            for (int k = 0; k < kKeyPairs; ++k) {
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        P_rmem[k][i][r] = P_next_rmem[k][i][r];
                    }
                }
            }
        }
        cp_async_wait<0>();
        __syncthreads();
        softmax.rescale_O(O_rmem);
#pragma unroll
        for (int k = 0; k < kKeyPairs; ++k) {
            add_values(O_rmem, P_rmem[k], operands, stage, k * kMmaK);
        }
    }
};

// The same overlap with fewer registers: blocks are walked kSub keys at a time, and S of the next
// kSub is computed before the softmax of these. The next ones of a block's last are in another
// block, so K's blocks lie kSub keys before V's: K as kSub rows each, (B_c / kSub) tiles of them.
template <FlashForwardKernelConfig cfg, int kSub>
struct SubBlocks {
    static constexpr int kSubs = cfg.B_c / kSub;
    static_assert(kSubs % 2 == 0, "S changes its place with every kSub keys");

    // Tile u: the keys before those of V's rows B_c - (u + 1) * kSub on.
    static __device__ __forceinline__ void copy_K(const Operands<cfg> &operands, uint32_t stage,
                                                  int key) {
#pragma unroll
        for (int u = 0; u < kSubs; ++u) {
            operands.template copy_K<kSub>(operands.K_smem + stage +
                                               u * Operands<cfg>::kTile / kSubs,
                                           key + cfg.B_c - (u + 2) * kSub);
        }
    }

    static __device__ __forceinline__ void run(OutputTile<Operands<cfg>::kRowTiles> &O_rmem,
                                               Softmax<cfg> &softmax, const Operands<cfg> &operands,
                                               int key) {
        constexpr int B_c = cfg.B_c, kRowTiles = Operands<cfg>::kRowTiles;
        constexpr uint32_t kStage = Operands<cfg>::kStage;
        float S_rmem[2][kRowTiles][kSub / kMmaN][4];
        uint32_t none[1][kRowTiles][4]; // of Q in registers

        copy_K(operands, kStage, key);
        cp_async_commit();
        cp_async_wait<2>(); // Q and the last block of K have landed, as one tile of B_c rows
        __syncthreads(); // a warp reads rows that other warps have copied
        compute_scores<B_c, cfg, 0>(S_rmem[0], none, operands, operands.K_smem, B_c - kSub);
        uint32_t stage = 0; // of V_j; K is in the other
        do {
            cp_async_wait<0>(); // V_j and K_j have landed
            __syncthreads(); // no warp reads V_{j+1} or K_{j+1} any more
            operands.copy_V(stage ^ kStage, key - B_c);
            copy_K(operands, stage, key - B_c);
            cp_async_commit();
#pragma unroll
            for (int u = 0; u < kSubs; ++u) {
                const uint32_t K_tile_smem =
                    operands.K_smem + (stage ^ kStage) + u * Operands<cfg>::kTile / kSubs;
                compute_scores<kSub, cfg, 0>(S_rmem[(u + 1) % 2], none, operands, K_tile_smem, 0);
                softmax.take(S_rmem[u % 2]);
                if (softmax.must_rescale()) {
                    softmax.rescale_l();
                    softmax.rescale_O(O_rmem);
                }
#pragma unroll
                for (int k = 0; k < kSub / kMmaK; ++k) {
                    uint32_t P_rmem[kRowTiles][4];
                    softmax.exponentiate(P_rmem, S_rmem[u % 2], k);
                    add_values(O_rmem, P_rmem, operands, stage, B_c - (u + 1) * kSub + k * kMmaK);
                }
            }
            stage ^= kStage;
            key -= B_c;
        } while (key >= 0);
    }
};

enum class Copies {
    together, // behind the barrier
    immediate, // the same, distances in the instructions instead of in registers
    interleaved, // as immediate, but a pass of all threads every fourth step of P @ V
};

struct RingOptions {
    int ahead = v16::kAhead;
    bool vote = false; // whether a maximum has grown, before it is known
    bool copies_first = false; // ahead of V's first fragments
    bool copies_by_key = false; // addresses computed in each block, not moved on
    bool barrier_first = false; // at the top of a block, not between its Q @ K^T and its softmax
    Copies copies = Copies::together;
};

// Starts a copy of 16 bytes between addresses plus constants, which the instruction holds.
template <int kSmemBytes, int kGmemBytes>
__device__ __forceinline__ void cp_async_16_at(uint32_t dst_smem, const void *src_gmem,
                                               int src_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0 + %3], [%1 + %4], 16, %2;" ::"r"(dst_smem),
                 "l"(src_gmem), "r"(src_bytes), "n"(kSmemBytes), "n"(kGmemBytes)
                 : "memory");
}

// Version 16's own loop, its constants, its barrier and its copies as options.
template <FlashForwardKernelConfig cfg, RingOptions options>
struct Ring {
    static constexpr int B_c = cfg.B_c, kRowTiles = Operands<cfg>::kRowTiles;
    static constexpr int kAhead = options.ahead, kRing = kAhead + 1;
    static constexpr int kRowsPerPass = cfg.n_threads() / v16::kThreadsPerRow;
    static constexpr int kPasses = B_c / kRowsPerPass; // of a tile
    static constexpr int kKeyPairs = B_c / kMmaK;
    static constexpr int kQKSteps = v16::kDTiles * kKeyPairs, kPVSteps = kKeyPairs * v16::kDTiles;
    static_assert(!options.copies_by_key || options.copies == Copies::together);

    // Where a copy of the tile at `key` begins for this thread.
    struct Source {
        uint32_t smem;
        const Element *gmem;
        int bytes;

        __device__ __forceinline__ Source(uint32_t tile_smem, const Element *X_gmem, int key)
            : smem(tile_smem + v16::smem_offset(threadIdx.x / v16::kThreadsPerRow,
                                                threadIdx.x % v16::kThreadsPerRow * v16::kChunk)),
              gmem(X_gmem), bytes(key >= 0 ? 16 : 0) {}
    };
    // Its kRowsPerPass rows from there on: a multiple of 8, after which the swizzle is the same
    template <int kPass>
    static __device__ __forceinline__ void copy_pass(const Source &source) {
        constexpr int kRow = kPass * kRowsPerPass, kElement = sizeof(Element);
        constexpr int kSmem = kRow * v16::kPiece * kElement;
        constexpr int kGmem = kRow * cfg.static_row_stride * kElement;
        cp_async_16_at<kSmem, kGmem>(source.smem, source.gmem, source.bytes);
        cp_async_16_at<kSmem + v16::piece_offset<B_c>(1), kGmem + v16::kPiece * kElement>(
            source.smem, source.gmem, source.bytes);
    }
    // Pass number `pass`, which unrolling makes a constant; all for -1
    template <int... kPass>
    static __device__ __forceinline__ void copy_passes(std::integer_sequence<int, kPass...>,
                                                       const Source &source, int pass) {
        ((pass < 0 || pass == kPass ? copy_pass<kPass>(source) : void()), ...);
    }

    static __device__ __forceinline__ void run(OutputTile<Operands<cfg>::kRowTiles> &O_rmem,
                                               Softmax<cfg> &softmax, const Operands<cfg> &operands,
                                               int key) {
        constexpr uint32_t kStage = Operands<cfg>::kStage;
        constexpr auto kAllPasses = std::make_integer_sequence<int, kPasses>{};
        uint32_t Q_rmem[2][kRowTiles][4], K_rmem[kRing][4], V_rmem[kRing][4];
        auto load_K = [&](uint32_t stage, int step) {
            operands.load_K(K_rmem[step % kRing], operands.K_smem + stage, step % kKeyPairs * kMmaK,
                            step / kKeyPairs);
        };
        auto load_V = [&](uint32_t stage, int step) {
            operands.load_V(V_rmem[step % kRing], stage, step / v16::kDTiles * kMmaK,
                            step % v16::kDTiles);
        };
        auto load_first = [&](uint32_t stage) {
            operands.load_Q(Q_rmem[0], 0);
#pragma unroll
            for (int step = 0; step < kAhead; ++step) {
                load_K(stage, step);
            }
        };
        // The block at `key`, where X_gmem points; then X_gmem points at the one before. If by key,
        // X_gmem points at key 0 and stays there.
        const int ahead_key = options.copies_by_key ? 0 : key - B_c;
        const Element *K_gmem = operands.K_gmem + int64_t(ahead_key) * operands.K_stride;
        const Element *V_gmem = operands.V_gmem + int64_t(ahead_key) * operands.V_stride;
        auto move_on = [](const Element *&X_gmem, int stride) {
            if constexpr (!options.copies_by_key) {
                X_gmem -= int64_t(B_c) * stride;
            }
        };
        auto copy = [&](uint32_t tile_smem, const Element *&X_gmem, int stride, int key) {
            if constexpr (options.copies == Copies::together) {
                v16::copy_tile_async<B_c, cfg.n_threads()>(
                    tile_smem, X_gmem, options.copies_by_key ? key : 0, stride, key >= 0 ? 16 : 0);
            } else {
                copy_passes(kAllPasses, {tile_smem, X_gmem, key}, -1);
            }
            move_on(X_gmem, stride);
        };
        // V_{j-1}, and K's next block for which there is a buffer
        const int K_distance = options.barrier_first ? B_c : 2 * B_c;
        auto start_copies = [&](uint32_t stage) {
            copy(operands.V_smem + (stage ^ kStage), V_gmem, operands.V_stride, key - B_c);
            copy(operands.K_smem + (options.barrier_first ? stage ^ kStage : stage), K_gmem,
                 operands.K_stride, key - K_distance);
            cp_async_commit();
        };

        if constexpr (!options.barrier_first) {
            copy(operands.K_smem + kStage, K_gmem, operands.K_stride, key - B_c);
            cp_async_commit();
            cp_async_wait<2>(); // Q and K_j have landed
            __syncthreads(); // a warp reads rows that other warps have copied
            load_first(0);
        }
        uint32_t stage = 0;
        do {
            if constexpr (options.barrier_first) {
                cp_async_wait<0>(); // Q, K_j and V_j have landed
                __syncthreads(); // no warp reads K_{j+1} or V_{j+1} any more
                start_copies(stage);
                load_first(stage);
            }
            float S_rmem[kRowTiles][B_c / kMmaN][4] = {};
#pragma unroll
            for (int step = 0; step < kQKSteps; ++step) {
                const int k = step / kKeyPairs, n = step % kKeyPairs;
                if (n == 0 && k + 1 < v16::kDTiles) {
                    operands.load_Q(Q_rmem[(k + 1) % 2], k + 1);
                }
                if (step + kAhead < kQKSteps) {
                    load_K(stage, step + kAhead);
                }
                v16::add_tile_product<cfg.dtype>(S_rmem, Q_rmem[k % 2], K_rmem[step % kRing], n);
            }
            constexpr bool kCopies =
                !options.barrier_first && options.copies != Copies::interleaved;
            if constexpr (!options.barrier_first) {
                cp_async_wait<0>(); // V_j and K_{j-1} have landed
                __syncthreads(); // no warp reads K_j or V_{j+1} any more
            }
            if constexpr (kCopies && options.copies_first) {
                start_copies(stage);
            }
#pragma unroll
            for (int step = 0; step < kAhead; ++step) {
                load_V(stage, step);
            }
            if constexpr (kCopies && !options.copies_first) {
                start_copies(stage);
            }
            if (!options.vote || softmax.outgrows(S_rmem)) {
                softmax.take(S_rmem);
                if (options.vote || softmax.must_rescale()) {
                    softmax.rescale_l();
                    softmax.rescale_O(O_rmem);
                }
            }
            const Source V_next(operands.V_smem + (stage ^ kStage), V_gmem, key - B_c);
            const Source K_next(operands.K_smem + stage, K_gmem, key - 2 * B_c);
            uint32_t P_rmem[kKeyPairs][kRowTiles][4];
#pragma unroll
            for (int step = 0; step < kPVSteps; ++step) {
                const int k = step / v16::kDTiles, n = step % v16::kDTiles;
                if (n == 0) {
                    softmax.exponentiate(P_rmem[k], S_rmem, k);
                }
                if (options.copies == Copies::interleaved && step % 4 == 1) {
                    const int pass = step / 4;
                    copy_passes(kAllPasses, pass < kPasses ? V_next : K_next, pass % kPasses);
                }
                if (step + kAhead < kPVSteps) {
                    load_V(stage, step + kAhead);
                } else if (!options.barrier_first) { // the first fragments of the next Q @ K^T
                    if (step + kAhead == kPVSteps) {
                        operands.load_Q(Q_rmem[0], 0);
                    }
                    load_K(stage ^ kStage, step + kAhead - kPVSteps);
                }
                v16::add_tile_product<cfg.dtype>(O_rmem, P_rmem[k], V_rmem[step % kRing], n);
            }
            if constexpr (options.copies == Copies::interleaved) {
                static_assert(kPVSteps == 4 * 2 * kPasses, "all of both tiles has been copied");
                cp_async_commit();
                move_on(V_gmem, operands.V_stride);
                move_on(K_gmem, operands.K_stride);
            }
            stage ^= kStage;
            key -= B_c;
        } while (key >= 0);
    }
};

} // namespace experiments

// A config with a Loop of its own gets that one.
namespace v16 {

template <typename Config>
    requires requires { typename Config::Loop; }
struct TwoStageLoop<Config> {
    template <int kRowTiles>
    static __device__ __forceinline__ void
    run(float (&O_rmem)[kRowTiles][kDHead / kMmaN][4], float (&l_rmem)[kRowTiles][2],
        uint32_t warp_Q_smem, uint32_t K_smem, uint32_t V_smem, const uint32_t (&lane_offset)[4],
        const uint32_t (&K_lane_offset)[4], const Element *K_gmem, int K_stride,
        const Element *V_gmem, int V_stride, int first_key) {
        experiments::Operands<Config::value> operands{warp_Q_smem, K_smem, V_smem,   {},      {},
                                                      K_gmem,      V_gmem, K_stride, V_stride};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            operands.lane_offset[k] = lane_offset[k];
            operands.K_lane_offset[k] = K_lane_offset[k];
        }
        experiments::Softmax<Config::value> softmax;
        Config::Loop::run(O_rmem, softmax, operands, first_key);
        softmax.finish(l_rmem);
    }
};

} // namespace v16
