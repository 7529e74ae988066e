// Calls of the runtime and the driver, each checked by the program itself. It ends with 0 if all
// are right; a line that is wrong is printed. It is right on an H100, too.

#include <cooperative_groups.h>
#include <cstdio>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
#include <vector>

#define RIGHT(condition)                                   \
    do {                                                   \
        if (!(condition)) {                                \
            printf("line %d: %s\n", __LINE__, #condition); \
            wrong = 1;                                     \
        }                                                  \
    } while (0)

int wrong = 0;

__device__ int launches = 40;
__constant__ float scale;
__managed__ int managed_sum = 5;

__global__ void scaled(float *x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        x[i] *= scale;
    if (i == 0)
        ++launches;
}

__global__ void sum_of(const int *x, int n) {
    int sum = 0;
    for (int i = 0; i < n; ++i)
        sum += x[i];
    managed_sum += sum;
}

template <class T>
__global__ void dynamic(T *out) {
    extern __shared__ char bytes[];
    T *tile = reinterpret_cast<T *>(bytes);
    tile[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

__global__ void ranks(unsigned *out) {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    out[blockIdx.x] = rank;
}

__global__ void counted(int *at) {
    const auto grid = cooperative_groups::this_grid();
    atomicAdd(at, 1);
    grid.sync();
    at[1 + blockIdx.x] = at[0];
}

struct Pair {
    char letter;
    double number;
};

__global__ void structure(Pair pair, short second, double *out) {
    *out = pair.letter + pair.number + second;
}

__global__ void says(int n) {
    printf("the kernel says %d\n", n);
}

void copies_and_symbols() {
    const int n = 100;
    std::vector<float> x(n, 3), y(n);
    float *x_gmem, factor = 2;
    RIGHT(cudaMalloc(&x_gmem, n * sizeof(float)) == cudaSuccess);
    RIGHT(cudaMemcpy(x_gmem, x.data(), n * sizeof(float), cudaMemcpyHostToDevice) == 0);
    RIGHT(cudaMemcpyToSymbol(scale, &factor, sizeof factor) == 0);
    scaled<<<4, 32>>>(x_gmem, n);
    scaled<<<4, 32>>>(x_gmem, n);
    RIGHT(cudaMemcpy(y.data(), x_gmem, n * sizeof(float), cudaMemcpyDefault) == 0);
    RIGHT(y[0] == 12 && y[n - 1] == 12);
    int count = 0;
    size_t size = 0;
    RIGHT(cudaMemcpyFromSymbol(&count, launches, sizeof count) == 0 && count == 42);
    RIGHT(cudaGetSymbolSize(&size, launches) == 0 && size == 4);
    RIGHT(cudaMemset(x_gmem, 0, 8) == 0);
    RIGHT(cudaMemcpy(x_gmem + 50, x_gmem, 8, cudaMemcpyDeviceToDevice) == 0);
    RIGHT(cudaMemcpy(y.data(), x_gmem, n * sizeof(float), cudaMemcpyDeviceToHost) == 0);
    RIGHT(y[0] == 0 && y[2] == 12 && y[51] == 0 && y[52] == 12);
    RIGHT(cudaFree(x_gmem) == 0 && cudaFree(nullptr) == 0);
    char rows[4][16] = {"abc", "def", "ghi", "jkl"}, back[4][4];
    char *pitched;
    size_t pitch;
    RIGHT(cudaMallocPitch(&pitched, &pitch, 4, 4) == 0 && pitch >= 4);
    RIGHT(cudaMemcpy2D(pitched, pitch, rows, 16, 4, 4, cudaMemcpyHostToDevice) == 0);
    RIGHT(cudaMemcpy2D(back, 4, pitched, pitch, 4, 4, cudaMemcpyDeviceToHost) == 0);
    RIGHT(!strcmp(back[0], "abc") && !strcmp(back[3], "jkl"));
}

void memory_of_both() {
    int *x;
    RIGHT(cudaMallocManaged(&x, 10 * sizeof *x) == 0);
    for (int i = 0; i < 10; ++i)
        x[i] = i;
    sum_of<<<1, 1>>>(x, 10);
    RIGHT(cudaDeviceSynchronize() == 0);
    RIGHT(managed_sum == 50);
    cudaPointerAttributes found;
    RIGHT(cudaPointerGetAttributes(&found, x) == 0 && found.type == cudaMemoryTypeManaged);
    RIGHT(found.hostPointer == x && found.devicePointer == x);
    RIGHT(cudaPointerGetAttributes(&found, &found) == 0);
    RIGHT(found.type == cudaMemoryTypeUnregistered && !found.devicePointer);
    RIGHT(cudaFree(x) == 0);
    RIGHT(cudaMallocHost(&x, sizeof *x) == 0);
    RIGHT(cudaPointerGetAttributes(&found, x) == 0 && found.type == cudaMemoryTypeHost);
    *x = 7;
    sum_of<<<1, 1>>>(x, 1);
    RIGHT(cudaDeviceSynchronize() == 0 && managed_sum == 57);
    RIGHT(cudaFreeHost(x) == 0);
}

void launches_with_attributes() {
    unsigned out[1024];
    unsigned *out_gmem;
    RIGHT(cudaMalloc(&out_gmem, sizeof out) == 0);
    RIGHT(cudaFuncSetAttribute(dynamic<unsigned>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               100 << 10) == 0);
    dynamic<<<1, 1024, 100 << 10>>>(out_gmem);
    RIGHT(cudaMemcpy(out, out_gmem, sizeof out, cudaMemcpyDeviceToHost) == 0);
    RIGHT(out[0] == 1023 && out[1023] == 0);
    cudaLaunchConfig_t config{};
    config.gridDim = 8;
    config.blockDim = 32;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {4, 1, 1};
    config.attrs = attributes;
    config.numAttrs = 2;
    int clusters = 0;
    RIGHT(cudaOccupancyMaxActiveClusters(&clusters, ranks, &config) == 0 && clusters > 0);
    RIGHT(cudaLaunchKernelEx(&config, ranks, out_gmem) == 0); // which the copy is before
    RIGHT(cudaMemcpy(out, out_gmem, sizeof out, cudaMemcpyDeviceToHost) == 0);
    RIGHT(out[3] == 3 && out[4] == 0);
    RIGHT(cudaMemset(out_gmem, 0, 4) == 0);
    void *arguments[] = {&out_gmem};
    RIGHT(cudaLaunchCooperativeKernel(counted, 3, 32, arguments) == 0);
    RIGHT(cudaMemcpy(out, out_gmem, sizeof out, cudaMemcpyDeviceToHost) == 0);
    RIGHT(out[1] == 96 && out[3] == 96);
    double sum;
    structure<<<1, 1>>>({'\2', 0.5}, 3, reinterpret_cast<double *>(out_gmem));
    RIGHT(cudaMemcpy(&sum, out_gmem, sizeof sum, cudaMemcpyDeviceToHost) == 0 && sum == 5.5);
    cudaFuncAttributes found;
    RIGHT(cudaFuncGetAttributes(&found, dynamic<unsigned>) == 0 &&
          found.maxThreadsPerBlock == 1024);
    int blocks = 0;
    RIGHT(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, dynamic<unsigned>, 1024,
                                                        100 << 10) == 0);
    RIGHT(blocks == 2);
    printf("the program says 1\n");
    says<<<1, 1>>>(2);
    printf("the program says 3\n");
}

void device_streams_events() {
    cudaDeviceProp properties;
    int value = 0;
    RIGHT(cudaGetDeviceProperties(&properties, 0) == 0);
    RIGHT(properties.major == 9 && properties.multiProcessorCount == 132);
    RIGHT(properties.sharedMemPerBlockOptin == 227 << 10 && strstr(properties.name, "H100"));
    RIGHT(cudaDeviceGetAttribute(&value, cudaDevAttrMaxThreadsPerBlock, 0) == 0 && value == 1024);
    cudaStream_t stream;
    cudaEvent_t first, second;
    float milliseconds = 2;
    RIGHT(cudaStreamCreate(&stream) == 0);
    RIGHT(cudaEventCreate(&first) == 0 && cudaEventCreate(&second) == 0);
    RIGHT(cudaEventRecord(first, stream) == 0 && cudaEventRecord(second, stream) == 0);
    RIGHT(cudaStreamSynchronize(stream) == 0 && cudaEventSynchronize(second) == 0);
    RIGHT(cudaEventElapsedTime(&milliseconds, first, second) == 0 && milliseconds < 1);
    RIGHT(cudaLaunchHostFunc(stream, [](void *at) { *static_cast<int *>(at) = 3; }, &value) == 0);
    RIGHT(cudaStreamSynchronize(stream) == 0 && value == 3);
    RIGHT(cudaStreamDestroy(stream) == 0);
}

const char *kPtx = ".version 8.0\n.target sm_80\n.address_size 64\n.global .u32 total = 1;\n"
                   ".visible .entry added(.param .u32 n)\n{\n.reg .b32 %r<3>;\n"
                   "ld.param.u32 %r1, [n];\nld.global.u32 %r2, [total];\nadd.u32 %r2, %r2, %r1;\n"
                   "st.global.u32 [total], %r2;\nret;\n}\n";

void driver() {
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction function;
    CUdeviceptr total;
    size_t size;
    unsigned n = 4, found = 0;
    const char *name;
    RIGHT(cuInit(0) == 0 && cuDeviceGet(&device, 0) == 0);
    RIGHT(cuDevicePrimaryCtxRetain(&context, device) == 0 && cuCtxSetCurrent(context) == 0);
    RIGHT(cuModuleLoadData(&module, kPtx) == 0);
    RIGHT(cuModuleGetFunction(&function, module, "added") == 0);
    void *arguments[] = {&n};
    RIGHT(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr) == 0);
    RIGHT(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr) == 0);
    RIGHT(cuModuleGetGlobal(&total, &size, module, "total") == 0 && size == 4);
    RIGHT(cuMemcpyDtoH(&found, total, 4) == 0 && found == 9);
    RIGHT(cuGetErrorName(CUDA_ERROR_NOT_FOUND, &name) == 0);
    RIGHT(!strcmp(name, "CUDA_ERROR_NOT_FOUND"));
}

void entry_points() {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult status;
    float *x;
    RIGHT(cudaMalloc(&x, 4096) == 0);
    RIGHT(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                           cudaEnableDefault, &status) == 0);
    RIGHT(status == cudaDriverEntryPointSuccess);
    const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    CUtensorMap map;
    const cuuint64_t dims[] = {32, 32}, strides[] = {128};
    const cuuint32_t box[] = {32, 8}, ones[] = {1, 1};
    RIGHT(encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, x, dims, strides, box, ones,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                 CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == 0);
    RIGHT(cudaGetDriverEntryPointByVersion("cuNoSuchFunction", &function, 12000, cudaEnableDefault,
                                           &status) == 0);
    RIGHT(status == cudaDriverEntryPointSymbolNotFound && !function);
}

int main() {
    copies_and_symbols();
    memory_of_both();
    launches_with_attributes();
    device_streams_events();
    driver();
    entry_points();
    RIGHT(cudaGetLastError() == cudaSuccess);
    return wrong;
}
