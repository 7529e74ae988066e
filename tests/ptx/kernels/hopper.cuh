// Names for the PTX of compute capability 9.0a that CUDA C++ has none for. An address in shared
// memory is the 32-bit one of the shared window.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace hopper {

__device__ inline uint32_t shared_address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// True in one lane of a whole warp.
__device__ inline bool elected() {
    uint32_t leads;
    asm volatile("{\n\t.reg .pred leads;\n\t"
                 "elect.sync _|leads, 0xffffffff;\n\t"
                 "selp.u32 %0, 1, 0, leads;\n\t}"
                 : "=r"(leads));
    return leads;
}

// -- mbarriers ------------------------------------------------------------------------------------

__device__ inline void init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

// What was initialised, seen by the cluster and by the copies that complete on it.
__device__ inline void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same address in the block of that rank of the cluster.
__device__ inline uint32_t in_block(uint32_t address, uint32_t rank) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

__device__ inline void arrive_remote(uint32_t barrier_in_cluster) {
    asm volatile(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier_in_cluster)
        : "memory");
}

// Arrives, and announces the bytes that copies will deliver in this phase.
__device__ inline void arrive_expecting(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Until the phase of this parity is complete. A new barrier counts as past phase 1.
__device__ inline void wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n\t.reg .pred done;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, done;\n\t}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

// The same, for barriers at which other blocks arrive.
__device__ inline void wait_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n\t.reg .pred done;\n\t"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, done;\n\t}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

// Which slot of a ring is next, and in which parity of lap.
template <int slots>
struct Ring {
    int slot = 0;
    uint32_t lap = 0;

    __device__ void advance() {
        if (++slot == slots) {
            slot = 0;
            lap ^= 1;
        }
    }
};

// -- other barriers and fences --------------------------------------------------------------------

__device__ inline void barrier_sync(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline void barrier_arrive(int id, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ inline void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ inline void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

__device__ inline uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Orders this thread's writes to shared memory before what copies and wgmma read.
__device__ inline void fence_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Registers per thread of a warpgroup from here on.
template <int registers>
__device__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// -- bulk copies ----------------------------------------------------------------------------------

__device__ inline void load_2d(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int x,
                               int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(smem),
                 "l"(map), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}

// The same address and barrier in each block of the mask.
__device__ inline void load_2d_multicast(uint32_t smem, const CUtensorMap *map, uint32_t barrier,
                                         int x, int y, uint16_t blocks, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(blocks), "l"(policy)
        : "memory");
}

__device__ inline void load_4d(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int x,
                               int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

__device__ inline void store_2d(const CUtensorMap *map, uint32_t smem, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
            map),
        "r"(smem), "r"(x), "r"(y)
        : "memory");
}

__device__ inline void store_4d(const CUtensorMap *map, uint32_t smem, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
                 "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(smem), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

__device__ inline void commit_stores() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all but the newest groups of this thread have read shared memory.
template <int pending>
__device__ void wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Until they are complete.
template <int pending>
__device__ void wait_stores() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

// -- wgmma ----------------------------------------------------------------------------------------

// Matrix descriptor of an operand in the 128-byte swizzle. leading and stride in
// bytes: K-major, stride from 8 rows to the next 8; MN-major, leading from 64 columns to the next
// 64, stride from 8 of k to the next 8.
__device__ inline uint64_t swizzled_128(uint32_t address, uint32_t leading, uint32_t stride) {
    return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(leading >> 4) << 16 |
           static_cast<uint64_t>(stride >> 4) << 32 | 1ull << 62;
}

// An address that advances by so much, in a descriptor.
__device__ constexpr uint64_t advance(uint32_t bytes) {
    return bytes >> 4;
}

__device__ inline void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int pending>
__device__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

#define TEN(tens)                                                       \
    "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, " \
    "%" #tens "5, %" #tens "6, %" #tens "7, %" #tens "8, %" #tens "9, "
#define FOUR(r, i) "+f"(r[i]), "+f"(r[i + 1]), "+f"(r[i + 2]), "+f"(r[i + 3])
#define SIXTEEN(r, i) FOUR(r, i), FOUR(r, i + 4), FOUR(r, i + 8), FOUR(r, i + 12)

#define NAMES_12 TEN() "%10, %11"
#define NAMES_32 TEN() TEN(1) TEN(2) "%30, %31"
#define NAMES_64 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60, %61, %62, %63"
#define FLOATS_12(r) FOUR(r, 0), FOUR(r, 4), FOUR(r, 8)
#define FLOATS_32(r) SIXTEEN(r, 0), SIXTEEN(r, 16)
#define FLOATS_64(r) FLOATS_32(r), SIXTEEN(r, 32), SIXTEEN(r, 48)

// The compiler moves no access to these registers across. It knows nothing of wgmma's: what it may
// not touch while they run has to be told between the last access and the fence, and after the
// wait.
__device__ inline void hold(float (&r)[12]) {
    asm volatile("" : FLOATS_12(r)::"memory");
}
__device__ inline void hold(float (&r)[32]) {
    asm volatile("" : FLOATS_32(r)::"memory");
}
__device__ inline void hold(float (&r)[64]) {
    asm volatile("" : FLOATS_64(r)::"memory");
}
template <int n>
__device__ void hold(uint32_t (&r)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i)
        asm volatile("" : "+r"(r[i])::"memory");
}

