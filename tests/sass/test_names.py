"""One name for a kernel in a file, on every tool that takes one."""

import json
from pathlib import Path

import pytest
from archives import archive
from fake_backend import run_tool
from sass_text import DEFAULT

from flash_helpers.runtime.library import library_path
from flash_helpers.sass.read.choice import KernelPath, members_named
from flash_helpers.sass.read.reader import find_kernels, load_kernel, load_kernels
from flash_helpers.sass.read.records import SassError
from flash_helpers.sass.show import listing_counts

pytestmark = pytest.mark.slow

EXTRACT = "tools/build/extract_sass.py"


class TestPath:
    @pytest.fixture(autouse=True)
    def files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("lib.so", "c#.cubin", "me@home.a", "me@home.a#one"):
            Path(name).touch()

    @pytest.mark.parametrize(
        ("text", "path", "member", "name"),
        [
            ("lib.so", "lib.so", "", ""),
            ("lib.so#k", "lib.so", "", "k"),
            ("lib.so@one.sm_80.cubin#k", "lib.so", "one.sm_80.cubin", "k"),
            ("lib.so@one.sm_80.cubin", "lib.so", "one.sm_80.cubin", ""),
            ("lib.so#main::{lambda()#2}::operator()() const", "lib.so", "",
             "main::{lambda()#2}::operator()() const"),
            ("lib.so#a@b", "lib.so", "", "a@b"),
            ("lib.so#" + "x" * 5000, "lib.so", "", "x" * 5000),
            # characters of the file's own name
            ("c#.cubin", "c#.cubin", "", ""),
            ("c#.cubin#k", "c#.cubin", "", "k"),
            ("me@home.a@x#k", "me@home.a", "x", "k"),
            ("me@home.a#one", "me@home.a#one", "", ""),
            ("me@home.a#two", "me@home.a", "", "two"),
            # of no file that is there
            ("v7", "v7", "", ""),
            ("no.so#k", "no.so", "", "k"),
            ("-#k", "-", "", "k"),
            ("", ".", "", ""),
        ],
    )  # fmt: skip
    def test_of(self, text: str, path: str, member: str, name: str) -> None:
        assert KernelPath.parse(text) == KernelPath(Path(path), member, name)


class TestMembers:
    def test_are_named_by_a_part(self) -> None:
        there = ["one.sm_80.cubin", "one.2.sm_80.cubin", "two.sm_80.cubin"]
        assert members_named("f", there, "one.sm_80.cubin") == {"one.sm_80.cubin"}
        assert members_named("f", there, "one") == set(there[:2])
        with pytest.raises(SassError, match=r"f has no member 'x', only one\.sm_80\.cubin, one\.2"):
            members_named("f", there, "x")
        with pytest.raises(SassError, match=r"has no member 'x', only itself$"):
            members_named("f", [""], "x")


@pytest.fixture
def twice(planted: Path, tmp_path: Path) -> Path:
    """A library with several kernels of one name."""
    path = tmp_path / "lib.a"
    one = (planted / "one.o").read_bytes()
    path.write_bytes(archive((b"a.o/", one), (b"b.o/", one)))
    return path


class TestDuplicates:
    def test_are_listed_with_their_members(self, twice: Path, capsys) -> None:
        _, out, _ = run_tool(capsys, EXTRACT, twice, "--list", "--arch", "sm_90")
        assert out.splitlines() == [
            "sm_90   one @one.sm_90.cubin",
            "sm_90   one @one.2.sm_90.cubin",
        ]

    def test_are_told_by_their_members(self, twice: Path) -> None:
        with pytest.raises(SassError) as error:
            load_kernel(twice, "sm_90", ["one"])
        assert str(error.value) == (
            f"{twice} holds 2 kernels one, in one.sm_90.cubin, one.2.sm_90.cubin: name one of "
            f"these, such as {twice}@one.sm_90.cubin#one"
        )
        found = load_kernel(twice, "sm_90", ["one"], "one.2.sm_90.cubin")
        assert found.origin == f"{twice}:one.2.sm_90.cubin"
        assert len(load_kernels(twice, "sm_90", ["one"])) == 2

    def test_of_many_members_are_told_in_short(self, planted: Path, tmp_path: Path) -> None:
        one = (planted / "one.sm_90a.cubin").read_bytes()
        path = tmp_path / "lib.a"
        path.write_bytes(archive(*((b"m%d.o/" % n, one) for n in range(30))))
        with pytest.raises(SassError, match=r"holds 30 kernels one, in m0\..* and 14 more: name"):
            load_kernel(path)


