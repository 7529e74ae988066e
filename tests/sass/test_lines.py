"""Source chains and PTX lines, as nvdisasm prints them from the same tables."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sass_text import ATTENTION, DEFAULT, in_tiers, kernels_of

from flash_helpers.kernel_configs import Config, Element
from flash_helpers.measure.machine_code import listed_configs
from flash_helpers.runtime.library import library_path
from flash_helpers.sass.read.containers import cubins_of
from flash_helpers.sass.read.cubin import Cubin, read_cubin
from flash_helpers.sass.read.elf import Section
from flash_helpers.sass.read.lines import (
    CUDA_LINES,
    PTX_LINES,
    LineTable,
    read_line_tables,
    relative_to_repository,
)
from flash_helpers.sass.read.records import SassError, SourceLine

pytestmark = pytest.mark.slow

WITH_LINES = (
    "spills.sm_80.cubin",
    "unrolled.sm_90.cubin",
    "filler.sm_80.cubin",
    "several.sm_80.cubin",
    "several.sm_90.cubin",
    "old.sm_80.cubin",
    "old.sm_90.cubin",
)
# Steps whose only inlined functions convert elements to fp32, which is nothing for those of fp32.
NO_OTHER_FILE_IN_FP32 = {"k1", "l1", "l2", "l3", "l4", "l5", "l6", "lb1", "lb2", "n1"}
_LOCATION = re.compile(r'//## File "([^"]*)", line (\d+)')


def printed_locations(text: str) -> Iterator[tuple[str, int, tuple[SourceLine, ...] | None]]:
    """Section, address and location of each instruction of `nvdisasm -gi` or `-gp`; None where
    nothing is printed, which means that the innermost line is the one before."""
    section, chain, started = "", None, False
    for line in text.splitlines():
        if match := re.match(r"\s*\.section\s+(\.text\.[^,]+),", line):
            section = match[1]
        elif match := _LOCATION.search(line):
            found = SourceLine(os.path.normpath(match[1]), int(match[2]))
            chain = (*chain, found) if started and chain else (found,)
            started = True
        elif match := re.match(r"\s*/\*([0-9a-f]+)\*/", line):
            yield section, int(match[1], 16), chain
            chain, started = None, False


def check(cubin: Cubin, table_name: str, text: str) -> tuple[int, int]:
    """Compare all; returns how many locations were printed, and the longest chain."""
    tables = read_line_tables(cubin, table_name)
    printed = deepest = 0
    innermost: SourceLine | None = None
    for section, address, expected in printed_locations(text):
        table = tables.get(cubin.sections[section].index, LineTable())
        chain = table.at(address)
        if table_name == PTX_LINES:
            chain = tuple(SourceLine(".nv_debug_ptx_txt", line.line) for line in chain)
        if address == 0:
            innermost = None
        if expected is not None:
            assert chain == expected, (section, hex(address))
            printed += 1
        else:
            assert chain[:1] == ((innermost,) if innermost else ()), (section, hex(address))
        innermost = chain[0] if chain else None
        deepest = max(deepest, len(chain))
    return printed, deepest


@pytest.mark.parametrize("name", WITH_LINES)
class TestPlanted:
    def test_lines_are_those_of_nvdisasm(self, name, planted, nvdisasm) -> None:
        cubin = read_cubin((planted / name).read_bytes(), name)
        printed, deepest = check(cubin, CUDA_LINES, nvdisasm("-c", "-gi", planted / name))
        assert printed > 5
        if name.startswith("several"):
            assert deepest == 3  # square in quartic in a kernel
        printed, deepest = check(cubin, PTX_LINES, nvdisasm("-c", "-gp", planted / name))
        assert printed > 20
        assert deepest == 1


def test_lines_of_the_library_are_those_of_nvdisasm(nvdisasm, tmp_path: Path) -> None:
    members = cubins_of(library_path())
    member = next(m for m in members if "v16_bf16" in m.origin and m.architecture == DEFAULT)
    cubin, path = member.cubin(), tmp_path / member.name
    path.write_bytes(member.read())
    printed, deepest = check(cubin, CUDA_LINES, nvdisasm("-c", "-gi", path))
    assert printed > 500
    assert deepest > 3
    check(cubin, PTX_LINES, nvdisasm("-c", "-gp", path))


def test_instructions_come_from_the_lines_that_say_so(load: Callable, planted: Path) -> None:
    """In the file of the kernel and in its PTX there stands what became the instruction."""
    source = (planted / "unrolled.cu").read_text().splitlines()
    first = next(number for number, line in enumerate(source, 1) if "asm volatile(" in line)
    last = next(number for number, line in enumerate(source, 1) if line.endswith(");"))
    statement = range(first, last + 1)
    for architecture in ("sm_80", "sm_90"):
        (kernel,) = load(f"unrolled.{architecture}.cubin")
        ptx = kernel.ptx.split("\n")
        products = [i for i in kernel.instructions if i.base == "HMMA"]
        assert len(products) > 1
        for i in products:
            assert [Path(line.file).name for line in i.source] == ["unrolled.cu"]
            assert i.source[0].line in statement
            assert "mma.sync" in ptx[i.ptx_line - 1]


def test_a_chain_goes_from_the_inlined_line_to_the_kernel(load: Callable, planted: Path) -> None:
    source = (planted / "several.cu").read_text().splitlines()
    (kernel,) = (k for k in load("several.sm_90.cubin") if k.symbol == "nested")
    chains = {
        tuple(source[line.line - 1].strip() for line in i.source)
        for i in kernel.instructions
        if i.base == "FMUL"
    }
    call = "sum += quartic(x[row * columns + column]);"
    assert chains <= {
        ("return x * x;", "const float y = square(x);", call),
        ("return x * x;", "return square(y) + 1.0f;", call),
    }
    assert chains


def test_without_line_information_nothing_is_told(load: Callable) -> None:
    for kernel in load("no_lines.sm_90.cubin"):
        assert kernel.ptx is None
        assert all(i.source == () and i.ptx_line is None for i in kernel.instructions)


class TestPaths:
    def test_in_the_folder_of_the_kernel_are_relative(self) -> None:
        kernel = SourceLine("/build/here/src/include/forward_kernel.cuh", 7)
        header = SourceLine("/build/here/src/include/mma.cuh", 3)
        foreign = SourceLine("/usr/local/cuda/include/sm_30_intrinsics.hpp", 1)
        assert relative_to_repository(
            [(header, kernel), (foreign, kernel), ()], "src/include/forward_kernel.cuh"
        ) == [
            (SourceLine("src/include/mma.cuh", 3), SourceLine("src/include/forward_kernel.cuh", 7)),
            (foreign, SourceLine("src/include/forward_kernel.cuh", 7)),
            (),
        ]

    def test_of_other_kernels_stay(self) -> None:
        chains = [(SourceLine("/there/src/include/other.cuh", 7),)]
        assert relative_to_repository(chains, "src/include/forward_kernel.cuh") == chains

    @in_tiers(listed_configs(DEFAULT))
    def test_of_the_library_name_files_of_the_repository(
        self, root: Path, configs: tuple[Config, ...]
    ) -> None:
        for config, kernel in kernels_of(configs, DEFAULT).items():
            is_attention = config.family.operation is ATTENTION
            files = {line.file for i in kernel.instructions for line in i.source}
            relative = {file for file in files if not file.startswith("/")}
            assert str(config.step.source) in relative
            if is_attention:  # also copies, fragments and mma
                assert len(relative) >= 3
            elif config.dtype is not Element.FP32 or config.step.id not in NO_OTHER_FILE_IN_FP32:
                assert len(relative) >= 2
            assert all((root / file).is_file() for file in relative)
            assert not any("src/include" in file for file in files - relative)


class TestDamagedTables:
    """A program of a few bytes behind the smallest header."""

    @staticmethod
    def cubin_with(planted: Path, program: bytes, version: int = 2) -> Cubin:
        # one file, 9 standard opcodes; line_base -5, line_range 14
        after_length = bytes([1, 1, 256 - 5, 14, 10, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0])
        after_length += b"a.cu\0\0\0\0\0"
        body = version.to_bytes(2, "little") + len(after_length).to_bytes(4, "little")
        body += after_length + program
        data = len(body).to_bytes(4, "little") + body
        cubin = read_cubin((planted / "one.sm_90a.cubin").read_bytes(), "one")
        section = Section(99, CUDA_LINES, 0, 0, 0, 0, len(data), data)
        return replace(cubin, sections={**cubin.sections, CUDA_LINES: section})

    @pytest.mark.parametrize(
        ("program", "reason"),
        [
            (b"\x01\x00\x03\x90\x01\x00\x01", None),  # a row, and one inlined at it
            (b"\x00\x03\x90\x01\x00\x01", "inlined at row 1"),  # inlined at itself
            (b"\x00\x03\x90\x09\x00\x01", "inlined at row 9"),
            (b"\x04\x07\x01", "file 7 of 1"),
            (b"\x03\x70\x01", "line -15"),
            (b"\x03\x80", "cannot be read"),  # cut off in a number
            (b"\x03" + b"\x80" * 10 + b"\x00", "a number of more than 70 bits"),
            (b"\x03\x7f\x01", None),  # line 0: -1 from the first
            (b"\x00\x30\x02", "does not end"),
        ],
    )
    def test_are_refused(self, planted: Path, program: bytes, reason: str | None) -> None:
        cubin = self.cubin_with(planted, program)
        if reason is None:
            read_line_tables(cubin, CUDA_LINES)
        else:
            with pytest.raises(SassError, match=reason):
                read_line_tables(cubin, CUDA_LINES)

    def test_endless_chains_are_refused(self, planted: Path) -> None:
        rows = b"\x01" + b"".join(
            b"\x00\x04\x90" + bytes([n & 0x7F | 0x80, n >> 7]) + b"\x00\x01" for n in range(1, 1000)
        )
        with pytest.raises(SassError, match="calls deep"):
            read_line_tables(self.cubin_with(planted, rows), CUDA_LINES)

    def test_another_version_of_dwarf_is_refused(self, planted: Path) -> None:
        with pytest.raises(SassError, match="DWARF version 5"):
            read_line_tables(self.cubin_with(planted, b"\x01", version=5), CUDA_LINES)
