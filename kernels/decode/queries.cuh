#pragma once
// The queries of a thread block, the keys that they see, and their place in the cache.
//
// Queries that share keys are rows of one tile: row r of a head of K is query r / heads_per_kv of
// head r % heads_per_kv of the group.

#include "elements.cuh"
#include "kernels/decode/arguments.cuh"

constexpr int kChunk = kChunkElements<DType::BF16>; // elements in 16 bytes

__device__ __forceinline__ int keys_of(int sequence, const DecodeKernelArgs &args) {
    const int length = args.cache_seqlens ? args.cache_seqlens[sequence] : args.len_k;
    return min(max(length, 0), args.len_k);
}

// The rows of a tile, in a sequence of len_k keys. A sequence has tiles of rows of all heads of K.
template <int B_r>
struct Queries {
    int sequence, kv_head, first_row, n_rows; // of all rows of the head of K
    int len_k;
    int heads_per_kv, own; // query i stands at key i + own

    // Of the thread block, in a grid (batch, tiles, ...).
    __device__ __forceinline__ explicit Queries(const DecodeKernelArgs &args)
        : Queries(args, blockIdx.x, blockIdx.y) {}
    __device__ __forceinline__ Queries(const DecodeKernelArgs &args, int sequence, int tile)
        : sequence(sequence) {
        kv_head = tile % args.kv_heads;
        first_row = tile / args.kv_heads * B_r;
        n_rows = args.len_q * args.heads_per_kv;
        len_k = keys_of(sequence, args);
        heads_per_kv = args.heads_per_kv;
        own = len_k - args.len_q;
    }

    __device__ __forceinline__ bool has(int row) const { return first_row + row < n_rows; }
    __device__ __forceinline__ int query(int row) const { return (first_row + row) / heads_per_kv; }
    __device__ __forceinline__ int head(int row) const {
        return kv_head * heads_per_kv + (first_row + row) % heads_per_kv;
    }

    // The keys that a row sees, and those that some row of the tile sees.
    __device__ __forceinline__ int begin_of(int row, const DecodeKernelArgs &args) const {
        return max(query(row) + own - args.window_left, 0);
    }
    __device__ __forceinline__ int end_of(int row, const DecodeKernelArgs &args) const {
        return min(query(row) + own + args.window_right + 1, len_k);
    }
    __device__ __forceinline__ int last_row() const { return min(B_r, n_rows - first_row) - 1; }
    __device__ __forceinline__ int begin(const DecodeKernelArgs &args) const {
        return begin_of(0, args);
    }
    __device__ __forceinline__ int end(const DecodeKernelArgs &args) const {
        return end_of(last_row(), args);
    }
    // Whether every row sees all `count` keys from `key` on.
    __device__ __forceinline__ bool see_all(int key, int count,
                                            const DecodeKernelArgs &args) const {
        return key >= begin_of(last_row(), args) && key + count <= end_of(0, args);
    }

    // The sequence's row of the cache.
    __device__ __forceinline__ int cache_row(const DecodeKernelArgs &args) const {
        return args.cache_batch_idx ? args.cache_batch_idx[sequence] : sequence;
    }
    // The first key of the head in that row.
    __device__ __forceinline__ const Element *first_key(const void *X, const TensorStrides &strides,
                                                        const DecodeKernelArgs &args) const {
        return static_cast<const Element *>(X) + cache_row(args) * strides.batch +
               kv_head * strides.head;
    }
    // Eight elements of a row of Q from `column` on; zeros of a row that does not exist.
    __device__ __forceinline__ uint4 load_Q(int row, int column,
                                            const DecodeKernelArgs &args) const {
        if (!has(row)) {
            return {0, 0, 0, 0};
        }
        const Element *Q_gmem = static_cast<const Element *>(args.Q) +
                                sequence * args.Q_strides.batch + query(row) * args.Q_strides.row +
                                head(row) * args.Q_strides.head;
        return *reinterpret_cast<const uint4 *>(Q_gmem + column);
    }
    // A row of O.
    __device__ __forceinline__ Element *O(int row, const DecodeKernelArgs &args) const {
        return static_cast<Element *>(args.O) + sequence * args.O_strides.batch +
               query(row) * args.O_strides.row + head(row) * args.O_strides.head;
    }
};
