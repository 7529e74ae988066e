// More values alive than registers: ptxas spills, and local memory holds nothing else.

extern "C" __global__ void __launch_bounds__(1024, 2) spills(float *x, int n) {
    float kept[48];
    for (int i = 0; i < 48; ++i) {
        kept[i] = x[i * 1024 + threadIdx.x];
    }
    for (int step = 0; step < n; ++step) {
        for (int i = 0; i < 48; ++i) {
            kept[i] = kept[i] * kept[(i + 7) % 48] + kept[(i + 23) % 48];
        }
    }
    for (int i = 0; i < 48; ++i) {
        x[i * 1024 + threadIdx.x] = kept[i];
    }
}
