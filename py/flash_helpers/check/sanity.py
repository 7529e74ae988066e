"""Is each kernel right? Every kernel against float64 on the same inputs, one verdict each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flash_helpers.check.difference import OutputDifference, output_difference
from flash_helpers.check.inputs import QKV, make_inputs
from flash_helpers.check.reference import (
    AttentionError,
    AttentionReference,
    attention_reference,
    measure_error,
)
from flash_helpers.console.tables import DASH, Table
from flash_helpers.kernel_configs import (
    AttentionForward,
    Config,
    DType,
    get_kernel_progression_configs,
)
from flash_helpers.registry.selection import require_supported, select_kernels
from flash_helpers.runtime.backend import Backend, Findings
from flash_helpers.runtime.simulator import estimate_seconds


@dataclass(frozen=True)
class SanityRequest:
    """What is checked: the configs, on which inputs, and whether errors are told row by row.

    skipped: why configs are not run whose step has another one that is.
    """

    configs: tuple[Config, ...]
    skipped: tuple[str, ...]
    not_built: tuple[Config, ...]
    shape: AttentionForward
    distribution: str
    seed: int
    diff: bool


@dataclass(frozen=True)
class KernelCheck:
    """The verdict on one kernel.

    ran: the config that was launched for `config`.
    error: None if the kernel could not be run.
    reason: why it failed, the faults found in it included; empty if it passed.
    lints: what the simulator found that is legal and suspicious.
    """

    config: Config
    ran: Config
    error: AttentionError | None
    bound: AttentionError
    reason: str
    difference: OutputDifference | None
    lints: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if the kernel ran and both errors are within the bound."""
        return not self.reason

    @property
    def max_abs(self) -> float | None:
        """The largest absolute error; None if the kernel could not be run."""
        return self.error.max_abs if self.error else None

    @property
    def relative(self) -> float | None:
        """The relative error; None if the kernel could not be run."""
        return self.error.relative if self.error else None


def make_request(
    backend: Backend,
    selectors: Sequence[str],
    dtypes: Sequence[DType],
    shape: AttentionForward,
    distribution: str,
    seed: int = 0,
    diff: bool = False,
) -> SanityRequest:
    """Choose the kernels to check: by default, those of the progression that are built.

    Raises UsageError if a selector names nothing that is built, or if the sequence is not whole
    blocks of any chosen kernel of a step.
    """
    progression = get_kernel_progression_configs()
    chosen = select_kernels(backend.kernels, selectors, dtypes, default=progression)
    refusals = {c: c.refusal(shape.in_dtype(c.dtype)) for c in chosen}
    run = {c.step for c in chosen if not refusals[c]}
    configs = [c for c in chosen if not refusals[c] or c.step not in run]
    require_supported(configs, shape)
    missing = [c for c in progression if c.dtype in dtypes and c not in backend.kernels]
    return SanityRequest(
        configs=tuple(configs),
        skipped=tuple(refusals[c] for c in chosen if c not in configs),
        not_built=() if selectors else tuple(missing),
        shape=shape,
        distribution=distribution,
        seed=seed,
        diff=diff,
    )


def _reason(output: torch.Tensor, error: AttentionError, bound: AttentionError) -> str:
    if error.within(bound):
        return ""
    if not math.isfinite(error.max_abs):
        n_bad = int((~output.isfinite()).sum())
        return f"{n_bad} of {output.numel()} elements were not written or are not finite"
    return "; ".join(
        f"{name} error {value:.3e} is over its bound {limit:.3e}"
        for name, value, limit in (
            ("max abs", error.max_abs, bound.max_abs),
            ("relative", error.relative, bound.relative),
        )
        if value > limit
    )


def _check_kernel(
    config: Config,
    request: SanityRequest,
    backend: Backend,
    inputs: QKV,
    reference: AttentionReference,
) -> KernelCheck:
    ran = config.runs_as(request.shape.strides())
    error = difference = None
    found = Findings()
    try:
        output = torch.full_like(inputs[0], torch.nan)
        found = backend.forward(config, *inputs, output)
        backend.synchronize()
        error = measure_error(output, reference.expected)
        reason = "\n".join(filter(None, (_reason(output, error, reference.bound), *found.faults)))
        if request.diff:
            difference = output_difference(output, reference.expected, reference.bound.max_abs)
    except Exception as problem:  # whatever stops one kernel must not stop the others
        reason = f"{type(problem).__name__}: {problem}"
    return KernelCheck(config, ran, error, reference.bound, reason, difference, found.lints)


def estimated_seconds(request: SanityRequest) -> float:
    """About how long the simulator takes for a request."""
    return len(request.configs) * estimate_seconds(request.shape)


