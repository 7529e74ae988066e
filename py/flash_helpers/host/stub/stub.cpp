// The CUDA runtime and driver of a program that runs without a GPU. Every call becomes a request to
// the Python process that runs the simulator (flash_helpers/host/session.py) and has all the rules:
// a name, numbers, bytes; so does its answer. Device memory is a file in memory that both processes
// have open. Streams run in order, and what begins has ended when its call returns.

#include "wire.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <sys/mman.h>
#include <unistd.h>

#define API extern "C" __attribute__((visibility("default")))
#define ASK(request, ...) ask(request, __func__, {__VA_ARGS__})

namespace {

uint64_t bits(const void *pointer) {
    return reinterpret_cast<uint64_t>(pointer);
}

template <class T>
T as(uint64_t value) {
    T result;
    static_assert(sizeof result <= sizeof value);
    memcpy(&result, &value, sizeof result);
    return result;
}

// -- errors ---------------------------------------------------------------------------------------

struct Error {
    int code;
    const char *runtime, *driver, *text;
};

constexpr Error kErrors[] = {
    {0, "cudaSuccess", "CUDA_SUCCESS", "no error"},
    {1, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {13, "cudaErrorInvalidSymbol", "CUDA_ERROR_UNKNOWN", "invalid device symbol"},
    {98, "cudaErrorInvalidDeviceFunction", "CUDA_ERROR_UNKNOWN", "invalid device function"},
    {101, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "cudaErrorInvalidKernelImage", "CUDA_ERROR_INVALID_IMAGE",
     "device kernel image is invalid"},
    {209, "cudaErrorNoKernelImageForDevice", "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {218, "cudaErrorInvalidPtx", "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {400, "cudaErrorInvalidResourceHandle", "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {801, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {912, "cudaErrorInvalidClusterSize", "CUDA_ERROR_INVALID_CLUSTER_SIZE",
     "a kernel launch error has occurred due to cluster misconfiguration"},
};

const Error *error_of(int code) {
    for (const Error &error : kErrors)
        if (error.code == code)
            return &error;
    return nullptr;
}

int last_error = 0;

cudaError_t runtime(int code) {
    if (code)
        last_error = code;
    return static_cast<cudaError_t>(code);
}

cudaError_t runtime(const Answer &answer) {
    return runtime(answer.error);
}
CUresult driver(const Answer &answer) {
    return static_cast<CUresult>(answer.error);
}

// Stores a number of the answer where the caller wants it, unless the request failed.
template <class T>
const Answer &store(const Answer &answer, T *to, size_t index = 0) {
    if (!answer.error && to)
        *to = as<T>(answer.numbers[index]);
    return answer;
}

// -- memory ---------------------------------------------------------------------------------------

off_t in_arena(uint64_t address) {
    return static_cast<off_t>(address - link().arena_base);
}

// Bytes between the program's memory and the arena.
int transferred(ssize_t moved, size_t size, const char *caller) {
    if (moved == static_cast<ssize_t>(size))
        return 0;
    return ask("bad_host_memory", caller, {size}).error;
}

// The answer's number tells which sides are memory of the device: 1 the destination, 2 the source.
int copy(const char *caller, uint64_t to, uint64_t from, size_t size, int kind) {
    if (!size)
        return 0;
    const Answer answer = ask("copy", caller, {to, from, size, static_cast<uint64_t>(kind)});
    if (answer.error)
        return answer.error;
    switch (answer.numbers[0]) {
    case 0:
        memmove(as<void *>(to), as<void *>(from), size);
        return 0;
    case 1:
        return transferred(pwrite(link().arena, as<void *>(from), size, in_arena(to)), size,
                           caller);
    case 2:
        return transferred(pread(link().arena, as<void *>(to), size, in_arena(from)), size, caller);
    default:
        return 0; // done by the other process
    }
}

int copy_rows(const char *caller, uint64_t to, size_t to_pitch, uint64_t from, size_t from_pitch,
              size_t width, size_t height, int kind) {
    for (size_t row = 0; row < height; ++row)
        if (int error = copy(caller, to + row * to_pitch, from + row * from_pitch, width, kind))
            return error;
    return 0;
}

int fill(const char *caller, uint64_t to, uint64_t value, size_t count, uint64_t size) {
    return count ? ask("fill", caller, {to, value, count, size}).error : 0;
}

// Memory that the program and the kernels access at the same address.
int allocate_visible(const char *caller, void **pointer, size_t size, cudaMemoryType type) {
    const Answer answer = ask("allocate_visible", caller, {size, static_cast<uint64_t>(type)});
    if (answer.error)
        return answer.error;
    void *wanted = as<void *>(answer.numbers[0]);
    void *mapped = mmap(wanted, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE,
                        link().arena, in_arena(bits(wanted)));
    if (mapped != wanted)
        return ask("address_taken", caller, {bits(wanted)}).error;
    *pointer = wanted;
    return 0;
}

int release(const char *caller, uint64_t address) {
    if (!address)
        return 0;
    const Answer answer = ask("free", caller, {address});
    if (!answer.error && answer.numbers[0]) // bytes that the program sees
        munmap(as<void *>(address), answer.numbers[0]);
    return answer.error;
}

// -- launches -------------------------------------------------------------------------------------

const std::vector<uint64_t> &parameter_sizes(const char *caller, uint64_t function, int *error) {
    static std::map<uint64_t, std::vector<uint64_t>> known;
    const auto found = known.find(function);
    if (found != known.end())
        return found->second;
    Answer answer = ask("parameters", caller, {function});
    *error = answer.error;
    return known[function] = std::move(answer.numbers);
}

struct Shape {
    unsigned grid[3], block[3];
    size_t shared_bytes;
};

template <class Attribute>
std::vector<uint64_t> numbers_of(const Attribute *attributes, unsigned n) {
    std::vector<uint64_t> numbers;
    for (unsigned i = 0; i < n; ++i) {
        uint64_t value[sizeof attributes[i] / 8 - 1]; // behind the id, which is padded to 8 bytes
        memcpy(value, reinterpret_cast<const char *>(&attributes[i]) + 8, sizeof value);
        numbers.push_back(attributes[i].id);
        numbers.insert(numbers.end(), value, value + 2);
    }
    return numbers;
}

int launch(const char *caller, uint64_t function, const Shape &shape, void **arguments,
           const std::vector<uint64_t> &attributes = {}) {
    int error = 0;
    const std::vector<uint64_t> sizes = parameter_sizes(caller, function, &error);
    if (error)
        return error;
    std::string bytes;
    for (size_t i = 0; i < sizes.size(); ++i)
        bytes.append(static_cast<const char *>(arguments[i]), sizes[i]);
    std::vector<uint64_t> numbers{function};
    numbers.insert(numbers.end(), shape.grid, shape.grid + 3);
    numbers.insert(numbers.end(), shape.block, shape.block + 3);
    numbers.push_back(shape.shared_bytes);
    numbers.insert(numbers.end(), attributes.begin(), attributes.end());
    fflush(nullptr); // the kernel's printf writes behind what the program has written
    return ask("launch", caller, numbers, bytes.data(), bytes.size()).error;
}

std::vector<uint64_t> cooperative() {
    return {cudaLaunchAttributeCooperative, 1, 0};
}

Shape shape_of(dim3 grid, dim3 block, size_t shared_bytes) {
    return {{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes};
}

std::vector<Shape> pushed; // by <<<...>>>, until its call takes it

// -- streams and events: names only ---------------------------------------------------------------

template <class Handle>
int new_handle(Handle *handle) {
    static uint64_t number = 0;
    *handle = as<Handle>(number += 16);
    return 0;
}

int no_time(float *milliseconds) {
    static bool told = false;
    if (!told)
        fprintf(stderr, "note: time is not simulated: the time between two events is 0 ms\n");
    told = true;
    *milliseconds = 0;
    return 0;
}

void *entry_point(const char *symbol) {
    for (const char *version : {"_v3", "_v2", ""})
        if (void *found = dlsym(RTLD_DEFAULT, (std::string(symbol) + version).c_str()))
            return found;
    return nullptr;
}

} // namespace

// -- what nvcc puts into a program ----------------------------------------------------------------

API void **__cudaRegisterFatBinary(void *wrapper) {
    struct Fatbin {
        uint32_t magic;
        uint16_t version, header;
        uint64_t rest;
    };
    const Fatbin *fatbin = *reinterpret_cast<Fatbin **>(static_cast<char *>(wrapper) + 8);
    const size_t size = fatbin->header + fatbin->rest;
    const Answer answer = ask("load", __func__, {}, fatbin, size);
    return as<void **>(answer.numbers[0]);
}

API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API char __cudaInitModule(void **) {
    return 1;
}

API void __cudaRegisterFunction(void **module, const char *host, char *, const char *name, int,
                                uint3 *, uint3 *, dim3 *, dim3 *, int *) {
    ask("name_function", __func__, {bits(module), bits(host)}, name, strlen(name));
}

API void __cudaRegisterVar(void **module, char *host, char *, const char *name, int, size_t size,
                           int, int) {
    ask("name_variable", __func__, {bits(module), bits(host), size}, name, strlen(name));
}

API void __cudaRegisterManagedVar(void **module, void **host, char *, const char *name, int,
                                  size_t size, int, int) {
    const int error = allocate_visible(__func__, host, size, cudaMemoryTypeManaged);
    const uint64_t at = error ? 0 : bits(*host);
    ask("name_managed", __func__, {bits(module), bits(host), size, at}, name, strlen(name));
}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                         CUstream_st *) {
    pushed.push_back(shape_of(grid, block, shared_bytes));
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes,
                                           void *stream) {
    const Shape shape = pushed.back();
    pushed.pop_back();
    *grid = {shape.grid[0], shape.grid[1], shape.grid[2]};
    *block = {shape.block[0], shape.block[1], shape.block[2]};
    *shared_bytes = shape.shared_bytes;
    *static_cast<cudaStream_t *>(stream) = nullptr;
    return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
    *kernel = as<cudaKernel_t>(bits(host));
    return cudaSuccess;
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                                   size_t shared_bytes, cudaStream_t) {
    return runtime(launch("<<<>>>", bits(kernel), shape_of(grid, block, shared_bytes), arguments));
}

API cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block,
                                        void **arguments, size_t shared_bytes,
                                        cudaStream_t stream) {
    return __cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

// -- runtime: launches ----------------------------------------------------------------------------

API cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                 size_t shared_bytes, cudaStream_t) {
    return runtime(
        launch(__func__, bits(function), shape_of(grid, block, shared_bytes), arguments));
}

API cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block,
                                            void **arguments, size_t shared_bytes, cudaStream_t) {
    return runtime(launch(__func__, bits(function), shape_of(grid, block, shared_bytes), arguments,
                          cooperative()));
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                    void **arguments) {
    return runtime(launch(__func__, bits(function),
                          shape_of(config->gridDim, config->blockDim, config->dynamicSmemBytes),
                          arguments, numbers_of(config->attrs, config->numAttrs)));
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute attribute, int value) {
    return runtime(ASK("set_attribute", bits(function), static_cast<uint64_t>(attribute),
                       static_cast<uint64_t>(value)));
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *function) {
    const Answer answer = ASK("attributes", bits(function));
    if (!answer.error) {
        const auto &n = answer.numbers;
        *attributes = {};
        attributes->sharedSizeBytes = n[0];
        attributes->constSizeBytes = n[1];
        attributes->localSizeBytes = n[2];
        attributes->maxThreadsPerBlock = static_cast<int>(n[3]);
        attributes->numRegs = static_cast<int>(n[4]);
        attributes->ptxVersion = attributes->binaryVersion = static_cast<int>(n[5]);
        attributes->maxDynamicSharedSizeBytes = static_cast<int>(n[6]);
    }
    return runtime(answer);
}

