// The C ABI: find a kernel of any family by its name, check the device, launch.
//
// Every function returns 0, or an error whose text flash_last_error() gives. What a launch consists
// of is the caller's to say (py/flash_helpers/registry/launch.py), and shapes, types and alignment
// are the caller's to check (py/flash_helpers/runtime): nothing here knows what a kernel computes.
// Checking takes Python longer than launching, so that a call that was checked once can be repeated
// from here (flash_ready), for tensors that differ from those in their addresses alone.

#include "dlpack_exchange.h"
#include "flash_attention.cuh"
#include "flash_kernels.cuh"
#include "hopper_kernels.cuh"
#include "mma_rate.cuh"
#include "overlap_kernels.cuh"
#include "python_abi.h"

#include <array>
#include <atomic>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

// One launch. The kernel's one parameter follows it in memory: a caller has only the stream and the
// addresses to write into bytes that are otherwise ready, and hands over one pointer.
struct FlashLaunch {
    void *stream;
    int kernel; // its number, as of flash_kernel_name
    int device;
    unsigned int grid[3], cluster[3]; // blocks in x, y, z
    unsigned int n_threads; // a block
    unsigned int shared_bytes; // dynamic, a block
};

// Boxes of a tensor for TMA: what cuTensorMapEncodeTiled takes. rank: of dims and box; there are
// rank - 1 strides.
struct FlashTensorMap {
    unsigned int rank;
    unsigned int dtype; // of the enum DType
    unsigned int swizzle; // bytes: 0, 32, 64 or 128
    unsigned int box[5]; // elements
    uint64_t dims[5]; // elements, innermost first
    uint64_t strides[4]; // bytes, of all dimensions but the innermost
};

// A tensor map of q, k, v or o, by its number, and where it belongs, from the FlashLaunch on.
struct FlashBoundMap {
    uint64_t member;
    uint64_t tensor;
    FlashTensorMap map;
};

// A launch that is ready, and the q, k, v and o that it is ready for. The FlashLaunch and the
// kernel's parameter follow in memory.
struct FlashReady {
    const DLPackExchangeAPI *exchange; // what describes the tensors
    DLDevice device;
    int dtype; // of the enum DType
    unsigned int chunk_bytes; // what tensors begin at multiples of
    int64_t shapes[4][4];
    int64_t strides[4][4]; // elements
    uint64_t span_bytes[4]; // from the first byte to the one behind the last
    uint64_t members[4]; // where their addresses belong, from the FlashLaunch on
    uint64_t launch_bytes; // of the FlashLaunch and the parameter
    uint64_t n_maps;
    FlashBoundMap maps[4];
};

struct FlashKernelResources {
    int registers; // a thread
    int static_smem_bytes; // a block
    int dynamic_smem_bytes; // a block
    int local_bytes; // a thread
    int max_threads; // a block
    int resident_blocks_per_sm;
};

struct FlashMmaLoop {
    int n_blocks;
    int n_threads; // a block
    int64_t operations; // floating-point, of one launch
};

namespace {

thread_local std::string last_error;

int fail(std::string text) {
    last_error = std::move(text);
    return 1;
}

int check(cudaError_t status, const char *what) {
    if (status == cudaSuccess) {
        return 0;
    }
    cudaGetLastError(); // a launch error is reported once, not again by somebody else's call
    return fail(std::string(what) + ": " + cudaGetErrorString(status) + " (" +
                cudaGetErrorName(status) + ")");
}

// Makes `device` current for a scope; the caller's device comes back whatever happens.
class DeviceGuard {
  public:
    int set(int device) {
        if (int error = check(cudaGetDevice(&previous_), "cudaGetDevice")) {
            return error;
        }
        if (device == previous_) {
            return 0;
        }
        changed_ = true;
        return check(cudaSetDevice(device), "cudaSetDevice");
    }
    ~DeviceGuard() {
        if (changed_) {
            cudaSetDevice(previous_);
        }
    }

