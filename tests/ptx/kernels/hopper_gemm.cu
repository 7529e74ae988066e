// Matrix products with wgmma and TMA: one warpgroup of consumers and a producer warp, A from
// registers, and single tiles by any descriptor.
#include "hopper.cuh"

using namespace hopper;

constexpr int tile_m = 64, tile_n = 128, tile_k = 64; // a row of k is 128 bytes, the swizzle's
constexpr int A_bytes = tile_m * tile_k * 2, B_bytes = tile_n * tile_k * 2;

extern __shared__ __align__(1024) uint8_t smem[];

// C = A B^T. A (m, k), B (n, k), C (m, n), row-major, by their tensor maps: boxes of 64 k x 64 and
// 64 k x 128 rows, and of 64 columns x 64 rows, in the 128-byte swizzle. 160 threads.
template <typename T, int stages>
__device__ void gemm(const CUtensorMap *A, const CUtensorMap *B, const CUtensorMap *C, int k) {
    __shared__ uint64_t barriers[2][stages];
    const uint32_t A_smem = shared_address(smem), B_smem = A_smem + stages * A_bytes,
                   C_smem = B_smem + stages * B_bytes, full = shared_address(barriers[0]),
                   empty = shared_address(barriers[1]);
    const uint32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int row0 = blockIdx.y * tile_m, col0 = blockIdx.x * tile_n;
    const int tiles = (k + tile_k - 1) / tile_k;

    if (thread == 0) {
        for (int s = 0; s < stages; ++s) {
            init(full + 8 * s, 1);
            init(empty + 8 * s, 128);
        }
        fence_init();
    }
    __syncthreads();

    if (warp == 4) { // the producer
        if (elected()) {
            Ring<stages> ring;
            for (int i = 0; i < tiles; ++i, ring.advance()) {
                uint32_t barrier = full + 8 * ring.slot;
                wait(empty + 8 * ring.slot, ring.lap ^ 1);
                arrive_expecting(barrier, A_bytes + B_bytes);
                load_2d(A_smem + ring.slot * A_bytes, A, barrier, i * tile_k, row0);
                load_2d(B_smem + ring.slot * B_bytes, B, barrier, i * tile_k, col0);
            }
        }
        return;
    }

    float acc[tile_n / 2];
    Ring<stages> ring;
    uint32_t last = 0; // the barrier of the slot that wgmma reads while the next is issued
    for (int i = 0; i < tiles; ++i, ring.advance()) {
        wait(full + 8 * ring.slot, ring.lap);
        const uint64_t a = swizzled_128(A_smem + ring.slot * A_bytes, 16, 1024);
        const uint64_t b = swizzled_128(B_smem + ring.slot * B_bytes, 16, 1024);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < tile_k / 16; ++step) // 16 of k are 32 bytes
            wgmma<T>(acc, a + advance(32 * step), b + advance(32 * step), i > 0 || step > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0)
            arrive(last);
        last = empty + 8 * ring.slot;
    }
    wgmma_wait<0>();
    hold(acc);

#pragma unroll
    for (int j = 0; j < tile_n / 16; ++j) { // two panels of 64 columns
        uint32_t panel = C_smem + j / 4 * tile_m * 128;
        store_fragment<T>(panel + swizzled(warp * 16 + lane % 16, j % 4 * 2 + lane / 16),
                          acc + 8 * j);
    }
    fence_proxy();
    barrier_sync(1, 128);
    if (thread == 0) {
        store_2d(C, C_smem, col0, row0);
        store_2d(C, C_smem + tile_m * 128, col0 + 64, row0);
        commit_stores();
        wait_stores_read<0>();
    }
}

