#pragma once
// The tensor-core instruction of compute capability 8.0.

#include "flash_attention.cuh"

constexpr int kMmaM = 16;
constexpr int kMmaN = 8;
constexpr int kMmaK = 16;

// D (16 x 8, fp32) += A (16 x 16) · B (16 x 8), executed by the whole warp. Lane 4g + t holds:
//   D[0], D[1]: row g,     columns 2t, 2t + 1        A[0]: row g,     columns 2t, 2t + 1
//   D[2], D[3]: row g + 8, columns 2t, 2t + 1        A[1]: row g + 8, columns 2t, 2t + 1
//   b0: column g, rows 2t, 2t + 1                    A[2]: row g,     columns 2t + 8, 2t + 9
//   b1: column g, rows 2t + 8, 2t + 9                A[3]: row g + 8, columns 2t + 8, 2t + 9
// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
template <DType kDType>
__device__ __forceinline__ void mma_m16n8k16(float (&D)[4], const uint32_t (&A)[4], uint32_t b0,
                                             uint32_t b1) {
    if constexpr (kDType == DType::FP16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(D[0]), "+f"(D[1]), "+f"(D[2]), "+f"(D[3])
            : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(D[0]), "+f"(D[1]), "+f"(D[2]), "+f"(D[3])
            : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(b0), "r"(b1));
    }
}
