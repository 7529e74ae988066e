"""Functions that device code calls and no module defines: assert, printf, malloc and free.

PTX Writer's Guide to Interoperability, "System Calls"; CUDA C++ Programming Guide, "Assertion",
"Formatted Output", "Dynamic Global Memory Allocation and Operations". All other calls that are left
(`flash_helpers.ptx.read.calls`) are refused when a thread reaches them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from flash_helpers.ptx.errors import AssertError, OutOfBoundsError
from flash_helpers.ptx.read.calls import called
from flash_helpers.ptx.read.module import Instruction, Symbol
from flash_helpers.ptx.run.instructions.access import Port
from flash_helpers.ptx.run.instructions.c_format import c_format
from flash_helpers.ptx.run.instructions.forms import Form
from flash_helpers.ptx.run.machine import Action, Machine
from flash_helpers.ptx.run.memory.regions import WINDOW_SIZE, WINDOWS, Selection

_LONGEST = 1 << 16  # bytes of a string

# Lanes and their arguments, one array for each, to the results.
Function = Callable[["_Caller", np.ndarray, Sequence[np.ndarray]], np.ndarray | None]


class _Caller:
    """A call, and the memory that it can see."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.position = machine.position

    def bytes_at(self, address: int, lane: int, size: int | None = None) -> bytes:
        """Bytes at a generic address as a lane sees it: a given number, or those up to a zero.
        Reports an address outside all memory, and returns no bytes then."""
        machine, space, offset = self.machine, "global", address
        for name, start in WINDOWS.items():
            if start <= address < start + WINDOW_SIZE:
                space, offset = name, address - start
        region, length = machine.regions[space], size or 1
        where = np.array([min(offset, (1 << 62))])
        if not region.inside(where, length)[0]:
            detail, thread = region.outside(offset, length), machine.geometry.thread(lane)
            machine.log.report(OutOfBoundsError, detail, self.position, thread, address)
            return b""
        start = int(region.offsets(where, np.array([lane]))[0])
        if size is None:
            limits = region.extent(offset)
            assert limits is not None
            length = min(limits[1] - offset, _LONGEST)
        data = region.words(1)[start : start + length].tobytes()
        return data if size is not None else data.partition(b"\0")[0]

    def text_at(self, address: int, lane: int) -> str:
        """A string."""
        return self.bytes_at(address, lane).decode(errors="replace")


def _assert(caller: _Caller, lanes: np.ndarray, arguments: Sequence[np.ndarray]) -> None:
    """__assertfail(expression, file, line, function, size of a character)."""
    first, given = int(lanes[0]), [int(values[0]) for values in arguments]
    expression, file, function = (caller.text_at(given[i], first) for i in (0, 1, 3))
    machine = caller.machine
    machine.log.report(
        AssertError,
        f"`{expression}` at {file}:{given[2]} in {function}",
        caller.position,
        machine.geometry.thread(first),
        count=lanes.size,
    )


def _printf(caller: _Caller, lanes: np.ndarray, arguments: Sequence[np.ndarray]) -> np.ndarray:
    """vprintf(format, arguments): lanes print in the order of their numbers. Returns the number of
    arguments printed."""
    counts = np.zeros(lanes.size, np.uint32)
    output = caller.machine.launch.output or sys.stdout
    for i, (lane, form, buffer) in enumerate(zip(lanes, *arguments, strict=True)):
        end = 0

        def next_argument(
            size: int, i: int = i, lane: int = int(lane), buffer: int = int(buffer)
        ) -> bytes:
            nonlocal end
            start = -(-end // size) * size
            end = start + size
            counts[i] += 1
            return caller.bytes_at(buffer + start, lane, size).ljust(size, b"\0")

        def string(address: int, lane: int = int(lane)) -> bytes:
            return caller.bytes_at(address, lane) if address else b"(null)"

        text = c_format(caller.bytes_at(int(form), int(lane)), next_argument, string)
        output.write(text.decode(errors="replace"))
    return counts


def _malloc(caller: _Caller, lanes: np.ndarray, arguments: Sequence[np.ndarray]) -> np.ndarray:
    memory = caller.machine.memory
    return np.array([memory.heap_allocate(int(size)) for size in arguments[0]], np.uint64)


def _free(caller: _Caller, lanes: np.ndarray, arguments: Sequence[np.ndarray]) -> None:
    machine = caller.machine
    for lane, address in zip(lanes, arguments[0], strict=True):
        if address and not machine.memory.heap_free(int(address)):
            machine.log.report(
                OutOfBoundsError,
                "free of what malloc has not returned, or of what is free already",
                caller.position,
                machine.geometry.thread(lane),
                int(address),
            )


# By name: bytes of the result, 0 if there is none, and of each argument.
_FUNCTIONS: dict[str, tuple[Function, int, tuple[int, ...]]] = {
    "__assertfail": (_assert, 0, (8, 8, 4, 8, 8)),
    "vprintf": (_printf, 4, (8, 8)),
    "malloc": (_malloc, 8, (8,)),
    "free": (_free, 0, (8,)),
}


def _call(machine: Machine, instruction: Instruction) -> Action:
    """A call that could not be replaced by the called function's instructions."""
    if instruction.refusal:
        raise machine.unsupported(instruction.refusal)
    target, given = called(instruction)
    name = target.name if isinstance(target, Symbol) else ""
    if name not in _FUNCTIONS:
        raise machine.unsupported(f"{name} is not defined in this module")
    function, result_size, sizes = _FUNCTIONS[name]
    known = {v.name: v.size for v in machine.program.function.variables if v.space == "local"}
    due = [size for size in (result_size, *sizes) if size]
    variables = [v for v in given if isinstance(v, Symbol)]
    if len(variables) != len(given) or [known.get(v.name) for v in variables] != due:
        words = " and ".join(map(str, due))
        raise machine.unsupported(f"its result and arguments have {words} bytes")
    caller = _Caller(machine)
    ports = [Port(machine, instruction, size) for size in due]
    places = [machine.symbol(variable) for variable in variables]

    def run_some(selection: Selection) -> None:
        lanes = machine.lanes_of(selection)
        at = [np.full(lanes.size, place) for place in places]
        first = 1 if result_size else 0
        arguments = [
            port.read("local", where, selection)
            for port, where in zip(ports[first:], at[first:], strict=True)
        ]
        result = function(caller, lanes, arguments)
        if result is not None:
            ports[0].write("local", at[0], selection, result)

    return machine.from_some(run_some)


FORMS = (Form("call", _call, (), ignores="uni"),)
