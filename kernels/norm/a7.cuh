#pragma once
// Step 7 of the norm_cluster family: y does not stay in L2. Parent: a4.
//
// What changed
//   1. y is stored by st.global.cs, which lets L2 drop its lines before others (streaming).
//   2. Where all chunks of the registers exist, and a weight with a bias, of RMS norm without one,
//      their loads have no predicate.
//
// Why: half of the bytes of a norm are y, which no block reads. In L2 its lines take the place of
// weight and bias, which a4 reads from there for each row, and of x on its way. In a probe on an
// H200 streaming stores took RMS norm at 65536 from 93% of a copy's speed to 97%, and layer norm
// from 89% to 92%.
//   A load with a predicate has its four registers filled before it begins. 32 of 64 registers have
// x, so that few loads of weight and bias are under way, and each waits for L2: a4 has 93% without
// both and 81% with either.
// Expected, as a share of a copy at a width of 65536: 91%; RMS norm 96%.
//
// benchmark:begin
// benchmark:end
// Verdict: RMS norm of 65536 has 93% of a copy's speed on an H200, where a4 has 89%; layer norm has
// 83 to 84%, less than a3.
//
// Phases: 1 x to registers, 2 mean and rstd, 3 y.

#include "elements.cuh"
#include "kernels/norm/arguments.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "predicated.cuh"
#include "sm90/cluster.cuh"
#include "sm90/mbarrier.cuh"
#include "streaming.cuh"
#include "unpack_again.cuh"

namespace a7 {

// Some elements of a row: their number, their mean, and the sum of their squared distances from it.
// The fourth number makes them one store of 16 bytes.
struct __align__(16) Moments {
    float n, mean, M2, none;
};

// Combines a and b by Chan's formula. n · share · d is multiplied before the second d, since d² may
// overflow where a or b has no elements. The mean is the sum where a or b has an infinity.
__device__ __forceinline__ Moments combine(Moments a, Moments b) {
    const float n = a.n + b.n, share = n > 0.0f ? b.n * reciprocal_approx(n) : 0.0f;
    const float d = b.mean - a.mean, mean = fmaf(d, share, a.mean);
    return {n, mean == mean ? mean : a.mean + b.mean, fmaf(a.n * share * d, d, a.M2 + b.M2)};
}

__device__ __forceinline__ Moments shuffle_xor(Moments value, int lanes) {
    return {__shfl_xor_sync(0xffffffff, value.n, lanes),
            __shfl_xor_sync(0xffffffff, value.mean, lanes),
            __shfl_xor_sync(0xffffffff, value.M2, lanes)};
}

// Combines the values of the kThreads threads of a block and returns the result to each: by a tree
// over the lanes of each warp, then by one over the warps. smem: (warps).
template <int kThreads>
__device__ __forceinline__ Moments block_moments(Moments value, float origin, Moments *smem) {
#pragma unroll
    for (int lanes = 1; lanes < kThreads && lanes < 32; lanes *= 2) {
        value = combine(value, shuffle_xor(value, lanes));
    }
    value.mean += origin; // rounding changes means of warps far less than the bound of rstd
    if constexpr (kThreads > 32) {
        constexpr int kWarps = kThreads / 32; // of a row
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) {
            smem[warp] = value;
        }
        __syncthreads(); // a warp reads what the others have written
        value = smem[warp / kWarps * kWarps + lane % kWarps];
#pragma unroll
        for (int lanes = 1; lanes < kWarps; lanes *= 2) {
            value = combine(value, shuffle_xor(value, lanes));
        }
    }
    return value;
}

// Writes a part to the shared memory of a block of the cluster, whose barrier counts its bytes.
__device__ __forceinline__ void send(uint32_t dst_smem, Moments part, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%2, %3, %4, %4}, [%1];" ::"r"(dst_smem),
                 "r"(barrier), "f"(part.n), "f"(part.mean), "f"(part.M2)
                 : "memory");
}

