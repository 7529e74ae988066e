#pragma once
// A cluster's barrier and shared memory, for kernels that include mma_tiles.cuh: sm90/cluster.cuh
// brings tiles of another layout.

#include <cstdint>

// Both halves of a barrier of all threads of the cluster that have not ended.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in the shared memory of the cluster's block of this rank.
__device__ __forceinline__ uint32_t in_block(uint32_t address, uint32_t rank) {
    uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// Without a memory clobber, so that other loads may pass it: barriers of the cluster, which have
// one, keep it behind the writes of what it reads.
__device__ __forceinline__ float load_cluster(uint32_t src_smem) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(src_smem));
    return value;
}

__device__ __forceinline__ void store_smem_16(uint32_t dst_smem, uint4 value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst_smem), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

// The sum over kLanes neighbouring lanes, to each of them.
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        value += __shfl_xor_sync(0xffffffff, value, lanes);
    }
    return value;
}
