// Where wgmma reads each element of an operand. The file of the first argument lists cases, a line
// each: which (0: B with N 64, 1: A with M 64), transposed, start, leading and stride byte offset,
// base offset, swizzle mode. Each gives a line of 64 x 16 byte addresses.
//   nvcc -gencode arch=compute_90a,code=sm_90a -o layouts wgmma_layouts.cu && ./layouts cases.txt
#include <cstdint>
#include <cstdio>
#include <cuda_fp16.h>

constexpr int kBytes = 65536; // of shared memory that the operand may lie in

struct Case {
    int which, transposed, start, leading, stride, base, mode;
};

#define D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

template <int transposed>
__device__ void by_b(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,"
        "%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, 1, 1, 1, %37;"
        : D(0), D(4), D(8), D(12), D(16), D(20), D(24), D(28)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(transposed));
}

template <int transposed>
__device__ void by_a(float (&d)[8], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, "
                 "%8, %9, 1, 1, 1, %10, 0;"
                 : D(0), D(4)
                 : "l"(a), "l"(b), "n"(transposed));
}

__device__ void begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

template <int n>
__device__ void finish(float (&d)[n]) {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < n; i++)
        asm volatile("" : "+f"(d[i]));
}

__device__ uint64_t descriptor(uint32_t start, uint32_t leading, uint32_t stride, uint64_t base,
                               uint64_t mode) {
    auto field = [](uint32_t bytes) { return (uint64_t)((bytes & 0x3FFFF) >> 4); };
    return field(start) | field(leading) << 16 | field(stride) << 32 | base << 49 | mode << 62;
}

// Every element of shared memory holds its own index: its low 7 bits, or those above, so that f16
// has the number exactly. The other operand is a unit matrix.
__global__ void __launch_bounds__(128) probe(Case c, int high, float *out) {
    extern __shared__ uint8_t raw[];
    __half *s = (__half *)(((uintptr_t)raw + 1023) & ~(uintptr_t)1023);
    for (int i = threadIdx.x; i < kBytes / 2; i += 128)
        s[i] = __float2half(high ? i >> 7 : i & 127);
    __half *one = s + kBytes / 2; // 16 x 16, in core matrices
    for (int i = threadIdx.x; i < 256; i += 128)
        one[i] = __float2half((i / 64 == 0 || i / 64 == 3) && i / 8 % 8 == i % 8 ? 1.f : 0.f);
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();

    uint32_t at = (uint32_t)__cvta_generic_to_shared(s);
    uint64_t x = descriptor(at + c.start, c.leading, c.stride, c.base, c.mode);
    uint64_t unit = descriptor(at + kBytes, 128, 256, 0, 0);
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (c.which == 0) { // D = 1 B in warp 0
        uint32_t a[4];
        for (int i = 0; i < 4; i++) {
            int row = g + 8 * (i % 2), col = 2 * t + 8 * (i / 2);
            __half2 h = __floats2half2_rn(!warp && row == col, !warp && row == col + 1);
            a[i] = *(uint32_t *)&h;
        }
        float d[32] = {};
        begin();
        if (c.transposed)
            by_b<1>(d, a, x);
        else
            by_b<0>(d, a, x);
        finish(d);
        if (!warp)
            for (int i = 0; i < 32; i++)
                out[(8 * (i / 4) + 2 * t + i % 2) * 16 + g + 8 * (i / 2 % 2)] = d[i];
    } else { // D = A 1
        float d[8] = {};
        begin();
        if (c.transposed)
            by_a<1>(d, x, unit);
        else
            by_a<0>(d, x, unit);
        finish(d);
        for (int i = 0; i < 8; i++)
            out[(16 * warp + g + 8 * (i / 2 % 2)) * 16 + 8 * (i / 4) + 2 * t + i % 2] = d[i];
    }
}

int main(int, char **arguments) {
    FILE *cases = fopen(arguments[1], "r");
    float *out, found[2][1024];
    cudaMalloc(&out, sizeof found[0]);
    constexpr int shared = kBytes + 2048;
    cudaFuncSetAttribute(probe, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    Case c;
    while (fscanf(cases, "%d %d %d %d %d %d %d", &c.which, &c.transposed, &c.start, &c.leading,
                  &c.stride, &c.base, &c.mode) == 7) {
        for (int high = 0; high < 2; high++) {
            probe<<<1, 128, shared>>>(c, high, out);
            cudaMemcpy(found[high], out, sizeof found[0], cudaMemcpyDeviceToHost);
        }
        if (cudaError_t error = cudaGetLastError()) {
            fprintf(stderr, "%s\n", cudaGetErrorString(error));
            return 1;
        }
        for (int i = 0; i < 1024; i++)
            printf("%d ", 2 * ((int)found[0][i] + 128 * (int)found[1][i]));
        printf("\n");
    }
}
