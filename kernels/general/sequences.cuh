#pragma once
// Tiles of sequences of various lengths, which lie one after the other.

#include "kernels/general/arguments.cuh"
#include "memory.cuh"
#include "sm90/arguments.cuh"
#include "sm90/tma.cuh"

// A tile of one of several sequences that lie one after the other. Its rows are counted so that the
// sequence's queries and keys end where those of the tensors do: of 1000 rows in all a sequence of
// rows 300 … 399 has rows 900 … 999. So all edges but the first key are those of the arguments. The
// tensor maps begin as many rows before the tensors as these have, and the distance from one of
// their batches to the next is a row: the batch of a place is the number of the row behind the
// sequence's last. Here that is 400, and row 900 of batch 400 is row 300 of the tensor.
struct SequencePlace : TilePlace {
    int first_key = 0, keys_batch = 0;
};
__device__ __forceinline__ TilePlace keys_of(const SequencePlace &place,
                                             const GeneralKernelArgs &args, int n = 0) {
    return {place.first_key + n, place.head / args.heads_per_kv, place.keys_batch};
}
__device__ __forceinline__ int64_t row_0(const SequencePlace &, int batch, int rows,
                                         const TensorStrides &strides) {
    return (int64_t(batch) - rows) * strides.row;
}
__device__ __forceinline__ int64_t lse_0(const SequencePlace &place, const HopperKernelArgs &args) {
    return (int64_t(place.head) - 1) * args.len_q + place.batch;
}

// Sends a place without its keys_batch, as in sm90/cluster.cuh.
__device__ __forceinline__ void send_place(uint32_t dst_smem, const SequencePlace &place,
                                           uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                 "[%0], {%2, %3, %4, %5}, [%1];" ::"r"(dst_smem),
                 "r"(barrier), "r"(place.row), "r"(place.head), "r"(place.batch),
                 "r"(place.first_key)
                 : "memory");
}

// The tile in a slot. Sequence n has the slots from begin / B_r + n on: as many as its queries
// need, or one more, in which there is no tile (row -1). With B_r 128 and begins 0, 100 and 400
// these are slot 0, and slots 1 to 4. Begins that are no rows of the tensors, or fall, give no tile
// outside.
template <int B_r, bool kLastFirst>
__device__ __forceinline__ SequencePlace find_tile(int slot, int head,
                                                   const GeneralKernelArgs &args) {
    int n = 0, end = args.n_sequences; // the last n whose slots begin with this one or before it
    while (end - n > 1) {
        const int middle = n + (end - n) / 2;
        (args.cu_seqlens_q[middle] / B_r + middle <= slot ? n : end) = middle;
    }
    auto row = [](int begin, int least, int rows) { return min(max(begin, least), rows); };
    const int q_begin = row(args.cu_seqlens_q[n], 0, args.len_q);
    const int q_end = row(args.cu_seqlens_q[n + 1], q_begin, args.len_q);
    const int k_begin = row(args.cu_seqlens_k[n], 0, args.len_k);
    const int k_end = row(args.cu_seqlens_k[n + 1], k_begin, args.len_k);
    const int number = slot - n - q_begin / B_r, tiles = (q_end - q_begin + B_r - 1) / B_r;
    if (number < 0 || number >= tiles) {
        return {{-1}};
    }
    const int first_query = q_begin + (kLastFirst ? tiles - 1 - number : number) * B_r;
    return {{args.len_q - q_end + first_query, head, q_end}, args.len_k - k_end + k_begin, k_end};
}
