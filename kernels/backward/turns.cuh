#pragma once
// Turns, in which tiles of keys add to the sums of dQ in one order.

#include "kernels/backward/arguments.cuh"
#include "kernels/backward/places.cuh"
#include "kernels/backward/statistics.cuh"
#include "sm90/roles.cuh"

// An integer that thread blocks of the whole GPU hand on with what was written before it.
__device__ __forceinline__ int load_acquire(const int *src_gmem) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(src_gmem) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(int *dst_gmem, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(dst_gmem), "r"(value) : "memory");
}

constexpr int kTurnBlocks = 2; // of queries, to whose sums a tile of keys adds in one turn
constexpr int kTurns = kWarpgroup / 32; // of a block of queries, one for each warp that adds

// Clears those of the rows of a thread block of delta_kernel.
template <int d_head>
__device__ __forceinline__ void clear_turns(const BackwardKernelArgs &args) {
    constexpr int kOwn = kTurns * kDeltaRowsOf<d_head> / kWgmmaM;
    if (threadIdx.x < kOwn) {
        args.turns[blockIdx.x * kOwn + threadIdx.x] = 0;
    }
}

// Waits for the turn of a tile of keys at a block of queries, or ends it. Of the tiles that see the
// last query of the block's pair, the last comes first. Row i of the q_rows of a head's blocks sees
// no key behind i + shift, if kMoves; if not, it sees every key.
template <int B_c, bool kMoves, int d_head = kDHead>
__device__ __forceinline__ void take_turn(const BackwardKernelArgs &args, int key, int block,
                                          const float4 *sums_of_block, int q_rows, int shift,
                                          bool ends, int key_rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t index = (sums_of_block - reinterpret_cast<float4 *>(args.dQ_sums)) /
                           (kWgmmaM * d_head / 4); // of the block, among those of all heads
    int *turn = args.turns + (index - block % kTurnBlocks) * kTurns + warp % kTurns;
    const int end = (block / kTurnBlocks + 1) * kTurnBlocks * kWgmmaM;
    int keys = key_rows;
    if (kMoves && end < q_rows) {
        keys = min(keys, padded_keys<B_c>(end + shift));
    }
    const int number = (keys - key) / B_c - 1; // of tiles that add before
    if (ends) {
        __syncwarp(); // one lane ends the turn of what all lanes have added
    }
    if (lane == 0 && ends) {
        store_release(turn, number + 1);
    } else if (lane == 0) {
        while (load_acquire(turn) != number) {
        }
    }
    __syncwarp(); // all lanes add after what one lane has seen
}
template <int B_c, bool kMoves, int d_head = kDHead>
__device__ __forceinline__ void take_turn(const BackwardKernelArgs &args, int key, int block,
                                          const float4 *sums_of_block, int q_rows, int shift,
                                          bool ends) {
    take_turn<B_c, kMoves, d_head>(args, key, block, sums_of_block, q_rows, shift, ends,
                                   padded_keys<B_c>(args.len_k));
}
