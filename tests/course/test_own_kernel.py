"""The example of a reader's own kernel: each flaw is found by the tool that the page sends to it,
and the committed files are what the sources compile to."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from flash_helpers.compile.toolchain import PYPI_TOOLCHAIN, BuildError, find_nvcc
from flash_helpers.sass.analyse.occupancy import kernel_occupancy
from flash_helpers.sass.read.reader import load_kernels
from flash_helpers.sass.read.records import Kernel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/own_kernel"
SIMULATE, SIMULATE_RING = EXAMPLE / "simulate.py", EXAMPLE / "simulate_column_sum.py"
FLAWED, FIXED = "row_softmax", "row_softmax_fixed"
RING, RING_FIXED = "column_sum", "column_sum_fixed"
ARCHITECTURES = ("sm_80", "sm_90")
CUBINS = {
    **dict.fromkeys((FLAWED, FIXED), ARCHITECTURES),
    **dict.fromkeys((RING, RING_FIXED), ("sm_90",)),
}

THREADS = 64
WARPS, CHUNKS = THREADS // 32, 16
# A request of 16 bytes a lane takes 4 wavefronts; where 8 lanes share banks, 8 times as many.
CONFLICTS_OF_A_REQUEST = 4 * 8 - 4


def run(*command: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a Python file, which must end with that status and without a traceback."""
    result = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result


def spoilt(folder: Path, name: str, old: str, new: str) -> Path:
    """The PTX of a kernel with some of its text replaced."""
    assert old in ptx(name)
    path = folder / "wrong.ptx"
    path.write_text(ptx(name).replace(old, new))
    return path


def source(name: str) -> list[str]:
    return (EXAMPLE / f"{name}.cu").read_text(encoding="utf-8").splitlines()


def ptx(name: str) -> str:
    return (EXAMPLE / f"{name}.ptx").read_text(encoding="utf-8")


def constant(name: str, of: str) -> int:
    """A constexpr int of a kernel."""
    found = dict(re.findall(r"^constexpr int (\w+) = ([^;]+);", "\n".join(source(of)), re.M))
    return sum(int(w) if w.isdecimal() else constant(w, of) for w in found[name].split(" + "))


def machine_code(name: str, architecture: str, folder: Path = EXAMPLE) -> Kernel:
    (kernel,) = load_kernels(folder / f"{name}.{architecture}.cubin")
    return kernel


def cells(table: str, label: str) -> list[str]:
    row = next(line for line in table.splitlines() if line.startswith(f"{label} "))
    return row.removeprefix(label).split()


# -- the simulator -----------------------------------------------------------------------------


def test_both_are_right_and_only_the_flawed_one_has_conflicts():
    blocks = 3
    both = (EXAMPLE / f"{name}.ptx" for name in (FLAWED, FIXED))
    result = run(SIMULATE, *both, "--blocks", str(blocks))
    assert f"{FLAWED}: right" in result.stdout and f"{FIXED}: right" in result.stdout
    # A row a thread is read and written once, in CHUNKS requests of each warp.
    expected = blocks * WARPS * 2 * CHUNKS * CONFLICTS_OF_A_REQUEST
    assert cells(result.stdout, "bank conflicts") == [f"{expected:,}", "0"]
    # In and out of shared memory twice each, and every sector of x and y once.
    requests = blocks * WARPS * CHUNKS * 4
    assert cells(result.stdout, "shared requests") == [f"{requests:,}"] * 2
    sectors = 2 * blocks * 64 * 64 * 4 // 32
    assert cells(result.stdout, "global sectors") == [f"{sectors:,}"] * 2


def test_a_barrier_taken_out_of_the_ptx_is_a_race(tmp_path):
    broken = tmp_path / "no_barrier.ptx"
    broken.write_text(re.sub(r"^\s*bar\.sync.*\n", "", ptx(FIXED), count=1, flags=re.M))
    result = run(SIMULATE, broken, status=1)
    assert "race" in result.stderr and f"{FIXED}.cu:" in result.stderr


LOG2_E, LOG2_10 = "0f3FB8AA3B", "0f40549A78"


@pytest.mark.parametrize(
    ("tool", "name", "old", "new"),
    [(SIMULATE, FIXED, LOG2_E, LOG2_10), (SIMULATE_RING, RING_FIXED, "add.f32", "sub.f32")],
    ids=[FIXED, RING_FIXED],
)
def test_a_wrong_result_is_told(tmp_path, tool, name, old, new):
    assert "wrong: WRONG" in run(tool, spoilt(tmp_path, name, old, new), status=1).stdout


