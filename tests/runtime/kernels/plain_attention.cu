// Attention for every problem that hopper's arguments can describe, a thread a row and nothing
// clever: what the host hands over is tested with it.
//     nvcc -std=c++20 -arch=sm_90a -ptx -Isrc/include tests/runtime/kernels/plain_attention.cu
#include "flash_attention.cuh"
#include "numeric.cuh"
#include "sm90/arguments.cuh"

constexpr int B_r = 128, kDHead = 128;

__device__ float value(Element bits) {
    return __uint_as_float(uint32_t(bits) << 16);
}

// blockIdx.x for kernels without a counter, else what it says.
__device__ int first_tile(const HopperKernelArgs &args) {
    __shared__ int tile;
    if (args.next_tile == nullptr) {
        return blockIdx.x;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        tile = atomicAdd(args.next_tile, 1);
    }
    __syncthreads();
    return tile;
}

template <bool kCausal>
__device__ void attend(const HopperKernelArgs &args, TilePlace place) {
    extern __shared__ float S_smem[]; // (len_k, B_r), a column a thread
    const int row = place.row + threadIdx.x;
    if (threadIdx.x >= B_r || row >= args.len_q) {
        return;
    }
    const int kv_head = place.head / args.heads_per_kv;
    const auto at = [&](const void *tensor, const TensorStrides &strides, int head) {
        return static_cast<const Element *>(tensor) + place.batch * strides.batch +
               head * strides.head;
    };
    const Element *Q = at(args.Q_gmem, args.Q_strides, place.head) + row * args.Q_strides.row;
    const Element *K = at(args.K_gmem, args.K_strides, kv_head);
    const Element *V = at(args.V_gmem, args.V_strides, kv_head);
    Element *O = const_cast<Element *>(at(args.O_gmem, args.O_strides, place.head)) +
                 row * args.O_strides.row;
    const int keys =
        kCausal ? max(0, min(args.len_k, row + 1 + args.len_k - args.len_q)) : args.len_k;

    float m = -INFINITY, l = 0;
#pragma unroll 1
    for (int key = 0; key < keys; ++key) {
        float S = 0;
#pragma unroll 1
        for (int k = 0; k < kDHead; ++k) {
            S += value(Q[k]) * value(K[key * args.K_strides.row + k]);
        }
        S *= args.scale;
        S_smem[key * B_r + threadIdx.x] = S;
        m = fmaxf(m, S);
    }
#pragma unroll 1
    for (int key = 0; key < keys; ++key) {
        float &P = S_smem[key * B_r + threadIdx.x];
        P = exp2_approx(P - m);
        l += P;
    }
    const float inverse_l = keys == 0 ? 0 : 1 / l;
#pragma unroll 1
    for (int k = 0; k < kDHead; ++k) {
        float sum = 0;
#pragma unroll 1
        for (int key = 0; key < keys; ++key) {
            sum += S_smem[key * B_r + threadIdx.x] * value(V[key * args.V_strides.row + k]);
        }
        O[k] = pack<DType::BF16>(sum * inverse_l, 0);
    }
    if (args.lse != nullptr) {
        constexpr float kLn2 = 0.6931471805599453f;
        args.lse[(int64_t(place.batch) * args.heads + place.head) * args.len_q + row] =
            keys == 0 ? -INFINITY : (m + log2_approx(l)) * kLn2;
    }
}

template <bool kCausal>
__device__ void attend_all(const HopperKernelArgs &args) {
    for (int tile = first_tile(args); tile < args.tiles;
         tile = args.next_tile == nullptr ? tile + int(gridDim.x) : first_tile(args)) {
        attend<kCausal>(args, tile_place<B_r>(tile, args.q_tiles, args.heads));
    }
}

extern "C" __global__ void plain(const __grid_constant__ HopperKernelArgs args) {
    attend_all<false>(args);
}

extern "C" __global__ void plain_causal(const __grid_constant__ HopperKernelArgs args) {
    attend_all<true>(args);
}