  private:
    int previous_ = 0;
    bool changed_ = false;
};

constexpr int kRememberedDevices = 64; // on those beyond, a kernel is prepared at every launch

struct BuiltKernel {
    const void *function;
    // By device: the most dynamic shared memory that a launch may ask for, as `prepare` set it.
    std::array<std::atomic<unsigned int>, kRememberedDevices> allowed_bytes = {};
};

using Kernels = std::map<std::string_view, BuiltKernel>;

template <typename Map>
void add_to(Kernels &found, const Map &kernels) {
    for (const auto &[config, kernel] : kernels) {
        found[kernel.name].function = kernel.function;
    }
}

// The kernels of all families by name.
Kernels &all_kernels() {
    static Kernels kernels = [] {
        Kernels found;
        add_to(found, ampere_kernels);
        add_to(found, overlap_kernels);
        add_to(found, hopper_kernels);
        return found;
    }();
    return kernels;
}

// The kernels in the order of their names, by which they are numbered from 0.
const std::vector<Kernels::value_type *> &numbered_kernels() {
    static const std::vector<Kernels::value_type *> kernels = [] {
        std::vector<Kernels::value_type *> found;
        for (auto &kernel : all_kernels()) {
            found.push_back(&kernel);
        }
        return found;
    }();
    return kernels;
}

int find(const char *name, BuiltKernel **kernel) {
    const auto found = all_kernels().find(name);
    if (found == all_kernels().end()) {
        return fail(std::string("no kernel ") + name + " was built");
    }
    *kernel = &found->second;
    return 0;
}

// Lets a kernel have so much dynamic shared memory on the current device, whose number `device` is.
// More than 48 KiB needs an attribute, of kernel and device, which is set by the first launch there
// and not again. It costs no stream operation and is allowed while a graph is captured.
int prepare(BuiltKernel &kernel, unsigned int shared_bytes, int device) {
    static std::mutex one_at_a_time; // or a smaller size, set later, would undo a larger one
    std::atomic<unsigned int> *allowed =
        device < kRememberedDevices ? &kernel.allowed_bytes[device] : nullptr;
    if (allowed != nullptr && shared_bytes <= allowed->load()) {
        return 0;
    }
    const std::lock_guard lock(one_at_a_time);
    if (allowed != nullptr && shared_bytes <= allowed->load()) {
        return 0;
    }
    int most = 0;
    if (int error =
            check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                  "cudaDeviceGetAttribute")) {
        return error;
    }
    if (shared_bytes > static_cast<unsigned int>(most)) {
        return fail("the config needs " + std::to_string(shared_bytes) +
                    " bytes of shared memory a block, device " + std::to_string(device) + " has " +
                    std::to_string(most) + ": choose smaller tiles");
    }
    if (int error =
            check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(shared_bytes)),
                  "cudaFuncSetAttribute")) {
        return error;
    }
    if (allowed != nullptr) {
        allowed->store(shared_bytes);
    }
    return 0;
}

CUtensorMapSwizzle swizzle_of(unsigned int bytes) {
    switch (bytes) {
    case 32:
        return CU_TENSOR_MAP_SWIZZLE_32B;
    case 64:
        return CU_TENSOR_MAP_SWIZZLE_64B;
    case 128:
        return CU_TENSOR_MAP_SWIZZLE_128B;
    default:
        return CU_TENSOR_MAP_SWIZZLE_NONE;
    }
}

} // namespace

#define FLASH_EXPORT extern "C" __attribute__((visibility("default")))

FLASH_EXPORT int flash_cuda_version() {
    return CUDART_VERSION;
}

FLASH_EXPORT const char *flash_architectures() {
    return FLASH_ATTENTION_ARCHS;
}

FLASH_EXPORT const char *flash_last_error() {
    return last_error.c_str();
}

FLASH_EXPORT int flash_kernel_count() {
    return static_cast<int>(numbered_kernels().size());
}

// Null for a number that is none.
FLASH_EXPORT const char *flash_kernel_name(int number) {
    if (number < 0 || number >= flash_kernel_count()) {
        return nullptr;
    }
    return numbered_kernels()[number]->first.data();
}

