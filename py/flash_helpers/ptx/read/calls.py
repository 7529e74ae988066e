"""Device functions, inlined instead of the calls to them.

A simulated thread has no call stack: every call becomes a copy of the function's instructions, with
its registers, labels and variables renamed. Parameters and results, which PTX keeps in `.param`
space, become variables in local memory. A call that cannot be replaced stays: it is refused when a
thread reaches it, which often never happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flash_helpers.ptx.read.module import (
    Address,
    Arguments,
    Function,
    Immediate,
    Instruction,
    Module,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    Variable,
    Vector,
)

_DEPTH = 64
"""Calls nested deeper than this stay."""
_COPIED = 50_000
"""So do further calls once so many instructions have been copied: calls that each hold several
others grow without bounds."""


def without_calls(module: Module, function: Function) -> Function:
    """The function with every call replaced by the instructions of the called function.

    A call that cannot be replaced stays, and says why (`Instruction.refusal`): through a pointer,
    recursive, or with other arguments than the function takes. One to a function that the module
    does not define, such as `vprintf`, stays as it is.
    """
    if not any(i.name == "call" for i in function.instructions):
        return function
    return _Inliner(module).expand(function, ())


def called(call: Instruction) -> tuple[Operand | None, list[Operand]]:
    """The function that a call names, and its results and arguments, in this order."""
    lists = [o.elements for o in call.operands if isinstance(o, Arguments)]
    callee = next((o for o in call.operands if not isinstance(o, Arguments)), None)
    return callee, [element for elements in lists for element in elements]


_Passed = tuple[Register | None, Operand, str]
"""A register of a called function, None for a variable; the operand of the call; their type."""


class _CannotInline(Exception):
    """The reason why a call stays."""


class _Inliner:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.copies = 0
        self.copied = 0
        self.recursive_calls = 0
        # Functions without calls, those aside that meet no recursion wherever they are called.
        self.expanded: dict[str, Function] = {}

    def expand(self, function: Function, callers: tuple[str, ...]) -> Function:
        passed = {v.name for v in function.variables if v.space == "param"}
        if callers:
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
            starts.append(len(whole.instructions))
            if instruction.name == "call":
                self.put_in_place(instruction, function, whole, callers)
            else:
                local = _to_local(instruction, passed, everything=bool(callers))
                whole.instructions.append(local)
        starts.append(len(whole.instructions))
        whole.labels.update((name, starts[i]) for name, i in function.labels.items())
        return whole

    def put_in_place(
        self, call: Instruction, caller: Function, whole: Function, callers: tuple[str, ...]
    ) -> None:
        """Appends to `whole` the instructions that replace a call."""
        try:
            callee = self.callee(call, caller, (*callers, caller.name))
        except _CannotInline as reason:
            whole.instructions.append(replace(call, refusal=str(reason)))
            return
        if callee is None:
            whole.instructions.append(call)
            return
        body, after, passed = self.copy(call, callee)
        n_results = len(callee.results)
        if call.guard is not None:
            skips = replace(call.guard, negated=not call.guard.negated)
            target = (Symbol(f"{after}.skip"),)
            whole.instructions.append(
                replace(call, name="bra", modifiers=(), operands=target, guard=skips)
            )
        whole.instructions.extend(
            _move(call, own, given, type_name)
            for own, given, type_name in passed[n_results:]
            if own is not None
        )
        start = len(whole.instructions)
        whole.registers.update(body.registers)
        whole.variables.extend(body.variables)
        whole.branch_targets.update(body.branch_targets)
        whole.labels.update((name, start + i) for name, i in body.labels.items())
        whole.instructions.extend(body.instructions)
        whole.labels[after] = len(whole.instructions)
        whole.instructions.extend(
            _move(call, given, own, type_name)
            for own, given, type_name in passed[:n_results]
            if own is not None
        )
        whole.labels[f"{after}.skip"] = len(whole.instructions)

    def callee(
        self, call: Instruction, caller: Function, callers: tuple[str, ...]
    ) -> Function | None:
        """The called function, without calls; None if the module does not define it. Raises
        _CannotInline."""
        target, given = called(call)
        if not isinstance(target, Symbol):
            raise _CannotInline("calls through pointers are not simulated")
        name = target.name
        callee = self.module.functions.get(name)
        if callee is None:
            return None
        if name in callers:
            self.recursive_calls += 1
            raise _CannotInline(f"{name} calls itself, and recursion is not simulated")
        if len(callers) > _DEPTH:
            raise _CannotInline(f"calls nested deeper than {_DEPTH} are not simulated")
        formal = (*callee.results, *callee.parameters)
        if len(given) != len(formal):
            reason = f"{len(given)} arguments and results, {name} has {len(formal)}"
            raise _CannotInline(reason)
        sizes = {v.name: v.size for v in (*caller.variables, *caller.parameters, *caller.results)}
        for own, element in zip(formal, given, strict=True):
            if own.space == "reg":
                if not isinstance(element, Register | Immediate | Special):
                    raise _CannotInline(f"{own.name} of {name} is a register: give a register")
            elif not isinstance(element, Symbol):
                raise _CannotInline(f"{own.name} of {name} is in .param space: give a variable")
            elif sizes.get(element.name) != own.size:
                size = sizes.get(element.name, "no")
                reason = f"{element.name} has {size} bytes, {own.name} of {name} {own.size}"
                raise _CannotInline(reason)
        if name in self.expanded:
            callee = self.expanded[name]
        else:
            before = self.recursive_calls
            callee = self.expand(callee, callers)
            if self.recursive_calls == before:
                self.expanded[name] = callee
        self.copied += len(callee.instructions)
        if self.copied > _COPIED:
            raise _CannotInline(f"calls of more than {_COPIED} instructions are not simulated")
        return callee

    def copy(self, call: Instruction, callee: Function) -> tuple[Function, str, list[_Passed]]:
        """A renamed copy of the called function, the label that its returns branch to, and what is
        passed."""
        _, given = called(call)
        formal = (*callee.results, *callee.parameters)
        self.copies += 1
        suffix = f"#{self.copies}"
        own = (*(v.name for v in callee.variables), *callee.labels, *callee.branch_targets)
        symbols = {n: n + suffix for n in own}
        passed: list[_Passed] = []
        for variable, element in zip(formal, given, strict=True):
            register = Register(variable.name + suffix) if variable.space == "reg" else None
            passed.append((register, element, variable.type))
            if isinstance(element, Symbol):
                symbols[variable.name] = element.name
        after = f"{callee.name}{suffix}.return"
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
        return body, after, passed


def _move(call: Instruction, target: Operand, source: Operand, type_name: str) -> Instruction:
    """A move in place of a call that passes a value in a register."""
    opcode, types = f"mov.{type_name}", (type_name,)
    operands = (target, source)
    return replace(
        call, opcode=opcode, operands=operands, guard=None, name="mov", modifiers=types, types=types
    )


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
        base, *coordinates = renamed(operand.base, *operand.coordinates)
        assert isinstance(base, Register | Symbol | Immediate)
        return replace(operand, base=base, coordinates=tuple(coordinates))
    if isinstance(operand, Vector | Arguments):
        return replace(operand, elements=renamed(*operand.elements))
    if isinstance(operand, Pair):
        return Pair(*renamed(operand.first, operand.second))
    return operand
