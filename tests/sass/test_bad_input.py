"""Files, disassemblers and cache entries that will not do: an error with a reason, never a
traceback, a hang, or a wrong result in silence."""

import os
import random
import signal
import struct
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sass_text import guard_text, list_kernels

from flash_helpers.runtime.library import library_path
from flash_helpers.sass.read import disassembler
from flash_helpers.sass.read.cache import (
    DisassemblyCache,
    cache_folder,
    cubin_digest,
    decode,
    encode,
    entry_key,
)
from flash_helpers.sass.read.containers import cubins_of, members_of
from flash_helpers.sass.read.cubin import EIATTR_ANNOTATIONS, read_cubin
from flash_helpers.sass.read.disassembler import (
    Disassembler,
    candidates,
    find_disassembler,
    require_new_enough,
    run_program,
)
from flash_helpers.sass.read.disassembly import Batch, Disassembly, Request, disassemble
from flash_helpers.sass.read.elf import read_sections
from flash_helpers.sass.read.lines import CUDA_LINES, PTX_LINES, read_line_tables
from flash_helpers.sass.read.reader import load_kernels
from flash_helpers.sass.read.records import (
    INSTRUCTION_BYTES,
    LiveRegisters,
    Operation,
    SassError,
    SassWarning,
)
from flash_helpers.sass.read.records import SourceLine as Line

pytestmark = pytest.mark.slow


