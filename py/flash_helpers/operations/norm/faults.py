"""Mistakes that the steps of norms invite, as edits of a kernel's PTX, and where they show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flash_helpers.check.faults import Fault, drop, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.norm.problem import Norm
from flash_helpers.ptx import (
    AbsentBlockError,
    MisalignedError,
    OutOfBoundsError,
    PendingCopyError,
    Phase,
    RaceError,
)
from flash_helpers.registry.row_clusters import ONE_BLOCK, WEIGHTS_STAY
from flash_helpers.registry.row_threads import ROWS_IN_FLIGHT

PROLOGUE, MAIN_LOOP = Phase.PROLOGUE, Phase.MAIN_LOOP
BF16 = Element.BF16

FAULTS = {
    "n1: squares are written where other warps still read sums": Fault(
        "n1", BF16, MAIN_LOOP, r"st\.shared\.f32.*\+32\]", swap(r"\+32\]", "]"), nth(0), RaceError,
        "value = smem[lane % kWarps]",
    ),
    "n2: chunks begin where the row does": Fault(
        "n2", BF16, PROLOGUE, r"and\.b64\s.*, 14;", swap(", 14;", ", 0;"), nth(0), MisalignedError,
        "__ldg(x_chunks_gmem",
    ),
    "n3: where there is no chunk, (0 - mean)² is added to the squares": Fault(
        "n3", BF16, MAIN_LOOP, r"@%p4 bra", swap("@%p4 bra.*", ""), nth(0), quantity="y",
    ),
    "n4: threads behind the last row have the width of others": Fault(
        "n4", BF16, PROLOGUE, r"selp\.b32", swap(r"selp\S+\s+(%r\d+), (%r\d+), 0, .*;",
        r"mov.b32 \1, \2;"), nth(0), OutOfBoundsError, "__ldg(x_",
    ),
    "n5: a thread loads a row behind the last": Fault(
        "n5", BF16, PROLOGUE, r"setp\.ge\.s64", swap(r"setp\.ge(\S+\s+%p\d+), (%rd\d+), .*;",
        r"setp.gt\1, \2, \2;"), nth(1), OutOfBoundsError, "__ldg(reinterpret_cast",
    ),
    "n6: a chunk of a row behind the last is loaded": Fault(
        "n6", BF16, PROLOGUE, r"@exists ld\.global", swap("@exists ", ""), nth(1), OutOfBoundsError,
        '"l"(src_gmem)',
    ),
    "n7: the share of a part is not divided by the elements of both": Fault(
        "n7", BF16, MAIN_LOOP, r"rcp\.approx", swap(r"rcp\S+ (%f\d+), .*;",
        r"mov.f32 \1, 0f3F800000;"), quantity="y",
    ),
    "n8: y of a chunk that does not exist is stored": Fault(
        "n8", BF16, MAIN_LOOP, r"@exists st\.global\.cs", swap("@exists ", ""), nth(0),
        OutOfBoundsError, '"r"(chunk.x)',
    ),
    "n9: y of a chunk that does not exist is stored": Fault(
        "n9", BF16, PROLOGUE, r"@exists st\.global\.cs", swap("@exists ", ""), None,
        OutOfBoundsError, '"r"(chunk.x)',
    ),
    "n10: y of a chunk that does not exist is stored": Fault(
        "n10", BF16, MAIN_LOOP, r"@exists st\.global\.cs", swap("@exists ", ""), nth(0),
        OutOfBoundsError, '"r"(chunk.x)',
    ),
    "a1: sums are sent to other blocks without a release": Fault(
        "a1", BF16, MAIN_LOOP, r"mbarrier\.arrive\.release", swap("release", "relaxed"), nth(0),
        RaceError, "value += sums_smem[block]",
    ),
    "a2: a row is read before its chunks have come": Fault(
        "a2", BF16, MAIN_LOOP, r"cp\.async\.wait_group", swap("0;", "1;"), None, PendingCopyError,
        "x_smem[i]",
    ),
    "a3: the sums of other blocks are read while they are on their way": Fault(
        "a3", BF16, MAIN_LOOP, r"mbarrier\.try_wait", swap(r"mbarrier\S+ done, .*;",
        "setp.eq.u32 done, 0, 0;"), nth(0), PendingCopyError, "value += sums_smem[block]",
    ),
    "a4: a block sends before the others have begun": Fault(
        "a4", BF16, MAIN_LOOP, r"barrier\.cluster\.wait", drop, nth(0),
        AbsentBlockError, "send(in_block(dst_smem",
    ),
    "a5: the parts of other blocks are read while they are on their way": Fault(
        "a5", BF16, MAIN_LOOP, r"mbarrier\.try_wait", swap(r"mbarrier\S+ done, .*;",
        "setp.eq.u32 done, 0, 0;"), nth(0), PendingCopyError, "part = smem[0]",
    ),
    "a6: the piece of the next row is one of 64 MiB": Fault(
        "a6", BF16, MAIN_LOOP, r"cp\.async\.bulk\.prefetch", swap(r"%r\d+;", "67108864;"), nth(0),
        OutOfBoundsError, '"l"(src_gmem)',
    ),
    "a7: y of a chunk that does not exist is stored": Fault(
        "a7", BF16, MAIN_LOOP, r"@exists st\.global\.cs", swap("@exists ", ""), nth(0),
        OutOfBoundsError, '"r"(chunk.x)',
    ),
    "a8: y of a chunk that does not exist is stored": Fault(
        "a8", BF16, MAIN_LOOP, r"@exists st\.global\.cs", swap("@exists ", ""), nth(0),
        OutOfBoundsError, '"r"(chunk.x)',
    ),
    "r1: the sum of squares is not divided by the width": Fault(
        "r1", BF16, MAIN_LOOP, r"div\.rn", swap(r"div\S+\s+(%f\d+), (%f\d+), .*;",
        r"mov.f32 \1, \2;"), nth(0), quantity="y",
    ),
    "r2: y of a row behind the last is stored": Fault(
        "r2", BF16, PROLOGUE, r"@exists st\.global", swap("@exists ", ""), nth(1), OutOfBoundsError,
        '"r"(chunk.x)',
    ),
    "r3: y of a chunk that does not exist is stored": Fault(
        "r3", BF16, PROLOGUE, r"@exists st\.global\.cs", swap("@exists ", ""), None,
        OutOfBoundsError, '"r"(chunk.x)',
    ),
    "r4: y of a chunk that does not exist is stored": Fault(
        "r4", BF16, PROLOGUE, r"@exists st\.global\.cs", swap("@exists ", ""), None,
        OutOfBoundsError, '"r"(chunk.x)',
    ),
}  # fmt: skip


def problem_of(config: Any) -> Norm:
    """Return the problem on which faults of a config show. Its width is odd, so that the second row
    begins between two multiples of 16 bytes, and it has fewer chunks than the block of n3 holds;
    its rows are fewer than those of a block of n4. Where a thread has several rows, these have
    whole chunks in registers, and the last block lacks one; those of persistent blocks likewise."""
    rows, width = 2, 1001
    if {ROWS_IN_FLIGHT, ONE_BLOCK} & config.step.traits:
        rows, width = 3, min(1000, config.supports.held - 24)
    problem = Norm(rows, width, config.dtype, weight=True, bias=True)
    adapted: Norm = config.supports.adapted(problem)
    return adapted


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; of one SM where a cluster is to have several
    rows."""
    device = largest_device(config.family.capabilities[0])
    return replace(device, sms=1) if WEIGHTS_STAY in config.step.traits else device


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts, and the mean is not 0."""
    return "normal"