// The two halves of cluster_sync_relaxed. Work between them hides the wait.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Combines the parts of the blocks of a cluster, in one order. Each thread gets the same bits.
// smem: (kBlocks).
template <int kBlocks>
__device__ __forceinline__ Moments cluster_moments(Moments part, Moments *smem, uint32_t barrier) {
    cluster_wait(); // all blocks have begun, and their barriers are ready
    if (threadIdx.x == 0) {
        barrier_expect(barrier, kBlocks * sizeof(Moments));
    }
    if (threadIdx.x < kBlocks) {
        const uint32_t dst_smem = smem_address(smem + cluster_rank());
        send(in_block(dst_smem, threadIdx.x), part, in_block(barrier, threadIdx.x));
    }
    barrier_wait(barrier, 0); // those of all blocks have come
    part = smem[0];
#pragma unroll
    for (int block = 1; block < kBlocks; ++block) {
        part = combine(part, smem[block]);
    }
    return part;
}

// Returns `sum` with the elements of a chunk added to it.
template <DType kDType>
__device__ __forceinline__ float add_chunk(float sum, uint4 chunk) {
    float x_rmem[kChunkElements<kDType>];
    unpack_chunk<kDType>(x_rmem, chunk);
#pragma unroll
    for (const float x : x_rmem) {
        sum += x;
    }
    return sum;
}

// Returns `squares` with (x - mean)² of the elements of a chunk added to it; adds x - mean to
// `rest` in fp32.
template <DType kDType>
__device__ __forceinline__ float add_squares(float squares, float &rest, uint4 chunk, float mean,
                                             uint32_t zero = 0) {
    float x_rmem[kChunkElements<kDType>];
    unpack_chunk_again<kDType>(x_rmem, chunk, zero);
#pragma unroll
    for (const float x : x_rmem) {
        if constexpr (kDType == DType::FP32) {
            rest += x - mean;
        }
        squares = fmaf(x - mean, x - mean, squares);
    }
    return squares;
}

// Whether a vector begins at a multiple of 16 bytes with this element, or is left out.
template <typename T>
__device__ __forceinline__ bool has_chunks_at(const T *gmem, int element) {
    return gmem == nullptr || elements_to_boundary(gmem + element) == 0;
}

// A chunk of weight or bias; `missing` throughout if a call leaves the vector out. kIsGiven: it and
// the chunk exist.
template <DType kDType, bool kIsGiven>
__device__ __forceinline__ void load_chunk(float (&rmem)[kChunkElements<kDType>],
                                           const ElementOf<kDType> *gmem, int element,
                                           float missing, bool exists) {
    if constexpr (kIsGiven) {
        uint4 chunk; // in the order of the text, so that few are in registers
        asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                     : "l"(gmem + element));
        unpack_chunk<kDType>(rmem, chunk);
    } else {
#pragma unroll
        for (float &value : rmem) {
            value = missing;
        }
        const uint4 otherwise = pack_chunk<kDType>(rmem);
        unpack_chunk<kDType>(rmem,
                             load_gmem_16_if(exists && gmem != nullptr, gmem + element, otherwise));
    }
}

// y = (x - mean) · rstd · weight + bias for the chunk of x that begins at an element of the row.
// kIsUsual: weight and the chunk exist, and a bias or, of RMS norm, none.
template <DType kDType, bool kIsUsual = false, bool kIsRms = false>
__device__ __forceinline__ uint4 norm_chunk(uint4 chunk, float mean, float rstd,
                                            const ElementOf<kDType> *weight_gmem,
                                            const ElementOf<kDType> *bias_gmem, int element,
                                            uint32_t zero = 0, bool exists = true) {
    constexpr int kChunk = kChunkElements<kDType>;
    float x_rmem[kChunk], weight_rmem[kChunk], bias_rmem[kChunk];
    unpack_chunk_again<kDType>(x_rmem, chunk, zero);
    load_chunk<kDType, kIsUsual>(weight_rmem, weight_gmem, element, 1.0f, exists);
    load_chunk<kDType, kIsUsual && !kIsRms>(bias_rmem, bias_gmem, element, 0.0f,
                                            exists && !kIsUsual);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        x_rmem[j] = fmaf((x_rmem[j] - mean) * rstd, weight_rmem[j], bias_rmem[j]);
    }
    return pack_chunk<kDType>(x_rmem);
}

