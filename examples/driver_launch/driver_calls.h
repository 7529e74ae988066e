// Calls of the CUDA driver, found by name when they are made: DRIVER(cuInit, 0).

#pragma once

#include <cstdio>
#include <cstdlib>
#include <cuda.h>
#include <dlfcn.h>

#define STRING(text) #text
#define TEXT(macro) STRING(macro) // cuda.h has macros from names to names with a version
#define DRIVER(f, ...) check(#f, reinterpret_cast<decltype(&f)>(symbol(TEXT(f)))(__VA_ARGS__))

inline void *symbol(const char *name) {
    static void *const driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (void *found = driver ? dlsym(driver, name) : nullptr)
        return found;
    fprintf(stderr, "no CUDA driver that can launch the kernel: %s\n", dlerror());
    exit(3);
}

inline void check(const char *name, CUresult status) {
    if (status != CUDA_SUCCESS)
        exit((fprintf(stderr, "%s returns CUresult %d\n", name, status), 1));
}
