// Shared variables that no kernel owns: of templates, of inline functions, of the whole file.

template <int N>
__device__ float *buffer() {
    __shared__ __align__(64) float of_template[N];
    return of_template;
}

inline __device__ float *small() {
    __shared__ float of_inline_function[40];
    return of_inline_function;
}

__shared__ int of_file[100];

__device__ __noinline__ float called(float x) {
    buffer<64>()[threadIdx.x] = x;
    __syncthreads();
    return buffer<64>()[threadIdx.x ^ 1];
}

extern "C" __global__ void names_and_calls(float *x) {
    buffer<128>()[threadIdx.x] = *x;
    of_file[threadIdx.x] = 1;
    __syncthreads();
    *x = buffer<128>()[threadIdx.x ^ 1] + of_file[threadIdx.x ^ 1] + called(*x);
}

extern "C" __global__ void owns(float *x) {
    __shared__ char own[3];
    own[threadIdx.x] = x[0];
    __syncthreads();
    *x = own[threadIdx.x + 1];
}

extern "C" __global__ void inlines_and_calls(float *x) {
    small()[threadIdx.x] = *x;
    __syncthreads();
    *x = small()[threadIdx.x ^ 1] + called(1.0f);
}