API cudaError_t cudaFuncSetCacheConfig(const void *, cudaFuncCache) {
    return cudaSuccess;
}

API cudaError_t cudaGetFuncBySymbol(cudaFunction_t *function, const void *symbol) {
    *function = as<cudaFunction_t>(bits(symbol));
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int threads, size_t shared_bytes, unsigned) {
    return runtime(store(
        ASK("occupancy", bits(function), static_cast<uint64_t>(threads), shared_bytes), blocks));
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                              int threads, size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads,
                                                                  shared_bytes, 0);
}

// As many clusters as their blocks fit, on a device whose SMs are all alike.
API cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *function,
                                               const cudaLaunchConfig_t *config) {
    uint64_t size = 1, sms = 0;
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
            const auto &dims = config->attrs[i].val.clusterDim;
            size = uint64_t{dims.x} * dims.y * dims.z;
        }
    const dim3 block = config->blockDim;
    store(ASK("device_attribute", cudaDevAttrMultiProcessorCount), &sms);
    Answer answer = ASK("occupancy", bits(function), uint64_t{block.x} * block.y * block.z,
                        config->dynamicSmemBytes);
    if (!answer.error)
        answer.numbers[0] = answer.numbers[0] * sms / size;
    return runtime(store(answer, clusters));
}

