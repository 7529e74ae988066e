"""A tool that is given another file than it wants says what that file is, and what to do."""

import gzip
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from archives import archive
from fake_backend import run_tool

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
    "o.ltoir": FileKind.LTO_IR,
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
    contents = {
        "a.cubin": cubin.read_bytes(),
        "b.ptx": cubin.read_bytes(),
        "c.o": object_file,
        "d.so": (planted / "libone.so").read_bytes(),
        "e.fatbin": (planted / "one.fatbin").read_bytes(),
        "f.a": archive((b"one.o/", object_file)),
        "g.sass": "".join(map(listing_text, load_kernels(cubin))).encode(),
        "h.ptx": (example / "row_softmax.ptx").read_bytes(),
        "i.cubin": (example / "row_softmax.ptx").read_bytes() + b"\0",  # as a fatbin holds it
        "j.log": (planted / "spills.sm_90.log").read_bytes(),
        "k.cu": (example / "row_softmax.cu").read_bytes(),
        "l.ptx.gz": gzip.compress((example / "row_softmax.ptx").read_bytes()),
        "o.ltoir": b"\xedCN\x7f\x01A\x02b",
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


MACHINE_CODE = tuple(kind for kind in FileKind if kind.has_machine_code)
# by name: the tool, or the module of it; its options; what it reads
TOOLS: dict[str, tuple[str | ModuleType, list[str], tuple[FileKind, ...]]] = {
    "debug": ("tools/debug/debug.py", ["--ptx"], (FileKind.PTX,)),
    "extract": ("tools/build/extract_sass.py", ["--list"], MACHINE_CODE),
    "embedded": ("tools/build/get_embedded_ptx_from_cubin.py", [], MACHINE_CODE),
    "report": ("tools/analysis/sass_report.py", [], MACHINE_CODE),
    "filter": ("tools/analysis/ptx_sass_filter.py", ["--fan-out"], MACHINE_CODE),
    "counts": (listing_counts, [], (*MACHINE_CODE, FileKind.SASS)),
    "clean": (clean_listing, [], (FileKind.SASS,)),
    "ptxas": ("tools/build/parse_ptx_build.py", [], (FileKind.LOG,)),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_says_what_a_file_is_that_it_cannot_read(
    tool: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    program, options, wanted = TOOLS[tool]
    kind = KINDS[name]
    monkeypatch.chdir(folder)
    status, out, err = run_tool(capsys, program, *options, name)
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
