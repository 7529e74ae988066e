#pragma once
// <cuda.h> for NVRTC: of the driver's types a kernel knows the tensor map alone, whose bits mean
// nothing to it (CUDA Driver API 13.0, CUtensorMap_st; before 13.0 it was aligned to 64 bytes).

struct alignas(128) CUtensorMap {
    unsigned long long opaque[16];
};