class TestDeviceFunctions:
    def test_are_listed_and_disassembled(self, planted: Path, capsys) -> None:
        path = planted / "functions.sm_90.cubin"
        listed = run_tool(capsys, EXTRACT, path, "--list")[1].splitlines()
        assert "sm_90   _Z5twicei twice(int) (device function)" in listed
        assert "sm_90   calls" in listed
        _, text, _ = run_tool(capsys, EXTRACT, f"{path}#twice(int)")
        assert text.startswith("// device function twice(int)\n")
        assert "UMOV UR4, 32@lo(table) ;" in text and "RET.ABS.NODEC R20" in text

    def test_of_linked_code_are_part_of_their_kernel(self, planted: Path) -> None:
        symbols = {kernel.symbol for kernel in find_kernels(planted / "several.sm_90.cubin")}
        assert "_Z7collatzi" not in symbols


def printed(capsys, tool: str, *arguments: object) -> str:
    status, out, err = run_tool(capsys, tool, *arguments)
    assert (status, err) == (0, "")
    return out


class TestTools:
    """Each takes FILE@MEMBER#NAME, in both kinds of names."""

    @pytest.mark.parametrize(
        "name", ["libone.so@one.sm_90.cubin#one", "functions.sm_90.cubin#twice(int)"]
    )
    def test_of_machine_code(self, name: str, planted: Path, capsys) -> None:
        file = f"{planted}/{name}"
        text = printed(capsys, EXTRACT, file)
        assert text.count("// compiler") == 1
        text = printed(capsys, "tools/analysis/sass_report.py", file)
        assert text.splitlines()[0] == name.partition("#")[2]
        printed(capsys, "tools/analysis/sass_report.py", file, "--json", "--threads", 64)
        assert listing_counts.main([file, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["functions"] == 1
        tool = "tools/analysis/compare_sass_instruction_counts.py"
        assert "(+0, +0.0%)" in printed(capsys, tool, file, file)

    def test_of_ptx(self, planted: Path, capsys) -> None:
        tool, nested = "tools/build/get_embedded_ptx_from_cubin.py", "several.sm_90.cubin#nest"
        assert ".entry nested(" in printed(capsys, tool, f"{planted}/{nested}")
        assert ".entry one(" in printed(capsys, tool, f"{planted}/libone.so@one.sm_80")
        tool = "tools/analysis/ptx_sass_filter.py"
        assert "FMUL" in printed(capsys, tool, f"{planted}/{nested}", "--fan-out")

    def test_of_a_listing(self, planted: Path, tmp_path: Path, capsys) -> None:
        path = tmp_path / "several.sass"
        several = planted / "several.sm_90.cubin"
        path.write_text(printed(capsys, EXTRACT, several))
        assert listing_counts.main([f"{path}#nested", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["functions"] == 1
        assert listing_counts.main([f"{path}@x#nested"]) == 2
        assert "is a text, which has no member 'x'" in capsys.readouterr().err

    def test_of_a_step_in_the_library(self, capsys) -> None:
        name = f"{library_path()}#v3_bf16_d128_Br64"
        text = printed(capsys, EXTRACT, name, "--arch", DEFAULT, "--list")
        assert len(text.splitlines()) == 1
