// The C ABI: find or register a kernel by its name, check the device, launch.
//
// A function that can fail returns 0, or 1 and an error whose text flash_last_error() gives. The
// caller decides which launches a call consists of (py/flash_helpers/registry/call.py), and checks
// shapes, types and alignment (py/flash_helpers/runtime). Nothing here knows what a kernel
// computes: a tensor is rank, element type, shape, strides and address. In Python a check takes
// longer than a launch. So a call that was checked once can be repeated from here (flash_ready),
// for tensors that differ from the checked ones in their addresses alone.

#include "dlpack_exchange.h"
#include "flash_attention.cuh"
#include "flash_kernels.cuh"
#include "mma_rate.cuh"
#include "python_abi.h"

#include <array>
#include <atomic>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
#include <deque>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#if CUDART_VERSION < 12080 // which has no cudaLibraryLoadData
#include "registered_kernel.h"
#endif

// One launch. The kernel's only parameter follows it in memory. So a caller writes just the stream
// and the addresses into bytes that are otherwise ready, and hands over one pointer.
struct FlashLaunch {
    void *stream;
    int kernel; // its number, as flash_kernel_name takes it
    int device;
    unsigned int grid[3], cluster[3]; // blocks in x, y, z
    unsigned int n_threads; // per block
    unsigned int shared_bytes; // dynamic, per block
    unsigned int programmatic; // 1: may begin before the launch before it has ended
};

constexpr int kMaxRank = 8;

// A tensor that a launch is ready for.
struct FlashTensor {
    DLDataType dtype;
    int rank;
    int is_output;
    unsigned int alignment; // bytes; it begins at a multiple of them
    int64_t shape[kMaxRank];
    int64_t strides[kMaxRank]; // elements
    uint64_t span_bytes; // from the first byte to the end of the last
    uint64_t member; // where its address goes, in bytes from the FlashLaunch; 0 for none
};

// A tensor and its boxes for TMA, as cuTensorMapEncodeTiled takes them. rank: the number of dims
// and of sizes of a box; there are rank - 1 strides.
struct FlashTensorMap {
    unsigned int rank;
    unsigned int type; // a CUtensorMapDataType
    unsigned int swizzle; // bytes: 0, 32, 64 or 128
    unsigned int l2_promotion; // a CUtensorMapL2promotion
    unsigned int box[5]; // elements
    uint64_t dims[5]; // elements, innermost first
    uint64_t strides[4]; // bytes, of all dimensions but the innermost
};

// A tensor map of the tensor with this number. member: its place, in bytes from the FlashLaunch.
// offset: bytes from the tensor's first element to that at coordinates 0, which may lie before it.
struct FlashBoundMap {
    uint64_t member;
    uint64_t tensor;
    int64_t offset;
    FlashTensorMap map;
};

// A launch that is ready. It is followed in memory by n_tensors FlashTensor, n_maps FlashBoundMap,
// the FlashLaunch and the kernel's parameter.
struct FlashReady {
    const DLPackExchangeAPI *exchange; // describes the tensors
    DLDevice device;
    unsigned int n_tensors;
    uint64_t n_maps;
    uint64_t launch_bytes; // of the FlashLaunch and the parameter

    const FlashTensor *tensors() const { return reinterpret_cast<const FlashTensor *>(this + 1); }
    const FlashBoundMap *maps() const {
        return reinterpret_cast<const FlashBoundMap *>(tensors() + n_tensors);
    }
    const char *launch() const { return reinterpret_cast<const char *>(maps() + n_maps); }
};

struct FlashKernelResources {
    int registers; // per thread
    int static_smem_bytes; // per block
    int dynamic_smem_bytes; // per block
    int local_bytes; // per thread
    int max_threads; // per block
    int resident_blocks_per_sm;
};

