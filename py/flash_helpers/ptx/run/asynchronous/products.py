"""Products of `wgmma`: their factors in shared memory and registers, and their sums in D."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flash_helpers.gpu import WARP
from flash_helpers.ptx.run.asynchronous.together import WARPS
from flash_helpers.ptx.run.asynchronous.wgmma_fragments import (
    WARP_ROWS,
    matrix_of_a,
    matrix_of_d,
    per_register,
    product,
    registers_of_d,
    rounded_sum,
)
from flash_helpers.ptx.run.asynchronous.wgmma_poison import codes_of_fragment, counted, store_codes
from flash_helpers.ptx.run.asynchronous.wgmma_registers import Fragments
from flash_helpers.ptx.run.asynchronous.wgmma_sparse import Sparsity
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.memory.descriptors import CHUNK, MatrixOperand
from flash_helpers.ptx.run.numbers.elements import ELEMENTS, unpacked, values
from flash_helpers.ptx.run.watch.poison import Codes, Poison
from flash_helpers.ptx.run.watch.shared import WatchedMemory


@dataclass(frozen=True)
class Product:
    """A wgmma.mma_async, decoded. `n`: columns of D. `d`, `a`: registers, as uint32 over all lanes,
    with their names; `a` is empty where A is in shared memory. `a_matrix`, `b_matrix`: readers of
    the descriptors. `sign`: sign of the product. `saturates`: as in `rounded_sum`. `sparsity`: None
    for a dense A. `d_fragments`, `a_fragments`: fragments of `RegisterWatch`. `goes_on`: whether
    all its warps issue another product next, before they do more than write registers."""

    position: int
    n: int
    d_type: str
    a_type: str
    b_type: str
    sign: int
    saturates: bool
    sparsity: Sparsity | None
    d: tuple[np.ndarray, ...]
    d_names: tuple[str, ...]
    a: tuple[np.ndarray, ...]
    a_names: tuple[str, ...]
    a_matrix: MatrixOperand | None
    b_matrix: MatrixOperand
    d_fragments: Fragments
    a_fragments: Fragments
    goes_on: bool


@dataclass(frozen=True)
class Issue:
    """A product that warps have issued together. Each warp has the product's group, the bits of the
    descriptors (0 for an A in registers), whether D is added, and the metadata of its lanes, uint32
    (warps, 32), which only a sparse product reads."""

    product: Product
    warps: np.ndarray
    groups: np.ndarray
    a_bits: np.ndarray
    b_bits: np.ndarray
    adds: np.ndarray
    metadata: np.ndarray

    @property
    def chain(self) -> tuple[object, ...]:
        """Equal for products of the same warps that accumulate in the same registers, with factors
        of the same shape and type in the same kind of place."""
        item = self.product
        kinds = (item.d_names, item.d_type, item.a_type, item.b_type, item.sparsity is None)
        return *kinds, item.a_matrix, item.b_matrix, self.warps.tobytes()

    @property
    def footprint(self) -> tuple[object, ...]:
        """Equal for products of the same warps that read matrices of the same shape."""
        product = self.product
        return product.a_matrix, product.b_matrix, self.warps.tobytes(), self.groups.tobytes()

    def some(self, which: np.ndarray) -> Issue:
        """The part of some of the warps."""
        columns = (self.warps, self.groups, self.a_bits, self.b_bits, self.adds, self.metadata)
        return Issue(self.product, *(column[which] for column in columns))


class Factors:
    """The matrices A and B of products that the warps of a batch have issued."""

    def __init__(self, geometry: Geometry, shared: WatchedMemory, poison: Poison) -> None:
        self._geometry = geometry
        self._shared = shared
        self._poison = poison

    def values(self, chain: Sequence[Issue]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The factors of each product of a chain (`Issue.chain`), in float64: the rows of A of each
        warp, (warps, 16, K); matrices B, transposed, (n, N, K); and the index of each warp's B."""
        item, warps = chain[0].product, chain[0].warps
        b_bits = np.stack([issue.b_bits for issue in chain])
        b, which = self._matrices(warps, item.b_matrix, b_bits, item.b_type)
        if item.a_matrix is None:
            lanes = lanes_of_warps(warps)
            registers = [register[lanes] for issue in chain for register in issue.product.a]
            # The registers of all products are those of one matrix with more columns.
            columns = matrix_of_a(registers, item.a_type)
            rows = columns.reshape(*columns.shape[:2], len(chain), -1).transpose(2, 0, 1, 3)
        else:
            a_bits = np.stack([issue.a_bits for issue in chain])
            found, of_warp = self._matrices(warps, item.a_matrix, a_bits, item.a_type)
            rows = self._rows_of_warps(found, of_warp, warps)
        for issue, a, index in zip(chain, rows, which, strict=True):
            if issue.product.sparsity is not None:
                a = issue.product.sparsity.expanded(a, issue.metadata)
            first = int(index.min())
            yield issue.product.sign * a, b[first : int(index.max()) + 1], index - first

    def _matrices(
        self, warps: np.ndarray, matrix: MatrixOperand, bits: np.ndarray, type_name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """The different matrices that warps read by descriptors (products, warps), float64 (n,
        rows, K), those of a product side by side; and the index of each warp's for each product."""
        places, which = self._places(warps, matrix, bits)
        words = self._shared.data.view(np.uint32).reshape(-1, CHUNK // 4)[places]
        return values(matrix.matrix(unpacked(words, type_name)), type_name), which

    def codes(self, issue: Issue) -> tuple[Codes | None, Codes | None]:
        """Codes of each warp's rows of A, (warps, 16), and of the columns of B, (warps, N)."""
        item = issue.product
        columns = self._poison_of_lines(issue, item.b_matrix, issue.b_bits)
        if item.a_matrix is None:
            together = min(ELEMENTS[item.a_type], 4)
            lanes = lanes_of_warps(issue.warps)
            codes = codes_of_fragment(self._poison, item.a_names, together, together, lanes)
            return None if codes is None else codes.max(axis=2), columns
        rows = self._poison_of_lines(issue, item.a_matrix, issue.a_bits)
        if rows is not None:
            rows = self._rows_of_warps(rows, np.arange(len(rows)), issue.warps)
        return rows, columns

    def _poison_of_lines(
        self, issue: Issue, matrix: MatrixOperand, bits: np.ndarray
    ) -> Codes | None:
        """The worst code of each row of A, or column of B, for each warp."""
        places, which = self._places(issue.warps, matrix, bits[None])
        flat = places.reshape(-1)
        per_chunk = CHUNK // self._shared.granule
        unwritten = ~self._shared.marks.is_written(flat[:, None] * per_chunk + np.arange(per_chunk))
        codes = self._poison.in_memory(
            issue.product.position,
            "shared",
            flat * CHUNK % self._shared.stride,
            flat,
            CHUNK,
            unwritten if unwritten.any() else None,
        )
        if codes is None or not codes.any():
            return None
        of_elements = codes.T.reshape(*places.shape, CHUNK // 2, 2).max(axis=-1)
        return counted(matrix.matrix(of_elements).max(axis=-1))[which[0]]

    def _places(
        self, warps: np.ndarray, matrix: MatrixOperand, bits: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `_matrices`; the matrices are indices of their chunks in shared memory, (n, then the
        shape of the addresses)."""
        blocks = (warps % len(self._geometry.blocks)).tolist()
        index: dict[tuple[int, int, int], int] = {}
        which = [
            index.setdefault((i, block, each), len(index))
            for i, row in enumerate(bits.tolist())
            for block, each in zip(blocks, row, strict=True)
        ]
        addresses = np.stack([matrix.addresses(each) for _, _, each in index])
        starts = np.array([block for _, block, _ in index]) * self._shared.stride
        places = addresses + starts.reshape(-1, *[1] * (addresses.ndim - 1))
        return places // CHUNK, np.array(which).reshape(bits.shape)

    def _rows_of_warps(
        self, matrices: np.ndarray, which: np.ndarray, warps: np.ndarray
    ) -> np.ndarray:
        """The 16 rows of each warp. `matrices`: (n, 64, ...). `which`: index of each warp's
        matrix, (..., warps)."""
        number = warps // len(self._geometry.blocks) % WARPS
        parts = matrices.reshape(len(matrices), WARPS, WARP_ROWS, *matrices.shape[2:])
        return parts[which, number]


class Chain:
    """Products that accumulate in the same registers, one after the other: D stays a matrix in
    between."""

    def __init__(self, first: Issue, poison: Poison) -> None:
        item = self._product = first.product
        self._lanes = lanes = lanes_of_warps(first.warps)
        self._poison = poison
        self._d = matrix_of_d([register[lanes] for register in item.d], item.d_type)
        self._together = per_register(item.d_type)
        self._codes: Codes | None = None
        if poison.active:
            self._codes = codes_of_fragment(poison, item.d_names, self._together, 2, lanes)

    def add(self, issue: Issue, a: np.ndarray, b: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Adds a product, whose factors are as in `Factors.values`; returns D with it."""
        if not issue.adds.all():
            self._d = np.where(issue.adds[:, None, None], self._d, 0.0)
        products = product(a, b, which)
        saturates = issue.product.saturates
        self._d = rounded_sum(self._d, products, self._product.d_type, saturates=saturates)
        return self._d

    def add_poison(self, issue: Issue, rows: Codes | None, columns: Codes | None) -> None:
        """Adds the poison of a product."""
        if self._codes is not None:
            self._codes = np.where(issue.adds[:, None, None], self._codes, 0)
        for codes in (
            None if rows is None else rows[:, :, None],
            None if columns is None else columns[:, None, :],
        ):
            if codes is not None:
                before = 0 if self._codes is None else self._codes
                shape = np.broadcast_shapes(codes.shape, self._d.shape)
                self._codes = np.maximum(before, np.broadcast_to(codes, shape))

    def store(self) -> None:
        """Writes D to its registers."""
        values = registers_of_d(self._d, self._product.d_type)
        for register, value in zip(self._product.d, values, strict=True):
            register[self._lanes] = value
        if self._poison.active:
            names = self._product.d_names
            store_codes(self._poison, names, self._together, self._lanes, self._codes)


def lanes_of_warps(warps: np.ndarray) -> np.ndarray:
    """All lanes of warps, one after the other."""
    return (warps[:, None] * WARP + np.arange(WARP)).reshape(-1)
