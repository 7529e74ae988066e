"""Where cubins and PTX are found: every kind of file, and nothing lost on the way."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from sass_text import ARCHITECTURES

from flash_helpers.kernel_configs import get_kernel_progression_configs
from flash_helpers.measure.machine_code import installed_library
from flash_helpers.sass.read.containers import cubins_of, ptx_of
from flash_helpers.sass.read.elf import read_cubin
from flash_helpers.sass.read.reader import list_kernels, load_kernels
from flash_helpers.sass.read.records import SassError

pytestmark = pytest.mark.slow

BOTH = [("sm_80", "one"), ("sm_90", "one")]


class TestKernelsIn:
    def test_a_cubin(self, planted: Path) -> None:
        assert list_kernels(planted / "spills.sm_90.cubin") == [("sm_90", "spills")]

    def test_a_cubin_with_several(self, planted: Path) -> None:
        names = {symbol for _, symbol in list_kernels(planted / "several.sm_80.cubin")}
        assert names == {"divergent", "nested", "table", "local_array"}

    @pytest.mark.parametrize("name", ["one.fatbin", "one.o"])
    def test_a_file_for_two_architectures(self, name: str, planted: Path) -> None:
        assert list_kernels(planted / name) == BOTH

    def test_a_library_whose_cubins_share_names(self, planted: Path, cuobjdump) -> None:
        """cuobjdump extracts one over the other: half of the kernels would be lost."""
        path = planted / "libone.so"
        names = [line.split(": ")[1] for line in cuobjdump("-lelf", path).splitlines()]
        assert len(set(names)) < len(names)
        expected = [(a, kernel) for kernel in ("one", "other") for a in ("sm_80", "sm_90")]
        assert sorted(list_kernels(path)) == sorted(expected)
        kernels = {(k.architecture, k.symbol): k for k in load_kernels(path)}
        assert set(kernels) == set(expected)
        for architecture in ("sm_80", "sm_90"):
            one, other = (
                {i.base for i in kernels[architecture, name].instructions}
                for name in ("one", "other")
            )
            assert "LDG" in other - one  # `x[i] += 2` loads, `x[i] = 1` does not

    def test_a_file_to_be_linked(self, planted: Path) -> None:
        names = {symbol for _, symbol in list_kernels(planted / "relocatable.o")}
        assert names == {"divergent", "nested", "table", "local_array"}

    def test_an_archive(self, planted: Path, tmp_path: Path) -> None:
        content = (planted / "one.o").read_bytes()
        header = f"{'one.o/':<16}{0:<12}{0:<6}{0:<6}{644:<8}{len(content):<10}`\n"
        archive = tmp_path / "libone.a"
        archive.write_bytes(b"!<arch>\n" + header.encode() + content)
        assert list_kernels(archive) == BOTH

    def test_the_installed_library(self) -> None:
        architectures = {architecture for architecture, _ in list_kernels(installed_library())}
        assert architectures == set(ARCHITECTURES)
        for architecture in architectures:
            symbols = [symbol for _, symbol in list_kernels(installed_library(), architecture)]
            for config in get_kernel_progression_configs():
                assert sum(config.short_form() + "EE" in symbol for symbol in symbols) == 1


class TestChoice:
    def test_of_an_architecture(self, planted: Path) -> None:
        (kernel,) = load_kernels(planted / "one.fatbin", "sm_80")
        assert kernel.architecture == "sm_80"

    def test_of_kernels(self, planted: Path) -> None:
        path = planted / "several.sm_90.cubin"
        all_of_them = {kernel.symbol: kernel for kernel in load_kernels(path)}
        (kernel,) = load_kernels(path, names=["table"])
        assert kernel == all_of_them["table"]

    def test_of_an_architecture_that_is_not_there_names_those_that_are(self, planted) -> None:
        with pytest.raises(SassError, match="no kernel for sm_86, only for sm_80, sm_90"):
            load_kernels(planted / "one.o", "sm_86")

    def test_of_an_architecture_with_another_letter(self, planted: Path) -> None:
        path = planted / "one.sm_90a.cubin"
        assert list_kernels(path, "sm_90a") == [("sm_90a", "one")]
        with pytest.raises(SassError, match="no kernel for sm_90, only for sm_90a"):
            list_kernels(path, "sm_90")

    def test_of_kernels_that_are_not_there_names_those_that_are(self, planted: Path) -> None:
        with pytest.raises(SassError, match="only divergent, local_array, nested, table"):
            load_kernels(planted / "several.sm_90.cubin", names=["nix"])

    def test_of_what_is_no_architecture(self, planted: Path) -> None:
        with pytest.raises(SassError, match="'90' is no architecture: write it as in sm_90"):
            load_kernels(planted / "one.o", "90")


class TestArchitecture:
    @pytest.mark.parametrize(
        ("name", "architecture"),
        [
            ("one.sm_90a.cubin", "sm_90a"),  # told by the compiler's note
            ("several.sm_80.cubin", "sm_80"),
            ("old.sm_80.cubin", "sm_80"),  # other bits of the header
            ("old.sm_90.cubin", "sm_90"),
            ("old.sm_90a.cubin", "sm_90a"),  # a bit of the header
        ],
    )
    def test_is_read_from_the_cubin(self, name: str, architecture: str, planted: Path) -> None:
        cubin = read_cubin((planted / name).read_bytes(), name)
        assert cubin.architecture == architecture
        assert f"sm_{cubin.capability}" == architecture.rstrip("a")


class TestAttributes:
    def test_that_are_unknown_are_passed_over(self, planted: Path) -> None:
        """0x5f is unknown here already; give the file more of them, of both layouts."""
        data = bytearray((planted / "several.sm_90.cubin").read_bytes())
        before = read_cubin(bytes(data), "before")
        at = data.find(before.sections[".nv.info.divergent"].data)
        assert at > 0
        # PARAM_CBANK, 4 + 8 bytes; then CBANK_PARAM_SIZE, 4 bytes
        sized = data.find(struct.pack("<BBH", 4, 0x0A, 8), at)
        short = data.find(struct.pack("<BB", 3, 0x19), at)
        data[sized + 1], data[short + 1] = 0xE1, 0xE2
        after = read_cubin(bytes(data), "after")
        assert [k.resources for k in after.kernels] == [k.resources for k in before.kernels]


class TestPtx:
    @pytest.mark.parametrize("name", ["one.fatbin", "one.o", "only_ptx.fatbin"])
    def test_members(self, name: str, planted: Path) -> None:
        ((_, text),) = ptx_of(planted / name).items()
        assert ".visible .entry one(" in text
        assert ".target sm_90" in text

    def test_members_that_share_a_name(self, planted: Path) -> None:
        with cubins_of(planted / "libone.so") as members:
            assert len({member.path for member in members}) == 4

    def test_a_cubin_has_no_members(self, planted: Path) -> None:
        assert ptx_of(planted / "several.sm_90.cubin") == {}


def test_extracted_files_vanish(planted: Path) -> None:
    with cubins_of(planted / "one.o") as members:
        assert all(member.path.is_file() for member in members)
    assert not any(member.path.exists() for member in members)
