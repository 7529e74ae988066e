// Mistakes of host programs, one for each name.

#include <cooperative_groups.h>
#include <cstdio>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
#include <unistd.h>

__global__ void fills(float *x) {
    x[threadIdx.x] = 1;
}

__global__ void takes_shared(float *x) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = threadIdx.x;
    x[threadIdx.x] = tile[threadIdx.x];
}

__global__ void races(float *x) {
    __shared__ float tile[64];
    tile[threadIdx.x] = threadIdx.x;
    x[threadIdx.x] = tile[63 - threadIdx.x];
}

__global__ void meets() {
    cooperative_groups::this_grid().sync();
}

int main(int count, char **arguments) {
    const char *mistake = count > 1 ? arguments[1] : "";
    const auto is = [mistake](const char *name) { return !strcmp(mistake, name); };
    float *x, y[64];
    cudaMalloc(&x, sizeof y);
    if (is("too_long"))
        cudaMemcpy(x + 1, y, sizeof y, cudaMemcpyHostToDevice);
    if (is("freed_twice")) {
        cudaFree(x);
        cudaFree(x);
    }
    if (is("wrong_kind"))
        cudaMemcpy(y, x, sizeof y, cudaMemcpyHostToDevice);
    if (is("shared"))
        takes_shared<<<1, 64, 64 << 10>>>(x);
    if (is("block"))
        fills<<<1, 2048>>>(x);
    if (is("grid"))
        meets<<<1, 32>>>();
    if (is("cluster")) {
        cudaLaunchAttribute attribute;
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {16, 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = 16;
        config.blockDim = 32;
        config.attrs = &attribute;
        config.numAttrs = 1;
        cudaLaunchKernelEx(&config, fills, x);
    }
    if (is("early")) { // the second launch may begin before the first has ended
        cudaLaunchAttribute attribute;
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = 1;
        config.blockDim = 64;
        config.attrs = &attribute;
        config.numAttrs = 1;
        cudaLaunchKernelEx(&config, fills, x);
        cudaLaunchKernelEx(&config, fills, x);
    }
    if (is("tensor_map")) {
        CUtensorMap map;
        const cuuint64_t dims[] = {8, 8}, strides[] = {36};
        const cuuint32_t box[] = {8, 8}, ones[] = {1, 1};
        cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, x, dims, strides, box,
                               ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    }
    if (is("graph")) {
        cudaGraph_t graph;
        cudaGraphCreate(&graph, 0);
    }
    if (is("race"))
        races<<<1, 64>>>(x);
    if (is("out_of_bounds"))
        fills<<<1, 96>>>(x);
    if (is("read_by_the_program"))
        printf("%f\n", x[0]);
    if (is("null"))
        *static_cast<volatile int *>(nullptr) = 1;
    if (is("waits")) {
        puts("waiting");
        fflush(stdout);
        pause();
    }
    if (is("own_status"))
        return 7;
    if (is("error_name"))
        printf("%s\n", cudaGetErrorName(cudaMemset(nullptr, 0, 4)));
    printf("%s\n", cudaGetErrorString(cudaGetLastError()));
    return 0;
}
