// What a launch can bring along besides pointers: a tensor map, a cluster, a counter that is zero.
// The arguments are those of tests/support/other_family.py.

#include <cstddef>
#include <cstdint>

constexpr int kColumns = 64, kRows = 128; // of a box: 128-byte rows, swizzled

// A CUtensorMap, whose alignment is not the same in every toolkit.
struct alignas(128) TensorMap {
    uint64_t opaque[16];
};

struct OtherArgs {
    int n;
    TensorMap Q;
    uint16_t *O; // (rows, kColumns): the first columns of Q
    int *counter; // then: the number that each block drew, and its rank in the cluster
};

LAYOUT

__device__ uint32_t smem_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

extern "C" __global__ void probe(const __grid_constant__ OtherArgs args) {
    __shared__ alignas(1024) uint16_t tile[kRows][kColumns];
    __shared__ alignas(8) uint64_t barrier;
    int *drawn = args.counter + 1, *rank = drawn + gridDim.x;
    if (threadIdx.x == 0) {
        drawn[blockIdx.x] = atomicAdd(args.counter, 1);
        uint32_t own;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(own));
        rank[blockIdx.x] = own;
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(smem_address(&barrier)));
        asm volatile("fence.proxy.async.shared::cta;");
        asm volatile(
            "mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem_address(&barrier)),
            "r"(static_cast<uint32_t>(sizeof tile)));
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3}], [%4];" ::"r"(smem_address(tile)),
                     "l"(&args.Q), "r"(0), "r"(static_cast<int>(blockIdx.x) * kRows),
                     "r"(smem_address(&barrier))
                     : "memory");
    }
    __syncthreads();
    uint32_t done = 0;
    while (!done) {
        asm volatile("{ .reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared.b64 p, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(smem_address(&barrier))
                     : "memory");
    }
    for (int row = threadIdx.x; row < kRows; row += blockDim.x) {
        for (int column = 0; column < kColumns; ++column) {
            const int chunk = column / 8 ^ row % 8; // the 128-byte swizzle
            args.O[(blockIdx.x * kRows + row) * kColumns + column] =
                tile[row][chunk * 8 + column % 8];
        }
    }
}
