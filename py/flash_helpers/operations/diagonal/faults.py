"""Mistakes that the steps of diagonal invite, as edits of a kernel's PTX, and where they show."""

from __future__ import annotations

from typing import Any

from flash_helpers.check.faults import Fault, nth, swap
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.diagonal.problem import Diagonal
from flash_helpers.ptx import MisalignedError, OutOfBoundsError, Phase
from flash_helpers.registry.diagonal import ONE_RANGE

WHOLE = Phase.MAIN_LOOP  # of a kernel without a loop
BF16 = Element.BF16

FAULTS = {
    "k1: every row is scaled by the first element of a": Fault(
        "k1", BF16, WHOLE, r"mul\.lo\.s64", swap(r"mul\.lo\.s64\s+(%rd\d+), .*", r"mov.b64 \1, 0;"),
        nth(0), quantity="c",
    ),
    "k2: chunks begin where the row does": Fault(
        "k2", BF16, WHOLE, r"and\.b64\s.*, 14;", swap(", 14;", ", 0;"), nth(0), MisalignedError,
        "__ldg(reinterpret_cast<const uint4 *>(b_gmem)",
    ),
    "k3: warps behind the last row go on": Fault(
        "k3", BF16, Phase.PROLOGUE, r"setp\.ge\.\w64", swap(r"(%p\d+), .*", r"\1, 0, 1;"), nth(0),
        OutOfBoundsError, "__ldg(a_gmem)",
    ),
    "k4: where a product was one row short, the column is not mended": Fault(
        "k4", BF16, Phase.PROLOGUE, r"selp\.b32", swap(r"selp\S+\s+(%r\d+), .*", r"mov.u32 \1, 0;"),
        nth(0), OutOfBoundsError, "__ldg(reinterpret_cast<const uint4 *>(chunk)",
    ),
}  # fmt: skip


def problem_of(config: Any) -> Diagonal:
    """Return the problem on which faults of a config show. Its width is odd, so that the second row
    begins between two multiples of 16 bytes, and a row has more than one piece. Where B is one
    range of chunks, its rows have 3."""
    if ONE_RANGE in config.step.traits:
        return Diagonal(3, 3 * config.supports.piece, config.dtype)
    return Diagonal(3, 2 * config.supports.piece + 1, config.dtype)


def device_of(config: Config) -> Device:
    """Return the GPU that launches are made for; any GPU will do for diagonal."""
    return largest_device(config.family.capabilities[0])


def distribution_of(config: Config) -> str:
    """Return the kind of inputs in which every element counts."""
    return "normal"
