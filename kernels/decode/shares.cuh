#pragma once
// Equal shares of the work for all thread blocks, which each of them finds on the device.
//
// A unit of work is a block of keys for a tile of queries. Units are counted along the blocks of a
// tile, the tiles of a sequence, and the sequences. All tiles of a sequence have the blocks that
// some query of it sees, or one if none sees a key, so that its outputs are written.

#include "kernels/decode/arguments.cuh"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/sums.cuh"

constexpr int kLeastUnits = 2; // of a share, so that no part is larger than the keys that it is of

template <int B_r, int B_c>
struct Shares {
    const DecodeKernelArgs &args;
    int tiles; // of a sequence
    int units; // of all sequences
    int share; // units of a thread block

    // By all lanes of a warp, as every other function that is not about one sequence.
    __device__ __forceinline__ explicit Shares(const DecodeKernelArgs &args) : args(args) {
        tiles = (args.len_q * args.heads_per_kv + B_r - 1) / B_r * args.kv_heads;
        units = 0;
        for (int sequence = threadIdx.x % 32; sequence < args.batch; sequence += 32) {
            units += tiles * blocks_of(sequence);
        }
        units = __reduce_add_sync(0xffffffff, units);
        share = max((units + int(gridDim.x) - 1) / int(gridDim.x), kLeastUnits);
    }

    __device__ __forceinline__ int first_key(int len_k) const {
        return max(len_k - args.len_q - args.window_left, 0) / B_c * B_c;
    }
    __device__ __forceinline__ int blocks_of(int sequence) const {
        const int len_k = keys_of(sequence, args);
        return max((len_k - first_key(len_k) + B_c - 1) / B_c, 1);
    }
};

// A unit of a share, and the way to the next.
template <int B_r, int B_c>
struct Unit {
    const Shares<B_r, B_c> &shares;
    int left; // units from here to the end of the share
    int sequence, tile; // of the sequence
    int block, blocks; // of the tile
    bool is_first = true; // of the share
    Queries<B_r> queries;

    // The unit of this number, the first of at most `left`.
    __device__ __forceinline__ Unit(const Shares<B_r, B_c> &shares, int number, int left)
        : shares(shares), left(min(left, shares.units - number)), sequence(0), tile(0), block(0),
          blocks(1), queries(shares.args, 0, 0) {
        const int lane = threadIdx.x % 32;
        for (int first = 0; exists() && first < shares.args.batch; first += 32) {
            const bool has = first + lane < shares.args.batch;
            const int own_blocks = has ? shares.blocks_of(first + lane) : 0;
            int end = shares.tiles * own_blocks; // the sum of this sequence and those before
#pragma unroll
            for (int lanes = 1; lanes < 32; lanes *= 2) {
                const int before = __shfl_up_sync(0xffffffff, end, lanes);
                end += lane >= lanes ? before : 0;
            }
            const uint32_t behind = __ballot_sync(0xffffffff, end > number);
            const int found = behind ? __ffs(behind) - 1 : 31;
            const int begin = __shfl_sync(0xffffffff, end - shares.tiles * own_blocks, found);
            if (behind) {
                blocks = __shfl_sync(0xffffffff, own_blocks, found);
                sequence = first + found;
                tile = (number - begin) / blocks;
                block = (number - begin) % blocks;
                queries = Queries<B_r>(shares.args, sequence, tile);
                break;
            }
            number -= __shfl_sync(0xffffffff, end, 31);
        }
    }

    __device__ __forceinline__ bool exists() const { return left > 0; }
    // Whether it is the first or the last of its tile in this share.
    __device__ __forceinline__ bool begins() const { return is_first || block == 0; }
    __device__ __forceinline__ bool ends() const { return left == 1 || block == blocks - 1; }
    __device__ __forceinline__ int key() const {
        return shares.first_key(queries.len_k) + block * B_c;
    }
    // Parts of keys are numbered by thread block and tile: those of a tile follow each other, and
    // no two have one number.
    __device__ __forceinline__ int part() const {
        return blockIdx.x + sequence * shares.tiles + tile;
    }
    __device__ __forceinline__ void advance() {
        --left;
        is_first = false;
        if (++block == blocks && exists()) {
            block = 0;
            if (++tile == shares.tiles) {
                tile = 0;
                blocks = shares.blocks_of(++sequence);
            }
            queries = Queries<B_r>(shares.args, sequence, tile);
        }
    }
};

constexpr int kGroups = 4; // of threads, which add up every fourth part each
constexpr int kCombineThreads = kGroups * kWarpgroup;

// O and LSE of a tile that lies in several parts, by kCombineThreads threads. Reading many parts
// one after the other would take a latency of memory each.
template <DType kDType, int B_r, int kDHead>
__device__ __forceinline__ void combine(const Sums<B_r, kDHead> &parts, const Queries<B_r> &queries,
                                        const DecodeKernelArgs &args) {
    constexpr int kChunks = kDHead / kChunk;
    __shared__ float2 m_and_l[B_r];
    __shared__ float O[kGroups][kWarpgroup][kChunk + 1]; // no two lanes share a bank
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // a warp has a row, and its lanes a part each
    for (int row = warp; row < B_r; row += kCombineThreads / 32) {
        float m = -INFINITY, l = 0;
        for (int part = lane; part < parts.parts; part += 32) {
            m = fmaxf(m, parts.m(part, row));
        }
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, lanes));
        }
        for (int part = lane; part < parts.parts; part += 32) {
            l += parts.l(part, row) * parts.weight(part, row, m);
        }
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            l += __shfl_xor_sync(0xffffffff, l, lanes);
        }
        if (lane == 0) {
            m_and_l[row] = {m, l};
        }
    }
    __syncthreads(); // all rows are known

    // a group has every fourth part, and its threads eight elements of a row each
    const int group = threadIdx.x / kWarpgroup, own = threadIdx.x % kWarpgroup;
    for (int first = 0; first < B_r * kChunks; first += kWarpgroup) {
        const int row = (first + own) / kChunks, column = (first + own) % kChunks * kChunk;
        float O_rmem[kChunk] = {};
        if (row < B_r) {
            parts.add_up(O_rmem, row, column, m_and_l[row].x, group, kGroups);
        }
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            O[group][own][i] = O_rmem[i];
        }
        __syncthreads(); // all groups are done
        if (group == 0 && row < B_r && queries.has(row)) {
            const float factor = finish_row<kDType>(m_and_l[row], queries, row, column == 0, args);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                O_rmem[i] = (O[0][own][i] + O[1][own][i] + O[2][own][i] + O[3][own][i]) * factor;
            }
            store_gmem_16(queries.O(row, args) + column, pack_chunk<kDType>(O_rmem));
        }
        __syncthreads(); // what they have added up has been read
    }
}
