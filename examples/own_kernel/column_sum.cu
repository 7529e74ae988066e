// Sums of the columns of a matrix, the way of Hopper: a producer asks TMA for tile after tile,
// consumers add them up, a thread per column. Between them stands a ring of kSlots tiles; for each
// slot one mbarrier tells that it is full, another that it is empty. x is a tensor map whose box is
// a tile. The grid is columns / kColumns, the block kColumns + 32 threads.

#include <cstdint>
#include <cuda.h>

constexpr int kRows = 16, kColumns = 64; // of a tile
constexpr int kSlots = 2; // of the ring

struct Ring {
    float tile[kSlots][kRows][kColumns];
    uint64_t full[kSlots], empty[kSlots];
};

__device__ uint32_t shared_address(const void *p) {
    uint64_t address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(p));
    return static_cast<uint32_t>(address);
}

__device__ void init(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

__device__ void arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

// Until the phase of this parity is complete; a new mbarrier counts as past one of parity 1.
__device__ void wait(uint64_t *barrier, int parity) {
    uint32_t done;
    do {
        asm volatile("{\n\t.reg .pred done;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, done;\n\t}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    } while (!done);
}

// Asks TMA for the box at (x, y), and arrives at a barrier at which all of its bytes will, too.
__device__ void load(void *to, const CUtensorMap *map, int x, int y, uint64_t *barrier, int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
                 "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
                 : "memory");
}

extern "C" __global__ void __launch_bounds__(kColumns + 32)
    column_sum(const __grid_constant__ CUtensorMap x, float *y, int tiles) {
    __shared__ alignas(128) Ring ring;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < kSlots; ++slot) {
            init(&ring.full[slot], 1); // the producer
            init(&ring.empty[slot], kColumns); // all consumers
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); // for TMA
    }
    __syncthreads();

    const int column = blockIdx.x * kColumns;
    if (threadIdx.x >= kColumns) { // the producer
        if (threadIdx.x > kColumns)
            return;
        for (int i = 0; i < tiles; ++i) {
            const int slot = i % kSlots, parity = i / kSlots % 2;
            wait(&ring.empty[slot], parity ^ 1); // of the lap before: in the first at once
            load(ring.tile[slot], &x, column, i * kRows, &ring.full[slot], sizeof ring.tile[slot]);
        }
        return;
    }

    float sum = 0;
    for (int i = 0; i < tiles; ++i) {
        const int slot = i % kSlots, parity = i % 2;
        wait(&ring.full[slot], parity);
        for (int row = 0; row < kRows; ++row)
            sum += ring.tile[slot][row][threadIdx.x];
        arrive(&ring.empty[slot]);
    }
    y[column + threadIdx.x] = sum;
}
