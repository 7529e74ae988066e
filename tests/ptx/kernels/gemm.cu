// C = A B^T in several ways: the instructions of matrix kernels of compute capability 8.x.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace {
__device__ uint32_t address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
} // namespace

// A (m, k), B (n, k) row-major fp16, C (m, n) fp16 with fp16 accumulation. Block tile 32x32x32, two
// stages of cp.async, 4 warps of 16x16. Ragged m, n and k (k a multiple of 8): zero-filled copies.
extern "C" __global__ void gemm_f16(const __half *A, const __half *B, __half *C, int m, int n,
                                    int k) {
    constexpr int stride = 40; // 80-byte rows: ldmatrix without conflicts, no swizzle
    __shared__ __align__(16) __half A_smem[2][32 * stride], B_smem[2][32 * stride];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int row0 = blockIdx.y * 32, col0 = blockIdx.x * 32;
    const int warp_row = warp / 2 * 16, warp_col = warp % 2 * 16;
    auto copy = [&](int stage, int k0) {
        int row = thread / 4, chunk = thread % 4 * 8;
        int a_bytes = row0 + row < m && k0 + chunk < k ? 16 : 0;
        int b_bytes = col0 + row < n && k0 + chunk < k ? 16 : 0;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                         address(&A_smem[stage][row * stride + chunk])),
                     "l"(A + (a_bytes ? (row0 + row) * k + k0 + chunk : 0)), "r"(a_bytes));
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(
                         address(&B_smem[stage][row * stride + chunk])),
                     "l"(B + (b_bytes ? (col0 + row) * k + k0 + chunk : 0)), "r"(b_bytes));
        asm volatile("cp.async.commit_group;");
    };
    uint32_t acc[2][2] = {};
    copy(0, 0);
    int stage = 0;
    for (int k0 = 0; k0 < k; k0 += 32, stage ^= 1) {
        if (k0 + 32 < k) {
            copy(stage ^ 1, k0 + 32);
            asm volatile("cp.async.wait_group 1;");
        } else {
            asm volatile("cp.async.wait_all;");
        }
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < 32; kk += 16) {
            uint32_t a[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                         : "r"(address(&A_smem[stage][(warp_row + lane % 16) * stride + kk +
                                                      lane / 16 * 8])));
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                uint32_t b[2];
                asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                             : "=r"(b[0]), "=r"(b[1])
                             : "r"(address(&B_smem[stage][(warp_col + j * 8 + lane % 8) * stride +
                                                          kk + lane / 8 % 2 * 8])));
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, "
                             "{%2,%3,%4,%5}, {%6,%7}, "
                             "{%0,%1};"
                             : "+r"(acc[j][0]), "+r"(acc[j][1])
                             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
            }
        }
        __syncthreads();
    }
    for (int j = 0; j < 2; ++j)
        for (int h = 0; h < 2; ++h) {
            int row = row0 + warp_row + h * 8 + lane / 4,
                col = col0 + warp_col + j * 8 + lane % 4 * 2;
            __half2 value = reinterpret_cast<__half2 &>(acc[j][h]);
            if (row < m && col < n)
                C[row * n + col] = value.x;
            if (row < m && col + 1 < n)
                C[row * n + col + 1] = value.y;
        }
}

// One warp, 16x8 of bf16 with m16n8k8 and x1 fragments; B is (k, n), read with .trans.
extern "C" __global__ void gemm_k8_bf16(const __nv_bfloat16 *A, const __nv_bfloat16 *B, float *C,
                                        int k) {
    __shared__ __align__(16) __nv_bfloat16 A_smem[16 * 8], B_smem[8 * 8];
    const int lane = threadIdx.x;
    float c[4] = {};
    for (int k0 = 0; k0 < k; k0 += 8) {
        for (int i = 0; i < 2; ++i)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                             address(&A_smem[(lane / 4 + i * 8) * 8 + lane % 4 * 2])),
                         "l"(A + (lane / 4 + i * 8) * k + k0 + lane % 4 * 2));
        if (lane < 16)
            asm volatile(
                "cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address(&B_smem[lane * 4])),
                "l"(B + (k0 + lane / 2) * 8 + lane % 2 * 4));
        asm volatile("cp.async.wait_all;");
        __syncwarp();
        uint32_t a[2], b;
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                     : "=r"(a[0]), "=r"(a[1])
                     : "r"(address(&A_smem[lane % 16 * 8])));
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                     : "=r"(b)
                     : "r"(address(&B_smem[lane % 8 * 8])));
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
            "{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(b));
        __syncwarp();
    }
    for (int i = 0; i < 4; ++i)
        C[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}

// Fragments straight from global memory: tf32 m16n8k8, s8 m16n8k32, f64 m8n8k4.
extern "C" __global__ void gemm_tf32(const float *A, const float *B, float *C) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; ++i)
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(a[i]) : "f"(A[(g + i % 2 * 8) * 8 + t + i / 2 * 4]));
    for (int i = 0; i < 2; ++i)
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(b[i]) : "f"(B[g * 8 + t + i * 4]));
    float c[4] = {1, 2, 3, 4};
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    for (int i = 0; i < 4; ++i)
        C[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = c[i];
}

extern "C" __global__ void gemm_s8(const int8_t *A, const int8_t *B, int *C) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    int a[4], b[2], c[4] = {};
    for (int i = 0; i < 4; ++i)
        a[i] = *reinterpret_cast<const int *>(A + (g + i % 2 * 8) * 32 + t * 4 + i / 2 * 16);
    for (int i = 0; i < 2; ++i)
        b[i] = *reinterpret_cast<const int *>(B + g * 32 + t * 4 + i * 16);
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    for (int i = 0; i < 4; ++i)
        C[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = c[i];
}

extern "C" __global__ void gemm_f64(const double *A, const double *B, double *C) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    double c[2] = {};
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(c[0]), "+d"(c[1])
        : "d"(A[g * 4 + t]), "d"(B[g * 4 + t]));
    C[g * 8 + t * 2] = c[0];
    C[g * 8 + t * 2 + 1] = c[1];
}
