"""Poison spreads through every instruction to what depends on it, and through those that move bytes
to nothing else: the same instruction is run with other values in the poisoned bytes."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from ptx_snippets import entry
from test_mistakes import one_of_each, spoilt

from flash_helpers.gpu import WARP
from flash_helpers.ptx import DeviceMemory, Kernel, UnsupportedInstruction, load_ptx
from flash_helpers.ptx.read.flow import BARRIERS
from flash_helpers.ptx.read.module import Register
from flash_helpers.ptx.read.registers import CARRY
from flash_helpers.ptx.run.count.tally import Tally
from flash_helpers.ptx.run.execute.spread import Spread
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.instructions.operations import bind
from flash_helpers.ptx.run.machine import Launch, Machine
from flash_helpers.ptx.run.memory.regions import ALL
from flash_helpers.ptx.run.watch.faults import FaultLog

LANES = 2 * WARP
DECLARATIONS = """
.reg .pred %p<6>;
.reg .b16 %h<8>;
.reg .b32 %r<40>;
.reg .b64 %rd<24>;
.reg .b128 %q<2>;
"""

# One line each; %x0 is never a source, so that results are told from sources.
MOVES = """
mov.b32 %r0, %r1;
mov.b64 %rd0, {%r1, %r2};
mov.b64 {%r0, %r3}, %rd1;
mov.b64 {%r0, _}, %rd1;
mov.b32 %r0, {%h1, %h2};
mov.b32 {%h0, %h3}, %r1;
mov.b64 {%h0, %h3, %h4, %h5}, %rd1;
mov.b128 %q0, {%rd1, %rd2};
mov.b128 {%rd0, %rd3}, %q1;
mov.pred %p0, %p1;
@%p1 mov.b32 %r0, %r1;
@!%p1 mov.b32 %r0, 7;
and.b32 %r0, %r1, %r2;
and.b32 %r0, %r1, 0xff00;
or.b64 %rd0, %rd1, %rd2;
or.b32 %r0, %r1, 0x00ff00ff;
xor.b32 %r0, %r1, %r2;
not.b32 %r0, %r1;
not.pred %p0, %p1;
and.pred %p0, %p1, %p2;
and.pred %p0, %p1, !%p2;
or.pred %p0, !%p1, %p2;
xor.pred %p0, %p1, %p2;
shl.b32 %r0, %r1, 8;
shl.b64 %rd0, %rd1, 40;
shr.u32 %r0, %r1, 16;
shr.s32 %r0, %r1, 24;
shr.s32 %r0, %r1, 90;
shr.u32 %r0, %r1, -1;
prmt.b32 %r0, %r1, %r2, 0x5410;
prmt.b32 %r0, %r1, %r2, 0x7632;
prmt.b32 %r0, %r1, 0, 0x4340;
cvt.u32.u16 %r0, %h1;
cvt.s32.s16 %r0, %h1;
cvt.u16.u32 %h0, %r1;
cvt.u32.u64 %r0, %rd1;
cvt.s64.s32 %rd0, %r1;
cvt.u32.u8 %r0, %r1;
cvt.s32.s8 %r0, %r1;
selp.b32 %r0, %r1, %r2, %p1;
selp.b64 %rd0, %rd1, 0, %p1;
selp.b32 %r0, %r1, 0, !%p1;
shfl.sync.bfly.b32 %r0|%p0, %r1, 5, 31, -1;
shfl.sync.up.b32 %r0|%p0, %r1, 3, 0, -1;
shfl.sync.down.b32 %r0, %r1, 3, 0x181f, -1;
shfl.sync.idx.b32 %r0, %r1, 17, 31, -1;
movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r1;
""".strip().splitlines()

OTHERS = """
add.u32 %r0, %r1, %r2;
@%p1 add.u32 %r0, %r1, %r2;
@!%p1 add.u32 %r0, %r0, %r2;
sub.s64 %rd0, %rd1, %rd2;
mul.lo.s32 %r0, %r1, 3;
mul.wide.u32 %rd0, %r1, %r2;
mad.lo.s32 %r0, %r1, %r2, %r3;
mad.wide.u16 %r0, %h1, %h2, %r1;
add.cc.u32 %r0, %r1, %r2;
addc.u32 %r0, %r1, %r2;
addc.cc.u32 %r0, %r1, %r2;
subc.cc.u32 %r0, %r1, 1;
madc.hi.u32 %r0, %r1, %r2, %r3;
mad.lo.cc.u32 %r0, %r1, %r2, %r3;
add.f32 %r0, %r1, %r2;
fma.rn.f32 %r0, %r1, %r2, %r3;
max.f32 %r0, %r1, %r2;
min.s32 %r0, %r1, %r2;
add.rn.f16x2 %r0, %r1, %r2;
fma.rn.f16x2 %r0, %r1, %r2, %r3;
max.bf16x2 %r0, %r1, %r2;
fma.rn.relu.bf16x2 %r0, %r1, %r2, %r3;
neg.f16x2 %r0, %r1;
ex2.approx.f16x2 %r0, %r1;
ex2.approx.ftz.f32 %r0, %r1;
rcp.approx.f32 %r0, %r1;
testp.finite.f32 %p0, %r1;
setp.lt.s32 %p0, %r1, %r2;
setp.lt.s32 %p0|%p3, %r1, %r2;
setp.lt.and.s32 %p0, %r1, %r2, %p1;
setp.gt.or.f32 %p0|%p3, %r1, %r2, !%p1;
setp.gt.xor.u32 %p0|%p3, %r1, 100, %p1;
setp.lt.f16x2 %p0|%p3, %r1, %r2;
setp.lt.and.f16x2 %p0|%p3, %r1, %r2, %p1;
setp.ne.or.b16 %p0, %h1, %h2, %p1;
set.lt.and.u32.s32 %r0, %r1, %r2, %p1;
set.lt.f16x2.f16x2 %r0, %r1, %r2;
cvt.rn.f16x2.f32 %r0, %r1, %r2;
cvt.rn.bf16x2.f32 %r0, %r1, 0f3F800000;
cvt.rn.f16.f32 %h0, %r1;
cvt.f32.f16 %r0, %h1;
cvt.rzi.s32.f32 %r0, %r1;
cvt.sat.u8.s32 %r0, %r1;
cvt.pack.sat.u8.s32.b32 %r0, %r1, %r2, %r3;
lop3.b32 %r0, %r1, %r2, %r3, 0x6a;
prmt.b32 %r0, %r1, %r2, 0xba98;
prmt.b32 %r0, %r1, %r2, %r3;
prmt.b32.f4e %r0, %r1, %r2, %r3;
shl.b32 %r0, %r1, 5;
shl.b32 %r0, %r1, %r2;
shr.s32 %r0, %r1, 13;
shr.u64 %rd0, %rd1, 21;
shf.l.wrap.b32 %r0, %r1, %r2, %r3;
bfe.u32 %r0, %r1, 8, 8;
bfi.b32 %r0, %r1, %r2, 8, 8;
brev.b32 %r0, %r1;
popc.b32 %r0, %r1;
bfind.u32 %r0, %r1;
dp4a.u32.u32 %r0, %r1, %r2, %r3;
slct.b32.s32 %r0, %r1, %r2, %r3;
slct.f32.f32 %r0, %r1, %r2, %r3;
cvta.shared.u64 %rd0, %rd1;
isspacep.shared %p0, %rd1;
shfl.sync.idx.b32 %r0|%p0, %r1, %r2, 31, -1;
shfl.sync.bfly.b32 %r0, %r1, 1, %r2, -1;
vote.sync.any.pred %p0, %p1, -1;
vote.sync.all.pred %p0, !%p1, -1;
vote.sync.ballot.b32 %r0, %p1, -1;
match.any.sync.b32 %r0, %r1, -1;
match.all.sync.b32 %r0|%p0, %r1, -1;
redux.sync.add.s32 %r0, %r1, -1;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r0,%r8,%r9,%r10}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%r7,%r11,%r12,%r13};
mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r0,%r8,%r9,%r10}, {%r1,%r2}, {%r5}, {%r7,%r11,%r12,%r13};
mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r0,%r8}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%r7,%r11};
mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%r0,%r8,%r9,%r10}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%r7,%r11,%r12,%r13};
mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%rd0,%rd3}, {%rd1}, {%rd2}, {%rd4,%rd5};
mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r0,%r8,%r9,%r10,%r20,%r21,%r22,%r23}, {%r1,%r2}, {%r5,%r6}, {%r7,%r11,%r12,%r13,%r30,%r31,%r32,%r33};
mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 {%r0,%r8,%r9,%r10}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%r7,%r11,%r12,%r13};
mma.sync.aligned.m16n8k64.row.col.s32.s4.u4.s32 {%r0,%r8,%r9,%r10}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%r7,%r11,%r12,%r13};
mma.sync.aligned.m8n8k32.row.col.s32.s4.u4.s32 {%r0,%r8}, {%r1}, {%r5}, {%r7,%r11};
mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.xor.popc {%r0,%r8,%r9,%r10}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%r7,%r11,%r12,%r13};
mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%rd0,%rd8,%rd9,%rd10}, {%rd1,%rd2,%rd3,%rd4,%rd5,%rd6,%rd7,%rd11}, {%rd12,%rd13,%rd14,%rd15}, {%rd16,%rd17,%rd18,%rd19};
wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%r0,%r8,%r9,%r10,%r20,%r21,%r22,%r23}, {%r1,%r2,%r3,%r4,%r1,%r2,%r3,%r4}, {%r5,%r6,%r5,%r6,%r5,%r6,%r5,%r6}, {%r7,%r11,%r12,%r13,%r30,%r31,%r32,%r33};
cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r2;
cvt.rn.f16x2.e4m3x2 %r0, %h1;
cvt.rn.satfinite.e5m2x2.f16x2 %h0, %r1;
""".strip().splitlines()  # noqa: E501


def machine_of(kernel: Kernel) -> Machine:
    """Two warps with some memory of each kind."""
    launch = Launch(
        grid=(1, 1, 1),
        block=(LANES, 1, 1),
        shared_bytes=4096,
        dynamic_bytes=0,
        parameters=np.zeros(512, np.uint8),
        symbols={},
        local_bytes=64,
        granule=1,
        has_flags=False,
        target="sm_80",
        written_for="sm_80",
    )
    log, tally = FaultLog(kernel.program, keep_going=True), Tally(kernel.program)
    geometry = Geometry(((0, 0, 0),), LANES)
    return Machine(kernel.program, launch, geometry, DeviceMemory(), log, tally)


def spread_of(machine: Machine) -> Spread:
    spread = Spread(machine)
    machine.poison.begin = partial(lambda spread: lambda: spread, spread)
    return spread


class Trial:
    """One instruction on random registers, of which random bytes are poisoned."""

    def __init__(self, instruction: str, seed: int) -> None:
        kernel = load_ptx(entry(instruction, declarations=DECLARATIONS)).kernel("k")
        self.machine, program = machine_of(kernel), kernel.program
        self.action, _ = bind(self.machine, program.instructions[0])
        self.random = np.random.default_rng(seed)
        self.registers = {
            name: self.machine.register(Register(name)) for name in program.registers
        } | {CARRY: self.machine.carry.view(np.uint8)[::4]}
        self.before = {}
        for name, register in self.registers.items():
            whole = register.nbytes if name != CARRY else LANES
            octets = self.random.integers(0, 256, (whole // LANES, LANES), dtype=np.uint8)
            # zeros and ones decide alone in logic
            octets[self.random.random(octets.shape) < 0.2] = self.random.choice([0, 255])
            self.before[name] = octets & 1 if self.is_flag(name) else octets

    def is_flag(self, name: str) -> bool:
        return name.startswith("%p") or name == CARRY

    def result(self, octets: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Bytes of all registers after the action, from those before."""
        self.fill(octets)
        with np.errstate(all="ignore"):
            self.action.all()
        return self.bytes_now()

    def fill(self, octets: dict[str, np.ndarray]) -> None:
        for name, register in self.registers.items():
            if self.is_flag(name):
                register[...] = octets[name][0]
            else:
                columns = np.ascontiguousarray(octets[name].T)
                register[...] = columns.view(register.dtype).reshape(register.shape)

    def bytes_now(self) -> dict[str, np.ndarray]:
        return {
            name: np.ascontiguousarray(register).view(np.uint8).reshape(LANES, -1).T.copy()
            for name, register in self.registers.items()
        }

    def poisoned(
        self, share: float, with_flags: bool = True
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Poisons that share of the bytes; which bytes were poisoned, and which are afterwards.
        with_flags: of predicates too."""
        poison = self.machine.poison
        before = {}
        for name, octets in self.before.items():
            chance = share if with_flags or not self.is_flag(name) else 0.0
            before[name] = self.random.random(octets.shape) < chance
        for name, which in before.items():
            poison.put(name, ALL, np.where(which, 1 << 60, 0))
        self.fill(self.before)
        with np.errstate(all="ignore"):
            spread_of(self.machine).tracked(0, self.action).all()
        after = {}
        for name, octets in self.before.items():
            codes = poison.of(name, ALL)
            after[name] = np.zeros(octets.shape, bool) if codes is None else codes != 0
        return before, after

    def changes(self, poisoned: dict[str, np.ndarray], times: int) -> dict[str, np.ndarray]:
        """Which bytes change with the values of the poisoned ones."""
        right = self.result(self.before)
        changed = {name: np.zeros(octets.shape, bool) for name, octets in right.items()}
        for _ in range(times):
            other = {}
            for name, octets in self.before.items():
                new = self.random.integers(0, 256, octets.shape, dtype=np.uint8)
                new = new & 1 if self.is_flag(name) else new
                other[name] = np.where(poisoned[name], new, octets)
            for name, octets in self.result(other).items():
                changed[name] |= octets != right[name]
        return changed


@pytest.mark.parametrize("share", [0.02, 0.3])
@pytest.mark.parametrize("instruction", [*MOVES, *OTHERS])
def test_what_depends_on_poison_is_poisoned(instruction, share):
    trial = Trial(instruction, seed=3)
    before, after = trial.poisoned(share)
    changed = trial.changes(before, times=40)
    assert any(which.any() for which in changed.values())
    for name, which in changed.items():
        missed = which & ~after[name]
        assert not missed.any(), (name, np.argwhere(missed)[:5])


@pytest.mark.parametrize("instruction", MOVES)
def test_moved_bytes_are_poisoned_only_where_they_depend_on_poison(instruction):
    trial = Trial(instruction, seed=5)
    # A choice between equal bytes depends on nothing, and is poisoned with the predicate.
    before, after = trial.poisoned(0.3, with_flags=".pred" in instruction)
    changed = trial.changes(before, times=100)
    for name, which in after.items():
        assert (which == changed[name]).all(), (name, np.argwhere(which != changed[name])[:5])


def codes_after(instruction: str, *poisoned: tuple[str, int]) -> dict[str, set[int]]:
    """Which lanes of each register are poisoned, after some lanes of its sources were. poisoned:
    register and lane."""
    trial = Trial(instruction, seed=0)
    poison = trial.machine.poison
    for name, lane in poisoned:
        poison.put(name, slice(lane, lane + 1), np.full((1, 1), 1 << 60))
    spread_of(trial.machine).tracked(0, trial.action).all()
    found = {name: np.flatnonzero(codes.any(axis=0)) for name, codes in poison.registers.items()}
    return {name: set(lanes.tolist()) for name, lanes in found.items()}


MMA = next(line for line in OTHERS if line.startswith("mma.sync.aligned.m16n8k16.row.col.f32"))
ROW_3, COLUMN_4 = set(range(12, 16)), {2, 6, 10, 14, 18, 22, 26, 30}


def test_a_row_of_a_poisons_a_row_of_d():
    # %r1 holds rows g, %r2 rows g + 8; lane 14 has g = 3.
    assert codes_after(MMA, ("%r3", 14)) == {"%r3": {14}, "%r0": ROW_3, "%r8": ROW_3}
    assert codes_after(MMA, ("%r4", 14)) == {"%r4": {14}, "%r9": ROW_3, "%r10": ROW_3}


def test_a_column_of_b_poisons_a_column_of_d():
    # Lane 17 has column 4: of D the first of the two columns that lanes with t = 2 hold.
    found = codes_after(MMA, ("%r6", 17 + WARP))
    lanes = {lane + WARP for lane in COLUMN_4}
    assert found == {"%r6": {17 + WARP}, "%r0": lanes, "%r9": lanes}


def test_an_element_of_c_poisons_that_of_d():
    assert codes_after(MMA, ("%r11", 9)) == {"%r11": {9}, "%r8": {9}}


def test_halves_of_c_and_d_are_told_apart():
    instruction = next(line for line in OTHERS if ".f16.f16.f16.f16" in line)
    trial = Trial(instruction, seed=0)
    codes = np.array([[0], [0], [1 << 60], [0]])
    trial.machine.poison.put("%r7", slice(5, 6), codes)
    spread_of(trial.machine).tracked(0, trial.action).all()
    assert (trial.machine.poison.of("%r0", 5) != 0).tolist() == [False, False, True, True]
    assert trial.machine.poison.of("%r8", 5) is None


def test_a_warp_without_poison_stays_clean():
    assert codes_after("redux.sync.add.s32 %r0, %r1, -1;", ("%r1", 40)) == {
        "%r1": {40},
        "%r0": set(range(32, 64)),
    }


def test_what_is_overwritten_is_clean_again():
    assert codes_after("add.u32 %r0, %r1, 1;", ("%r0", 40)) == {}
    assert codes_after("mov.u32 %r0, %tid.x;", ("%r0", 40)) == {}
    assert codes_after("@%p1 mov.u32 %r0, %r1;", ("%p1", 3)) == {"%p1": {3}, "%r0": {3}}


def test_no_instruction_however_wrong_is_a_traceback_when_its_registers_are_poisoned():
    choose, ran = random.Random(1), 0
    for kernel, instruction in one_of_each():
        ret = next(i for i in kernel.function.instructions if i.name == "ret" and not i.guard)
        for wrong in [instruction, *spoilt(kernel, instruction)]:
            if wrong.name in BARRIERS and not wrong.has("warp"):
                continue
            if wrong is not instruction and choose.random() > 0.03:
                continue
            function = replace(kernel.function, instructions=(wrong, ret), labels={})
            machine = machine_of(Kernel(kernel.module, function))
            with np.errstate(all="ignore"):
                action, _ = bind(machine, wrong)
            spread = spread_of(machine)
            for name in machine.program.registers:
                machine.poison.put(name, ALL, np.full((1, LANES), 1 << 60))
            try:
                with np.errstate(all="ignore"):
                    spread.tracked(0, action).all()
            except UnsupportedInstruction:
                continue
            except Exception as error:
                raise AssertionError(f"{wrong.opcode} {wrong.operands}") from error
            ran += 1
    assert ran > 150