// y = (x - mean) · rstd · weight + bias for one element of the row.
template <DType kDType>
__device__ __forceinline__ ElementOf<kDType>
norm_element(float x, float mean, float rstd, const ElementOf<kDType> *weight_gmem,
             const ElementOf<kDType> *bias_gmem, int element) {
    const float weight = weight_gmem ? to_float<kDType>(__ldg(weight_gmem + element)) : 1.0f;
    const float bias = bias_gmem ? to_float<kDType>(__ldg(bias_gmem + element)) : 0.0f;
    return from_float<kDType>(fmaf((x - mean) * rstd, weight, bias));
}

template <typename Kernels>
__global__ void __cluster_dims__(Kernels::value.cluster_blocks, 1, 1)
    __launch_bounds__(Kernels::value.n_threads(), Kernels::value.blocks_per_sm())
        norm_kernel(const __grid_constant__ NormKernelArgs args) {
    constexpr NormClusterKernelConfig cfg = Kernels::value;
    static_assert(cfg.n_warps >= 8 && cfg.n_warps <= 32 && (cfg.n_warps & (cfg.n_warps - 1)) == 0,
                  "the tree over the warps is one over the lanes of a warp");
    static_assert(cfg.cluster_blocks >= 1 && cfg.cluster_blocks <= 8, "portable clusters");
    static_assert(cfg.chunks >= 1 && cfg.chunks <= 8, "64 registers per thread");

    constexpr DType kDType = cfg.dtype;
    constexpr int kBlocks = cfg.cluster_blocks, kChunks = cfg.chunks;
    constexpr int kThreads = kBlocks * cfg.n_threads(); // that have the row
    constexpr int kChunk = kChunkElements<kDType>;
    constexpr int kEdges = (2 * (kChunk - 1) + kThreads - 1) / kThreads; // of a thread

    extern __shared__ Moments smem[]; // (warps), (kBlocks)
    const uint32_t barrier = smem_address(smem + cfg.n_warps + kBlocks);
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_fence();
    }
    cluster_arrive_relaxed();
    const int64_t row = blockIdx.x / kBlocks;
    const int thread = cluster_rank() * cfg.n_threads() + threadIdx.x; // of those with the row
    const int width = args.width;
    const auto *x_gmem = static_cast<const ElementOf<kDType> *>(args.x) + row * args.x_stride;
    auto *y_gmem = static_cast<ElementOf<kDType> *>(args.y) + row * args.y_stride;
    const auto *weight_gmem = static_cast<const ElementOf<kDType> *>(args.weight); // (width)
    const auto *bias_gmem = static_cast<const ElementOf<kDType> *>(args.bias); // (width)

    // A row of x is a head, chunks that begin at multiples of 16 bytes, and a tail. Head and tail
    // have less than a chunk each, together at most 14 elements of 16 bits: one per thread.
    const int head = min(elements_to_boundary(x_gmem), width);
    const int n_chunks = (width - head) / kChunk;
    const int n_edges = width - n_chunks * kChunk;
    const auto edge = [&](int n) { // the place in the row of the n-th element of head and tail
        return n + (n < head ? 0 : n_chunks * kChunk);
    };
    const auto *x_chunks_gmem = reinterpret_cast<const uint4 *>(x_gmem + head); // (n_chunks)

    // 1. x: global → registers; 0 where there is no chunk
    float x_edges[kEdges];
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        const int n = thread + k * kThreads;
        x_edges[k] = n < n_edges ? to_float<kDType>(__ldg(x_gmem + edge(n))) : 0.0f;
    }
    uint4 x_rmem[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        const int i = thread + k * kThreads;
        x_rmem[k] = load_gmem_16_once_if(i < n_chunks, x_chunks_gmem + i, uint4{});
    }
    const int first_rest = thread + kChunks * kThreads; // the first chunk not in registers
    const uint32_t zero = args.width >> 31; // of a width above 0

    // 2. mean = Σ x / width and rstd = 1 / sqrt(Σ (x - mean)² / width + eps); at first those of the
    // thread's elements
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        sum += x_edges[k];
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        sum = add_chunk<kDType>(sum, x_rmem[k]); // nothing, where there is no chunk
    }
