// More predicates alive than there are predicate registers: they are packed into registers (P2R),
// which nvdisasm's JSON garbles.

extern "C" __global__ void predicates(const int *a, int *x, int n) {
    bool larger[24];
    for (int i = 0; i < 24; ++i) {
        larger[i] = a[32 * i + threadIdx.x] > n;
    }
    int sum = 0;
    for (int step = 0; step < n; ++step) {
#pragma unroll
        for (int i = 0; i < 24; ++i) {
            if (larger[i]) {
                sum = 3 * sum + x[step + i];
            }
        }
        __syncthreads();
    }
    x[threadIdx.x] = sum;
}
