#pragma once
// wgmma: the four warps of a warpgroup multiply 64 rows, asynchronously. B is a tile in shared
// memory in the 128-byte swizzle, named by a descriptor; A is such a tile too, or is in registers.
//
// Row r of the accumulators D and of A belongs to warp r / 16. Of the 16 rows of its warp, lane
// 4g + t has, in columns 8n + 2t and 8n + 2t + 1,
//   D[4n], D[4n + 1]: row g; D[4n + 2], D[4n + 3]: row g + 8.
// Two neighbouring n, rounded to 16 bits, form A of 16 columns (PTX ISA, "Register Fragments for
// wgmma.mma_async.m64nNk16").

#include "flash_attention.cuh"

// The low word of a descriptor (PTX ISA, "Matrix Descriptor Format"). It holds the address and the
// leading offset in units of 16 bytes. leading_bytes is the distance from 64 columns of B to the
// next 64, and counts only if the rows of B are contiguous, as in V. To move the address, add
// bytes / 16.
__device__ __forceinline__ uint32_t wgmma_descriptor(uint32_t tile_smem,
                                                     uint32_t leading_bytes = 0) {
    return (tile_smem & 0x3ffff) >> 4 | leading_bytes >> 4 << 16;
}

// A value that all lanes have already, in a form that ptxas can keep in a uniform register.
__device__ __forceinline__ uint32_t warp_uniform(uint32_t value) {
    return __shfl_sync(0xffffffff, value, 0);
}

// The high word: 1024 bytes from 8 rows to the next 8, and the 128-byte swizzle.
#define WGMMA_HIGH "0x40000040"

// Orders register accesses before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes the group of all wgmma since the last commit.
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the kPending youngest groups run.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler moves no access to these registers across a hold. It does not know how long wgmma
// use the registers, so a hold stands before the fence and after the wait.
template <int kCount>
__device__ __forceinline__ void hold(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        asm volatile("" : "+f"(registers[i])::"memory");
    }
}
template <int kSteps>
__device__ __forceinline__ void hold(uint32_t (&registers)[kSteps][4]) {
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) {
        asm volatile("" : "+r"(registers[i / 4][i % 4])::"memory");
    }
}

// The operands %0 … of 32 to 128 accumulators, as text and as constraints.
#define TEN(tens)                                                                           \
    "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens \
    "6, %" #tens "7, %" #tens "8, %" #tens "9"
#define NAMES_32 TEN() ", " TEN(1) ", " TEN(2) ", %30, %31"
#define NAMES_40 TEN() ", " TEN(1) ", " TEN(2) ", " TEN(3)
#define NAMES_48 NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64 NAMES_40 ", " TEN(4) ", " TEN(5) ", %60, %61, %62, %63"
#define NAMES_80 NAMES_40 ", " TEN(4) ", " TEN(5) ", " TEN(6) ", " TEN(7)
#define NAMES_88 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_96 NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_128                                                                                 \
    NAMES_96 ", %96, %97, %98, %99, " TEN(10) ", " TEN(11) ", %120, %121, %122, %123, %124, %125" \
                                                           ", %126, %127"

#define FOUR(r, i) "+f"(r[i]), "+f"(r[i + 1]), "+f"(r[i + 2]), "+f"(r[i + 3])
#define EIGHT(r, i) FOUR(r, i), FOUR(r, i + 4)
#define FLOATS_32(r) EIGHT(r, 0), EIGHT(r, 8), EIGHT(r, 16), EIGHT(r, 24)
#define FLOATS_40(r) FLOATS_32(r), EIGHT(r, 32)
#define FLOATS_48(r) FLOATS_40(r), EIGHT(r, 40)
#define FLOATS_64(r) FLOATS_48(r), EIGHT(r, 48), EIGHT(r, 56)
#define FLOATS_80(r) FLOATS_64(r), EIGHT(r, 64), EIGHT(r, 72)
#define FLOATS_88(r) FLOATS_80(r), EIGHT(r, 80)
#define FLOATS_96(r) FLOATS_88(r), EIGHT(r, 88)
#define FLOATS_128(r) FLOATS_96(r), EIGHT(r, 96), EIGHT(r, 104), EIGHT(r, 112), EIGHT(r, 120)

