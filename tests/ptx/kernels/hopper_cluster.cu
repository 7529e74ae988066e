// What blocks of a cluster, warps of a block and grids of a stream say to each other: shared memory
// of other blocks, mbarriers in all their forms, named barriers, dependent launches.
#include "hopper.cuh"

using namespace hopper;

__device__ inline void store_remote(uint32_t address, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ inline float load_remote(uint32_t address) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

// -- softmax of rows, each by a cluster -----------------------------------------------------------

constexpr int blocks = 4, warps = 4, threads = 32 * warps, per_thread = 2;

// Of all threads of the block; each gets it. Warps 1 to 3 hand theirs over and need not wait for
// each other.
template <typename Combine>
__device__ float over_block(float value, Combine combine, float (&parts)[warps + 1]) {
    const uint32_t warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        value = combine(value, __shfl_xor_sync(~0u, value, step));
    if (elected())
        parts[warp] = value;
    if (warp > 0) {
        barrier_arrive(1, threads);
    } else {
        barrier_sync(1, threads);
        if (elected()) {
            for (int i = 1; i < warps; ++i)
                value = combine(value, parts[i]);
            parts[warps] = value;
        }
    }
    barrier_sync(2, threads);
    return parts[warps];
}

// y = softmax(x) in rows of blocks * threads * per_thread floats, one per cluster. The maximum is
// written into the other blocks, the sum is read from them. Begins before the kernel before it in
// the stream has ended, and lets the next one do so.
extern "C" __global__ __cluster_dims__(blocks, 1, 1)
    __launch_bounds__(threads) void cluster_softmax(const float *x, float *y) {
    __shared__ float maxima[blocks], sum[1], parts[2][warps + 1];
    const uint32_t rank = cluster_rank();
    const float *in = x + static_cast<size_t>(blockIdx.x) * threads * per_thread + threadIdx.x;
    float *out = y + static_cast<size_t>(blockIdx.x) * threads * per_thread + threadIdx.x;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    float values[per_thread], top = -INFINITY, own = 0.0f, all = 0.0f;
    for (int i = 0; i < per_thread; ++i) {
        values[i] = in[i * threads];
        top = fmaxf(top, values[i]);
    }
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    cluster_arrive(); // the others are here, and may be written to, once the wait has ended
    top = over_block(top, fmaxf, parts[0]);
    cluster_wait();
    if (threadIdx.x < blocks)
        store_remote(in_block(shared_address(maxima + rank), threadIdx.x), top);
    cluster_sync();
    for (int i = 0; i < blocks; ++i)
        top = fmaxf(top, maxima[i]);

    for (int i = 0; i < per_thread; ++i) {
        values[i] = expf(values[i] - top);
        own += values[i];
    }
    own = over_block(own, [](float a, float b) { return a + b; }, parts[1]);
    if (threadIdx.x == 0)
        sum[0] = own;
    cluster_sync();
    for (int i = 0; i < blocks; ++i)
        all += load_remote(in_block(shared_address(sum), i));
    cluster_arrive(); // none may leave while its sum is read
    for (int i = 0; i < per_thread; ++i)
        out[i * threads] = values[i] / all;
    cluster_wait();
}

// -- copies from block to block -------------------------------------------------------------------

// Each block sends its row of in to the next block of its cluster, which writes it to out: 2 KiB by
// a bulk copy, 16 bytes more by st.async; both complete on the barrier of the block that receives.
extern "C" __global__ __cluster_dims__(blocks, 1, 1)
    __launch_bounds__(threads) void cluster_shift(const uint4 *in, uint4 *out) {
    __shared__ __align__(128) uint4 sent[threads], received[threads + 1];
    __shared__ uint64_t barriers[1];
    const uint32_t thread = threadIdx.x, next = (cluster_rank() + 1) % blocks;
    const uint32_t barrier = shared_address(barriers);
    in += blockIdx.x * (threads + 1);
    out += blockIdx.x * (threads + 1);
    if (thread == 0) {
        init(barrier, 1);
        fence_init();
        arrive_expecting(barrier, sizeof received);
    }
    sent[thread] = in[thread];
    fence_proxy();
    cluster_sync();

    if (thread == 0) {
        asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                     "[%0], [%1], %2, [%3];" ::"r"(in_block(shared_address(received), next)),
                     "r"(shared_address(sent)), "r"(static_cast<uint32_t>(sizeof sent)),
                     "r"(in_block(barrier, next))
                     : "memory");
        const uint4 last = in[threads];
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                     "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                         in_block(shared_address(received + threads), next)),
                     "r"(last.x), "r"(last.y), "r"(last.z), "r"(last.w),
                     "r"(in_block(barrier, next))
                     : "memory");
    }
    wait_cluster(barrier, 0);
    out[thread] = received[thread];
    if (thread == 0)
        out[threads] = received[threads];
    cluster_sync(); // none may leave before what it sends is received
}

// -- mbarriers without copies ---------------------------------------------------------------------

// out = in with each 32 words reversed. Warp 0 writes, 32 words at a time, and warp 1 reads: by
// states or parities, tests or waits with a limit, single arrivals or one that counts for all.
extern "C" __global__ __launch_bounds__(64) void hand_over(const uint32_t *in, uint32_t *out,
                                                           int rounds) {
    __shared__ uint32_t words[32];
    __shared__ uint64_t barriers[2];
    const uint32_t full = shared_address(barriers), empty = full + 8, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        init(full, 32);
        init(empty, 32);
    }
    __syncthreads();

    if (threadIdx.x < 32) {
        for (int i = 0; i < rounds; ++i) {
            if (i > 0)
                wait(empty, (i - 1) % 2);
            words[lane] = in[32 * i + lane];
            uint64_t state;
            uint32_t done;
            asm volatile("mbarrier.arrive.shared.b64 %0, [%1];"
                         : "=l"(state)
                         : "r"(full)
                         : "memory");
            do { // all of the warp have arrived
                asm volatile("{\n\t.reg .pred done;\n\t"
                             "mbarrier.try_wait.shared.b64 done, [%1], %2, 1000;\n\t"
                             "selp.u32 %0, 1, 0, done;\n\t}"
                             : "=r"(done)
                             : "r"(full), "l"(state)
                             : "memory");
            } while (!done);
        }
    } else {
        for (int i = 0; i < rounds; ++i) {
            uint32_t done;
            do {
                asm volatile("{\n\t.reg .pred done;\n\t"
                             "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n\t"
                             "selp.u32 %0, 1, 0, done;\n\t}"
                             : "=r"(done)
                             : "r"(full), "r"(i % 2)
                             : "memory");
                if (!done)
                    __nanosleep(64);
            } while (!done);
            out[32 * i + lane] = words[31 - lane];
            __syncwarp();
            if (elected())
                asm volatile("mbarrier.arrive.shared.b64 _, [%0], 32;" ::"r"(empty) : "memory");
        }
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; ++i)
            asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(full + 8 * i) : "memory");
}
