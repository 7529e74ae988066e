"""The quantities of a kernel on `wgmma`, block by block.

Products are seen when their groups retire: Q, K, P and V are the matrices that they multiply, in
shared memory or in registers, S and O the sums after the last product of a block of keys. A product
whose B is not transposed, since it has K along its rows, is one of Q @ K^T, the others are of
P @ V; a warp takes either in the order of its tiles and blocks of keys, so that counting them tells
which is which, whatever runs beside what. m is what is subtracted in the exponents of S, and l the
register that the last reduction of a row begins with; both belong to the block whose S retired
last. No line of the source is named.

Rows that a kernel computes once more, by other instructions, are not seen then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flash_helpers.check.data_flow import DataFlow
from flash_helpers.check.recorder import Recorder, UntraceableKernel
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.ptx import ComputedProduct, Kernel, Observation, Observer
from flash_helpers.ptx.read.flow import is_wgmma
from flash_helpers.ptx.read.module import Immediate, Instruction, Register, Vector
from flash_helpers.registry.hopper import WARP_ROWS, WGMMA_K, HopperKernelConfig

_SUMMED_BY = ("add", "fma", "mul", "selp")
"""What l is made of, from the exponentials on."""


@dataclass(frozen=True)
class _Plan:
    """What to read at which instruction (by line of the PTX text).

    row_maxima: fused multiply-adds that subtract m; row_sums: those that write l. Each with the
    half tile of 8 rows.
    """

    row_maxima: Mapping[int, int]
    row_sums: Mapping[int, int]

    def wants(self, instruction: Instruction) -> bool:
        return instruction.line in self.row_maxima or instruction.line in self.row_sums


def _is_score(product: Instruction) -> bool:
    """Whether a `wgmma` is one of Q @ K^T."""
    return product.operands[-1] == Immediate(0)


def _plan(config: HopperKernelConfig, kernel: Kernel) -> _Plan:
    instructions = kernel.program.instructions
    flow = DataFlow(kernel.program)
    products = [i for i in instructions if is_wgmma(i)]
    scores = [i for i in products if _is_score(i)]
    for name, found, depth in (
        ("Q @ K^T", scores, config.d_head),
        ("P @ V", [i for i in products if not _is_score(i)], config.B_c),
    ):
        wanted = depth // WGMMA_K
        if not found or len(found) % wanted:
            raise UntraceableKernel(
                f"{config.short_form()} has {len(found)} wgmma of {name}, and a block of keys "
                f"takes {wanted}: only products that are wholly unrolled can be traced"
            )
    exponents = _exponents(flow, instructions, scores)
    sums = {}
    for shuffle in flow.row_sums():
        for writer in flow.sources(shuffle, shuffle.operands[1]):
            halves = _halves(flow, writer, exponents)
            if len(halves) == 1:
                (sums[writer.line],) = halves
    # of each half two elements would do, one for each copy of the code
    maxima = {line: element // 2 for line, element in exponents.items() if element in (0, 2)}
    for name, lines in (("maxima", maxima), ("sums", sums)):
        if set(lines.values()) != {0, 1}:
            raise UntraceableKernel(
                f"{config.short_form()} has no {name} of rows where they were expected: only "
                "exponents 2^(S · scale - m) of a fused multiply-add, with sums that end in "
                "shuffles, can be traced"
            )
    return _Plan(maxima, sums)


def _exponents(
    flow: DataFlow, instructions: Sequence[Instruction], scores: Sequence[Instruction]
) -> dict[int, int]:
    """Line of each fused multiply-add of S whose result is exponentiated, and the element of S.
    scores: `wgmma` of Q @ K^T."""
    exponentiated = {
        source.line
        for i in instructions
        if i.name == "ex2"
        for source in flow.sources(i, i.operands[1])
    }
    elements = {
        register.name: n
        for product in scores
        if isinstance(product.operands[0], Vector)
        for n, register in enumerate(product.operands[0].elements)
        if isinstance(register, Register)
    }
    found = {}
    for i in instructions:
        if i.name == "fma" and i.line in exponentiated:
            element = _element(flow, i, elements)
            if element is not None:
                found[i.line] = element
    return found


def _element(flow: DataFlow, reader: Instruction, elements: Mapping[str, int]) -> int | None:
    """The element of S that an instruction's first operand is, or is a copy of."""
    operand = reader.operands[1]
    moves = (i for i in flow.through_moves(reader, operand) if i.name == "mov")
    copies = (operand, *(move.operands[1] for move in moves))
    return next(
        (elements[c.name] for c in copies if isinstance(c, Register) and c.name in elements), None
    )


