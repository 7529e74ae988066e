"""The built library: its kernels, its C functions and what ships beside it."""

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from elftools.elf.elffile import ELFFile
from other_family import COUNTER, TILE, OtherConfig

import flash_attention
from flash_attention.__main__ import main
from flash_helpers.compile.codegen import library_configs, listed_configs
from flash_helpers.compile.jit import default_jit, units_of
from flash_helpers.compile.ptxas import parse_ptxas_log
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import (
    AttentionForward,
    Config,
    Element,
    config_from_symbol,
    get_kernel_progression_configs,
)
from flash_helpers.operations.attention_forward.inputs import make_inputs
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.hopper import HOPPER
from flash_helpers.registry.wgmma import NEXT_TILE
from flash_helpers.runtime import call, library

NO_SUCH_DEVICE = 9999
ROOT = Path(__file__).resolve().parents[2]
LISTED = flash_attention.kernels()
BUILT = library_configs(ROOT)
PROGRESSION = get_kernel_progression_configs()
ARCHITECTURES = [  # 90 includes 90a
    int(name.removeprefix("sm_"))
    for name in library.architectures()
    if re.fullmatch(r"sm_\d+", name)
]
H100 = largest_device(90)
V16 = AMPERE.progression()[-1]
PROBLEM = AttentionForward(1, 1, 64)
LAST_OF_HOPPER = [config for config in LISTED if config.family is HOPPER][-1]


def short_form(config: Config) -> str:
    return config.short_form()


@pytest.fixture
def c_library() -> ctypes.CDLL:
    return library.load()


class TestKernels:
    def test_are_those_of_the_registry_and_the_winners(self, root):
        assert listed_configs(root) == LISTED

    def test_of_the_families_in_the_library_are_built_and_current(self):
        assert {name for config in BUILT for name in config.kernels.values()} == {
            *library._numbers()
        }
        assert all(library.is_built(unit) for config in BUILT for unit in units_of(config))

    def test_come_in_order_each_once(self):
        assert sorted(set(LISTED)) == LISTED

    @pytest.mark.parametrize("config", BUILT, ids=short_form)
    def test_ship_their_ptx(self, package, config):
        ptx = (package / "ptx" / f"{config.short_form()}.ptx").read_text()
        (entry,) = re.findall(r"\.entry (\w+)\(", ptx)
        assert config_from_symbol(entry) == config
        (target,) = re.findall(r"^\.target sm_(\w+)", ptx, re.MULTILINE)
        # what no later architecture can be compiled from stays out of the library
        kind = "compute" if config.family.is_portable else "sm"
        assert f"{kind}_{target}" in library.architectures()

    @pytest.mark.parametrize("config", BUILT, ids=short_form)
    def test_ship_what_ptxas_said_for_every_architecture(self, package, config):
        log = (package / "ptxas" / f"{config.short_form()}.log").read_text()
        reports = parse_ptxas_log(log)
        targets = config.family.targets_for(ARCHITECTURES)
        assert [report.target for report in reports] == [f"sm_{target}" for target in targets]
        assert {config_from_symbol(report.symbol) for report in reports} == {config}

    def test_ship_nothing_else(self, package):
        names = {config.short_form() for config in BUILT}
        assert {path.name for path in (package / "ptx").iterdir()} == {f"{n}.ptx" for n in names}
        assert {path.name for path in (package / "ptxas").iterdir()} == {f"{n}.log" for n in names}


@pytest.mark.parametrize("architecture", [80, 86, 89, 90])
@pytest.mark.parametrize("config", AMPERE.progression(), ids=short_form)
def test_a_kernel_of_the_small_tile_does_not_spill(package, config, architecture):
    log = (package / "ptxas" / f"{config.short_form()}.log").read_text()
    reports = {report.architecture: report for report in parse_ptxas_log(log)}
    if architecture not in reports:
        pytest.skip(f"the library was not built for sm_{architecture}")
    report = reports[architecture]
    assert (report.spill_store_bytes, report.spill_load_bytes, report.stack_bytes) == (0, 0, 0)


class TestPtxasLog:
    LOG = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'k' for 'sm_80'\n"
        "ptxas info    : Function properties for k\n"
        "    48 bytes stack frame, 80 bytes spill stores, 64 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 488 bytes cmem[0]\n"
    )

    def test_tells_registers_and_spills_by_architecture(self):
        log = self.LOG + self.LOG.replace("sm_80", "sm_90").replace("255", "96")
        first, second = parse_ptxas_log(log)
        assert (first.architecture, first.registers) == (80, 255)
        assert (first.stack_bytes, first.spill_store_bytes, first.spill_load_bytes) == (48, 80, 64)
        assert (second.architecture, second.registers) == (90, 96)

    def test_that_breaks_off_is_refused(self):
        with pytest.raises(ValueError, match="no registers or spills of k for sm_80"):
            parse_ptxas_log(self.LOG.rpartition("ptxas info    : Used")[0])


