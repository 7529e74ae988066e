"""The quantities of the backward pass in a simulated kernel, read from its products.

A product is known by what it multiplies. Rows of Q and K give S, rows of dO and V give dP, with
either tensor first: S^T and dP^T are recorded as S and dP. A computed factor times K, along the
keys, adds to dQ; times dO, along the queries, to dV; times Q to dK. Tensors are known by the copies
that brought their rows (`shared_rows`). The rows of a computed factor are those of the S or dP that
it follows from, in registers or by way of shared memory.

The LSE is the subtrahend in the exponents of S, P the exponential, delta the subtrahend of dP. A
summand that is a constant, or one of two, hides keys and is no LSE.
Where a kernel subtracts neither, since it adds the products to -LSE / softmax_scale or to -delta,
these are read from the accumulators, and S and dP are what the products add. No line of the source
and no order of products is named.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_backward.trace.shared_rows import (
    NONE,
    Block,
    SharedRows,
    by_warp,
)
from flash_helpers.operations.attention_forward.trace.data_flow import DataFlow
from flash_helpers.operations.attention_forward.trace.recorder import (
    HALF_TILE,
    MAX_TRACE_BYTES,
    QUAD,
)
from flash_helpers.ptx import ComputedProduct, Kernel, Observation, Observer
from flash_helpers.ptx.read.flow import is_wgmma
from flash_helpers.ptx.read.module import Instruction, Operand, Register, Vector
from flash_helpers.ptx.run.instructions.access import addresses_of
from flash_helpers.ptx.run.instructions.tensor import matrix_of_a, matrix_of_b, matrix_of_c

Cells = tuple[int, int, np.ndarray, np.ndarray]
"""An index of cells: batch, head, cells of queries and of keys that broadcast."""
CELL = 16
"""Queries and keys of a cell: the rows of a warp's tile, and the depth of one `mma` or `wgmma`."""
QUERIES = ("q", "do")
"""Tensors whose rows are queries; those of the others are keys."""
SCORES = {("q", "k"): "S", ("k", "q"): "S", ("do", "v"): "dP", ("v", "do"): "dP"}
"""Products of two tensors."""
SUMS = {"k": ("dQ", "dS"), "do": ("dV", "P"), "q": ("dK", "dS")}
"""By the tensor that a computed factor is multiplied by: the sum and the factor."""
OPERANDS = {"q": "Q", "k": "K", "do": "dO", "v": "V"}
"""Names of tensors that are multiplied."""
FACTORS = {name: f"{factor} of {name}" for name, factor in SUMS.values()}
"""For each sum, the quantity that is its computed factor."""
BESIDE = {"Q": "S", "K": "S", "LSE": "S", "P": "S", "dO": "dP", "V": "dP", "delta": "dP"}
"""Quantities that come with a product, and its result."""

BEGINS = {"S": "LSE", "dP": "delta"}
"""By product, what its accumulators may begin with."""

_WITHOUT_SOURCE = ("ld", "ldmatrix", "shfl", "atom", "setp")
"""Instructions whose result is not followed to what they read."""


@dataclass(frozen=True)
class Place:
    """A warp's part of S or dP. `batch`, `head`: of the queries. `rows`, `columns`: of the result
    as the kernel has it, positions in their sequences, NONE behind the ends. `of_queries`: its rows
    are queries. `copy`: which of the warps that have this part it is. `turn`: a number that
    grows."""

    batch: int
    head: int
    rows: np.ndarray
    columns: np.ndarray
    of_queries: bool
    copy: int
    turn: int