def _halves(flow: DataFlow, sum_of: Instruction, exponents: Mapping[int, int]) -> set[int]:
    """Of which half tiles exponentials of S are summed, directly or with other sums."""
    found, seen, waiting = set(), {sum_of.line}, [sum_of]
    for instruction in waiting:
        for operand in instruction.operands[1:]:
            for source in flow.sources(instruction, operand):
                if source.line in seen:
                    continue
                seen.add(source.line)
                if source.name in _SUMMED_BY:
                    waiting.append(source)
                elif source.name == "ex2":
                    lines = (s.line for s in flow.sources(source, source.operands[1]))
                    found |= {exponents[line] // 2 % 2 for line in lines if line in exponents}
    return found


class WgmmaRecorder(Recorder):
    """Values of a launch. Raises UntraceableKernel if the kernel is not built as `_plan` needs."""

    def __init__(
        self, config: HopperKernelConfig, problem: AttentionForward, kernel: Kernel
    ) -> None:
        self._plan = _plan(config, kernel)
        super().__init__(config, problem)
        self._n_blocks = config.n_blocks(self.n_tiles)
        # Products of Q @ K^T and of P @ V that each warp has retired, (thread blocks, warps).
        shape = (self._n_blocks, config.n_warps)
        self._retired = {name: np.zeros(shape, np.int64) for name in "SO"}
        self._per_block = {"S": config.d_head // WGMMA_K, "O": config.B_c // WGMMA_K}

    @property
    def observer(self) -> Observer:
        """What is looked at while the kernel runs."""
        return Observer(self._plan.wants, self._see_row, self._see_product)

    def _place(self, block: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tile and block of keys, of the so many blocks of keys that a thread block takes; -1 for
        those beyond its tiles."""
        turn, key_block = np.divmod(number, self.n_key_blocks)
        tile = block + turn * self._n_blocks
        return tile, np.where((number >= 0) & (tile < self.n_tiles), key_block, -1)

    def _see_product(self, seen: ComputedProduct) -> None:
        result = "S" if _is_score(seen.instruction) else "O"
        block, warp = seen.blocks[:, 0], seen.warps
        retired, per_block = self._retired[result], self._per_block[result]
        number, step = np.divmod(retired[block, warp], per_block)
        retired[block, warp] += 1
        tile, key_block = self._place(block, number)
        for i in np.flatnonzero(key_block >= 0):
            values = {n: array[tile[i], key_block[i]] for n, array in self.values.items()}
            rows = slice(warp[i] * WARP_ROWS, (warp[i] + 1) * WARP_ROWS)
            depth = slice(step[i] * WGMMA_K, (step[i] + 1) * WGMMA_K)
            if result == "S":
                values["Q"][rows, depth] = seen.a[i]
                values["K"][warp[i], :, depth] = seen.b[i].T
            else:
                values["P"][rows, depth] = seen.a[i]
                values["V"][warp[i], depth] = seen.b[i]
            if step[i] == per_block - 1:
                values[result][rows] = seen.d[i]

    def _see_row(self, seen: Observation) -> None:
        instruction = seen.instruction
        block, warp = seen.blocks[:, 0], seen.warps
        number = self._retired["S"][block, warp] // self._per_block["S"] - 1
        place = self._place(block, number)
        half = self._plan.row_maxima.get(instruction.line)
        if half is None:
            half = self._plan.row_sums[instruction.line]
            self.put_row("l", seen, seen.value(instruction.operands[0], "f32"), half, place)
        else:
            self.put_row("m", seen, -seen.value(instruction.operands[3], "f32"), half, place)