#pragma unroll 1
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        sum = add_chunk<kDType>(sum, __ldg(x_chunks_gmem + i));
    }
    const auto own = [&](int n) { return (n - thread + kThreads - 1) / kThreads; }; // of n
    const float n = own(n_chunks) * kChunk + own(n_edges);
    const float own_mean = !cfg.rms && n > 0.0f ? __fdividef(sum, n) : 0.0f; // but for rounding
    float squares = 0.0f, rest = 0.0f;
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        if (thread + k * kThreads < n_edges) { // else (0 - own_mean)² would be added
            rest += x_edges[k] - own_mean;
            squares = fmaf(x_edges[k] - own_mean, x_edges[k] - own_mean, squares);
        }
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        if (thread + k * kThreads < n_chunks) {
            squares = add_squares<kDType>(squares, rest, x_rmem[k], own_mean, zero & 1);
        }
    }
#pragma unroll 1
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        squares = add_squares<kDType>(squares, rest, __ldg(x_chunks_gmem + i), own_mean);
    }
    if constexpr (kDType != DType::FP32) { // `sum` is exact where the mean is far from 0
        rest = fmaf(-own_mean, n, sum);
    }
    // The lanes of a row count their means from that of the first, without its rounding.
    const float first_mean = __shfl_sync(0xffffffff, own_mean, 0);
    const float origin = fabsf(first_mean) < INFINITY ? first_mean : 0.0f;
    rest = rest == rest ? __fdividef(rest, n) : 0.0f;
    const float distance = !cfg.rms && n > 0.0f ? own_mean - origin + rest : 0.0f;
    const Moments part = block_moments<cfg.n_threads()>({n, distance, squares}, origin, smem);
    const Moments all = cluster_moments<kBlocks>(part, smem + cfg.n_warps, barrier);
    const float mean = cfg.rms ? 0.0f : all.mean;
    const float rstd = rsqrtf(__fdividef(all.M2, width) + args.eps);

    // 3. y = (x - mean) · rstd · weight + bias
    if (thread == 0 && args.mean != nullptr) {
        args.mean[row] = mean;
    }
    if (thread == 0 && args.rstd != nullptr) {
        args.rstd[row] = rstd;
    }
    if (!has_chunks_at(y_gmem, head) || !has_chunks_at(weight_gmem, head) ||
        !has_chunks_at(bias_gmem, head)) {
        // Neighbouring threads take neighbouring elements, as in n1, and read x again.
        for (int i = thread; i < width; i += kThreads) {
            const float x = to_float<kDType>(__ldg(x_gmem + i));
            y_gmem[i] = norm_element<kDType>(x, mean, rstd, weight_gmem, bias_gmem, i);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < kEdges; ++k) {
        const int n = thread + k * kThreads, i = edge(n);
        if (n < n_edges) {
            y_gmem[i] = norm_element<kDType>(x_edges[k], mean, rstd, weight_gmem, bias_gmem, i);
        }
    }
    const int first = head + thread * kChunk; // of the thread's chunks
    auto *y_chunks_gmem = reinterpret_cast<uint4 *>(y_gmem + head); // (n_chunks)
    // Of other dtypes ptxas spills registers.
    const bool is_usual = kDType == DType::BF16 && n_chunks >= kChunks * kThreads &&
                          weight_gmem != nullptr && (bias_gmem == nullptr) == cfg.rms;
#pragma unroll
    for (int k = 0; k < kChunks && is_usual; ++k) {
        const int i = thread + k * kThreads;
        store_gmem_16_streaming(
            y_chunks_gmem + i,
            norm_chunk<kDType, true, cfg.rms>(x_rmem[k], mean, rstd, weight_gmem, bias_gmem,
                                              first + k * kThreads * kChunk, zero & 4));
    }
#pragma unroll
    for (int k = 0; k < kChunks && !is_usual; ++k) {
        const int i = thread + k * kThreads;
        store_gmem_16_streaming_if(i < n_chunks, y_chunks_gmem + i,
                                   norm_chunk<kDType>(x_rmem[k], mean, rstd, weight_gmem, bias_gmem,
                                                      first + k * kThreads * kChunk, zero & 2,
                                                      i < n_chunks));
    }
#pragma unroll 1
    for (int i = first_rest; i < n_chunks; i += kThreads) {
        const uint4 chunk = __ldg(x_chunks_gmem + i);
        store_gmem_16_streaming(
            y_chunks_gmem + i,
            norm_chunk<kDType>(chunk, mean, rstd, weight_gmem, bias_gmem, head + i * kChunk));
    }
}

} // namespace a7
