"""The families of operation `norm`: layer norm and RMS norm along rows. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.norm import OPERATION
from flash_helpers.operations.norm.supports import NormSupports
from flash_helpers.registry.call import FLOAT, INT, LONG, POINTER, StructLayout
from flash_helpers.registry.config import element, number
from flash_helpers.registry.family import HELD_BACK, Family, StepEntry
from flash_helpers.registry.problem import Element
from flash_helpers.registry.row_threads import (
    HALF_CHUNKS,
    HALF_OF_AN_SM,
    ROW_IN_REGISTERS,
    ROW_THREADS,
    ROWS_IN_FLIGHT,
    ROWS_OF_A_THREAD,
    VECTOR_LOADS,
    RowConfig,
)

ARGUMENTS = StructLayout(
    "NormKernelArgs",
    MappingProxyType(
        {
            **dict.fromkeys(("x", "weight", "bias", "y", "mean", "rstd"), POINTER),
            "x_stride": LONG,
            "y_stride": LONG,
            "rows": INT,
            "width": INT,
            "eps": FLOAT,
        }
    ),
)


class NormConfig(RowConfig):
    """One kernel of a norm; a subclass has the fields of `RowConfig`, behind that of its step."""

    rms: ClassVar[bool]

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block in bytes: a number for each warp and each sum of each
        row of a thread; with them the number of elements, where one tree has both sums."""
        numbers = 1 if self.rms else 3 if HALF_OF_AN_SM in self.step.traits else 2
        return numbers * self.thread_rows * self.n_warps * Element.FP32.bytes

    @property
    def supports(self) -> NormSupports:
        """Rows of any length that the config's threads can have, at any element."""
        widest = self.widest("split the rows, and combine their sums of x and of squares")
        return NormSupports(self.dtype, *widest, rms=self.rms)


def _chunks() -> Any:
    text = "of 16 bytes of the row, which a thread keeps in registers; 0 before n3"
    return number("c", text, default=0)


def _row_threads() -> Any:
    return number("t", "that have a row; 0 before n4: all of the block", default=0)


def _rows_in_flight(before: str) -> Any:
    return number("f", f"rows of a thread at once; 0 before {before}: one", default=0)


