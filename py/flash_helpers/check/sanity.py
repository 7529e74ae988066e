"""Verdicts on kernels: all outputs of each against float64 on the same inputs."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from flash_helpers.check.debugging import lint_summary
from flash_helpers.check.difference import OutputDifference, output_difference
from flash_helpers.check.errors import OutputError, Reference, absolute_errors, measure_error
from flash_helpers.check.tensors import unwritten
from flash_helpers.console.tables import DASH, Table
from flash_helpers.kernel_configs import (
    Config,
    Element,
    Problem,
    get_kernel_progression_configs,
)
from flash_helpers.registry.problem import Tensor
from flash_helpers.registry.selection import UsageError, require_supported, select_kernels
from flash_helpers.runtime.backend import Backend
from flash_helpers.runtime.tensors import torch_dtype

SKIPPED_TOLD = 3
"""Most left-out configs that are named one by one."""


@dataclass(frozen=True)
class SanityRequest:
    """The configs to check, their inputs, and whether errors are reported row by row.

    skipped: reasons why configs are left out although their step has another config that runs.
    problems: by operation. variants: by operation, of configs with an option such as a mask, where
    they take it. own_sizes: whether a family has problems of its own head size.
    """

    configs: tuple[Config, ...]
    skipped: tuple[str, ...]
    problems: Mapping[str, Problem]
    distribution: str
    seed: int
    diff: bool
    variants: Mapping[str, Problem] = field(default_factory=dict)
    own_sizes: bool = False

    def problem_of(self, config: Config) -> Problem:
        """Return the problem that a config is checked on."""
        return _own_problem(config, self.problems, self.variants, self.own_sizes)


@dataclass(frozen=True)
class OutputCheck:
    """One output of a kernel beside float64.

    error: None if the kernel could not be run. reason: why the output is wrong; empty if its error
    is within the bound or unknown.
    """

    name: str
    error: OutputError | None
    bound: OutputError
    reason: str
    difference: OutputDifference | None


@dataclass(frozen=True)
class KernelCheck:
    """The verdict on one config.

    ran: the config that was launched for `config`.
    outputs: in the order of the problem.
    faults: found in the kernel, or the error that stopped it.
    lints: accesses that the simulator found legal and suspicious.
    """

    config: Config
    ran: Config
    outputs: tuple[OutputCheck, ...]
    faults: tuple[str, ...] = ()
    lints: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """Reasons of the failure: wrong outputs, then faults; empty if the kernel passed."""
        several = len(self.outputs) > 1
        wrong = (
            f"{output.name}: {output.reason}" if several else output.reason
            for output in self.outputs
            if output.reason
        )
        return "\n".join((*wrong, *self.faults))

    @property
    def passed(self) -> bool:
        """Whether the kernel ran without a fault and all outputs are within their bounds."""
        return not self.reason


def _own_problem(
    config: Config,
    problems: Mapping[str, Problem],
    variants: Mapping[str, Problem],
    own_sizes: bool,
) -> Problem:
    """Return the problem of a config's operation, with the config's dtype and what is compiled into
    it, such as a mask. own_sizes: with the head size of the family's steps."""
    sizes = config.family.progression()[0].supports.sizes if own_sizes else {}

    def own(problem: Problem) -> Problem:
        return config.supports.adapted(replace(problem.in_dtype(config.dtype), **sizes))

    operation = config.family.operation.name
    if _has_option(config) and operation in variants:
        variant = own(variants[operation])
        if not config.refusal(variant):
            return variant
    return own(problems[operation])


def _has_option(config: Config) -> bool:
    return any(config.supports.options.values())


def _with_masks(configs: Sequence[Config]) -> list[Config]:
    """Return the configs, and of each the nearest variant that fixes an option, such as a mask."""
    found: dict[Config, None] = {}
    for config in configs:
        found[config] = None
        found |= dict.fromkeys([c for c in config.variants() if _has_option(c)][:1])
    return list(found)