// -- runtime: memory ------------------------------------------------------------------------------

API cudaError_t cudaMalloc(void **pointer, size_t size) {
    return runtime(store(ASK("allocate", size), pointer));
}

API cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t) {
    return runtime(store(ASK("allocate", size), pointer));
}

API cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height) {
    *pitch = (width + 511) / 512 * 512;
    return runtime(store(ASK("allocate", *pitch * height), pointer));
}

API cudaError_t cudaMallocManaged(void **pointer, size_t size, unsigned) {
    return runtime(allocate_visible(__func__, pointer, size, cudaMemoryTypeManaged));
}

API cudaError_t cudaMallocHost(void **pointer, size_t size) {
    return runtime(allocate_visible(__func__, pointer, size, cudaMemoryTypeHost));
}

API cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned) {
    return runtime(allocate_visible(__func__, pointer, size, cudaMemoryTypeHost));
}

API cudaError_t cudaHostGetDevicePointer(void **pointer, void *host, unsigned) {
    *pointer = host;
    return runtime(ASK("check_visible", bits(host)));
}

API cudaError_t cudaFree(void *pointer) {
    return runtime(release(__func__, bits(pointer)));
}
API cudaError_t cudaFreeHost(void *pointer) {
    return runtime(release(__func__, bits(pointer)));
}

