#pragma once
// What the kernels, the map of kernels and the C ABI agree on. The Python side mirrors these
// structs field by field: py/flash_helpers/kernel_configs.py (the config) and
// flash_attention/_library.py (the rest).

#include <compare>
#include <cstdint>

enum class DType : int { FP16 = 0, BF16 = 1 };

// A 16-bit pattern in memory, fp16 or bf16: only `mma` and `pack` need to know which.
using Element = uint16_t;

// One kernel, completely described. The registry in kernel_configs.py says what each field means
// and which values are possible.
struct FlashForwardKernelConfig {
    int version;
    DType dtype;
    int d_head;
    int B_r; // query rows of a thread block
    int B_c; // keys of one step of its main loop
    int n_warps;
    bool async_copy;
    bool eager_load_blocks;
    bool swizzled;
    int Q_mma_load_K_tiles; // k-tiles of 16 that are loaded at once; 0 = the whole tile
    int K_mma_load_K_tiles;
    int V_mma_load_K_tiles;
    bool mma_double_buffer_loads;
    bool optimized_softmax;
    int static_row_stride; // in elements; 0 = read from the arguments
    int kv_stages; // buffers each for K and V in shared memory
    bool lazy_rescale; // with two stages only, as the next
    bool mma_row_sum;

    constexpr int n_threads() const { return n_warps * 32; }
    // Q, and kv_stages blocks of K and of V. The output tile takes Q's place.
    constexpr int smem_bytes() const {
        return (B_r + 2 * kv_stages * B_c) * d_head * int(sizeof(Element));
    }
    friend auto operator<=>(const FlashForwardKernelConfig &,
                            const FlashForwardKernelConfig &) = default;
};

// In elements. `row` is one step along the sequence; the head dimension has stride 1.
struct TensorStrides {
    int64_t batch, row, head;
};

// Tensors of shape (batch, seq_len, n_heads, d_head); batch and n_heads are the grid's z and y.
struct ForwardKernelArgs {
    const void *Q, *K, *V;
    void *O;
    TensorStrides Q_strides, K_strides, V_strides, O_strides;
    int seq_len;
};

// What the host needs to launch a kernel: grid (seq_len / B_r, n_heads, batch).
struct ForwardKernel {
    const void *function;
    int n_threads;
    int smem_bytes; // dynamic
};

template <typename Config>
ForwardKernel make_forward_kernel(void (*kernel)(ForwardKernelArgs)) {
    return {reinterpret_cast<const void *>(kernel), Config::value.n_threads(),
            Config::value.smem_bytes()};
}
