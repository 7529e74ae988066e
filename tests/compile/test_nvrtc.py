"""Units become PTX and machine code in a child process, by NVRTC and by nvcc, with the same files,
names and messages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from both_compilers import Result, compile_unit, compiler_called, nvrtc_compiler

from flash_helpers.compile.nvrtc import HEADERS, gather_sources
from flash_helpers.compile.ptxas import parse_ptxas_log, performance_losses
from flash_helpers.sass.read.elf import read_sections

KERNEL = """\
#include "near.cuh"
template <typename Config>
__global__ void scale(float *x) {
    extern __shared__ float tile_smem[];
    tile_smem[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = factor<Config>(tile_smem[threadIdx.x ^ 1]);
}
"""
NEAR = """\
#pragma once
#if __has_include(<far.cuh>) && !__has_include("gone.cuh")
#include <far.cuh>
#endif
template <typename Config>
__device__ float factor(float x) {
    return kFactor * x + (x > 0 ? INFINITY : NAN) + Config::value;
}
"""
UNIT = """\
#include "kernels/scale.cuh"
#include <cstdint>
struct two { static constexpr int value = 2; };
const void *two_kernel() { return reinterpret_cast<const void *>(scale<two>); }
"""
SERIALIZED = """\
__global__ void serialized(float *out, unsigned long a, unsigned long b) {
    float d[4] = {out[0], out[1], out[2], out[3]};
    for (int i = 0; i < 4; ++i) {
        asm volatile("wgmma.fence.sync.aligned;");
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "l"(a), "l"(b));
        d[i] += 1; // while the product is under way
    }
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;");
    out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


def write_tree(root: Path, **changed: str) -> Path:
    files = {
        "kernels/scale.cuh": changed.get("kernel", KERNEL),
        "kernels/near.cuh": changed.get("near", NEAR),
        "src/include/near.cuh": "#error the kernel's own folder comes first\n",
        "src/include/far.cuh": "#pragma once\nconstexpr float kFactor = 3.5f;\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def compiled(
    folder: Path, compiler: str, target: str, unit: str = UNIT, debug: bool = False, **tree: str
) -> Result:
    """A unit compiled in folders of its own below `folder`."""
    root = write_tree(folder / "root", **tree)
    file = folder / "unit" / "two.cu"
    file.parent.mkdir()
    file.write_text(unit)
    return compile_unit(compiler_called(compiler), root, file, target, folder / "scratch", debug)


@pytest.fixture(scope="module", params=["NVRTC", "nvcc"])
def outcome(request, tmp_path_factory) -> Result:
    """The unit compiled for sm_90a."""
    return compiled(tmp_path_factory.mktemp("outcome"), request.param, "sm_90a")


@pytest.fixture
def compiler(request: pytest.FixtureRequest) -> str:
    """The compiler of `outcome`."""
    return request.node.callspec.params["outcome"]


class TestFiles:
    def test_a_real_target_gives_ptx_and_machine_code(self, outcome) -> None:
        assert (outcome.status, sorted(outcome.files)) == (0, ["kernel.cubin", "kernel.ptx"])
        assert ".target sm_90a" in outcome.ptx and "_Z5scaleI3twoEvPf(" in outcome.ptx
        names = {section.name for section in read_sections(outcome.cubin, "cubin")}
        assert ".text._Z5scaleI3twoEvPf" in names

    def test_a_virtual_target_gives_the_same_ptx_alone(self, outcome, compiler, tmp_path) -> None:
        alone = compiled(tmp_path, compiler, "compute_90a")
        assert (alone.status, list(alone.files)) == (0, ["kernel.ptx"])
        assert alone.ptx == outcome.ptx

    def test_sources_are_named_relative_to_the_root(self, outcome) -> None:
        files = re.findall(r'\.file\s+\d+ "(.*)"', outcome.ptx)
        assert files == ["kernels/scale.cuh", "kernels/near.cuh"]
        assert b"kernels\0" in outcome.cubin  # a folder of the line table

    def test_nothing_depends_on_where_the_folders_lie(self, outcome, compiler, tmp_path) -> None:
        elsewhere = compiled(tmp_path / "much/longer name", compiler, "sm_90a")
        assert elsewhere.files == outcome.files
        assert not [data for data in elsewhere.files.values() if b"longer name" in data]

    def test_debug_code_is_not_optimised(self, outcome, compiler, tmp_path) -> None:
        debug = compiled(tmp_path, compiler, "sm_90a", debug=True)
        assert ".debug_info" in debug.ptx and ".debug_info" not in outcome.ptx
        assert debug.ptx.count("mov.") > outcome.ptx.count("mov.")

    def test_the_log_says_the_same_again(self, outcome, compiler, tmp_path) -> None:
        """NVRTC's own cache, which it has on a machine with a GPU, would leave ptxas's out."""
        again = compiled(tmp_path, compiler, "sm_90a")
        assert parse_ptxas_log(again.log) == parse_ptxas_log(outcome.log) != []

    def test_the_log_has_the_registers_and_spills(self, outcome) -> None:
        (report,) = parse_ptxas_log(outcome.log)
        assert (report.symbol, report.target) == ("_Z5scaleI3twoEvPf", "sm_90a")
        assert 0 < report.registers <= 32 and report.barriers == 1
        assert report.spill_store_bytes == report.spill_load_bytes == 0
        assert not performance_losses(outcome.log)


@pytest.mark.parametrize("compiler", ["NVRTC", "nvcc"])
class TestMessages:
    def test_a_syntax_error_has_its_file_and_line_once(self, tmp_path, compiler) -> None:
        wrong = NEAR.replace("* x", "* y")
        result = compiled(tmp_path, compiler, "sm_80", near=wrong)
        assert (result.status != 0, result.files) == (True, {})
        assert re.findall(r"(?m)^(.*)\((\d+)\): error: (.*)$", result.log) == [
            ("kernels/near.cuh", "7", 'identifier "y" is undefined')
        ]
        assert str(tmp_path) not in result.log

    def test_a_missing_header_is_named(self, tmp_path, compiler) -> None:
        result = compiled(tmp_path, compiler, "sm_80", near='#include "gone.cuh"\n')
        assert (result.status != 0, result.files) == (True, {})
        assert "kernels/near.cuh" in result.log and "gone.cuh" in result.log

    def test_the_log_has_the_losses(self, tmp_path, compiler) -> None:
        (loss,) = performance_losses(compiled(tmp_path, compiler, "sm_90a", SERIALIZED).log)
        assert "wgmma.mma_async instructions are serialized" in loss


def test_the_standard_headers_are_those_that_nvcc_has(tmp_path: Path) -> None:
    """Types and traits, checked by both compilers with the same assertions."""
    text = """
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cuda.h>
#include <type_traits>
#include <utility>
static_assert(sizeof(CUtensorMap) == 128 && alignof(CUtensorMap) == 128);
template <typename Integer> struct name;
template <> struct name<signed char> { static constexpr int value = 1; };
template <> struct name<short> { static constexpr int value = 2; };
template <> struct name<int> { static constexpr int value = 3; };
template <> struct name<long> { static constexpr int value = 4; };
template <> struct name<unsigned char> { static constexpr int value = 5; };
template <> struct name<unsigned short> { static constexpr int value = 6; };
template <> struct name<unsigned> { static constexpr int value = 7; };
template <> struct name<unsigned long> { static constexpr int value = 8; };
static_assert(name<std::int8_t>::value == 1 && name<std::int16_t>::value == 2);
static_assert(name<std::int32_t>::value == 3 && name<std::int64_t>::value == 4);
static_assert(name<std::uint8_t>::value == 5 && name<std::uint16_t>::value == 6);
static_assert(name<std::uint32_t>::value == 7 && name<std::uint64_t>::value == 8);
static_assert(name<std::intptr_t>::value == 4 && name<std::uintptr_t>::value == 8);
static_assert(name<std::size_t>::value == 8);
struct Pair {
    int32_t a;
    int64_t b;
    friend auto operator<=>(const Pair &, const Pair &) = default;
};
static_assert(offsetof(Pair, b) == 8);
static_assert(Pair{1, 2} == Pair{1, 2} && Pair{1, 2} != Pair{1, 3});
static_assert(std::is_same_v<std::conditional_t<true, int, float>, int>);
static_assert(!std::is_same_v<std::conditional_t<false, int, float>, int>);
static_assert(std::is_same_v<std::make_index_sequence<3>, std::index_sequence<0, 1, 2>>);
static_assert(std::is_same_v<std::make_integer_sequence<int, 0>, std::integer_sequence<int>>);
static_assert(std::make_integer_sequence<int, 64>::size() == 64);
static_assert(std::true_type{} && !std::false_type::value);
"""
    assert {f"<{path.name}>" for path in HEADERS.iterdir()} == {
        *re.findall("#include (<.*>)", text),
        "<cmath>",  # of every unit
    }
    for compiler in ("NVRTC", "nvcc"):
        assert compiled(tmp_path / compiler, compiler, "compute_80", text).status == 0


def test_an_unknown_flag_is_named(tmp_path: Path) -> None:
    (tmp_path / "unit.cu").write_text("")
    command = nvrtc_compiler().command(tmp_path / "unit.cu", "sm_90a", tmp_path, False)
    done = subprocess.run([*command, "--fast"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: NVRTC_ERROR_INVALID_OPTION\n") and "--fast" in done.stderr


def test_gathered_sources_have_one_name_each(tmp_path: Path) -> None:
    """Two files called near.cuh, one included by a path that leaves its folder, one that is not
    looked for beside the file, and a circle."""
    root = write_tree(tmp_path.resolve(), near='#include "../src/include/near.cuh"\n')
    (root / "src/include/near.cuh").write_text('#include <far.cuh>\n#include "gone.cuh"\n')
    (root / "src/include/far.cuh").write_text('#include "kernels/scale.cuh"\n')
    text, headers = gather_sources(root, '# include "kernels/scale.cuh" // the kernel\n')
    assert text == '# include "kernels/scale.cuh" // the kernel\n'
    assert headers == {
        "kernels/scale.cuh": '#line 1 "kernels/scale.cuh"\n'
        + KERNEL.replace('"near.cuh"', '"kernels/near.cuh"'),
        "kernels/near.cuh": '#line 1 "kernels/near.cuh"\n#include "src/include/near.cuh"\n',
        "src/include/near.cuh": '#line 1 "src/include/near.cuh"\n'
        '#include "src/include/far.cuh"\n#include "gone.cuh"\n',
        "src/include/far.cuh": '#line 1 "src/include/far.cuh"\n#include "kernels/scale.cuh"\n',
    }


def test_the_child_needs_no_package_but_this_one(tmp_path: Path) -> None:
    """It starts without site-packages, and from wherever the package lies."""
    command = nvrtc_compiler().command(tmp_path / "unit.cu", "sm_90a", tmp_path, False)
    assert command[:3] == [sys.executable, "-I", "-S"]
    done = subprocess.run([*command[:5], "--help"], cwd=tmp_path, capture_output=True, check=True)
    assert b"usage: flash_helpers.compile.nvrtc" in done.stdout
