#pragma once
// Step 1 of the append family: the base. Rotation and append in one launch.
//
// New keys and values of each sequence go behind those that it has in its cache, in rows of its own
// or in pages. Keys and queries are turned on the way. With the cosine and the sine of a position,
// a pair of columns (a, b) becomes
//   a' = a cos - b sin      b' = a sin + b cos
//
// The parts
//   1. A thread has one chunk of 16 bytes of a row of K, V or Q. A block has a token, and its
//      threads go through the heads of K, then of V, then of Q.
//   2. The place of a key follows from cache_seqlens and block_table, which each thread reads by
//      itself. A row without a place in the cache is not written; nothing else of it is touched.
//   3. A pair is two columns side by side, both in the thread's chunk, or one of each half of the
//      turned columns. Then the thread loads the chunk of the other half too, and stores its own.
//   4. Products are rounded before they are added up, as PyTorch's operators have it, so that the
//      bits are those of PyTorch.
//
// Why: PyTorch turns q and k by 16 operators each that launch a kernel, and 32 more find the places
// and write the rows: 64 launches for a step of decode, each over 1 µs in a CUDA graph and several
// outside. With 64 sequences, 8 heads of K, 32 of Q and a d_head of 128 in bf16, rows of a step
// have 64 · (2 · 8 + 32) · 256 B = 0.79 MB. Read and written, they take 0.5 µs at 3.35 TB/s:
// launches are all of a step's time.
//   The chunk of the other half is loaded by two threads, the second time from L1: up to twice the
// loads, and the same bytes of memory.
// Expected on an H100: 3 µs for this step in a CUDA graph, a launch and loads that wait for each
// other twice, 650 ns each (cache_seqlens, then block_table or tables); a tenth of PyTorch's time.
// 80% of a copy of as many bytes from 16384 new tokens on.
//
// benchmark:begin
// benchmark:end
// Verdict: kept. On an H200 2.8 us for a token of 16 sequences, 11.8 for 1024; torch.compile 8.6
// and 22.
//
// Phases: 1 the chunk, 2 its place, 3 rotation, 4 to memory.

#include "elements.cuh"
#include "kernels/append/arguments.cuh"
#include "memory.cuh"

