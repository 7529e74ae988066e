"""A kernel's values beside the right ones, and the first that differs.

An operation with a trace compares the values inside a kernel; any other compares the outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from flash_helpers.check.difference import WrongElement, first_wrong
from flash_helpers.check.errors import Reference
from flash_helpers.check.tensors import tensors_for
from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import Config, Problem, find_config
from flash_helpers.ptx import Lint, SimulatorError, load_ptx
from flash_helpers.registry.config import difference_text
from flash_helpers.runtime.backend import Backend, find_backend
from flash_helpers.runtime.simulator import load_kernels, run_kernel


def config_of_ptx(path: Path, asked: Config | None = None) -> Config:
    """Return the config of the kernel in a PTX file: `asked`, or the file's only config of the same
    step and dtype.

    Raises OSError and PtxError. Raises ValueError if there is no such kernel, or several; its text
    tells how the file's kernels differ from `asked`.
    """
    there = [config for name in load_ptx(path).kernels if (config := find_config(name))]
    if not there:
        raise ValueError(
            f"{path} holds no kernel of this repository: examples/own_kernel/simulate.py shows "
            "how to run another"
        )
    if asked in there:
        return asked
    if asked is None:
        similar = there
    else:
        similar = [c for c in there if (c.step, c.dtype) == (asked.step, asked.dtype)]
    if len(similar) == 1:
        return similar[0]
    named = asked.short_form() if asked else "one kernel"
    listed = "\n  ".join(
        f"{config.short_form()} ({difference_text(asked, config)})"
        if asked
        else config.short_form()
        for config in there
    )
    raise ValueError(f"{path} does not hold {named}, but\n  {listed}")


def fault_summary(
    faults: Sequence[SimulatorError], hint: str = " (--all-faults prints them)"
) -> str:
    """Return the first fault whole, and the number of others by kind. hint: text on how to print
    the others."""
    first, *more = faults
    if not more:
        return str(first)
    kinds = Counter(type(fault).__name__ for fault in more)
    counted = ", ".join(f"{number} {name}" for name, number in kinds.most_common())
    return f"{first}\nand {len(more)} more: {counted}{hint}"


def lint_summary(lints: Sequence[str]) -> str:
    """Return one line for all lints: their number by kind, and the option that prints them."""
    kinds = Counter(lint.partition(":")[0] for lint in lints)
    counted = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    return f"legal and suspicious (--lints prints them): {counted}"


SIMULATOR = "the simulator"  # names the place where a kernel ran


class Compared(Protocol):
    """A kernel that ran, beside the reference values."""

    @property
    def outputs(self) -> Mapping[str, torch.Tensor]:
        """All outputs, by name, on the CPU."""

    @property
    def ran(self) -> str:
        """The place where it ran, in words."""

    @property
    def faults(self) -> tuple[SimulatorError, ...]:
        """Faults that the watcher found."""

    @property
    def lints(self) -> tuple[Lint, ...]:
        """Legal but suspicious accesses."""

    @property
    def disagreement(self) -> Any:
        """The first wrong element, as text for a reader; None if all agree within rounding."""

    def texts(self, excerpt: Any) -> tuple[str, str]:
        """Return the reference values and the kernel's, line by line."""


@dataclass(frozen=True)
class ComparedOutputs:
    """Outputs of a kernel beside the reference (`Compared`)."""

    problem: Problem
    outputs: Mapping[str, torch.Tensor]
    reference: Reference
    ran: str
    faults: tuple[SimulatorError, ...] = ()
    lints: tuple[Lint, ...] = ()

    @property
    def disagreement(self) -> WrongElement | None:
        """The first element that is farther from the reference than its bound."""
        for name, output in self.outputs.items():
            bound = self.reference.bounds[name].of_elements
            axes = self.problem.axes[name]
            if found := first_wrong(name, output, self.reference.expected[name], bound, axes):
                return found
        return None

    def texts(self, excerpt: Any = None) -> tuple[str, str]:
        """Return all outputs, a line per row of the last dimension."""
        right = {name: self.reference.expected[name] for name in self.outputs}
        return rows_text(right), rows_text(self.outputs)


def rows_text(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return tensors as text: the name, and a line per row of the last dimension, which is the only
    one of a vector."""
    lines = []
    for name, tensor in tensors.items():
        lines.append(name)
        for number, row in enumerate(tensor.double().reshape(-1, tensor.shape[-1])):
            lines.append(f"{number:6d}: " + " ".join(f"{value:10.5g}" for value in row.tolist()))
    return "\n".join(lines) + "\n"


def run_on(
    backend: Backend, config: Config, problem: Problem, inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the outputs, on the CPU, of a config that runs on a backend with strides of its own.

    The problem has the usual options, or those that the config fixes.
    """
    tensors = {n: x.to(backend.device) for n, x in tensors_for(config, problem, inputs).items()}
    backend.execute(config, problem.arranged(tensors), problem.call_options())
    backend.synchronize()
    return {tensor.name: tensors[tensor.name].cpu().contiguous() for tensor in problem.outputs}


def compare_with_reference(
    config: Config,
    problem: Problem,
    *,
    distribution: str = "normal",
    seed: int = 0,
    device: str = "cpu",
    ptx: str | Path | None = None,
    gpu: Device | None = None,
) -> Compared:
    """Run a config's own kernel on a problem in its dtype, and compare it with the reference.

    device: "cpu" simulates `ptx` and reads its registers; "cuda" runs the library's kernel.
    ptx: a text or a file; by default the config's own.
    gpu: target of simulated launches; by default the largest GPU that the family is compiled for.

    Raises KernelsNotRun without a GPU; OSError, PtxError; ValueError, with the way out, for a
    problem that the config refuses or whose options cannot be compared.
    """
    problem = problem.in_dtype(config.dtype)
    if reason := config.refusal(problem):
        raise ValueError(reason)
    operation = config.family.operation
    inputs = operation.part("inputs").draw(distribution, problem, seed=seed)
    backend = find_backend("cuda") if device == "cuda" else None
    if operation.has_trace:
        compare = operation.part("trace.compare").compare
        return compare(config, problem, inputs, backend=backend, ptx=ptx, device=gpu)
    reference = operation.part("reference").reference(problem, inputs)
    if backend is not None:
        outputs = run_on(backend, config, problem, inputs)
        return ComparedOutputs(problem, outputs, reference, backend.description)
    tensors = tensors_for(config, problem, inputs)
    options = problem.call_options()
    run = run_kernel(
        config, load_kernels(config, ptx), tensors, device=gpu, keep_going=True, **options
    )
    outputs = {tensor.name: tensors[tensor.name] for tensor in problem.outputs}
    return ComparedOutputs(problem, outputs, reference, SIMULATOR, run.faults, run.lints)
