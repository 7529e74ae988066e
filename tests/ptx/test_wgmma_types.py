"""wgmma of every type, dense and sparse: values, poison and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
from wgmma_cases import CASES, ONE_OF_EACH, WgmmaCase

from flash_helpers.ptx import (
    DeviceMemory,
    MatrixDescriptorError,
    UninitialisedReadError,
    UnsupportedInstruction,
    load_ptx,
)
from flash_helpers.ptx.run.memory.descriptors import MatrixOperand


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.name)
def test_d_gets_a_times_b_and_what_it_was(case: WgmmaCase) -> None:
    assert not case.differences(case.simulated())


def test_the_names_of_cases_differ() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def run(case: WgmmaCase, text: str, **options: object):
    memory = DeviceMemory()
    pointers = np.array([memory.upload(case.data), memory.allocate(case.out_bytes)], np.uint64)
    kernel = load_ptx(text).kernel("k")
    return kernel.launch(1, 128, args=[pointers.tobytes()], memory=memory, **options)


TF32 = WgmmaCase(("f32", "tf32", "tf32"), selector=0)


def test_fields_of_tf32_that_have_no_meaning() -> None:
    text = TF32.text().replace("wgmma.fence", "mov.b32 %meta, 0;\nwgmma.fence")
    with pytest.raises(MatrixDescriptorError, match="fields other than 0b0100 and 0b1110"):
        run(TF32, text)


@pytest.mark.parametrize("t", range(4))
@pytest.mark.parametrize("selector", [0, 1])
def test_metadata_that_nothing_has_written_matter_in_the_selected_lanes(
    t: int, selector: int
) -> None:
    case = replace(TF32, types=("f32", "f16", "f16"), selector=selector)
    read = f"""{{ .reg .pred %p; .reg .b32 %t;
    and.b32 %t, %thread, 3;
    setp.eq.u32 %p, %t, {t};
    @%p ld.shared.b32 %meta, [%tile+16384]; }}"""
    text = case.text().replace("tile[16384]", "tile[16400]")
    text = text.replace("wgmma.fence", f"{read}\nwgmma.fence")
    if t // 2 != selector:
        run(case, text)
    else:
        with pytest.raises(UninitialisedReadError, match="the metadata of this wgmma") as caught:
            run(case, text)
        assert caught.value.thread.lane == t


@pytest.mark.parametrize("t", range(4))
def test_metadata_of_other_lanes_than_the_selected_ones_do_not_count(t: int) -> None:
    spoil = f"""{{ .reg .pred %p; .reg .b32 %t;
    and.b32 %t, %thread, 3;
    setp.eq.u32 %p, %t, {t};
    @%p mov.b32 %meta, 0; }}"""
    text = TF32.text().replace("wgmma.fence", f"{spoil}\nwgmma.fence")
    if t >= 2:
        run(TF32, text)
    else:
        with pytest.raises(MatrixDescriptorError):
            run(TF32, text)


@pytest.mark.parametrize("kind", ["tf32", "e4m3", "s8", "b1"])
def test_poison_of_a_row_of_a_stays_in_the_row(kind: str) -> None:
    """Row 20 of A, in bytes that lanes 16 to 19 of warp 1 hold of D, and of A in registers."""
    d = "f32" if kind in ("tf32", "e4m3") else "s32"
    for in_registers in (False, True):
        case = WgmmaCase((d, kind, kind), in_registers=in_registers)
        text = case.text().replace("tile[16384]", "tile[16400]")
        unwritten = ".reg .pred %p;\nsetp.eq.u32 %p, %thread, 49;\n"
        if in_registers:
            text = text.replace(
                "shr.u32", f"{unwritten}@%p ld.shared.b32 %a2, [%tile+16384];\nshr.u32"
            )
        else:
            # Chunk 68 is rows 16 to 23, first half: 4 behind.
            skip = f"{unwritten.replace('49', '36')}@!%p "
            text = text.replace("st.shared.v4.b32 [%to+0]", f"{skip}st.shared.v4.b32 [%to+0]", 1)
        with pytest.raises(UninitialisedReadError) as caught:
            run(case, text)
        lane = 17 if in_registers else 16
        assert (caught.value.thread.warp, caught.value.thread.lane // 4) == (1, lane // 4)


def test_a_sparse_product_without_its_operands() -> None:
    text = TF32.text().replace("%meta, 0, 1, 1, 1;", "%meta;")
    with pytest.raises(UnsupportedInstruction, match="0 literals where 2 are due"):
        run(TF32, text)


def test_a_swizzle_narrower_than_the_rows_of_b() -> None:
    case = replace(TF32, types=("f32", "f16", "f16"), swizzle=64)
    assert MatrixOperand(16, True, 4).addresses(1 << 63).shape == (16, 4)
    with pytest.raises(ValueError, match="a swizzle of 32 bytes for rows of 64: choose a wider"):
        MatrixOperand(16, True, 4).addresses(3 << 62)
    assert not case.differences(case.simulated())


def test_counts_of_a_sparse_product() -> None:
    case = WgmmaCase(("f32", "f16", "f16"), selector=1)
    counts = run(case, case.text()).counters.total
    assert counts.mma_flops == 2 * 64 * 16 * 32 // 2
    assert counts.wgmma_bytes == 64 * 32 + 16 * 64
