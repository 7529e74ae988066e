#pragma once
// The parts that no step of the backward family is about, or a step before.

#include "elements.cuh"
#include "flash_attention.cuh"
#include "kernels/backward/arguments.cuh"
#include "kernels/backward/loading.cuh"
#include "kernels/backward/outputs.cuh"
#include "kernels/backward/places.cuh"
#include "kernels/backward/scores.cuh"
#include "kernels/backward/statistics.cuh"
#include "kernels/backward/sums.cuh"
#include "memory.cuh"
#include "numeric.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/roles.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"
