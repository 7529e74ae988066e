"""The built library: its kernels, its C functions and what ships beside it."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
import threading
from dataclasses import fields

import pytest
from elftools.elf.elffile import ELFFile

import flash_attention
from flash_attention.__main__ import main
from flash_helpers.compile.codegen import MAP_HEADER, configs_in_header
from flash_helpers.compile.ptxas import parse_ptxas_log
from flash_helpers.kernel_configs import (
    FlashForwardKernelConfig,
    config_from_symbol,
    get_kernel_progression_configs,
    get_kernels_to_build,
)
from flash_helpers.runtime import library

NO_SUCH_DEVICE = 9999
BUILT = flash_attention.kernels()
PROGRESSION = get_kernel_progression_configs()


def short_form(config: FlashForwardKernelConfig) -> str:
    return config.short_form()


@pytest.fixture
def library() -> ctypes.CDLL:
    return library.load()


@pytest.fixture
def unbuilt() -> library.Config:
    return library.to_c(PROGRESSION[-1].replace(static_row_stride=128 * 1023))


class TestKernels:
    def test_are_those_of_the_registry_and_exactly_those_of_the_committed_map(self, root):
        assert set(get_kernels_to_build()) <= set(BUILT)
        assert configs_in_header((root / MAP_HEADER).read_text()) == BUILT

    def test_come_in_order_each_once(self):
        assert sorted(set(BUILT)) == BUILT

    @pytest.mark.parametrize("config", BUILT, ids=short_form)
    def test_ship_their_ptx(self, package, config):
        ptx = (package / "ptx" / f"{config.short_form()}.ptx").read_text()
        (entry,) = re.findall(r"\.entry (\w+)\(", ptx)
        assert config_from_symbol(entry) == config
        (target,) = re.findall(r"^\.target sm_(\d+)", ptx, re.MULTILINE)
        assert f"compute_{target}" in library.architectures()

    @pytest.mark.parametrize("config", BUILT, ids=short_form)
    def test_ship_what_ptxas_said_for_every_architecture(self, package, config):
        log = (package / "ptxas" / f"{config.short_form()}.log").read_text()
        reports = parse_ptxas_log(log)
        machine_code = [name for name in library.architectures() if name.startswith("sm_")]
        assert [f"sm_{report.architecture}" for report in reports] == machine_code
        assert {config_from_symbol(report.symbol) for report in reports} == {config}

    def test_ship_nothing_else(self, package):
        names = {config.short_form() for config in BUILT}
        assert {path.name for path in (package / "ptx").iterdir()} == {f"{n}.ptx" for n in names}
        assert {path.name for path in (package / "ptxas").iterdir()} == {f"{n}.log" for n in names}


@pytest.mark.parametrize("architecture", [80, 86, 89, 90])
@pytest.mark.parametrize("config", PROGRESSION, ids=short_form)
def test_progression_kernel_does_not_spill(package, config, architecture):
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
            "flash_cuda_version",
            "flash_forward",
            "flash_kernel_count",
            "flash_kernel_describe",
            "flash_kernel_resources",
            "flash_last_error",
            "flash_mma_loop",
            "flash_mma_loop_describe",
        }

    def test_needs_no_torch_and_no_cuda_library(self, package):
        with (package / "libflash_attention.so").open("rb") as file:
            tags = ELFFile(file).get_section_by_name(".dynamic").iter_tags()
            needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
        assert not [name for name in needed if re.search("torch|c10|cuda|nv", name)]

    def test_structures_mirror_the_headers(self, root):
        text = (root / "src/include/flash_attention.cuh").read_text()
        body = re.search(r"struct ForwardKernelArgs \{(.*?)\n\};", text, re.DOTALL)[1]
        body = re.sub(r"//.*|\b(const|void|TensorStrides|int)\b|\*|\s", "", body)
        names = [name for name in re.split("[,;]", body) if name]
        assert names == [name for name, _ in library.ForwardKernelArgs._fields_]

    def test_describe_writes_one_config_and_not_a_byte_more(self, library):
        size, guard = ctypes.sizeof(library.Config), b"\xab" * 64
        memory = ctypes.create_string_buffer(guard * 3, len(guard) * 3)
        config = ctypes.cast(memory, ctypes.POINTER(library.Config))
        assert library.flash_kernel_describe(0, config) == 0
        assert memory.raw[size:] == (guard * 3)[size:]
        assert memory.raw[:size] == bytes(library.to_c(BUILT[0]))

    @pytest.mark.parametrize("index", [-1, len(BUILT), 2**31 - 1])
    def test_describe_refuses_an_index_without_kernel(self, library, index):
        assert library.flash_kernel_describe(index, library.Config()) != 0
        assert str(index) in library.flash_last_error().decode()

    def test_forward_refuses_a_config_that_was_not_built(self, library, unbuilt):
        args = library.ForwardKernelArgs()
        assert library.flash_forward(unbuilt, args, 1, 1, 0, None) != 0
        assert library.flash_last_error()

    def test_resources_refuse_a_config_that_was_not_built(self, library, unbuilt):
        assert library.flash_kernel_resources(unbuilt, 0, library._Resources()) != 0
        assert library.flash_last_error()

    def test_forward_without_its_device_is_an_error_and_no_crash(self):
        with pytest.raises(RuntimeError, match=f"^{BUILT[0].short_form()}: .*(CUDA|device)"):
            library.launch(BUILT[0], library.ForwardKernelArgs(seq_len=64), 1, 1, NO_SUCH_DEVICE, 0)

    def test_resources_without_their_device_are_an_error_and_no_crash(self):
        with pytest.raises(RuntimeError, match=r"CUDA|device"):
            flash_attention.resources(BUILT[0], NO_SUCH_DEVICE)

    def test_last_error_belongs_to_its_thread(self, library):
        library.flash_kernel_describe(-1, library.Config())
        before = library.flash_last_error()
        thread = threading.Thread(
            target=library.flash_kernel_describe, args=(12345, library.Config())
        )
        thread.start()
        thread.join()
        assert library.flash_last_error() == before

    def test_tells_what_it_was_built_with(self):
        assert library.cuda_version() >= (12, 4)
        assert all(re.fullmatch(r"(sm|compute)_\d+", name) for name in library.architectures())


class TestResolve:
    def test_takes_a_config_or_its_short_form(self):
        assert library.resolve(BUILT[0]) == BUILT[0]
        assert library.resolve(BUILT[0].short_form()) == BUILT[0]

    def test_names_the_nearest_config_that_was_built_and_how_to_build_this_one(self):
        config = next(c for c in BUILT if c.version == 7 and c.B_r == 64).replace(n_warps=2, B_r=32)
        with pytest.raises(ValueError) as error:
            library.resolve(config)
        message = str(error.value)
        assert f"{config.short_form()} was not built" in message
        assert "B_r 64 instead of 32, n_warps 4 instead of 2" in message
        assert "generate_kernel_instantiations.py --configs FILE" in message

    @pytest.mark.parametrize("cfg", [7, None, b"v7"])
    def test_takes_nothing_else(self, cfg):
        with pytest.raises(TypeError, match="pass a FlashForwardKernelConfig or its short form"):
            library.resolve(cfg)

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_resources_need_a_cuda_device(self, device):
        with pytest.raises(ValueError, match=f"device {device} is not a CUDA device"):
            flash_attention.resources(BUILT[0], device)


def test_missing_library_says_how_to_build_it(tmp_path):
    with pytest.raises(RuntimeError, match=r"cannot be loaded .*pip install \. \./py"):
        library.load(tmp_path / "libflash_attention.so")


class TestCommand:
    def test_prints_kernels_architectures_cuda_and_device(self, capsys):
        assert main([]) == 0
        lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[:7])
        assert lines["kernels"] == str(len(BUILT))
        assert lines["architectures"].split() == library.architectures()
        assert lines["cuda"] == ".".join(map(str, library.cuda_version()))
        assert lines["device"].startswith(("none (", "cuda:"))
        assert lines["simulator"].startswith(
            f"CPU tensors run the PTX of {len(BUILT)} of {len(BUILT)} kernels"
        )

    def test_json_holds_the_same(self, capsys):
        assert main(["--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["kernels"] == [config.short_form() for config in BUILT]
        assert found.keys() == {
            "library",
            "cuda",
            "architectures",
            "torch",
            "device",
            "simulator",
            "kernels",
        }

    def test_runs_as_a_module(self):
        result = subprocess.run(
            [sys.executable, "-m", "flash_attention"], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert BUILT[-1].short_form() in result.stdout


def test_config_structure_has_every_field():
    names = [name for name, _ in library.Config._fields_]
    assert names == [field.name for field in fields(FlashForwardKernelConfig)]
