#pragma once
// Shared memory to fragments.

#include <cstdint>

// Loads four 8 x 8 matrices of 16-bit elements, executed by the whole warp. Lanes 8i … 8i + 7 give
// the addresses of the eight rows of matrix i (16 bytes each); lane 4g + t receives in R[i]
// elements 2t and 2t + 1 of row g. PTX ISA, "ldmatrix". Volatile and with a memory clobber, because
// other threads write what it reads: it must stay between its barriers.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&R)[4], uint32_t row_smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(R[0]), "=r"(R[1]), "=r"(R[2]), "=r"(R[3])
                 : "r"(row_smem)
                 : "memory");
}

// The same load with each matrix transposed: lane 4g + t receives elements g of rows 2t and 2t + 1.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&R)[4], uint32_t row_smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(R[0]), "=r"(R[1]), "=r"(R[2]), "=r"(R[3])
                 : "r"(row_smem)
                 : "memory");
}
