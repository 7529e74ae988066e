"""Inputs with their float64 result, and the question whether an output is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
from tiers import is_of_gpu_tier, matrix_mark

from flash_helpers import kernel_configs
from flash_helpers.check.difference import output_difference
from flash_helpers.check.errors import Reference, measure_error
from flash_helpers.kernel_configs import AttentionForward, Config, Element, get_listed_configs
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.operations.attention_forward.inputs import QKV, draw
from flash_helpers.operations.attention_forward.reference import reference

FAMILIES = {n: f for n, f in kernel_configs.FAMILIES.items() if f.operation is OPERATION}
CONFIGS = [c for c in get_listed_configs() if c.family.operation is OPERATION]
# the ends of each family in both dtypes, where each config would be too slow
FIRST_AND_LAST = [
    family.fixed_config(step, dtype)
    for family in FAMILIES.values()
    for step in [*family.steps.values()][:: len(family.steps) - 1]
    for dtype in family.dtypes
]


def each(
    configs: Iterable[Config], *, once: bool = False, all_in_matrix: bool = False
) -> pytest.MarkDecorator:
    """A test of each config, skipped where the GPU does not run its family, and sorted into its
    tier. once: of one problem, which each step computes. all_in_matrix: of so many problems that
    it is of the matrix for all configs."""

    def marks(config: Config) -> Iterator[pytest.MarkDecorator]:
        yield where_it_runs(config)
        if all_in_matrix or not is_of_gpu_tier(config, once=once):
            yield matrix_mark(config)

    return pytest.mark.parametrize(
        "config", [pytest.param(c, marks=[*marks(c)], id=c.short_form()) for c in configs]
    )


def where_it_runs(config: Config) -> pytest.MarkDecorator:
    """Skips a test on a GPU that does not run the config's family, with the reason."""
    reason = ""
    if torch.cuda.is_available():
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        reason = config.family.refusal_on(name, capability)
    return pytest.mark.skipif(bool(reason), reason=reason)


# of kernels with a mask, a window or a softcap tests/gpu/test_general_gpu.py knows what is right
WITHOUT_MASK = [c for c in CONFIGS if not c.supports.causal and not c.supports.exact]
each_config = each(WITHOUT_MASK)
each_bf16_config = each(config for config in WITHOUT_MASK if config.dtype.short == "bf16")
first_and_last = each(FIRST_AND_LAST, once=True)
last_of_each_family = each(
    [
        family.fixed_config([*family.steps.values()][-1], dtype)
        for family in FAMILIES.values()
        for dtype in family.dtypes
    ]
)


@dataclass(frozen=True)
class Problem:
    """Q, K and V, (batch, seq, n_heads, d_head), with what attention makes of them. others: the
    inputs besides, such as sinks, by name."""

    inputs: QKV
    reference: Reference
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def poisoned_output(self) -> torch.Tensor:
        """A contiguous output full of NaN."""
        q, _, v = self.inputs
        return q.new_full((*q.shape[:3], v.shape[3]), torch.nan)

    def fault(self, output: torch.Tensor) -> str:
        """Faults of the output; empty if it is right."""
        bound, expected = self.reference.bounds["o"], self.reference.expected["o"]
        error = measure_error(output, expected)
        if error.within(bound):
            return ""
        difference = output_difference(
            "o", output, expected, bound.max_abs, AttentionForward.axes["o"]
        )
        return f"{error} is over {bound}; {difference.text()}"

    def check(self, output: torch.Tensor) -> None:
        """Assert that the output is right."""
        assert self.fault(output) == ""


def torch_dtype(config: Config) -> torch.dtype:
    """The config's element type."""
    return getattr(torch, config.dtype.torch_name)


def whole(config: Config, seq_len: int) -> int:
    """Return the next length that is a multiple of the config's blocks."""
    return -(-seq_len // config.supports.whole) * config.supports.whole


def make_problem(
    distribution: str,
    shape: AttentionForward,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
) -> Problem:
    """Draw the inputs and compute their reference on `device`."""
    asked = replace(shape, dtype=Element.from_name(str(dtype).removeprefix("torch.")))
    drawn = draw(distribution, asked, device, seed)
    right = reference(asked, drawn)
    return Problem((drawn.pop("q"), drawn.pop("k"), drawn.pop("v")), right, drawn)


def require_memory(n_bytes: int) -> None:
    """Skip the test if the device has less free memory."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < n_bytes:
        pytest.skip(f"needs {n_bytes / 2**30:.1f} GiB of GPU memory, {free / 2**30:.1f} are free")


def all_runs_agree(
    launch: Callable[[], None], outputs: Mapping[str, torch.Tensor], runs: int
) -> bool:
    """Whether further runs, replayed from a CUDA graph, leave the bits of the first in the outputs,
    which are full of NaN before each run."""
    launch()
    first = {name: tensor.clone() for name, tensor in outputs.items()}
    differs = torch.zeros((), dtype=torch.bool, device=next(iter(outputs.values())).device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensor in outputs.values():
            tensor.fill_(math.nan)
        launch()
        for name, tensor in outputs.items():
            differs |= (tensor != first[name]).any()
    for _ in range(runs):
        graph.replay()
    return not differs
