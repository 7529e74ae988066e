"""Where cubins and PTX are found: every kind of file, and nothing lost on the way."""

import os
import re
import struct
import tracemalloc
import warnings
from pathlib import Path

import pytest
from archives import archive, host_object
from sass_text import ARCHITECTURES, list_kernels

from flash_helpers.registry.ampere import AMPERE
from flash_helpers.runtime.library import library_path
from flash_helpers.sass.read.containers import Member, MemberKind, cubins_of, members_of, ptx_of
from flash_helpers.sass.read.cubin import read_cubin
from flash_helpers.sass.read.reader import find_kernels, load_kernels
from flash_helpers.sass.read.records import SassError, SassWarning
from flash_helpers.sass.show.extract import ptx_texts

pytestmark = pytest.mark.slow

BOTH = [("sm_80", "one"), ("sm_90", "one")]


class TestKernelsIn:
    @pytest.mark.parametrize(
        "name", ["one.fatbin", "one.o", "packed_lz4.fatbin", "packed_zstd.fatbin"]
    )
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

    def test_the_installed_library(self) -> None:
        there = list_kernels(library_path())
        numbers = [int(name.removeprefix("sm_")) for name in ARCHITECTURES]
        for config in AMPERE.progression():
            found = [name for name, symbol in there if config.short_form() + "EE" in symbol]
            wanted = [f"sm_{target}" for target in config.family.targets_for(numbers)]
            assert sorted(found) == sorted(wanted), config

    @pytest.mark.parametrize("section", [".data", ".rodata", ".anything"])
    def test_fatbins_that_a_program_holds_as_data(self, section, planted, tmp_path) -> None:
        """The number that fatbins begin with may stand there for itself, too."""
        decoys = b"P\xedU\xba...P\xedU\xba" + struct.pack("<HHQ", 1, 16, 1 << 40)
        content = decoys + (planted / "one.fatbin").read_bytes() + b"more"
        path = tmp_path / "program"
        path.write_bytes(host_object(section, content))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert list_kernels(path) == BOTH

    def test_a_library_that_holds_linked_and_unlinked_code(self, planted, tmp_path) -> None:
        """The unlinked code never runs: only a member's name asks for it."""
        path = tmp_path / "lib.a"
        both = {b"linked/": "shared_linked.sm_90.cubin", b"unlinked/": "shared.sm_90.cubin"}
        path.write_bytes(archive(*((n, (planted / f).read_bytes()) for n, f in both.items())))
        linked = find_kernels(path, names=["owns"])
        assert [(k.member, k.is_linked) for k in linked] == [("linked.sm_90.cubin", True)]
        (unlinked,) = find_kernels(path, names=["owns"], member="unlinked")
        assert not unlinked.is_linked
        assert len(list_kernels(path)) == len(list_kernels(planted / "shared_linked.sm_90.cubin"))


