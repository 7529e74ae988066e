#pragma once
// The config of the backward_wide family's kernels, whose one parameter is that of family backward.

#include "flash_attention.cuh"
#include "kernels/backward/arguments.cuh"

// One kernel of the backward_wide family: a set of kernels for dQ, dK and dV.
struct BackwardWideKernelConfig {
    // fields:begin
    int backward; // the step
    DType dtype;
    int d_head;
    int B_r; // queries of a tile of Q and dO
    int B_c; // keys of a tile of K and V, 64 for each warpgroup that computes
    int slots; // tiles of each tensor that the loops walk
    bool causal; // a causal mask, aligned to the bottom right
    bool window; // a query sees keys within a distance
    bool softcap; // limits the logits by tanh
    bool in_turn; // adds dQ in one order: each call gives the same bits
    bool varlen; // sequences of various lengths, one after the other
    // fields:end

    friend auto operator<=>(const BackwardWideKernelConfig &,
                            const BackwardWideKernelConfig &) = default;
};
