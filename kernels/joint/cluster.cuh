#pragma once
// Configs of family joint_cluster, shared with the host. The arguments are those of family joint.

#include "kernels/joint/arguments.cuh"

// One kernel of the joint_cluster family.
struct JointClusterKernelConfig {
    // fields:begin
    int joint_cluster; // the step
    DType dtype;
    int d_head;
    int B_c; // most keys, all in shared memory
    int n_warps; // of a thread block; each has 16 queries of a head
    int cluster_blocks; // thread blocks of a cluster; each has a head, or none
    // fields:end

    constexpr int n_threads() const { return n_warps * 32; }
    // Q, K and V of a head, and a sum of squares for each row of Q and K.
    constexpr int smem_bytes() const {
        const int B_r = n_warps * 16;
        return (B_r + 2 * B_c) * d_head * int(sizeof(Element)) + (B_r + B_c) * int(sizeof(float));
    }
    friend auto operator<=>(const JointClusterKernelConfig &,
                            const JointClusterKernelConfig &) = default;
};
