// Softmax of rows of 64 floats, as one might write it first: y = exp(x - m) / l, where m is the
// maximum of a row and l the sum of its exp(x - m). A thread has a row; shared memory stands
// between it and global memory, whose accesses are coalesced that way. The number of rows is a
// multiple of kRows, the grid rows / kRows, the block kRows threads.

constexpr int kRows = 64; // of a block
constexpr int kChunks = 16; // of 16 bytes in a row
constexpr int kStride = kChunks; // chunks from row to row of the tile
constexpr int kBlocks = 16; // that an SM is to hold: half of the threads that it can

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