class TestCInterface:
    def test_exports_its_functions_and_nothing_else(self, package):
        with (package / "libflash_attention.so").open("rb") as file:
            symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
            exported = {
                symbol.name
                for symbol in symbols
                if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["type"] == "STT_FUNC"
            }
        assert exported == {
            "flash_architectures",
            "flash_bind",
            "flash_cuda_version",
            "flash_encode_tensor_map",
            "flash_kernel_count",
            "flash_kernel_name",
            "flash_kernel_resources",
            "flash_knows_exchange",
            "flash_last_error",
            "flash_launch",
            "flash_mma_loop",
            "flash_mma_loop_describe",
            "flash_ready",
            "flash_register",
        }

    def test_needs_no_torch_and_no_cuda_library(self, package):
        with (package / "libflash_attention.so").open("rb") as file:
            tags = ELFFile(file).get_section_by_name(".dynamic").iter_tags()
            needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
        assert not [name for name in needed if re.search("torch|c10|cuda|nv", name)]

    def test_asks_of_python_what_every_version_of_it_has(self, package, root):
        with (package / "libflash_attention.so").open("rb") as file:
            symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
            needed = {s.name for s in symbols if s["st_shndx"] == "SHN_UNDEF"}
        declared = (root / "src/include/python_abi.h").read_text().partition('extern "C"')[2]
        called = {name for name in needed if re.match("_?Py", name)}
        assert called == set(re.findall(r"(Py\w+)\(", declared))

    def test_structures_mirror_the_source(self, root):
        text = re.sub(r"//.*", "", (root / "src/flash_attention.cu").read_text())
        for structure, name in (
            (library._Launch, "FlashLaunch"),
            (library._Ready, "FlashReady"),
            (library._BoundMap, "FlashBoundMap"),
            (library._TensorMap, "FlashTensorMap"),
            (library._Resources, "FlashKernelResources"),
        ):
            body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.DOTALL)[1]
            declared = re.findall(r"(\w+)(?:\[\d\])*(?=[,;])", body)
            assert declared == [field for field, _ in structure._fields_]

    def test_structures_are_laid_out_as_in_c(self, root, tmp_path):
        if (compiler := shutil.which("g++")) is None:
            pytest.skip("no g++")
        text = (root / "src/flash_attention.cu").read_text()
        structures = {
            "FlashLaunch": library._Launch,
            "FlashTensor": library._Tensor,
            "FlashTensorMap": library._TensorMap,
            "FlashBoundMap": library._BoundMap,
            "FlashReady": library._Ready,
            "FlashKernelResources": library._Resources,
        }
        lines = ['#include "dlpack_exchange.h"', "#include <cstddef>"]
        lines += [f"constexpr int kMaxRank = {library.MAX_RANK};"]
        assert lines[-1] in text
        for name, structure in structures.items():
            lines.append(re.search(rf"^struct {name} \{{.*?^\}};", text, re.M | re.S)[0])
            lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});")
            for field, _ in structure._fields_:
                # a DLDataType's members stand on their own
                member = f"dtype.{field}" if field in ("code", "bits", "lanes") else field
                lines.append(
                    f"static_assert(offsetof({name}, {member}) == "
                    f"{getattr(structure, field).offset} && "
                    f"sizeof({name}::{member.partition('.')[0]}) >= "
                    f"{getattr(structure, field).size});"
                )
        unit = tmp_path / "layout.cpp"
        unit.write_text("\n".join(lines))
        command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{root / 'src/include'}", unit]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr

    def test_names_every_kernel_of_every_family(self, c_library):
        names = [c_library.flash_kernel_name(n) for n in range(len(BUILT))]
        assert sorted(names) == sorted(config.short_form().encode() for config in BUILT)

    @pytest.mark.parametrize("index", [-1, len(BUILT), 2**31 - 1])
    def test_has_no_name_for_an_index_without_kernel(self, c_library, index):
        assert c_library.flash_kernel_name(index) is None

    @pytest.mark.parametrize("number", [-1, len(BUILT), 2**31 - 1])
    def test_launch_refuses_a_number_without_kernel(self, c_library, number):
        call = library._Launch(None, number, 0, (1, 1, 1), (1, 1, 1), 128, 0, 0)
        assert c_library.flash_launch(bytes(call) + bytes(136)) != 0
        assert f"no kernel has number {number}: there are {len(BUILT)}".encode() in (
            c_library.flash_last_error()
        )

    def test_resources_refuse_a_number_without_kernel(self, c_library):
        found = library._Resources()
        assert c_library.flash_kernel_resources(10**6, 128, 0, 0, found) != 0
        assert b"no kernel has number 1000000" in c_library.flash_last_error()

    def test_a_registered_kernel_is_one_like_any(self, c_library, monkeypatch):
        name, before = V16.replace(static_row_stride=128 * 1023).short_form(), len(BUILT)
        assert name not in {config.short_form() for config in library.kernels()}
        library.register(name, "symbol", b"no image")
        try:
            assert library.resolve(name).short_form() == name
            number = library._registered[name]
            assert c_library.flash_kernel_count() == before + 1 == number + 1
            assert c_library.flash_kernel_name(number) == name.encode()
        finally:
            del library._registered[name]
            library.resolve.cache_clear()

    def test_launch_without_its_device_is_an_error_and_no_crash(self):
        (launch,) = BUILT[0].call(PROBLEM, PROBLEM.strides(), H100).launches
        with pytest.raises(RuntimeError, match=f"^{BUILT[0].short_form()}: .*(CUDA|device)"):
            launcher = library.Launcher(launch, 0, NO_SUCH_DEVICE)
            launcher.run({**dict.fromkeys("qkvo", 0), "stream": 0})

    @pytest.mark.parametrize("config", [BUILT[0], LAST_OF_HOPPER], ids=Config.short_form)
    @pytest.mark.parametrize("batch", [2, 2 * 65535 + 1], ids=["one launch", "several"])
    def test_a_launch_is_its_numbers_and_then_the_arguments(
        self, c_library, monkeypatch, config, batch
    ):
        problem = AttentionForward(batch, 3, config.supports.whole, causal=config.supports.causal)
        sent = []
        monkeypatch.setattr(c_library, "flash_launch", lambda data: sent.append(data))
        monkeypatch.setattr(library, "encode_tensor_map", lambda *_: b"\x77" * 128)
        addresses = {"q": 1 << 40, "k": 2 << 40, "v": 3 << 40, "o": 4 << 40, NEXT_TILE: 5 << 40}
        launches = config.call(problem, problem.strides(), H100).launches
        for launch in launches:
            launcher = library.Launcher(launch, launches.index(launch), 5)
            launcher.run({**addresses, library.STREAM: 7 << 40})
        size = ctypes.sizeof(library._Launch)
        for launch, data in zip(launches, sent, strict=True):
            call = library._Launch.from_buffer_copy(data[:size])
            assert (call.stream, call.device) == (7 << 40, 5)
            assert call.kernel == launches.index(launch)
            assert (*call.grid,) == launch.grid
            assert (*call.cluster,) == launch.cluster
            assert (call.n_threads, call.shared_bytes) == (launch.block, launch.shared_bytes)
            assert call.programmatic == launch.programmatic
            assert data[size:] == launch.bind(addresses, library.encode_tensor_map)

    def test_a_launch_may_have_tensor_maps_and_a_buffer_and_be_programmatic(
        self, c_library, monkeypatch
    ):
        config = OtherConfig(3, Element.BF16, TILE, lazy=True)
        problem = AttentionForward(1, 1, 2 * TILE)
        (own,) = config.call(problem, problem.strides(), H100).launches
        launch = replace(own, programmatic=True)
        sent = []
        monkeypatch.setattr(library, "encode_tensor_map", lambda *_: b"\x77" * 128)
        monkeypatch.setattr(c_library, "flash_launch", lambda data: sent.append(data))
        addresses = {"q": 5, "o": 6, COUNTER: 7}
        launcher = library.Launcher(launch, 3, 0)
        launcher.run({**addresses, library.STREAM: 8})
        (data,) = sent
        size = ctypes.sizeof(library._Launch)
        header = library._Launch.from_buffer_copy(data[:size])
        assert ((*header.cluster,), header.programmatic) == ((2, 1, 1), 1)
        assert data[size:] == launch.bind(addresses, library.encode_tensor_map)

    def test_resources_without_their_device_are_an_error_and_no_crash(self):
        with pytest.raises(RuntimeError, match=r"CUDA|device|driver"):
            flash_attention.resources(BUILT[0], NO_SUCH_DEVICE)

    def test_last_error_belongs_to_its_thread(self, c_library):
        def refuse(number: int) -> None:
            c_library.flash_kernel_resources(number, 128, 0, 0, library._Resources())

        refuse(10**6)
        before = c_library.flash_last_error()
        thread = threading.Thread(target=refuse, args=(10**6 + 1,))
        thread.start()
        thread.join()
        assert c_library.flash_last_error() == before

    def test_tells_what_it_was_built_with(self):
        assert library.cuda_version() >= (12, 4)
        assert all(re.fullmatch(r"(sm|compute)_\d+a?", name) for name in library.architectures())


