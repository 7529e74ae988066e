#pragma once
// Step 1 of the decode family: the base. Parent in the story: c1; no line of it is left.
//
//   O = softmax(Q K^T · scale) V
//
// The parts
//   1. A thread block of 128 threads has one sequence and one head of K. The queries of all heads
//      that share it are rows of one tile, and every thread has its columns of Q in fp32.
//   2. A stream is d_head / 8 lanes that share a key: each loads 8 columns with 16 bytes. With
//      d_head 128 a warp has two streams, a thread block eight.
//   3. A stream has every eighth key of a block of 64. It loads 8 rows of K and of V at once, sums
//   S
//      by shuffles, and has an m, l and O of its own. So the loop has no barrier. At the end the
//      streams meet in shared memory.
//   4. Lengths, rows of the cache, masks, softcap, sinks and LSE come with the call.
//
// Why CUDA cores suffice for a few rows: a key is 512 bytes of K and V. An SM's share of 3.35 TB/s
// is 15 bytes per cycle at 1.7 GHz, so that it takes 34 cycles. Two keys share an instruction of a
// warp. For both of them a row takes 8 products for S, 4 shuffles with 4 additions, and 8 products
// for O; conversions are 32 for all rows. With 4 rows a key takes 64 instructions, 16 cycles of the
// four schedulers; with 16 rows it would take 200, or 50 cycles.
// Why it is slow: loads and products take turns. With 128 thread blocks on 132 SMs, a block of 64
// keys takes 2180 cycles of the memory's bandwidth, 700 of its latency, and 1400 of computation.
// Expected: half of the bandwidth at 16 x 8192 on an H100, 1.7 TB/s. One sequence has 8 thread
// blocks: 0.1 TB/s.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at length 8192, and share of a copy that
// moves the same bytes, the measured ceiling in the harmonic mean over lengths. B_r 4, B_c 64:
// 1,780, 0.10. Cost: 174 registers per thread, 16 KiB of shared memory per block, 2 blocks per SM.
// benchmark:end
// Verdict: on an H200 300 us for 16 sequences of 8192 keys, where cuDNN takes 119.
//
// Phases: 1 Q, 2 K, V, 3 S, 4 P, 5 O, 6 sum over streams, 7 store.

#include "elements.cuh"
#include "kernels/decode/arguments.cuh"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/scores.cuh"
#include "kernels/decode/streams.cuh"
#include "kernels/decode/sums.cuh"

namespace d1 {

template <typename Config>
__global__ void __launch_bounds__(Config::value.n_threads())
    decode_kernel(const __grid_constant__ DecodeKernelArgs args) {
    constexpr DecodeKernelConfig cfg = Config::value;
    constexpr int B_r = cfg.B_r, B_c = cfg.B_c, kDHead = cfg.d_head;
    constexpr int kLanes = kDHead / kChunk; // of a stream
    constexpr int kStreams = cfg.n_threads() / kLanes, kKeys = B_c / kStreams;

    extern __shared__ __align__(16) float smem[];
    const int stream = threadIdx.x / kLanes, column = threadIdx.x % kLanes * kChunk;
    const Queries<B_r> queries(args);

    // 1. Q: global → registers
    float Q_rmem[B_r][kChunk];
#pragma unroll
    for (int row = 0; row < B_r; ++row) {
        unpack_chunk<cfg.dtype>(Q_rmem[row], queries.load_Q(row, column, args));
    }

    const Element *K_gmem = queries.first_key(args.K_gmem, args.K_strides, args) + column;
    const Element *V_gmem = queries.first_key(args.V_gmem, args.V_strides, args) + column;
    float O_rmem[B_r][kChunk] = {}, m[B_r], l[B_r] = {};
    fill(m, -INFINITY);
    const int end = queries.end(args);
    for (int block = queries.begin(args) / B_c * B_c; block < end; block += B_c) {
        // 2. K, V: global → registers; zeros behind the end of the sequence
        uint4 K_rmem[kKeys], V_rmem[kKeys];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            const int key = block + i * kStreams + stream;
            K_rmem[i] = load_key(K_gmem, args.K_strides.row, key, queries.len_k);
            V_rmem[i] = load_key(V_gmem, args.V_strides.row, key, queries.len_k);
        }

        // 3. S = Q @ K^T
        float S_rmem[B_r][kKeys];
        multiply_QK<cfg.dtype, kLanes>(S_rmem, Q_rmem, K_rmem);
        limit_and_hide<kStreams>(S_rmem, queries, args, block, stream);

        // 4. P = 2^(S - m)
        update(S_rmem, m, l, O_rmem, args.scale);

        // 5. O += P @ V
        add_PV<cfg.dtype>(O_rmem, S_rmem, V_rmem);
    }

    // 6. m, l, O of the streams: registers → shared
    const Sums<B_r, kDHead> sums = {smem, kStreams};
    store_sums(sums, stream, column, m, l, O_rmem);
    __syncthreads(); // a thread reads what all streams have stored

    // 7. O, LSE: shared → global
    store_outputs<cfg.dtype, cfg.n_threads()>(sums, queries, args);
}

} // namespace d1
