#pragma once
// mbarriers: barriers in shared memory that count arrivals and the bytes of copies. A phase ends
// when all expected arrivals and bytes have come. A thread waits for a phase by its parity.

#include <cstdint>

constexpr int kBarrierBytes = 8;

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

// Makes initialised barriers visible to the copies that complete on them.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces the bytes that copies will deliver in this phase.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Waits until the phase of this parity has ended. The phase before the first counts as ended, and
// has parity 1.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n\t"
                 ".reg .pred done;\n"
                 "retry:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra retry;\n\t"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// The slots of a ring in turn, each with a barrier, and the parity of their lap.
template <int kSlots>
struct Ring {
    uint32_t slot = 0, lap = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) {
            slot = 0;
            lap ^= 1;
        }
    }
    // Before any thread waits. A slot is full when one thread has arrived and the bytes that it
    // expects have come, and empty after `arrivals` arrivals.
    __device__ __forceinline__ void init_barriers(uint32_t full, uint32_t empty,
                                                  int arrivals) const {
        for (int i = 0; i < kSlots; ++i) {
            barrier_init(full + i * kBarrierBytes, 1);
            barrier_init(empty + i * kBarrierBytes, arrivals);
        }
    }
    // The barrier of the current slot, of the array of barriers that begins at this address.
    __device__ __forceinline__ uint32_t barrier(uint32_t barriers) const {
        return barriers + slot * kBarrierBytes;
    }
};

// Waits until all slots of the ring have been given back; called by the thread that fills them.
template <int kSlots>
__device__ __forceinline__ void wait_until_empty(Ring<kSlots> ring, uint32_t empty) {
    for (int i = 0; i < kSlots; ++i) {
        barrier_wait(ring.barrier(empty), ring.lap ^ 1);
        ring.advance();
    }
}
