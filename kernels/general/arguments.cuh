#pragma once
// The config and the one parameter of the general family's kernels.

#include "flash_attention.cuh"
#include "memory.cuh"
#include "sm90/arguments.cuh"

// One kernel of the general family.
struct GeneralKernelConfig {
    // fields:begin
    int general; // the step
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
    constexpr int n_threads() const { return (consumers() + 1) * 128; } // and the producer's
    // Two tiles of Q (later of O), K and V, then the barriers.
    constexpr int smem_bytes() const {
        return (2 * B_r + (K_slots + V_slots) * B_c) * d_head * int(sizeof(Element)) + 256;
    }
    friend auto operator<=>(const GeneralKernelConfig &, const GeneralKernelConfig &) = default;
};

// What the kernels of family hopper take.
struct GeneralKernelArgs : HopperKernelArgs {};
