// Forward attention, d_head 128, not causal, by roles: a producer warp copies Q, K and V by TMA,
// two warpgroups of consumers take 64 rows of Q each, and blocks of the grid take tile after tile.
// Q, K, V and O are (batch, seq_len, heads, d_head); seq_len is a multiple of 128.
#include "hopper.cuh"

using namespace hopper;

constexpr int d_head = 128, B_r = 128, consumers = 2, slots = 2;
constexpr int panel = 64; // columns of a tile in shared memory: 128 bytes, the swizzle's
constexpr int panels = d_head / panel, row_bytes = panel * 2;
constexpr int warpgroup = 128, threads = (consumers + 1) * warpgroup;

extern __shared__ __align__(1024) uint8_t smem[];

struct Problem {
    const CUtensorMap *Q, *K, *V; // boxes of one head: 64 columns and B_r or B_c rows
    const CUtensorMap *O; // of 64 columns and the 16 rows of a warp
    int seq_len, heads, batches;
    float scale; // log2(e) / sqrt(d_head)
};

// The tiles of this block. lap: parity of their number so far.
struct Tiles {
    int seq_tiles, heads, all, tile = blockIdx.x, row, head, batch;
    uint32_t lap = 0;

    __device__ Tiles(const Problem &p)
        : seq_tiles(p.seq_len / B_r), heads(p.heads), all(seq_tiles * heads * p.batches) {
        place();
    }
    __device__ void place() {
        row = tile % seq_tiles * B_r;
        head = tile / seq_tiles % heads;
        batch = tile / (seq_tiles * heads);
    }
    __device__ bool left() const { return tile < all; }
    __device__ void advance() {
        tile += gridDim.x;
        lap ^= 1;
        place();
    }
};

// Where in shared memory what is. Full barriers: of one arrival and the bytes. Empty ones: of an
// arrival per warpgroup of consumers.
template <int B_c>
struct Shared {
    static constexpr uint32_t Q_bytes = B_r * d_head * 2, block_bytes = B_c * d_head * 2;

    uint32_t Q = shared_address(smem); // (panels, B_r, panel)
    uint32_t K = Q + Q_bytes, V = K + slots * block_bytes; // (slots, panels, B_c, panel)
    uint32_t O = V + slots * block_bytes; // (panels, B_r, panel)
    uint32_t Q_full, Q_empty, K_full, K_empty, V_full, V_empty; // each of K and V for a slot

    __device__ Shared(uint32_t barriers)
        : Q_full(barriers), Q_empty(barriers + 8), K_full(barriers + 16),
          K_empty(K_full + 8 * slots), V_full(K_empty + 8 * slots), V_empty(V_full + 8 * slots) {}

    __device__ void init_barriers() const {
        init(Q_full, 1);
        init(Q_empty, consumers);
        for (int slot = 0; slot < slots; ++slot) {
            init(K_full + 8 * slot, 1);
            init(V_full + 8 * slot, 1);
            init(K_empty + 8 * slot, consumers);
            init(V_empty + 8 * slot, consumers);
        }
        fence_init();
    }
};

// -- the producer ---------------------------------------------------------------------------------

template <int rows>
__device__ void load_tile(uint32_t to, const CUtensorMap *map, uint32_t barrier, int row,
                          const Tiles &at) {
    arrive_expecting(barrier, rows * d_head * 2);
    for (int i = 0; i < panels; ++i)
        load_4d(to + i * rows * row_bytes, map, barrier, i * panel, at.head, row, at.batch);
}

template <int B_c>
__device__ void produce(const Problem &p, const Shared<B_c> &shared) {
    Ring<slots> ring;
    for (Tiles at(p); at.left(); at.advance()) {
        wait(shared.Q_empty, at.lap ^ 1);
        load_tile<B_r>(shared.Q, p.Q, shared.Q_full, at.row, at);
        for (int j = 0; j < p.seq_len / B_c; ++j, ring.advance()) {
            const uint32_t block = ring.slot * shared.block_bytes, barrier = ring.slot * 8;
            wait(shared.K_empty + barrier, ring.lap ^ 1);
            load_tile<B_c>(shared.K + block, p.K, shared.K_full + barrier, j * B_c, at);
            wait(shared.V_empty + barrier, ring.lap ^ 1);
            load_tile<B_c>(shared.V + block, p.V, shared.V_full + barrier, j * B_c, at);
        }
    }
}

