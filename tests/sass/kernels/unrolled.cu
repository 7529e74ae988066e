// One mma in the source, in a loop that is unrolled by four; the rest of the trips has a loop of
// its own.

extern "C" __global__ void unrolled(const unsigned *a, const unsigned *b, float *c, int n) {
    float sum[4] = {};
    const int lane = threadIdx.x;
#pragma unroll 4
    for (int k = 0; k < n; ++k) {
        const unsigned *a_k = a + 128 * k + lane;
        const unsigned *b_k = b + 64 * k + lane;
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(a_k[0]), "r"(a_k[32]), "r"(a_k[64]), "r"(a_k[96]), "r"(b_k[0]),
                       "r"(b_k[32]));
    }
    for (int i = 0; i < 4; ++i) {
        c[4 * lane + i] = sum[i];
    }
}
