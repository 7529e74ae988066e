"""The kernels of a config beside blockwise Python: both as text, and the first value that differs.

The kernels are compared in the order of their launches, each block by block in the order in which
it walks them, and in each block quantity by quantity; the outputs come last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from flash_helpers.check.debugging import SIMULATOR, rows_text, run_on
from flash_helpers.check.difference import WrongElement, first_wrong
from flash_helpers.check.tensors import tensors_for
from flash_helpers.gpu import WARP, Device
from flash_helpers.operations.attention_backward.configs import GradientConfig
from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_backward.trace.blockwise import Blockwise, Expected
from flash_helpers.operations.attention_backward.trace.recorder import (
    CELL,
    FACTORS,
    NONE,
    Record,
    Recorder,
)
from flash_helpers.operations.attention_backward.trace.shared_rows import Chunks, SharedRows
from flash_helpers.operations.attention_forward.trace.compare import (
    Disagreement,
    Excerpt,
    is_uniform,
    row_lines,
)
from flash_helpers.operations.attention_forward.trace.recorder import UntraceableKernel
from flash_helpers.ptx import Kernel, Lint, Observer, SimulatorError
from flash_helpers.registry.call import Launch
from flash_helpers.runtime.backend import Backend
from flash_helpers.runtime.simulator import load_kernels, run_kernel

__all__ = ["Excerpt", "check_excerpt", "compare"]

QUANTITIES = (
    *("Q", "K", "S", "LSE", "P", "dO", "V", "dP", "delta"),
    *(name for of in ("dV", "dK", "dQ") for name in (FACTORS[of], of)),
)
"""Quantities of a block, in the order in which a kernel comes by it."""
OF_QUERIES = ("Q", "dO", "dQ")
OF_KEYS = ("K", "V", "dK", "dV")
SUMS = (*FACTORS,)
# The kernel whose own rows are queries; those of any other kernel are keys.
_DQ_KERNEL = "dq_kernel"


@dataclass(frozen=True)
class Traced:
    """A kernel that multiplies, by its C++ function, and its record beside the right values.
    `own`, `walked`: rows of a thread block's tile, and of the blocks that it walks."""

    function: str
    record: Record
    expected: Mapping[str, Expected]
    own: int
    walked: int

    @property
    def owns_queries(self) -> bool:
        """Whether the thread blocks' own rows are queries, and the blocks that they walk keys."""
        return self.function == _DQ_KERNEL

    @property
    def walked_name(self) -> str:
        """The rows of a block, in a word."""
        return "key" if self.owns_queries else "query"

    @property
    def n_blocks(self) -> int:
        """Blocks that are walked."""
        problem = self.record.problem
        return -(-(problem.len_k if self.owns_queries else problem.len_q) // self.walked)

    def turns(self) -> np.ndarray:
        """Return, for each cell, the place of its block in the order in which the thread block of
        its tile takes them; those that are never taken come last."""
        taken = self.record.turns["S"]
        taken = np.where(taken == NONE, taken.max() + 1, taken)
        taken = taken if self.owns_queries else taken.swapaxes(2, 3)
        shape, steps = taken.shape, (self.own // CELL, self.walked // CELL)
        for axis, step in enumerate(steps, start=2):
            taken = np.minimum.reduceat(taken, range(0, shape[axis], step), axis=axis)
        order = taken.argsort(-1, kind="stable").argsort(-1, kind="stable")
        found = order.repeat(steps[0], 2).repeat(steps[1], 3)[:, :, : shape[2], : shape[3]]
        return found if self.owns_queries else found.swapaxes(2, 3)

    def part(self, name: str, block: int) -> tuple[slice, ...]:
        """The part of a quantity that belongs to a block: (batch, heads, ...)."""
        rows = slice(block * self.walked, (block + 1) * self.walked)
        cells = slice(block * self.walked // CELL, (block + 1) * self.walked // CELL)
        everything = slice(None)
        if name in OF_QUERIES:
            own = (everything, cells) if self.owns_queries else (rows, everything)
        elif name in OF_KEYS:
            own = (rows, everything) if self.owns_queries else (everything, cells)
        else:
            own = (everything, rows) if self.owns_queries else (rows, everything)
        return (everything, everything, *own)


def in_cells(name: str, of_cells: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return what belongs to cells, (batch, heads, cells of queries, cells of keys), for the
    elements of a quantity; (..., 1) for one with columns."""
    if name in OF_KEYS:
        of_cells = of_cells.swapaxes(2, 3)
    found = of_cells.repeat(CELL, 2)[:, :, : shape[2]]
    if name in OF_QUERIES + OF_KEYS:
        return found[..., None]
    return found.repeat(CELL, 3)[..., : shape[3]]


@dataclass(frozen=True)
class Comparison:
    """Kernels that ran, and the reference beside them (flash_helpers.check.debugging.Compared).

    `traced`: empty where only the outputs can be seen. `ran`: the place, in words. `faults`,
    `lints`: faults and lints that the watcher found.
    """

    problem: AttentionBackward
    traced: tuple[Traced, ...]
    blockwise: Blockwise
    outputs: Mapping[str, torch.Tensor]
    ran: str
    faults: tuple[SimulatorError, ...] = ()
    lints: tuple[Lint, ...] = ()

    @property
    def disagreement(self) -> Disagreement | WrongElement | None:
        """The first element that is wrong, if any."""
        for kernel in self.traced:
            if found := self._first_wrong(kernel):
                return found
        for name, expected in self.blockwise.outputs().items():
            output, axes = self.outputs[name], self.problem.axes[name]
            if wrong := first_wrong(name, output, expected.values, expected.allowed, axes):
                return wrong
        return None

    def _first_wrong(self, kernel: Traced) -> Disagreement | None:
        record, turns = kernel.record, kernel.turns()
        seen = [
            (name, copy, *self._wrong(kernel, name, copy))
            for name in QUANTITIES
            for copy in range(len(record.values.get(name, ())))
        ]
        if not any(wrong.any() for *_, wrong, _ in seen):
            return None
        for turn in range(kernel.n_blocks):
            for name, copy, wrong, there in seen:
                inside = in_cells(name, turns == turn, wrong.shape)
                if (wrong & inside).any():
                    return _disagreement(kernel, turn, (name, copy), wrong & inside, there & inside)
        return None

    def _wrong(self, kernel: Traced, name: str, copy: int) -> tuple[np.ndarray, np.ndarray]:
        """Which elements of a quantity are wrong, and which are there or should be."""
        got = kernel.record.values[name][copy].astype(np.float64)
        expected, there = kernel.expected[name], self._there(kernel, name, copy)
        right, allowed = expected.values.numpy(), expected.allowed.numpy()
        if name == "P":  # before the mask
            there = there & self.blockwise.visible.numpy()
        with np.errstate(invalid="ignore"):
            within = (np.abs(got - right) <= allowed) | (got == right)
        return there & ~within, there

    def _there(self, kernel: Traced, name: str, copy: int = 0) -> np.ndarray:
        """Which elements of a quantity a kernel has, or should have, since a query sees their key.
        Keys that no query of a tile sees may be left out, or be zeros that no copy brings."""
        got = kernel.record.values[name][copy]
        computed = in_cells(name, kernel.record.warps_of(name, copy) != NONE, got.shape)
        needed = _seen(name, self.blockwise.visible.numpy())
        return (computed & ~np.isnan(got)) | (needed & (computed | (copy == 0)))

    def texts(self, excerpt: Excerpt) -> tuple[str, str]:
        """Return the chosen part of the reference, and of the kernels, each with all outputs."""
        right, own = ([*self._lines(excerpt, of_kernel=which)] for which in (False, True))
        outputs = {name: each.values for name, each in self.blockwise.outputs().items()}
        texts = (
            "\n".join([*lines, rows_text(each)])
            for lines, each in ((right, outputs), (own, self.outputs))
        )
        return next(texts), next(texts)

    def _lines(self, excerpt: Excerpt, *, of_kernel: bool) -> Iterator[str]:
        for kernel in self.traced:
            record = kernel.record
            for block in filter(excerpt.takes, range(kernel.n_blocks)):
                for name in QUANTITIES:
                    if name not in record.values:
                        continue
                    values = torch.from_numpy(record.values[name][0])
                    if not of_kernel:
                        there = torch.from_numpy(self._there(kernel, name))
                        right = kernel.expected[name].values.expand(values.shape)
                        values = right.where(there, torch.nan)
                    yield (
                        f"{name}, {kernel.function}, {kernel.walked_name} block {block}, "
                        f"row block {excerpt.row_block}"
                    )
                    yield from _matrix_lines(kernel, name, values, block, excerpt)


def _disagreement(
    kernel: Traced, turn: int, what: tuple[str, int], wrong: np.ndarray, there: np.ndarray
) -> Disagreement:
    """The first of some wrong elements. `what`: the quantity, and which of its copies."""
    (name, copy), record = what, kernel.record
    is_score = name not in OF_QUERIES + OF_KEYS
    swap = is_score and not kernel.owns_queries  # own rows first
    places = np.argwhere(wrong.swapaxes(2, 3) if swap else wrong)
    batch, head, row, other, *rest = (int(i) for i in places[0])
    index = (batch, head, other, row) if swap else (batch, head, row, other, *rest)
    # cells of the quantity's rows, and of what they meet
    cells = [row // CELL, other // CELL if is_score else other]
    q_cell, k_cell = cells[::-1] if name in OF_KEYS or swap else cells
    own_cell, walked_cell = (q_cell, k_cell) if kernel.owns_queries else (k_cell, q_cell)
    expected = np.broadcast_to(kernel.expected[name].values.numpy(), wrong.shape)
    return Disagreement(
        quantity=name,
        turn=turn,
        block=walked_cell * CELL // kernel.walked,
        batch=batch,
        head=head,
        row_block=own_cell * CELL // kernel.own,
        warp=int(record.warps_of(name, copy)[batch, head, q_cell, k_cell]),
        row=row,
        column=other if is_score else rest[0],
        got=float(record.values[name][copy][index]),
        expected=float(expected[index]),
        n_wrong=len(places),
        n_elements=int(there.sum()),
        kernel=kernel.function,
        walked=kernel.walked_name,
    )


def _seen(name: str, visible: np.ndarray) -> np.ndarray:
    """Return which elements of a quantity, (..., 1) with columns, belong to a query and a key that
    it sees. `visible`: (queries, keys)."""
    if name in OF_QUERIES:
        starts = range(0, visible.shape[1], CELL)
        return np.logical_or.reduceat(visible, starts, axis=1)[..., None]
    if name in OF_KEYS:
        starts = range(0, visible.shape[0], CELL)
        return np.logical_or.reduceat(visible, starts, axis=0).T[..., None]
    return visible


def _matrix_lines(
    kernel: Traced, name: str, values: torch.Tensor, block: int, excerpt: Excerpt
) -> Iterator[str]:
    """Lines of a quantity in a block, of the first batch and head. Scores have a line for each row
    of the tile, a sum what it is after the block; the LSE and delta have one for each query."""
    cells = kernel.record.warps_of(name)[0, 0]
    cells = cells if kernel.owns_queries else cells.T
    tile = range(
        excerpt.row_block * kernel.own // CELL, (excerpt.row_block + 1) * kernel.own // CELL
    )
    own_cells = [
        cell
        for cell in tile
        if cell < len(cells) and (excerpt.warp is None or excerpt.warp in cells[cell])
    ]
    is_score = name not in OF_QUERIES + OF_KEYS
    of_queries = name in (*OF_QUERIES, "LSE", "delta") or (is_score and kernel.owns_queries)
    matrix = values[0, 0][kernel.part(name, block)[2:]]
    matrix = matrix.T if is_score and not of_queries else matrix
    if of_queries == kernel.owns_queries:
        first = 0
        rows = [row for cell in own_cells for row in range(cell * CELL, (cell + 1) * CELL)]
        matrix = matrix if is_score else matrix[:, -1 if name in SUMS else 0]
    else:
        first, rows = block * kernel.walked, [*range(kernel.walked if own_cells else 0)]
        matrix = matrix if is_score else matrix[:, min(own_cells, default=0)]
    if name in ("LSE", "delta") and is_uniform(matrix):
        matrix = matrix[:, :1]
    yield from row_lines(matrix, first, [row for row in rows if row < len(matrix)])


def compare(
    config: GradientConfig,
    problem: AttentionBackward,
    inputs: Mapping[str, torch.Tensor],
    *,
    backend: Backend | None = None,
    ptx: str | Path | None = None,
    device: Device | None = None,
) -> Comparison:
    """Run a config's own kernels on inputs of a problem that it takes, beside blockwise Python.

    Without a backend `ptx` (a text or a file, by default the config's own) is simulated and traced,
    launched as on `device`. With a backend the library's kernels run there. Raises OSError,
    PtxError, UntraceableKernel and ValueError.
    """
    blockwise = Blockwise(problem, inputs)
    if backend is not None:
        outputs = run_on(backend, config, problem, inputs)
        return Comparison(problem, (), blockwise, outputs, backend.description)
    kernels = load_kernels(config, ptx)
    tensors = tensors_for(config, problem, inputs)
    records = {name: Record(problem) for name in kernels}

    def observe(launch: Launch, addresses: Mapping[str, int]) -> Observer:
        chunks = Chunks({name: tensors[name] for name in ("q", "k", "v", "do")}, addresses)
        rows = SharedRows(chunks, launch, addresses)
        return Recorder(records[launch.kernel], kernels[launch.kernel], rows).observer

    run = run_kernel(
        config,
        kernels,
        tensors,
        device=device,
        keep_going=True,
        observe=observe,
        **problem.call_options(),
    )
    traced = []
    for function, name in config.kernels.items():
        record = records[name]
        if "S" in record.values:
            own, walked = config.tiles(function)
            expected = blockwise.scores_of(record)
            for of in SUMS:
                if of in record.values:
                    # rows that thread blocks walk belong to another sum in each of their tiles
                    is_own = (of in OF_QUERIES) == (function == _DQ_KERNEL)
                    whole = max(problem.len_q, problem.len_k)
                    expected[of] = blockwise.sums(of, record, whole if is_own else own)
            traced.append(Traced(function, record, expected, own, walked))
        elif _multiplies(kernels[name]) and not run.faults:
            raise UntraceableKernel(
                f"{function} of {config.short_form()} multiplies no rows of Q and K: only rows "
                "that cp.async or TMA brings to shared memory can be traced"
            )
    outputs = {tensor.name: tensors[tensor.name].contiguous() for tensor in problem.outputs}
    return Comparison(problem, tuple(traced), blockwise, outputs, SIMULATOR, run.faults, run.lints)


def _multiplies(kernel: Kernel) -> bool:
    return any(i.name in ("mma", "wgmma") for i in kernel.program.instructions)


def check_excerpt(config: GradientConfig, problem: AttentionBackward, excerpt: Excerpt) -> None:
    """Raise ValueError for a block or a warp that no kernel has."""
    functions = {_DQ_KERNEL, config.main_kernel} & {*config.kernels}
    queries, keys = problem.len_q, problem.len_k
    counts = []
    for function in functions:
        (own, walked), lengths = config.tiles(function), (queries, keys)
        own_length, other = lengths if function == _DQ_KERNEL else lengths[::-1]
        counts.append(
            (-(-other // walked), -(-own_length // own), config.block(function)[0] // WARP)
        )
    blocks, row_blocks, warps = (max(each) for each in zip(*counts, strict=True))
    excerpt.check(blocks=blocks, row_blocks=row_blocks, warps=warps)
