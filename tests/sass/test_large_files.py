"""Files of many kernels: read once, and a few kernels in memory at a time."""

import gc
import io
import os
from pathlib import Path

import pytest
from archives import archive
from fake_backend import load_tool

from flash_helpers.console.command_line import print_texts
from flash_helpers.sass.read import containers, reader
from flash_helpers.sass.read.cache import DisassemblyCache
from flash_helpers.sass.read.disassembly import Disassembly
from flash_helpers.sass.read.records import Kernel, SassError, SassWarning
from flash_helpers.sass.show import listing_counts

pytestmark = pytest.mark.slow

MEMBERS = ("spills.sm_90", "unrolled.sm_90", "filler.sm_90", "predicates.sm_90")


@pytest.fixture
def library(planted: Path, tmp_path: Path) -> Path:
    """An archive of several cubins with a kernel each."""
    path = tmp_path / "many.a"
    members = [(f"{n[:4]}.o/".encode(), (planted / f"{n}.cubin").read_bytes()) for n in MEMBERS]
    path.write_bytes(archive(*members))
    return path


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, ...], list[Disassembly]]:
    """The answers of nvdisasm by names of kernels: it is asked once in all tests."""
    return {}


@pytest.fixture
def disassembled(monkeypatch, tmp_path: Path, answers: dict) -> list[str]:
    """Names of the kernels that nvdisasm was asked for, one kernel at a time."""
    asked = []
    real = reader.disassemble

    def disassemble(tools, batch, folder):
        symbols = tuple(request.kernel.symbol for request in batch.requests)
        asked.extend(symbols)
        if symbols not in answers:
            answers[symbols] = real(tools, batch, folder)
        return answers[symbols]

    monkeypatch.setattr(reader, "disassemble", disassemble)
    monkeypatch.setattr(reader, "_AT_ONCE", 1)
    monkeypatch.setenv("FLASH_HELPERS_SASS_CACHE", str(tmp_path / "cache"))
    return asked


class TestOneByOne:
    def test_a_kernel_is_there_before_the_next_is_disassembled(
        self, library: Path, disassembled: list[str]
    ) -> None:
        kernels = reader.iter_kernels(library)
        for number, kernel in enumerate(kernels, start=1):
            assert len(disassembled) == number
            assert disassembled[-1] == kernel.symbol
        assert number == len(MEMBERS)

    def test_those_given_out_are_not_kept(
        self, library: Path, disassembled: list[str], frozen: None
    ) -> None:
        for kernel in reader.iter_kernels(library):
            gc.collect()
            alive = [o for o in gc.get_objects() if type(o) is Kernel]
            assert len(alive) == 1 and alive[0] is kernel
            del alive
        assert len(disassembled) == len(MEMBERS)

    def test_extract_sass_writes_each_when_it_is_read(
        self, library: Path, disassembled: list[str]
    ) -> None:
        tool = load_tool("tools/build/extract_sass.py")
        texts = tool.extract(tool.parse_arguments([str(library)]))
        for number, text in enumerate(texts, start=1):
            assert text.count("\t.section") == 1 and len(disassembled) == number

    def test_a_reader_that_has_seen_enough_stops_the_work(
        self, library: Path, disassembled: list[str], monkeypatch
    ) -> None:
        written = []

        class Closed(io.StringIO):
            def write(self, text: str) -> int:
                written.append(text)
                raise BrokenPipeError

            def fileno(self) -> int:
                return os.open(os.devnull, os.O_WRONLY)

        monkeypatch.setattr("sys.stdout", Closed())
        tool = load_tool("tools/build/extract_sass.py")
        print_texts(tool.extract(tool.parse_arguments([str(library), "--cfg"])))
        assert len(written) == len(disassembled) == 1

    def test_counting_takes_one_walk_through_the_file(
        self, library: Path, disassembled: list[str], monkeypatch, capsys
    ) -> None:
        walks = []
        real = containers.members_of
        monkeypatch.setattr(containers, "members_of", lambda path: walks.append(path) or real(path))
        read_bytes = Path.read_bytes

        def not_the_library(path: Path) -> bytes:
            assert path != library, "it was read whole"
            return read_bytes(path)

        monkeypatch.setattr(Path, "read_bytes", not_the_library)
        assert listing_counts.main([str(library)]) == 0
        assert len(walks) == 1 and len(disassembled) == len(MEMBERS)
        assert "total" in capsys.readouterr().out


class TestWhatCannotBeDisassembled:
    @pytest.fixture
    def refuses(self, monkeypatch, tmp_path: Path):
        """Makes nvdisasm refuse an architecture; returns how often it was asked."""
        real, asked = reader.disassemble, []

        def plant(architecture: str, why: str) -> list[str]:
            def disassemble(tools, batch, folder):
                asked.append(batch.requests[0].cubin.architecture)
                if any(r.cubin.architecture == architecture for r in batch.requests):
                    raise SassError(why)
                return real(tools, batch, folder)

            monkeypatch.setattr(reader, "disassemble", disassemble)
            return asked

        monkeypatch.setattr(reader, "_AT_ONCE", 1)
        self.cache = DisassemblyCache(tmp_path / "cache")
        return plant

    def load(self, *arguments) -> list[Kernel]:
        return reader.load_kernels(*arguments, cache=self.cache)

    def test_is_a_warning_where_others_can(self, refuses, planted: Path) -> None:
        refuses("sm_80", "nvdisasm f.cubin: it crashed")
        with pytest.warns(SassWarning, match="it crashed: left out: one$"):
            found = self.load(planted / "one.fatbin")
        assert [kernel.architecture for kernel in found] == ["sm_90"]

    def test_is_an_error_where_none_can(self, refuses, planted: Path) -> None:
        refuses("sm_80", "nvdisasm f.cubin: it crashed")
        with pytest.raises(SassError, match="it crashed"):
            self.load(planted / "one.fatbin", "sm_80")

    def test_of_a_refused_architecture_is_told_once_and_asked_once(
        self, refuses, planted: Path
    ) -> None:
        asked = refuses("sm_80", 'nvdisasm f: CUDA architecture "SM80" is deprecated')
        with pytest.warns(SassWarning) as warned:
            found = self.load(planted / "libone.so")
        assert {kernel.architecture for kernel in found} == {"sm_90"} and len(found) == 2
        assert asked.count("sm_80") == 1
        (told,) = (str(warning.message) for warning in warned)
        assert told.startswith("sm_80 cannot be read: ") and told.endswith("left out: one, other")
