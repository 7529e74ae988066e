// Four kernels for the tests of the text tools; nvcc -fatbin -gencode arch=compute_80,code=sm_80
// -gencode arch=compute_90,code=sm_90 several.cu -o several.fatbin (CUDA 13.0), in this folder.

__constant__ float table[2];

// is called: a function of its own behind the code of the kernel
__device__ __noinline__ float look_up(float x, int n) {
    float a[16];
    for (int i = 0; i < 16; ++i)
        a[i] = x * i;
    return a[n & 15] + table[n & 1];
}

__global__ void calls(float *o, int n) {
    o[threadIdx.x] = look_up(o[threadIdx.x], n);
}

__global__ void shares(float *o, int n) {
    __shared__ float s[8];
    s[threadIdx.x & 7] = n;
    __syncthreads();
    o[threadIdx.x] = s[(threadIdx.x + 1) & 7];
}

// 48 values live in 32 registers
__global__ void __launch_bounds__(1024, 2) spills(float *o, int n) {
    float a[48];
    for (int i = 0; i < 48; ++i)
        a[i] = o[i * 32 + threadIdx.x];
    for (int k = 0; k < n; ++k)
        for (int i = 0; i < 48; ++i)
            a[i] = a[i] * a[(i + 1) % 48] + a[(i * 7) % 48];
    for (int i = 0; i < 48; ++i)
        o[i * 32 + threadIdx.x] = a[i];
}

// lanes part and meet again
__global__ void diverges(float *o, int n) {
    float x = o[threadIdx.x];
    if (threadIdx.x & 1) {
        for (int k = 0; k < n; ++k)
            x = sqrtf(x + k);
    } else if (x > 1.0f) {
        x = x / o[threadIdx.x + n];
    }
    __syncwarp();
    o[threadIdx.x] = x;
}
