// The softmax of row_softmax.cu, without its two flaws: a row of the tile begins 16 bytes further
// on in the banks than the one before, and the SM is asked to hold what it can.

constexpr int kRows = 64; // of a block
constexpr int kChunks = 16; // of 16 bytes in a row
constexpr int kStride = kChunks + 1; // chunks from row to row of the tile: no two in a bank
constexpr int kBlocks = 12; // that an SM is to hold: what registers without spills allow

extern "C" __global__ void __launch_bounds__(kRows, kBlocks)
    row_softmax(const float4 *__restrict__ x, float4 *__restrict__ y) {
    __shared__ float4 tile[kRows * kStride];
    const int thread = threadIdx.x;
    const int first_row = blockIdx.x * kRows;
    const int copy_row = threadIdx.x / kChunks, copy_chunk = threadIdx.x % kChunks;
    constexpr int kRowsPerPass = kRows / kChunks; // 16 neighbouring threads copy a row

    // 1. x: global -> shared
#pragma unroll
    for (int r = 0; r < kRows; r += kRowsPerPass) {
        tile[(r + copy_row) * kStride + copy_chunk] =
            x[(first_row + r + copy_row) * kChunks + copy_chunk];
    }
    __syncthreads(); // a thread reads what others have copied

    // 2. row and m: shared -> registers, a row a thread
    float4 row[kChunks];
    float m = -INFINITY;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        row[c] = tile[thread * kStride + c];
        m = fmaxf(fmaxf(fmaxf(m, row[c].x), fmaxf(row[c].y, row[c].z)), row[c].w);
    }

    // 3. row = exp(row - m), l
    float l = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        row[c] = {__expf(row[c].x - m), __expf(row[c].y - m), __expf(row[c].z - m),
                  __expf(row[c].w - m)};
        l += row[c].x + row[c].y + row[c].z + row[c].w;
    }

    // 4. row = row / l, registers -> shared
    const float inverse_l = __fdividef(1, l);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        tile[thread * kStride + c] = {row[c].x * inverse_l, row[c].y * inverse_l,
                                      row[c].z * inverse_l, row[c].w * inverse_l};
    }
    __syncthreads(); // a thread stores what others have computed

    // 5. y: shared -> global
#pragma unroll
    for (int r = 0; r < kRows; r += kRowsPerPass) {
        y[(first_row + r + copy_row) * kChunks + copy_chunk] =
            tile[(r + copy_row) * kStride + copy_chunk];
    }
}
