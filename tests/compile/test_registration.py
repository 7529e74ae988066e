"""How the library tells the CUDA runtime of its kernels, against what nvcc's host code tells."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_toolchain import real_toolchain

from flash_helpers.compile.codegen import KERNEL_HEADER, BuiltKernel, registration_unit

pytestmark = pytest.mark.slow

KERNEL = """\
template <typename T>
__global__ void one(T *x) { *x = 1; }

const void *one_kernel() { return reinterpret_cast<const void *>(one<int>); }
"""
# Stands in for the runtime: each call, with what it was given.
RUNTIME = """\
#include <cstdio>
#include <cstring>

struct Wrapper { int magic, version; const char *fatbin; void *unused; };

extern "C" {
void **__cudaRegisterFatBinary(Wrapper *given) {
    static void *handle;
    unsigned begin;
    std::memcpy(&begin, given->fatbin, sizeof begin);
    std::printf("binary %x %d %x %p\\n", given->magic, given->version, begin, given->unused);
    return &handle;
}
void __cudaRegisterFunction(void **, const char *host, char *device, const char *name, int limit,
                            void *thread, void *block, void *block_size, void *grid_size,
                            int *warp_size) {
    std::printf("function %d %s %s %d %p %p %p %p %p\\n", host != nullptr, device, name, limit,
                thread, block, block_size, grid_size, static_cast<void *>(warp_size));
}
void __cudaRegisterFatBinaryEnd(void **) { std::puts("end"); }
void __cudaUnregisterFatBinary(void **) { std::puts("unregistered"); }
}

int main() { std::puts("main"); }
"""


def run(*command: str | Path, folder: Path) -> str:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


def test_makes_the_calls_that_nvcc_makes(tmp_path, root):
    nvcc = real_toolchain(80).nvcc
    for name in (KERNEL_HEADER, "src/include/registered_kernel.h"):
        shutil.copy(root / name, tmp_path)
    (tmp_path / "runtime.cpp").write_text(RUNTIME)
    (tmp_path / "one.cu").write_text(KERNEL)
    kernel = BuiltKernel("one", "one.fatbin", "_Z3oneIiEvPT_")
    registered = 'static const RegisteredKernel one(one_fatbin, "_Z3oneIiEvPT_");\n'
    unit = f'{registration_unit([kernel])}#include "registered_kernel.h"\n{registered}'
    (tmp_path / "registration.cpp").write_text(unit)
    for output in (("-c", "-o", "one.o"), ("-fatbin", "-o", "one.fatbin")):
        run(nvcc, "-arch=sm_80", *output, "one.cu", folder=tmp_path)
    # what else nvcc's object asks for is never called
    linker = ("-no-pie", "-Wl,--unresolved-symbols=ignore-all")
    calls = []
    for unit in ("one.o", "registration.cpp"):
        compiler = os.environ.get("NVCC_CCBIN", "g++")
        run(compiler, "-std=c++20", *linker, "runtime.cpp", unit, folder=tmp_path)
        calls.append(run(tmp_path / "a.out", folder=tmp_path).splitlines())
    assert calls[0] == calls[1]
    assert [call.split()[0] for call in calls[0]] == [
        *("binary", "function", "end"),
        *("main", "unregistered"),
    ]
