"""Blocks that are the table of a file of results, with its machine and software."""

from __future__ import annotations

from flash_helpers.course.arguments import Arguments
from flash_helpers.course.clock_blocks import result_path
from flash_helpers.course.evidence import Evidence


def autograd_block(evidence: Evidence, arguments: Arguments) -> str:
    """The speed of a forward and a backward pass through autograd."""
    from flash_helpers.measure.autograd import AutogradSpeeds  # imports torch

    return AutogradSpeeds.load(result_path(evidence, arguments)).markdown()


def multimodal_block(evidence: Evidence, arguments: Arguments) -> str:
    """The times of parts of a multimodal model."""
    from flash_helpers.measure.multimodal import BlockTimes  # imports torch

    return BlockTimes.load(result_path(evidence, arguments)).markdown()