class TestChoice:
    @pytest.mark.parametrize(
        ("name", "asked", "found"),
        [
            ("one.sm_90a.cubin", "sm_90", "sm_90a"),
            ("variants.fatbin", "sm_90", "sm_90a"),
            ("family.fatbin", "sm_120", "sm_120f"),
        ],
    )
    def test_of_an_architecture_includes_its_variants_and_says_so(
        self, name: str, asked: str, found: str, planted: Path
    ) -> None:
        with pytest.warns(SassWarning, match=f"{name}: {asked} includes .* {found} alone"):
            assert list_kernels(planted / name, asked) == [(found, "one")]

    @pytest.mark.parametrize("asked", ["sm_120", "sm_120a"])
    def test_of_what_there_is_for_an_architecture_and_a_variant_is_exact(
        self, asked: str, planted: Path
    ) -> None:
        assert list_kernels(planted / "variants.fatbin", asked) == [(asked, "one")]

    def test_of_a_variant_is_of_it_alone(self, planted: Path) -> None:
        with pytest.raises(SassError, match="no kernel for sm_90f, only for sm_90a"):
            list_kernels(planted / "one.sm_90a.cubin", "sm_90f")

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

    def test_is_read_from_a_cubin_whose_container_tells_less(self, planted, tmp_path) -> None:
        path = tmp_path / "old.a"
        path.write_bytes(archive((b"old.cubin/", (planted / "old.sm_90a.cubin").read_bytes())))
        assert {architecture for architecture, _ in list_kernels(path)} == {"sm_90a"}


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
    @pytest.mark.parametrize(
        "name",
        ["one.fatbin", "one.o", "only_ptx.fatbin", "packed_lz4.fatbin", "packed_zstd.fatbin"],
    )
    def test_members(self, name: str, planted: Path) -> None:
        ((_, text),) = ptx_of(members_of(planted / name)).items()
        assert ".visible .entry one(" in text
        assert ".target sm_90" in text

    def test_members_that_share_a_name(self, planted: Path) -> None:
        path = planted / "libone.so"
        assert [".entry one(" in text for text in ptx_of(members_of(path)).values()] == [
            True,
            False,
        ]
        names = [member.name for member in members_of(path)]
        assert names[0] == "one.sm_80.cubin"
        assert len(set(names)) == len(names) == 6

    def test_that_cuobjdump_does_not_list(self, planted: Path, cuobjdump) -> None:
        """cuobjdump takes only the linked code of a file that has relocatable code, too."""
        path = planted / "mixed.o"
        assert cuobjdump("-lptx", path).split(": ")[1:] == ["mixed.1.sm_90.ptx\n"]
        assert list(ptx_of(members_of(path))) == ["mixed.sm_90.ptx", "mixed.sm_80.ptx"]
        assert list_kernels(path) == [("sm_90", "one"), ("sm_80", "other")]

    def test_of_a_file_that_cuobjdump_gives_up(self, planted, cuobjdump, tmp_path) -> None:
        path = tmp_path / "one.fatbin"
        data = bytearray((planted / "one.fatbin").read_bytes())
        data[16 + 41] = 0x20  # the first is said to be compressed by LZ4
        path.write_bytes(data)
        with pytest.raises(SassError, match="Invalid fatbin header"):
            cuobjdump("-lptx", path)
        assert list(ptx_of(members_of(path))) == ["one.sm_90.ptx"]

    def test_of_linked_code_stands_for_that_to_be_linked(self, planted: Path) -> None:
        (module,) = ptx_texts(planted / "twice.o", None, [])
        assert module.symbols == ["one"]
        (named,) = ptx_texts(planted / "twice.o", None, [], "twice.sm_90.ptx")
        (other,) = ptx_texts(planted / "twice.o", None, [], "twice.2.sm_90.ptx")
        assert {named.is_linked, other.is_linked} == {True, False}
        assert len(ptx_texts(planted / "mixed.o", None, [])) == 2  # of different kernels

    def test_of_each_file_is_in_the_linked_cubin(self, planted: Path) -> None:
        path = planted / "linked.o"
        found = ptx_texts(path, None, [])
        assert [module.symbols for module in found] == [["one"], ["other"]]
        assert all(module.is_linked for module in found)
        (other,) = ptx_texts(path, "sm_90", ["other"])
        assert ".entry other(" in other.text and ".entry one(" not in other.text
        for kernel in load_kernels(path):
            assert kernel.ptx is not None
            lines = kernel.ptx.split("\n")
            stores = [i for i in kernel.instructions if i.base == "STG" and i.ptx_line]
            assert stores and all("st.global" in lines[i.ptx_line - 1] for i in stores)
            assert f".entry {kernel.symbol}(" in kernel.ptx

    def test_that_is_embedded_where_code_is_to_be_linked_is_found(self, planted: Path) -> None:
        (module,) = ptx_texts(planted / "linked.o", None, [], "one.sm_90.cubin")
        assert (module.symbols, module.is_linked) == (["one"], False)

    def test_a_cubin_has_no_members(self, planted: Path) -> None:
        assert ptx_of(members_of(planted / "several.sm_90.cubin")) == {}


class TestLtoIr:
    def test_is_no_machine_code(self, planted: Path) -> None:
        path = planted / "lto.fatbin"
        assert [member.kind for member in members_of(path)] == [MemberKind.CUBIN, MemberKind.LTO_IR]
        assert list_kernels(path) == [("sm_80", "one")]
        with pytest.raises(
            SassError,
            match=r"no cubin for sm_90, only LTO IR for sm_90 \(no machine code: link "
            r"it with nvcc -dlink -dlto -cubin, or compile it for code=sm_90\)",
        ):
            list_kernels(path, "sm_90")


class TestArchives:
    def test_of_gnu(self, planted: Path, tmp_path: Path) -> None:
        one, library = (planted / "one.o").read_bytes(), (planted / "libone.so").read_bytes()
        path = tmp_path / "lib.a"
        path.write_bytes(
            archive(
                (b"/", b"index"),
                (b"//", b"an_object_with_a_long_name.o/\nanother.o/\n"),
                (b"/0", (planted / "relocatable.o").read_bytes()),
                (b"one.o/", one),
                (b"one.o/", one),
                (b"notes.txt/", b"nothing"),
                (b"/30", library),
            )
        )
        names = [member.name for member in cubins_of(path)]
        assert names[:3] == [
            "an_object_with_a_long_name.sm_90.cubin",
            "one.sm_80.cubin",
            "one.sm_90.cubin",
        ]
        assert len(names) == len(set(names)) == 1 + 2 + 2 + 4
        kernels = list_kernels(path, "sm_80")
        assert kernels == [("sm_80", name) for name in ("one", "one", "one", "other")]

    def test_of_bsd(self, planted: Path, tmp_path: Path) -> None:
        path = tmp_path / "lib.a"
        name = b"an_object_with_a_long_name.fatbin\0\0\0"
        path.write_bytes(
            archive((b"#1/%d" % len(name), name + (planted / "packed_lz4.fatbin").read_bytes()))
        )
        assert list_kernels(path) == BOTH
        assert cubins_of(path)[0].origin == f"{path}:an_object_with_a_long_name.sm_80.cubin"

    def test_that_are_cut_off(self, planted: Path, tmp_path: Path) -> None:
        path = tmp_path / "lib.a"
        one = (planted / "one.o").read_bytes()
        path.write_bytes(archive((b"one.o/", one), (b"two.o/", one))[:-1000])
        with pytest.warns(SassWarning, match=r"lib\.a is truncated or damaged from byte 16108 on"):
            assert list_kernels(path) == BOTH


