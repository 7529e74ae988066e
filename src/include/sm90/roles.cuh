#pragma once
// Warps of one thread block with different work.

#include <cstdint>

constexpr int kWarpgroup = 128; // threads

// Sets the registers per thread of this warpgroup from here on: some warpgroups give, others take.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Named barriers; __syncthreads is number 0. All of `threads` arrive, and some of them wait.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Turns of warpgroups, if kOn: each waits for its turn, and passes the turn on to the next.
template <bool kOn, int kWarpgroups>
__device__ __forceinline__ void end_turn_of(int warpgroup) {
    if (kOn) {
        named_arrive(1 + (warpgroup + 1) % kWarpgroups, 2 * kWarpgroup);
    }
}
template <bool kOn>
__device__ __forceinline__ void wait_for_turn(int warpgroup) {
    if (kOn) {
        named_sync(1 + warpgroup, 2 * kWarpgroup);
    }
}
