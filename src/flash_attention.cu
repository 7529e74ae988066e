// The C ABI: look a config up in the map, check what the caller may have got wrong, launch.
//
// Every function returns 0, or an error whose text flash_last_error() gives. Tensor shapes, types
// and alignment are the caller's to check (flash_attention/_checks.py): only pointers arrive here.

#include "flash_attention.cuh"
#include "flash_kernels.cuh"
#include "mma_rate.cuh"

#include <algorithm>
#include <cuda_runtime.h>
#include <iterator>
#include <limits>
#include <string>

namespace {

constexpr int kMinComputeCapability = 8;
constexpr int kMaxGridYZ = 65535;

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

const ForwardKernel *find(const FlashForwardKernelConfig &config) {
    const auto found = forward_kernels.find(config);
    return found == forward_kernels.end() ? nullptr : &found->second;
}

int not_built() {
    return fail("no kernel was built for this config: flash_kernel_describe lists those that were");
}

// The kernel, with the attribute set that lets it have more than 48 KiB of shared memory.
// Attributes belong to a device, so this goes by the current one, at every launch: it costs no
// stream operation and is allowed while a graph is captured.
int prepare(const ForwardKernel &kernel, int device) {
    int major = 0, max_smem = 0;
    if (int error = check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                          "cudaDeviceGetAttribute")) {
        return error;
    }
    if (major < kMinComputeCapability) {
        return fail("device " + std::to_string(device) + " has compute capability " +
                    std::to_string(major) + ".x; the kernels need 8.0 or later");
    }
    if (int error = check(
            cudaDeviceGetAttribute(&max_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
            "cudaDeviceGetAttribute")) {
        return error;
    }
    if (kernel.smem_bytes > max_smem) {
        return fail("the config needs " + std::to_string(kernel.smem_bytes) +
                    " bytes of shared memory a block, device " + std::to_string(device) + " has " +
                    std::to_string(max_smem) + ": choose a smaller B_r or B_c");
    }
    return check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      kernel.smem_bytes),
                 "cudaFuncSetAttribute");
}

bool has_row_stride(const ForwardKernelArgs &args, int64_t stride) {
    return args.Q_strides.row == stride && args.K_strides.row == stride &&
           args.V_strides.row == stride && args.O_strides.row == stride;
}

// A kernel of 32 warps steps through 128 rows at a time in 32-bit arithmetic.
constexpr int64_t kMaxRowStride = std::numeric_limits<int>::max() / 128;

} // namespace

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
    return static_cast<int>(forward_kernels.size());
}

// Kernels are numbered in the order of the map, from 0.
FLASH_EXPORT int flash_kernel_describe(int index, FlashForwardKernelConfig *config) {
    if (index < 0 || index >= flash_kernel_count()) {
        return fail("kernel index " + std::to_string(index) + " is not in 0 … " +
                    std::to_string(flash_kernel_count() - 1));
    }
    *config = std::next(forward_kernels.begin(), index)->first;
    return 0;
}

// Launches on `stream` of `device`, without waiting. A config with a static row stride whose
// tensors have another one is run by its sibling that reads the stride.
FLASH_EXPORT int flash_forward(const FlashForwardKernelConfig *config,
                               const ForwardKernelArgs *args, int batch, int n_heads, int device,
                               void *stream) {
    FlashForwardKernelConfig general = *config;
    if (config->static_row_stride != 0 && !has_row_stride(*args, config->static_row_stride)) {
        general.static_row_stride = 0;
    }
    const ForwardKernel *kernel = find(general);
    if (kernel == nullptr) {
        return not_built();
    }
    if (batch < 1 || n_heads < 1 || n_heads > kMaxGridYZ) {
        return fail("batch " + std::to_string(batch) + " and n_heads " + std::to_string(n_heads) +
                    " must be at least 1, n_heads at most " + std::to_string(kMaxGridYZ));
    }
    if (args->seq_len < 1 || args->seq_len % config->B_r != 0 || args->seq_len % config->B_c != 0) {
        return fail("seq_len " + std::to_string(args->seq_len) +
                    " is not a positive multiple of B_r " + std::to_string(config->B_r) +
                    " and B_c " + std::to_string(config->B_c));
    }
    for (const TensorStrides *strides :
         {&args->Q_strides, &args->K_strides, &args->V_strides, &args->O_strides}) {
        if (strides->row < 0 || strides->row > kMaxRowStride) {
            return fail("row stride " + std::to_string(strides->row) + " is not in 0 … " +
                        std::to_string(kMaxRowStride) + " elements");
        }
    }

    DeviceGuard guard;
    if (int error = guard.set(device)) {
        return error;
    }
    if (int error = prepare(*kernel, device)) {
        return error;
    }

    // A grid has at most 65,535 blocks along z, a tensor may have more batches.
    for (int first = 0; first < batch; first += kMaxGridYZ) {
        const auto at = [first](const void *tensor, const TensorStrides &strides) {
            return static_cast<const Element *>(tensor) + first * strides.batch;
        };
        ForwardKernelArgs part = *args;
        part.Q = at(args->Q, args->Q_strides);
        part.K = at(args->K, args->K_strides);
        part.V = at(args->V, args->V_strides);
        part.O = const_cast<Element *>(at(args->O, args->O_strides));
        const dim3 grid(args->seq_len / config->B_r, n_heads, std::min(batch - first, kMaxGridYZ));
        void *parameters[] = {&part};
        if (int error =
                check(cudaLaunchKernel(kernel->function, grid, dim3(kernel->n_threads), parameters,
                                       kernel->smem_bytes, static_cast<cudaStream_t>(stream)),
                      "cudaLaunchKernel")) {
            return error;
        }
    }
    return 0;
}

FLASH_EXPORT int flash_kernel_resources(const FlashForwardKernelConfig *config, int device,
                                        FlashKernelResources *resources) {
    const ForwardKernel *kernel = find(*config);
    if (kernel == nullptr) {
        return not_built();
    }
    DeviceGuard guard;
    if (int error = guard.set(device)) {
        return error;
    }
    if (int error = prepare(*kernel, device)) {
        return error;
    }
    cudaFuncAttributes attributes;
    if (int error =
            check(cudaFuncGetAttributes(&attributes, kernel->function), "cudaFuncGetAttributes")) {
        return error;
    }
    int blocks = 0;
    if (int error = check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                              &blocks, kernel->function, kernel->n_threads, kernel->smem_bytes),
                          "cudaOccupancyMaxActiveBlocksPerMultiprocessor")) {
        return error;
    }
    *resources = {attributes.numRegs,
                  static_cast<int>(attributes.sharedSizeBytes),
                  kernel->smem_bytes,
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
