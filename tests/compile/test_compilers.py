"""Which compiler is chosen, what it can compile for, and what each is told."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from flash_helpers.compile import compilers
from flash_helpers.compile.build import COMPILE_FLAGS
from flash_helpers.compile.compilers import (
    NVCC_FLAGS,
    NVRTC_FLAGS,
    NvccCompiler,
    NvrtcCompiler,
    Places,
    check_target,
    find_compiler,
)
from flash_helpers.compile.toolchain import BuildError

WHEELS = {12: "nvidia/cuda_nvrtc/lib/libnvrtc.so.12", 13: "nvidia/cu13/lib/libnvrtc.so.13"}
ARCHITECTURES = frozenset({80, 86, 90, 100})


def nvrtc(version: tuple[int, int], library: Path = Path("libnvrtc.so")) -> NvrtcCompiler:
    name = f"NVRTC {version[0]}.{version[1]}"
    return NvrtcCompiler(name, version, name, ARCHITECTURES, library)


class Loaded:
    """Stands in for a library of NVRTC that is loaded; counts them."""

    count = 0
    release = (13, 0)

    def __init__(self, path: Path) -> None:
        type(self).count += 1

    def version(self) -> tuple[int, int]:
        return self.release

    def build(self) -> str:
        return f"{self.release[0]}.{self.release[1]}.89 CL-31833905"

    def architectures(self) -> frozenset[int]:
        return ARCHITECTURES


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine with nothing on it: its places, and a function that makes files in them."""

    def describe(library: Path, memory: Path | None) -> NvrtcCompiler:
        if text := library.read_text():
            raise BuildError(f"{library.name} {text}")
        return nvrtc((int(library.suffix[1:]), 0), library)

    monkeypatch.setattr(compilers, "describe_nvrtc", describe)
    places = Places(tmp_path / "maps", (tmp_path / "packages",), tmp_path / "cuda", None)

    def put(name: str, text: str = "") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return places, put


def torch_for(cuda: str | None) -> str:
    return f"__version__ = '2.9'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"


class TestSearch:
    def chosen(self, places: Places, **environ: str) -> Path:
        compiler = find_compiler({"PATH": "", **environ}, places)
        assert isinstance(compiler, NvrtcCompiler)
        return compiler.library

    def test_each_place_comes_after_the_one_before_it(self, machine, tmp_path) -> None:
        places, put = machine
        put("packages/torch/version.py", torch_for("12.8"))
        in_order = [
            put("anywhere/with space/libnvrtc-0a1b2c.so.12"),
            put(f"packages/{WHEELS[12]}"),  # of PyTorch's CUDA
            put("packages/torch/lib/libnvrtc-0a1b2c.so.12"),
            put(f"packages/{WHEELS[13]}"),
            put("home/lib64/libnvrtc.so.12"),
            put("cuda/targets/x86_64-linux/lib/libnvrtc.so.13"),
        ]
        put("packages/nvidia/cu13/lib/libnvrtc-builtins.so.13.0")
        put("packages/nvidia/cu13/lib/libnvrtc.alt.so.13")
        put("maps", f"7f00-7f01 r-xp 00000000 08:01 42   {in_order[0]}\n7f01-7f02 rw-p 0 00:00 0\n")
        for library in in_order:
            assert self.chosen(places, CUDA_HOME=str(tmp_path / "home")) == library
            library.unlink()

    @pytest.mark.parametrize("cuda", [None, "11.8"])
    def test_without_a_wheel_of_pytorchs_cuda_the_newest_is_taken(self, machine, cuda) -> None:
        places, put = machine
        put("packages/torch/version.py", torch_for(cuda))
        put(f"packages/{WHEELS[12]}")
        newest = put(f"packages/{WHEELS[13]}")
        assert self.chosen(places) == newest

    def test_a_library_that_cannot_be_used_is_passed_over(self, machine) -> None:
        places, put = machine
        put("packages/torch/version.py", torch_for("12.8"))
        put(f"packages/{WHEELS[12]}", "is broken")
        newest = put(f"packages/{WHEELS[13]}")
        assert self.chosen(places) == newest

    def test_one_that_the_driver_does_not_know_comes_last_and_is_told(self, machine) -> None:
        places, put = machine
        places = replace(places, driver=(12, 8))
        put("packages/torch/version.py", torch_for("13.0"))
        newest = put(f"packages/{WHEELS[13]}")
        with pytest.warns(RuntimeWarning) as told:
            assert self.chosen(places) == newest
        assert str(told[0].message) == (
            "NVRTC 13.0 is newer than the driver, which knows CUDA up to 12.8: install a newer "
            "driver, or an older compiler (python -m pip install --upgrade "
            "'nvidia-cuda-nvrtc-cu12<13'), or set CUDA_HOME to a toolkit of CUDA 12"
        )
        known = put("cuda/lib64/libnvrtc.so.12")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert self.chosen(places) == known

    @pytest.mark.parametrize(
        ("cuda", "line"),
        [("12.8", "'nvidia-cuda-nvrtc-cu12<13'"), ("13.0", "'nvidia-cuda-nvrtc<14'")],
    )
    def test_without_any_the_error_has_the_line_of_pip(
        self, machine, monkeypatch, cuda, line
    ) -> None:
        places, put = machine
        monkeypatch.setattr(compilers, "find_nvcc", lambda environ, home: None)
        put("packages/torch/version.py", torch_for(cuda))
        put(f"packages/{WHEELS[12]}", "is broken")
        with pytest.raises(BuildError) as error:
            find_compiler({"PATH": ""}, places)
        assert f"python -m pip install --upgrade {line}" in str(error.value)
        assert "libnvrtc.so.12 is broken" in str(error.value)