// -- the consumers --------------------------------------------------------------------------------

__device__ inline float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// S becomes exp2((S - m) scale), m its rows' maximum so far, l their sums. rescale: by what earlier
// sums and outputs are too large.
template <int n>
__device__ void softmax(float (&S)[n], float (&m)[2], float (&l)[2], float (&rescale)[2],
                        float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) { // row lane / 4 + 8 h
        float top = m[h], sum = 0.0f;
#pragma unroll
        for (int i = 2 * h; i < n; i += 4)
            top = fmaxf(top, fmaxf(S[i], S[i + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
#pragma unroll
        for (int i = 2 * h; i < n; i += 4) {
            S[i] = exp2_approximate(S[i] * scale - top * scale);
            S[i + 1] = exp2_approximate(S[i + 1] * scale - top * scale);
            sum += S[i] + S[i + 1];
        }
        rescale[h] = exp2_approximate((m[h] - top) * scale); // 0 in the first block
        l[h] = l[h] * rescale[h] + sum;
        m[h] = top;
    }
}

template <typename T, int B_c, bool ping_pong, bool overlap>
__device__ void consume(const Problem &p, const Shared<B_c> &shared, uint32_t consumer) {
    const uint32_t thread = threadIdx.x % warpgroup, warp = thread / 32, lane = thread % 32;
    const uint64_t Q = swizzled_128(shared.Q + consumer * 64 * row_bytes, 16, 1024);
    Ring<slots> K_ring, V_ring;
    float O[d_head / 2], S[B_c / 2], m[2], l[2], rescale[2];
    uint32_t P[B_c / 4];

    // wgmma's operands are free for the whole warpgroup once one of its threads has waited.
    auto release = [&](uint32_t barrier) {
        if (thread == 0)
            arrive(barrier);
    };
    auto begin_scores = [&] { // S = Q K^T
        wait(shared.K_full + 8 * K_ring.slot, K_ring.lap);
        const uint64_t K = swizzled_128(shared.K + K_ring.slot * shared.block_bytes, 16, 1024);
        hold(S);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < d_head / 16; ++step)
            wgmma<T>(S, Q + advance(step / 4 * B_r * row_bytes + step % 4 * 32),
                     K + advance(step / 4 * B_c * row_bytes + step % 4 * 32), step > 0);
        wgmma_commit();
    };
    auto end_scores = [&] {
        hold(S);
        release(shared.K_empty + 8 * K_ring.slot);
        K_ring.advance();
    };
    auto begin_output = [&](bool first) { // O += P V
        wait(shared.V_full + 8 * V_ring.slot, V_ring.lap);
        const uint64_t V =
            swizzled_128(shared.V + V_ring.slot * shared.block_bytes, B_c * row_bytes, 1024);
        hold(O);
        hold(P);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < B_c / 16; ++step)
            wgmma<T, 1>(O, P + 4 * step, V + advance(step * 16 * row_bytes), !first || step > 0);
        wgmma_commit();
    };
    auto end_output = [&] {
        hold(O);
        hold(P);
        release(shared.V_empty + 8 * V_ring.slot);
        V_ring.advance();
    };
    // With ping_pong one warpgroup computes exponentials at a time: the other's products run
    // meanwhile.
    auto take_turn = [&] {
        if constexpr (ping_pong)
            barrier_sync(1 + consumer, consumers * warpgroup);
    };
    auto pass_turn = [&] {
        if constexpr (ping_pong)
            barrier_arrive(2 - consumer, consumers * warpgroup);
    };
    auto exponentials = [&] {
        take_turn();
        softmax(S, m, l, rescale, p.scale);
        pass_turn();
    };
    auto to_P = [&] { // accumulators as they stand are fragments of A
#pragma unroll
        for (int i = 0; i < B_c / 4; ++i)
            P[i] = pack<T>(S[2 * i], S[2 * i + 1]);
    };

    if (consumer == 1)
        pass_turn(); // the first is consumer 0's
    for (Tiles at(p); at.left(); at.advance()) {
        m[0] = m[1] = -INFINITY;
        l[0] = l[1] = 0.0f;
        wait(shared.Q_full, at.lap);
        begin_scores();
        wgmma_wait<0>();
        end_scores();
        exponentials();
        to_P();
        for (int j = 1; j < p.seq_len / B_c; ++j) {
            begin_scores();
            begin_output(j == 1);
            wgmma_wait<overlap ? 1 : 0>(); // with overlap, exponentials while P V runs
            end_scores();
            if constexpr (overlap) {
                exponentials();
                wgmma_wait<0>();
                end_output();
            } else {
                end_output();
                exponentials();
            }
#pragma unroll
            for (int i = 0; i < d_head / 2; ++i)
                O[i] *= rescale[i / 2 % 2];
            to_P();
        }
        begin_output(p.seq_len == B_c);
        wgmma_wait<0>();
        end_output();
        release(shared.Q_empty);

        // O / l, by way of shared memory, each warp its own 16 rows
        if (lane == 0)
            wait_stores_read<0>();
        __syncwarp();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            l[h] += __shfl_xor_sync(~0u, l[h], 1);
            l[h] += __shfl_xor_sync(~0u, l[h], 2);
            l[h] = 1.0f / l[h];
        }
#pragma unroll
        for (int i = 0; i < d_head / 2; ++i)
            O[i] *= l[i / 2 % 2];
        const uint32_t row = consumer * 64 + warp * 16;
#pragma unroll
        for (int i = 0; i < d_head / 16; ++i)
            store_fragment<T>(shared.O + i / 4 * B_r * row_bytes +
                                  swizzled(row + lane % 16, i % 4 * 2 + lane / 16),
                              O + 8 * i);
        fence_proxy();
        __syncwarp();
        if (lane == 0) {
            for (int i = 0; i < panels; ++i)
                store_4d(p.O, shared.O + (i * B_r + row) * row_bytes, i * panel, at.head,
                         at.row + row, at.batch);
            commit_stores();
        }
    }
    if (consumer == 0)
        take_turn(); // that consumer 1 passed on last
    if (lane == 0)
        wait_stores_read<0>();
}