// Launches on a stream of a device, without waiting.
FLASH_EXPORT int flash_launch(const FlashLaunch *launch) {
    if (launch->kernel < 0 || launch->kernel >= flash_kernel_count()) {
        return fail("no kernel has number " + std::to_string(launch->kernel) + ": there are " +
                    std::to_string(flash_kernel_count()));
    }
    BuiltKernel &kernel = numbered_kernels()[launch->kernel]->second;
    DeviceGuard guard;
    if (int error = guard.set(launch->device)) {
        return error;
    }
    if (int error = prepare(kernel, launch->shared_bytes, launch->device)) {
        return error;
    }
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {launch->cluster[0], launch->cluster[1], launch->cluster[2]};
    const bool has_cluster = launch->cluster[0] * launch->cluster[1] * launch->cluster[2] > 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(launch->grid[0], launch->grid[1], launch->grid[2]);
    config.blockDim = dim3(launch->n_threads);
    config.dynamicSmemBytes = launch->shared_bytes;
    config.stream = static_cast<cudaStream_t>(launch->stream);
    config.attrs = &cluster;
    config.numAttrs = has_cluster ? 1 : 0;
    void *parameters[] = {const_cast<FlashLaunch *>(launch + 1)};
    return check(cudaLaunchKernelExC(&config, kernel.function, parameters), "cudaLaunchKernelExC");
}

// Whether PyTorch's table has the layout and the functions that the others here count on.
FLASH_EXPORT int flash_knows_exchange(const DLPackExchangeAPI *exchange) {
    return exchange->version.major == 1 && exchange->dltensor_from_py_object_no_sync != nullptr;
}

// The 128 bytes of a CUtensorMap for a 16-bit tensor at `address`, to be put among the arguments.
FLASH_EXPORT int flash_encode_tensor_map(const FlashTensorMap *map, void *address, void *encoded) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static void *const entry = [] {
        void *found = nullptr;
        cudaDriverEntryPointQueryResult unused;
#if CUDART_VERSION >= 12050 // where the plain name is deprecated
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &unused);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &unused);
#endif
        return found;
    }();
    if (entry == nullptr) {
        return fail("the driver has no cuTensorMapEncodeTiled: it comes with CUDA 12");
    }
    const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
    const bool is_fp16 = static_cast<DType>(map->dtype) == DType::FP16;
    const CUresult status = reinterpret_cast<Encode>(entry)(
        static_cast<CUtensorMap *>(encoded),
        is_fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, map->rank,
        address, map->dims, map->strides, map->box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle_of(map->swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return status == CUDA_SUCCESS ? 0
                                  : fail("cuTensorMapEncodeTiled refuses the tensor (CUresult " +
                                         std::to_string(status) + ")");
}

// Whether q, k, v and o are what `ready` is for, and o is apart from the others. If so, `launch` is
// filled with what flash_launch takes.
FLASH_EXPORT int flash_bind(const FlashReady *ready, PyObject *const *tensors, char *launch) {
    const DLDataType dtype =
        static_cast<DType>(ready->dtype) == DType::FP16 ? kDLFloat16 : kDLBfloat16;
    uint64_t begin[4];
    for (int i = 0; i < 4; ++i) {
        DLTensor found;
        if (ready->exchange->dltensor_from_py_object_no_sync(tensors[i], &found) != 0) {
            PyErr_Clear();
            return false;
        }
        begin[i] = reinterpret_cast<uint64_t>(found.data) + found.byte_offset;
        if (found.device != ready->device || found.dtype != dtype || found.ndim != 4 ||
            found.data == nullptr || // of a tensor without memory
            std::memcmp(found.shape, ready->shapes[i], sizeof ready->shapes[i]) != 0 ||
            std::memcmp(found.strides, ready->strides[i], sizeof ready->strides[i]) != 0 ||
            begin[i] % ready->chunk_bytes != 0) {
            return false;
        }
    }
    const uint64_t o = begin[3], o_end = o + ready->span_bytes[3];
    for (int i = 0; i < 3; ++i) {
        if (begin[i] < o_end && o < begin[i] + ready->span_bytes[i]) {
            return false;
        }
    }
    void *stream = nullptr;
    if (ready->exchange->current_work_stream(ready->device.device_type, ready->device.device_id,
                                             &stream) != 0) {
        PyErr_Clear();
        return false;
    }
    std::memcpy(launch, ready + 1, ready->launch_bytes);
    std::memcpy(launch + offsetof(FlashLaunch, stream), &stream, sizeof stream);
    for (int i = 0; i < 4; ++i) {
        std::memcpy(launch + ready->members[i], &begin[i], sizeof begin[i]);
    }
    for (uint64_t i = 0; i < ready->n_maps; ++i) {
        const FlashBoundMap &bound = ready->maps[i];
        CUtensorMap encoded; // aligned, as the driver wants it
        if (flash_encode_tensor_map(&bound.map, reinterpret_cast<void *>(begin[bound.tensor]),
                                    &encoded)) {
            return false;
        }
        std::memcpy(launch + bound.member, &encoded, sizeof encoded);
    }
    return true;
}

// A Python function, launch(q, k, v, o) -> bool: whether it launched. If not, which has no effect,
// the caller finds out why. ready: bytes, a FlashReady and what follows.
FLASH_EXPORT PyObject *flash_ready(PyObject *ready) {
    static PyMethodDef method = {
        "launch",
        [](PyObject *self, PyObject *const *tensors, ptrdiff_t count) {
            const auto *ready = reinterpret_cast<const FlashReady *>(PyBytes_AsString(self));
            std::vector<char> launch(ready->launch_bytes);
            if (count != 4 || !flash_bind(ready, tensors, launch.data())) {
                return PyBool_FromLong(false);
            }
            PyThreadState *thread = PyEval_SaveThread(); // a launch waits when too many are queued
            const int error = flash_launch(reinterpret_cast<FlashLaunch *>(launch.data()));
            PyEval_RestoreThread(thread);
            return PyBool_FromLong(!error);
        },
        METH_FASTCALL,
        "launch(q, k, v, o) -> bool",
    };
    return PyCFunction_NewEx(&method, ready, nullptr);
}

FLASH_EXPORT int flash_kernel_resources(const char *name, int n_threads, int shared_bytes,
                                        int device, FlashKernelResources *resources) {
    BuiltKernel *kernel = nullptr;
    if (int error = find(name, &kernel)) {
        return error;
    }
    DeviceGuard guard;
    if (int error = guard.set(device)) {
        return error;
    }
    if (int error = prepare(*kernel, shared_bytes, device)) {
        return error;
    }
    cudaFuncAttributes attributes;
    if (int error =
            check(cudaFuncGetAttributes(&attributes, kernel->function), "cudaFuncGetAttributes")) {
        return error;
    }
    int blocks = 0;
    if (int error = check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel->function,
                                                                        n_threads, shared_bytes),
                          "cudaOccupancyMaxActiveBlocksPerMultiprocessor")) {
        return error;
    }
    *resources = {attributes.numRegs,
                  static_cast<int>(attributes.sharedSizeBytes),
                  shared_bytes,
                  static_cast<int>(attributes.localSizeBytes),
                  attributes.maxThreadsPerBlock,
                  blocks};
    return 0;
}

