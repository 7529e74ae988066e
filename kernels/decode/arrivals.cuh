#pragma once
// The last thread block to store a part of a tile adds up all of its parts.

#include "kernels/decode/queries.cuh"
#include "kernels/decode/scores.cuh"
#include "kernels/decode/sums.cuh"
#include "sm90/roles.cuh"

// Counts the thread blocks that have stored one of `parts` parts, by the threads of a warpgroup.
// Returns whether this one is the last, which may read the parts of all. The counter is 0 again
// then: atom.inc wraps to 0 at the last part. `told`: a word of shared memory that the warpgroup
// exchanges.
__device__ __forceinline__ bool is_last_to_arrive(int *counter, int parts, float *told,
                                                  int barrier) {
    named_sync(barrier, kWarpgroup); // all have stored their values of the part
    if (threadIdx.x % kWarpgroup == 0) {
        uint32_t before;
        asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                     : "=r"(before)
                     : "l"(counter), "r"(parts - 1)
                     : "memory");
        *told = __uint_as_float(before);
    }
    named_sync(barrier, kWarpgroup); // a thread reads what the first has seen
    const bool is_last = __float_as_uint(*told) == uint32_t(parts - 1);
    named_sync(barrier, kWarpgroup); // all have read it, before the warpgroup exchanges more
    return is_last;
}

// Parts whose loads of O are in flight together: as many as there are registers for.
template <int B_r, int kDHead>
constexpr int kPartsAtOnce = B_r <= 16 && kDHead <= 128 ? 8 : 4;

// O and LSE of a tile that lies in several parts, by the threads of a warpgroup: sums → global. The
// order of each sum is that of the parts, whichever came last. `factors`: shared memory (4, B_r)
// that the warpgroup exchanges.
template <DType kDType, int B_r, int kDHead>
__device__ __forceinline__ void store_sum_of_parts(const Sums<B_r, kDHead> &parts,
                                                   const Queries<B_r> &queries, float *factors,
                                                   int barrier, const DecodeKernelArgs &args) {
    constexpr int kChunks = kDHead / kChunk, kAtOnce = kPartsAtOnce<B_r, kDHead>;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;

    // a warp has every fourth row, and its lanes a part each; a loop that mostly runs once is not
    // unrolled, since instructions that run once per launch come from L2
    const auto factor = [](float m, float largest) {
        return m == -INFINITY ? 0 : exp2_approx(m - largest);
    };
#pragma unroll
    for (int first = 0; first < B_r; first += 4) {
        const int row = first + warp;
        float own_m = -INFINITY, l = 0; // of this lane's parts
#pragma unroll 1
        for (int part = lane; part < parts.parts; part += 32) {
            const float part_m = parts.m(part, row), part_l = parts.l(part, row);
            const float new_m = fmaxf(own_m, part_m);
            l = l * factor(own_m, new_m) + part_l * factor(part_m, new_m);
            own_m = new_m;
        }
        float m = own_m;
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, lanes));
        }
        l *= factor(own_m, m);
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            l += __shfl_xor_sync(0xffffffff, l, lanes);
        }
        if (lane == 0) {
            factors[row] = m;
            factors[B_r + row] = l;
        }
    }
    named_sync(barrier, kWarpgroup); // m and l of all rows are known

    // a thread has eight elements of a row
#pragma unroll 1
    for (int i = threadIdx.x % kWarpgroup; i < B_r * kChunks; i += kWarpgroup) {
        const int row = i / kChunks, column = i % kChunks * kChunk;
        const float2 m_and_l = {factors[row], factors[B_r + row]};
        float O_rmem[kChunk] = {};
#pragma unroll 1
        for (int first = 0; first < parts.parts; first += kAtOnce) {
            float4 own[kAtOnce][2];
            float weights[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int part = min(first + j, parts.parts - 1);
                const auto *O = reinterpret_cast<const float4 *>(parts.O(part, row) + column);
                own[j][0] = O[0];
                own[j][1] = O[1];
                weights[j] = parts.weight(part, row, m_and_l.x);
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const float weight = first + j < parts.parts ? weights[j] : 0;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    O_rmem[4 * half] = fmaf(own[j][half].x, weight, O_rmem[4 * half]);
                    O_rmem[4 * half + 1] = fmaf(own[j][half].y, weight, O_rmem[4 * half + 1]);
                    O_rmem[4 * half + 2] = fmaf(own[j][half].z, weight, O_rmem[4 * half + 2]);
                    O_rmem[4 * half + 3] = fmaf(own[j][half].w, weight, O_rmem[4 * half + 3]);
                }
            }
        }
        if (queries.has(row)) {
            const float over_l = finish_row<kDType>(m_and_l, queries, row, column == 0, args);
#pragma unroll
            for (int j = 0; j < kChunk; ++j) {
                O_rmem[j] *= over_l;
            }
            store_gmem_16(queries.O(row, args) + column, pack_chunk<kDType>(O_rmem));
        }
    }
}
