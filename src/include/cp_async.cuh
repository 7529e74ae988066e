#pragma once
// Global to shared memory without passing through registers.

#include <cstdint>

// Starts a copy of 16 bytes; `.cg` caches in L2 only, since a thread block reads a tile once.
__device__ __forceinline__ void cp_async_16(uint32_t dst_smem, const void *src_gmem) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst_smem), "l"(src_gmem)
                 : "memory");
}

// The same copy, but it reads only src_bytes (0 or 16) and writes zeros for the rest. With 0 the
// source may lie anywhere.
__device__ __forceinline__ void cp_async_16(uint32_t dst_smem, const void *src_gmem,
                                            int src_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst_smem), "l"(src_gmem),
                 "r"(src_bytes)
                 : "memory");
}

// The same copy, which also asks L2 to fetch the whole line of 128 bytes from memory.
__device__ __forceinline__ void cp_async_16_L2_128B(uint32_t dst_smem, const void *src_gmem,
                                                    int src_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst_smem),
                 "l"(src_gmem), "r"(src_bytes)
                 : "memory");
}

// Closes the group of copies that this thread has started since the last commit.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the `kPending` youngest groups of this thread are in flight. Other threads'
// copies are visible only after a barrier that follows their own wait.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
