// Launches an exported attention kernel of bf16 by the CUDA driver alone, and checks the result.
// Nothing of CUDA is linked; cuda.h is in a toolkit, and in nvidia-cuda-runtime from PyPI.
//
//   python -m flash_attention export NAME --arch 90a --out exported
//   g++ -std=c++20 -DKERNEL=NAME -include exported/NAME.h -I CUDA/include launch.cpp -o launch
//   ./launch exported/NAME.cubin [LENGTH [HEADS]]

#include "driver_calls.h"
#include "reference.h"
#include <cstring>

#define JOIN(kernel, part) kernel##_##part
#define OF(kernel, part) JOIN(kernel, part)

// Members that only some kernels have: those with options and several lengths, and persistent ones.
void fill_options(auto &call, int size, int sms) {
    if constexpr (requires { call.len_k; })
        call.len_k = call.len_q, call.kv_heads = call.heads, call.softmax_scale = 1 / sqrt(size);
    if constexpr (requires { call.sms; })
        call.sms = sms;
}

// A buffer that only kernels have that count their tiles. It is zeros before each launch.
void fill_buffers(auto &call, const auto &launch) {
    if constexpr (requires { launch.next_tile_bytes; }) {
        CUdeviceptr counter = 0;
        if (launch.next_tile_bytes != 0) {
            DRIVER(cuMemAlloc, &counter, launch.next_tile_bytes);
            DRIVER(cuMemsetD8, counter, 0, launch.next_tile_bytes);
        }
        call.next_tile = counter;
    }
}

int main(int count, char **arguments) {
    if (count < 2)
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

    const int length = count > 2 ? atoi(arguments[2]) : 128, size = OF(KERNEL, d_head);
    const int heads = count > 3 ? atoi(arguments[3]) : 2, row = heads * size;
    const Shape shape = {heads, length, size, strstr(TEXT(KERNEL), "_causal") != nullptr};
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
    for (bool is_first : {true, false}) { // the first tells the sizes of buffers
        if (OF(KERNEL, plan)(&call, &launch, reason, sizeof reason))
            return fprintf(stderr, "%s\n", reason), 2;
        if (is_first)
            fill_buffers(call, launch);
    }
    for (int i = 0; i < launch.n_tensor_maps; ++i) {
        const flash_tensor_map &map = launch.tensor_maps[i];
        const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
        DRIVER(cuTensorMapEncodeTiled, (CUtensorMap *)((char *)&launch.arguments + map.member),
               (CUtensorMapDataType)map.data_type, map.rank, (void *)map.address, map.dims,
               map.strides, map.box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
               (CUtensorMapSwizzle)map.swizzle, (CUtensorMapL2promotion)map.l2_promotion,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    }
    const auto [x, y, z] = launch.grid;
    CUlaunchAttribute found[] = {{CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, {}, {}},
                                 {CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, {}, {}}};
    found[0].value.clusterDim = {launch.cluster[0], launch.cluster[1], launch.cluster[2]};
    found[1].value.programmaticStreamSerializationAllowed = 1;
    const unsigned n = launch.programmatic ? 2 : launch.cluster[0] > 1;
    const CUlaunchConfig config = {x, y, z, launch.block, 1, 1, launch.shared_bytes, 0, found, n};
    void *parameters[] = {&launch.arguments};
    DRIVER(cuLaunchKernelEx, &config, function, parameters, nullptr);
    DRIVER(cuMemcpyDtoH, host[3].data(), memory[3], 2 * host[3].size());
    const double error = largest_error(shape, host);
    printf("%s: the largest error is %.5f\n", error < 0.02 ? "right" : "wrong", error);
    return error < 0.02 ? 0 : 1;
}
