// Instructions whose operands take one register, two or four: which ones nvdisasm tells.

#include <cstdint>
#include <cuda_fp16.h>

extern "C" __global__ void scalars(double *a, float *f, long long *l, int *i, unsigned long long *u,
                                   half2 *h) {
    const int t = threadIdx.x;
    const double x = a[t], y = a[t + 32];
    a[t] = x * y + a[t + 64];
    if (x < y) {
        a[t + 1] = x / y;
    }
    f[t] = (float)x;
    a[t + 2] = f[t + 3];
    l[t] = (long long)x;
    a[t + 4] = (double)l[t + 5];
    i[t] = (int)x;
    a[t + 6] = i[t + 1];
    f[t + 9] = (float)l[t + 7];
    l[t + 8] = (long long)f[t + 10];
    a[t + 7] = rint(x);
    i[t + 2] = __popcll(u[t + 2]) + __clz(i[t + 3]) + __mulhi(i[t + 6], i[t + 7]);
    l[t + 9] = l[t + 1] * l[t + 2] + (l[t + 3] >> 3);
    l[t + 10] = l[t + 4] < l[t + 5] ? l[t + 6] : 3;
    atomicAdd(f + t, 1.f);
    i[t + 9] = atomicCAS(i + t, 3, 4);
    u[t + 9] = atomicCAS(u + t, 3ull, u[1]);
    u[t + 8] = atomicExch(u + t, 7ull);
    h[t] = __hfma2(h[t + 1], h[t + 2], h[t + 3]);
    f[t + 50] = __expf(f[t + 51]) + rsqrtf(f[t + 52]);
}

extern "C" __global__ void lanes(int *i, unsigned *u, float4 *q, unsigned long long *l) {
    const int t = threadIdx.x;
    __shared__ int s[128];
    __shared__ unsigned long long s2[32];
    s[t] = i[t];
    __syncthreads();
    i[t] = __shfl_xor_sync(~0u, i[t + 1], 1);
    u[t] = __ballot_sync(~0u, i[t] > 3);
    i[t + 2] = __any_sync(~0u, i[t] > 5) + __all_sync(~0u, u[t] > 3);
    int same;
    u[t + 4] = __match_all_sync(~0u, i[t + 4], &same);
    i[t + 5] = same;
    i[t + 6] = __syncthreads_count(i[t]);
    i[t + 7] = __syncthreads_or(i[t + 7]);
    float4 v = q[t + 2];
    v.x += v.w;
    q[t + 3] = v;
    i[t + 8] = atomicAdd(s + t, 3);
    i[t + 9] = atomicCAS(s + t + 1, 3, 5);
    l[t] = atomicCAS(s2 + t, 3ull, l[1]);
    i[t + 11] = __funnelshift_l(i[t], __byte_perm(i[t], i[t + 1], i[t + 2]), 3);
    i[t + 14] = __dp4a(i[t], i[t + 1], i[t + 2]);
    l[t + 4] = clock64();
    __nanosleep(i[t]);
}

extern "C" __global__ void tensors(uint32_t *p, float *f, double *d) {
    uint32_t a[4], b[2], e[4] = {p[0], p[1], p[2], p[3]};
    float c[4] = {f[0], f[1], f[2], f[3]};
    __shared__ uint32_t s[1024];
    s[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(s + 4 * threadIdx.x);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(at)
                 : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1])
                 : "r"(at)
                 : "memory");
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, "
                 "{%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]));
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+r"(e[0]), "+r"(e[1])
                 : "r"(a[0]), "r"(b[0]));
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, "
                 "{%6, %7}, {%0, %1};"
                 : "+r"(e[0]), "+r"(e[1])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(e[0]), "+r"(e[1]), "+r"(e[2]), "+r"(e[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    double x = d[0], y = d[1];
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(x), "+d"(y)
                 : "d"(d[2]), "d"(d[3]));
    d[0] = x;
    d[1] = y;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(p + 4 * threadIdx.x)
                 : "memory");
    p[77] = __reduce_add_sync(~0u, a[0]);
#endif
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4], {%0, %1, %2, %3};" ::"r"(a[0]),
                 "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(at)
                 : "memory");
#endif
    for (int k = 0; k < 4; k++) {
        p[32 * k + threadIdx.x] = e[k] + s[k + 3 * threadIdx.x];
        f[32 * k + threadIdx.x] = c[k];
    }
}
