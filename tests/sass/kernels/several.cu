// Several kernels in one cubin: divergent branches, nested loops, a jump table, a function that is
// called, static shared memory, named barriers, a local array, inlined calls.

__device__ __forceinline__ float square(float x) {
    return x * x;
}

__device__ __forceinline__ float quartic(float x) {
    const float y = square(x);
    return square(y) + 1.0f;
}

__device__ __noinline__ float collatz(int x) {
    int steps = 0;
    while (x > 1) {
        x = x % 2 ? 3 * x + 1 : x / 2;
        ++steps;
    }
    return steps;
}

extern "C" __global__ void __launch_bounds__(128) divergent(float *x, int n) {
    float value = x[threadIdx.x];
    if (threadIdx.x % 2) {
        for (int i = 0; i < n; ++i) {
            if (value > 3.0f) {
                value = value * 0.5f + x[i];
            } else {
                value = quartic(value);
            }
        }
    } else {
        while (value < 100.0f) {
            value += x[static_cast<int>(value)];
            if (value == 17.0f) {
                break;
            }
        }
    }
    asm volatile("bar.sync 3, 128;");
    x[threadIdx.x] = value;
}

extern "C" __global__ void nested(const float *x, float *y, int rows, int columns) {
    __shared__ float partial[300];
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
        float sum = 0.0f;
#pragma unroll 1
        for (int column = 0; column < columns; ++column) {
            sum += quartic(x[row * columns + column]);
        }
        partial[threadIdx.x] = sum;
        __syncthreads();
        y[row] += partial[(threadIdx.x + row) % 300];
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(64) table(float *x, int which) {
    switch (which) {
    case 0:
        x[0] = square(x[1]);
        break;
    case 1:
        x[1] = x[3] + 1.0f;
        break;
    case 2:
        x[2] = rsqrtf(x[2]);
        break;
    case 3:
        x[3] = 9.0f;
        break;
    case 4:
        x[4] += x[5];
        break;
    case 5:
        x[5] = fabsf(x[9]);
        break;
    default:
        x[8] = collatz(which);
    }
}

extern "C" __global__ void local_array(const int *at, int *x) {
    int history[32];
    for (int i = 0; i < 32; ++i) {
        history[at[i]] = x[i] + i;
    }
    x[threadIdx.x] = history[at[threadIdx.x]];
}
