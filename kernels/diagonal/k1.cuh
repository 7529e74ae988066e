#pragma once
// Step 1 of the diagonal family: the base. C = diag(a) @ B, with a thread per element.
//
// A matrix product with diag(a) multiplies every element of B by one number that is not 0 and by
// rows - 1 zeros. Without the zeros it is a scaling of rows: C[i, j] = a[i] · B[i, j].
//
// The parts
//   1. A thread block takes a piece of one row, as many elements as it has threads. Neighbouring
//      threads load and store neighbouring elements, of fp32, bf16 or fp16.
//   2. The product is fp32, which holds the product of two numbers of 16 bits exactly. It is
//      rounded once.
//   3. The row is the block's number over the pieces of a row, one division by 32 bits per thread.
//
// Why it is slow, in bf16: 4 bytes per element are needed, 2 read and 2 written. 3.35 TB/s of an
// H100 carry 838 billion elements per second, half of their bytes read: 1.68 TB/s. At a latency of
// some 650 ns the loads of an SM must have 8.2 KB in flight. 2048 threads with a load of 2 bytes
// each have 4 KB, and none while they start, multiply and store.
//   A row of 64 elements leaves 192 of 256 threads without work, and 1 KB in flight.
// Expected, of 3.35 TB/s at 4 bytes per element: 40% at a width of 4096, 10% at 64. In fp32, with
// twice the bytes in flight, 70% at 4096.
//
// benchmark:begin
// Measured in bursts (NVIDIA H200, CUDA 13.0, bf16), GB/s at width 4096, and share of a[:, None] *
// B in the harmonic mean over widths. 8 warps: 1,286, 0.57. Cost: 16 registers per thread, 0 bytes
// of shared memory per block, 8 blocks per SM.
// benchmark:end
// Verdict: 30% of a copy's speed from a width of 256 on, on an H200, and 10% at 64.
//
// Phases: 1 the element, 2 C = a · B.

#include "elements.cuh"
#include "kernels/diagonal/arguments.cuh"

namespace k1 {

template <typename Kernels>
__global__ void __launch_bounds__(Kernels::value.n_threads())
    diagonal_kernel(const __grid_constant__ DiagonalKernelArgs args) {
    constexpr DiagonalKernelConfig cfg = Kernels::value;
    static_assert(cfg.chunks == 0, "a lane has several chunks from k3 on");

    constexpr DType kDType = cfg.dtype;
    constexpr int kThreads = cfg.n_threads();

    // 1. The element: block 7 of rows of 3 pieces has piece 1 of row 2
    const int64_t row = blockIdx.x / unsigned(args.pieces);
    const int64_t column = blockIdx.x % unsigned(args.pieces) * int64_t(kThreads) + threadIdx.x;
    if (column >= args.width) {
        return;
    }
    const auto *a_gmem = static_cast<const ElementOf<kDType> *>(args.a) + row * args.a_stride;
    const auto *b_gmem = static_cast<const ElementOf<kDType> *>(args.b) + row * args.b_stride;
    auto *c_gmem = static_cast<ElementOf<kDType> *>(args.c) + row * args.c_stride;

    // 2. C = a · B
    const float a = to_float<kDType>(__ldg(a_gmem));
    c_gmem[column] = from_float<kDType>(a * to_float<kDType>(__ldg(b_gmem + column)));
}

} // namespace k1