API cudaError_t cudaFreeAsync(void *pointer, cudaStream_t) {
    return runtime(release(__func__, bits(pointer)));
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    return runtime(copy(__func__, bits(to), bits(from), size, kind));
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind,
                                cudaStream_t) {
    return runtime(copy(__func__, bits(to), bits(from), size, kind));
}

API cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                             size_t width, size_t height, cudaMemcpyKind kind) {
    return runtime(
        copy_rows(__func__, bits(to), to_pitch, bits(from), from_pitch, width, height, kind));
}

API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                  size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy2D(to, to_pitch, from, from_pitch, width, height, kind);
}

API cudaError_t cudaMemset(void *to, int value, size_t count) {
    return runtime(fill(__func__, bits(to), static_cast<uint8_t>(value), count, 1));
}

API cudaError_t cudaMemsetAsync(void *to, int value, size_t count, cudaStream_t) {
    return runtime(fill(__func__, bits(to), static_cast<uint8_t>(value), count, 1));
}

API cudaError_t cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height) {
    for (size_t row = 0; row < height; ++row)
        if (int error =
                fill(__func__, bits(to) + row * pitch, static_cast<uint8_t>(value), width, 1))
            return runtime(error);
    return cudaSuccess;
}

API cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height,
                                  cudaStream_t) {
    return cudaMemset2D(to, pitch, value, width, height);
}

// The program's own memory, which kernels cannot access: cudaHostGetDevicePointer says so.
API cudaError_t cudaHostRegister(void *, size_t, unsigned) {
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void *) {
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    const Answer answer = ASK("pointer", bits(pointer));
    if (!answer.error) {
        *attributes = {};
        attributes->type = static_cast<cudaMemoryType>(answer.numbers[0]);
        const bool on_device = attributes->type != cudaMemoryTypeUnregistered;
        const bool on_host = attributes->type != cudaMemoryTypeDevice;
        attributes->devicePointer = on_device ? const_cast<void *>(pointer) : nullptr;
        attributes->hostPointer = on_host ? const_cast<void *>(pointer) : nullptr;
    }
    return runtime(answer);
}

API cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    return runtime(store(ASK("variable", bits(symbol)), pointer));
}

API cudaError_t cudaGetSymbolSize(size_t *size, const void *symbol) {
    return runtime(store(ASK("variable", bits(symbol)), size, 1));
}

API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset,
                                   cudaMemcpyKind kind) {
    const Answer answer = ASK("variable", bits(symbol));
    return runtime(answer.error
                       ? answer.error
                       : copy(__func__, answer.numbers[0] + offset, bits(from), size, kind));
}

API cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t size,
                                        size_t offset, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpyToSymbol(symbol, from, size, offset, kind);
}

API cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset,
                                     cudaMemcpyKind kind) {
    const Answer answer = ASK("variable", bits(symbol));
    return runtime(answer.error ? answer.error
                                : copy(__func__, bits(to), answer.numbers[0] + offset, size, kind));
}

API cudaError_t cudaMemcpyFromSymbolAsync(void *to, const void *symbol, size_t size, size_t offset,
                                          cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpyFromSymbol(to, symbol, size, offset, kind);
}

API cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    const Answer answer = ASK("memory_info");
    store(answer, available, 0);
    return runtime(store(answer, total, 1));
}

#if CUDART_VERSION >= 13000
API cudaError_t cudaMemPrefetchAsync(const void *, size_t, cudaMemLocation, unsigned,
                                     cudaStream_t) {
    return cudaSuccess;
}

API cudaError_t cudaMemAdvise(const void *, size_t, cudaMemoryAdvise, cudaMemLocation) {
    return cudaSuccess;
}
#else
API cudaError_t cudaMemPrefetchAsync(const void *, size_t, int, cudaStream_t) {
    return cudaSuccess;
}

API cudaError_t cudaMemAdvise(const void *, size_t, cudaMemoryAdvise, int) {
    return cudaSuccess;
}

API cudaError_t cudaDeviceSetSharedMemConfig(cudaSharedMemConfig) {
    return cudaSuccess;
}
#endif

// -- runtime: device ------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}

API cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
    return runtime(ASK("check_device", static_cast<uint64_t>(device)));
}

API cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
    return cudaSetDevice(device);
}
API cudaError_t cudaSetDeviceFlags(unsigned) {
    return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
    return cudaSuccess;
}
API cudaError_t cudaDeviceReset() {
    return cudaSuccess;
}
API cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) {
    return cudaSuccess;
}
API cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) {
    return cudaSuccess;
}
API cudaError_t cudaProfilerStart() {
    return cudaSuccess;
}
API cudaError_t cudaProfilerStop() {
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    return runtime(store(ASK("device_attribute", static_cast<uint64_t>(attribute)), value));
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    if (cudaError_t error = cudaSetDevice(device))
        return error;
    const auto get = [](cudaDeviceAttr attribute) {
        int value = 0;
        cudaDeviceGetAttribute(&value, attribute, 0);
        return value;
    };
    cudaDeviceProp p{};
    snprintf(p.name, sizeof p.name, "%s", ASK("device_name").bytes.c_str());
    p.totalGlobalMem = ASK("memory_info").numbers[1];
    p.sharedMemPerBlock = get(cudaDevAttrMaxSharedMemoryPerBlock);
    p.sharedMemPerBlockOptin = get(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    p.sharedMemPerMultiprocessor = get(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    p.reservedSharedMemPerBlock = get(cudaDevAttrReservedSharedMemoryPerBlock);
    p.regsPerBlock = get(cudaDevAttrMaxRegistersPerBlock);
    p.regsPerMultiprocessor = get(cudaDevAttrMaxRegistersPerMultiprocessor);
    p.warpSize = get(cudaDevAttrWarpSize);
    p.maxThreadsPerBlock = get(cudaDevAttrMaxThreadsPerBlock);
    p.maxThreadsPerMultiProcessor = get(cudaDevAttrMaxThreadsPerMultiProcessor);
    p.maxBlocksPerMultiProcessor = get(cudaDevAttrMaxBlocksPerMultiprocessor);
    for (int i = 0; i < 3; ++i) {
        p.maxThreadsDim[i] = get(static_cast<cudaDeviceAttr>(cudaDevAttrMaxBlockDimX + i));
        p.maxGridSize[i] = get(static_cast<cudaDeviceAttr>(cudaDevAttrMaxGridDimX + i));
    }
    p.totalConstMem = get(cudaDevAttrTotalConstantMemory);
    p.major = get(cudaDevAttrComputeCapabilityMajor);
    p.minor = get(cudaDevAttrComputeCapabilityMinor);
    p.multiProcessorCount = get(cudaDevAttrMultiProcessorCount);
    p.unifiedAddressing = get(cudaDevAttrUnifiedAddressing);
    p.managedMemory = get(cudaDevAttrManagedMemory);
    p.concurrentManagedAccess = get(cudaDevAttrConcurrentManagedAccess);
    p.canMapHostMemory = get(cudaDevAttrCanMapHostMemory);
    p.cooperativeLaunch = get(cudaDevAttrCooperativeLaunch);
    p.concurrentKernels = get(cudaDevAttrConcurrentKernels);
    *properties = p;
    return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int *version) {
    return cudaRuntimeGetVersion(version);
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return cudaSuccess;
}

API cudaError_t cudaGetLastError() {
    const int code = last_error;
    last_error = 0;
    return static_cast<cudaError_t>(code);
}

API cudaError_t cudaPeekAtLastError() {
    return static_cast<cudaError_t>(last_error);
}

API const char *cudaGetErrorName(cudaError_t code) {
    const Error *error = error_of(code);
    return error ? error->runtime : "unrecognized error code";
}

API const char *cudaGetErrorString(cudaError_t code) {
    const Error *error = error_of(code);
    return error ? error->text : "unrecognized error code";
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult *status) {
    *function = entry_point(symbol);
    if (status)
        *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

#if CUDART_VERSION < 13000
API cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function,
                                        unsigned long long flags,
                                        cudaDriverEntryPointQueryResult *status) {
    return cudaGetDriverEntryPointByVersion(symbol, function, CUDART_VERSION, flags, status);
}
#endif

// -- runtime: streams and events ------------------------------------------------------------------

API cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return runtime(new_handle(stream));
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    return runtime(new_handle(stream));
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
    return runtime(new_handle(stream));
}

API cudaError_t cudaStreamDestroy(cudaStream_t) {
    return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t) {
    return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return runtime(new_handle(event));
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    return runtime(new_handle(event));
}

API cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
    return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) {
    return cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t) {
    return cudaSuccess;
}
API cudaError_t cudaEventDestroy(cudaEvent_t) {
    return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

API cudaError_t cudaStreamSetAttribute(cudaStream_t, cudaLaunchAttributeID,
                                       const cudaLaunchAttributeValue *) {
    return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                      void *data, unsigned) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t) {
    return runtime(no_time(milliseconds));
}

