// The end of a matrix product as libraries write it: accumulators go through a ring of slots in
// shared memory to global memory, by stmatrix and by TMA stores of one warp. No product before it.
#include "hopper.cuh"

using namespace hopper;

constexpr int rows = 64, columns = 64, slots = 2; // of a tile: a row is 128 bytes, the swizzle's
constexpr int slot_bytes = rows * columns * 2;

extern __shared__ __align__(1024) uint8_t smem[];

// C[row, column] = (row + 2 column) % 251, C (64 gridDim.x, 64 tiles), row-major, by its tensor map
// of boxes of 64 columns x 64 rows in the 128-byte swizzle. 128 threads. One lane of warp 0 issues
// each store, or all of them do.
template <typename T, bool by_all_lanes>
__device__ void epilogue(const CUtensorMap *C, int tiles) {
    const uint32_t C_smem = shared_address(smem);
    const uint32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int row0 = blockIdx.x * rows;

    for (int i = 0; i < tiles; ++i) {
        float acc[columns / 2];
#pragma unroll
        for (int j = 0; j < columns / 2; ++j) {
            int row = row0 + warp * 16 + j / 2 % 2 * 8 + lane / 4;
            int column = i * columns + j / 4 * 8 + lane % 4 * 2 + j % 2;
            acc[j] = (row + 2 * column) % 251;
        }
        const uint32_t slot = C_smem + i % slots * slot_bytes;
        if (warp == 0)
            wait_stores_read<slots - 1>();
        barrier_sync(1, 128); // the slot has been read
#pragma unroll
        for (int j = 0; j < columns / 16; ++j)
            store_fragment<T>(slot + swizzled(warp * 16 + lane % 16, 2 * j + lane / 16),
                              acc + 8 * j);
        fence_proxy();
        barrier_sync(2, 128); // and is full again
        if (warp == 0 && (by_all_lanes || elected())) {
            store_2d(C, slot, i * columns, row0);
            commit_stores();
        }
    }
    if (warp == 0)
        wait_stores_read<0>();
}

extern "C" __global__ void __launch_bounds__(128)
    epilogue_one_lane(const __grid_constant__ CUtensorMap C, int tiles) {
    epilogue<__nv_bfloat16, false>(&C, tiles);
}

extern "C" __global__ void __launch_bounds__(128)
    epilogue_all_lanes(const __grid_constant__ CUtensorMap C, int tiles) {
    epilogue<__nv_bfloat16, true>(&C, tiles);
}