// C = A B. A (m, k), B (k, n) row-major bf16, by boxes of 64 k x 64 rows and of 64 columns x 64 k
// in the 128-byte swizzle; C (m, n) fp32. A through ldmatrix, B with n as its major dimension. One
// warpgroup that also copies, two stages.
__device__ void gemm_registers(const CUtensorMap *A, const CUtensorMap *B, float *C, int m, int n,
                               int k) {
    using T = __nv_bfloat16;
    __shared__ uint64_t barriers[2];
    const uint32_t A_smem = shared_address(smem), B_smem = A_smem + 2 * A_bytes,
                   full = shared_address(barriers);
    const uint32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int row0 = blockIdx.y * tile_m, col0 = blockIdx.x * tile_n;
    const int tiles = (k + tile_k - 1) / tile_k;
    auto load = [&](int i) {
        uint32_t barrier = full + i % 2 * 8, panel = B_smem + i % 2 * B_bytes;
        arrive_expecting(barrier, A_bytes + B_bytes);
        load_2d(A_smem + i % 2 * A_bytes, A, barrier, i * tile_k, row0);
        load_2d(panel, B, barrier, col0, i * tile_k);
        load_2d(panel + tile_k * 128, B, barrier, col0 + 64, i * tile_k);
    };

    if (thread == 0) {
        init(full, 1);
        init(full + 8, 1);
        fence_proxy();
        load(0);
    }
    __syncthreads();

    float acc[tile_n / 2];
    uint32_t a[tile_k / 16 * 4];
    for (int i = 0; i < tiles; ++i) {
        if (thread == 0 && i + 1 < tiles)
            load(i + 1);
        wait(full + i % 2 * 8, i / 2 % 2);
#pragma unroll
        for (int step = 0; step < tile_k / 16; ++step)
            load_fragment(a, 4 * step,
                          A_smem + i % 2 * A_bytes +
                              swizzled(warp * 16 + lane % 16, 2 * step + lane / 16));
        const uint64_t b = swizzled_128(B_smem + i % 2 * B_bytes, tile_k * 128, 1024);
        hold(a);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < tile_k / 16; ++step) // 16 of k are 16 rows of 128 bytes
            wgmma<T, 1>(acc, a + 4 * step, b + advance(2048 * step), i > 0 || step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        hold(acc);
        hold(a);
        __syncthreads(); // all have read the stage that the next round copies to
    }

#pragma unroll
    for (int j = 0; j < tile_n / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = row0 + warp * 16 + half * 8 + lane / 4, col = col0 + j * 8 + lane % 4 * 2;
            if (row < m && col < n) // n is even
                reinterpret_cast<float2 &>(C[row * n + col]) =
                    make_float2(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
        }
}

// D (64, n) = sum over steps of A B^T, from an image of shared memory that ordinary stores write.
// The descriptors' addresses, and what a step adds to them, count from the image's start.
template <typename T, int n, int A_transposed, int B_transposed>
__device__ void tile(const uint4 *image, float *D, uint64_t A, uint64_t B, uint64_t A_step,
                     uint64_t B_step, int steps) {
    constexpr int image_chunks = 3072; // 48 KiB
    const uint32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const uint64_t start = advance(shared_address(smem));
    for (uint32_t i = thread; i < image_chunks; i += 128)
        reinterpret_cast<uint4 *>(smem)[i] = image[i];
    fence_proxy();
    __syncthreads();

    float acc[n / 2];
#pragma unroll
    for (int i = 0; i < n / 2; ++i)
        acc[i] = 1.0f; // that the first step adds to
    hold(acc);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        wgmma_fence();
        wgmma<T, A_transposed, B_transposed>(acc, start + A + step * A_step,
                                             start + B + step * B_step, true);
        wgmma_commit();
    }
    wgmma_wait<0>();
    hold(acc);
#pragma unroll
    for (int i = 0; i < n / 2; ++i)
        D[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * n + i / 4 * 8 + lane % 4 * 2 + i % 2] = acc[i];
}

#define MAP const __grid_constant__ CUtensorMap

extern "C" __global__ __launch_bounds__(160, 1) void gemm_bf16(MAP A, MAP B, MAP C, int k) {
    gemm<__nv_bfloat16, 4>(&A, &B, &C, k);
}

extern "C" __global__ __launch_bounds__(160, 1) void gemm_f16(MAP A, MAP B, MAP C, int k) {
    gemm<__half, 3>(&A, &B, &C, k);
}

extern "C" __global__ __launch_bounds__(128, 1) void gemm_a_registers(MAP A, MAP B, float *C, int m,
                                                                      int n, int k) {
    gemm_registers(&A, &B, C, m, n, k);
}

// What is major, k or m and n, of A and then of B.
#define TILE(name, ...)                                                                         \
    extern "C" __global__ __launch_bounds__(128, 1) void tile_##name(                           \
        const uint4 *image, float *D, uint64_t A, uint64_t B, uint64_t A_step, uint64_t B_step, \
        int steps) {                                                                            \
        tile<__VA_ARGS__>(image, D, A, B, A_step, B_step, steps);                               \
    }
TILE(bf16_n64_k_k, __nv_bfloat16, 64, 0, 0)
TILE(bf16_n64_m_k, __nv_bfloat16, 64, 1, 0)
TILE(f16_n64_k_n, __half, 64, 0, 1)
TILE(f16_n64_m_n, __half, 64, 1, 1)
TILE(f16_n24_k_k, __half, 24, 0, 0)
TILE(bf16_n24_m_n, __nv_bfloat16, 24, 1, 1)