def make_request(
    backend: Backend,
    selectors: Sequence[str],
    dtypes: Sequence[Element],
    problems: Mapping[str, Problem],
    distribution: str,
    seed: int = 0,
    diff: bool = False,
    variants: Mapping[str, Problem] = MappingProxyType({}),
    own_sizes: bool = False,
) -> SanityRequest:
    """Choose the configs to check: by default, the configs of the progression and their
    causal variants, as far as they take the problem.

    problems: by operation; kernels of other operations are left out. variants, own_sizes: see
    SanityRequest.
    Raises UsageError if a selector names no listed config, if no config of a chosen step takes the
    problem, and if no config at all does.
    """
    progression = get_kernel_progression_configs()
    chosen = select_kernels(backend.kernels, selectors, dtypes, default=_with_masks(progression))
    operations = {c: c.family.operation for c in chosen}
    chosen = [c for c in chosen if operations[c].name in problems]
    if not chosen:
        raise UsageError(
            f"--kernel {' '.join(selectors)} names no kernel of {', '.join(problems)}: leave out "
            "--operation, or choose others"
        )
    chosen = [c for c in chosen if distribution in operations[c].distributions]
    if not chosen:
        raise UsageError(f"inputs {distribution!r} belong to another operation: choose others")

    def own_problem(config: Config) -> Problem:
        return _own_problem(config, problems, variants, own_sizes)

    refusals = {c: c.refusal(own_problem(c)) for c in chosen}
    run = {c.step for c in chosen if not refusals[c]}
    may_be_left_out = run if selectors or not run else {c.step for c in chosen}
    configs = [c for c in chosen if not refusals[c] or c.step not in may_be_left_out]
    for config in configs:
        require_supported([config], own_problem(config))
    with_option = {operations[c].name for c in configs if _has_option(c)}
    return SanityRequest(
        configs=tuple(configs),
        skipped=tuple(refusals[c] for c in chosen if c not in configs),
        problems={c.family.operation.name: problems[c.family.operation.name] for c in configs},
        distribution=distribution,
        seed=seed,
        diff=diff,
        variants={name: problem for name, problem in variants.items() if name in with_option},
        own_sizes=own_sizes,
    )


def _reason(
    output: torch.Tensor, expected: torch.Tensor, error: OutputError, bound: OutputError
) -> str:
    if error.within(bound):
        return ""
    if math.isfinite(error.max_abs):
        return error.excess(bound)
    n_bad = int((~absolute_errors(output, expected).isfinite()).sum())
    return (
        f"{n_bad} of {output.numel()} elements were not written, or are infinite or NaN where the "
        "reference is not, or finite where it is not"
    )


def _check_output(
    tensor: Tensor, output: torch.Tensor, reference: Reference, diff: bool
) -> OutputCheck:
    expected, bound = reference.expected[tensor.name], reference.bounds[tensor.name]
    error = measure_error(output, expected)
    difference = None
    if diff:
        difference = output_difference(
            tensor.name, output, expected, bound.of_elements, tensor.axes
        )
    reason = _reason(output, expected, error, bound)
    return OutputCheck(tensor.name, error, bound, reason, difference)


def _check_kernel(
    config: Config,
    request: SanityRequest,
    backend: Backend,
    inputs: Mapping[str, torch.Tensor],
    reference: Reference,
) -> KernelCheck:
    problem = request.problem_of(config)
    ran = config.runs_as(problem.strides())
    try:
        outputs = {
            tensor.name: torch.full(
                tensor.shape,
                unwritten(tensor),
                dtype=torch_dtype(tensor.element),
                device=backend.device,
            )
            for tensor in problem.outputs
        }
        tensors = problem.arranged({**inputs, **outputs})
        found = backend.execute(config, tensors, problem.call_options())
        backend.synchronize()
        checks = tuple(
            _check_output(tensor, outputs[tensor.name], reference, request.diff)
            for tensor in problem.outputs
        )
    except Exception as error:  # an error of one kernel must not stop the others
        checks = tuple(
            OutputCheck(tensor.name, None, reference.bounds[tensor.name], "", None)
            for tensor in problem.outputs
        )
        return KernelCheck(config, ran, checks, (f"{type(error).__name__}: {error}",))
    return KernelCheck(config, ran, checks, found.faults, found.lints)


def _error_texts(error: OutputError | None) -> list[str]:
    """Return the texts of both errors for a table."""
    if error is None:
        return [DASH, DASH]
    return [f"{error.max_abs:.2e}", f"{error.relative:.2e}"]


def estimated_seconds(request: SanityRequest) -> float:
    """Return the simulator's estimated time for a request, in seconds."""
    return sum(
        config.family.operation.simulated_seconds(request.problem_of(config))
        for config in request.configs
    )


def check_kernels(request: SanityRequest, backend: Backend) -> Iterator[KernelCheck]:
    """Run each config of the request on outputs full of NaN and compare all outputs with float64.

    Yields one KernelCheck per config, in order. A config that raises fails, with the error's text
    as its fault.
    """
    inputs: dict[Problem, dict[str, torch.Tensor]] = {}
    references: dict[Problem, Reference] = {}
    # All references first: a kernel that breaks the CUDA context would make them impossible.
    for config in request.configs:
        problem = request.problem_of(config)
        if problem not in inputs:
            operation = config.family.operation
            inputs[problem] = operation.part("inputs").draw(
                request.distribution, problem, backend.device, request.seed
            )
            references[problem] = operation.part("reference").reference(problem, inputs[problem])

    def check(config: Config) -> KernelCheck:
        problem = request.problem_of(config)
        return _check_kernel(config, request, backend, inputs[problem], references[problem])

    workers = min(len(os.sched_getaffinity(0)), len(request.configs) // _KERNELS_PER_WORKER)
    if backend.is_simulator and workers > 1:
        yield from _in_processes(check, request.configs, workers)
    else:
        yield from map(check, request.configs)


_KERNELS_PER_WORKER = 8  # at least: to start a process takes as long as a kernel
_check: Callable[[Config], KernelCheck] | None = None  # of a worker


def _in_processes(
    check: Callable[[Config], KernelCheck], configs: Sequence[Config], workers: int
) -> Iterator[KernelCheck]:
    """Check kernels in forked processes, which simulate and compile beside each other."""
    global _check
    _check = check
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, mp_context=fork, initializer=_begin_worker)
    try:
        yield from pool.map(_check_in_worker, configs)
    finally:
        pool.shutdown(cancel_futures=True)
        _check = None


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the work
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork


def _check_in_worker(config: Config) -> KernelCheck:
    assert _check is not None
    return _check(config)


@dataclass(frozen=True)
class SanityReport:
    """All verdicts of one request, as text and as JSON."""

    request: SanityRequest
    device: str
    checks: tuple[KernelCheck, ...]

    @property
    def n_passed(self) -> int:
        """Number of kernels that passed."""
        return sum(check.passed for check in self.checks)

    @property
    def n_failed(self) -> int:
        """Number of kernels that failed."""
        return len(self.checks) - self.n_passed

    @property
    def exit_code(self) -> int:
        """0 if every kernel passed, else 1."""
        return 1 if self.n_failed else 0

    @property
    def summary(self) -> str:
        """Last line of the report."""
        return f"{self.n_passed} passed, {self.n_failed} failed"

    def table(self) -> str:
        """Return a table of one line per config and output; outputs are named if there are several.

        The verdict of a line is that of its output; a fault in the kernel fails all its outputs.
        """
        several = any(len(check.outputs) > 1 for check in self.checks)
        columns = ["step", "idea", "config", "dtype", *(["output"] if several else [])]
        columns += ["max abs error", "relative error", "bound", "verdict"]
        rows = [
            [
                check.config.step.id,
                check.config.step.idea,
                check.config.short_form(),
                check.config.dtype.short,
                *([output.name] if several else []),
                *_error_texts(output.error),
                ", ".join(_error_texts(output.bound)),
                "FAIL" if output.reason or check.faults else "pass",
            ]
            for check in self.checks
            for output in check.outputs
        ]
        return Table(columns, rows, "l" * len(columns)).text()

    def notes(self, all_lints: bool = False) -> list[str]:
        """Return fallbacks, kernels left out, reasons of failures, and lints.

        all_lints: print each lint of a kernel that passed, instead of their number by kind.
        """
        request = self.request
        notes = [
            f"{check.config.short_form()} was run by {check.ran.short_form()}: "
            f"it is made for other strides than those of {request.problem_of(check.config)}"
            for check in self.checks
            if check.ran != check.config
        ]
        notes += [f"skipped: {reason}" for reason in request.skipped[:SKIPPED_TOLD]]
        if more := request.skipped[SKIPPED_TOLD:]:
            notes.append(f"skipped: {len(more)} more, which --json names")
        notes += [
            f"{check.config.short_form()} failed: {check.reason}"
            for check in self.checks
            if not check.passed
        ]
        for check in self.checks:
            name = check.config.short_form()
            if check.passed and check.lints and not all_lints:
                notes.append(f"{name}, {lint_summary(check.lints)}")
            else:
                notes += [f"{name}, lint: {lint}" for lint in check.lints]
        return notes

    def text(self, all_lints: bool = False) -> str:
        """Return the report as text; the last line is the summary. all_lints: see `notes`."""
        request = self.request
        parts = [
            *(f"{problem.operation}: {problem}" for problem in request.problems.values()),
            *(
                f"{problem.operation}, of kernels with a mask that take it: {problem}"
                for problem in request.variants.values()
            ),
            f"inputs {request.distribution}, seed {request.seed}; {self.device}",
            self.table(),
            *self.notes(all_lints),
        ]
        parts += [
            f"\n{check.config.short_form()}, {output.name}\n{output.difference.text()}"
            for check in self.checks
            for output in check.outputs
            if output.difference is not None
        ]
        return "\n".join([*parts, self.summary])

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        request = self.request
        return {
            "device": self.device,
            "problems": [problem.record() for problem in request.problems.values()],
            "inputs": request.distribution,
            "seed": request.seed,
            "passed": self.n_passed,
            "failed": self.n_failed,
            "skipped": list(request.skipped),
            "checks": [
                {
                    "step": check.config.step.id,
                    "idea": check.config.step.idea,
                    "config": check.config.short_form(),
                    "ran": check.ran.short_form(),
                    "dtype": check.config.dtype.short,
                    "problem": request.problem_of(check.config).record(),
                    "verdict": "pass" if check.passed else "fail",
                    "reason": check.reason or None,
                    "lints": list(check.lints),
                    "outputs": [
                        {
                            "name": output.name,
                            "max_abs_error": output.error.max_abs if output.error else None,
                            "relative_error": output.error.relative if output.error else None,
                            "max_abs_bound": output.bound.max_abs,
                            "relative_bound": output.bound.relative,
                            "diff": asdict(output.difference) if output.difference else None,
                        }
                        for output in check.outputs
                    ],
                }
                for check in self.checks
            ],
        }