// n: columns. count: accumulators. a, b, …: the operands after the accumulators, as %number.
#define WGMMA_SS(n, count, type, a, b, accumulate, transposed)                            \
    asm volatile("{\n\t.reg .pred accumulates;\n\t.reg .b64 A, B;\n\t"                    \
                 "setp.ne.b32 accumulates, " accumulate ", 0;\n\t"                        \
                 "mov.b64 A, {" a ", " WGMMA_HIGH "};\n\tmov.b64 B, {" b ", " WGMMA_HIGH  \
                 "};\n\twgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type    \
                 " {" NAMES_##count "}, A, B, accumulates, 1, 1, 0, " transposed ";\n\t}" \
                 : FLOATS_##count(D)                                                      \
                 : "r"(A), "r"(B), "r"(int(accumulate_)), "n"(int(kTransposed))           \
                 : "memory")
#define WGMMA_RS(n, count, type, a, b, c, d, B_, accumulate)                                 \
    asm volatile("{\n\t.reg .pred accumulates;\n\t.reg .b64 B;\n\t"                          \
                 "setp.ne.b32 accumulates, " accumulate ", 0;\n\t"                           \
                 "mov.b64 B, {" B_ ", " WGMMA_HIGH "};\n\t"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type             \
                 " {" NAMES_##count "}, {" a ", " b ", " c ", " d                            \
                                    "}, B, accumulates, 1, 1, 1;\n\t}"                       \
                 : FLOATS_##count(D)                                                         \
                 : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(B), "r"(int(accumulate_)) \
                 : "memory")

// D (64, 2 · count) = A (64, 16) @ B (16, 2 · count), + D if accumulate_. kTransposed: the rows of
// B are contiguous in memory (V), not its columns (K^T).
#define DEFINE_WGMMA_SS(n, count, a, b, accumulate, transposed)                      \
    template <DType kDType, bool kTransposed = false>                                \
    __device__ __forceinline__ void wgmma(float (&D)[count], uint32_t A, uint32_t B, \
                                          bool accumulate_) {                        \
        if constexpr (kDType == DType::FP16) {                                       \
            WGMMA_SS(n, count, "f16", a, b, accumulate, transposed);                 \
        } else {                                                                     \
            WGMMA_SS(n, count, "bf16", a, b, accumulate, transposed);                \
        }                                                                            \
    }
DEFINE_WGMMA_SS(64, 32, "%32", "%33", "%34", "%35")
DEFINE_WGMMA_SS(80, 40, "%40", "%41", "%42", "%43")
DEFINE_WGMMA_SS(96, 48, "%48", "%49", "%50", "%51")
DEFINE_WGMMA_SS(128, 64, "%64", "%65", "%66", "%67")
DEFINE_WGMMA_SS(160, 80, "%80", "%81", "%82", "%83")
DEFINE_WGMMA_SS(176, 88, "%88", "%89", "%90", "%91")

// The same with A in registers, and with B transposed as above: P @ V.
#define DEFINE_WGMMA_RS(n, count, a, b, c, d, B_, accumulate)                                    \
    template <DType kDType>                                                                      \
    __device__ __forceinline__ void wgmma(float (&D)[count], const uint32_t (&A)[4], uint32_t B, \
                                          bool accumulate_) {                                    \
        if constexpr (kDType == DType::FP16) {                                                   \
            WGMMA_RS(n, count, "f16", a, b, c, d, B_, accumulate);                               \
        } else {                                                                                 \
            WGMMA_RS(n, count, "bf16", a, b, c, d, B_, accumulate);                              \
        }                                                                                        \
    }
DEFINE_WGMMA_RS(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
DEFINE_WGMMA_RS(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
DEFINE_WGMMA_RS(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
DEFINE_WGMMA_RS(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
DEFINE_WGMMA_RS(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

#undef WGMMA_HIGH
#undef TEN
#undef NAMES_32
#undef NAMES_40
#undef NAMES_48
#undef NAMES_64
#undef NAMES_80
#undef NAMES_88
#undef NAMES_96
#undef NAMES_128
#undef FOUR
#undef EIGHT
#undef FLOATS_32
#undef FLOATS_40
#undef FLOATS_48
#undef FLOATS_64
#undef FLOATS_80
#undef FLOATS_88
#undef FLOATS_96
#undef FLOATS_128
#undef WGMMA_SS
#undef WGMMA_RS
#undef DEFINE_WGMMA_SS
#undef DEFINE_WGMMA_RS
