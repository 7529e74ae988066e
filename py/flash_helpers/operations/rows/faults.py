"""Mistakes that the steps of rows invite, as edits of a kernel's PTX, and where they show."""

from __future__ import annotations

from typing import Any

from flash_helpers.check.faults import Fault, drop, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.rows.problem import Rows
from flash_helpers.ptx import (
    AbsentBlockError,
    MisalignedError,
    OutOfBoundsError,
    PendingCopyError,
    Phase,
    RaceError,
)
from flash_helpers.registry.row_clusters import ONE_BLOCK
from flash_helpers.registry.row_threads import ROWS_IN_FLIGHT

PROLOGUE, MAIN_LOOP = Phase.PROLOGUE, Phase.MAIN_LOOP
BF16 = Element.BF16

FAULTS = {
    "s1: l is written where other warps still read m": Fault(
        "s1", BF16, MAIN_LOOP, r"st\.shared\.f32.*\+32\]", swap(r"\+32\]", "]"), nth(0), RaceError,
        "value = smem[lane % kWarps]",
    ),
    "s2: chunks begin where the row does": Fault(
        "s2", BF16, PROLOGUE, r"and\.b64\s.*, 14;", swap(", 14;", ", 0;"), nth(0), MisalignedError,
        "__ldg(x_chunks_gmem",
    ),
    "s3: where there is no chunk, elements are 0": Fault(
        "s3", BF16, PROLOGUE, r"cvt\.rn\.bf16x2", swap(r"cvt\S+ (%r\d+), .*", r"mov.b32 \1, 0;"),
        quantity="y",
    ),
    "s4: a row that does not exist is read": Fault(
        "s4", BF16, PROLOGUE, r"selp\.b32\s.*, 0, ", swap(r"selp\.b32(.*), 0, %p\d+", r"mov.b32\1"),
        nth(0), OutOfBoundsError, "__ldg(x_gmem",
    ),
    "s5: a chunk of a row behind the last is loaded": Fault(
        "s5", BF16, PROLOGUE, r"@exists ld\.global", swap("@exists ", ""), nth(1), OutOfBoundsError,
        '"l"(src_gmem)',
    ),
    "x1: a row is read before its chunks have come": Fault(
        "x1", BF16, MAIN_LOOP, r"cp\.async\.wait_group", swap("0;", "1;"), None, PendingCopyError,
        "x_smem[k",
    ),
    "x2: the bytes of one block are expected instead of two": Fault(
        "x2", BF16, MAIN_LOOP, r"mbarrier\.arrive\.expect_tx", swap(r"%r\d+;", "8;"),
        nth(0), PendingCopyError, "value = parts_smem[0]",
    ),
    "x3: a block sends before the others have begun": Fault(
        "x3", BF16, MAIN_LOOP, r"barrier\.cluster\.wait", drop, nth(0),
        AbsentBlockError, "send(in_block(dst_smem",
    ),
}  # fmt: skip


def problem_of(config: Any) -> Rows:
    """Return the problem on which faults of a config show. Its width is odd, so that the second row
    begins between two multiples of 16 bytes, and it has fewer chunks than the block of s3 holds.
    Its two rows are fewer than those of a block of s4. Where a thread has several rows, or a block
    is persistent, they have whole chunks in registers."""
    if {ROWS_IN_FLIGHT, ONE_BLOCK} & config.step.traits:
        return Rows(3, min(1000, config.supports.held - 24), config.dtype)
    return Rows(2, 1001, config.dtype)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do for rows."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts: with large logits, an extra 0 in l
    would not show."""
    return "normal"
