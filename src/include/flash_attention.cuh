#pragma once
// The types that kernels, maps of kernels and the C ABI share. Python has the same types: a tool
// writes the configs' fields from the classes of the same names (py/flash_helpers/registry), and
// each kernel's unit asserts the layout of its arguments.

#include <compare>
#include <cstdint>

enum class DType : int { FP16 = 0, BF16 = 1, FP32 = 2, INT32 = 3, FP8 = 4 };

// A 16-bit pattern in memory, fp16 or bf16: only `mma` and `pack` need to know which.
using Element = uint16_t;

// One kernel of the ampere family, completely described. The registry says what each field means
// and which values are possible.
struct FlashForwardKernelConfig {
    // fields:begin
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
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // The tiles of Q, K and V. The output tile takes Q's place.
    constexpr int smem_bytes() const { return (B_r + 2 * B_c) * d_head * int(sizeof(Element)); }
    friend auto operator<=>(const FlashForwardKernelConfig &,
                            const FlashForwardKernelConfig &) = default;
};

// One kernel of the hopper family.
struct HopperKernelConfig {
    // fields:begin
    int hopper; // the step
    DType dtype;
    int d_head;
    int B_r; // query rows of a thread block, 64 for each warpgroup that computes
    int B_c; // keys of one step of its main loop
    int K_slots; // tiles of K in shared memory
    int V_slots; // tiles of V in shared memory
    bool ping_pong; // one warpgroup at a time issues its products
    bool causal; // a causal mask, aligned to the bottom right
    // fields:end

    constexpr int consumers() const { return B_r / 64; } // warpgroups
    constexpr int n_threads() const { return (consumers() + (hopper >= 5)) * 128; }
    constexpr int Q_slots() const { return hopper >= 11 ? 2 : 1; }
    // Tiles of Q (later of O), K and V, in the first step a tile of P, then the barriers.
    constexpr int smem_bytes() const {
        const int P_columns = hopper == 1 ? B_c : 0;
        return (Q_slots() * B_r + (K_slots + V_slots) * B_c) * d_head * int(sizeof(Element)) +
               B_r * P_columns * int(sizeof(Element)) + 256;
    }
    friend auto operator<=>(const HopperKernelConfig &, const HopperKernelConfig &) = default;
};

// Strides in elements. `row` is one step along the sequence; the head dimension has stride 1.
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

// A kernel that was built. The host asks for it by `name`: the config's short form, followed by the
// function's name where a config has several kernels. image: a fatbin, cubin or PTX that holds the
// kernel under `symbol`.
struct Kernel {
    const char *name, *symbol;
    const void *image;
};