@dataclass
class Record:
    """The values of one kernel, NaN where nothing was computed.

    Scores and quantities of their shape are (batch, heads, len_q, len_k). Q and dO are (batch,
    heads, len_q, cells of keys, d_head), as they were multiplied with these keys; K and V likewise
    (batch, heads, len_k, cells of queries, d_head), by heads of Q. A sum is that after each cell of
    its depth: dQ as Q, dK and dV as K.

    `values`: by quantity, one array for each warp that has the same part. `warps`: by product
    (`BESIDE`), (batch, heads, cells of queries, cells of keys): the warp that computed it, or NONE.
    `turns`: of S and of sums, the same shape: a number that grows in the order of the products.
    `begun`: of S and dP those whose accumulators begin with a number (`BEGINS`).
    """

    problem: AttentionBackward
    values: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    warps: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    turns: dict[str, np.ndarray] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)

    @property
    def cells(self) -> tuple[int, int, int, int]:
        """Batch, heads, cells of queries and cells of keys."""
        problem = self.problem
        return problem.batch, problem.heads, -(-problem.len_q // CELL), -(-problem.len_k // CELL)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a quantity."""
        problem, (batch, heads, q_cells, k_cells) = self.problem, self.cells
        if name in ("Q", "dO", "dQ"):
            return batch, heads, problem.len_q, k_cells, problem.d_head
        if name in ("K", "V", "dK", "dV"):
            return batch, heads, problem.len_k, q_cells, problem.d_head
        return batch, heads, problem.len_q, problem.len_k

    def array(self, name: str, copy: int = 0) -> np.ndarray:
        """A quantity's values, of one of the warps that have the same part."""
        copies = self.values[name]
        while len(copies) <= copy:
            size = 4 * int(np.prod(self.shape(name)))
            size += sum(array.nbytes for arrays in self.values.values() for array in arrays)
            if size > MAX_TRACE_BYTES:
                raise ValueError(
                    f"the trace takes over {MAX_TRACE_BYTES >> 20} MiB: use a shorter sequence or "
                    "fewer heads"
                )
            copies.append(np.full(self.shape(name), np.nan, np.float32))
        return copies[copy]

    def warps_of(self, name: str, copy: int = 0) -> np.ndarray:
        """The warp that computed each cell of a quantity."""
        return self.warps[FACTORS.get(name, BESIDE.get(name, name))][copy]

    def claim(self, name: str, warp: int, at: Cells) -> int:
        """Take cells for a warp; return how many other warps had them before."""
        taken = self.warps[name]
        free = (i for i, warps in enumerate(taken) if np.isin(warps[at], (NONE, warp)).all())
        copy = next(free, len(taken))
        if copy == len(taken):
            taken.append(np.full(self.cells, NONE))
        taken[copy][at] = warp
        return copy


@dataclass(frozen=True)
class _Read:
    """A value that lanes have for an element of S or dP. `of`: the products, by line, of which the
    last one has the element, and its number in the fragment."""

    name: str
    operand: int
    sign: int
    of: tuple[int, ...]
    element: int


Sources = tuple[tuple[int, int], ...]
"""Of a register: lines of the `ldmatrix` that may have written it, and the matrix in each."""


@dataclass(frozen=True)
class _Plan:
    """Instructions to look at, by line of the PTX text.

    `reads`: values beside products. `computed`: of products with a computed factor in registers,
    and of stores to shared memory, the lines of the scores that it follows from. `a`, `b`: of each
    `mma` the sources of its operands' registers; no `a` for a computed factor. `transposed`: those
    whose B is.
    """

    reads: Mapping[int, tuple[_Read, ...]]
    computed: Mapping[int, tuple[int, ...]]
    a: Mapping[int, tuple[Sources, ...]]
    b: Mapping[int, tuple[Sources, ...]]
    transposed: frozenset[int]

    def wants(self, instruction: Instruction) -> bool:
        return (
            instruction.line in self.reads
            or instruction.name in ("ldmatrix", "mma")
            or SharedRows.wants(instruction)
        )


def _plan(kernel: Kernel) -> _Plan:
    flow = DataFlow(kernel.program)
    reads: dict[int, tuple[_Read, ...]] = defaultdict(tuple)
    computed, a, b, transposed = {}, {}, {}, set()
    by_line = {i.line: i for i in kernel.program.instructions}

    def add(name: str, i: Instruction, operand: int, sign: int, scored: Operand) -> None:
        of, element = _scores(flow, i, scored)
        if of:
            reads[i.line] += (_Read(name, operand, sign, of, element),)

    for i in kernel.program.instructions:
        if i.name == "ex2":
            add("P", i, 0, 1, i.operands[1])
            for source in flow.sources(i, i.operands[1]):
                if source.name == "fma" and not _is_chosen(flow, source, source.operands[3]):
                    add("LSE", source, 3, -1, source.operands[1])
        elif i.name == "sub" and "f32" in i.types and _is_product(flow, i, i.operands[1]):
            add("delta", i, 2, 1, i.operands[1])
        elif i.name == "mma":
            own_a, own_b = (_elements(operand) for operand in i.operands[1:3])
            b[i.line] = tuple(_loads(flow, i, register) for register in own_b)
            if any(by_line[line].has("trans") for line, _ in b[i.line][0]):
                transposed.add(i.line)
            loads = tuple(_loads(flow, i, register) for register in own_a)
            if all(loads):
                a[i.line] = loads
            else:
                computed[i.line] = _scores(flow, i, own_a[0])[0]
        elif SharedRows.stores(i) or (is_wgmma(i) and isinstance(i.operands[1], Vector)):
            factor = i.operands[1]
            first = factor.elements[0] if isinstance(factor, Vector) else factor
            computed[i.line] = _scores(flow, i, first)[0]
    return _Plan(reads, computed, a, b, frozenset(transposed))


def _elements(operand: Operand) -> tuple[Operand, ...]:
    assert isinstance(operand, Vector)
    return operand.elements


def _loads(flow: DataFlow, reader: Instruction, register: Operand) -> Sources:
    """The `ldmatrix` that may have written a register."""
    found = []
    writers = flow.through_moves(reader, register)
    for writer in writers:
        if writer.name == "ldmatrix":
            found.append((writer.line, _index(writer, register, writers)))
    return tuple(found)


def _index(writer: Instruction, register: Operand, writers: Sequence[Instruction]) -> int:
    """The number of a register, or of what is moved into it, among those that are written."""
    names = {register, *(move.operands[1] for move in writers if move.name == "mov")}
    elements = _elements(writer.operands[0])
    return next(n for n, element in enumerate(elements) if element in names)


def _is_product(flow: DataFlow, reader: Instruction, operand: Operand) -> bool:
    return any(i.name == "mma" or is_wgmma(i) for i in flow.sources(reader, operand))


def _is_chosen(flow: DataFlow, reader: Instruction, operand: Operand) -> bool:
    """Whether an operand is a constant or one of two."""
    return all(
        i.name == "selp" and not any(isinstance(x, Register) for x in i.operands[1:3])
        for i in flow.sources(reader, operand)
    )


def _scores(flow: DataFlow, reader: Instruction, operand: Operand) -> tuple[tuple[int, ...], int]:
    """The products whose result an operand follows from by arithmetic in registers, the nearest
    ones: their lines, and the number of the element. No lines if there is none."""
    seen, waiting = set(), [(reader, operand)]
    for at, register in waiting:
        writers = flow.through_moves(at, register)
        products = [i for i in writers if i.name == "mma" or is_wgmma(i)]
        if products:
            return tuple(i.line for i in products), _index(products[0], register, writers)
        for writer in writers:
            if writer.line not in seen and writer.name not in _WITHOUT_SOURCE:
                seen.add(writer.line)
                inputs = (x for x in writer.operands[1:] if isinstance(x, Register))
                waiting += [(writer, x) for x in inputs]
    return (), 0


class Recorder:
    """Reads the values of one launch into a record."""

    def __init__(self, record: Record, kernel: Kernel, rows: SharedRows) -> None:
        self.record = record
        self._plan = _plan(kernel)
        self._rows = rows
        self._turn = 0
        # By block and warp: turns and places of products, by line; no place behind the ends.
        self._places: dict[tuple[Block, int], dict[int, tuple[int, Place | None]]] = defaultdict(
            dict
        )
        # S or dP from which no instruction subtracts the LSE or delta; and by block, warp, product
        # and first column, what its accumulators began with.
        read = {read.name for reads in self._plan.reads.values() for read in reads}
        self._begin_with = {score for score, name in BEGINS.items() if name not in read}
        self._begun: dict[tuple[Block, int, str, int], np.ndarray] = {}
        # Places of what was stored in shared memory, by the number that its chunks have there.
        self._stored: dict[int, Place] = {}
        # By block, warp and line of an ldmatrix: its turn and its chunks.
        self._fragments: dict[tuple[Block, int, int], tuple[int, np.ndarray]] = {}

    @property
    def observer(self) -> Observer:
        """The observer of the running kernel."""
        return Observer(self._plan.wants, self._see, self._see_wgmma)

    def _next(self) -> int:
        self._turn += 1
        return self._turn

    def _see(self, seen: Observation) -> None:
        instruction = seen.instruction
        if instruction.line in self._plan.reads:
            self._read(seen)
        elif instruction.name == "ldmatrix":
            addresses = addresses_of(seen.machine, instruction.operands[1])(seen.lanes)
            for block, warp, some in by_warp(seen):
                found = self._rows.labels(block, addresses[some])
                self._fragments[block, warp, instruction.line] = (self._next(), found)
        elif instruction.name == "mma":
            self._see_mma(seen)
        elif SharedRows.stores(instruction):
            self._rows.store(seen, self._number_of_stored)
        else:
            self._rows.copy(seen)

    def _number_of_stored(self, block: Block, warp: int, line: int) -> int:
        """The number of chunks that a warp stores: below NONE if they follow from scores."""
        place = self._last(block, warp, self._plan.computed[line])
        if place is None:
            return NONE
        self._stored[NONE - place.turn] = place
        return NONE - place.turn

    def _read(self, seen: Observation) -> None:
        """Values of lanes for elements of S or dP."""
        for read in self._plan.reads[seen.instruction.line]:
            values = read.sign * seen.value(seen.instruction.operands[read.operand], "f32")
            for block, warp, some in by_warp(seen):
                place = self._last(block, warp, read.of)
                if place is None:
                    continue
                lane = seen.lanes[some] % WARP
                row = place.rows[lane // QUAD + HALF_TILE * (read.element // 2 % 2)]
                column = 8 * (read.element // 4) + 2 * (lane % QUAD) + read.element % 2
                self._put(read.name, place, row, place.columns[column], values[some])

    def _last(self, block: Block, warp: int, lines: Sequence[int]) -> Place | None:
        """The place of the last of some products that a warp has computed."""
        places = self._places[block, warp]
        own = (places[line] for line in lines if line in places)
        _, place = max(own, key=lambda found: found[0], default=(0, None))
        return place

    def _put_matrix(self, name: str, place: Place, matrix: np.ndarray) -> None:
        """Record scores of all of a place."""
        row, column = np.broadcast_arrays(place.rows[:, None], place.columns)
        self._put(name, place, row, column, matrix)

    def _put(
        self, name: str, place: Place, row: np.ndarray, column: np.ndarray, values: np.ndarray
    ) -> None:
        """Record scores. `row`, `column`: positions as in the place, of the shape of the values."""
        known = (row != NONE) & (column != NONE)
        at = (row[known], column[known]) if place.of_queries else (column[known], row[known])
        array = self.record.array(name, place.copy)
        array[(place.batch, place.head, *at)] = values[known]

    # -- products ----------------------------------------------------------------------------------

    def _see_mma(self, seen: Observation) -> None:
        line, plan = seen.instruction.line, self._plan
        a_type = seen.instruction.types[1]
        d, a, b = (
            [seen.value(e, "b32") for e in _elements(operand)]
            for operand in seen.instruction.operands[:3]
        )
        d_matrix = matrix_of_c([register.view(np.float32) for register in d], "f32")
        a_matrix, b_matrix = matrix_of_a(a, a_type), matrix_of_b(b, a_type).transpose(0, 2, 1)
        transposed = line in plan.transposed
        for i, (block, warp, _) in enumerate(by_warp(seen)):
            b_chunks = [self._chunks_of(block, warp, sources) for sources in plan.b[line]]
            a_chunks = [self._chunks_of(block, warp, sources) for sources in plan.a.get(line, ())]
            self._multiply(
                (block, warp, line),
                (a_matrix[i], b_matrix[i], d_matrix[i]),
                np.concatenate(a_chunks).reshape(2, -1).T if a_chunks else None,
                np.concatenate(b_chunks)[:, None] if transposed else np.stack(b_chunks, axis=1),
                k_major=not transposed,
            )

    def _chunks_of(self, block: Block, warp: int, sources: Sources) -> np.ndarray:
        """The chunks of the eight rows of a fragment's register."""
        loaded = [
            (*self._fragments[block, warp, line], matrix)
            for line, matrix in sources
            if (block, warp, line) in self._fragments
        ]
        if not loaded:
            return np.full(8, NONE)
        _, chunks, matrix = max(loaded, key=lambda each: each[0])
        return chunks[8 * matrix : 8 * matrix + 8]

    def _see_wgmma(self, seen: ComputedProduct) -> None:
        for i, warp in enumerate(seen.warps.tolist()):
            block = tuple(seen.blocks[i].tolist())
            addresses = seen.a_addresses(i)
            self._multiply(
                (block, warp, seen.instruction.line),
                (seen.a[i], seen.b[i], seen.d[i]),
                None if addresses is None else self._rows.labels(block, addresses),
                self._rows.labels(block, seen.b_addresses(i)),
                k_major=seen.b_is_k_major,
            )

    def _multiply(
        self,
        at: tuple[Block, int, int],
        matrices: tuple[np.ndarray, np.ndarray, np.ndarray],
        a_chunks: np.ndarray | None,
        b_chunks: np.ndarray,
        *,
        k_major: bool,
    ) -> None:
        """A product of a warp. `at`: block, warp, line. `matrices`: A (16, 16), B (16, n) and D
        (16, n). `a_chunks`: (16, 2), None in registers. `b_chunks`: (n, 2) if B has its depth along
        the rows of a tensor, else (16, n / 8)."""
        block, warp, line = at
        self._places[block, warp][line] = self._next(), None  # rows behind the end have no place
        b_name = self._name(b_chunks)
        if b_name is None:
            return
        if not k_major:
            scores = self._scores_of(at, a_chunks)
            if scores is not None:
                self._add(at, matrices, b_name, b_chunks, scores)
            return
        a_name = None if a_chunks is None else self._name(a_chunks)
        score = SCORES.get((a_name or "", b_name))
        if score is not None and a_chunks is not None:
            self._score(at, matrices, score, (a_chunks, b_chunks))

    def _name(self, chunks: np.ndarray) -> str | None:
        """The tensor of the first chunk of one."""
        known = chunks[chunks > NONE]
        return self._rows.chunks.names[self._rows.chunks.tensor[known[0]]] if known.size else None

    def _rows_of(self, chunks: np.ndarray) -> np.ndarray:
        """The row in its sequence of each first chunk, NONE where it is that of no tensor."""
        first = chunks[:, 0]
        return np.where(first > NONE, self._rows.chunks.row[first], NONE)

    def _first(self, chunks: np.ndarray) -> tuple[int, int, int]:
        """Batch, head and column of the first chunk of a tensor."""
        known, table = chunks[chunks > NONE][0], self._rows.chunks
        return int(table.batch[known]), int(table.head[known]), int(table.column[known])

    def _score(
        self,
        at: tuple[Block, int, int],
        matrices: tuple[np.ndarray, np.ndarray, np.ndarray],
        score: str,
        chunks: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """A step of S or dP."""
        block, warp, line = at
        (a, b, d), (rows, columns) = matrices, map(self._rows_of, chunks)
        names = [self._name(some) for some in chunks]
        of_queries = names[0] in QUERIES
        batch, head, column = self._first(chunks[0 if of_queries else 1])
        sides = (rows, columns) if of_queries else (columns, rows)
        cells = _cells(batch, head, sides)
        copy = self.record.claim(score, warp, cells)
        place = Place(batch, head, rows, columns, of_queries, copy, self._next())
        self._mark(score, cells, place.turn)
        self._places[block, warp][line] = place.turn, place
        for name, matrix, own, other in (
            (names[0], a, rows, columns),
            (names[1], b.T, columns, rows),
        ):
            assert name is not None
            array, known = self.record.array(OPERANDS[name], copy), own != NONE
            depth = slice(column, column + matrix.shape[1])
            for cell in np.unique(other[other != NONE] // CELL):
                array[batch, head, own[known], cell, depth] = matrix[known]
        if score in self._begin_with:
            d = d - self._begin((block, warp, score, int(columns[0])), d, a @ b, column, place)
        self._put_matrix(score, place, d)

    def _begin(
        self,
        of: tuple[Block, int, str, int],
        d: np.ndarray,
        product: np.ndarray,
        column: int,
        place: Place,
    ) -> np.ndarray:
        """Record, and return, what the accumulators of S or dP began with. `d`: what they are after
        this step, which adds `product`. `column`: of the step's first element along the depth."""
        if column == 0:
            self._begun[of] = before = d - product
            score, scale = of[2], 1.0
            if score == "S":
                scale = self.record.problem.softmax_scale / math.log(2)
            self._put_matrix(BEGINS[score], place, -before * scale)
            self.record.begun.add(score)
        return self._begun[of]

    def _add(
        self,
        at: tuple[Block, int, int],
        matrices: tuple[np.ndarray, np.ndarray, np.ndarray],
        b_name: str,
        b_chunks: np.ndarray,
        scores: Place,
    ) -> None:
        """A step of a sum. `scores`: those that the computed factor follows from."""
        (_, warp, _), (a, _, d) = at, matrices
        name, _ = SUMS[b_name]
        depth = self._rows_of(b_chunks)
        _, _, column = self._first(b_chunks)
        of_queries = name == "dQ"
        rows, batch, head = scores.rows, scores.batch, scores.head
        if scores.of_queries != of_queries:
            rows = scores.columns
            if rows.size > CELL:
                first = warp % QUAD * CELL  # of the warp in its warpgroup's tile of 64
                rows = rows[first : first + CELL]
        cells = _cells(batch, head, (rows, depth) if of_queries else (depth, rows))
        factor = FACTORS[name]
        copy = self.record.claim(factor, warp, cells)
        place = Place(batch, head, rows, depth, of_queries, copy, self._next())
        self._put_matrix(factor, place, a)
        known = rows != NONE
        array = self.record.array(name)
        depth_cell = depth.max() // CELL
        array[batch, head, rows[known], depth_cell, column : column + d.shape[1]] = d[known]
        self._mark(name, cells, place.turn)

    def _scores_of(self, at: tuple[Block, int, int], a_chunks: np.ndarray | None) -> Place | None:
        """The scores that a computed factor follows from."""
        if a_chunks is None:
            block, warp, line = at
            return self._last(block, warp, self._plan.computed[line])
        # ldmatrix.trans gives the matrices of a fragment: 8 columns of the scores each
        halves = [self._stored.get(int(a_chunks[row, 0])) for row in (0, HALF_TILE)]
        known = next((half for half in halves if half is not None), None)
        if known is None or known.columns.size > HALF_TILE:
            return known
        columns = [np.full(HALF_TILE, NONE) if half is None else half.columns for half in halves]
        return replace(known, columns=np.concatenate(columns))

    def _mark(self, name: str, cells: Cells, turn: int) -> None:
        turns = self.record.turns.setdefault(name, np.full(self.record.cells, NONE))
        turns[cells] = turn


def _cells(batch: int, head: int, sides: tuple[np.ndarray, np.ndarray]) -> Cells:
    """The cells of some queries and some keys."""
    queries, keys = (np.unique(side[side != NONE] // CELL) for side in sides)
    return batch, head, queries[:, None], keys
