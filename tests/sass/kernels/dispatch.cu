// Warp roles that a jump table, an enum, a called function or a table in memory tells; and a limit
// of registers that changes on the way to a loop and behind it.
#include <cstdint>

namespace {

enum Role { kSoftmax, kCorrection, kMultiply, kLoad, kNone };

__device__ __forceinline__ int warp_number() {
    return __shfl_sync(~0u, threadIdx.x / 32, 0);
}

__device__ __forceinline__ float correct(float a, const float *t, int n) {
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
        a = a * t[threadIdx.x] + 1;
        __syncwarp();
    }
    return a;
}

__device__ __forceinline__ float softmax(float a, const float *t, int n) {
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
        a += exp2f(t[threadIdx.x] * a);
    }
    return a;
}

__device__ __forceinline__ float multiply(const float *t, int n) {
    float c[4] = {};
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, "
                     "{%4,%4,%4,%4}, {%4,%4}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(__float_as_int(t[(threadIdx.x + i) & 255])));
    }
    return c[0] + c[1] + c[2] + c[3];
}

__device__ __forceinline__ void load(float *t, const float *g, int n) {
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                         (uint32_t)__cvta_generic_to_shared(t + i)),
                     "l"(g + i)
                     : "memory");
    }
}

__device__ __forceinline__ void run(Role role, float *t, const float *g, float *o, int n) {
    float a = g[0];
    if (role == kSoftmax) {
        a = softmax(a, t, n);
    } else if (role == kCorrection) {
        a = correct(a, t, n);
    } else if (role == kMultiply) {
        a = multiply(t, n);
    } else if (role == kLoad) {
        load(t, g, n);
    }
    o[threadIdx.x] = a;
}

__device__ __noinline__ float changed(float a, int n) {
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
        a = __fsqrt_rn(a) + i;
    }
    return a;
}

} // namespace

// Warps 0 to 3 softmax, 4 to 7 correction, 8 alone the products, 9 alone the copies, 10 and 11
// nothing.
__global__ void __launch_bounds__(384) by_enum(const float *g, float *o, int n) {
    __shared__ float t[256];
    const int w = warp_number();
    const Role role = w < 4    ? kSoftmax
                      : w < 8  ? kCorrection
                      : w == 8 ? kMultiply
                      : w == 9 ? kLoad
                               : kNone;
    run(role, t, g, o, n);
}

// Warp 0 the copies, 1 correction, 2 softmax, 3 the products, 5 to 7 nothing, 4 a loop of its own.
__global__ void __launch_bounds__(256) by_switch(const float *g, float *o, int n) {
    __shared__ float t[256];
    float a = g[0];
    switch (warp_number()) {
    case 0:
        load(t, g, n);
        break;
    case 1:
        a = correct(a, t, n);
        break;
    case 2:
        a = softmax(a, t, n);
        break;
    case 3:
        a = multiply(t, n);
        break;
    case 4:
#pragma unroll 1
        for (int i = 0; i < n; ++i) {
            a = fmaxf(a, t[i]);
        }
        break;
    default:
        break;
    }
    o[threadIdx.x] = a;
}

// The roles as in by_enum, but told by memory: nobody knows them.
__global__ void __launch_bounds__(384) by_memory(const float *g, float *o, int n, const int *told) {
    __shared__ float t[256];
    run(static_cast<Role>(told[warp_number()]), t, g, o, n);
}

// A function is called before the roles part: warps 0 to 3 copy, 4 to 7 multiply.
__global__ void __launch_bounds__(256) behind_call(const float *g, float *o, int n) {
    __shared__ float t[256];
    const int w = warp_number();
    const float a = changed(g[threadIdx.x], n);
    t[threadIdx.x] = a;
    if (w < 4) {
        load(t, g, n);
    } else {
        o[threadIdx.x] = multiply(t, n) + a;
    }
}

// The last warp of the block, whatever its size, copies, and the others multiply.
__global__ void __launch_bounds__(256) by_size(const float *g, float *o, int n) {
    __shared__ float t[256];
    if (warp_number() == blockDim.x / 32 - 1) {
        load(t, g, n);
    } else {
        o[threadIdx.x] = multiply(t, n);
    }
}

// Warps 0 to 3 run their loop with 40 registers, 4 to 7 with 232; 256 and 120 hold before and
// behind it.
__global__ void __launch_bounds__(256, 1) limits(const float *g, float *o, int n) {
    __shared__ float t[1024];
    __shared__ int state;
    float a = 0;
    if (warp_number() < 4) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 256;");
        if (threadIdx.x == 0) {
            state = n;
        }
        asm volatile("bar.sync 1, 256;");
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#pragma unroll 1
        for (int i = 0; i < n; ++i) {
            t[threadIdx.x] = g[i * 128 + threadIdx.x];
            asm volatile("bar.sync 2, 256;" ::: "memory");
        }
        asm volatile("setmaxnreg.inc.sync.aligned.u32 256;");
        o[threadIdx.x] = t[threadIdx.x];
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
        asm volatile("bar.sync 1, 256;");
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#pragma unroll 1
        for (int i = 0; i < n; ++i) {
            asm volatile("bar.sync 2, 256;" ::: "memory");
            a += exp2f(t[threadIdx.x & 127]) * state;
        }
        asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
        o[threadIdx.x] = a;
    }
}
