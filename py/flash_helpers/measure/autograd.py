"""Speed of a forward and a backward pass through autograd, of attention() and of PyTorch: the
contenders, the records and their table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_helpers.console.tables import DASH, Table, number
from flash_helpers.measure.benchmark import Contender, InputSet
from flash_helpers.measure.results import Measurement, Protocol, Provenance, RecordFile
from flash_helpers.operations.attention_backward.problem import GRADIENTS

LAB = "attention"
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
FORWARD_AND_BACKWARD = 3.5 / 2.5  # operations of both passes over those of the backward pass

# Takes q, k and v of shape (batch, seq, heads, d_head).
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def contenders(attention: Callable[..., Any], causal: bool) -> list[Contender]:
    """Return flash_attention.attention and PyTorch's backends, as a training calls them."""

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal=causal)

    def of_pytorch(backend: SDPBackend) -> Attention:
        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in qkv)
            with sdpa_kernel(backend):
                o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            return o.transpose(1, 2)

        return attend

    functions = {LAB: ours, **{name: of_pytorch(kind) for name, kind in BACKENDS.items()}}
    return [Contender(name, None, _gradients_by(f)) for name, f in functions.items()]


def _gradients_by(attend: Attention) -> Callable[[InputSet], Mapping[str, torch.Tensor]]:
    def run(inputs: InputSet) -> Mapping[str, torch.Tensor]:
        leaves = [inputs.inputs[name].detach().requires_grad_() for name in "qkv"]
        found = torch.autograd.grad(attend(*leaves), leaves, inputs.inputs["do"])
        return dict(zip(GRADIENTS, found, strict=True))

    return run


@dataclass(frozen=True)
class AutogradSpeeds(RecordFile):
    """Everything that one run measured. measurements: named LAB or as in BACKENDS."""

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "speeds through autograd"

    provenance: Provenance
    protocol: Protocol
    measurements: tuple[Measurement, ...]

    def table(self) -> Table:
        """One row per problem: TFLOP/s of each contender, and the ratio to the faster backend, the
        median over the rounds of the ratio within each; a dash where there is no time."""
        by_problem: dict[str, dict[str, Measurement]] = {}
        for found in self.measurements:
            by_problem.setdefault(str(found.asked), {})[found.name] = found
        rows = []
        for problem, own in by_problem.items():
            lab, others = own[LAB], [own[name] for name in BACKENDS if own[name].samples_ms]
            ratios = [
                min(times) / ours
                for ours, *times in zip(
                    lab.samples_ms, *(other.samples_ms for other in others), strict=True
                )
                if times
            ]
            speeds = [_tflops(own[name]) for name in (LAB, *BACKENDS)]
            rows.append(
                [problem, *speeds, number(statistics.median(ratios), 2) if ratios else DASH]
            )
        header = ["problem", "attention(), TFLOP/s", *BACKENDS, "ratio"]
        return Table(header, rows)

    def markdown(self) -> str:
        """Markdown of the table, and of the machine and software of the measurement."""
        rounds, load = self.protocol.rounds, self.protocol.loads[0]
        sentence = self.provenance.sentence(
            self.provenance.built_with,
            f"PyTorch {self.provenance.torch}, cuDNN {self.provenance.cudnn}",
        )
        return (
            f"{self.table().markdown()}\n\nThe ratio is that to PyTorch's faster backend. Medians "
            f"of {rounds} samples of {load.sample_ms:g} ms, in turns without a pause, replayed "
            f"from CUDA graphs. {sentence}"
        )


def _tflops(found: Measurement) -> str:
    if not found.samples_ms:
        return DASH
    operations = FORWARD_AND_BACKWARD * found.asked.operations
    return number(operations / statistics.median(found.samples_ms) / 1e9, 0)