// What flash_mma_loop launches on `device`: as many blocks as run there at a time.
FLASH_EXPORT int flash_mma_loop_describe(int iterations, int device, FlashMmaLoop *loop) {
    if (iterations < 1) {
        return fail("iterations " + std::to_string(iterations) + " must be at least 1");
    }
    int multiprocessors = 0;
    if (int error =
            check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
                  "cudaDeviceGetAttribute")) {
        return error;
    }
    const int n_blocks = multiprocessors * mma_rate::kBlocksPerSM;
    *loop = {n_blocks, mma_rate::kThreads, n_blocks * mma_rate::kOperations * iterations};
    return 0;
}

// mma.sync back to back on registers. sums: on the device, a float for each thread of each block.
// Launches on `stream` of `device`, without waiting.
FLASH_EXPORT int flash_mma_loop(DType dtype, int iterations, float *sums, int device,
                                void *stream) {
    FlashMmaLoop loop;
    if (int error = flash_mma_loop_describe(iterations, device, &loop)) {
        return error;
    }
    DeviceGuard guard;
    if (int error = guard.set(device)) {
        return error;
    }
    const auto kernel =
        dtype == DType::FP16 ? mma_rate::loop<DType::FP16> : mma_rate::loop<DType::BF16>;
    void *parameters[] = {&sums, &iterations};
    return check(cudaLaunchKernel(reinterpret_cast<const void *>(kernel), dim3(loop.n_blocks),
                                  dim3(loop.n_threads), parameters, 0,
                                  static_cast<cudaStream_t>(stream)),
                 "cudaLaunchKernel");
}