namespace ka1 {

// Four values of a table in fp32, or in the dtype of the cache.
template <DType kDType>
__device__ __forceinline__ void load_table(float *rmem, const void *table_gmem, int64_t first,
                                           bool is_fp32) {
    if (is_fp32) {
        const auto *values_gmem = static_cast<const float *>(table_gmem) + first;
        const float4 values = __ldg(reinterpret_cast<const float4 *>(values_gmem));
        rmem[0] = values.x;
        rmem[1] = values.y;
        rmem[2] = values.z;
        rmem[3] = values.w;
    } else {
        const auto *values_gmem = static_cast<const Element *>(table_gmem) + first;
        const uint2 values = __ldg(reinterpret_cast<const uint2 *>(values_gmem));
        rmem[0] = to_float<kDType>(Element(values.x));
        rmem[1] = to_float<kDType>(Element(values.x >> 16));
        rmem[2] = to_float<kDType>(Element(values.y));
        rmem[3] = to_float<kDType>(Element(values.y >> 16));
    }
}

// a · c + b · s, each product rounded, so that no fused multiply-add takes its place.
__device__ __forceinline__ float rounded_sum(float a, float c, float b, float s) {
    return __fadd_rn(__fmul_rn(a, c), __fmul_rn(b, s));
}

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    append_kernel(const __grid_constant__ AppendKernelArgs args) {
    constexpr AppendKernelConfig cfg = Kernels::value;
    constexpr DType kDType = cfg.dtype;
    constexpr int kChunk = kChunkElements<kDType>;
    static_assert(kDType != DType::FP32, "a chunk is 8 elements");

    // 1. The chunk: with 2 heads of K and 16 chunks, thread 35 has chunk 3 of head 0 of V
    const int tokens = max(args.len_new, args.len_q);
    const int64_t sequence = blockIdx.x / unsigned(tokens);
    const int token = int(blockIdx.x % unsigned(tokens));
    const int thread = int(blockIdx.y) * cfg.n_threads() + int(threadIdx.x);
    const int chunks = args.d_head / kChunk; // of a row
    const int column = thread % chunks * kChunk;
    int head = thread / chunks; // of K, V and Q
    const bool is_q = head >= 2 * args.kv_heads, is_v = !is_q && head >= args.kv_heads;
    head -= is_q ? 2 * args.kv_heads : is_v ? args.kv_heads : 0;
    if (is_q && head >= args.heads || token >= (is_q ? args.len_q : args.len_new)) {
        return;
    }
    const TensorStrides &of_x = is_q ? args.q_strides : is_v ? args.v_strides : args.k_strides;
    const auto *x_gmem = static_cast<const Element *>(is_q   ? args.q
                                                      : is_v ? args.v
                                                             : args.k) +
                         sequence * of_x.batch + token * of_x.row + head * of_x.head; // (d_head)
    uint4 x_rmem = __ldg(reinterpret_cast<const uint4 *>(x_gmem + column));

    // 2. Its place: key `length + token` of the sequence, in a page or a row
    const int length = __ldg(args.cache_seqlens + sequence);
    int64_t row = sequence, slot = token;
    if (!is_q) {
        const int64_t key = int64_t(length) + token; // beyond 2^31, if the length is wrong
        if (key < 0 || key >= args.room) {
            return;
        }
        slot = key;
        if (args.page_size > 0) {
            const int block = int(key) / args.page_size;
            row = __ldg(args.block_table + sequence * args.block_table_stride + block);
            slot = int(key) - block * args.page_size;
        } else if (args.cache_batch_idx != nullptr) {
            row = __ldg(args.cache_batch_idx + sequence);
        }
    }

    // 3. Rotation: a cos - b sin, a sin + b cos
    if (!is_v && column < args.rotary_dim) {
        const int begin =
            args.rotary_seqlens == nullptr ? length : __ldg(args.rotary_seqlens + sequence);
        const int behind = is_q && !args.in_order ? 0 : token;
        const int64_t position =
            min(max(int64_t(begin) + behind, int64_t(0)), int64_t(args.positions - 1));
        const int half = args.rotary_dim / 2;
        const bool is_second = column >= half; // of the halves
        const int pair = args.interleaved ? column / 2 : column - (is_second ? half : 0);
        float own_rmem[kChunk], cos_rmem[kChunk], sin_rmem[kChunk];
        unpack_chunk<kDType>(own_rmem, x_rmem);
        const int64_t cos_first = position * args.cos_stride + pair;
        const int64_t sin_first = position * args.sin_stride + pair;
        load_table<kDType>(cos_rmem, args.cos, cos_first, args.fp32_tables);
        load_table<kDType>(sin_rmem, args.sin, sin_first, args.fp32_tables);
        if (args.interleaved) {
#pragma unroll
            for (int i = 0; i < kChunk / 2; ++i) {
                const float a = own_rmem[2 * i], b = own_rmem[2 * i + 1];
                own_rmem[2 * i] = rounded_sum(a, cos_rmem[i], -b, sin_rmem[i]);
                own_rmem[2 * i + 1] = rounded_sum(a, sin_rmem[i], b, cos_rmem[i]);
            }
        } else {
            load_table<kDType>(cos_rmem + 4, args.cos, cos_first + 4, args.fp32_tables);
            load_table<kDType>(sin_rmem + 4, args.sin, sin_first + 4, args.fp32_tables);
            const auto *other_gmem = x_gmem + column + (is_second ? -half : half);
            float other_rmem[kChunk];
            unpack_chunk<kDType>(other_rmem, __ldg(reinterpret_cast<const uint4 *>(other_gmem)));
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                const float other = is_second ? other_rmem[i] : -other_rmem[i];
                own_rmem[i] = rounded_sum(own_rmem[i], cos_rmem[i], other, sin_rmem[i]);
            }
        }
        x_rmem = pack_chunk<kDType>(own_rmem);
    }

    // 4. To memory. Only here the entry of block_table is waited for.
    if (!is_q && (row < 0 || row >= args.rows)) {
        return;
    }
    const TensorStrides &of_y = is_q   ? args.q_rotated_strides
                                : is_v ? args.v_cache_strides
                                       : args.k_cache_strides;
    auto *y_gmem = static_cast<Element *>(is_q   ? args.q_rotated
                                          : is_v ? args.v_cache
                                                 : args.k_cache) +
                   row * of_y.batch + slot * of_y.row + head * of_y.head; // (d_head)
    store_gmem_16(y_gmem + column, x_rmem);
}

} // namespace ka1
