"""Device functions, put in place of the calls to them.

A simulated thread has no call stack: every call becomes a copy of the function's instructions, with
its registers, labels and variables renamed. Parameters and results, which PTX keeps in `.param`
space, become variables in local memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flash_helpers.ptx.errors import UnsupportedInstruction
from flash_helpers.ptx.read.module import (
    Address,
    Arguments,
    Function,
    Instruction,
    Module,
    Operand,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)

_DEPTH = 64
"""Calls nested deeper than this are taken for recursion."""


def without_calls(module: Module, function: Function) -> Function:
    """The function with every call replaced by what it calls.

    Raises UnsupportedInstruction for a call through a pointer, to a function that the module does
    not define (`vprintf`, `malloc`), or a recursive one.
    """
    if not any(i.name == "call" for i in function.instructions):
        return function
    return _Inliner(module).expand(function, 0)


class _Inliner:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.copies = 0

    def expand(self, function: Function, depth: int) -> Function:
        passed = {v.name for v in function.variables if v.space == "param"}
        if depth:
            passed |= {v.name for v in (*function.parameters, *function.results)}
        whole = replace(
            function,
            registers=dict(function.registers),
            variables=[_as_local(v) for v in function.variables],
            instructions=[],
            labels={},
            branch_targets=dict(function.branch_targets),
        )
        starts: list[int] = []
        for instruction in function.instructions:
            start = len(whole.instructions)
            starts.append(start)
            if instruction.name != "call":
                whole.instructions.append(_to_local(instruction, passed, everything=depth > 0))
                continue
            body, after = self.copy(instruction, depth)
            whole.registers.update(body.registers)
            whole.variables.extend(body.variables)
            whole.branch_targets.update(body.branch_targets)
            whole.labels.update((name, start + i) for name, i in body.labels.items())
            whole.instructions.extend(body.instructions)
            whole.labels[after] = len(whole.instructions)
        starts.append(len(whole.instructions))
        whole.labels.update((name, starts[i]) for name, i in function.labels.items())
        return whole

    def copy(self, call: Instruction, depth: int) -> tuple[Function, str]:
        """A renamed copy of what is called, and the label that its returns branch to."""
        names = [o.name for o in call.operands if isinstance(o, Symbol)]
        name = names[0] if names else "a pointer"
        callee = self.module.functions.get(name)
        if callee is None:
            raise _unsupported(call, f"{name} is not defined in this module")
        if depth >= _DEPTH:
            raise _unsupported(call, f"{name} is recursive")
        callee = self.expand(callee, depth + 1)
        formal = [v.name for v in (*callee.results, *callee.parameters)]
        lists = [o.elements for o in call.operands if isinstance(o, Arguments)]
        given = [element for elements in lists for element in elements]
        if len(given) != len(formal):
            raise _unsupported(call, f"{len(given)} arguments and results, {name} {len(formal)}")
        if not all(isinstance(element, Symbol) for element in given):
            raise _unsupported(call, "arguments in registers")
        self.copies += 1
        suffix = f"#{self.copies}"
        own = (*(v.name for v in callee.variables), *callee.labels, *callee.branch_targets)
        symbols = {n: n + suffix for n in own}
        symbols |= {n: g.name for n, g in zip(formal, given, strict=True)}
        after = f"{name}{suffix}.return"
        body = replace(
            callee,
            registers={n + suffix: t for n, t in callee.registers.items()},
            variables=[replace(v, name=v.name + suffix) for v in callee.variables],
            instructions=[_renamed(i, symbols, suffix, after) for i in callee.instructions],
            labels={n + suffix: i for n, i in callee.labels.items()},
            branch_targets={
                n + suffix: tuple(t + suffix for t in labels)
                for n, labels in callee.branch_targets.items()
            },
        )
        return body, after


def _unsupported(call: Instruction, reason: str) -> UnsupportedInstruction:
    return UnsupportedInstruction(call.opcode, call.line, reason)


def _as_local(variable: Variable) -> Variable:
    return replace(variable, space="local") if variable.space == "param" else variable


def _to_local(instruction: Instruction, passed: set[str], *, everything: bool) -> Instruction:
    """Turns an access to a parameter of a device function into one to local memory."""
    if instruction.name not in ("ld", "st") or not instruction.has("param"):
        return instruction
    bases = [o.base for o in instruction.operands if isinstance(o, Address)]
    symbol = next((base.name for base in bases if isinstance(base, Symbol)), None)
    if symbol not in passed and not (everything and symbol is None):
        return instruction
    modifiers = tuple("local" if m == "param" else m for m in instruction.modifiers)
    return replace(instruction, modifiers=modifiers)


def _renamed(
    instruction: Instruction, symbols: Mapping[str, str], suffix: str, after: str
) -> Instruction:
    guard = instruction.guard
    if guard is not None:
        guard = replace(guard, name=guard.name + suffix)
    if instruction.name == "ret":
        return replace(
            instruction, name="bra", modifiers=(), operands=(Symbol(after),), guard=guard
        )
    operands = tuple(_operand(o, symbols, suffix) for o in instruction.operands)
    return replace(instruction, operands=operands, guard=guard)


def _operand(operand: Operand, symbols: Mapping[str, str], suffix: str) -> Operand:
    def renamed(*operands: Operand) -> tuple[Operand, ...]:
        return tuple(_operand(o, symbols, suffix) for o in operands)

    if isinstance(operand, Register):
        return replace(operand, name=operand.name + suffix)
    if isinstance(operand, Symbol):
        return replace(operand, name=symbols.get(operand.name, operand.name))
    if isinstance(operand, Address):
        return replace(operand, base=renamed(operand.base)[0])
    if isinstance(operand, Vector | Arguments):
        return replace(operand, elements=renamed(*operand.elements))
    if isinstance(operand, Pair):
        return Pair(*renamed(operand.first, operand.second))
    return operand
