// Launches an exported attention kernel of bf16 by the CUDA driver alone, and checks the result.
// Nothing of CUDA is linked; cuda.h is in a toolkit, and in nvidia-cuda-runtime from PyPI.
//
//   python -m flash_attention export NAME --arch 90a --out exported
//   g++ -std=c++20 -DKERNEL=NAME -include exported/NAME.h -I CUDA/include launch.cpp -o launch
//   ./launch exported/NAME.cubin

#include "reference.h"
#include <cstdio>
#include <cstdlib>
#include <cuda.h>
#include <dlfcn.h>

#define JOIN(kernel, part) kernel##_##part
#define OF(kernel, part) JOIN(kernel, part)
#define STRING(text) #text
#define TEXT(macro) STRING(macro) // cuda.h has macros from names to names with a version
#define DRIVER(f, ...) check(#f, reinterpret_cast<decltype(&f)>(symbol(TEXT(f)))(__VA_ARGS__))

void *symbol(const char *name) {
    static void *const driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (void *found = driver ? dlsym(driver, name) : nullptr)
        return found;
    fprintf(stderr, "no CUDA driver that can launch the kernel: %s\n", dlerror());
    exit(3);
}

void check(const char *name, CUresult status) {
    if (status != CUDA_SUCCESS)
        exit((fprintf(stderr, "%s returns CUresult %d\n", name, status), 1));
}

// Members that only some kernels have: those with options and several lengths, and persistent ones.
void fill_options(auto &call, int size, int sms) {
    if constexpr (requires { call.len_k; })
        call.len_k = call.len_q, call.kv_heads = call.heads, call.softmax_scale = 1 / sqrt(size);
    if constexpr (requires { call.sms; })
        call.sms = sms;
}

int main(int count, char **arguments) {
    if (count != 2)
        return fprintf(stderr, "give the kernel's cubin, or its PTX\n"), 2;
    const std::string image = read_file(arguments[1]); // its text of PTX ends with 0
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction function;
    int sms;
    DRIVER(cuInit, 0);
    DRIVER(cuDeviceGet, &device, 0);
    DRIVER(cuDevicePrimaryCtxRetain, &context, device);
    DRIVER(cuCtxSetCurrent, context);
    DRIVER(cuDeviceGetAttribute, &sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    DRIVER(cuModuleLoadData, &module, image.data());
    DRIVER(cuModuleGetFunction, &function, module, OF(KERNEL, SYMBOL));
    DRIVER(cuFuncSetAttribute, function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
           OF(KERNEL, SHARED_BYTES));

    const int heads = 2, length = 128, size = OF(KERNEL, d_head), row = heads * size;
    const Shape shape = {heads, length, size};
    std::vector<uint16_t> host[4]; // q, k, v, o
    CUdeviceptr memory[4];
    for (int t = 0; t < 4; ++t) {
        host[t] = inputs(shape, t, t == 0);
        DRIVER(cuMemAlloc, &memory[t], 2 * host[t].size());
        DRIVER(cuMemcpyHtoD, memory[t], host[t].data(), 2 * host[t].size());
    }

    OF(KERNEL, call) call = {};
    call.batch = 1, call.heads = heads, call.len_q = length;
    call.q = memory[0], call.k = memory[1], call.v = memory[2], call.o = memory[3];
    call.q_seq_stride = call.k_seq_stride = call.v_seq_stride = call.o_seq_stride = row;
    call.q_heads_stride = call.k_heads_stride = call.v_heads_stride = call.o_heads_stride = size;
    fill_options(call, size, sms);
    OF(KERNEL, launch) launch;
    char reason[256];
    if (OF(KERNEL, plan)(&call, &launch, reason, sizeof reason))
        return fprintf(stderr, "%s\n", reason), 2;
    for (int i = 0; i < launch.n_tensor_maps; ++i) {
        const flash_tensor_map &map = launch.tensor_maps[i];
        const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
        DRIVER(cuTensorMapEncodeTiled, (CUtensorMap *)((char *)&launch.arguments + map.member),
               (CUtensorMapDataType)map.data_type, map.rank, (void *)map.address, map.dims,
               map.strides, map.box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
               (CUtensorMapSwizzle)map.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    }
    const auto [x, y, z] = launch.grid;
    CUlaunchAttribute cluster = {CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, {}, {}};
    cluster.value.clusterDim = {launch.cluster[0], launch.cluster[1], launch.cluster[2]};
    const CUlaunchConfig config = {
        x, y, z, launch.block, 1, 1, launch.shared_bytes, nullptr, &cluster, launch.cluster[0] > 1};
    void *parameters[] = {&launch.arguments};
    DRIVER(cuLaunchKernelEx, &config, function, parameters, nullptr);
    DRIVER(cuMemcpyDtoH, host[3].data(), memory[3], 2 * host[3].size());
    const double error = largest_error(shape, host);
    printf("%s: the largest error is %.5f\n", error < 0.02 ? "right" : "wrong", error);
    return error < 0.02 ? 0 : 1;
}