def program(folder: Path, name: str, script: str) -> Path:
    """An executable in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def banner(version: str) -> str:
    return f"echo 'Cuda compilation tools, release 13.5, V{version}'"


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Fail what takes longer."""

    def stop(*_: object) -> None:
        raise AssertionError(f"still running after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No disassembler is where one is looked for: in these folders of `tmp_path`, which are not
    there."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "path_home"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setenv("PATH", str(tmp_path / "bin_on_path"))
    monkeypatch.setattr(disassembler, "DEFAULT_CUDA_HOME", tmp_path / "default")


class TestDisassembler:
    def test_is_looked_for_in_this_order(self, tmp_path: Path, nothing_installed: None) -> None:
        folders = ["home", "path_home", "site/nvidia/cu13", "bin_on_path", "default"]
        for folder in folders:
            bin_folder = folder if folder == "bin_on_path" else f"{folder}/bin"
            program(tmp_path / bin_folder, "nvdisasm", banner("13.5.1"))
        found = [path.relative_to(tmp_path).parts[0] for path in candidates("nvdisasm")]
        assert found == [folder.partition("/")[0] for folder in folders]

    @pytest.mark.parametrize(
        ("programs", "taken"),
        [
            (
                {"home": banner("12.9.88"), "site/nvidia/cu13": banner("13.10.2"),
                 "default": banner("13.9.99")},
                "site",
            ),
            ({"home": banner("13.5.37"), "default": banner("13.5.37")}, "home"),
            ({"home": "exit 3", "default": banner("13.5.37")}, "default"),
        ],
        ids=["the newest", "the first of two as new", "not one that does not run"],
    )  # fmt: skip
    def test_is_chosen(self, tmp_path, nothing_installed, programs, taken) -> None:
        for folder, script in programs.items():
            program(tmp_path / folder / "bin", "nvdisasm", script)
        tool = find_disassembler("nvdisasm")
        assert tool.path.relative_to(tmp_path).parts[0] == taken
        if taken == "site":
            assert (tool.version, str(tool)) == ((13, 10, 2), "nvdisasm 13.10.2")

    def test_that_is_missing_can_be_installed(self, nothing_installed: None) -> None:
        with pytest.raises(SassError, match=r"is missing .*pip install nvidia-cuda-nvdisasm"):
            find_disassembler("nvdisasm")

    def test_that_is_missing_is_said_by_the_reader(self, planted, monkeypatch) -> None:
        monkeypatch.setattr(disassembler, "candidates", lambda *_: [])
        with pytest.raises(SassError, match="pip install nvidia-cuda-nvdisasm"):
            load_kernels(planted / "one.sm_90a.cubin")

    def test_that_is_too_old_for_the_file(self, planted, tmp_path, monkeypatch) -> None:
        old = program(tmp_path, "nvdisasm", banner("12.9.88"))
        monkeypatch.setattr(disassembler, "candidates", lambda *_: [old])
        with pytest.raises(
            SassError,
            match=r"nvdisasm 12\.9\.88 is older than ptxas 13\.0\.88 that wrote .*one\.sm_90a\.cubi"
            r"n: pip install --upgrade nvidia-cuda-nvdisasm",
        ):
            load_kernels(planted / "one.sm_90a.cubin")

    def test_of_the_same_release_or_newer_will_do(self) -> None:
        tool = Disassembler("nvdisasm", Path("nvdisasm"), (13, 0, 39))
        require_new_enough(tool, "ptxas", (13, 0, 88), "file")
        require_new_enough(tool, "ptxas", (12, 9, 1), "file")
        require_new_enough(tool, "", (), "file")
        with pytest.raises(SassError, match="older"):
            require_new_enough(tool, "ptxas", (13, 1, 0), "file")

    def test_that_hangs_is_stopped(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(disassembler, "TIMEOUT_SECONDS", 0.2)
        hangs = program(tmp_path, "nvdisasm", "exec sleep 60")
        with time_limit(30), pytest.raises(SassError, match=r"stopped after 0\.2 seconds"):
            run_program(hangs, "file")

    def test_that_complains_at_length_is_quoted_on_a_line(self, tmp_path: Path) -> None:
        script = "for i in 1 2 3 4 5 6 7; do echo 'nvdisasm error   : bad' $i >&2; done; exit 1"
        with pytest.raises(SassError) as caught:
            run_program(program(tmp_path, "nvdisasm", script), "file")
        assert str(caught.value) == "nvdisasm file: bad 5; bad 6; bad 7"

    def test_that_crashes_is_reported(self, tmp_path: Path) -> None:
        crashes = program(tmp_path, "nvdisasm", "kill -SEGV $$")
        with pytest.raises(SassError, match="stopped by signal 11"):
            run_program(crashes, "file")

    def test_that_refuses_a_file_is_followed_by_an_older_one(
        self, planted: Path, tmp_path: Path, monkeypatch
    ) -> None:
        """As nvdisasm 13.5 refuses sm_70, which 13.0 reads."""
        refusal = (
            "echo 'nvdisasm fatal   : SM70 is deprecated. Please use 13.0 or earlier' >&2; exit 1"
        )
        script = f'if [ "$1" = --version ]; then {banner("99.5.37")}; else {refusal}; fi'
        newest = program(tmp_path / "newest", "nvdisasm", script)
        real = find_disassembler("nvdisasm")
        path = planted / "unrolled.sm_80.cubin"
        cache = DisassemblyCache(tmp_path / "cache")
        monkeypatch.setattr(disassembler, "candidates", lambda *_: [newest])
        with pytest.raises(
            SassError,
            match=r"unrolled\.sm_80\.cubin: SM70 is deprecated\. Please use 13\.0 or earlier "
            r"\(tried nvdisasm 99\.5\.37: for another, name its toolkit in CUDA_HOME\)",
        ):
            load_kernels(path, cache=cache)
        monkeypatch.setattr(disassembler, "candidates", lambda *_: [newest, real.path])
        assert load_kernels(path, cache=cache) == load_kernels(path)

    def test_names_symbols_in_cpp(self, planted: Path) -> None:
        data = bytearray((planted / "functions.sm_90.cubin").read_bytes())
        tables = [s for s in read_sections(bytes(data), "f") if s.name == ".symtab"]
        start = data.index(bytes(tables[0].content))
        symbols = read_cubin(bytes(data), "f").symbols
        symbol = next(s for s in symbols if s.is_function and s.name.startswith("_Z"))
        data[start + 24 * symbol.index + 16] ^= 0x10  # a bit of st_size
        with pytest.raises(SassError, match=r"^f is damaged: the code of (\w+::)*\w+\(") as caught:
            read_cubin(bytes(data), "f")
        assert "_Z" not in str(caught.value)

    def test_reads_a_file_to_be_linked(self, planted: Path) -> None:
        kernels = {k.symbol: k for k in load_kernels(planted / "relocatable.o")}
        (call,) = (i for i in kernels["table"].instructions if i.base == "CALL")
        assert "_Z7collatzi" in call.operands
        assert len(kernels["divergent"].loops) == 4

    def test_that_crashes_on_a_file_to_be_linked(self, planted: Path, tmp_path: Path) -> None:
        crashes = Disassembler("nvdisasm", program(tmp_path, "nvdisasm", "kill -SEGV $$"), (13, 5))
        (member,) = cubins_of(planted / "relocatable.o")
        cubin = member.cubin()
        batch = Batch((Request(member, cubin, cubin.kernels[0]),), merged=False)
        with pytest.raises(SassError, match=r"relocatable\.o:.*-rdc=true.*link it first"):
            disassemble([crashes], batch, tmp_path)

    @pytest.mark.parametrize(
        "output",
        [
            "",
            "[]",
            "{}",
            "[{}, 5]",
            '[{}, [{"function-name": "one"}]]',
            '[{}, [{"function-name": "one", "start": 0, "sass-instructions": []}]]',
            '[{}, [{"function-name": "one", "start": 0, "sass-instructions": [1, 2]}]]',
            "not JSON",
        ],
    )
    def test_that_prints_nonsense(self, output: str, planted: Path, tmp_path: Path) -> None:
        script = f"cat <<'END'\n{output}\nEND"
        tool = Disassembler("nvdisasm", program(tmp_path, "nvdisasm", script), (99, 0))
        path = planted / "one.sm_90a.cubin"
        cubin = read_cubin(path.read_bytes(), path.name)
        batch = Batch((Request(*members_of(path), cubin, cubin.kernels[0]),), False)
        with pytest.raises(SassError):
            disassemble([tool], batch, tmp_path)


def disassembly() -> tuple[Disassembly, bytes]:
    """Two instructions, and their words."""
    words = [0x1234 << 100, 0x5678]
    code = b"".join(word.to_bytes(INSTRUCTION_BYTES, "little") for word in words)
    operations = (
        Operation(0, words[0], "@!P0", "BRA", "0x10", 16),
        Operation(16, words[1], "", "NOP", "", None),
    )
    return (
        Disassembly(
            operations,
            (LiveRegisters(3, 1, 0, 0), None),
            ((Line("a.cu", 3), Line("b.cu", 4)), ()),
            (7, None),
        ),
        code,
    )


class TestCacheEntries:
    @pytest.mark.parametrize("damage", ["cut", "bit", "other kernel", "no JSON", "other JSON"])
    def test_that_are_damaged_are_refused(self, damage: str) -> None:
        original, code = disassembly()
        data = encode(original)
        damaged = {
            "cut": data[:-1],
            "bit": data[:50] + bytes([data[50] ^ 1]) + data[51:],
            "other kernel": encode(
                replace(original, operations=original.operations[:1], live=original.live[:1])
            ),
            "no JSON": zlib.compress(b"[1, 2"),
            "other JSON": zlib.compress(b'{"texts": []}'),
        }
        with pytest.raises(SassError):
            decode(damaged[damage], code)

    def test_are_named_by_all_that_matters(self) -> None:
        keys = {
            entry_key(cubin_digest(cubin), symbol, tool)
            for cubin in (b"a", b"b")
            for symbol in ("k", "l")
            for tool in ("nvdisasm 13.5", "nvdisasm 13.6")
        }
        assert len(keys) == 8

    def test_lie_where_the_user_says(self, monkeypatch) -> None:
        monkeypatch.setenv("FLASH_HELPERS_SASS_CACHE", "/x")
        assert cache_folder() == Path("/x")
        monkeypatch.delenv("FLASH_HELPERS_SASS_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", "/c")
        assert cache_folder() == Path("/c/flash_helpers/sass")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_folder() == Path.home() / ".cache/flash_helpers/sass"

    def test_make_room_the_longest_unused_first(self, tmp_path: Path) -> None:
        original, code = disassembly()
        size = len(encode(original))
        cache = DisassemblyCache(tmp_path, max_bytes=4 * size)
        for number in range(5):
            cache.write(f"k{number}", original)
            os.utime(tmp_path / f"k{number}.sass", (number, number))
        assert cache.read("k0", code) == original  # used now
        cache.prune()
        assert {path.stem for path in tmp_path.iterdir()} == {"k0", "k4"}

    def test_that_cannot_be_finished_leave_nothing(self, tmp_path, monkeypatch) -> None:
        def full(*_: object) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(Path, "replace", full)
        DisassemblyCache(tmp_path).write("key", disassembly()[0])
        assert not list(tmp_path.iterdir())


class TestFiles:
    @pytest.mark.parametrize(
        ("path", "reason"),
        [
            (os.devnull, "is not an ELF file"),
            (".", "cannot be read: Is a directory"),
            (sys.executable, "holds no device code"),
        ],
    )
    def test_without_machine_code(self, path: str, reason: str) -> None:
        with pytest.raises(SassError, match=reason):
            load_kernels(Path(path))

    def test_a_library_that_is_cut_off_is_told_from_one_without_device_code(self, tmp_path) -> None:
        cut = tmp_path / "cut.so"
        cut.write_bytes(library_path().read_bytes()[:3000])
        with pytest.raises(SassError, match=r"cut\.so is truncated"):
            list_kernels(cut)

    @pytest.mark.parametrize("name", ["spills.sm_90.cubin", "one.o", "libone.so"])
    def test_that_are_cut_off(self, name: str, planted: Path, tmp_path: Path) -> None:
        data = (planted / name).read_bytes()
        for size in (1, 4, 16, 63, 64, 100, len(data) // 2, len(data) - 64):
            (tmp_path / name).write_bytes(data[:size])
            with pytest.raises(SassError):
                load_kernels(tmp_path / name)

    def test_a_fatbin_that_is_cut_off_holds_what_is_left(self, planted: Path, tmp_path) -> None:
        data = (planted / "one.fatbin").read_bytes()
        (tmp_path / "one.fatbin").write_bytes(data[: len(data) // 2])
        with pytest.warns(
            SassWarning, match=r"is truncated .* member at byte 3192 ends at byte 68"
        ):
            assert list_kernels(tmp_path / "one.fatbin") == [("sm_80", "one")]
        for size in (1, 4, 16, 63, 64, 100):
            (tmp_path / "one.fatbin").write_bytes(data[:size])
            with pytest.raises(SassError):
                load_kernels(tmp_path / "one.fatbin")

    def test_for_an_architecture_that_is_too_old(self, planted: Path) -> None:
        data = bytearray((planted / "old.sm_80.cubin").read_bytes())
        data[48] = 61  # e_flags
        with pytest.raises(SassError, match="is for sm_61: only code for sm_70 and later"):
            read_cubin(bytes(data), "file")

    def test_whose_headers_disagree_on_registers(self, planted: Path) -> None:
        data = bytearray((planted / "spills.sm_80.cubin").read_bytes())
        cubin = read_cubin(bytes(data), "file")
        count = cubin.sections[".nv.info"].data.index(bytes([4, 0x2F]))
        data[data.find(cubin.sections[".nv.info"].data) + count + 8] += 1
        with pytest.raises(SassError, match="33 registers by its attributes and 32 by its section"):
            read_cubin(bytes(data), "file")

    def test_whose_attribute_ends_within_a_word(self, planted: Path) -> None:
        data = (planted / "ends.sm_90.cubin").read_bytes()
        info = read_cubin(data, "file").sections[".nv.info.spills_beside_array"].data
        at = info.index(bytes([4, EIATTR_ANNOTATIONS]))
        size = int.from_bytes(info[at + 2 : at + 4], "little")
        odd = info[: at + 2] + struct.pack("<H", size - 1) + info[at + 4 :]
        expected = r"file is damaged: its attribute 0x\w\w is \d+ bytes, in words of 4"
        with pytest.raises(SassError, match=expected):
            read_cubin(data.replace(info, odd), "file")

    @pytest.mark.parametrize("size", [0, 16])
    def test_whose_shared_memory_is_less_than_what_is_reserved(self, planted: Path, size) -> None:
        """The sections of cuFFT 12.5 for sm_90 hold 0 bytes: nothing is reserved in them."""
        data = bytearray((planted / "several.sm_90.cubin").read_bytes())
        before = read_cubin(bytes(data), "file").sections[".nv.shared.nested"]
        headers = int.from_bytes(data[40:48], "little")
        struct.pack_into("<Q", data, headers + 64 * before.index + 32, size)
        kernels = read_cubin(bytes(data), "file").kernels
        found = {k.symbol: k.resources.static_smem_bytes for k in kernels}
        assert (before.size, found["nested"]) == (1024 + 1200, size)

    def test_one_damaged_kernel_does_not_spoil_the_others(self, planted: Path, tmp_path) -> None:
        """Merged for one run, they are told apart again when it fails."""
        good = planted / "unrolled.sm_80.cubin"
        requests = []
        for path, code in ((good, None), (planted / "spills.sm_80.cubin", b"\xff" * 64)):
            cubin = read_cubin(path.read_bytes(), path.name)
            (kernel,) = cubin.kernels
            if code is not None:
                section = replace(kernel.section, content=code)
                kernel = replace(kernel, section=section)
            requests.append(Request(*members_of(path), cubin, kernel))
        tool = find_disassembler("nvdisasm")
        with pytest.raises(SassError, match=r"spills\.sm_80\.cubin"):
            disassemble([tool], Batch(tuple(requests), merged=True), tmp_path)


# What is damaged, and how often: the ELF layer is cheap, disassembling is not.
FUZZED_CUBINS = ("spills.sm_80", "filler.sm_90", "several.sm_90", "old.sm_80", "one.sm_90a")
FUZZED_CONTAINERS = (
    "one.o",
    "one.fatbin",
    "libone.so",
    "only_ptx.fatbin",
    "packed_lz4.fatbin",
    "packed_zstd.fatbin",
)
DISASSEMBLED_CUBINS = ("spills.sm_80", "unrolled.sm_80", "filler.sm_90", "old.sm_80")
HEADER_VARIANTS = 180  # of each cubin, without nvdisasm
CONTAINER_VARIANTS = 100  # of each container, without nvdisasm
DISASSEMBLED_VARIANTS = 6  # of each cubin
EXTREMES = (0, 1, 0x7F, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)


def damaged(data: bytes, generator: random.Random) -> bytes:
    """A variant of a file: cut off, with bits turned over, numbers replaced, or parts moved."""
    variant = bytearray(data)
    # half of the time in the header or the section headers, which stand at the two ends
    places = [
        range(len(data)),
        range(min(64, len(data))),
        range(max(0, len(data) - 3000), len(data)),
    ]
    place = generator.choice([places[0], *places])
    kind = generator.randrange(5)
    at = generator.choice(place)
    if kind == 0:
        del variant[at:]
    elif kind == 1:
        for _ in range(generator.randint(1, 8)):
            variant[generator.choice(place)] ^= 1 << generator.randrange(8)
    elif kind == 2:
        number = struct.pack("<Q", generator.choice(EXTREMES))[: generator.choice((1, 2, 4, 8))]
        variant[at : at + len(number)] = number
    elif kind == 3:
        variant[at : at + generator.randint(1, 200)] = bytes(generator.randint(1, 200))
    else:
        other = generator.randrange(len(data))
        variant[at : at + 32] = data[other : other + 32]
    return bytes(variant[: len(data)])


def check_disassembled(path: Path, symbols: set[str]) -> int:
    """Load a damaged file; returns 1 if that worked, after looking at what came of it."""
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", SassWarning)
            kernels = load_kernels(path)
    except SassError as error:
        assert str(error)
        return 0
    missing = symbols - {kernel.symbol for kernel in kernels}
    named = {name for t in told for name in str(t.message).rpartition("left out: ")[2].split(", ")}
    assert missing == named & symbols
    cubin = read_cubin(path.read_bytes(), path.name)
    for kernel in kernels:
        (own,) = (k for k in cubin.kernels if k.symbol == kernel.symbol)
        words = [own.code[at : at + 16] for at in range(0, len(own.code), 16)]
        assert [i.encoding.to_bytes(16, "little") for i in kernel.instructions] == words
        assert sum(block.end - block.start for block in kernel.blocks) == len(own.code)
        for i in kernel.instructions:
            uniform = i.predicate.startswith(("@UP", "@!UP"))
            assert guard_text(i.encoding, uniform) == i.predicate
    return 1


def check_headers(name: str, planted: Path, seed: str) -> None:
    """Damaged cubins are read right or refused, without nvdisasm."""
    data = (planted / f"{name}.cubin").read_bytes()
    pristine = read_cubin(data, name)
    sizes = {kernel.symbol: len(kernel.code) for kernel in pristine.kernels}
    generator = random.Random(seed)
    survivors = 0
    with time_limit(120):
        for _ in range(HEADER_VARIANTS):
            try:
                cubin = read_cubin(damaged(data, generator), name)
                for lines in (CUDA_LINES, PTX_LINES):
                    read_line_tables(cubin, lines)
            except SassError as error:
                assert str(error)
                continue
            survivors += 1
            assert {k.symbol: len(k.code) for k in cubin.kernels} == sizes
    assert 0 < survivors < HEADER_VARIANTS


def check_container(name: str, planted: Path, folder: Path, seed: str) -> None:
    """Damaged containers list the kernels that are left, with a warning or an error."""
    data = (planted / name).read_bytes()
    path = folder / name
    expected = [] if name == "only_ptx.fatbin" else list_kernels(planted / name)
    generator = random.Random(seed)
    with time_limit(240):
        for _ in range(CONTAINER_VARIANTS):
            path.write_bytes(damaged(data, generator))
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    found = list_kernels(path)
                except SassError as error:
                    assert str(error)
                    continue
            assert found == [kernel for kernel in expected if kernel in found]
            assert warned or len(found) == len(expected)


def check_code(name: str, planted: Path, folder: Path, seed: str) -> None:
    """Damaged code is disassembled as it stands in the file, or refused.

    Damage that the headers refuse is seen by check_headers: half of the variants here damage only
    what nvdisasm will read.
    """
    data = (planted / f"{name}.cubin").read_bytes()
    path = folder / f"{name}.cubin"
    path.write_bytes(data)
    symbols = {kernel.symbol for kernel in load_kernels(path)}
    generator = random.Random(seed)
    code = read_cubin(data, name).kernels[0].code
    start = data.index(code)
    loaded = 0
    with time_limit(40 * DISASSEMBLED_VARIANTS):
        for number in range(DISASSEMBLED_VARIANTS):
            if number % 2:
                variant = damaged(data, generator)
            else:
                changed = damaged(code, generator).ljust(len(code), b"\0")
                variant = data[:start] + changed + data[start + len(code) :]
            path.write_bytes(variant)
            loaded += check_disassembled(path, symbols)
    assert loaded


EACH_PART = pytest.mark.parametrize(
    "part", ["", *(pytest.param(f" {n}", marks=pytest.mark.mutants) for n in range(17))]
)
"""Fifteen hundred variants, the same ones each time; 26,000 with the mutants."""


@EACH_PART
class TestDamagedFiles:
    @pytest.mark.parametrize("name", FUZZED_CUBINS)
    def test_headers_and_line_tables(self, name: str, part: str, planted: Path) -> None:
        check_headers(name, planted, name + part)

    @pytest.mark.parametrize("name", FUZZED_CONTAINERS)
    def test_containers(self, name: str, part: str, planted: Path, tmp_path: Path) -> None:
        check_container(name, planted, tmp_path, name + part)

    @pytest.mark.parametrize("name", DISASSEMBLED_CUBINS)
    def test_disassembled(self, name, part, planted, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr(disassembler, "TIMEOUT_SECONDS", 20.0)
        check_code(name, planted, tmp_path, f"disassembled {name}{part}")
