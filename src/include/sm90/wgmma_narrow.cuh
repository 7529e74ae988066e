#pragma once
// wgmma with few columns, for tiles of a few queries: D (64, 8 to 64) = A @ B, with both operands
// in shared memory in the 128-byte swizzle. See wgmma.cuh for descriptors, fences and waits.
//
// kTransposed: the rows of A are contiguous in memory, not its columns. So A may be V^T, where V
// has a row per key: the 64 columns of a piece are the 64 rows of A, and the descriptor moves by
// row_step from 16 keys to the next 16.

#include "flash_attention.cuh"
#include "sm90/wgmma.cuh"

#define WGMMA_HIGH "0x40000040"
#define FOUR(i) "+f"(D[i]), "+f"(D[i + 1]), "+f"(D[i + 2]), "+f"(D[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define WGMMA_NARROW(n, type, names, floats, A_, B_, accumulate, transposed)                      \
    asm volatile("{\n\t.reg .pred accumulates;\n\t.reg .b64 A, B;\n\t"                            \
                 "setp.ne.b32 accumulates, " accumulate ", 0;\n\t"                                \
                 "mov.b64 A, {" A_ ", " WGMMA_HIGH "};\n\tmov.b64 B, {" B_ ", " WGMMA_HIGH        \
                 "};\n\twgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" names \
                 "}, A, B, accumulates, 1, 1, " transposed ", 0;\n\t}"                            \
                 : floats                                                                         \
                 : "r"(A), "r"(B), "r"(int(accumulate_)), "n"(int(kTransposed))                   \
                 : "memory")

// D (64, n) = A (64, 16) @ B (16, n), + D if accumulate_. The columns of B are contiguous.
#define DEFINE_WGMMA_NARROW(n, count, names, floats, A_, B_, accumulate, transposed)           \
    template <DType kDType, bool kTransposed = false>                                          \
    __device__ __forceinline__ void wgmma_narrow(float (&D)[count], uint32_t A, uint32_t B,    \
                                                 bool accumulate_) {                           \
        if constexpr (kDType == DType::FP16) {                                                 \
            WGMMA_NARROW(n, "f16", names, WGMMA_LIST floats, A_, B_, accumulate, transposed);  \
        } else {                                                                               \
            WGMMA_NARROW(n, "bf16", names, WGMMA_LIST floats, A_, B_, accumulate, transposed); \
        }                                                                                      \
    }
#define WGMMA_LIST(...) __VA_ARGS__
#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 NAMES_4 ", %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32                                                                        \
    NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
             "%30, %31"
DEFINE_WGMMA_NARROW(8, 4, NAMES_4, (FOUR(0)), "%4", "%5", "%6", "%7")
DEFINE_WGMMA_NARROW(16, 8, NAMES_8, (EIGHT(0)), "%8", "%9", "%10", "%11")
DEFINE_WGMMA_NARROW(32, 16, NAMES_16, (EIGHT(0), EIGHT(8)), "%16", "%17", "%18", "%19")
DEFINE_WGMMA_NARROW(64, 32, NAMES_32, (EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)), "%32", "%33",
                    "%34", "%35")

#undef WGMMA_HIGH
#undef FOUR
#undef EIGHT
#undef WGMMA_NARROW
#undef DEFINE_WGMMA_NARROW
#undef WGMMA_LIST
#undef NAMES_4
#undef NAMES_8
#undef NAMES_16
#undef NAMES_32