def test_a_file_that_is_no_nvrtc_is_named(tmp_path: Path) -> None:
    library = tmp_path / "libnvrtc.so.13"
    library.write_text("")
    with pytest.raises(
        BuildError, match=r"libnvrtc\.so\.13 is not a library of NVRTC: .*too short"
    ):
        compilers.describe_nvrtc(library)


def test_an_nvrtc_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(Loaded):
        release = (11, 8)

    monkeypatch.setattr(compilers.nvrtc, "Nvrtc", Old)
    with pytest.raises(BuildError, match=r"is NVRTC 11\.8 .* need 12\.4 or later: .*-cu11<12'"):
        compilers.describe_nvrtc(Path("libnvrtc.so"))


class TestMemory:
    """Facts of a library that are kept between processes."""

    @pytest.fixture
    def library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(compilers.nvrtc, "Nvrtc", Loaded)
        monkeypatch.setattr(Loaded, "count", 0)
        (tmp_path / "libnvrtc.so.13").write_text("a library")
        return tmp_path / "libnvrtc.so.13"

    @pytest.fixture
    def memory(self, tmp_path: Path) -> Path:
        return tmp_path / "cache/compilers.json"

    def test_saves_loading_it(self, library, memory) -> None:
        found = [compilers.describe_nvrtc(library, memory) for _ in range(3)]
        assert Loaded.count == 1
        assert found[0] == found[1] == found[2] == compilers.describe_nvrtc(library)
        assert found[1].identity.startswith("NVRTC 13.0.89 CL-31833905 ")

    @pytest.mark.parametrize("spoil", ["the library", "the memory", "its form", "its place"])
    def test_is_not_trusted_after_a_change(self, library, memory, spoil) -> None:
        first = compilers.describe_nvrtc(library, memory)
        if spoil == "the library":
            library.write_text("an update")  # of the same size
        elif spoil == "its place":
            library = library.rename(library.with_name("libnvrtc.so.13.0"))
        else:
            text = memory.read_text()
            memory.write_text(text[:-9] if spoil == "the memory" else "[3]")
        found = [compilers.describe_nvrtc(library, memory) for _ in range(2)]
        assert Loaded.count == 2
        assert replace(found[1], library=first.library) == first

    def test_that_cannot_be_written_is_done_without(self, library, tmp_path) -> None:
        (tmp_path / "cache").write_text("a file")
        for _ in range(2):
            compilers.describe_nvrtc(library, tmp_path / "cache/compilers.json")
        assert Loaded.count == 2

    def test_forgets_libraries_that_are_gone(self, library, memory, tmp_path) -> None:
        compilers.describe_nvrtc(library, memory)
        moved = library.rename(tmp_path / "libnvrtc.so")
        compilers.describe_nvrtc(moved, memory)
        assert [*json.loads(memory.read_text())] == [str(moved)]


class TestTargets:
    @pytest.mark.parametrize(
        ("target", "version", "supported"),
        [
            ("sm_80", (12, 4), True),
            ("compute_80", (12, 4), True),
            ("sm_90a", (12, 4), True),
            ("sm_90a", (11, 8), False),  # which has sm_90 alone
            ("sm_100f", (12, 8), False),
            ("sm_100f", (12, 9), True),
            ("sm_120", (13, 0), False),
            ("sm_80x", (13, 0), False),
            ("80", (13, 0), False),
        ],
    )
    def test_a_compiler_knows_its_targets(self, target, version, supported) -> None:
        assert nvrtc(version).supports(target) == supported

    def test_an_unknown_target_is_refused_with_the_way_out(self) -> None:
        with pytest.raises(BuildError) as error:
            check_target(nvrtc((12, 4)), "sm_120")
        assert str(error.value) == (
            "NVRTC 12.4 cannot compile for sm_120: it knows sm_80, sm_86, sm_90, sm_100. Install a "
            "newer one (python -m pip install --upgrade 'nvidia-cuda-nvrtc-cu12<13'), or a PyTorch "
            "for a newer CUDA"
        )
        check_target(nvrtc((12, 4)), "sm_90a")


class TestFlags:
    NVCC = NvccCompiler("nvcc 13.0", (13, 0), "", ARCHITECTURES, Path("nvcc"))

    def test_the_library_is_built_with_the_flags_of_a_first_use(self) -> None:
        assert set(NVCC_FLAGS) < set(COMPILE_FLAGS)

    def test_both_compile_one_language_with_line_tables(self) -> None:
        assert {"-std=c++20", "-lineinfo"} <= set(NVCC_FLAGS) & set(NVRTC_FLAGS)

    @pytest.mark.parametrize("compiler", [nvrtc((13, 0)), NVCC])
    def test_the_flags_tell_targets_and_debugging_apart(self, compiler) -> None:
        told = {
            (target, debug): tuple(compiler.flags(target, debug))
            for target in ("sm_90a", "compute_90a", "sm_90")
            for debug in (False, True)
        }
        assert len(set(told.values())) == len(told)
        for (_, debug), flags in told.items():
            assert ("-G" in flags) == debug == ("-lineinfo" not in flags)

    @pytest.mark.parametrize("compiler", [nvrtc((13, 0)), NVCC])
    def test_the_command_has_all_flags(self, compiler, tmp_path) -> None:
        flags = compiler.flags("sm_90a", False)
        command = compiler.command(tmp_path / "a.cu", "sm_90a", tmp_path, False)
        assert command[-len(flags) :] == flags