// -- driver: tensor maps --------------------------------------------------------------------------

API CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                    void *address, const cuuint64_t *dims,
                                    const cuuint64_t *strides, const cuuint32_t *box,
                                    const cuuint32_t *element_strides,
                                    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                    CUtensorMapL2promotion promotion,
                                    CUtensorMapFloatOOBfill fill) {
    std::vector<uint64_t> numbers{static_cast<uint64_t>(type),
                                  static_cast<uint64_t>(interleave),
                                  static_cast<uint64_t>(swizzle),
                                  static_cast<uint64_t>(promotion),
                                  static_cast<uint64_t>(fill),
                                  bits(address),
                                  rank};
    if (rank >= 1 && rank <= 5) { // others are refused there
        numbers.insert(numbers.end(), dims, dims + rank);
        numbers.insert(numbers.end(), strides, strides + rank - 1);
        numbers.insert(numbers.end(), box, box + rank);
        numbers.insert(numbers.end(), element_strides, element_strides + rank);
    }
    const Answer answer = ask("tensor_map", __func__, numbers);
    if (!answer.error)
        memcpy(map, answer.bytes.data(), sizeof *map);
    return driver(answer);
}

API CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
    const Answer answer = ask("move_tensor_map", __func__, {bits(address)}, map, sizeof *map);
    if (!answer.error)
        memcpy(map, answer.bytes.data(), sizeof *map);
    return driver(answer);
}

// -- driver: device, context, modules -------------------------------------------------------------

API CUresult cuInit(unsigned) {
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int *count) {
    *count = 1;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = 0;
    return driver(ASK("check_device", static_cast<uint64_t>(ordinal)));
}

API CUresult cuDeviceGetName(char *name, int size, CUdevice) {
    const Answer answer = ASK("device_name");
    snprintf(name, size, "%s", answer.bytes.c_str());
    return driver(answer);
}

API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
    return driver(store(ASK("device_attribute", static_cast<uint64_t>(attribute)), value));
}

API CUresult cuDeviceTotalMem(size_t *size, CUdevice) {
    return driver(store(ASK("memory_info"), size, 1));
}

