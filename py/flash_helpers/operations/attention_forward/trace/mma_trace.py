"""The quantities of a kernel on `mma.sync`, block by block.

They are read from the registers of the simulator while it runs the kernel. Q, K, P and V are the
operands of the `mma`s, S and O their results. The maximum m is the value that the shuffles of a row
end in, or the choice of a lazy step between that and the old maximum. The sum l is the register
with which the last reduction of a row begins, or the result of the `mma`s with a constant as B.

No line of the source is named. A block of keys is a fixed number of `mma`s, first those of Q @ K^T
and then those of P @ V, each with the k-tiles outermost, then the columns, then the rows. The
`mma`s of the row sums stand among those of P @ V.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flash_helpers.gpu import WARP, Device
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.operations.attention_forward.trace.data_flow import DataFlow
from flash_helpers.operations.attention_forward.trace.recorder import Recorder, UntraceableKernel
from flash_helpers.ptx import Kernel, Observation, Observer
from flash_helpers.ptx.read.module import Instruction, Operand, Vector
from flash_helpers.ptx.run.instructions.tensor import matrix_of_a, matrix_of_b, matrix_of_c
from flash_helpers.registry.mma_sync import (
    LAZY_RESCALE,
    MMA_K,
    MMA_M,
    MMA_N,
    MMA_ROW_SUM,
    MmaSyncConfig,
)


@dataclass(frozen=True)
class _Product:
    """The part of a product that an `mma` computes, in units of its tiles.

    `result`: "S" = Q @ K^T, "O" = P @ V or "l" = P @ 1.
    """

    result: str
    k: int
    column: int
    row: int
    is_last: bool


@dataclass(frozen=True)
class _Plan:
    """Values to read at each instruction (by line of the PTX text).

    `starts`: `mma`s that are the first of a block of keys. `row_maxima`, `row_sums`: rank of the
    half tile of 8 rows whose m or l the instruction writes. Row sums by `mma` are among the
    products.
    """

    products: Mapping[int, _Product]
    starts: frozenset[int]
    row_maxima: Mapping[int, int]
    row_sums: Mapping[int, int]

    def wants(self, instruction: Instruction) -> bool:
        line = instruction.line
        return line in self.products or line in self.row_maxima or line in self.row_sums


def _products(config: MmaSyncConfig, result: str, depth: int, columns: int) -> list[_Product]:
    """The products of one block of keys, in the order of the kernels. `depth`, `columns`:
    elements."""
    return [
        _Product(result, k, column, row, is_last=k == depth // MMA_K - 1)
        for k in range(depth // MMA_K)
        for column in range(columns // MMA_N)
        for row in range(config.row_tiles)
    ]


def _plan(config: MmaSyncConfig, kernel: Kernel) -> _Plan:
    instructions = kernel.program.instructions
    flow = DataFlow(kernel.program)
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
    row_maxima, sums = maxima(flow, instructions), [] if by_mma else flow.row_sums()
    n_halves = 2 * config.row_tiles
    for name, found, wanted in (
        ("row maxima", row_maxima, n_halves * n_copies),
        ("sums of rows by shuffles", sums, 0 if by_mma else n_halves),
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
        row_sums={
            writer.line: n
            for n, shuffle in enumerate(sums)
            for writer in flow.sources(shuffle, shuffle.operands[1])
        },
    )


def _has_constant_b(flow: DataFlow, mma: Instruction) -> bool:
    return not any(flow.sources(mma, register) for register in _elements(mma.operands[2]))


def _elements(operand: Operand) -> tuple[Operand, ...]:
    """The registers of a matrix of an `mma`."""
    assert isinstance(operand, Vector)
    return operand.elements


def _row_maxima(flow: DataFlow, instructions: tuple[Instruction, ...]) -> list[Instruction]:
    """Each `max` that takes a shuffled value and whose result is not shuffled again."""
    maxima = [i for i in instructions if i.name == "max" and flow.shuffle_behind(i)]
    shuffled = {
        source.line
        for maximum in maxima
        for shuffle in [flow.shuffle_behind(maximum)]
        if shuffle is not None
        for source in flow.sources(shuffle, shuffle.operands[1])
    }
    return [i for i in maxima if i.line not in shuffled]


def _lazy_maxima(flow: DataFlow, instructions: tuple[Instruction, ...]) -> list[Instruction]:
    """Each choice between a maximum and the maximum before it."""
    return [
        i
        for i in instructions
        if i.name == "selp" and any(s.name == "max" for s in flow.sources(i, i.operands[1]))
    ]


class MmaRecorder(Recorder[MmaSyncConfig]):
    """Values of a launch. Raises UntraceableKernel if the kernel is not built as `_plan` needs."""

    def __init__(
        self, config: MmaSyncConfig, problem: AttentionForward, kernel: Kernel, device: Device
    ) -> None:
        self._plan = _plan(config, kernel)
        super().__init__(config, problem)
        # Blocks of keys that each warp has begun or leaves out, (thread blocks, warps).
        rows = range(0, self.n_row_blocks * config.B_r, config.B_r)
        last = self.key_blocks[0]
        left_out = [abs(last - config.own_key_blocks(problem, n)[0]) for n in rows]
        begun = np.tile(left_out, self.n_tiles // self.n_row_blocks)
        self._begun = np.repeat(begun[:, None], config.n_warps, axis=1)

    @property
    def observer(self) -> Observer:
        """The observer of the running kernel."""
        return Observer(self._plan.wants, self._see)

    def _see(self, observation: Observation) -> None:
        line, plan = observation.instruction.line, self._plan
        product = plan.products.get(line)
        if product is not None:
            if line in plan.starts:
                np.add.at(self._begun, self._warps(observation), 1)
            self._see_product(observation, product)
        elif line in plan.row_maxima:
            self._see_row(observation, "m", plan.row_maxima[line])
        else:
            self._see_row(observation, "l", plan.row_sums[line])

    def _tiles(self, ids: np.ndarray) -> np.ndarray:
        """The tiles of thread blocks; causal tiles of a head are walked backwards."""
        rows = self.n_row_blocks - 1 - ids[:, 0] if self.config.supports.causal else ids[:, 0]
        return (ids[:, 2] * self.problem.heads + ids[:, 1]) * self.n_row_blocks + rows

    def _warps(self, observation: Observation) -> tuple[np.ndarray, np.ndarray]:
        """Tile and warp of each warp that takes part."""
        return self._tiles(observation.blocks[::WARP]), observation.warps[::WARP]

    def _see_product(self, observation: Observation, product: _Product) -> None:
        a_type = observation.instruction.types[1]
        d, a, b = (
            [observation.value(e, "b32") for e in _elements(operand)]
            for operand in observation.instruction.operands[:3]
        )
        tile, warp = self._warps(observation)
        key_block = self._begun[tile, warp] - 1
        rows = (warp * self.rows_of_warp + product.row * MMA_M)[:, None, None]
        rows = rows + np.arange(MMA_M)[:, None]
        columns = product.column * MMA_N + np.arange(MMA_N)
        depth = product.k * MMA_K + np.arange(MMA_K)
        place = (tile[:, None, None], key_block[:, None, None])
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
        tile = self._tiles(observation.blocks)
        # before the first block l is only set to zero
        key_block = self._begun[tile, observation.warps] - 1
        found = observation.value(observation.instruction.operands[0], "f32")
        self.put_row(name, observation, found, half, (tile, key_block))
