#pragma once
// Programmatic launches. Where a launch is none, neither function has an effect.

__device__ __forceinline__ void let_next_launch_begin() { // once all blocks have called it
    asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void wait_for_launch_before() { // until all that it stored is visible
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
