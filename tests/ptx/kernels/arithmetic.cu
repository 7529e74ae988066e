// Arithmetic of CUDA C++ that turns into many different instructions.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

extern "C" __global__ void integers(const int *a, const int *b, int *out) {
    int i = threadIdx.x, x = a[i], y = b[i], n = 64;
    uint32_t ux = x, uy = y;
    long long lx = static_cast<long long>(x) * 1000003, ly = static_cast<long long>(y) * 7919 + 1;
    int k = 0;
    auto put = [&](int value) { out[k++ * n + i] = value; };
    put(__mulhi(x, y));
    put(__umulhi(ux, uy));
    put(static_cast<int>(__mul64hi(lx, ly)));
    put(__clz(x));
    put(__popc(x));
    put(__brev(x));
    put(__ffs(x));
    put(__funnelshift_l(ux, uy, 5));
    put(__funnelshift_rc(ux, uy, 40));
    put(__byte_perm(ux, uy, 0x6240));
    put(__dp4a(x, y, 17));
    put(__usad(ux, uy, 3u));
    put(static_cast<int>(lx / ly));
    put(static_cast<int>(lx % ly));
    put(y ? x / y : 0);
    put(y ? x % y : 0);
    put(uy ? ux / uy : 0);
    put(static_cast<int>((lx * ly) >> 17));
    put(static_cast<int>(__popcll(lx)) + __clzll(ly));
    put(static_cast<int16_t>(x) * static_cast<uint8_t>(y));
    put(__hadd(x, y));
    put(abs(x) + min(x, y) + max(x, y));
    put((x < y) ^ (x == y) ? x & ~y : x | y);
}

extern "C" __global__ void halves(const __half2 *a, const __half2 *b, __half2 *out) {
    int i = threadIdx.x, n = 64, k = 0;
    __half2 x = a[i], y = b[i];
    auto put = [&](__half2 value) { out[k++ * n + i] = value; };
    put(__hadd2(x, y));
    put(__hmul2(x, y));
    put(__hfma2(x, y, x));
    put(__hsub2(x, y));
    put(__hmax2(x, y));
    put(__hmin2(x, y));
    put(__hgt2(x, y));
    put(__hneg2(__habs2(x)));
    put(h2exp2(x));
    put(__halves2half2(__hdiv(x.x, y.y), hsqrt(__habs(x.y))));
    put(__lowhigh2highlow(x));
    put(h2rcp(y));
}

extern "C" __global__ void bfloats(const __nv_bfloat162 *a, const __nv_bfloat162 *b,
                                   __nv_bfloat162 *out) {
    int i = threadIdx.x, n = 64, k = 0;
    __nv_bfloat162 x = a[i], y = b[i];
    auto put = [&](__nv_bfloat162 value) { out[k++ * n + i] = value; };
    put(__hadd2(x, y));
    put(__hmul2(x, y));
    put(__hfma2(x, y, x));
    put(__hmax2(x, y));
    put(__hneg2(x));
    put(__floats2bfloat162_rn(__low2float(x) * 3.0f, __high2float(y)));
}

extern "C" __global__ void floats(const float *a, const float *b, float *out) {
    int i = threadIdx.x, n = 64, k = 0;
    float x = a[i], y = b[i];
    auto put = [&](float value) { out[k++ * n + i] = value; };
    put(x / y);
    put(sqrtf(fabsf(x)));
    put(__fdividef(x, y));
    put(__frcp_rz(y));
    put(__fadd_ru(x, y));
    put(__fmaf_rd(x, y, x));
    put(floorf(x) + ceilf(y) + truncf(x) + rintf(y));
    put(static_cast<float>(static_cast<int>(x * 10)));
    put(static_cast<float>(static_cast<double>(x) * y + 1.0));
    put(exp2f(x));
    put(__log2f(fabsf(x) + 1));
    put(expf(x));
    put(sinf(x));
    put(isnan(x) ? 1.0f : copysignf(y, x));
    put(fminf(x, y) - fmaxf(x, y));
    put(rsqrtf(fabsf(x) + 1));
    put(powf(fabsf(x) + 0.5f, y));
    put(fmodf(x, 0.75f));
}

__constant__ float weights[4] = {0.5f, -1.0f, 2.0f, 4.0f};

struct Shape {
    int count;
    float scale;
    short kind;
};

// A local array with run-time indices, constants, a switch, a structure passed by value.
extern "C" __global__ void memories(const float *x, float *y, Shape shape) {
    float stack[16];
    for (int i = 0; i < shape.count; ++i)
        stack[i] = x[i] * weights[i & 3];
    int index = (threadIdx.x * 7) % shape.count;
    float value = stack[index];
    switch ((threadIdx.x + shape.kind) % 6) {
    case 0:
        value += 1;
        break;
    case 1:
        value *= 2;
        break;
    case 2:
        value -= 3;
        break;
    case 3:
        value = -value;
        break;
    case 4:
        value = value * value;
        break;
    default:
        value = 0;
    }
    y[threadIdx.x] = value * shape.scale;
}

__device__ __noinline__ float polynomial(float x, int degree) {
    float sum = 0;
    for (int i = 0; i <= degree; ++i)
        sum = sum * x + i;
    return sum;
}

__device__ __noinline__ float2 both(float x) {
    return make_float2(polynomial(x, 2), polynomial(-x, 3));
}

extern "C" __global__ void calls(const float *x, float *y) {
    float2 value = both(x[threadIdx.x]);
    y[threadIdx.x] = value.x + 2 * value.y + polynomial(x[threadIdx.x], 1);
}
