"""The lint for bytes that are written in one layout and read in another one."""

import numpy as np
import pytest
from ptx_snippets import entry
from tma_snippets import BARRIER_INITS, DECLARATIONS, EXPECT, INIT, LOAD, wait

from flash_helpers.ptx import DeviceMemory, LayoutLint, TensorMap, load_ptx

SIZES = {"none": 0, "128B": 128, "64B": 64, "32B": 32}
MODES = {name: mode for mode, name in enumerate(SIZES)}
"""By the upper bits of a matrix descriptor."""
STORED = "@%p0 cp.async.bulk.commit_group;\n@%p0 cp.async.bulk.wait_group 0;\n"


def tiles(swizzle: str) -> dict[str, object]:
    """A map of boxes as wide as a swizzle, with 64 rows of bf16."""
    width = SIZES[swizzle] // 2 or 64
    return {"dims": (64, 64), "box": (width, 64), "strides": (128,), "swizzle": swizzle}


CORES = {"dims": (8, 64, 8), "box": (8, 64, 2), "strides": (128, 16), "swizzle": "none"}
"""Boxes of two columns of core matrices."""


def lints(body: str, *maps: dict[str, object]) -> list[LayoutLint]:
    """The lints for layouts of a block of 128 threads. `maps`: of %rd8, %rd9."""
    memory = DeviceMemory()
    data = memory.upload(np.zeros((64, 64), np.uint16))
    start = "mov.u32 %tid, %tid.x;\nsetp.eq.u32 %p0, %tid, 0;\n"
    start += "and.b32 %lane, %tid, 31;\nmov.u32 %r20, smem;\n"
    names = [f"map{i}" for i in range(len(maps))]
    for i, name in enumerate(names):
        start += f"mov.b64 %rd{8 + i}, {name};\ncvta.param.u64 %rd{8 + i}, %rd{8 + i};\n"
    text = entry(
        start + body,
        ", ".join(f".param .align 64 .b8 {name}[128]" for name in names),
        DECLARATIONS + ".reg .f32 %f<8>;",
    )
    args = [TensorMap("bf16", data, **of_map).encode() for of_map in maps]
    kernel = load_ptx(text.replace("sm_80", "sm_90a")).kernel("k")
    run = kernel.launch(1, 128, args=args, memory=memory, lints=True)
    return [lint for lint in run.lints if isinstance(lint, LayoutLint)]


def loaded(tensor_map: dict[str, object]) -> str:
    """The first box of a map, in `smem`."""
    box = tensor_map["box"]
    rank, size = len(box), 2 * int(np.prod(box))
    if SIZES[tensor_map["swizzle"]]:
        size = box[0] * 2 * 64
    zeros = ", ".join(["0"] * rank)
    return f"""
    @%p0 {INIT} [bar], 1;
    @%p0 {BARRIER_INITS}
    bar.sync 0;
    @%p0 {EXPECT} [bar], {size};
    @%p0 {LOAD.replace("2d", f"{rank}d")} [smem], [%rd8, {{{zeros}}}], [bar];
    {wait("bar", 0)}
    """


def stored() -> str:
    """The box of the second map, from `smem`."""
    return f"""
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd9, {{0, 0}}], [smem];
    {STORED}
    """


def product(swizzle: str, *, leading: int = 0, start: int = 0, base: int = 0, mn: int = 0) -> str:
    """m64n8k16 of `smem` by itself."""
    stride = 8 * (SIZES[swizzle] or 16)
    bits = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | MODES[swizzle] << 62
    return f"""
    wgmma.fence.sync.aligned;
    mov.u64 %rd4, {bits:#x};
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f0, %f1, %f2, %f3}}, %rd4, %rd4,
        0, 1, 1, {mn}, {mn};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    """


def matrices(instruction: str, *, swizzled: bool, row: int = 128) -> str:
    """Four matrices, of 32 rows, by each warp; `row`: bytes from one row to the next."""
    xor = "and.b32 %r4, %r2, 7; shl.b32 %r4, %r4, 4; xor.b32 %r3, %r3, %r4;" if swizzled else ""
    return f"""
    mov.u32 %r2, %lane;
    mul.lo.u32 %r3, %r2, {row};
    add.u32 %r3, %r3, 32;
    {xor}
    setp.lt.u32 %p1, %tid, 32;
    @!%p1 bra DONE;
    {instruction}
    DONE:
    """


LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r3];"
STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r3], {%r5, %r5, %r5, %r5};"


