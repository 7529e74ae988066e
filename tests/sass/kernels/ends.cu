// How code may end, and what is hard to read of it: a loop that lanes leave alone (BREAK), traps, a
// stub, recursion, and spills beside an array in local memory.

extern "C" __global__ void breaks(float *x, int n) {
    float value = x[threadIdx.x];
    for (int i = 0; i < n; ++i) {
        if (x[i] > value) {
            x[i + 1] = value;
            if (x[i * 2] < value) {
                break;
            }
            for (int j = 0; j < i; ++j) {
                value += x[j];
                if (value > 3.0f) {
                    goto out;
                }
                __syncwarp();
            }
        }
        value = __shfl_xor_sync(__activemask(), value, 1);
    }
out:
    x[threadIdx.x] = value;
}

extern "C" __global__ void traps(float *x) {
    if (x[0] == 0.0f) {
        __trap();
    }
    x[1] = 1.0f;
}

extern "C" __global__ void stub(float *x) {
    __trap();
}

__device__ __noinline__ int fibonacci(int n) {
    return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}

extern "C" __global__ void recurses(int *x) {
    x[0] = fibonacci(x[1]);
}

extern "C" __global__ void __launch_bounds__(1024, 2)
    spills_beside_array(float *x, const int *at, int n) {
    float kept[40], history[16];
    for (int i = 0; i < 16; ++i) {
        history[at[i]] = x[i];
    }
    for (int i = 0; i < 40; ++i) {
        kept[i] = x[i * 1024 + threadIdx.x];
    }
    for (int step = 0; step < n; ++step) {
        for (int i = 0; i < 40; ++i) {
            kept[i] = kept[i] * kept[(i + 7) % 40] + kept[(i + 23) % 40];
        }
    }
    for (int i = 0; i < 40; ++i) {
        x[i * 1024 + threadIdx.x] = kept[i] + history[at[i]];
    }
}
