"""Mistakes that the steps of norms' backward pass invite, as edits of a kernel's PTX, and where
they show."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.check.faults import MAIN_LOOP, Fault, drop, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.norm_backward.problem import NormBackward
from flash_helpers.ptx import OutOfBoundsError, PendingCopyError, RaceError

BF16 = Element.BF16

FAULTS = {
    "e1: sums of columns are added where other warps still write them": Fault(
        "e1", BF16, MAIN_LOOP, r"bar\.sync", drop, nth(0), RaceError, "w * 2 * kColumns + i",
        kernel="columns_kernel",
    ),
    "e2: all rows share one set of sums": Fault(
        "e2", BF16, MAIN_LOOP, r"shl\.b32\s.*, 3;",
        swap(r"shl\S+\s+(%r\d+), .*", r"mov.u32 \1, 0;"), nth(3), RaceError,
        "smem[warp] = value", kernel="rows_kernel",
    ),
    "e3: the walk behind the registers begins at the row's first element": Fault(
        "e3", BF16, MAIN_LOOP, r"add\.s32.*, 4096;", swap(", 4096;", ", 0;"), nth(0), quantity="dx",
        kernel="rows_kernel",
    ),
    "e4: the sums of a row's first warp are taken for those of all": Fault(
        "e4", BF16, MAIN_LOOP, r"and\.b32\s.*, 3;", swap(", 3;", ", 0;"), nth(0), quantity="dx",
        kernel="rows_kernel",
    ),
    "e5: behind the last row another one is loaded": Fault(
        "e5", BF16, MAIN_LOOP, r"selp\.b32", swap(r"selp\S+\s+(%r\d+), (%r\d+), 0, .*;",
        r"mov.b32 \1, \2;"), nth(1), OutOfBoundsError, "__ldg(args.", kernel="rows_kernel",
    ),
    "q1: the sum of a row is not divided by the width": Fault(
        "q1", BF16, MAIN_LOOP, r"div\.rn", swap(r"div\S+\s+(%f\d+), (%f\d+), .*;",
        r"mov.f32 \1, \2;"), nth(0), quantity="dx", kernel="rows_kernel",
    ),
    "q2: behind the last row another one is loaded": Fault(
        "q2", BF16, MAIN_LOOP, r"selp\.b32", swap(r"selp\S+\s+(%r\d+), (%r\d+), 0, .*;",
        r"mov.b32 \1, \2;"), nth(1), OutOfBoundsError, "__ldg(args.", kernel="rows_kernel",
    ),
    "w1: a row is read while its copy is on its way": Fault(
        "w1", BF16, MAIN_LOOP, r"cp\.async\.wait_group", swap("1;", "2;"), None, PendingCopyError,
        "load_smem_16(slot_smem", kernel="rows_kernel",
    ),
    "w2: a row is read while its copy is on its way": Fault(
        "w2", BF16, MAIN_LOOP, r"cp\.async\.wait_group", swap("1;", "2;"), None, PendingCopyError,
        "load_smem_16(slot_smem", kernel="rows_kernel",
    ),
    "nc1: the sums of other blocks are read while they are on their way": Fault(
        "nc1", BF16, MAIN_LOOP, r"mbarrier\.try_wait", swap(r"mbarrier\S+ done, .*;",
        "setp.eq.u32 done, 0, 0;"), nth(0), PendingCopyError, "blocks_smem[n % kTurns",
        kernel="rows_kernel",
    ),
}  # fmt: skip


def problem_of(config: Config) -> NormBackward:
    """Return the problem on which faults of a config show: rows of whole chunks, more of them than
    the thread blocks of the device."""
    problem = NormBackward(7, 1000, config.dtype, weight=True, dweight=True, dbias=True)
    adapted: NormBackward = config.supports.adapted(problem)
    return adapted


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for, of one SM, so that a thread block has several
    rows."""
    return replace(largest_device(config.family.capabilities[0]), sms=1)


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts, and the mean is not 0."""
    return "normal"