struct FlashMmaLoop {
    int n_blocks;
    int n_threads; // per block
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
    cudaGetLastError(); // so that the next call does not report this error again
    return fail(std::string(what) + ": " + cudaGetErrorString(status) + " (" +
                cudaGetErrorName(status) + ")");
}

// Makes `device` current for a scope; the end of the scope restores the caller's device.
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

constexpr int kRememberedDevices = 64; // on further ones a kernel is prepared at every launch

// A kernel from a map, a sweep or a compiler.
class FlashKernel {
  public:
    explicit FlashKernel(const Kernel &kernel) : kernel_(kernel) {}

    // Finds the function that the runtime launches. The first call loads the kernel.
    int function(const void **found) {
        const std::lock_guard lock(mutex_);
        if (function_ == nullptr) {
            if (int error = load()) {
                return error;
            }
        }
        *found = function_;
        return 0;
    }
    const char *name() const { return kernel_.name; }

    // For each device, the bytes of dynamic shared memory that a launch may ask for, as `prepare`
    // set them.
    std::array<std::atomic<unsigned int>, kRememberedDevices> allowed_bytes = {};

  private:
#if CUDART_VERSION >= 12080
    int load() {
        cudaLibrary_t library;
        if (int error = check(cudaLibraryLoadData(&library, kernel_.image, nullptr, nullptr, 0,
                                                  nullptr, nullptr, 0),
                              "cudaLibraryLoadData")) {
            return error;
        }
        cudaKernel_t function;
        if (int error = check(cudaLibraryGetKernel(&function, library, kernel_.symbol),
                              "cudaLibraryGetKernel")) {
            return error;
        }
        function_ = function; // for as long as the process lives: CUDA graphs keep it
        return 0;
    }
#else
    int load() {
        static std::deque<RegisteredKernel> registered;
        static std::mutex one_at_a_time;
        const std::lock_guard lock(one_at_a_time);
        function_ = &registered.emplace_back(kernel_.image, kernel_.symbol);
        return 0;
    }
#endif

    Kernel kernel_;
    std::mutex mutex_;
    const void *function_ = nullptr;
};

// All kernels, numbered from 0: first those of the maps, in the order of their names, then those
// that were registered, in the order in which they came.
class Registry {
  public:
    Registry() {
        std::map<std::string, Kernel> found;
        for_each_map([&](const auto &kernels) {
            for (const auto &[config, kernel] : kernels) {
                for (const Kernel &each : kernel) {
                    found.emplace(each.name, each);
                }
            }
        });
        for (const auto &[name, kernel] : found) {
            add(kernel);
        }
    }

    int add(const Kernel &kernel) {
        const std::lock_guard lock(mutex_);
        kernels_.emplace_back(kernel);
        return static_cast<int>(kernels_.size()) - 1;
    }
    int size() {
        const std::shared_lock lock(mutex_);
        return static_cast<int>(kernels_.size());
    }
    // Null for a number that no kernel has.
    FlashKernel *at(int number) {
        const std::shared_lock lock(mutex_);
        const bool exists = 0 <= number && number < static_cast<int>(kernels_.size());
        return exists ? &kernels_[number] : nullptr;
    }

  private:
    std::shared_mutex mutex_;
    std::deque<FlashKernel> kernels_; // a deque: kernels stay where they are
};

Registry &registry() {
    static Registry kernels;
    return kernels;
}

int find(int number, FlashKernel **kernel) {
    *kernel = registry().at(number);
    if (*kernel == nullptr) {
        return fail("no kernel has number " + std::to_string(number) + ": there are " +
                    std::to_string(registry().size()));
    }
    return 0;
}

// Lets a kernel have `shared_bytes` bytes of dynamic shared memory on the current device, whose
// number is `device`. More than 48 KiB needs an attribute of the kernel on this device, which the
// first launch there sets. Setting it costs no stream operation and is allowed while a graph is
// captured.
int prepare(FlashKernel &kernel, const void *function, unsigned int shared_bytes, int device) {
    static std::mutex one_at_a_time; // else a smaller size, set later, would undo a larger one
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
            check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
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
    return registry().size();
}

