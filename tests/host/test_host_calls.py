"""Single calls of a host program, without a program."""

from pathlib import Path

import numpy as np
import pytest

from flash_helpers.host import tensor_maps
from flash_helpers.host.check import check_file
from flash_helpers.host.device import SimulatedDevice
from flash_helpers.host.errors import CudaError
from flash_helpers.host.memory import DEVICE_BYTES, MemoryCalls, SharedMemory
from flash_helpers.host.modules import Image
from flash_helpers.ptx import TensorMap
from flash_helpers.sass.read.containers import Member, MemberKind


def entry(body: str, parameters: str = "", declarations: str = "") -> str:
    """A module with one kernel."""
    return (
        ".version 8.7\n.target sm_80\n.address_size 64\n"
        f".visible .entry k({parameters})\n{{\n{declarations}\n{body}\nret;\n}}\n"
    )


def test_a_tensor_map_is_the_simulators_own() -> None:
    # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, no interleave, SWIZZLE_64B, L2_128B, NaN as fill
    numbers = (9, 0, 2, 2, 1, 4096, 3, 100, 20, 3, 256, 5120, 32, 10, 1, 1, 2, 1)
    assert TensorMap.decode(tensor_maps.encoded(*numbers)) == TensorMap(
        "bf16",
        4096,
        dims=(100, 20, 3),
        strides=(256, 5120),
        box=(32, 10, 1),
        element_strides=(1, 2, 1),
        swizzle="64B",
        l2_promotion="128B",
        fill="nan",
    )
    other = tensor_maps.moved(8192, tensor_maps.encoded(*numbers))
    assert TensorMap.decode(other).address == 8192


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((7, 0, 9, 0, 0, 4096, 1, 64, 64, 1), "9 is no swizzle of a tensor map"),
        ((7, 1, 0, 0, 0, 4096, 1, 64, 64, 1), "interleave '16B' of a tensor map is not simulated"),
        ((7, 0, 0, 0, 0, 4096, 6), "6 dimensions: a tensor map has 1 to 5"),
        ((7, 0, 0, 0, 0, 4100, 1, 64, 64, 1), "address 0x1004, which is not a multiple of 16"),
    ],
)
def test_a_tensor_map_that_the_driver_refuses_is_refused(numbers, words) -> None:
    with pytest.raises(CudaError, match=words) as caught:
        tensor_maps.encoded(*numbers)
    assert caught.value.code == 1


class TestMemory:
    @pytest.fixture
    def calls(self):
        memory = SharedMemory()
        yield MemoryCalls(memory)
        memory.close()

    def test_new_memory_holds_nan(self, calls) -> None:
        (address,) = calls.allocate(8)
        assert np.isnan(calls.memory.download(address, 2, np.float32)).all()

    def test_growth_keeps_what_is_there(self, calls) -> None:
        (first,) = calls.allocate(64)
        calls.fill(first, 0x0201, 4, 2)
        calls.allocate(1 << 20)
        assert calls.memory.download(first, 4, np.uint16).tolist() == [0x0201] * 4

    def test_more_than_the_device_has_is_refused(self, calls) -> None:
        calls.allocate(1 << 10)
        with pytest.raises(CudaError, match="simulate a smaller problem") as caught:
            calls.allocate(DEVICE_BYTES)
        assert caught.value.code == 2

    @pytest.mark.parametrize(
        ("kind", "words"),
        [
            (1, None),  # host to device
            (2, "the destination 0x.* is device memory, and the kind of the copy says"),
            (3, "the source 0x10 is not device memory"),
            (4, None),
        ],
    )
    def test_the_kind_of_a_copy_fits_its_addresses(self, calls, kind, words) -> None:
        (to,) = calls.allocate(64)
        if words is None:
            assert calls.copy(to, 0x10, 64, kind) == [1]
        else:
            with pytest.raises(CudaError, match=words):
                calls.copy(to, 0x10, 64, kind)

    def test_visible_memory_is_of_either_side(self, calls) -> None:
        (to,), (source,) = calls.allocate(64), calls.allocate_visible(64, 3)
        for kind in (1, 3, 4):
            assert calls.copy(to, source, 64, kind) == [3]
        assert [calls.pointer(address) for address in (to, source, 0x10)] == [[2], [3], [0]]

    def test_freed_memory_is_refused(self, calls) -> None:
        (address,) = calls.allocate(64)
        assert calls.free(address) == [0]
        with pytest.raises(CudaError, match="the destination is not allocated"):
            calls.fill(address, 0, 64, 1)


class TestImages:
    def chosen(self, *targets: str, device: str = "sm_90a") -> str | None:
        image = Image(b"", SimulatedDevice(device), lambda _: Path("image"))
        members = [Member(Path("image"), t, MemberKind.PTX, t, b"") for t in targets]
        members.append(Member(Path("image"), "", MemberKind.CUBIN, "sm_90", b""))
        return image._chosen(members).architecture

    @pytest.mark.parametrize(
        ("targets", "device", "wanted"),
        [
            (("sm_80", "sm_90"), "sm_90a", "sm_90"),
            (("sm_90", "sm_90a"), "sm_90a", "sm_90a"),
            (("sm_80", "sm_100"), "sm_90a", "sm_80"),
            (("sm_75", "sm_80"), "sm_86", "sm_80"),
        ],
    )
    def test_the_newest_that_the_device_runs_is_taken(self, targets, device, wanted) -> None:
        assert self.chosen(*targets, device=device) == wanted

    def test_none_for_the_device_is_told(self) -> None:
        with pytest.raises(CudaError, match="only PTX for sm_90a, machine code for sm_90: compile"):
            self.chosen("sm_90a", device="sm_80")


class TestCheck:
    def check(self, tmp_path: Path, text: str) -> tuple[list[str], bool]:
        path = tmp_path / "k.ptx"
        path.write_text(text)
        told, is_refused = check_file(path)
        return told.splitlines(), is_refused

    def test_a_kernel_is_described(self, tmp_path) -> None:
        text = entry(
            "mov.u32 %r1, tile; ",
            ".param .u64 x, .param .align 64 .b8 map[128]",
            ".reg .b32 %r1; .shared .align 4 .b8 tile[400];",
        ).replace("\n{", " .maxntid 96, 2, 1\n{", 1)
        lines, is_refused = self.check(tmp_path, text)
        assert not is_refused
        assert lines == [
            f"{tmp_path}/k.ptx: sm_80, 1 kernel",
            "",
            "k",
            "  parameters: u64, 128 bytes",
            "  threads per block: at most 192",
            "  static shared memory per block: 400 of 166,912 bytes",
            "  refused: nothing",
        ]

    def test_refused_instructions_are_named_once_with_their_place(self, tmp_path) -> None:
        text = entry("frob.u32 %r1, 1;\nfrob.u32 %r1, 2;\n@%p1 bra L; L:", "", ".reg .b32 %r1;")
        text = text.replace("@%p1 bra L; L:", "tex.1d.v4.f32.s32 {%r1, %r1, %r1, %r1}, [t, {%r1}];")
        lines, is_refused = self.check(tmp_path, text)
        assert is_refused
        assert "'frob.u32'" in lines[-2] and lines[-2].endswith("(2 times)")
        assert "the simulator does not know 'tex." in lines[-1]

    def test_a_kernel_that_no_gpu_takes_is_told(self, tmp_path) -> None:
        text = entry("mov.u32 %r1, t;", "", ".reg .b32 %r1; .shared .b8 t[200000];")
        lines, is_refused = self.check(tmp_path, text)
        assert is_refused
        assert "200000 bytes of shared memory a block" in lines[-1]
