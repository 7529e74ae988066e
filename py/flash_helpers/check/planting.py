"""Plants a fault in a kernel's PTX, runs the kernel in the simulator, and tells how that went."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from flash_helpers.check.debugging import (
    Comparison,
    compare_with_reference,
    fault_summary,
)
from flash_helpers.check.faults import Fault, NotPlantedError
from flash_helpers.check.inputs import QKV, make_inputs
from flash_helpers.check.reference import (
    AttentionError,
    AttentionReference,
    attention_reference,
    measure_error,
)
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.ptx import Kernel
from flash_helpers.ptx.read.module import Instruction
from flash_helpers.registry import hopper
from flash_helpers.registry.hopper import COUNTED_FROM, WGMMA_M
from flash_helpers.registry.mma_sync import LAZY_RESCALE
from flash_helpers.runtime.library import ptx_path
from flash_helpers.runtime.simulator import load_kernel

_LINE = re.compile(r"([\w/.]+\.cuh):(\d+)")


def shape_of(config: Config) -> AttentionForward:
    """The shortest with three blocks of keys or more.

    Of a causal kernel the least that tiles are counted for, `on_few_sms`. The diagonal of the fixed
    tiles then ends between two warpgroups and within a block of keys, the last of three; the first
    queries see none.
    """
    if config.supports.causal:
        len_q, len_k = COUNTED_FROM * config.B_r, 2 * config.B_c + WGMMA_M
        return AttentionForward(batch=1, heads=1, len_q=len_q, len_k=len_k, causal=True)
    whole = config.supports.whole
    return AttentionForward(batch=1, heads=1, len_q=-(-3 * config.B_c // whole) * whole)


@contextlib.contextmanager
def on_few_sms(config: Config) -> Iterator[None]:
    """Launches a causal kernel as on a GPU of two SMs, where tiles of `shape_of` are left for a
    counter when each block has two."""
    usual = hopper.SMS
    try:
        hopper.SMS = 2 if config.supports.causal else usual
        yield
    finally:
        hopper.SMS = usual


def distribution_of(config: Config) -> str:
    """Of inputs in which the maximum of most rows changes from block to block, by enough for a step
    that is lazy. Of a causal kernel one in which every key counts, so that a wrong mask shows."""
    is_lazy = LAZY_RESCALE in config.step.traits and not config.supports.causal
    return "large_logits" if is_lazy else "normal"


def inputs_of(config: Config) -> QKV:
    """Q, K and V of that shape and distribution."""
    dtype = getattr(torch, config.dtype.torch_name)
    return make_inputs(distribution_of(config), shape_of(config), dtype)


def reference_of(config: Config) -> AttentionReference:
    """What comes of them in float64, and how far off a kernel may be."""
    return attention_reference(*inputs_of(config), causal=config.supports.causal)


@functools.cache
def kernel_of(config: Config) -> Kernel:
    """The kernel as it is shipped."""
    return load_kernel(config, ptx_path(config))


@dataclass(frozen=True)
class Planted:
    """PTX with a fault in it. edits: each instruction, its line before, and what is there now."""

    fault: Fault
    ptx: str
    edits: tuple[tuple[Instruction, str, str], ...]

    @property
    def kernel(self) -> Kernel:
        """What the simulator runs."""
        return load_kernel(self.fault.config, self.ptx)


def plant(fault: Fault) -> Planted:
    """The kernel's PTX with the fault in it. Raises NotPlantedError if there is nowhere to put it,
    and OSError, RuntimeError or PtxError if the PTX cannot be read."""
    lines = ptx_path(fault.config).read_text().split("\n")
    program = kernel_of(fault.config).program
    found = [
        instruction
        for instruction, block in zip(program.instructions, program.block_of, strict=True)
        if program.blocks[block].phase is fault.phase
        and re.match(fault.instruction, lines[instruction.line - 1].strip())
    ]
    chosen = found[fault.which or slice(None)]
    if not chosen:
        raise NotPlantedError(
            f"there is no {fault.instruction} in the {fault.phase.value} of {fault.step}"
        )
    edits = []
    for instruction in chosen:
        before = lines[instruction.line - 1]
        lines[instruction.line - 1] = fault.edit(before)
        edits.append((instruction, before, lines[instruction.line - 1]))
    return Planted(fault, "\n".join(lines), tuple(edits))


@dataclass(frozen=True)
class Outcome:
    """What came of a kernel that ran with a fault, beside the reference. error, bound: of its
    output."""

    found: Comparison
    error: AttentionError
    bound: AttentionError

    @property
    def is_caught(self) -> bool:
        """Whether the watcher or the check of the output says that something is wrong."""
        return bool(self.found.faults) or not self.error.within(self.bound)


def run_planted(planted: Planted) -> Outcome:
    """Run the kernel on the inputs of `inputs_of`. Raises PtxError if it cannot be run."""
    config = planted.fault.config
    with on_few_sms(config):
        found = compare_with_reference(
            config, shape_of(config), distribution=distribution_of(config), ptx=planted.ptx
        )
    reference = reference_of(config)
    return Outcome(found, measure_error(found.output, reference.expected), reference.bound)


def source_lines(text: str, root: Path) -> Iterator[tuple[str, str]]:
    """The lines of CUDA source that a text names: where, and the line. root: of the repository."""
    for file, line in _LINE.findall(text):
        if (root / file).is_file():
            yield f"{file}:{line}", (root / file).read_text().splitlines()[int(line) - 1]


def is_built_from(root: Path, config: Config) -> bool:
    """Whether the shipped PTX names the right lines: its barriers stand where it says."""
    barriers = [i for i in kernel_of(config).program.instructions if i.opcode == "bar.sync"]
    return all(
        any("__syncthreads()" in line for _, line in source_lines(str(i.location), root))
        for i in barriers
    )


def planted_text(planted: Planted, root: Path) -> str:
    """What was edited: the first of the instructions, before and after, and where it comes from."""
    instruction, before, after = planted.edits[0]
    where = f"PTX line {instruction.line}, in the {planted.fault.phase.value}"
    more = f", and {len(planted.edits) - 1} more like it" if len(planted.edits) > 1 else ""
    edit = [f"  - {before.strip()}", *(f"  + {line.strip()}" for line in after.splitlines())]
    return "\n".join([f"{where}{more}:", *edit, *_quoted(str(instruction.location), root)])


def outcome_text(outcome: Outcome, root: Path) -> str:
    """What the simulator and the check say, with the lines of CUDA source."""
    found = outcome.found
    errors = f"{_error_text(outcome.error)}; allowed are {_error_text(outcome.bound)}"
    if found.faults:
        told = fault_summary(found.faults, "")
        lines = [f"caught by the watcher: {told}", *_quoted(str(found.faults[0]), root)]
    elif outcome.is_caught:
        lines = [
            f"caught by the check of the output: {errors}",
            f"first difference: {found.disagreement}",
        ]
    else:
        lines = [f"NOT caught: {errors}"]
    return "\n".join([*lines, *(f"lint: {lint}" for lint in found.lints)])


def _error_text(error: AttentionError) -> str:
    return f"max abs error {error.max_abs:.2g}, relative error {error.relative:.2g}"


def _quoted(text: str, root: Path) -> Iterator[str]:
    return (f"    {where}: {line.strip()}" for where, line in source_lines(text, root))
