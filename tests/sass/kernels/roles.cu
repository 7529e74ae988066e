// Warp roles, for sm_90a: in `roles` one warp of the first warp group copies tiles by TMA into a
// ring of two, and two warp groups multiply them; in `polls` every warp does the same, but waits
// for a word in global memory first.

#include <cstdint>

constexpr int kStages = 2;
constexpr int kTileBytes = 64 * 64 * 2;
constexpr uint64_t kDescriptor =
    0x4000004000010000; // 128-byte swizzle, 1024 bytes to the next rows

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again; }" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void load(uint32_t tile, const void *map, int row, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(tile),
                 "l"(map), "r"(0), "r"(row), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void multiply(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b));
}

extern "C" __global__ void __launch_bounds__(384, 1)
    roles(const __grid_constant__ int4 map[8], float *out, int n_tiles) {
    __shared__ __align__(1024) unsigned char tiles[kStages * kTileBytes];
    __shared__ __align__(8) uint64_t full[kStages], empty[kStages];
    const uint32_t tile = __cvta_generic_to_shared(tiles);
    const uint32_t is_full = __cvta_generic_to_shared(full);
    const uint32_t is_empty = __cvta_generic_to_shared(empty);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(is_full + 8 * i));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" ::"r"(is_empty + 8 * i));
        }
    }
    __syncthreads();
    if (threadIdx.x / 128 == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
#pragma unroll 1
            for (int i = 0; i < n_tiles; ++i) {
                const int stage = i % kStages, lap = i / kStages;
                wait(is_empty + 8 * stage, lap & 1 ^ 1);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                                 is_full + 8 * stage),
                             "r"(kTileBytes)
                             : "memory");
                load(tile + kTileBytes * stage, map, 64 * i, is_full + 8 * stage);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        float sum[32] = {};
#pragma unroll 1
        for (int i = 0; i < n_tiles; ++i) {
            const int stage = i % kStages, lap = i / kStages;
            wait(is_full + 8 * stage, lap & 1);
            const uint64_t a = kDescriptor + (tile + kTileBytes * stage >> 4);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            for (int k = 0; k < 4; ++k) {
                multiply(sum, a + 2 * k, a + 2 * k);
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (threadIdx.x % 128 == 0) {
                arrive(is_empty + 8 * stage);
            }
        }
        for (int i = 0; i < 32; ++i) {
            out[i * 256 + threadIdx.x - 128] = sum[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(128) polls(float *x, const unsigned *ready, int n) {
    unsigned is_ready;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is_ready) : "l"(ready));
    } while (!is_ready);
    float value = x[threadIdx.x];
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
        value = value * value + 1.0f;
    }
    x[threadIdx.x] = value;
}
