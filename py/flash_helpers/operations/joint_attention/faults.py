"""Mistakes that the steps of joint attention invite, as edits of a kernel's PTX, and where they
show."""

from __future__ import annotations

from typing import Any

from flash_helpers.check.faults import EPILOGUE, MAIN_LOOP, PROLOGUE, Fault, drop, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.joint_attention.problem import JointAttention
from flash_helpers.ptx import AbsentBlockError, OutOfBoundsError, RaceError

BF16, FP16 = Element.BF16, Element.FP16

FAULTS = {
    "jo1: a block of keys is read before other warps have copied their part": Fault(
        "jo1", BF16, MAIN_LOOP, r"bar\.sync", drop, nth(1), RaceError, "ldmatrix",
        kernel="attention_kernel",
    ),
    "jo1: the product of the imaginary parts is added": Fault(
        "jo1", BF16, MAIN_LOOP, r"sub\.f32", swap(r"sub\.f32", "add.f32"), quantity="o",
        kernel="rotary_kernel",
    ),
    "jo2: tokens of the context are turned, too": Fault(
        "jo2", BF16, MAIN_LOOP, r"and\.pred", swap(r"(%p\d+), (%p\d+), %p\d+;", r"\1, \2, \2;"),
        error=OutOfBoundsError, source="__ldg(table_gmem", kernel="norm_kernel",
    ),
    "jo3: rows g have the norm of the last row": Fault(
        "jo3", BF16, PROLOGUE, r"setp\.eq\.s32", swap(r"(%p\d+), (%r\d+), .*", r"\1, \2, \2;"),
        nth(0), quantity="o",
    ),
    "jo4: warps find their head without the unused rows before it": Fault(
        "jo4", BF16, PROLOGUE, r"mul\.lo\.s32.*, 6176", swap("6176", "6144"), quantity="o",
    ),
    "jo5: the sum over the lanes of a row reaches into the next row": Fault(
        "jo5", BF16, MAIN_LOOP, r"shfl\.sync\.bfly", swap(r", %r\d+(, %r\d+, %r\d+;)", r", 16\1"),
        nth(3), quantity="o",
    ),
    "jo6: the sum of a row of 8 lanes goes on over the next row": Fault(
        "jo6", BF16, MAIN_LOOP, r"setp\.lt\.s32.*, 5;", swap(", 5;", ", 1;"), quantity="o",
        kernel="norm_kernel",
    ),
    "jo7: keys behind the last are not hidden": Fault(
        "jo7", BF16, MAIN_LOOP, r"setp\.le\.s32", swap(r"setp\.le", "setp.ge"), quantity="o",
        kernel="attention_kernel",
    ),
    "jo8: m follows once every thread has a P that is too large": Fault(
        "jo8", FP16, MAIN_LOOP, r"bar\.red\.or\.pred", swap(r"red\.or", "red.and"), quantity="o",
        kernel="attention_kernel",
    ),
    "jo9: each lane of four adds all of l": Fault(
        "jo9", BF16, EPILOGUE, r"mul\.f32 .*0f3E800000", swap("0f3E800000", "0f3F800000"),
        quantity="o", kernel="attention_kernel",
    ),
    "jo10: K has the scale, too": Fault(
        "jo10", BF16, MAIN_LOOP, r"selp\.f32.*0f3F800000",
        swap(r"(%f\d+), 0f3F800000", r"\1, \1"), quantity="o", kernel="norm_kernel",
    ),
    "jc1: the sums of other heads are read before these are written": Fault(
        "jc1", BF16, PROLOGUE, r"barrier\.cluster\.(arrive|wait)", drop, slice(2),
        AbsentBlockError, "load_cluster",
    ),
    "jc1: a thread block ends while others read its sums": Fault(
        "jc1", BF16, EPILOGUE, r"barrier\.cluster\.wait", drop, nth(-1), AbsentBlockError,
        "load_cluster",
    ),
}  # fmt: skip


def problem_of(config: Any) -> JointAttention:
    """Return the problem on which faults of a config show: keys in two blocks, and a context."""
    return JointAttention(1, 2, 70, config.d_head, config.dtype, context=5, rotary=True)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do for joint attention."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every token counts; for jo8, that overflow fp16."""
    return "large_logits" if config.step.id == "jo8" else "normal"
