// C = A @ B^T on Hopper, and the program that launches it. A (M, K) and B (N, K) are bf16, C (M, N)
// is fp32, each with contiguous rows. M, N and K are multiples of 64.
//
// A thread block computes 64 x 64 elements of C. Its fifth warp is the producer: one thread asks
// TMA for tiles of A and B, up to kSlots steps of K ahead. The other four warps are the consumers,
// a warpgroup: they multiply the tiles of a slot with wgmma, and release the slot.
//
//   without a GPU    python -m flash_helpers.ptx run examples/host_program/matmul.cu [M N K]
//   on a GPU         nvcc -gencode arch=compute_90a,code=sm_90a matmul.cu && ./a.out [M N K]

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda.h>
#include <cuda_bf16.h>
#include <vector>

constexpr int kTile = 64; // rows, and columns: 128 bytes, as wide as the swizzle
constexpr int kSlots = 4; // of the ring
constexpr int kConsumers = 128; // threads

struct Slot {
    __nv_bfloat16 A[kTile][kTile], B[kTile][kTile];
};

// -- one instruction each -------------------------------------------------------------------------

__device__ uint32_t shared_address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ void init(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

__device__ void arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

__device__ void arrive_and_expect(uint64_t *barrier, int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

// Until the phase of this parity is complete; a new mbarrier counts as past one of parity 1.
__device__ void wait(uint64_t *barrier, int parity) {
    asm volatile("{\n\t.reg .pred done;\nagain:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

__device__ void load(void *tile, const CUtensorMap *map, int column, int row, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(tile)),
                 "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
                 : "memory");
}

// A tile in the 128-byte swizzle: 1024 bytes from 8 rows to the next 8 (PTX ISA, "Matrix Descriptor
// Format").
__device__ uint64_t descriptor(const void *tile) {
    return uint64_t{1} << 62 | uint64_t{1024 / 16} << 32 | shared_address(tile) >> 4;
}

// D (64, 64) += A (64, 16) @ B (64, 16)^T.
__device__ void multiply(float (&D)[32], uint64_t A, uint64_t B) {
#define FOUR(i) "+f"(D[i]), "+f"(D[i + 1]), "+f"(D[i + 2]), "+f"(D[i + 3])
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, 1, 1, 1, 0, 0;"
                 : FOUR(0), FOUR(4), FOUR(8), FOUR(12), FOUR(16), FOUR(20), FOUR(24), FOUR(28)
                 : "l"(A), "l"(B)
                 : "memory");
#undef FOUR
}

// -- the kernel -----------------------------------------------------------------------------------

__global__ void __launch_bounds__(kConsumers + 32)
    matmul(const __grid_constant__ CUtensorMap A_gmem, const __grid_constant__ CUtensorMap B_gmem,
           float *C_gmem, int N, int K) {
    extern __shared__ __align__(1024) Slot ring[]; // kSlots
    __shared__ uint64_t full[kSlots], empty[kSlots];
    const int row = blockIdx.y * kTile, column = blockIdx.x * kTile, steps = K / kTile;

    // 1. Barriers
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < kSlots; ++slot) {
            init(&full[slot], 1); // the producer
            init(&empty[slot], kConsumers / 32); // one thread of each consumer warp
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); // for TMA
    }
    __syncthreads();

    // 2. Producer: A, B -> ring
    if (threadIdx.x >= kConsumers) {
        for (int i = 0; threadIdx.x == kConsumers && i < steps; ++i) {
            const int slot = i % kSlots, lap = i / kSlots;
            wait(&empty[slot], lap % 2 ^ 1); // in the first lap at once
            arrive_and_expect(&full[slot], sizeof(Slot));
            load(ring[slot].A, &A_gmem, i * kTile, row, &full[slot]);
            load(ring[slot].B, &B_gmem, i * kTile, column, &full[slot]);
        }
        return;
    }

    // 3. Consumers: C += A @ B^T
    float C[32] = {};
    for (int i = 0; i < steps; ++i) {
        const int slot = i % kSlots, lap = i / kSlots;
        wait(&full[slot], lap % 2);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int k = 0; k < kTile; k += 16)
            multiply(C, descriptor(&ring[slot].A[0][k]), descriptor(&ring[slot].B[0][k]));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (threadIdx.x % 32 == 0)
            arrive(&empty[slot]);
    }

    // 4. C: registers -> global. Lane 4g + t of warp w has rows 16w + g and 16w + g + 8, columns
    // 8n + 2t and 8n + 2t + 1 (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16").
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *to = C_gmem + (row + 16 * warp + lane / 4) * N + column + lane % 4 * 2;
    for (int n = 0; n < kTile / 8; ++n) {
        *reinterpret_cast<float2 *>(to + 8 * n) = {C[4 * n], C[4 * n + 1]};
        *reinterpret_cast<float2 *>(to + 8 * N + 8 * n) = {C[4 * n + 2], C[4 * n + 3]};
    }
}

