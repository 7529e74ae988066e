"""A tool that is given another file than it wants says what that file is, and what to do."""

from __future__ import annotations

import gzip
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_backend import load_tool

from flash_helpers.console.file_kinds import FileKind, kind_of, mistaken
from flash_helpers.sass.read.reader import load_kernels
from flash_helpers.sass.show import clean_listing, listing_counts
from flash_helpers.sass.show.extract import listing_text

pytestmark = pytest.mark.slow

# what each file is, whatever its name says
KINDS = {
    "a.cubin": FileKind.CUBIN,
    "b.ptx": FileKind.CUBIN,
    "c.o": FileKind.ELF,
    "d.so": FileKind.ELF,
    "e.fatbin": FileKind.FATBIN,
    "f.a": FileKind.ARCHIVE,
    "g.sass": FileKind.SASS,
    "h.ptx": FileKind.PTX,
    "i.cubin": FileKind.PTX,
    "j.log": FileKind.LOG,
    "k.cu": FileKind.CUDA,
    "l.ptx.gz": FileKind.PACKED,
    "m.zip": FileKind.PACKED,
    "n.tar": FileKind.PACKED,
    "o.txt": None,
    "p.bin": None,
    "q": None,
}


@pytest.fixture(scope="module")
def folder(planted: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of KINDS."""
    found = tmp_path_factory.mktemp("files")
    cubin, example = planted / "unrolled.sm_90.cubin", root / "examples/own_kernel"
    object_file = (planted / "one.o").read_bytes()
    member = f"{'one.o/':<16}{0:<12}{0:<6}{0:<6}{644:<8}{len(object_file):<10}`\n".encode()
    contents = {
        "a.cubin": cubin.read_bytes(),
        "b.ptx": cubin.read_bytes(),
        "c.o": object_file,
        "d.so": (planted / "libone.so").read_bytes(),
        "e.fatbin": (planted / "one.fatbin").read_bytes(),
        "f.a": b"!<arch>\n" + member + object_file,
        "g.sass": "".join(map(listing_text, load_kernels(cubin))).encode(),
        "h.ptx": (example / "row_softmax.ptx").read_bytes(),
        "i.cubin": (example / "row_softmax.ptx").read_bytes() + b"\0",  # as a fatbin holds it
        "j.log": (planted / "spills.sm_90.log").read_bytes(),
        "k.cu": (example / "row_softmax.cu").read_bytes(),
        "l.ptx.gz": gzip.compress((example / "row_softmax.ptx").read_bytes()),
        "o.txt": b"hello\n",
        "p.bin": bytes(range(256)),
        "q": b"",
    }
    for name, data in contents.items():
        (found / name).write_bytes(data)
    with zipfile.ZipFile(found / "m.zip", "w") as packed:
        packed.write(found / "h.ptx", "h.ptx")
    with tarfile.open(found / "n.tar", "w") as packed:
        packed.add(found / "h.ptx", "h.ptx")
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_known_by_its_content(name: str, folder: Path) -> None:
    assert kind_of((folder / name).read_bytes()) is KINDS[name]


Main = Callable[[list[str]], int]
MACHINE_CODE = tuple(kind for kind in FileKind if kind.has_machine_code)
# by name: how it is run on a file, and what it reads
TOOLS: dict[str, tuple[Callable[[], Main], list[str], tuple[FileKind, ...]]] = {
    "debug": (lambda: load_tool("tools/debug/debug.py").main, ["--ptx"], (FileKind.PTX,)),
    "extract": (lambda: load_tool("tools/build/extract_sass.py").main, ["--list"], MACHINE_CODE),
    "embedded": (
        lambda: load_tool("tools/build/get_embedded_ptx_from_cubin.py").main,
        [],
        MACHINE_CODE,
    ),
    "report": (lambda: load_tool("tools/analysis/sass_report.py").main, [], MACHINE_CODE),
    "filter": (
        lambda: load_tool("tools/analysis/ptx_sass_filter.py").main,
        ["--fan-out"],
        MACHINE_CODE,
    ),
    "resources": (
        lambda: load_tool("tools/analysis/check_resources.py").main,
        ["--library"],
        MACHINE_CODE,
    ),
    "counts": (lambda: listing_counts.main, [], (*MACHINE_CODE, FileKind.SASS)),
    "clean": (lambda: clean_listing.main, [], (FileKind.SASS,)),
    "ptxas": (lambda: load_tool("tools/build/parse_ptx_build.py").main, [], (FileKind.LOG,)),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_says_what_a_file_is_that_it_cannot_read(
    tool: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    find, options, wanted = TOOLS[tool]
    kind = KINDS[name]
    monkeypatch.chdir(folder)
    status = find()([*options, name])
    out, err = capsys.readouterr()
    if kind in wanted:
        assert f"{name} is " not in err
        return
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith((f"{name} ", f"{name}: "))
    if kind is not None:
        assert err.startswith(f"{name} is {kind.value}")
        assert ", not " in err and ": " in err


@pytest.mark.parametrize(
    ("name", "wanted", "told"),
    [
        ("b.ptx", FileKind.PTX, "a cubin, not PTX: use python tools/analysis/sass_report.py b.ptx"),
        (
            "i.cubin",
            FileKind.CUBIN,
            "PTX, not a cubin: use python tools/debug/debug.py --ptx i.cubin, or compile it with "
            "ptxas -arch=sm_90 i.cubin -o out.cubin",
        ),
        ("k.cu", FileKind.PTX, "CUDA C++, not PTX: compile it with nvcc -ptx -lineinfo k.cu"),
        ("l.ptx.gz", FileKind.PTX, "packed (gzip), not PTX: unpack it"),
        ("n.tar", FileKind.CUBIN, "packed (tar), not a cubin: unpack it"),
    ],
)
def test_the_way_out_names_the_tool_for_it(name, wanted, told, folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    assert mistaken(name, Path(name).read_bytes(), wanted) == f"{name} is {told}"


def test_a_name_can_be_pasted_into_a_shell() -> None:
    assert mistaken("my file", b"!<arch>\n", FileKind.SASS) == (
        "my file is an archive of object files, not a listing of SASS: use python "
        "tools/build/extract_sass.py 'my file'"
    )


def test_what_is_wanted_or_unknown_is_no_mistake() -> None:
    assert mistaken("a.so", b"\x7fELF" + bytes(60), FileKind.CUBIN) is None
    assert mistaken("a.txt", b"hello", FileKind.PTX) is None
