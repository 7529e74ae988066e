"""Mistakes that the steps of decode invite, as edits of a kernel's PTX, and where they show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flash_helpers.check.faults import Fault, drop, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.ptx import LaunchOrderError, MbarrierError, PendingCopyError, Phase, RaceError

PROLOGUE, MAIN_LOOP, EPILOGUE = Phase.PROLOGUE, Phase.MAIN_LOOP, Phase.EPILOGUE
BF16 = Element.BF16
BARRIER = r"bar\.sync"

FAULTS = {
    "c1: sums go where other warps still read their keys": Fault(
        "c1", BF16, EPILOGUE, BARRIER, drop, nth(0), RaceError, "O_rmem[0][n][half * 2",
    ),
    "c2: the block that is multiplied may still be in flight": Fault(
        "c2", BF16, MAIN_LOOP, r"cp\.async\.wait_group", swap("0;", "1;"), None, PendingCopyError,
        "ldmatrix_x4(",
    ),
    "c3: a row of a copy has the page of another key": Fault(
        "c3", BF16, PROLOGUE, r"shfl\.sync\.idx", swap(r"shfl\S+\s+(%r\d+)\|%p\d+, (%r\d+), .*;",
        r"mov.b32 \1, \2;"), nth(0), quantity="o",
    ),
    "c4: pieces are added up as if all had the same maximum": Fault(
        "c4", BF16, MAIN_LOOP, r"ex2\.approx", swap(r"ex2\S+\s+(%f\d+), .*;",
        r"mov.f32 \1, 0f3F800000;"), nth(0), quantity="o", kernel="combine_kernel",
    ),
    "c5: a piece goes on to the end of its sequence": Fault(
        "c5", BF16, PROLOGUE, r"min\.s32", swap(r"min\S+\s+(%r\d+), %r\d+, (%r\d+);",
        r"mov.u32 \1, \2;"), nth(4), quantity="o",
    ),
    "c6: a column of V and its key are taken for one another": Fault(
        "c6", BF16, MAIN_LOOP, r"\S+.*\b12576\b", swap("12576", "12816"), None, quantity="o",
    ),
    "d1: a thread reads sums before all streams have stored theirs": Fault(
        "d1", BF16, MAIN_LOOP, BARRIER, drop, nth(0), RaceError, "m(part, row)",
    ),
    "d2: rows of V behind the end of a sequence are not cleared": Fault(
        "d2", BF16, MAIN_LOOP, r"st\.shared\.v4\.b32", drop, quantity="o",
    ),
    "d3: a slot is loaded again before its warps have given it back": Fault(
        "d3", BF16, MAIN_LOOP, r"mbarrier\.try_wait", swap(r"mbarrier\S+\s+done, .*;",
        "setp.eq.u32 done, 0, 0;"), nth(-1), MbarrierError, "barrier_expect(",
    ),
    "d4: a lane fills a slot that the first lane has not found empty": Fault(
        "d4", BF16, MAIN_LOOP, r"bar\.warp\.sync", drop, None, PendingCopyError, "load_box<",
    ),
    "d5: parts are added up before the launch that stores them has ended": Fault(
        "d5", BF16, PROLOGUE, r"griddepcontrol\.wait", drop, None, LaunchOrderError,
        "m(part, row)", kernel="combine_kernel",
    ),
    "d6: the queries of a tile are multiplied before all are there": Fault(
        "d6", BF16, MAIN_LOOP, r"barrier\.sync", drop, nth(0), RaceError, "load_Q<",
    ),
    "d7: a call reads its inputs while the one before may still write them": Fault(
        "d7", BF16, PROLOGUE, r"griddepcontrol\.wait", drop, None, LaunchOrderError,
        "keys_of(",
    ),
    "d8: parts are counted before the launch that stores them has ended": Fault(
        "d8", BF16, PROLOGUE, r"griddepcontrol\.wait", drop, None, LaunchOrderError,
        "args.cache_seqlens", kernel="combine_kernel",
    ),
    "d9: a thread block does not count its part": Fault(
        "d9", BF16, MAIN_LOOP, r"atom\.", swap("inc", "min"), None, quantity="o",
    ),
    "d10: thread blocks of a row have shares of different keys": Fault(
        "d10", BF16, PROLOGUE, r"mov\.u32.*%ctaid\.y", swap("%ctaid.y", "%ctaid.x"), nth(0),
        quantity="o",
    ),
    "d11: keys behind a sequence's end are not hidden": Fault(
        "d11", BF16, MAIN_LOOP, r"setp\.le\.s32", swap("setp.le", "setp.ge"), nth(0), quantity="o",
    ),
    "d12: a call uses its keys while the one before may still write them": Fault(
        "d12", BF16, PROLOGUE, r"griddepcontrol\.wait", drop, None, LaunchOrderError,
        "keys_of(",
    ),
    "d13: a piece goes on to the end of its sequence": Fault(
        "d13", BF16, PROLOGUE, r"min\.s32", swap(r"min\S+\s+(%r\d+), %r\d+, (%r\d+);",
        r"mov.u32 \1, \2;"), nth(-4), quantity="o",
    ),
}  # fmt: skip


def problem_of(config: Any) -> Decode:
    """Return the problem on which faults of a config show: two sequences, of which one ends within
    a block, and two heads on one. The cache is in pages of 4 keys, in pieces of a half of the keys,
    and in fp8 with scales, if the kernel takes them."""
    supports = config.supports
    room = 8 * supports.B_c
    sizes = {"d_head": config.d_head, "dtype": config.dtype, "total_k": 2 * room - 5}
    pages, pieces = 4 * supports.pages, room // 2 * supports.keys_per_piece
    fp8 = dict.fromkeys(("fp8_cache", "k_scale", "v_scale"), supports.fp8_cache)
    return Decode(2, 2, len_k=room, page_size=pages, keys_per_piece=pieces, **sizes, **fp8)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for, with a few SMs, so that thread blocks take several
    turns."""
    return replace(largest_device(config.family.capabilities[0]), sms=4)


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts."""
    return "normal"