@dataclass(frozen=True)
class LayerNormKernelConfig(NormConfig):
    """One kernel of the layer_norm family."""

    example: ClassVar[str] = "n3_bf16_w8_c4"
    rms: ClassVar[bool] = False

    layer_norm: int = number("n", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = _chunks()
    row_threads: int = _row_threads()
    rows_in_flight: int = _rows_in_flight("n5")

    @property
    def family(self) -> Family[Any]:
        """The layer_norm family."""
        return LAYER_NORM


@dataclass(frozen=True)
class RmsNormKernelConfig(NormConfig):
    """One kernel of the rms_norm family."""

    example: ClassVar[str] = "r1_bf16_w4_c16_t32"
    rms: ClassVar[bool] = True

    rms_norm: int = number("r", "the step")
    dtype: Element = element()
    n_warps: int = number("w", "of the thread block")
    chunks: int = _chunks()
    row_threads: int = _row_threads()
    rows_in_flight: int = _rows_in_flight("r2")

    @property
    def family(self) -> Family[Any]:
        """The rms_norm family."""
        return RMS_NORM


def _file(name: str) -> str:
    return f"kernels/norm/{name}.cuh"


_WARPS = (1, 2, 4, 8, 16, 32)
_CHUNKS = (1, 2, 4, 8, 16)
_ROW_THREADS = (8, 16, 32, 64, 128, 256, 512, 1024)
_BY_WIDTH: Mapping[str, int] = MappingProxyType({"n_warps": 4, "chunks": 16, "row_threads": 32})
_TARGETS = ("80", "86", "89", "90")
_DTYPES = (Element.FP16, Element.BF16, Element.FP32)
_HEADER = PurePosixPath("kernels/norm/arguments.cuh")

LAYER_NORM = Family(
    name="layer_norm",
    title="layer norm along rows",
    operation=OPERATION,
    prefix="n",
    rank=15,
    config=LayerNormKernelConfig,
    base=MappingProxyType({"n_warps": 8, "chunks": 0, "row_threads": 0, "rows_in_flight": 0}),
    entries=(
        StepEntry("block_per_row", "a thread block per row, three reads", _file("n1")),
        StepEntry(
            "16_bytes_per_lane",
            "16 bytes per lane",
            _file("n2"),
            traits=frozenset({VECTOR_LOADS}),
        ),
        StepEntry(
            "row_in_registers",
            "the row in registers, read once",
            _file("n3"),
            sets={"chunks": 4},
            opens={"n_warps": _WARPS, "chunks": _CHUNKS},
            traits=frozenset({ROW_IN_REGISTERS}),
        ),
        StepEntry(
            "threads_per_row",
            "as many threads per row as its width needs, and several rows per thread block",
            _file("n4"),
            sets=_BY_WIDTH,
            opens={"n_warps": (4, 8, 16, 32), "row_threads": _ROW_THREADS},
            traits=frozenset({ROW_THREADS}),
        ),
        StepEntry(
            "rows_in_flight",
            "several rows of a thread at the same columns, loaded before the first sum",
            _file("n5"),
            sets={"n_warps": 4, "chunks": 4, "row_threads": 128, "rows_in_flight": 2},
            opens={"rows_in_flight": ROWS_OF_A_THREAD},
            traits=frozenset({ROWS_IN_FLIGHT, HELD_BACK}),
        ),
        StepEntry(
            "loads_in_flight",
            "predicates instead of branches, so that ptxas keeps the loads of all rows together",
            _file("n6"),
            sets={"n_warps": 4, "chunks": 2, "row_threads": 32},
            traits=frozenset({HELD_BACK}),
        ),
        StepEntry(
            "one_exchange",
            "mean and M2 of a row in one exchange, with two blocks of 64 registers per thread",
            _file("n7"),
            sets={"n_warps": 16, "chunks": 8, "row_threads": 512, "rows_in_flight": 0},
            opens={
                "n_warps": (8, 16),
                "chunks": (HALF_CHUNKS,),
                "row_threads": (256, 512),
                "rows_in_flight": (),
            },
            traits=frozenset({HALF_OF_AN_SM, HELD_BACK}),
            drops=frozenset({ROWS_IN_FLIGHT}),
            parent="n4",
        ),
        StepEntry(
            "y_leaves_l2",
            "y by streaming stores, so that L2 has room for x, weight and bias",
            _file("n8"),
            sets={"n_warps": 8, "chunks": 4, "row_threads": 256},
            opens={
                "n_warps": (4, 8, 16),
                "chunks": (2, 4, HALF_CHUNKS),
                "row_threads": (64, 128, 256, 512),
            },
            traits=frozenset({HELD_BACK}),
        ),
        StepEntry(
            "y_of_narrow_rows_leaves_l2",
            "y of narrow rows by streaming stores, and rows of several warps without head and tail",
            _file("n9"),
            sets={"n_warps": 4, "chunks": 2, "row_threads": 64, "rows_in_flight": 1},
            opens={
                "n_warps": (4, 8, 16, 32),
                "chunks": _CHUNKS,
                "row_threads": _ROW_THREADS,
                "rows_in_flight": ROWS_OF_A_THREAD,
            },
            traits=frozenset({ROWS_IN_FLIGHT, HELD_BACK}),
            drops=frozenset({HALF_OF_AN_SM}),
            parent="n6",
        ),
        StepEntry(
            "row_fills_registers",
            "rows that just fill the registers of a thread block, without shares and predicates",
            _file("n10"),
            sets={"n_warps": 8, "chunks": 4, "row_threads": 256, "rows_in_flight": 0},
            opens={
                "n_warps": (4, 8, 16),
                "chunks": (2, 4, HALF_CHUNKS),
                "row_threads": (64, 128, 256, 512),
                "rows_in_flight": (),
            },
            traits=frozenset({HALF_OF_AN_SM, HELD_BACK}),
            drops=frozenset({ROWS_IN_FLIGHT}),
            parent="n8",
        ),
    ),
    targets=_TARGETS,
    kernels=MappingProxyType({"layer_norm_kernel": ARGUMENTS}),
    header=_HEADER,
    dtypes=_DTYPES,
    computing=frozenset(),
    simulated_budget=5_500_000,
    matrix_budget=6_000_000,
)

RMS_NORM = Family(
    name="rms_norm",
    title="RMS norm along rows",
    operation=OPERATION,
    prefix="r",
    rank=16,
    config=RmsNormKernelConfig,
    base=MappingProxyType({**_BY_WIDTH, "rows_in_flight": 0}),
    entries=(
        StepEntry(
            "no_mean",
            "layer norm without the mean: one sum per row",
            _file("r1"),
            parent="n4",
            opens={"n_warps": (4, 8, 16, 32), "chunks": _CHUNKS, "row_threads": _ROW_THREADS},
            traits=frozenset({VECTOR_LOADS, ROW_IN_REGISTERS, ROW_THREADS}),
        ),
        StepEntry(
            "rows_of_rms_in_flight",
            "several rows of a thread at the same columns, and no branch behind their loads",
            _file("r2"),
            sets={"n_warps": 4, "chunks": 2, "row_threads": 32, "rows_in_flight": 2},
            opens={"rows_in_flight": ROWS_OF_A_THREAD},
            traits=frozenset({ROWS_IN_FLIGHT, HELD_BACK}),
        ),
        StepEntry(
            "y_of_rms_leaves_l2",
            "y by streaming stores, and rows of several warps without a head and a tail",
            _file("r3"),
            sets={"n_warps": 8, "chunks": 4, "row_threads": 256, "rows_in_flight": 1},
            traits=frozenset({HELD_BACK}),
        ),
        StepEntry(
            "row_of_rms_fills_registers",
            "rows of RMS norm that just fill the registers, without predicates",
            _file("r4"),
            traits=frozenset({HELD_BACK}),
        ),
    ),
    targets=_TARGETS,
    kernels=MappingProxyType({"rms_norm_kernel": ARGUMENTS}),
    header=_HEADER,
    dtypes=_DTYPES,
    computing=frozenset(),
    simulated_budget=1_700_000,
    matrix_budget=900_000,
)