class TestMembersThatCannotBeRead:
    """A warning each; the others are read."""

    @staticmethod
    def changed(planted: Path, folder: Path, name: str, at: int, value: bytes) -> Path:
        """A file of which the bytes from `at` on in the first member's header are others."""
        data = bytearray((planted / name).read_bytes())
        data[16 + at : 16 + at + len(value)] = value
        path = folder / name
        path.write_bytes(data)
        return path

    @pytest.mark.parametrize(
        ("name", "at", "value", "said"),
        [
            ("one.fatbin", 0, b"\x4d", r"one\.fatbin for sm_80 is of the unknown kind 77"),
            ("one.fatbin", 64, b"\0", r"one\.sm_80\.cubin is not a cubin"),
            ("one.fatbin", 28, b"\x51", r"it is for sm_80, and its fatbin says sm_81"),
            ("packed_lz4.fatbin", 41, b"\x40", r"is compressed in a way that is not known"),
            ("packed_lz4.fatbin", 56, b"\0", r"lz4\.sm_80\.cubin is damaged: its LZ4"),
            ("packed_lz4.fatbin", 63, b"\x7f", r"its LZ4: \d+ bytes are more than"),
            ("packed_zstd.fatbin", 56, b"\xff", r"its zstd: 3112 bytes instead of 3327"),
            ("packed_zstd.fatbin", 56, b"\x00", r"its zstd: 3073 bytes instead of 3072"),
            ("packed_zstd.fatbin", 70, b"\xff\xff\xff", r"is damaged: its zstd"),
        ],
    )
    def test_one(self, name, at, value, said, planted: Path, tmp_path: Path) -> None:
        path = self.changed(planted, tmp_path, name, at, value)
        with pytest.warns(SassWarning) as warned:
            found = list_kernels(path)
        assert found == [("sm_90", "one")]
        assert len(warned) == 1
        assert re.search(said, str(warned[0].message))

    def test_all(self, planted: Path, tmp_path: Path) -> None:
        data = (planted / "packed_zstd.fatbin").read_bytes()
        path = tmp_path / "packed_zstd.fatbin"
        path.write_bytes(data.replace((0xFD2FB528).to_bytes(4, "little"), b"\0\0\0\0"))
        with pytest.raises(SassError, match="is damaged: its zstd"):
            list_kernels(path)

    def test_because_they_are_too_old_are_one_line(self, planted: Path, tmp_path: Path) -> None:
        path = self.changed(planted, tmp_path, "one.fatbin", 28, b"\x3d")
        with pytest.warns(
            SassWarning, match=r"1 cubins for sm_61 are left out: only code for sm_70"
        ):
            assert list_kernels(path) == [("sm_90", "one")]


def test_sections_of_nvidias_own_kind_have_no_bytes(planted: Path) -> None:
    """0x7000000a, in cubins of CUDA 12.0 and 12.1: of a size that goes beyond the file."""
    data = bytearray((planted / "several.sm_90.cubin").read_bytes())
    before = read_cubin(bytes(data), "before")
    section = before.sections[".nv.shared.nested"]
    (headers,) = struct.unpack_from("<Q", data, 40)
    at = headers + section.index * 64
    struct.pack_into("<I", data, at + 4, 0x7000000A)
    struct.pack_into("<Q", data, at + 24, len(data) - 1)
    after = read_cubin(bytes(data), "after")
    assert [k.resources for k in after.kernels] == [k.resources for k in before.kernels]
    assert not after.sections[".nv.shared.nested"].data


def test_nothing_is_unpacked_that_is_not_asked_for(planted: Path, monkeypatch) -> None:
    unpacked = []
    read = Member.read
    monkeypatch.setattr(Member, "read", lambda self: unpacked.append(self.name) or read(self))
    load_kernels(planted / "packed_zstd.fatbin", "sm_80")
    assert set(unpacked) == {"packed_zstd.sm_80.cubin"}


def test_a_large_file_is_not_copied(planted: Path, tmp_path: Path) -> None:
    """A gigabyte, which is a hole in the file, beside an object file."""
    size = 1 << 30
    one = (planted / "one.o").read_bytes()
    ends = (
        archive((b"data/", b"")).replace(b"%-10d" % 0 + b"`", b"%-10d`" % size),
        archive((b"one.o/", one)),
    )
    path = tmp_path / "lib.a"
    with path.open("wb") as file:
        file.write(ends[0])
        file.seek(size, os.SEEK_CUR)
        file.write(ends[1].removeprefix(b"!<arch>\n"))
    tracemalloc.start()
    try:
        assert list_kernels(path) == BOTH
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
