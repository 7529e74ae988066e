"""Tensor maps that kernels make and change: values, fences, and what is no map."""

import numpy as np
import pytest
from tensor_map_cases import CASES, MapCase
from tma_snippets import EXPECT, INIT, LOAD, run, wait, with_fault

from flash_helpers.ptx import (
    BulkCopyError,
    MisalignedError,
    MissingLanesError,
    ProxyError,
    RaceError,
    TensorMap,
    UninitialisedReadError,
    UnsupportedInstruction,
)
from flash_helpers.ptx.tensor_map import TENSOR_MAP_BYTES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_box_copied_with_a_map_made_of_zeros(case: MapCase) -> None:
    assert (case.simulated() == case.expected).all()


@pytest.mark.parametrize(
    ("field", "ordinal", "value", "changes"),
    [
        ("global_address", 0, 0x5670, {"address": 0x5670}),
        ("box_dim", 1, 7, {"box": (16, 7)}),
        ("global_dim", 0, (1 << 32) - 1, {"dims": ((1 << 32) - 1, 20)}),
        ("global_stride", 0, 256, {"strides": (256,)}),
        ("element_stride", 1, 3, {"element_strides": (1, 3)}),
        ("elemtype", 0, 10, {"dtype": "bf16"}),
        ("swizzle_mode", 0, 3, {"swizzle": "128B"}),
        ("fill_mode", 0, 1, {"fill": "nan"}),
        ("swizzle_atomicity", 0, 0, {}),
        ("interleave_layout", 0, 0, {}),
    ],
)
def test_one_field_is_changed(field, ordinal, value, changes) -> None:
    own = {"dtype": "f16", "address": 0x1000, "dims": (40, 20), "box": (16, 8), "strides": (80,)}
    found = TensorMap.replaced(TensorMap(**own).encode(), field, ordinal, value)
    assert TensorMap.decode(found) == TensorMap(**own | changes)


def test_the_rank_is_given_less_one() -> None:
    record = TensorMap("f32", 0, (8, 8, 8), (8, 8, 1)).encode()
    assert TensorMap.decode(TensorMap.replaced(record, "rank", 0, 1)).dims == (8, 8)


REPLACE = "tensormap.replace.tile.{}.shared::cta.b1024.{} [%r8], {};"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;"
RELEASE = "fence.proxy.tensormap::generic.release.gpu;"
PUBLISH = (
    "@%p1 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
    "[%rd1], [%r8], 128;"
)
COPY_TEMPLATE = """
mul.wide.u32 %rd4, %lane, 4;
add.u64 %rd4, %rd4, %rd2;
@%p1 ld.b32 %r10, [%rd4];
@%p1 st.shared.b32 [%r9], %r10;
"""
SHIFT = f"""
add.u64 %rd3, %rd0, 128;
@%p0 {REPLACE.format("global_address", "b64", "%rd3")}
"""
STORE = """
@%p1 ld.shared.b32 %r10, [%r9];
mul.wide.u32 %rd4, %lane, 4;
add.u64 %rd4, %rd4, %rd1;
@%p1 st.global.b32 [%rd4], %r10;
"""
# The map of the arguments, moved on by one row of the tensor; its box goes to the output.
BODY = f"""
setp.lt.u32 %p1, %tid, 32;
mov.u32 %r8, smem;
add.u32 %r8, %r8, 4096;
mad.lo.u32 %r9, %lane, 4, %r8;
{COPY_TEMPLATE}
bar.warp.sync -1;
{SHIFT}
bar.warp.sync -1;
{PUBLISH}
@%p1 {ACQUIRE}
@%p0 {INIT} [bar], 1;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p0 {EXPECT} [bar], 512;
@%p0 {LOAD} [smem], [%rd1, {{0, 0}}], [bar];
{wait("bar", 0)}
mul.wide.u32 %rd4, %tid, 4;
add.u64 %rd4, %rd4, %rd1;
mad.lo.u32 %r9, %tid, 4, 0;
ld.shared.b32 %r10, [%r9];
st.global.b32 [%rd4+256], %r10;
"""


def launch(body: str):
    """The words of the output from byte 256 on, where the map is not."""
    return run(body, results=256, target="sm_90a")[1][64:128].view(np.float32)


def test_a_copy_of_a_map_with_another_address() -> None:
    assert (launch(BODY) == np.arange(32, 96)).all()


