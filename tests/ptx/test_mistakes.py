"""Whose mistake it is: what the simulator does not know is refused by name, for that instruction;
a mistake in the simulator itself comes through as it is."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ptx_snippets import entry

from flash_helpers.ptx import Kernel, PtxError, UnsupportedInstruction, load_ptx
from flash_helpers.ptx.read.module import (
    Address,
    Arguments,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from flash_helpers.ptx.read.types import OPCODE_TYPES
from flash_helpers.ptx.run.instructions import operations
from flash_helpers.ptx.run.instructions.forms import Form, by_name

KERNELS = Path(__file__).parent / "kernels"
MISTAKES = (KeyError, TypeError, ValueError, IndexError, StopIteration, AttributeError)
LINE = 8  # of the first instruction of `entry`, with one line of declarations


def launch(body: str) -> None:
    text = entry(body, declarations=".reg .b32 %a, %b;")
    load_ptx(text).kernel("k").launch(grid=1, block=32)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_while_an_instruction_is_bound_is_not_called_unsupported(monkeypatch, mistake):
    def build(machine, instruction):
        raise mistake("ours")

    broken = by_name([Form("add", build, (3,), ("u32",))])
    monkeypatch.setitem(operations.FORMS, "add", broken["add"])
    with pytest.raises(mistake, match="ours"):
        launch("add.u32 %a, %a, 1;")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_while_an_instruction_runs_is_not_called_unsupported(monkeypatch, mistake):
    def compute(a):
        raise mistake("ours")

    (form,) = operations.FORMS["popc"]["b32",]
    broken = replace(form, build=lambda m, i: replace(form.build(m, i), compute=compute))
    monkeypatch.setitem(operations.FORMS, "popc", by_name([broken])["popc"])
    with pytest.raises(mistake, match="ours"):
        launch("popc.b32 %a, %b;")


@pytest.mark.parametrize(
    ("instruction", "reason"),
    [
        ("frobnicate.s32 %a, %a, 1;", ""),
        ("shr.f16 %a, %a, 1;", ""),
        ("bar.none 0;", ""),
        ("st.shared [%a], %a;", ""),
        ("ld.shared.b32 {%a, %a}, [%a];", ""),
        ("ex2.approx.ftz.f32 %a;", ""),
        ("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32 {%a}, {%a}, {%a}, {%a};", ""),
        ("add.s32.twice %a, %a, 1;", r"the modifier \.twice is not known"),
        ("add.b64x3 %a, %a, 1;", r"the modifier \.b64x3 is not known"),
        ("add.e5m2 %a, %a, 1;", r"the type \.e5m2 is not known"),
        ("add.b32 %a, %a, 1;", r"the type \.b32 is not known"),
        ("fma.rn.f32.bf16 %a, %a, %a, %a;", r"the type \.f32\.bf16 is not known"),
        ("mul.wide.u64 %a, %a, 1;", "a product of 128 bits"),
        ("add %a, %a, 1;", "it has no type"),
        ("add.u32 %a, %a;", "2 operands where 3 are due"),
        ("max.f32 %a, %a;", "2 operands where 3 or 4 are due"),
        ("add.u32 %a, [%a], 1;", "an operand of kind address where a value is due"),
        ("add.u32 {%a, %b}, %a, 1;", "a register is expected"),
        ("add.u32 %a, !%b, 1;", "only a predicate has a complement"),
        ("mov.b32 %a, {%a, %a, %a};", r"3 parts of a \.b32"),
        ("setp.u32 %a, %a, 1;", "one of eq, ne, .* is due"),
        ("mov.u32 %a, nowhere;", "unknown symbol nowhere"),
        ("bar.sync 0, 32, 1;", "3 operands"),
        ("bra.somehow HERE; HERE:", r"the modifier \.somehow is not known"),
    ],
)
def test_what_is_not_known_is_refused_by_name_and_line(instruction, reason):
    with pytest.raises(UnsupportedInstruction, match=f"PTX line {LINE}: .*{reason}") as caught:
        launch(instruction)
    assert (caught.value.line, caught.value.opcode) == (LINE, instruction.split()[0])


# -- instructions that somebody wrote wrongly ------------------------------------------------------


def one_of_each() -> Iterator[tuple[Kernel, Instruction]]:
    """Every instruction of the small kernels that is no control flow, once for each opcode."""
    seen = set()
    for path in sorted(KERNELS.glob("*.ptx")):
        module = load_ptx(path)
        for name in module.kernels:
            kernel = module.kernel(name)
            for instruction in kernel.function.instructions:
                if instruction.name not in ("bra", "brx") and instruction.opcode not in seen:
                    seen.add(instruction.opcode)
                    yield kernel, instruction


def other_operands(kernel: Kernel) -> list[Operand]:
    """One of each kind, and a register of each type."""
    registers = list({t: Register(n) for n, t in kernel.function.registers.items()}.values())
    first, last = registers[0], registers[-1]
    return [
        *registers,
        *(replace(register, negated=True) for register in registers),
        *(Vector((first,) * n) for n in range(5)),
        *(Address(base) for base in (first, last, Immediate(8), Symbol("nowhere"))),
        Immediate(3),
        Immediate(0x3F800000, 32),
        Symbol("nowhere"),
        Special("%tid.x"),
        Sink(),
        Pair(first, last),
        Arguments(()),
    ]


def spoilt(kernel: Kernel, instruction: Instruction) -> Iterator[Instruction]:
    """The instruction with one operand, or one part of its opcode, missing, added or another."""
    operands, modifiers = instruction.operands, instruction.modifiers
    others = other_operands(kernel)
    for n in range(len(operands)):
        for new in ((), *((other,) for other in others)):
            yield replace(instruction, operands=(*operands[:n], *new, *operands[n + 1 :]))
    for other in others:
        yield replace(instruction, operands=(*operands, other))
    for n in range(len(modifiers) + 1):
        for new in ("", "x2", "wide", "sat", "rz", "v4", "cc", *sorted(OPCODE_TYPES)):
            parts = (*modifiers[:n], *([new] if new else []), *modifiers[n + 1 :])
            opcode = ".".join((instruction.name, *parts))
            types = tuple(part for part in parts if part in OPCODE_TYPES)
            yield replace(instruction, opcode=opcode, modifiers=parts, types=types)


def test_no_instruction_however_wrong_is_a_traceback():
    choose = random.Random(0)
    tried = refused = 0
    for kernel, instruction in one_of_each():
        ret = next(i for i in kernel.function.instructions if i.name == "ret" and not i.guard)
        for wrong in spoilt(kernel, instruction):
            if choose.random() > 0.08:
                continue
            function = replace(kernel.function, instructions=(wrong, ret), labels={})
            arguments = [bytes(v.size) for v in function.parameters]
            tried += 1
            try:
                Kernel(kernel.module, function).launch(
                    grid=1, block=32, args=arguments, keep_going=True
                )
            except PtxError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{wrong.opcode} {wrong.operands}") from error
    # some are right all the same: a register of another type that is wide enough, say
    assert tried > 1000 and refused > tried / 2


def test_numbers_that_do_not_fit_their_type_are_no_warning():
    with np.errstate(all="raise"):
        launch(".reg .f16 %h; mov.b16 %h, 0x3c00; add.f16 %h, %h, 0f7F000000;")
