"""The quantities of a kernel on `wgmma`, block by block.

Products are seen when their groups retire. Q, K, P and V are the matrices that they multiply, in
shared memory or in registers. S and O are the sums after the last product of a block of keys. A
product whose B is not transposed, since it has K along its rows, belongs to Q @ K^T; the others
belong to P @ V.

The products of a block are committed together, and a warp takes either kind in the order of its
tiles and blocks of keys. So counting the groups identifies them, in any overlap. Where thread
blocks take tiles from a counter, the tiles are read from the atomic additions. The maximum m is the
subtrahend in the exponents of S, and l the register with which the last reduction of a row begins;
both belong to the block whose S retired last. No line of the source is named.

Rows that a kernel computes again by other instructions are not seen at that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.operations.attention_forward.trace.data_flow import DataFlow
from flash_helpers.operations.attention_forward.trace.recorder import Recorder, UntraceableKernel
from flash_helpers.ptx import ComputedProduct, Kernel, Observation, Observer
from flash_helpers.ptx.read.flow import is_wgmma
from flash_helpers.ptx.read.module import Immediate, Instruction, Register, Vector
from flash_helpers.registry.wgmma import WARP_ROWS, WGMMA_K, WgmmaConfig

_SUMMED_BY = ("add", "fma", "mul", "selp")
"""Operations that make l, from the exponentials on."""


@dataclass(frozen=True)
class _Plan:
    """Values to read at each instruction (by line of the PTX text).

    `steps`: for each product, its place in its group, and whether it is the last. `row_maxima`:
    fused multiply-adds that subtract m. `row_sums`: instructions that write l. Each has its half
    tile of 8 rows. `counters`: instructions that take the next tile.
    """

    steps: Mapping[int, tuple[int, bool]]
    row_maxima: Mapping[int, int]
    row_sums: Mapping[int, int]
    counters: frozenset[int]

    def wants(self, instruction: Instruction) -> bool:
        line = instruction.line
        return line in self.row_maxima or line in self.row_sums or line in self.counters


def _is_score(product: Instruction) -> bool:
    """Whether a `wgmma` is one of Q @ K^T."""
    return product.operands[-1] == Immediate(0)


def _plan(config: WgmmaConfig, kernel: Kernel) -> _Plan:
    instructions = kernel.program.instructions
    flow = DataFlow(kernel.program)
    steps = _steps(config, instructions)
    scores = [i for i in instructions if i.line in steps and _is_score(i)]
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
    return _Plan(steps, maxima, sums, frozenset(i.line for i in instructions if i.name == "atom"))


def _steps(config: WgmmaConfig, instructions: Sequence[Instruction]) -> dict[int, tuple[int, bool]]:
    """Line of each product, its place in its group, and whether it is the last."""
    found: dict[int, tuple[int, bool]] = {}
    group: list[Instruction] = []
    sizes = {
        True: {config.d_head // WGMMA_K},
        False: {keys // WGMMA_K for keys in (config.B_c, config.few_keys) if keys},
    }
    for i in instructions:
        if is_wgmma(i):
            group.append(i)
        elif i.name == "wgmma" and i.has("commit_group") and group:
            is_score = _is_score(group[0])
            if len(group) not in sizes[is_score]:
                wanted = " or ".join(map(str, sorted(sizes[is_score])))
                raise UntraceableKernel(
                    f"{config.short_form()} has {len(group)} wgmma of "
                    f"{'Q @ K^T' if is_score else 'P @ V'} in a group, and a block of keys takes "
                    f"{wanted}: only products that are wholly unrolled can be traced"
                )
            found |= {product.line: (k, product is group[-1]) for k, product in enumerate(group)}
            group = []
    return found


def _exponents(
    flow: DataFlow, instructions: Sequence[Instruction], scores: Sequence[Instruction]
) -> dict[int, int]:
    """Line of each fused multiply-add of S whose result is exponentiated, and the element of S.
    `scores`: `wgmma` of Q @ K^T."""
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
    """The element of S that is an instruction's first operand, directly, as a copy, hidden by a
    mask, or scaled and limited by tanh."""
    operands = reader.operands[1:] if reader.name == "mul" else reader.operands[1:2]
    writers = [i for operand in operands for i in flow.through_moves(reader, operand)]
    copies = (*operands, *(move.operands[1] for move in writers if move.name == "mov"))
    for copy in copies:
        if isinstance(copy, Register) and copy.name in elements:
            return elements[copy.name]
    passing = (
        i
        for i in writers
        if (i.name == "selp" and isinstance(i.operands[2], Immediate))
        or i.name == "tanh"
        or (i.name == "mul" and reader.name == "tanh")
    )
    found = (_element(flow, i, elements) for i in passing)
    return next((element for element in found if element is not None), None)


def _halves(flow: DataFlow, sum_of: Instruction, exponents: Mapping[int, int]) -> set[int]:
    """Half tiles whose exponentials of S are summed, directly or with other sums."""
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


class WgmmaRecorder(Recorder[WgmmaConfig]):
    """Values of a launch. Raises UntraceableKernel if the kernel is not built as `_plan` needs."""

    def __init__(
        self, config: WgmmaConfig, problem: AttentionForward, kernel: Kernel, device: Device
    ) -> None:
        self._plan = _plan(config, kernel)
        super().__init__(config, problem)
        order = config.order(problem, device)
        self._numbered = order.tiles()
        self._n_blocks = order.n_blocks
        # The numbers of each thread block's tiles; those from a counter as they are taken.
        self._taken = [[*order.known_tiles(block)] for block in range(self._n_blocks)]
        # For Q @ K^T and for P @ V, (thread blocks, warps): the place of the last products that a
        # warp has retired, and the place of the next ones.
        shape = (self._n_blocks, config.n_warps)
        self._place = {name: np.full((*shape, 2), -1) for name in "SO"}
        self._walks = {name: {at: self._walk(*at) for at in np.ndindex(*shape)} for name in "SO"}

    @property
    def observer(self) -> Observer:
        """The observer of the running kernel."""
        return Observer(self._plan.wants, self._see, self._see_product)

    def _walk(self, block: int, warp: int) -> Iterator[tuple[int, int]]:
        """Tile and turn of each block of keys that a warp takes."""
        for number in self._taken[block]:  # which may grow
            head, row_block = self._numbered[number]
            query = row_block * self.config.B_r + warp * WARP_ROWS
            has_rows = row_block < self.n_row_blocks
            for key_block in self.config.own_key_blocks(self.problem, query):
                turn = self.key_blocks.index(key_block) if has_rows else -1
                yield head * self.n_row_blocks + row_block, turn

    def _see_product(self, seen: ComputedProduct) -> None:
        result = "S" if _is_score(seen.instruction) else "O"
        place = self._place[result]
        step, is_last = self._plan.steps[seen.instruction.line]
        columns = slice(seen.d.shape[-1])  # all of O's, of S those that are multiplied
        for i, at in enumerate(zip(seen.blocks[:, 0].tolist(), seen.warps.tolist(), strict=True)):
            if step == 0:
                place[at] = next(self._walks[result][at], (-1, -1))
            tile, turn = place[at]
            if turn < 0:  # beyond what there is to compute
                continue
            values = {name: array[tile, turn] for name, array in self.values.items()}
            warp = at[1]
            rows = slice(warp * WARP_ROWS, (warp + 1) * WARP_ROWS)
            depth = slice(step * WGMMA_K, (step + 1) * WGMMA_K)
            if result == "S":
                values["Q"][rows, depth] = seen.a[i]
                values["K"][warp, columns, depth] = seen.b[i].T
            else:
                values["P"][rows, depth] = seen.a[i]
                values["V"][warp, depth] = seen.b[i]
            if is_last:
                values[result][rows, columns] = seen.d[i]

    def _see(self, seen: Observation) -> None:
        instruction, plan = seen.instruction, self._plan
        block = seen.blocks[:, 0]
        if instruction.line in plan.counters:
            together = self.config.cluster_blocks
            numbers = seen.value(instruction.operands[0], "u32") * together + self._n_blocks
            for taker, number in zip(block.tolist(), numbers.tolist(), strict=True):
                for i in range(together if number < len(self._numbered) else 0):
                    self._taken[taker + i].append(number + i)
            return
        tile, turn = self._place["S"][block, seen.warps].T
        half = plan.row_maxima.get(instruction.line)
        if half is None:
            half = plan.row_sums[instruction.line]
            found = seen.value(instruction.operands[0], "f32")
            self.put_row("l", seen, found, half, (tile, turn))
        else:
            found = -seen.value(instruction.operands[3], "f32")
            self.put_row("m", seen, found, half, (tile, turn))