def check_kernels(request: SanityRequest, backend: Backend) -> Iterator[KernelCheck]:
    """Run each config of the request on an output full of NaN and compare it with float64.

    Yields one KernelCheck a config, in order. A kernel that raises fails, with the text as reason.
    """
    inputs: dict[DType, QKV] = {}
    references: dict[DType, AttentionReference] = {}
    # all references first: a kernel that breaks the CUDA context would take them along
    for dtype in sorted({config.dtype for config in request.configs}):
        inputs[dtype] = make_inputs(
            request.distribution,
            request.shape,
            getattr(torch, dtype.torch_name),
            backend.device,
            request.seed,
        )
        references[dtype] = attention_reference(*inputs[dtype])
    for config in request.configs:
        yield _check_kernel(
            config, request, backend, inputs[config.dtype], references[config.dtype]
        )


@dataclass(frozen=True)
class SanityReport:
    """All verdicts of one request, for people and for machines."""

    request: SanityRequest
    device: str
    checks: tuple[KernelCheck, ...]

    @property
    def n_passed(self) -> int:
        """Kernels that passed."""
        return sum(check.passed for check in self.checks)

    @property
    def n_failed(self) -> int:
        """Kernels that failed."""
        return len(self.checks) - self.n_passed

    @property
    def exit_code(self) -> int:
        """0 if every kernel passed, else 1."""
        return 1 if self.n_failed else 0

    @property
    def summary(self) -> str:
        """The last line."""
        return f"{self.n_passed} passed, {self.n_failed} failed"

    def table(self) -> str:
        """One line a kernel."""
        columns = ["step", "idea", "config", "dtype", "max abs error", "relative error", "bound"]
        rows = [
            [
                check.config.step.id,
                check.config.step.idea,
                check.config.short_form(),
                check.config.dtype.short,
                *(
                    f"{value:.2e}" if value is not None else DASH
                    for value in (check.max_abs, check.relative)
                ),
                f"{check.bound.max_abs:.2e}, {check.bound.relative:.2e}",
                "pass" if check.passed else "FAIL",
            ]
            for check in self.checks
        ]
        return Table([*columns, "verdict"], rows, "l" * 8).text()

    def notes(self) -> list[str]:
        """What the table does not say: fallbacks, kernels left out, reasons of failures, lints."""
        request = self.request
        notes = [
            f"{check.config.short_form()} was run by {check.ran.short_form()}: "
            f"the row stride is {request.shape.row_stride}"
            for check in self.checks
            if check.ran != check.config
        ]
        notes += [f"skipped: {reason}" for reason in request.skipped]
        notes += [f"{config.short_form()} is not built" for config in request.not_built]
        notes += [
            f"{check.config.short_form()} failed: {check.reason}"
            for check in self.checks
            if not check.passed
        ]
        notes += [f"{c.config.short_form()}, lint: {lint}" for c in self.checks for lint in c.lints]
        return notes

    def text(self) -> str:
        """Everything for a reader; the last line is the summary."""
        request = self.request
        parts = [
            f"{request.shape}; inputs {request.distribution}, seed {request.seed}; {self.device}",
            self.table(),
            *self.notes(),
        ]
        parts += [
            f"\n{check.config.short_form()}\n{check.difference.text()}"
            for check in self.checks
            if check.difference is not None
        ]
        return "\n".join([*parts, self.summary])

    def as_json(self) -> dict[str, Any]:
        """Everything for a machine."""
        request = self.request
        return {
            "device": self.device,
            "shape": {
                "batch": request.shape.batch,
                "heads": request.shape.heads,
                "seq_len": request.shape.len_q,
                "d_head": request.shape.d_head,
            },
            "inputs": request.distribution,
            "seed": request.seed,
            "passed": self.n_passed,
            "failed": self.n_failed,
            "skipped": list(request.skipped),
            "not_built": [config.short_form() for config in request.not_built],
            "checks": [
                {
                    "step": check.config.step.id,
                    "idea": check.config.step.idea,
                    "config": check.config.short_form(),
                    "ran": check.ran.short_form(),
                    "dtype": check.config.dtype.short,
                    "max_abs_error": check.max_abs,
                    "relative_error": check.relative,
                    "max_abs_bound": check.bound.max_abs,
                    "relative_bound": check.bound.relative,
                    "verdict": "pass" if check.passed else "fail",
                    "reason": check.reason or None,
                    "lints": list(check.lints),
                    "diff": asdict(check.difference) if check.difference else None,
                }
                for check in self.checks
            ],
        }
