// Device functions of their own, called and by address, and a table that both read.

__device__ int table[64];
typedef int (*Function)(int);

__device__ __noinline__ int twice(int x) {
    return table[x & 63] * 2;
}

__device__ __noinline__ int thrice(int x) {
    return table[(x + 1) & 63] * 3;
}

__device__ Function functions[2] = {twice, thrice};

extern "C" __global__ void calls(int *p) {
    p[threadIdx.x] = functions[p[1] & 1](p[threadIdx.x]) + twice(p[5]);
}
