"""A kernel's own values of the quantities of FlashAttention-2, block by block.

They are read from the registers of the simulator while it runs the kernel: Q, K, P and V are the
operands of the `mma`s, S and O their results, m the maximum that the shuffles of a row end in, or
what a lazy step selects of that and the old one, l the register that the last reduction of a row
begins with, or the result of the `mma`s with a constant as B. No line of the source is named: a
block of keys is a fixed number of `mma`s, first those of Q @ K^T and then those of P @ V, each with
the k-tiles outermost, then the columns, then the rows; the row sums' stand among those of P @ V.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from flash_helpers.check.blockwise import BlockStep
from flash_helpers.check.inputs import tensors_for
from flash_helpers.gpu import WARP
from flash_helpers.ptx import Kernel, Observation, Observer, Run
from flash_helpers.ptx.read.module import Instruction, Operand, Register
from flash_helpers.ptx.run.tensor import matrix_of_a, matrix_of_b, matrix_of_c
from flash_helpers.registry.mma_sync import (
    LAZY_RESCALE,
    MMA_K,
    MMA_M,
    MMA_N,
    MMA_ROW_SUM,
    MmaSyncConfig,
)
from flash_helpers.runtime.simulator import run_kernel

MAX_TRACE_BYTES = 2**30
_QUAD = 4


class UntraceableKernel(ValueError):
    """The kernel is not built the way that the trace relies on."""


@dataclass(frozen=True)
class _Product:
    """Which part of which product an `mma` computes, in units of its tiles.

    result: "S" = Q @ K^T, "O" = P @ V or "l" = P @ 1.
    """

    result: str
    k: int
    column: int
    row: int
    is_last: bool


@dataclass(frozen=True)
class _Plan:
    """What to read at which instruction (by line of the PTX text).

    starts: `mma`s that are the first of a block of keys.
    row_maxima, row_sums: rank of the half tile of 8 rows whose m or l the instruction writes. Row
        sums by `mma` are among the products.
    """

    products: Mapping[int, _Product]
    starts: frozenset[int]
    row_maxima: Mapping[int, int]
    row_sums: Mapping[int, int]

    def wants(self, instruction: Instruction) -> bool:
        line = instruction.line
        return line in self.products or line in self.row_maxima or line in self.row_sums


@dataclass
class _DataFlow:
    """Who writes a register, seen through moves."""

    writers: dict[str, list[Instruction]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, instructions: tuple[Instruction, ...]) -> _DataFlow:
        flow = cls()
        for instruction in instructions:
            for name in _written(instruction):
                flow.writers[name].append(instruction)
        return flow

    def sources(self, operand: Operand) -> list[Instruction]:
        """The instructions other than moves that an operand's value may come from."""
        return [writer for writer, _ in self.through_moves(operand) if writer.name != "mov"]

    def through_moves(self, operand: Operand) -> list[tuple[Instruction, int]]:
        """All writers of an operand's value and, on the way to them, of its copies; with the
        number of moves in between."""
        found: dict[int, tuple[Instruction, int]] = {}
        waiting = [(operand, 0)]
        for register, distance in waiting:
            writers = self.writers[register.name] if isinstance(register, Register) else ()
            for writer in writers:
                if writer.line not in found:
                    found[writer.line] = writer, distance
                    if writer.name == "mov":
                        waiting.append((writer.operands[1], distance + 1))
        return list(found.values())

    def shuffle_behind(self, instruction: Instruction) -> Instruction | None:
        """The shuffle that gives one of the instruction's sources."""
        for operand in instruction.operands[1:]:
            for source in self.sources(operand):
                if source.name == "shfl":
                    return source
        return None


def _written(instruction: Instruction) -> list[str]:
    if instruction.name in ("st", "bar", "bra", "cp") or not instruction.operands:
        return []
    target = instruction.operands[0]
    parts = getattr(target, "elements", None) or (getattr(target, "first", target),)
    return [part.name for part in parts if isinstance(part, Register)]


