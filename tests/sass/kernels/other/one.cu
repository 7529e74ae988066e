// Another kernel in a file of the same name: linked together, both cubins are called the same.

extern "C" __global__ void other(int *x) {
    x[threadIdx.x] += 2;
}