// -- the kernels ----------------------------------------------------------------------------------

template <typename T, int B_c, bool ping_pong, bool overlap>
__device__ void attention(const Problem &p) {
    __shared__ uint64_t barriers[2 + 4 * slots];
    const Shared<B_c> shared(shared_address(barriers));
    if (threadIdx.x == 0)
        shared.init_barriers();
    __syncthreads();

    const uint32_t role = threadIdx.x / warpgroup;
    if (role == consumers) {
        give_registers<24>();
        if (threadIdx.x / 32 == consumers * warpgroup / 32 && elected())
            produce(p, shared);
    } else {
        take_registers<240>();
        consume<T, B_c, ping_pong, overlap>(p, shared, role);
    }
}

#define MAP const __grid_constant__ CUtensorMap
#define ATTENTION(name, ...)                                                            \
    extern "C" __global__ __launch_bounds__(threads, 1) void attention_##name(          \
        MAP Q, MAP K, MAP V, MAP O, int seq_len, int heads, int batches, float scale) { \
        attention<__VA_ARGS__>({&Q, &K, &V, &O, seq_len, heads, batches, scale});       \
    }
ATTENTION(bf16, __nv_bfloat16, 128, false, false)
ATTENTION(f16_ping_pong, __half, 64, true, false)
ATTENTION(bf16_ping_pong_overlap, __nv_bfloat16, 128, true, true)
