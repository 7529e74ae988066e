// Reductions, scans, votes, atomics, divergence, barriers: what warps and blocks do together.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

extern "C" __global__ void block_sum(const float *x, float *sums, int n) {
    __shared__ float partial[32];
    float sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        sum += x[i];
    for (int d = 16; d > 0; d /= 2)
        sum += __shfl_down_sync(~0u, sum, d);
    if (threadIdx.x % 32 == 0)
        partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0;
        for (int d = 16; d > 0; d /= 2)
            sum += __shfl_xor_sync(~0u, sum, d);
        if (threadIdx.x == 0)
            atomicAdd(sums, sum);
    }
}

extern "C" __global__ void softmax(const __half *x, __half *y, int columns) {
    extern __shared__ float row[];
    __shared__ float shared_value;
    const __half *in = x + blockIdx.x * columns;
    float largest = -INFINITY;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        row[i] = __half2float(in[i]);
        largest = fmaxf(largest, row[i]);
    }
    for (int d = 1; d < 32; d *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    if (threadIdx.x == 0)
        shared_value = -INFINITY;
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        atomicMax(reinterpret_cast<int *>(&shared_value), __float_as_int(largest + 1000.0f));
    __syncthreads();
    largest = shared_value - 1000.0f;
    float sum = 0;
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        sum += row[i] = __expf(row[i] - largest);
    for (int d = 1; d < 32; d *= 2)
        sum += __shfl_xor_sync(~0u, sum, d);
    __syncthreads();
    if (threadIdx.x == 0)
        shared_value = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        atomicAdd(&shared_value, sum);
    __syncthreads();
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        y[blockIdx.x * columns + i] = __float2half(row[i] / shared_value);
}

extern "C" __global__ void transpose(const float *x, float *y, int width, int height) {
    __shared__ float tile[32][33];
    int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 32 + threadIdx.y;
    for (int i = 0; i < 32; i += 8)
        if (row + i < height && column < width)
            tile[threadIdx.y + i][threadIdx.x] = x[(row + i) * width + column];
    __syncthreads();
    column = blockIdx.y * 32 + threadIdx.x, row = blockIdx.x * 32 + threadIdx.y;
    for (int i = 0; i < 32; i += 8)
        if (row + i < width && column < height)
            y[(row + i) * height + column] = tile[threadIdx.x][threadIdx.y + i];
}

// Steps of Collatz's sequence: every lane leaves the loop at another time.
extern "C" __global__ void collatz(const uint32_t *x, uint32_t *steps, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    uint64_t value = x[i];
    uint32_t count = 0;
    while (value != 1) {
        value = value % 2 ? 3 * value + 1 : value / 2;
        ++count;
    }
    steps[i] = count;
}

extern "C" __global__ void histogram(const uint8_t *x, uint32_t *bins, int n) {
    __shared__ uint32_t mine[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        mine[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&mine[x[i]], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        if (mine[i])
            atomicAdd(&bins[i], mine[i]);
}

extern "C" __global__ void votes(const int *x, uint32_t *y) {
    int lane = threadIdx.x, value = x[lane];
    y[lane] = __ballot_sync(~0u, value > 0);
    y[32 + lane] = __any_sync(~0u, value > 100) | __all_sync(~0u, value > -100) << 1;
    y[64 + lane] = __match_any_sync(~0u, value % 3);
    int same;
    y[96 + lane] = __match_all_sync(~0u, value * 0, &same) + same;
    y[128 + lane] = __reduce_add_sync(~0u, value);
    y[160 + lane] = __reduce_min_sync(~0u, value);
    y[192 + lane] = __reduce_or_sync(~0u, static_cast<uint32_t>(value));
    if (value > 0) {
        y[224 + lane] = __activemask();
        y[256 + lane] = __shfl_sync(__activemask(), value, __ffs(__activemask()) - 1);
    } else {
        y[224 + lane] = __activemask();
        y[256 + lane] = 0;
    }
    y[288 + lane] = __shfl_up_sync(~0u, value, 3, 8);
    y[320 + lane] = __shfl_sync(~0u, value, lane * 5, 16);
}

// Warp 0 produces, warp 1 consumes, with named barriers of 64 threads each.
extern "C" __global__ void roles(const int *x, int *y, int rounds) {
    __shared__ int slot[32];
    int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        for (int i = 0; i < rounds; ++i) {
            if (i > 0)
                asm volatile("bar.sync 2, 64;");
            slot[lane] = x[i * 32 + lane] * 2;
            __threadfence_block();
            asm volatile("bar.arrive 1, 64;");
        }
    } else {
        for (int i = 0; i < rounds; ++i) {
            asm volatile("bar.sync 1, 64;");
            y[i * 32 + lane] = slot[lane] + 1;
            if (i + 1 < rounds)
                asm volatile("bar.arrive 2, 64;");
        }
    }
}

extern "C" __global__ void counted(const int *x, int *y) {
    int count = __syncthreads_count(x[threadIdx.x] > 0);
    int any = __syncthreads_or(x[threadIdx.x] > 1000),
        all = __syncthreads_and(x[threadIdx.x] > -1000);
    y[threadIdx.x] = count + 1000 * (any != 0) + 10000 * (all != 0);
}

__device__ int spin_lock;

// One thread of each block takes its turn: blocks wait for each other through global memory.
extern "C" __global__ void turns(int *order) {
    if (threadIdx.x == 0) {
        while (atomicCAS(&spin_lock, static_cast<int>(blockIdx.x), -1) !=
               static_cast<int>(blockIdx.x)) {
        }
        order[blockIdx.x] = atomicAdd(&order[gridDim.x], 1);
        __threadfence();
        atomicExch(&spin_lock, static_cast<int>(blockIdx.x) + 1);
    }
}

extern "C" __global__ void atomics(uint32_t *u, float *f, __half2 *h, __nv_bfloat162 *b,
                                   unsigned long long *l) {
    int i = threadIdx.x;
    atomicInc(&u[0], 40);
    atomicDec(&u[1], 7);
    atomicMin(&u[2], 100u - i);
    atomicMax(reinterpret_cast<int *>(&u[3]), i - 10);
    atomicAnd(&u[4], ~(1u << (i % 32)));
    atomicOr(&u[5], 1u << (i % 32));
    atomicXor(&u[6], static_cast<uint32_t>(i));
    u[8 + i] = atomicAdd(&u[7], 2u);
    atomicAdd(f, 0.5f);
    atomicAdd(h, __floats2half2_rn(1.0f, 0.25f));
    atomicAdd(b, __floats2bfloat162_rn(0.5f, 1.0f));
    atomicAdd(l, 1ull << 33);
}

// A block of 100 threads: its last warp has four. Lanes read only lanes that exist.
extern "C" __global__ void block_max(const float *x, float *result, int n) {
    __shared__ float partial[4];
    float largest = -INFINITY;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        largest = fmaxf(largest, x[i]);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    if (threadIdx.x < 96)
        for (int d = 4; d < 32; d *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    if (threadIdx.x % 32 == 0)
        partial[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x == 0)
        *result = fmaxf(fmaxf(partial[0], partial[1]), fmaxf(partial[2], partial[3]));
}