def _products(config: MmaSyncConfig, result: str, depth: int, columns: int) -> list[_Product]:
    """Those of one block of keys, in the order of the kernels. depth, columns: elements."""
    return [
        _Product(result, k, column, row, is_last=k == depth // MMA_K - 1)
        for k in range(depth // MMA_K)
        for column in range(columns // MMA_N)
        for row in range(config.row_tiles)
    ]


def _plan(config: MmaSyncConfig, kernel: Kernel) -> _Plan:
    instructions = kernel.program.instructions
    flow = _DataFlow.of(instructions)
    by_mma = MMA_ROW_SUM in config.step.traits
    mmas = [i for i in instructions if i.name == "mma"]
    sum_mmas = [i for i in mmas if _has_constant_b(flow, i)]
    product_mmas = [i for i in mmas if i not in sum_mmas]
    products = _products(config, "S", config.d_head, config.B_c)
    products += _products(config, "O", config.B_c, config.d_head)
    sum_products = _products(config, "l", config.B_c, MMA_N) if by_mma else []
    n_copies = len(product_mmas) // len(products)
    if not n_copies or len(product_mmas) % len(products):
        raise UntraceableKernel(
            f"{config.short_form()} has {len(product_mmas)} mma instructions, and a block of keys "
            f"takes {len(products)}: only a main loop that is wholly unrolled can be traced"
        )
    maxima = _lazy_maxima if LAZY_RESCALE in config.step.traits else _row_maxima
    row_maxima, row_sums = maxima(flow, instructions), _row_sums(flow, instructions)
    n_halves = 2 * config.row_tiles
    for name, found, wanted in (
        ("row maxima", row_maxima, n_halves * n_copies),
        ("sums of rows by shuffles", row_sums, 0 if by_mma else n_halves),
        ("sums of rows by mma", sum_mmas, len(sum_products) * n_copies),
    ):
        if len(found) != wanted:
            raise UntraceableKernel(
                f"{config.short_form()} has {len(found)} {name} where {wanted} were expected"
            )
    return _Plan(
        products={
            mma.line: cycle[n % len(cycle)]
            for found, cycle in ((product_mmas, products), (sum_mmas, sum_products))
            for n, mma in enumerate(found)
        },
        starts=frozenset(m.line for m in product_mmas[:: len(products)]),
        row_maxima={m.line: n % n_halves for n, m in enumerate(row_maxima)},
        row_sums=_writers_of_sums(flow, row_sums),
    )


def _has_constant_b(flow: _DataFlow, mma: Instruction) -> bool:
    return not any(flow.sources(register) for register in mma.operands[2].elements)


def _writers_of_sums(flow: _DataFlow, sums: list[Instruction]) -> dict[int, int]:
    """Line of each instruction that writes what is summed, and which sum it is."""
    nearest: dict[int, tuple[int, int]] = {}
    for n, shuffle in enumerate(sums):
        for writer, distance in flow.through_moves(shuffle.operands[1]):
            # all begin with one zero, which is copied from sum to sum: the nearest is its own
            nearest[writer.line] = min((distance, n), nearest.get(writer.line, (distance, n)))
    return {line: n for line, (_, n) in nearest.items()}


def _row_maxima(flow: _DataFlow, instructions: tuple[Instruction, ...]) -> list[Instruction]:
    """Each `max` that takes a shuffled value and whose result is not shuffled again."""
    maxima = [i for i in instructions if i.name == "max" and flow.shuffle_behind(i)]
    shuffled = {
        source.line
        for maximum in maxima
        for shuffle in [flow.shuffle_behind(maximum)]
        if shuffle is not None
        for source in flow.sources(shuffle.operands[1])
    }
    return [i for i in maxima if i.line not in shuffled]


def _lazy_maxima(flow: _DataFlow, instructions: tuple[Instruction, ...]) -> list[Instruction]:
    """Each choice between a maximum and the one before."""
    return [
        i
        for i in instructions
        if i.name == "selp" and any(s.name == "max" for s in flow.sources(i.operands[1]))
    ]


def _row_sums(flow: _DataFlow, instructions: tuple[Instruction, ...]) -> list[Instruction]:
    """Each shuffle that begins the sum of a row: added up, and of a value not shuffled before."""
    sums = [
        shuffle
        for i in instructions
        if i.name == "add" and "f32" in i.types
        for shuffle in [flow.shuffle_behind(i)]
        if shuffle is not None
    ]
    return [
        shuffle
        for shuffle in sums
        if not any(flow.shuffle_behind(w) for w in flow.sources(shuffle.operands[1]))
    ]


@dataclass
class _Recorder:
    """Collects a launch's values; arrays begin with the dimensions (thread blocks, key blocks)."""

    config: MmaSyncConfig
    plan: _Plan
    n_row_blocks: int
    heads: int
    values: dict[str, np.ndarray]
    begun: np.ndarray
    """Blocks of keys that each warp has begun, (thread blocks, warps)."""

    @classmethod
    def make(
        cls, config: MmaSyncConfig, plan: _Plan, batch: int, seq_len: int, heads: int
    ) -> _Recorder:
        B_r, B_c, d_head, warps = config.B_r, config.B_c, config.d_head, config.n_warps
        n_row_blocks = seq_len // B_r
        lead = (batch * heads * n_row_blocks, seq_len // B_c)
        shapes = {
            "Q": (B_r, d_head),
            "K": (warps, B_c, d_head),
            "S": (B_r, B_c),
            "m": (B_r, _QUAD),
            "l": (B_r, MMA_N if MMA_ROW_SUM in config.step.traits else _QUAD),
            "P": (B_r, B_c),
            "V": (warps, B_c, d_head),
            "O": (B_r, d_head),
        }
        size = 4 * lead[0] * lead[1] * sum(int(np.prod(shape)) for shape in shapes.values())
        if size > MAX_TRACE_BYTES:
            raise ValueError(
                f"tracing {lead[0]} thread blocks over {lead[1]} blocks of keys takes "
                f"{size >> 20} MiB, over {MAX_TRACE_BYTES >> 20}: use a shorter sequence or fewer "
                "heads"
            )
        # NaN is what was never computed
        values = {n: np.full((*lead, *shape), np.nan, np.float32) for n, shape in shapes.items()}
        return cls(config, plan, n_row_blocks, heads, values, np.zeros((lead[0], warps), np.int64))

    def see(self, observation: Observation) -> None:
        line = observation.instruction.line
        product = self.plan.products.get(line)
        if product is not None:
            if line in self.plan.starts:
                np.add.at(self.begun, self._warps(observation), 1)
            self._see_product(observation, product)
        elif line in self.plan.row_maxima:
            self._see_row(observation, "m", self.plan.row_maxima[line])
        else:
            self._see_row(observation, "l", self.plan.row_sums[line])

    def _blocks(self, ids: np.ndarray) -> np.ndarray:
        """Thread blocks numbered as (batch, head, block of rows)."""
        return (ids[:, 2] * self.heads + ids[:, 1]) * self.n_row_blocks + ids[:, 0]

    def _warps(self, observation: Observation) -> tuple[np.ndarray, np.ndarray]:
        """Thread block and warp of each warp that takes part."""
        return self._blocks(observation.blocks[::WARP]), observation.warps[::WARP]

    def _see_product(self, observation: Observation, product: _Product) -> None:
        a_type = observation.instruction.types[1]
        d, a, b = (
            [observation.value(e, "b32") for e in operand.elements]
            for operand in observation.instruction.operands[:3]
        )
        block, warp = self._warps(observation)
        key_block = self.begun[block, warp] - 1
        rows_of_warp = self.config.B_r // self.config.n_warps
        rows = (warp * rows_of_warp + product.row * MMA_M)[:, None, None]
        rows = rows + np.arange(MMA_M)[:, None]
        columns = product.column * MMA_N + np.arange(MMA_N)
        depth = product.k * MMA_K + np.arange(MMA_K)
        place = (block[:, None, None], key_block[:, None, None])
        whose = warp[:, None, None]
        if product.result == "S":
            self.values["Q"][(*place, rows, depth)] = matrix_of_a(a, a_type)
            self.values["K"][(*place, whose, columns[:, None], depth)] = matrix_of_b(b, a_type)
        elif product.result == "O":
            self.values["P"][(*place, rows, depth)] = matrix_of_a(a, a_type)
            matrix = matrix_of_b(b, a_type).transpose(0, 2, 1)
            self.values["V"][(*place, whose, depth[:, None], columns)] = matrix
        if product.is_last:
            result = [register.view(np.float32) for register in d]
            self.values[product.result][(*place, rows, columns)] = matrix_of_c(result, "f32")

    def _see_row(self, observation: Observation, name: str, half: int) -> None:
        block, warp = self._blocks(observation.blocks), observation.warps
        key_block = self.begun[block, warp] - 1
        lane = observation.lanes % WARP
        rows_of_warp = self.config.B_r // self.config.n_warps
        row = warp * rows_of_warp + half * 8 + lane // _QUAD
        value = observation.value(observation.instruction.operands[0], "f32")
        # before the first block l is only set to zero
        some = key_block >= 0
        self.values[name][block[some], key_block[some], row[some], lane[some] % _QUAD] = value[some]

    def steps(self, batch: int, seq_len: int) -> tuple[BlockStep, ...]:
        arrays = dict(self.values)
        if MMA_ROW_SUM not in self.config.step.traits:
            # l stays in four parts, one a lane, until the end: added as the kernel will add them
            parts = arrays["l"]
            pairs = parts[..., 0::2] + parts[..., 1::2]
            arrays["l"] = pairs[..., :1] + pairs[..., 1:]
        lead = (batch, self.heads, self.n_row_blocks)
        return tuple(
            BlockStep(
                key_block,
                **{
                    name: torch.from_numpy(array[:, n].reshape(*lead, *array.shape[2:]))
                    for name, array in arrays.items()
                },
            )
            for n, key_block in enumerate(self.config.key_blocks(seq_len))
        )


@dataclass(frozen=True)
class KernelTrace:
    """A simulated launch, looked into.

    steps: one for each block of keys, in the kernel's order; what was not computed is NaN.
    output: (batch, seq_len, heads, d_head). run: its counters, and the faults that the watcher
        found.
    """

    steps: tuple[BlockStep, ...]
    output: torch.Tensor
    run: Run


def trace_forward(
    config: MmaSyncConfig,
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> KernelTrace:
    """Run the kernel in the simulator, keep going after faults, and read its values.

    q, k, v: (batch, seq_len, heads, d_head), of the config's dtype, on the CPU; seq_len a multiple
    of B_r and B_c. Raises UntraceableKernel if the kernel is not built the way that the trace
    relies on, ValueError if the values would take more than MAX_TRACE_BYTES, and PtxError if the
    kernel cannot run or does not end.
    """
    batch, seq_len, heads, _ = q.shape
    plan = _plan(config, kernel)
    recorder = _Recorder.make(config, plan, batch, seq_len, heads)
    observer = Observer(plan.wants, recorder.see)
    tensors = tensors_for(config, q, k, v)
    run = run_kernel(config, kernel, tensors, keep_going=True, observer=observer)
    return KernelTrace(recorder.steps(batch, seq_len), tensors["o"].contiguous(), run)