// Null for a number that no kernel has.
FLASH_EXPORT const char *flash_kernel_name(int number) {
    FlashKernel *kernel = registry().at(number);
    return kernel == nullptr ? nullptr : kernel->name();
}

// Adds a kernel from an image (a fatbin, a cubin or PTX) that holds it under `symbol`, and returns
// the kernel's number. name, symbol and image must stay where they are for as long as the process
// lives. The image is loaded when the kernel is first used.
FLASH_EXPORT int flash_register(const char *name, const char *symbol, const void *image) {
    return registry().add({name, symbol, image});
}

// Launches on a stream of a device, without waiting.
FLASH_EXPORT int flash_launch(const FlashLaunch *launch) {
    FlashKernel *kernel = nullptr;
    if (int error = find(launch->kernel, &kernel)) {
        return error;
    }
    DeviceGuard guard;
    if (int error = guard.set(launch->device)) {
        return error;
    }
    const void *function = nullptr;
    if (int error = kernel->function(&function)) {
        return error;
    }
    if (int error = prepare(*kernel, function, launch->shared_bytes, launch->device)) {
        return error;
    }
    cudaLaunchAttribute attributes[2];
    int n_attributes = 0;
    if (launch->cluster[0] * launch->cluster[1] * launch->cluster[2] > 1) {
        cudaLaunchAttribute &cluster = attributes[n_attributes++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {launch->cluster[0], launch->cluster[1], launch->cluster[2]};
    }
    if (launch->programmatic) {
        cudaLaunchAttribute &programmatic = attributes[n_attributes++];
        programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        programmatic.val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(launch->grid[0], launch->grid[1], launch->grid[2]);
    config.blockDim = dim3(launch->n_threads);
    config.dynamicSmemBytes = launch->shared_bytes;
    config.stream = static_cast<cudaStream_t>(launch->stream);
    config.attrs = attributes;
    config.numAttrs = n_attributes;
    void *parameters[] = {const_cast<FlashLaunch *>(launch + 1)};
    return check(cudaLaunchKernelExC(&config, function, parameters), "cudaLaunchKernelExC");
}

// Whether PyTorch's table has the layout and the functions that the calls here rely on.
FLASH_EXPORT int flash_knows_exchange(const DLPackExchangeAPI *exchange) {
    return exchange->version.major == 1 && exchange->dltensor_from_py_object_no_sync != nullptr;
}

// Writes the 128 bytes of a CUtensorMap whose coordinates 0 are at `address` to `encoded`.
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
    const CUresult status = reinterpret_cast<Encode>(entry)(
        static_cast<CUtensorMap *>(encoded), static_cast<CUtensorMapDataType>(map->type), map->rank,
        address, map->dims, map->strides, map->box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle_of(map->swizzle), static_cast<CUtensorMapL2promotion>(map->l2_promotion),
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return status == CUDA_SUCCESS ? 0
                                  : fail("cuTensorMapEncodeTiled refuses the tensor (CUresult " +
                                         std::to_string(status) + ")");
}

// Whether `ready` is for tensors like these, and no output overlaps another tensor. If so, fills
// `launch` with what flash_launch takes.
FLASH_EXPORT int flash_bind(const FlashReady *ready, PyObject *const *tensors, char *launch) {
    const unsigned int count = ready->n_tensors;
    const FlashTensor *wanted = ready->tensors();
    std::vector<uint64_t> begin(count);
    for (unsigned int i = 0; i < count; ++i) {
        DLTensor found;
        if (ready->exchange->dltensor_from_py_object_no_sync(tensors[i], &found) != 0) {
            PyErr_Clear();
            return false;
        }
        begin[i] = reinterpret_cast<uint64_t>(found.data) + found.byte_offset;
        const size_t bytes = sizeof(int64_t) * wanted[i].rank;
        if (found.device != ready->device || found.dtype != wanted[i].dtype ||
            found.ndim != wanted[i].rank || found.data == nullptr || // it has no memory
            std::memcmp(found.shape, wanted[i].shape, bytes) != 0 ||
            std::memcmp(found.strides, wanted[i].strides, bytes) != 0 ||
            begin[i] % wanted[i].alignment != 0) {
            return false;
        }
    }
    for (unsigned int i = 0; i < count; ++i) {
        for (unsigned int j = 0; wanted[i].is_output && j < count; ++j) {
            if (i != j && begin[j] < begin[i] + wanted[i].span_bytes &&
                begin[i] < begin[j] + wanted[j].span_bytes) {
                return false;
            }
        }
    }
    void *stream = nullptr;
    if (ready->exchange->current_work_stream(ready->device.device_type, ready->device.device_id,
                                             &stream) != 0) {
        PyErr_Clear();
        return false;
    }
    std::memcpy(launch, ready->launch(), ready->launch_bytes);
    std::memcpy(launch + offsetof(FlashLaunch, stream), &stream, sizeof stream);
    for (unsigned int i = 0; i < count; ++i) {
        if (wanted[i].member != 0) {
            std::memcpy(launch + wanted[i].member, &begin[i], sizeof begin[i]);
        }
    }
    for (uint64_t i = 0; i < ready->n_maps; ++i) {
        const FlashBoundMap &bound = ready->maps()[i];
        CUtensorMap encoded; // aligned, as the driver wants it
        void *first = reinterpret_cast<void *>(begin[bound.tensor] + bound.offset);
        if (flash_encode_tensor_map(&bound.map, first, &encoded)) {
            return false;
        }
        std::memcpy(launch + bound.member, &encoded, sizeof encoded);
    }
    return true;
}

// Returns a Python function of the tensors, which returns whether it launched. If it did not,
// nothing has happened, and the caller finds out why. ready: bytes, a FlashReady with its tail.
FLASH_EXPORT PyObject *flash_ready(PyObject *ready) {
    static PyMethodDef method = {
        "launch",
        [](PyObject *self, PyObject *const *tensors, ptrdiff_t count) {
            const auto *ready = reinterpret_cast<const FlashReady *>(PyBytes_AsString(self));
            std::vector<char> launch(ready->launch_bytes);
            if (count != ready->n_tensors || !flash_bind(ready, tensors, launch.data())) {
                return PyBool_FromLong(false);
            }
            PyThreadState *thread = PyEval_SaveThread(); // a launch waits when too many are queued
            const int error = flash_launch(reinterpret_cast<FlashLaunch *>(launch.data()));
            PyEval_RestoreThread(thread);
            return PyBool_FromLong(!error);
        },
        METH_FASTCALL,
        "launch(*tensors) -> bool",
    };
    return PyCFunction_NewEx(&method, ready, nullptr);
}

FLASH_EXPORT int flash_kernel_resources(int number, int n_threads, int shared_bytes, int device,
                                        FlashKernelResources *resources) {
    FlashKernel *kernel = nullptr;
    if (int error = find(number, &kernel)) {
        return error;
    }
    DeviceGuard guard;
    if (int error = guard.set(device)) {
        return error;
    }
    const void *function = nullptr;
    if (int error = kernel->function(&function)) {
        return error;
    }
    if (int error = prepare(*kernel, function, shared_bytes, device)) {
        return error;
    }
    cudaFuncAttributes attributes;
    if (int error = check(cudaFuncGetAttributes(&attributes, function), "cudaFuncGetAttributes")) {
        return error;
    }
    int blocks = 0;
    if (int error = check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function,
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

// Describes what flash_mma_loop launches on `device`: as many thread blocks as run there at once.
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

// Executes mma.sync back to back on registers. sums: on the device, one float per thread of each
// thread block. Launches on `stream` of `device`, without waiting.
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