def test_a_file_that_is_not_there_is_wrong_usage(tmp_path):
    assert "absent.ptx is no file" in run(SIMULATE, tmp_path / "absent.ptx", status=2).stderr


def test_the_python_that_the_page_shows_runs():
    page = (ROOT / "docs/own_kernel.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert int(run("-c", script).stdout) == 2 * WARPS * 2 * CHUNKS * CONFLICTS_OF_A_REQUEST


# -- the ring of Hopper ------------------------------------------------------------------------


def line_of(text: str, name: str) -> int:
    """Number of the last line with that text."""
    return max(n for n, line in enumerate(source(name), 1) if text in line)


@pytest.mark.parametrize("options", [(), ("--seed", "1")], ids=["late", "random"])
def test_a_wait_for_the_wrong_parity_is_found_at_its_line(options):
    result = run(SIMULATE_RING, EXAMPLE / f"{RING}.ptx", *options, status=1)
    assert "asynchronous copy not waited for" in result.stderr
    assert "was for parity 1, which holds before phase 0 is complete" in result.stderr
    read, wait = line_of("sum += ring.tile", RING), line_of("wait(&ring.full", RING)
    copy = line_of("load(ring.tile", RING)
    assert f"at {RING}.cu:{read} [ld.shared.f32" in result.stderr
    assert f"inlined at {RING}.cu:{wait} [mbarrier.try_wait" in result.stderr
    page = (ROOT / "docs/own_kernel.md").read_text(encoding="utf-8")
    assert f"Line {read} read a tile that TMA, asked in line {copy}, had" in page
    assert f"The wait before it, line {wait}, was" in page


@pytest.mark.parametrize("seed", range(5))
def test_the_ring_is_right_with_the_right_parity(seed):
    result = run(SIMULATE_RING, EXAMPLE / f"{RING_FIXED}.ptx", "--seed", str(seed))
    assert f"{RING_FIXED}: right" in result.stdout


def test_a_producer_with_the_wrong_parity_is_a_deadlock(tmp_path):
    assert ptx(RING_FIXED).count("not.b32") == 1  # of the producer's parity, as the page takes it
    wrong = spoilt(tmp_path, RING_FIXED, "not.b32", "mov.b32")
    result = run(SIMULATE_RING, wrong, status=1)
    assert "deadlock" in result.stderr
    for wait in ("wait(&ring.empty", "wait(&ring.full"):
        assert re.search(rf"{RING_FIXED}\.cu:{line_of(wait, RING_FIXED)}\b", result.stderr)


# -- the machine code --------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_the_flawed_one_spills(architecture):
    flawed, fixed = (machine_code(name, architecture) for name in (FLAWED, FIXED))
    assert flawed.resources.spill_store_bytes > 0 and flawed.resources.spill_load_bytes > 0
    # 64 registers are what 16 blocks of 64 threads leave each thread of 65,536.
    assert flawed.resources.registers == 65536 // (constant("kBlocks", FLAWED) * THREADS)
    assert (fixed.resources.spill_store_bytes, fixed.resources.stack_bytes) == (0, 0)


def test_the_flawed_one_asks_for_blocks_that_shared_memory_cannot_hold():
    reserved = 1024
    for name, limiter in ((FLAWED, "shared memory"), (FIXED, "registers")):
        kernel = machine_code(name, "sm_90")
        tile = THREADS * constant("kStride", name) * 16
        assert kernel.resources.static_smem_bytes == tile
        occupancy = kernel_occupancy(kernel, THREADS, 0)
        assert occupancy.blocks == 228 * 1024 // (tile + reserved)
        assert limiter in occupancy.limiters
    assert kernel_occupancy(machine_code(FLAWED, "sm_90"), THREADS, 0).blocks < constant(
        "kBlocks", FLAWED
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_fix_takes_local_memory_away_and_leaves_the_work(architecture):
    before, after = (
        Counter(i.base for i in machine_code(name, architecture).instructions)
        for name in (FLAWED, FIXED)
    )
    assert before["STL"] and before["LDL"] and not after["STL"] and not after["LDL"]
    for opcode in ("LDG", "STG", "LDS", "STS", "MUFU", "FMNMX", "FADD", "BAR"):
        assert before[opcode] == after[opcode] > 0, opcode
    assert after["MUFU"] == 4 * CHUNKS + 1  # an exponential for each element, and 1 / l


# -- the committed files -----------------------------------------------------------------------


def changes(before: str, after: str) -> list[tuple[str, str]]:
    """Lines of two kernels that differ."""
    pairs = zip(code(before), code(after), strict=True)
    return [(old, new) for old, new in pairs if old != new]


def test_the_fix_is_two_constants():
    assert [old.split(" = ")[0] for old, _ in changes(FLAWED, FIXED)] == [
        "constexpr int kStride", "constexpr int kBlocks",
    ]  # fmt: skip


def test_the_fix_of_the_ring_is_a_line_that_the_page_shows():
    ((old, new),) = changes(RING, RING_FIXED)
    page = (ROOT / "docs/own_kernel.md").read_text(encoding="utf-8")
    assert f"\n-{old.strip()}\n+{new.strip()}\n" in page


def code(name: str) -> list[str]:
    """The lines without comments."""
    stripped = (line.partition("//")[0].rstrip() for line in source(name))
    return [line for line in stripped if line]


@pytest.mark.parametrize("name", [FLAWED, FIXED])
def test_the_ptx_belongs_to_the_source(name):
    text = ptx(name)
    assert f'.file\t1 "{name}.cu"' in text
    assert int(re.search(r"\.minnctapersm (\d+)", text)[1]) == constant("kBlocks", name)
    tile = THREADS * constant("kStride", name) * 16
    assert int(re.search(r"\.shared .*tile\[(\d+)\]", text)[1]) == tile
    # What the line table says of barriers and of exponentials.
    place, found = 0, {"bar.sync": set(), "ex2.approx": set()}
    for line in text.splitlines():
        if match := re.match(r"\s*\.loc\s+1 (\d+)", line):
            place = int(match[1])
        for opcode, places in found.items():
            if re.match(rf"\s*{re.escape(opcode)}", line):
                places.add(place)
    lines = source(name)
    barriers = {n for n, line in enumerate(lines, 1) if "__syncthreads();" in line}
    assert found["bar.sync"] == barriers
    assert all("__expf" in lines[n - 1] for n in found["ex2.approx"]) and found["ex2.approx"]


@pytest.mark.parametrize(
    ("name", "architecture"), [(name, each) for name, all_ in CUBINS.items() for each in all_]
)
def test_the_cubin_is_made_of_the_ptx(name, architecture):
    kernel = machine_code(name, architecture)
    assert kernel.architecture == architecture
    assert kernel.ptx is not None
    assert len(instructions(ptx(name))) > 100
    assert instructions(kernel.ptx) == instructions(ptx(name))


def instructions(text: str) -> list[str]:
    """Those of PTX, without blanks: a cubin keeps fewer."""
    lines = (re.sub(r"\s", "", line) for line in text.splitlines())
    return [line for line in lines if re.match(r"@?%?\w[\w.]*[\[{%].*;$", line)]


def test_compiling_again_gives_the_committed_files(tmp_path):
    try:
        found = find_nvcc(os.environ)
    except BuildError as error:
        pytest.skip(str(error))
    if found is None:
        pytest.skip("no nvcc: the files are compared with their sources above")
    for file in (*EXAMPLE.glob("*.cu"), EXAMPLE / "compile.sh"):
        shutil.copy(file, tmp_path)
    release = "Cuda compilation tools, release"
    for name, architectures in CUBINS.items():
        capabilities = " ".join(each.removeprefix("sm_") for each in architectures)
        subprocess.run(
            [tmp_path / "compile.sh", tmp_path / f"{name}.cu"],
            env={**os.environ, "NVCC": str(found[0]), "ARCHS": capabilities},
            check=True,
        )
        again = (tmp_path / f"{name}.ptx").read_text(encoding="utf-8")
        (by,) = (line for line in again.splitlines() if release in line)
        if by not in ptx(name):  # another compiler: it need not agree, but the example must work
            simulate = SIMULATE if name in (FLAWED, FIXED) else SIMULATE_RING
            run(simulate, tmp_path / f"{name}.ptx", status=int(name == RING))
            continue
        assert again == ptx(name)
        for architecture in architectures:
            old, new = (
                [i.encoding for i in machine_code(name, architecture, folder).instructions]
                for folder in (EXAMPLE, tmp_path)
            )
            assert old == new


def test_the_page_s_line_of_pip_brings_the_compiler_of_the_build():
    page = (ROOT / "docs/own_kernel.md").read_text(encoding="utf-8")
    assert f"\n    pip install {' '.join(map(repr, PYPI_TOOLCHAIN))}\n" in page
