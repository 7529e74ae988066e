// Shared memory is read with ldmatrix, then overwritten by cp.async behind a barrier.

extern "C" __global__ void filler(const uint4 *x, unsigned *y, int n) {
    __shared__ uint4 tile[128];
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(&tile[threadIdx.x]));
    unsigned sum = 0;
    for (int i = 0; i < n; ++i) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at),
                     "l"(x + 128 * i + threadIdx.x));
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 0;");
        __syncthreads();
        unsigned r[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at));
        sum += r[0] ^ r[1] ^ r[2] ^ r[3];
        __syncthreads();
    }
    y[threadIdx.x] = sum;
}
