"""A toy operation with a family of one config, which is two kernels that share a buffer: what the
registry and the runtime must be able to hold besides attention.

y = factor * x², each row backwards. The first kernel writes the squares into the buffer, the second
one takes them from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.gpu import Device
from flash_helpers.registry.call import FLOAT, POINTER, Address, Buffer, Call, Launch, StructLayout
from flash_helpers.registry.config import Config, element, number
from flash_helpers.registry.family import Family, StepEntry
from flash_helpers.registry.operation import GBPS, Operation
from flash_helpers.registry.problem import Element, Problem, Role, Strides, Tensor, option

COLUMNS = 32
SQUARES = "squares"
_AXES = ("rows", "columns")


@dataclass(frozen=True)
class SquaresBackwards(Problem):
    """The toy's problem."""

    operation: ClassVar[str] = "squares_backwards"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({"x": _AXES, "y": _AXES})

    rows: int = option("rows of x")
    factor: float = option("of the squares", 1.0, metavar="X")
    dtype: Element = Element.FP32

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        shape = (self.rows, COLUMNS)
        roles = {"x": Role.IN, "y": Role.OUT}
        return tuple(Tensor(n, shape, self.dtype, role, _AXES) for n, role in roles.items())

    @property
    def operations(self) -> int:
        return 2 * self.rows * COLUMNS

    @classmethod
    def posed(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: Element, *, factor: float = 1.0
    ) -> SquaresBackwards:
        rows, columns = shapes["x"]
        if columns != COLUMNS or shapes.get("y", shapes["x"]) != shapes["x"] or not rows:
            raise ValueError(f"x and y are (rows, {COLUMNS}): not {shapes}")
        return cls(rows, factor, dtype)

    def call_options(self) -> dict[str, Any]:
        return {"factor": self.factor}


class ToySupports:
    """All problems, contiguous."""

    alignment = 4
    options: Mapping[str, Any] = MappingProxyType({})
    sizes: Mapping[str, int] = MappingProxyType({})
    smallest = 1

    def alignment_of(self, tensor: Tensor) -> int:
        return self.alignment

    def lacking(self, problem: SquaresBackwards) -> dict[str, tuple[str, str]]:
        return {}

    def refusal(self, problem: SquaresBackwards, kernel: str) -> str:
        return ""

    def layout_refusal(self, tensor: Tensor, strides: tuple[int, ...]) -> str:
        return "" if strides == tensor.strides else f"{tensor.name} is not contiguous"

    def described(self) -> dict[str, str]:
        return {"rows": "any"}

    def corners(self) -> Iterator[SquaresBackwards]:
        yield SquaresBackwards(1)


_SQUARE = StructLayout("SquareArgs", MappingProxyType({"X": POINTER, "squares": POINTER}))
_REVERSE = StructLayout(
    "ReverseArgs", MappingProxyType({"squares": POINTER, "Y": POINTER, "factor": FLOAT})
)


@dataclass(frozen=True)
class ToyConfig(Config):
    """Its kernels are named z1_fp32__square and z1_fp32__reverse."""

    example: ClassVar[str] = "z1_fp32"

    toy: int = number("z")
    dtype: Element = element()

    @property
    def family(self) -> Family[Any]:
        return TOY_FAMILY

    @property
    def n_threads(self) -> int:
        return COLUMNS

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def supports(self) -> ToySupports:
        return ToySupports()

    def check(self) -> None:
        pass

    def most_runs(self, problem: SquaresBackwards, device: Device) -> int:
        return 1

    def call(self, problem: SquaresBackwards, strides: Strides, device: Device) -> Call:
        def launch(function: str, values: Mapping[str, Any], **tensors: str) -> Launch:
            layout = self.family.kernels[function]
            return Launch(
                self.kernels[function],
                (problem.rows, 1, 1),
                COLUMNS,
                0,
                layout,
                values,
                tuple(Address(layout.offset(n), tensor) for n, tensor in tensors.items()),
            )

        return Call(
            (
                launch("square", {}, X="x", squares=SQUARES),
                launch("reverse", {"factor": (problem.factor,)}, squares=SQUARES, Y="y"),
            ),
            (Buffer(SQUARES, problem.tensor("x").bytes, zeroed=False),),
        )


TOY = Operation(
    name=SquaresBackwards.operation,
    title="squares, backwards",
    problem=SquaresBackwards,
    small=SquaresBackwards(1),
    usual=SquaresBackwards(8),
    debugged=SquaresBackwards(1),
    counted=SquaresBackwards(1),
    counted_within=SquaresBackwards(1),
    swept="rows",
    measured=SquaresBackwards,
    measured_at=(1, 2),
    distributions=MappingProxyType({"normal": "normal"}),
    libraries=MappingProxyType({"pytorch": "PyTorch"}),
    metric=GBPS,
    families=(),
    simulated_ns=1.0,
)

TOY_FAMILY = Family(
    name="toy",
    title="two kernels that share a buffer",
    operation=TOY,
    prefix="z",
    rank=99,
    config=ToyConfig,
    base=MappingProxyType({}),
    entries=(StepEntry("first", "the first of them", "toy.cuh"),),
    targets=("80",),
    kernels=MappingProxyType({"square": _SQUARE, "reverse": _REVERSE}),
    header=PurePosixPath("src/include/flash_attention.cuh"),
    dtypes=(Element.FP32,),
)

_HEAD = ".version 8.7\n.target sm_80\n.address_size 64\n"
# Row and column of the thread, and the byte offset of its element.
_PLACE = """\
.reg .b32 %row, %column, %i, %back;
.reg .b64 %from, %to, %offset;
.reg .f32 %v, %factor;
mov.u32 %row, %ctaid.x;
mov.u32 %column, %tid.x;
"""
_BODIES = {
    "square": f"""\
.param .align 8 .b8 args[{_SQUARE.size}])
{{
{_PLACE}
ld.param.u64 %from, [args];
ld.param.u64 %to, [args+8];
mad.lo.u32 %i, %row, 32, %column;
mul.wide.u32 %offset, %i, 4;
add.u64 %from, %from, %offset;
add.u64 %to, %to, %offset;
ld.global.f32 %v, [%from];
mul.rn.f32 %v, %v, %v;
st.global.f32 [%to], %v;
ret;
}}
""",
    "reverse": f"""\
.param .align 8 .b8 args[{_REVERSE.size}])
{{
{_PLACE}
ld.param.u64 %from, [args];
ld.param.u64 %to, [args+8];
ld.param.f32 %factor, [args+16];
sub.u32 %back, 31, %column;
mad.lo.u32 %i, %row, 32, %back;
mul.wide.u32 %offset, %i, 4;
add.u64 %from, %from, %offset;
mad.lo.u32 %i, %row, 32, %column;
mul.wide.u32 %offset, %i, 4;
add.u64 %to, %to, %offset;
ld.global.f32 %v, [%from];
mul.rn.f32 %v, %v, %factor;
st.global.f32 [%to], %v;
ret;
}}
""",
}


def toy_ptx(config: ToyConfig, function: str) -> str:
    """The PTX of a kernel, under the symbol of z1::function<config>."""
    names = "".join(f"{len(name)}{name}" for name in ("z1", function))
    argument = config.short_form()
    symbol = f"_ZN{names}I{len(argument)}{argument}EEvv"
    return f"{_HEAD}\n.visible .entry {symbol}({_BODIES[function]}"