@pytest.mark.parametrize("read", SIZES)
@pytest.mark.parametrize("written", SIZES)
def test_products_of_boxes(written: str, read: str) -> None:
    given = CORES if written == "none" else tiles(written)
    found = lints(loaded(given) + product(read, leading=1024), given)
    if written == read:
        assert found == []
        return
    names = [f"swizzle {name}" if SIZES[name] else "no swizzle" for name in (read, written)]
    text = str(found[0])
    assert f"wgmma with {names[0]} reads bytes that TMA wrote with {names[1]}\n    at " in text
    assert "an 8 x 8 matrix has rows 0, " in text
    assert found[0].site.opcode.startswith("wgmma")


@pytest.mark.parametrize("swizzle", ["128B", "64B", "32B"])
def test_products_of_columns_of_boxes(swizzle: str) -> None:
    """MN-major operands."""
    given = {"dims": (64, 64), "box": (SIZES[swizzle] // 2, 64), "strides": (128,)}
    boxes = given | {"swizzle": swizzle}
    right = product(swizzle, leading=1024, mn=1)
    assert lints(loaded(boxes) + right, boxes) == []
    (lint,) = lints(loaded(boxes) + product("none", leading=128, mn=1), boxes)
    assert "wgmma with no swizzle reads" in str(lint)


def test_products_of_rows_of_another_width() -> None:
    """Without a swizzle, 8 rows of 128 bytes are no core matrix, which has rows of 16 bytes."""
    found = lints(loaded(tiles("none")) + product("none", leading=1024), tiles("none"))
    assert "has rows 0, 0, 0, 0, 0, 0, 0, 0 of the box, in its columns 0, 1, 2," in str(found[0])


def test_products_of_a_pattern_that_begins_elsewhere() -> None:
    """Patterns begin at multiples of 1024 bytes, unless a base offset says otherwise."""
    given = tiles("128B")
    assert lints(loaded(given) + product("128B", start=32), given) == []
    assert lints(loaded(given) + product("128B", base=2), given)


@pytest.mark.parametrize(("swizzle", "swizzled"), [("128B", True), ("none", False)])
def test_matrices_of_boxes(swizzle: str, swizzled: bool) -> None:
    given = tiles(swizzle)
    assert lints(loaded(given) + matrices(LDMATRIX, swizzled=swizzled), given) == []
    (lint,) = lints(loaded(given) + matrices(LDMATRIX, swizzled=not swizzled), given)
    name = f"swizzle {swizzle}" if swizzled else "no swizzle"
    assert f"ldmatrix reads bytes that TMA wrote with {name}\n    at " in str(lint)
    assert lint.site.opcode.startswith("ldmatrix")


@pytest.mark.parametrize("row", [16, 144])
def test_matrices_that_are_a_row_or_another_pitch(row: int) -> None:
    """A row of a box as a matrix says nothing; a diagonal of it is no column."""
    given = tiles("none")
    found = lints(loaded(given) + matrices(LDMATRIX, swizzled=False, row=row), given)
    assert len(found) == (row == 144)


@pytest.mark.parametrize(("swizzle", "swizzled"), [("128B", True), ("none", False)])
def test_boxes_of_matrices(swizzle: str, swizzled: bool) -> None:
    """stmatrix, and a store of the box by TMA."""
    given = tiles("none"), tiles(swizzle)
    box = given[1] | {"box": (64, 32)}
    zeros = "".join(f"st.shared.u32 [%r6+{512 * i}], 0;\n" for i in range(8))
    start = f"mov.u32 %r5, 0;\nshl.b32 %r6, %tid, 2;\n{zeros}bar.sync 0;\n"
    body = start + matrices(STMATRIX, swizzled=swizzled) + stored()
    assert lints(body, given[0], box) == []
    (lint,) = lints(start + matrices(STMATRIX, swizzled=not swizzled) + stored(), given[0], box)
    name = f"swizzle {swizzle}" if swizzled else "no swizzle"
    assert f"TMA stores with {name} what stmatrix wrote\n    at " in str(lint)
    assert lint.site.opcode.startswith("cp.async.bulk.tensor")


BOXES = ("none", "128B")


@pytest.mark.parametrize("out", BOXES)
@pytest.mark.parametrize("into", BOXES)
def test_boxes_of_boxes(into: str, out: str) -> None:
    """A tile that is loaded and stored."""
    given = tiles(into), tiles(out)
    found = lints(loaded(given[0]) + stored(), *given)
    assert len(found) == (into != out)
    for lint in found:
        assert "TMA stores with" in str(lint) and "what TMA wrote with" in str(lint)


def test_what_threads_have_written_since_tells_nothing() -> None:
    given = tiles("128B"), tiles("none")
    writes = "shl.b32 %r6, %tid, 6;\n" + "".join(
        f"st.shared.v4.u32 [%r6+{16 * i}], {{%r5, %r5, %r5, %r5}};\n" for i in range(4)
    )
    body = loaded(given[0]) + "mov.u32 %r5, 0;\nbar.sync 0;\n" + writes + stored()
    assert lints(body, *given) == []