// d = A B + (accumulate ? d : 0) for 64 rows, n columns and k = 16. A and B by descriptor; their
// major dimension is k, or m and n where a "transposed" is 1. a, b, ...: numbers of the operands.
#define WGMMA_SHARED(n, count, type, a, b, accumulate_, ta, tb)                               \
    asm volatile("{\n\t.reg .pred accumulate;\n\t"                                            \
                 "setp.ne.b32 accumulate, " accumulate_ ", 0;\n\t"                            \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type              \
                 " {" NAMES_##count "}, " a ", " b ", accumulate, 1, 1, " ta ", " tb ";\n\t}" \
                 : FLOATS_##count(d)                                                          \
                 : "l"(A), "l"(B), "r"(int(accumulate)), "n"(A_transposed), "n"(B_transposed) \
                 : "memory")

// The same with A in registers.
#define WGMMA_REGISTERS(n, count, type, a0, a1, a2, a3, b, accumulate_, tb)                  \
    asm volatile("{\n\t.reg .pred accumulate;\n\t"                                           \
                 "setp.ne.b32 accumulate, " accumulate_ ", 0;\n\t"                           \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type             \
                 " {" NAMES_##count "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b                \
                                    ", accumulate, 1, 1, " tb ";\n\t}"                       \
                 : FLOATS_##count(d)                                                         \
                 : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "l"(B), "r"(int(accumulate)), \
                   "n"(B_transposed)                                                         \
                 : "memory")

template <typename T, int A_transposed = 0, int B_transposed = 0>
__device__ void wgmma(float (&d)[12], uint64_t A, uint64_t B, bool accumulate) {
    if constexpr (std::is_same_v<T, __half>)
        WGMMA_SHARED(24, 12, "f16", "%12", "%13", "%14", "%15", "%16");
    else
        WGMMA_SHARED(24, 12, "bf16", "%12", "%13", "%14", "%15", "%16");
}

template <typename T, int A_transposed = 0, int B_transposed = 0>
__device__ void wgmma(float (&d)[32], uint64_t A, uint64_t B, bool accumulate) {
    if constexpr (std::is_same_v<T, __half>)
        WGMMA_SHARED(64, 32, "f16", "%32", "%33", "%34", "%35", "%36");
    else
        WGMMA_SHARED(64, 32, "bf16", "%32", "%33", "%34", "%35", "%36");
}

template <typename T, int A_transposed = 0, int B_transposed = 0>
__device__ void wgmma(float (&d)[64], uint64_t A, uint64_t B, bool accumulate) {
    if constexpr (std::is_same_v<T, __half>)
        WGMMA_SHARED(128, 64, "f16", "%64", "%65", "%66", "%67", "%68");
    else
        WGMMA_SHARED(128, 64, "bf16", "%64", "%65", "%66", "%67", "%68");
}

template <typename T, int B_transposed>
__device__ void wgmma(float (&d)[64], const uint32_t *A, uint64_t B, bool accumulate) {
    if constexpr (std::is_same_v<T, __half>)
        WGMMA_REGISTERS(128, 64, "f16", "%64", "%65", "%66", "%67", "%68", "%69", "%70");
    else
        WGMMA_REGISTERS(128, 64, "bf16", "%64", "%65", "%66", "%67", "%68", "%69", "%70");
}

// -- fragments ------------------------------------------------------------------------------------

template <typename T>
__device__ uint32_t pack(float low, float high) {
    if constexpr (std::is_same_v<T, __half>) {
        __half2 both = __floats2half2_rn(low, high);
        return reinterpret_cast<uint32_t &>(both);
    } else {
        __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<uint32_t &>(both);
    }
}

// Where 16 bytes of a row stand in a tile of 128-byte rows in the 128-byte swizzle.
__device__ inline uint32_t swizzled(uint32_t row, uint32_t chunk) {
    return row * 128 + ((chunk ^ row % 8) * 16);
}

// Rows and columns 0 to 15 of a warp's accumulators, from d[0] to d[7], to where lane l says for
// row l % 16 and columns l / 16 * 8 to + 7.
template <typename T>
__device__ void store_fragment(uint32_t address, const float *d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(pack<T>(d[0], d[1])), "r"(pack<T>(d[2], d[3])), "r"(pack<T>(d[4], d[5])),
                 "r"(pack<T>(d[6], d[7]))
                 : "memory");
}

__device__ inline void load_fragment(uint32_t (&a)[16], int first, uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[first]), "=r"(a[first + 1]), "=r"(a[first + 2]), "=r"(a[first + 3])
                 : "r"(address)
                 : "memory");
}

} // namespace hopper