class TestDriverThatIsOlder:
    """An error of CUDA about code from a compiler that is newer than the driver."""

    IMAGE, PTX = "cudaErrorInvalidKernelImage", "cudaErrorUnsupportedPtxVersion"
    LIBRARY = (
        "; nvcc 13.0, which compiled the library, is newer than the driver, which knows CUDA up to "
        "12.8: install a newer driver, or set CUDA_HOME to a toolkit of CUDA 12 and build it with "
        "`pip install . ./py` in the repository"
    )
    REBUILD = LIBRARY.partition("or ")[2]
    KERNEL = (
        "; NVRTC 13.0.88, which compiled the kernel, is newer than the driver, which knows CUDA up "
        "to 12.8: install a newer driver, or an older compiler (python -m pip install --upgrade "
        "'nvidia-cuda-nvrtc-cu12<13'), or set CUDA_HOME to a toolkit of CUDA 12"
    )
    COMPILED, PREBUILT, REGISTERED = 10**6, 10**6 + 1, 10**6 + 2

    @pytest.fixture(autouse=True)
    def kernels(self, tmp_path, package, monkeypatch):
        """Kernels of a cache and of a wheel, by their numbers."""
        monkeypatch.setattr(library.Compiled, "compiler", "NVRTC 13.0.88")
        monkeypatch.setattr(library, "cuda_version", lambda: (13, 0))
        folders = {self.COMPILED: tmp_path / "entry", self.PREBUILT: package / "compiled/entry"}
        compiled = {library.Compiled("v1", "sm_80", "v1", f): n for n, f in folders.items()}
        monkeypatch.setattr(library, "_compiled", compiled)

    @pytest.mark.parametrize(
        ("driver", "error", "number", "reason"),
        [
            ((12, 8), "cudaErrorInsufficientDriver", COMPILED, LIBRARY),
            ((12, 8), "cudaErrorNoKernelImageForDevice", 0, LIBRARY),
            ((12, 8), IMAGE, None, LIBRARY),
            ((12, 8), IMAGE, COMPILED, KERNEL),
            ((12, 8), PTX, COMPILED, KERNEL),
            ((12, 8), PTX, PREBUILT, KERNEL.partition("an older")[0] + REBUILD),
            ((12, 8), PTX, REGISTERED, ""),  # by a compiler that only the caller knows
            ((12, 8), "cudaErrorInvalidValue", COMPILED, ""),
            ((13, 0), IMAGE, COMPILED, ""),
            (None, IMAGE, COMPILED, ""),
        ],
    )
    def test_is_told_with_both_versions(
        self, c_library, monkeypatch, driver, error, number, reason
    ):
        said = f"cudaLibraryLoadData: some reason ({error})"
        monkeypatch.setattr(c_library, "flash_last_error", said.encode)
        monkeypatch.setattr(library, "driver_cuda", lambda: driver)
        with pytest.raises(RuntimeError) as told:
            library.check(1, "v1", number)
        assert str(told.value) == f"v1: {said}{reason}"

    @pytest.mark.parametrize("reads", [True, False])
    def test_is_told_of_the_kernel_that_was_loaded(self, c_library, monkeypatch, reads):
        """By a launch, and by what reads its resources."""
        monkeypatch.setattr(library, "driver_cuda", lambda: (12, 8))
        monkeypatch.setattr(c_library, "flash_last_error", f"why ({self.IMAGE})".encode)
        for name in ("flash_launch", "flash_kernel_resources"):
            monkeypatch.setattr(c_library, name, lambda *_: 1)
        numbers = {name: self.COMPILED for name in V16.kernels.values()}
        monkeypatch.setattr(library, "numbers", lambda *_: numbers)
        (launch,) = V16.call(PROBLEM, PROBLEM.strides(), H100).launches
        with pytest.raises(RuntimeError, match=r"NVRTC 13\.0\.88, which compiled the kernel"):
            if reads:
                library.resources(V16, (9, 0), 0)
            else:
                launcher = library.Launcher(launch, self.COMPILED, 0)
                launcher.run({**dict.fromkeys("qkvo", 0), library.STREAM: 0})


