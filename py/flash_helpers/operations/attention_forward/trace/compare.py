"""A kernel beside blockwise FlashAttention-2: both as text, and the first value that differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flash_helpers.check.debugging import SIMULATOR, ComparedOutputs, run_on
from flash_helpers.check.difference import WrongElement
from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.operations.attention_forward.configs import AttentionConfig
from flash_helpers.operations.attention_forward.reference import reference
from flash_helpers.operations.attention_forward.trace.blockwise import (
    OF_KEYS,
    QUANTITIES,
    BlockStep,
    blockwise_forward,
    finish,
    rows_that_fit,
)
from flash_helpers.operations.attention_forward.trace.traced import trace_forward
from flash_helpers.ptx import Lint, SimulatorError
from flash_helpers.registry.mma_sync import LAZY_RESCALE, MMA_ROW_SUM
from flash_helpers.registry.wgmma import REPLAYS
from flash_helpers.runtime.backend import Backend
from flash_helpers.runtime.library import ptx_path
from flash_helpers.runtime.simulator import load_kernel

# Error of a quantity, relative to the largest value of its row, when only roundings differ:
# fp32 sums taken in another order, and one unit in the last place of ex2.
FP32_TOLERANCE = {"Q": 0.0, "K": 0.0, "V": 0.0, "S": 2.0**-18, "m": 2.0**-18, "l": 2.0**-16}
_OF_ROWS = ("m", "l")


@dataclass(frozen=True)
class Disagreement:
    """The first element that is wrong, in the order in which the kernel computes.

    `quantity`: one of QUANTITIES, or "output". `turn`, `block`: the place of a block in the order
    in which the kernel takes them, and its number; None for the output. `row`: position of a query
    in the sequence, or of a key for K and V. `warp`: the warp that computes the row, or that holds
    the copy of K or V. `n_wrong`, `n_elements`: wrong elements and all elements of this quantity in
    this block, among those that are computed or should be. `kernel`: of several, by its C++
    function. `walked`: rows of the blocks.
    """

    quantity: str
    turn: int | None
    block: int | None
    batch: int
    head: int
    row_block: int
    warp: int
    row: int
    column: int
    got: float
    expected: float
    n_wrong: int
    n_elements: int
    kernel: str = ""
    walked: str = "key"

    def __str__(self) -> str:
        kernel = f"{self.kernel}, " if self.kernel else ""
        block = "" if self.block is None else f"{self.walked} block {self.block}, "
        return (
            f"{self.quantity}, {kernel}{block}row block {self.row_block} (batch {self.batch}, "
            f"head {self.head}), warp {self.warp}, row {self.row}, column {self.column}: "
            f"the kernel has {self.got:.9g}, blockwise FlashAttention-2 {self.expected:.9g} "
            f"({self.n_wrong} of {self.n_elements} values differ)"
        )


def tolerance(
    name: str, expected: torch.Tensor, config: Config, dtype: torch.dtype
) -> torch.Tensor:
    """Return the largest error allowed of a quantity, for each row of `expected`.

    P, and its sums, carry its 16-bit rounding: a value halfway between two may go either way.
    """
    traits = config.step.traits
    # NaN is no number that others of the row come from: keys that it is not multiplied with
    scale = expected.abs().where(~expected.isnan(), 0).amax(-1, keepdim=True)
    if name in FP32_TOLERANCE and not (name == "l" and MMA_ROW_SUM in traits):
        return scale * FP32_TOLERANCE[name]
    ulps = 1.0  # of a P over 1
    if name == "P":
        scale = expected.abs() + torch.finfo(dtype).tiny
    elif LAZY_RESCALE not in traits:
        ulps = 0.5  # the largest P is 1, which is exact, and those below have smaller ones
    if name == "output":
        ulps += 1.0  # its own rounding
    return scale * (ulps * torch.finfo(dtype).eps)


def _first_wrong(
    name: str,
    got: torch.Tensor,
    expected: torch.Tensor,
    config: AttentionConfig,
    dtype: torch.dtype,
    turn: int | None = None,
    block: int | None = None,
) -> Disagreement | None:
    """Return the first element of (batch, heads, row blocks, [warps,] rows, columns) that is
    wrong."""
    expected = expected.expand_as(got)
    # NaN, the mark of a value that was never computed, is wrong too, except in a row that does not
    # fit and where the block of keys is left out
    within = (got - expected).abs() <= tolerance(name, expected, config, dtype)
    wrong = ~(within | ~(got.isfinite() | expected.isfinite()))
    places = wrong.nonzero()
    if not len(places):
        return None
    place = tuple(int(i) for i in places[0])
    batch, head, row_block, *rest = place
    if name in OF_KEYS:
        warp, row, column = rest
        row += (block or 0) * config.B_c
    else:
        row, column = rest
        warp = row // (config.B_r // config.n_warps)
        row += row_block * config.B_r
    return Disagreement(
        quantity=name,
        turn=turn,
        block=block,
        batch=batch,
        head=head,
        row_block=row_block,
        warp=warp,
        row=row,
        column=column,
        got=got[place].item(),
        expected=expected[place].item(),
        n_wrong=len(places),
        n_elements=int((~(got.isnan() & expected.isnan())).sum()),
    )


def first_disagreement(
    config: AttentionConfig,
    steps: Iterable[BlockStep],
    output: torch.Tensor,
    expected_steps: Iterable[BlockStep],
    expected_output: torch.Tensor,
) -> Disagreement | None:
    """Compare step by step, and in each step in the order of QUANTITIES; then the outputs.

    `output`, `expected_output`: (batch, len_q, heads, d_v), of the config's dtype. Without steps
    only they are compared.
    """
    dtype = output.dtype
    for turn, (step, expected) in enumerate(zip(steps, expected_steps, strict=True)):
        for name in QUANTITIES:
            got, want = getattr(step, name), getattr(expected, name)
            found = _first_wrong(name, got, want, config, dtype, turn, step.key_block)
            if found is not None:
                return found
    got, want = (_by_row_block(o, config) for o in (output, expected_output))
    return _first_wrong("output", got, want, config, dtype)


def _by_row_block(output: torch.Tensor, config: AttentionConfig) -> torch.Tensor:
    """(batch, heads, blocks, B_r, d_v), NaN in rows behind the last query."""
    rows = output.detach().cpu().float().transpose(1, 2)
    whole = (0, 0, 0, -rows.shape[2] % config.B_r)
    padded = torch.nn.functional.pad(rows, whole, value=torch.nan)
    return padded.unflatten(2, (-1, config.B_r))


@dataclass(frozen=True)
class Excerpt:
    """The part of a computation that is written as text.

    `row_block`: block of rows of the first batch and head. `blocks`: those that the kernel walks;
    None for all. `warp`: None for all warps; then K and V are the copy of warp 0.
    """

    row_block: int = 0
    blocks: Sequence[int] | None = None
    warp: int | None = None

    def takes(self, block: int) -> bool:
        """Whether a block is written."""
        return self.blocks is None or block in self.blocks

    def check(self, *, blocks: int, row_blocks: int, warps: int) -> None:
        """Raise ValueError for a block or a warp beyond the number that there are."""
        for name, values, number in (
            ("block", self.blocks or [], blocks),
            ("row block", [self.row_block], row_blocks),
            ("warp", [] if self.warp is None else [self.warp], warps),
        ):
            for value in values:
                if not 0 <= value < number:
                    raise ValueError(f"{name} {value}: there are 0 to {number - 1}")


def excerpt_text(
    config: AttentionConfig,
    steps: Iterable[BlockStep],
    output: torch.Tensor,
    excerpt: Excerpt,
) -> str:
    """Return the chosen part as text: every quantity of each block of keys, a line per row; then
    the output.

    The kernel's text and the reference's have the same lines, so that `diff` can compare them.
    Where a warp leaves a block of keys out, and behind the last query, all values are nan.
    """
    lines: list[str] = []
    for step in steps:
        if excerpt.takes(step.key_block):
            for name in QUANTITIES:
                lines += _matrix_lines(config, name, step, excerpt)
    rows = _by_row_block(output, config)[0, 0, excerpt.row_block]
    first = excerpt.row_block * config.B_r
    lines += [f"output, row block {excerpt.row_block}"]
    lines += row_lines(rows, first, _own_rows(config, excerpt.warp))
    return "\n".join(lines) + "\n"


def _own_rows(config: AttentionConfig, warp: int | None) -> range:
    if warp is None:
        return range(config.B_r)
    rows = config.B_r // config.n_warps
    return range(warp * rows, (warp + 1) * rows)


def _matrix_lines(
    config: AttentionConfig, name: str, step: BlockStep, excerpt: Excerpt
) -> Iterator[str]:
    values = getattr(step, name)[0, 0]
    # what is the same for all row blocks, warps or lanes has a 1 there
    values = values[min(excerpt.row_block, values.shape[0] - 1)]
    title = f"{name}, key block {step.key_block}, row block {excerpt.row_block}"
    if name in OF_KEYS:
        warp = excerpt.warp or 0
        yield f"{title}, warp {warp}"
        values = values[min(warp, values.shape[0] - 1)]
        yield from row_lines(values, step.key_block * config.B_c, range(config.B_c))
    else:
        yield title
        # lanes that agree are written once
        values = values[:, :1] if name in _OF_ROWS and is_uniform(values) else values
        first = excerpt.row_block * config.B_r
        yield from row_lines(values, first, _own_rows(config, excerpt.warp))


def is_uniform(values: torch.Tensor) -> bool:
    """Whether all columns of a matrix are the same."""
    first = values[:, :1]
    return bool(((values == first) | (values.isnan() & first.isnan())).all())


def row_lines(values: torch.Tensor, first: int, rows: Iterable[int]) -> Iterator[str]:
    """Yield some rows of a matrix, each with its number: that of row 0 is `first`."""
    for row in rows:
        numbers = " ".join(f"{value:10.5g}" for value in values[row].tolist())
        yield f"{first + row:6d}: {numbers}"


@dataclass(frozen=True)
class Comparison:
    """A kernel that ran, and the reference beside it (flash_helpers.check.debugging.Compared).

    `steps`: empty where only the outputs can be seen. `lse`: beside its float64 result and bound;
    None if it was not asked for. `ran`: the place, in words. `faults`, `lints`: faults and lints
    that the watcher found.
    """

    config: AttentionConfig
    steps: tuple[BlockStep, ...]
    output: torch.Tensor
    expected_steps: tuple[BlockStep, ...]
    expected_output: torch.Tensor
    lse: ComparedOutputs | None
    ran: str
    faults: tuple[SimulatorError, ...] = ()
    lints: tuple[Lint, ...] = ()

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """The output o, and lse if it was asked for."""
        return {"o": self.output, **(self.lse.outputs if self.lse else {})}

    @property
    def disagreement(self) -> Disagreement | WrongElement | None:
        """The first element that is wrong, if any; an element of lse only if everything else is
        right."""
        compared = self.expected_steps if self.steps else ()
        found = first_disagreement(
            self.config, self.steps, self.output, compared, self.expected_output
        )
        return found or (self.lse.disagreement if self.lse else None)

    def texts(self, excerpt: Excerpt) -> tuple[str, str]:
        """Return the chosen part of the reference, and of the kernel, each with the whole lse."""
        right = excerpt_text(self.config, self.expected_steps, self.expected_output, excerpt)
        own = excerpt_text(self.config, self.steps, self.output, excerpt)
        right_lse, own_lse = self.lse.texts() if self.lse else ("", "")
        return right + right_lse, own + own_lse


def _expected_output(
    config: Config,
    problem: AttentionForward,
    steps: Sequence[BlockStep],
    inputs: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """(batch, len_q, heads, d_v), in which rows that a kernel computes again are exact."""
    output = finish(steps, inputs["q"], inputs.get("sinks"))
    if REPLAYS not in config.step.traits:
        return output
    exact = reference(problem, inputs).expected["o"].to(output.dtype)
    return output.where(rows_that_fit(steps, problem.len_q), exact)


def compare(
    config: AttentionConfig,
    problem: AttentionForward,
    inputs: Mapping[str, torch.Tensor],
    *,
    backend: Backend | None = None,
    ptx: str | Path | None = None,
    device: Device | None = None,
) -> Comparison:
    """Run a config's own kernel on inputs of a problem that it takes, beside blockwise
    FlashAttention-2.

    Without a backend `ptx` (a text or a file, by default the library's) is simulated and traced,
    launched as on `device`. With a backend the library's kernel runs there. Raises OSError,
    PtxError and ValueError.
    """
    expected = tuple(blockwise_forward(config, **inputs, **problem.call_options()))
    expected_output = _expected_output(config, problem, expected, inputs)
    if backend is not None:
        outputs = run_on(backend, config, problem, inputs)
        lse = _compared_lse(problem, inputs, outputs, backend.description)
        ran = backend.description
        return Comparison(config, (), outputs["o"], expected, expected_output, lse, ran)
    kernel = load_kernel(config, ptx or ptx_path(config))
    trace = trace_forward(config, kernel, problem, inputs, device)
    return Comparison(
        config,
        trace.steps,
        trace.output,
        expected,
        expected_output,
        _compared_lse(problem, inputs, trace.outputs, SIMULATOR),
        SIMULATOR,
        trace.run.faults,
        trace.run.lints,
    )


def _compared_lse(
    problem: AttentionForward,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    ran: str,
) -> ComparedOutputs | None:
    if not problem.return_lse:
        return None
    return ComparedOutputs(problem, {"lse": outputs["lse"]}, reference(problem, inputs), ran)


def check_excerpt(config: AttentionConfig, problem: AttentionForward, excerpt: Excerpt) -> None:
    """Raise ValueError for a block or a warp that does not exist."""
    excerpt.check(
        blocks=-(-problem.len_k // config.B_c),
        row_blocks=-(-problem.len_q // config.B_r),
        warps=config.n_warps,
    )
