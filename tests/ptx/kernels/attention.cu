// FlashAttention-2 forward, one head dimension (64), written small for the simulator's own tests:
// cp.async tiles, ldmatrix fragments, mma.m16n8k16, online softmax in registers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace {

constexpr int d_head = 64;
constexpr int B_r = 64;
constexpr int B_c = 64;
constexpr int chunks = d_head / 8; // 16-byte chunks in a row

struct Arguments {
    const void *Q, *K, *V;
    void *O;
    int64_t row_stride;
    int seq_len;
};

__device__ uint32_t shared_address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

template <bool swizzled>
__device__ int offset(int row, int chunk) {
    return row * d_head + 8 * (swizzled ? chunk ^ (row % 8) : chunk);
}

template <typename T>
__device__ uint32_t pack(float lo, float hi);
template <>
__device__ uint32_t pack<__nv_bfloat16>(float lo, float hi) {
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return reinterpret_cast<uint32_t &>(v);
}
template <>
__device__ uint32_t pack<__half>(float lo, float hi) {
    __half2 v = __floats2half2_rn(lo, hi);
    return reinterpret_cast<uint32_t &>(v);
}

template <typename T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, __half>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

template <bool trans>
__device__ void ldmatrix(uint32_t (&r)[4], const void *row) {
    if constexpr (trans) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row)));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row)));
    }
}

template <typename T, bool swizzled>
__device__ void copy_tile(T *smem, const T *gmem, int64_t row_stride) {
    for (int i = threadIdx.x; i < 64 * chunks; i += 128) {
        int row = i / chunks, chunk = i % chunks;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                         shared_address(smem + offset<swizzled>(row, chunk))),
                     "l"(gmem + row * row_stride + chunk * 8));
    }
}

} // namespace

template <typename T, bool swizzled>
__global__ void attention(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(128) char smem[];
    T *Q_smem = reinterpret_cast<T *>(smem), *K_smem = Q_smem + B_r * d_head,
      *V_smem = K_smem + B_c * d_head;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t base = blockIdx.y * d_head, rows = args.row_stride;
    const T *Q = static_cast<const T *>(args.Q) + base + blockIdx.x * B_r * rows;
    const T *K = static_cast<const T *>(args.K) + base;
    const T *V = static_cast<const T *>(args.V) + base;
    T *O = static_cast<T *>(args.O) + base + blockIdx.x * B_r * rows;

    copy_tile<T, swizzled>(Q_smem, Q, rows);
    asm volatile("cp.async.commit_group;");

    float O_acc[d_head / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
    uint32_t Q_frag[d_head / 16][4];
    const float scale = 1.4426950408889634f / sqrtf(float(d_head));
    for (int j = 0; j < args.seq_len / B_c; ++j) {
        copy_tile<T, swizzled>(K_smem, K + j * B_c * rows, rows);
        copy_tile<T, swizzled>(V_smem, V + j * B_c * rows, rows);
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 0;");
        __syncthreads();
        if (j == 0) {
#pragma unroll
            for (int k = 0; k < d_head / 16; ++k)
                ldmatrix<false>(
                    Q_frag[k], Q_smem + offset<swizzled>(warp * 16 + lane % 16, 2 * k + lane / 16));
        }
        float S[B_c / 8][4] = {};
#pragma unroll
        for (int n = 0; n < B_c / 16; ++n)
#pragma unroll
            for (int k = 0; k < d_head / 16; ++k) {
                uint32_t K_frag[4];
                ldmatrix<false>(K_frag, K_smem + offset<swizzled>(n * 16 + lane % 8 + lane / 16 * 8,
                                                                  2 * k + lane / 8 % 2));
                mma<T>(S[2 * n], Q_frag[k], K_frag[0], K_frag[1]);
                mma<T>(S[2 * n + 1], Q_frag[k], K_frag[2], K_frag[3]);
            }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float m_new = m[h];
#pragma unroll
            for (int n = 0; n < B_c / 8; ++n)
                m_new = fmaxf(m_new, fmaxf(S[n][2 * h], S[n][2 * h + 1]));
            m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 1));
            m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 2));
            float rescale = exp2f((m[h] - m_new) * scale);
            m[h] = m_new;
            l[h] *= rescale;
#pragma unroll
            for (int n = 0; n < d_head / 8; ++n) {
                O_acc[n][2 * h] *= rescale;
                O_acc[n][2 * h + 1] *= rescale;
            }
#pragma unroll
            for (int n = 0; n < B_c / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    S[n][2 * h + i] = exp2f(S[n][2 * h + i] * scale - m_new * scale);
                    l[h] += S[n][2 * h + i];
                }
        }
#pragma unroll
        for (int k = 0; k < B_c / 16; ++k) {
            uint32_t P[4] = {pack<T>(S[2 * k][0], S[2 * k][1]), pack<T>(S[2 * k][2], S[2 * k][3]),
                             pack<T>(S[2 * k + 1][0], S[2 * k + 1][1]),
                             pack<T>(S[2 * k + 1][2], S[2 * k + 1][3])};
#pragma unroll
            for (int n = 0; n < d_head / 16; ++n) {
                uint32_t V_frag[4];
                ldmatrix<true>(V_frag,
                               V_smem + offset<swizzled>(k * 16 + lane % 16, 2 * n + lane / 16));
                mma<T>(O_acc[2 * n], P, V_frag[0], V_frag[1]);
                mma<T>(O_acc[2 * n + 1], P, V_frag[2], V_frag[3]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        l[h] += __shfl_xor_sync(~0u, l[h], 1);
        l[h] += __shfl_xor_sync(~0u, l[h], 2);
        int row = warp * 16 + h * 8 + lane / 4;
#pragma unroll
        for (int n = 0; n < d_head / 8; ++n)
            reinterpret_cast<uint32_t &>(Q_smem[offset<swizzled>(row, n) + lane % 4 * 2]) =
                pack<T>(O_acc[n][2 * h] / l[h], O_acc[n][2 * h + 1] / l[h]);
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * chunks; i += 32) {
        int row = warp * 16 + i / chunks, chunk = i % chunks;
        reinterpret_cast<uint4 &>(O[row * rows + chunk * 8]) =
            reinterpret_cast<uint4 &>(Q_smem[offset<swizzled>(row, chunk)]);
    }
}

template __global__ void attention<__half, false>(const __grid_constant__ Arguments);
template __global__ void attention<__nv_bfloat16, true>(const __grid_constant__ Arguments);