// One context, which is always current.
API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice) {
    *context = as<CUcontext>(16);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease(CUdevice) {
    return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext) {
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext *context) {
    return cuDevicePrimaryCtxRetain(context, 0);
}
API CUresult cuCtxDestroy(CUcontext) {
    return CUDA_SUCCESS;
}
API CUresult cuCtxSynchronize() {
    return CUDA_SUCCESS;
}

#if CUDA_VERSION >= 13000
API CUresult cuCtxCreate(CUcontext *context, CUctxCreateParams *, unsigned, CUdevice device) {
    return cuDevicePrimaryCtxRetain(context, device);
}
#else
API CUresult cuCtxCreate(CUcontext *context, unsigned, CUdevice device) {
    return cuDevicePrimaryCtxRetain(context, device);
}
#endif

API CUresult cuCtxPushCurrent(CUcontext) {
    return CUDA_SUCCESS;
}
API CUresult cuCtxPopCurrent(CUcontext *context) {
    return cuCtxGetCurrent(context);
}

API CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

// Size of PTX that ends with NUL, or of a fatbin or cubin, by its headers.
static size_t image_size(const void *image) {
    const auto *bytes = static_cast<const unsigned char *>(image);
    if (!memcmp(bytes,
                "\x7f"
                "ELF",
                4)) {
        uint64_t sections;
        uint16_t entry, count;
        memcpy(&sections, bytes + 40, 8);
        memcpy(&entry, bytes + 58, 2);
        memcpy(&count, bytes + 60, 2);
        return sections + entry * count;
    }
    if (!memcmp(bytes, "\x50\xed\x55\xba", 4)) {
        uint16_t header;
        uint64_t rest;
        memcpy(&header, bytes + 6, 2);
        memcpy(&rest, bytes + 8, 8);
        return header + rest;
    }
    return strlen(static_cast<const char *>(image));
}

static CUresult load(const char *caller, void *module, const void *image) {
    const Answer answer = ask("load", caller, {}, image, image_size(image));
    if (!answer.error)
        memcpy(module, &answer.numbers[0], 8);
    return driver(answer);
}

API CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    return load(__func__, module, image);
}

API CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned, CUjit_option *,
                                void **) {
    return load(__func__, module, image);
}

API CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) {
    return load(__func__, module, image);
}

API CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *, void **,
                               unsigned, CUlibraryOption *, void **, unsigned) {
    return load(__func__, library, image);
}

API CUresult cuModuleLoad(CUmodule *module, const char *path) {
    return driver(store(ask("load_file", __func__, {}, path, strlen(path)), module));
}

API CUresult cuModuleUnload(CUmodule) {
    return CUDA_SUCCESS;
}
API CUresult cuLibraryUnload(CUlibrary) {
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    return driver(store(ask("function", __func__, {bits(module)}, name, strlen(name)), function));
}

API CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    return driver(store(ask("function", __func__, {bits(library)}, name, strlen(name)), kernel));
}

API CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    *function = as<CUfunction>(bits(kernel));
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetGlobal(CUdeviceptr *pointer, size_t *size, CUmodule module,
                               const char *name) {
    const Answer answer = ask("global", __func__, {bits(module)}, name, strlen(name));
    store(answer, pointer, 0);
    return driver(store(answer, size, 1));
}

// -- driver: launches -----------------------------------------------------------------------------

API CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    return driver(ASK("set_attribute", bits(function), static_cast<uint64_t>(attribute),
                      static_cast<uint64_t>(value)));
}

API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) {
    return CUDA_SUCCESS;
}

API CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                                  CUdevice) {
    return cuFuncSetAttribute(as<CUfunction>(bits(kernel)), attribute, value);
}

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z,
                            unsigned shared_bytes, CUstream, void **arguments, void **extra) {
    if (extra)
        not_there("cuLaunchKernel with arguments in `extra` (give kernelParams)");
    const Shape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
    return static_cast<CUresult>(launch(__func__, bits(function), shape, arguments));
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments,
                              void **extra) {
    if (extra)
        not_there("cuLaunchKernelEx with arguments in `extra` (give kernelParams)");
    const Shape shape{{config->gridDimX, config->gridDimY, config->gridDimZ},
                      {config->blockDimX, config->blockDimY, config->blockDimZ},
                      config->sharedMemBytes};
    return static_cast<CUresult>(launch(__func__, bits(function), shape, arguments,
                                        numbers_of(config->attrs, config->numAttrs)));
}

API CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                                       unsigned grid_z, unsigned block_x, unsigned block_y,
                                       unsigned block_z, unsigned shared_bytes, CUstream,
                                       void **arguments) {
    const Shape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
    return static_cast<CUresult>(launch(__func__, bits(function), shape, arguments, cooperative()));
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function,
                                                         int threads, size_t shared_bytes) {
    return driver(store(
        ASK("occupancy", bits(function), static_cast<uint64_t>(threads), shared_bytes), blocks));
}

// -- driver: memory, streams, events --------------------------------------------------------------

API CUresult cuMemAlloc(CUdeviceptr *pointer, size_t size) {
    return driver(store(ASK("allocate", size), pointer));
}

API CUresult cuMemFree(CUdeviceptr pointer) {
    return static_cast<CUresult>(release(__func__, pointer));
}

API CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size) {
    return static_cast<CUresult>(copy(__func__, to, bits(from), size, cudaMemcpyHostToDevice));
}

API CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size) {
    return static_cast<CUresult>(copy(__func__, bits(to), from, size, cudaMemcpyDeviceToHost));
}

API CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) {
    return static_cast<CUresult>(copy(__func__, to, from, size, cudaMemcpyDeviceToDevice));
}

API CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream) {
    return cuMemcpyHtoD(to, from, size);
}

API CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream) {
    return cuMemcpyDtoH(to, from, size);
}

API CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream) {
    return cuMemcpyDtoD(to, from, size);
}

API CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
    return static_cast<CUresult>(fill(__func__, to, value, count, 1));
}

API CUresult cuMemsetD16(CUdeviceptr to, unsigned short value, size_t count) {
    return static_cast<CUresult>(fill(__func__, to, value, count, 2));
}

API CUresult cuMemsetD32(CUdeviceptr to, unsigned value, size_t count) {
    return static_cast<CUresult>(fill(__func__, to, value, count, 4));
}

API CUresult cuMemGetInfo(size_t *available, size_t *total) {
    const Answer answer = ASK("memory_info");
    store(answer, available, 0);
    return driver(store(answer, total, 1));
}

API CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t size, CUstream) {
    return driver(store(ASK("allocate", size), pointer));
}

API CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream) {
    return static_cast<CUresult>(release(__func__, pointer));
}

API CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t size, unsigned) {
    void *visible = nullptr;
    const int error = allocate_visible(__func__, &visible, size, cudaMemoryTypeManaged);
    *pointer = bits(visible);
    return static_cast<CUresult>(error);
}

API CUresult cuMemAllocHost(void **pointer, size_t size) {
    return static_cast<CUresult>(allocate_visible(__func__, pointer, size, cudaMemoryTypeHost));
}

API CUresult cuMemFreeHost(void *pointer) {
    return static_cast<CUresult>(release(__func__, bits(pointer)));
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream) {
    return cuMemsetD8(to, value, count);
}

API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream) {
    return cuMemsetD32(to, value, count);
}

API CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) {
    return CUDA_SUCCESS;
}
API CUresult cuStreamQuery(CUstream) {
    return CUDA_SUCCESS;
}
API CUresult cuEventQuery(CUevent) {
    return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(CUstream *stream, unsigned) {
    return static_cast<CUresult>(new_handle(stream));
}

API CUresult cuStreamSynchronize(CUstream) {
    return CUDA_SUCCESS;
}
API CUresult cuStreamDestroy(CUstream) {
    return CUDA_SUCCESS;
}

API CUresult cuEventCreate(CUevent *event, unsigned) {
    return static_cast<CUresult>(new_handle(event));
}

API CUresult cuEventRecord(CUevent, CUstream) {
    return CUDA_SUCCESS;
}
API CUresult cuEventSynchronize(CUevent) {
    return CUDA_SUCCESS;
}
API CUresult cuEventDestroy(CUevent) {
    return CUDA_SUCCESS;
}

API CUresult cuEventElapsedTime(float *milliseconds, CUevent, CUevent) {
    return static_cast<CUresult>(no_time(milliseconds));
}

API CUresult cuGetErrorString(CUresult code, const char **text) {
    const Error *error = error_of(code);
    *text = error ? error->text : nullptr;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorName(CUresult code, const char **name) {
    const Error *error = error_of(code);
    *name = error ? error->driver : nullptr;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetProcAddress(const char *symbol, void **function, int, cuuint64_t,
                              CUdriverProcAddressQueryResult *status) {
    *function = entry_point(symbol);
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
