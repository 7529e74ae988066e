"""Kernels of one wgmma of any type, with inputs whose sums are exact, and the right D."""

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flash_helpers.ptx import DeviceMemory, load_ptx
from flash_helpers.ptx.run.memory.descriptors import CHUNK, MatrixOperand
from flash_helpers.ptx.run.numbers.rounding import to_fp8

WARPGROUP = 128
_M, _IMAGE, _B_AT = 64, 16384, 8192
_PER_ROW = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32, "b1": 256}
"""Elements of 32 bytes."""
_SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}


def packed(matrix: np.ndarray, type_name: str) -> np.ndarray:
    """The bytes of each row of small integers."""
    matrix = np.ascontiguousarray(matrix)
    if type_name == "b1":
        return np.packbits(matrix.astype(np.uint8), axis=1, bitorder="little")
    if type_name in ("e4m3", "e5m2"):
        stored = to_fp8(matrix.astype(np.float32), type_name)
    elif type_name == "bf16":
        stored = (matrix.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        names = {"f16": np.float16, "tf32": np.float32, "s8": np.int8, "u8": np.uint8}
        stored = matrix.astype(names[type_name])
    return stored.view(np.uint8).reshape(len(matrix), -1)


@dataclass(frozen=True)
class WgmmaCase:
    """One instruction. `types`: those of D, A and B. `selector`: of a sparse A; None if it is
    dense. `swizzle`: bytes. `a_mn`, `b_mn`: whether the matrix is MN-major. `unit`: B is a unit
    matrix, so that D shows A. `low_bits`: those bits of tf32 are set that count for nothing."""

    types: tuple[str, str, str]
    n: int = 16
    selector: int | None = None
    in_registers: bool = False
    swizzle: int = 0
    a_mn: bool = False
    b_mn: bool = False
    signs: str = "1, 1"
    saturates: bool = False
    unit: bool = False
    low_bits: bool = False

    @property
    def name(self) -> str:
        parts = [*self.types, f"n{self.n}"]
        parts += [] if self.selector is None else [f"sp{self.selector}"]
        parts += [f"swizzle{self.swizzle}"] if self.swizzle else []
        names = ("in_registers", "a_mn", "b_mn", "saturates", "unit", "low_bits")
        parts += [name for name in names if getattr(self, name)]
        return "-".join(parts if self.signs == "1, 1" else [*parts, self.signs.replace(", ", "")])

    @property
    def k(self) -> int:
        return _PER_ROW[self.types[1]] * (1 if self.selector is None else 2)

    # -- matrices ----------------------------------------------------------------------------------

    def _integers(self, seed: int, shape: tuple[int, int], type_name: str) -> np.ndarray:
        low, high = {"b1": (0, 2), "u8": (0, 9)}.get(type_name, (-4, 5))
        return np.random.default_rng([seed, *self.name.encode()]).integers(low, high, shape)

    @cached_property
    def stored_a(self) -> np.ndarray:
        """A as it is stored, (64, K or K / 2)."""
        return self._integers(1, (_M, _PER_ROW[self.types[1]]), self.types[1])

    @cached_property
    def places(self) -> np.ndarray:
        """Of each stored element of a sparse A, its number in its group."""
        rng = np.random.default_rng([2, *self.name.encode()])
        if self.types[1] == "tf32":
            return rng.integers(0, 2, self.stored_a.shape)
        pairs = np.array(list(itertools.combinations(range(4), 2)))
        return pairs[rng.integers(0, 6, (_M, self.k // 4))].reshape(self.stored_a.shape)

    @cached_property
    def a(self) -> np.ndarray:
        """A, (64, K)."""
        if self.selector is None:
            return self.stored_a
        a = np.zeros((_M, self.k), np.int64)
        stored, group = (1, 2) if self.types[1] == "tf32" else (2, 4)
        for i, j in np.ndindex(*self.stored_a.shape):
            a[i, j // stored * group + self.places[i, j]] = self.stored_a[i, j]
        return a

    @cached_property
    def b(self) -> np.ndarray:
        """The transpose of B, (N, K)."""
        if self.unit:
            return np.eye(self.n, self.k, dtype=np.int64)
        return self._integers(3, (self.n, self.k), self.types[2])

    @cached_property
    def before(self) -> np.ndarray:
        """D before the product. Integers are near to their limits."""
        before = self._integers(4, (_M, self.n), "s8")
        if self.types[0] == "s32":
            return np.where(before < 0, -(1 << 31) - before - 1, (1 << 31) - 1 - before)
        return before

    @cached_property
    def expected(self) -> np.ndarray:
        """D after it."""
        sign = np.prod([int(sign) for sign in self.signs.split(",")])
        found = self.before + sign * (self.a @ self.b.T)
        if self.types[0] != "s32":
            return found
        if self.saturates:
            return np.clip(found, -(1 << 31), (1 << 31) - 1)
        return found.astype(np.int32).astype(np.int64)

    # -- where they lie ----------------------------------------------------------------------------

    def _descriptor(self, start: int, mn: bool, rows: int, chunks: int) -> int:
        if self.swizzle:
            leading, stride = 0, 8 * self.swizzle
        elif mn:
            leading, stride = 16 * rows, 128
        else:
            leading, stride = 128, 128 * chunks
        fields = (start >> 4, leading >> 4, stride >> 4, _SWIZZLES[self.swizzle])
        return sum(field << at for field, at in zip(fields, (0, 16, 32, 62), strict=True))

    def _place(
        self, image: np.ndarray, start: int, matrix: np.ndarray, type_name: str, mn: bool
    ) -> int:
        """Puts a matrix into the image of shared memory; returns its descriptor."""
        octets = packed(matrix, type_name)
        chunks = octets.shape[1] // CHUNK
        bits = self._descriptor(start, mn, len(matrix), chunks)
        addresses = MatrixOperand(len(matrix), not mn, chunks).addresses(bits)
        if mn:
            octets = packed(matrix.T, type_name)
        image.reshape(-1, CHUNK)[addresses // CHUNK] = octets.reshape(*addresses.shape, CHUNK)
        return bits

    def _lanes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Warp, g and t of each thread."""
        lane = np.arange(WARPGROUP)
        return lane // 32, lane % 32 // 4, lane % 4

    def _places_of_d(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column of each element of D that a thread holds, (N / 2, threads)."""
        warp, g, t = self._lanes()
        i = np.arange(self.n // 2)[:, None]
        return 16 * warp + g + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * t + i % 2

    @property
    def d_registers(self) -> int:
        return self.n // (4 if self.types[0] == "f16" else 2)

    def _registers_of_d(self) -> np.ndarray:
        values = self.before[self._places_of_d()]
        if self.types[0] != "f16":
            return values.astype(np.int32 if self.types[0] == "s32" else np.float32).view(np.uint32)
        halves = values.astype(np.float16).view(np.uint16).astype(np.uint32)
        return halves[::2] | halves[1::2] << np.uint32(16)

    def _registers_of_a(self) -> np.ndarray:
        warp, g, t = self._lanes()
        words = packed(self.stored_a, self.types[1]).view(np.uint32)
        return np.stack([words[16 * warp + g + 8 * (i % 2), t + 4 * (i // 2)] for i in range(4)])

    def _metadata(self) -> np.ndarray:
        """The word of each thread; of those that are not asked for, any."""
        warp, g, t = self._lanes()
        fields, bits, together = self.places, 2, 8
        if self.types[1] == "tf32":
            fields, bits, together = np.where(self.places, 0b1110, 0b0100), 4, 4
        row = 16 * warp + g
        if _PER_ROW[self.types[1]] == 32:
            halves = [(row + 8 * (t % 2), 16 * (t // 2)), (row + 8 * (t % 2), 16 * (t // 2) + 8)]
        else:
            halves = [(row, together * (t % 2)), (row + 8, together * (t % 2))]
        word = np.zeros(WARPGROUP, np.int64)
        for half, (rows, first) in enumerate(halves):
            for j in range(together):
                word |= fields[rows, first + j] << (16 * half + bits * j)
        if together * bits == 16 and _PER_ROW[self.types[1]] < 32:
            word = np.where(t // 2 == self.selector, word, 0x4E4E4E4E)
        return word.astype(np.uint32)[None]

    @cached_property
    def _inputs(self) -> tuple[np.ndarray, int, int]:
        """The bytes that the kernel reads, and the descriptors of A and B."""
        image = np.zeros(_IMAGE, np.uint8)
        a = self._place(image, 0, self.stored_a, self.types[1], self.a_mn)
        b = self._place(image, _B_AT, self.b, self.types[2], self.b_mn)
        if self.low_bits:
            image.view(np.uint32)[:] |= 0x1FFF
        registers = [self._registers_of_d(), self._registers_of_a()]
        if self.selector is not None:
            registers.append(self._metadata())
        return np.concatenate([image, *(x.reshape(-1).view(np.uint8) for x in registers)]), a, b

    # -- the kernel --------------------------------------------------------------------------------

    def text(self) -> str:
        _, a_bits, b_bits = self._inputs
        d_type, a_type, b_type = self.types
        names = [f"%d{i}" for i in range(self.d_registers)] + [f"%a{i}" for i in range(4)]
        names += [] if self.selector is None else ["%meta"]
        loads = [f"ld.global.b32 {x}, [%at+{_IMAGE + 512 * i}];" for i, x in enumerate(names)]
        a = "{%a0, %a1, %a2, %a3}" if self.in_registers else "%da"
        sparse = "" if self.selector is None else f"%meta, {self.selector}, "
        literals = [] if d_type == "s32" else [self.signs]
        if a_type in ("f16", "bf16"):
            literals += [] if self.in_registers else [f"{self.a_mn:d}"]
            literals += [f"{self.b_mn:d}"]
        end = ".and.popc" if a_type == "b1" else ""
        opcode = f"wgmma.mma_async{'.sp' if sparse else ''}.sync.aligned.m64n{self.n}k{self.k}"
        opcode += f"{'.satfinite' if self.saturates else ''}.{d_type}.{a_type}.{b_type}{end}"
        d = ", ".join(names[: self.d_registers])
        operands = ", ".join([f"{{{d}}}", a, f"%db, {sparse}1", *literals])
        copies = [
            f"ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%from+{i}];\n"
            f"st.shared.v4.b32 [%to+{i}], {{%v0, %v1, %v2, %v3}};"
            for i in range(0, _IMAGE, 16 * WARPGROUP)
        ]
        stores = [f"st.global.b32 [%at+{512 * i}], {names[i]};" for i in range(self.d_registers)]
        return "\n".join(
            [
                ".version 8.7\n.target sm_90a\n.address_size 64",
                ".visible .entry k(.param .align 8 .b8 pointers[16])\n.maxntid 128\n{",
                f".shared .align 1024 .b8 tile[{_IMAGE}];",
                ".reg .b32 %d<128>, %a<4>, %v<4>, %meta, %thread, %tile, %to, %base;",
                ".reg .b64 %in, %out, %at, %from, %da, %db, %wide;",
                "ld.param.u64 %in, [pointers];\nld.param.u64 %out, [pointers+8];",
                "mov.u32 %thread, %tid.x;\nmov.u32 %tile, tile;",
                "mad.lo.u32 %to, %thread, 16, %tile;\nmad.wide.u32 %from, %thread, 16, %in;",
                *copies,
                "fence.proxy.async.shared::cta;\nbar.sync 0;",
                "mad.wide.u32 %at, %thread, 4, %in;",
                *loads,
                "shr.u32 %base, %tile, 4;\ncvt.u64.u32 %wide, %base;",
                f"add.u64 %da, %wide, {a_bits};\nadd.u64 %db, %wide, {b_bits};",
                "wgmma.fence.sync.aligned;",
                f"{opcode} {operands};",
                "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;",
                "mad.wide.u32 %at, %thread, 4, %out;",
                *stores,
                "ret;\n}",
            ]
        )

    @property
    def data(self) -> np.ndarray:
        return self._inputs[0]

    @property
    def out_bytes(self) -> int:
        return 4 * WARPGROUP * self.d_registers

    def matrix(self, octets: np.ndarray) -> np.ndarray:
        """D from the bytes that the kernel has stored."""
        registers = octets.view(np.uint32).reshape(self.d_registers, WARPGROUP)
        if self.types[0] == "f16":
            halves = registers.view(np.float16).reshape(-1, WARPGROUP, 2)
            values = halves.transpose(0, 2, 1).reshape(-1, WARPGROUP)
        else:
            values = registers.view(np.int32 if self.types[0] == "s32" else np.float32)
        found = np.zeros((_M, self.n))
        found[self._places_of_d()] = values
        return found

    def simulated(self) -> np.ndarray:
        """D in the simulator."""
        memory = DeviceMemory()
        out = memory.allocate(self.out_bytes)
        arguments = struct.pack("<2Q", memory.upload(self.data), out)
        load_ptx(self.text()).kernel("k").launch(1, WARPGROUP, args=[arguments], memory=memory)
        return self.matrix(memory.download(out, self.out_bytes, np.uint8))

    def differences(self, found: np.ndarray) -> str:
        """The elements of a D that are not as expected, as text."""
        wrong = [tuple(at) for at in np.argwhere(found != self.expected)]
        shown = [f"D[{i}, {j}] is {found[i, j]:g}, not {self.expected[i, j]}" for i, j in wrong[:8]]
        return f"{len(wrong)} of {found.size}: {'; '.join(shown)}" if wrong else ""


def _kinds() -> Iterator[WgmmaCase]:
    for d, factor in (("f16", "f16"), ("f32", "f16"), ("f32", "bf16"), ("f32", "tf32")):
        yield WgmmaCase((d, factor, factor))
    fp8, integers = ("e4m3", "e5m2"), ("s8", "u8")
    for d, a, b in itertools.product(("f16", "f32"), fp8, fp8):
        yield WgmmaCase((d, a, b))
    for a, b, saturates in itertools.product(integers, integers, (False, True)):
        yield WgmmaCase(("s32", a, b), saturates=saturates)


def _cases() -> Iterator[WgmmaCase]:
    for case in (*_kinds(), WgmmaCase(("s32", "b1", "b1"))):
        yield case
        yield replace(case, in_registers=True)
    for case in _kinds():
        pairs = (0, 1) if case.k <= 16 else (0,)
        for selector, in_registers in itertools.product(pairs, (False, True)):
            yield replace(case, selector=selector, in_registers=in_registers)
    for factor, d in (
        ("f16", "f32"),
        ("bf16", "f32"),
        ("tf32", "f32"),
        ("e4m3", "f32"),
        ("s8", "s32"),
    ):
        case = WgmmaCase((d, factor, factor))
        unit = replace(case, n=case.k, unit=True)
        yield unit
        yield replace(unit, n=2 * case.k, selector=0)
        yield replace(unit, n=2 * case.k, selector=0, in_registers=True)
        for swizzle in (32, 64, 128):
            yield replace(case, swizzle=swizzle)
            if swizzle > 32:
                yield replace(case, swizzle=swizzle, selector=0)
    for factor in ("f16", "bf16"):
        for a_mn, b_mn, swizzle in itertools.product((False, True), (False, True), (0, 128)):
            case = WgmmaCase(("f32", factor, factor), 64, 1, False, swizzle, a_mn, b_mn)
            yield case
            yield replace(case, selector=None)
    for factor in ("f16", "tf32", "e5m2"):
        yield WgmmaCase(("f32", factor, factor), signs="-1, 1")
        yield WgmmaCase(("f32", factor, factor), selector=0, signs="1, -1")
    yield WgmmaCase(("f32", "tf32", "tf32"), low_bits=True)


CASES = tuple(dict.fromkeys(_cases()))
ONE_OF_EACH = (
    *_kinds(),
    WgmmaCase(("s32", "b1", "b1"), in_registers=True),
    *(replace(case, selector=0, in_registers=True) for case in _kinds()),
    *(case for case in CASES if case.types[1] == "f16" and (case.a_mn or case.b_mn)),
    *(case for case in CASES if case.low_bits or (case.swizzle and case.selector == 0)),
)
"""Cases with every type and every way in which A and B may lie."""