// -- the program ----------------------------------------------------------------------------------

void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        printf("%s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}

// Small integers: their products and sums are exact in fp32, in every order.
std::vector<__nv_bfloat16> integers(int count) {
    std::vector<__nv_bfloat16> x(count);
    for (__nv_bfloat16 &element : x)
        element = static_cast<float>(rand() % 8 - 3);
    return x;
}

void *upload(const std::vector<__nv_bfloat16> &x) {
    void *gmem;
    check(cudaMalloc(&gmem, x.size() * sizeof x[0]), "cudaMalloc");
    check(cudaMemcpy(gmem, x.data(), x.size() * sizeof x[0], cudaMemcpyHostToDevice), "cudaMemcpy");
    return gmem;
}

// Of a matrix (rows, columns), whose tiles lie in shared memory in the 128-byte swizzle. The first
// dimension of a tensor map is the one whose elements lie side by side.
CUtensorMap tensor_map(void *gmem, uint64_t rows, uint64_t columns) {
    void *encode;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                           cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    const cuuint64_t dims[] = {columns, rows}, strides[] = {columns * sizeof(__nv_bfloat16)};
    const cuuint32_t box[] = {kTile, kTile}, element_strides[] = {1, 1};
    CUtensorMap map;
    const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, gmem, dims, strides, box, element_strides,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check(static_cast<cudaError_t>(result), "cuTensorMapEncodeTiled");
    return map;
}

int main(int count, char **arguments) {
    const auto size = [=](int i, int otherwise) {
        return i < count ? atoi(arguments[i]) : otherwise;
    };
    const int M = size(1, 128), N = size(2, 128), K = size(3, 384);
    const auto A = integers(M * K), B = integers(N * K);
    void *A_gmem = upload(A), *B_gmem = upload(B);
    float *C_gmem;
    std::vector<float> C(M * N);
    check(cudaMalloc(&C_gmem, C.size() * sizeof C[0]), "cudaMalloc");

    const int shared_bytes = kSlots * sizeof(Slot); // more than the 48 KiB that need no permission
    check(cudaFuncSetAttribute(matmul, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          "cudaFuncSetAttribute");
    matmul<<<dim3(N / kTile, M / kTile), kConsumers + 32, shared_bytes>>>(
        tensor_map(A_gmem, M, K), tensor_map(B_gmem, N, K), C_gmem, N, K);
    check(cudaGetLastError(), "matmul");
    check(cudaMemcpy(C.data(), C_gmem, C.size() * sizeof C[0], cudaMemcpyDeviceToHost), "matmul");

    for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) {
            float sum = 0;
            for (int k = 0; k < K; ++k)
                sum += static_cast<float>(A[m * K + k]) * static_cast<float>(B[n * K + k]);
            if (C[m * N + n] != sum) {
                printf("WRONG: C[%d][%d] is %g instead of %g\n", m, n, C[m * N + n], sum);
                return 1;
            }
        }
    }
    printf("right: %d x %d x %d\n", M, N, K);
}