class TestResolve:
    def test_takes_a_config_or_its_short_form(self):
        assert library.resolve(BUILT[0]) == BUILT[0]
        assert library.resolve(BUILT[0].short_form()) == BUILT[0]

    def test_takes_a_config_that_is_not_listed(self):
        config = V16.replace(static_row_stride=128 * 1023)
        assert config not in LISTED
        assert library.resolve(config.short_form()) == library.resolve(config) == config

    def test_what_is_not_listed_is_compiled_and_computes(self):
        config = V16.replace(static_row_stride=128 * 1023)
        q, k, v = make_inputs("normal", AttentionForward(1, 1, 128), torch.bfloat16)
        found = flash_attention.forward(config, q, k, v)
        assert torch.equal(found, flash_attention.forward(V16, q, k, v))

    def test_is_compiled_beforehand_by_prepare(self):
        h1, problem = HOPPER.progression()[0], AttentionForward(1, 1, 256)
        first, chosen = flash_attention.prepare(h1.short_form(), problem, device="cpu")
        assert first == h1 and not chosen.refusal(problem)
        assert default_jit().has(units_of(h1), "compute_90a")

    @pytest.mark.parametrize("cfg", [7, None, b"v7"])
    def test_takes_nothing_else(self, cfg):
        with pytest.raises(TypeError, match="pass a FlashForwardKernelConfig or its short form"):
            library.resolve(cfg)

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_resources_need_a_cuda_device(self, device):
        with pytest.raises(ValueError, match=f"device {device} is not a CUDA device"):
            flash_attention.resources(BUILT[0], device)