OTHERS = {
    "no acquire": (f"@%p1 {ACQUIRE}", "", ProxyError, "no fence.proxy.tensormap::generic.acquire"),
    "an acquire of another map": (
        ACQUIRE,
        ACQUIRE.replace("%rd1", "%rd1+128"),
        ProxyError,
        r"changed at .*cp_fenceproxy",
    ),
    "an acquire that comes too early": (
        f"{PUBLISH}\n@%p1 {ACQUIRE}",
        f"@%p1 {ACQUIRE}\n{PUBLISH}",
        ProxyError,
        "generic.acquire since",
    ),
    "bytes that nothing has written": (COPY_TEMPLATE, "", UninitialisedReadError, "nothing has"),
    "bytes that are no map": (
        "st.shared.b32 [%r9], %r10;",
        "st.shared.b32 [%r9], %lane;",
        BulkCopyError,
        "neither zeros nor a tensor map",
    ),
    "a map that is not aligned": (
        "add.u32 %r8, %r8, 4096;",
        "add.u32 %r8, %r8, 4112;",
        MisalignedError,
        "a multiple of 64",
    ),
    "a value that is too large": (
        SHIFT,
        f"@%p0 {REPLACE.format('box_dim', 'b32', '0, 70000')}",
        BulkCopyError,
        "box_dim 70000 is more than",
    ),
    "a box that no map has": (
        SHIFT,
        f"@%p0 {REPLACE.format('box_dim', 'b32', '0, 300')}",
        BulkCopyError,
        r"box\[0\] is 300: give 1 to 256",
    ),
    "a map among the parameters": (
        SHIFT,
        "@%p0 tensormap.replace.tile.rank.b1024.b32 [%rd2], 1;",
        BulkCopyError,
        "a tensor map in param memory, which no kernel can change",
    ),
    "a dimension that no map has": (
        SHIFT,
        f"@%p0 {REPLACE.format('global_stride', 'b64', '4, 16')}",
        BulkCopyError,
        "dimension 4 of global_stride: there are 4",
    ),
    "a change by another warp": (
        SHIFT,
        SHIFT.replace("@%p0", "setp.eq.u32 %p3, %tid, 32;\n@%p3"),
        RaceError,
        "write by warp",
    ),
    "a part of the warp": (PUBLISH, PUBLISH.replace("%p1", "%p0"), MissingLanesError, "lane"),
    "a type that is not simulated": (
        SHIFT,
        f"@%p0 {REPLACE.format('elemtype', 'b32', '11')}",
        UnsupportedInstruction,
        "elemtype 11 .tf32. is not simulated",
    ),
    "no literal": (
        SHIFT,
        f"@%p0 {REPLACE.format('elemtype', 'b32', '%r10')}",
        UnsupportedInstruction,
        "a literal is due for elemtype",
    ),
    "an address of 32 bits": (
        SHIFT,
        f"@%p0 {REPLACE.format('global_address', 'b32', '%r10')}",
        UnsupportedInstruction,
        "b64 for addresses",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_mistakes(name) -> None:
    right, wrong, kind, match = OTHERS[name]
    with pytest.raises(kind, match=match):
        launch(with_fault(BODY, right, wrong))


class TestInGlobalMemory:
    """A map that is copied to global memory as it is, and changed there."""

    CHANGE = "@%p0 tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd3;"
    CHANGED = BODY.replace(SHIFT, "add.u64 %rd3, %rd0, 128;\n").replace(
        f"@%p1 {ACQUIRE}",
        f"bar.warp.sync -1;\n{CHANGE}\n@%p0 {RELEASE}\nbar.warp.sync -1;\n@%p1 {ACQUIRE}",
    )

    def test_values(self) -> None:
        assert (launch(self.CHANGED) == np.arange(32, 96)).all()

    def test_without_a_release(self) -> None:
        with pytest.raises(ProxyError, match=r"generic\.release since"):
            launch(with_fault(self.CHANGED, f"@%p0 {RELEASE}", ""))


class TestStored:
    """A copy of a map that threads store to global memory as words."""

    BODY = BODY.replace(SHIFT, "").replace(PUBLISH, STORE)

    def test_values(self) -> None:
        body = self.BODY.replace(f"@%p1 {ACQUIRE}", f"{RELEASE}\nbar.sync 0;\n@%p1 {ACQUIRE}")
        assert (launch(body) == np.arange(64)).all()

    def test_without_a_fence(self) -> None:
        body = self.BODY.replace(f"@%p1 {ACQUIRE}", RELEASE)
        with pytest.raises(ProxyError, match=r"the kernel has changed\n.*generic\.acquire since"):
            launch(body)


def test_the_record_has_room_for_all_fields() -> None:
    record = bytes(TENSOR_MAP_BYTES)
    for field, ordinal in (("element_stride", 4), ("box_dim", 4), ("global_dim", 4)):
        record = TensorMap.replaced(record, field, ordinal, 5)
    assert len(record) == TENSOR_MAP_BYTES and sum(byte == 5 for byte in record) == 3
