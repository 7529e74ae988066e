"""Runs of kernels with a fault planted in their PTX, in the simulator, and their outcomes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from flash_helpers.check.debugging import (
    Compared,
    compare_with_reference,
    fault_summary,
)
from flash_helpers.check.errors import OutputError, Reference, measure_error
from flash_helpers.check.faults import Fault, NotPlantedError
from flash_helpers.kernel_configs import Config, Problem
from flash_helpers.ptx import Kernel
from flash_helpers.ptx.read.module import Instruction
from flash_helpers.runtime.library import ptx_path
from flash_helpers.runtime.simulator import load_kernel, load_kernels

_LINE = re.compile(r"([\w/.]+\.cuh):(\d+)")


def problem_of(config: Config) -> Problem:
    """Return the problem on which the faults of a config show."""
    return _part(config).problem_of(config)


def inputs_of(config: Config) -> dict[str, torch.Tensor]:
    """Return the inputs of `problem_of` the config, by name."""
    inputs = config.family.operation.part("inputs")
    return inputs.draw(_part(config).distribution_of(config), problem_of(config))


def reference_of(config: Config) -> Reference:
    """Return the float64 results for `inputs_of` the config, and the bounds on a kernel's
    errors."""
    reference = config.family.operation.part("reference")
    return reference.reference(problem_of(config), inputs_of(config))


def _part(config: Config) -> ModuleType:
    return config.family.operation.part("faults")


@functools.cache
def kernel_of(config: Config, function: str = "") -> Kernel:
    """Return a kernel of a config, by its C++ function or the first, without a fault."""
    return load_kernel(config, ptx_path(config, function), function)


@dataclass(frozen=True)
class Planted:
    """PTX with a fault in it. edits: for each edited instruction, the old line and the new one."""

    fault: Fault
    ptx: str
    edits: tuple[tuple[Instruction, str, str], ...]

    @property
    def kernels(self) -> dict[str, Kernel]:
        """All kernels of the config by their names, the edited one among them."""
        return load_kernels(self.fault.config, self.ptx)


def plant(fault: Fault) -> Planted:
    """Return the kernel's PTX with the fault in it.

    Raises NotPlantedError if the PTX has no place for the fault, and OSError, RuntimeError or
    PtxError if the PTX cannot be read.
    """
    lines = ptx_path(fault.config, fault.kernel).read_text().split("\n")
    program = kernel_of(fault.config, fault.kernel).program
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
    """A kernel that ran with a fault, beside the reference. errors, bounds: by output."""

    found: Compared
    errors: Mapping[str, OutputError]
    bounds: Mapping[str, OutputError]

    @property
    def is_caught(self) -> bool:
        """Whether the watcher or the check of the outputs found an error."""
        within = (error.within(self.bounds[name]) for name, error in self.errors.items())
        return bool(self.found.faults) or not all(within)


def run_planted(planted: Planted) -> Outcome:
    """Run the kernel on the inputs of `inputs_of`. Raises PtxError if it cannot be run."""
    config = planted.fault.config
    part = _part(config)
    found = compare_with_reference(
        config,
        problem_of(config),
        distribution=part.distribution_of(config),
        ptx=planted.ptx,
        gpu=part.device_of(config),
    )
    reference = reference_of(config)
    errors = {
        name: measure_error(output, reference.expected[name])
        for name, output in found.outputs.items()
    }
    return Outcome(found, errors, {name: reference.bounds[name] for name in errors})


def source_lines(text: str, root: Path) -> Iterator[tuple[str, str]]:
    """Yield each line of CUDA source that a text names: its place, and the line.

    root: of the repository.
    """
    for file, line in _LINE.findall(text):
        if (root / file).is_file():
            yield f"{file}:{line}", (root / file).read_text().splitlines()[int(line) - 1]


def is_built_from(root: Path, config: Config) -> bool:
    """Return whether the shipped PTX names the right lines, judging by its barriers."""
    barriers = [i for i in kernel_of(config).program.instructions if i.opcode == "bar.sync"]
    return all(
        any("__syncthreads()" in line for _, line in source_lines(str(i.location), root))
        for i in barriers
    )


def planted_text(planted: Planted, root: Path) -> str:
    """Text of the edit: the first edited instruction, before and after, and its CUDA source."""
    instruction, before, after = planted.edits[0]
    where = f"PTX line {instruction.line}, in the {planted.fault.phase.value}"
    more = f", and {len(planted.edits) - 1} more like it" if len(planted.edits) > 1 else ""
    edit = [f"  - {before.strip()}", *(f"  + {line.strip()}" for line in after.splitlines())]
    return "\n".join([f"{where}{more}:", *edit, *_quoted(str(instruction.location), root)])


def outcome_text(outcome: Outcome, root: Path) -> str:
    """Text of the simulator's and the check's reports, with the lines of CUDA source."""
    found = outcome.found
    several = len(outcome.errors) > 1
    errors = "; ".join(
        (f"{name} has " if several else "")
        + f"{_error_text(error)}; allowed are {_error_text(outcome.bounds[name])}"
        for name, error in outcome.errors.items()
    )
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


def _error_text(error: OutputError) -> str:
    return f"max abs error {error.max_abs:.2g}, relative error {error.relative:.2g}"


def _quoted(text: str, root: Path) -> Iterator[str]:
    return (f"    {where}: {line.strip()}" for where, line in source_lines(text, root))