class TestUnmeasured:
    @pytest.mark.parametrize("capability", [(10, 0), (12, 1)])
    def test_is_told_once(self, capability):
        call._warn_of_unmeasured.cache_clear()
        with pytest.warns(RuntimeWarning, match="on which no kernel was ever checked or measured"):
            call._warn_of_unmeasured("a GPU", capability)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call._warn_of_unmeasured("a GPU", capability)
            for known in ((8, 0), (8, 9), (9, 0)):
                call._warn_of_unmeasured("a GPU", known)


class TestMissing:
    @pytest.fixture(autouse=True)
    def not_loaded(self):
        library.load.cache_clear()
        yield
        library.load.cache_clear()

    @pytest.mark.parametrize(
        ("content", "reason"),
        [(None, "is not there: build it"), (b"no ELF", r"cannot be loaded .*: build it")],
    )
    def test_library_says_how_to_build_it(self, tmp_path, monkeypatch, content, reason):
        monkeypatch.setattr(library, "package_folder", lambda: tmp_path)
        if content is not None:
            (tmp_path / "libflash_attention.so").write_bytes(content)
        with pytest.raises(RuntimeError, match=rf"{reason} with `pip install \. \./py`"):
            library.load()

    def test_package_says_how_to_install_it(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RuntimeError, match=r"is not installed: build it with `pip install"):
            library.package_folder()

    def test_function_is_an_older_library(self, monkeypatch):
        monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace())
        with pytest.raises(RuntimeError, match="has no flash_kernel_count, so that it is older"):
            library.load()


class TestCommand:
    def test_prints_kernels_architectures_cuda_and_device(self, capsys):
        assert main([]) == 0
        lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[:8])
        assert lines["kernels"] == str(len(LISTED))
        assert lines["architectures"].split() == library.architectures()
        assert lines["cuda"] == ".".join(map(str, library.cuda_version()))
        assert lines["device"].startswith(("none (", "cuda:"))
        assert lines["compiler"].startswith(("NVRTC ", "nvcc "))
        assert lines["cache"] == os.environ["FLASH_ATTENTION_CACHE_DIR"]

    def test_json_holds_the_same(self, capsys):
        assert main(["--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["kernels"] == [config.short_form() for config in LISTED]
        assert found.keys() == {
            "library",
            "cuda",
            "architectures",
            "torch",
            "device",
            "compiler",
            "cache",
            "block",
            "kernels",
        }

    def test_runs_as_a_module(self):
        result = subprocess.run(
            [sys.executable, "-m", "flash_attention"], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert LISTED[-1].short_form() in result.stdout
