"""Static shared memory of a kernel, in linked code and in code that is not linked yet."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence

from flash_helpers.sass.read.elf import NOTHING, Section, Symbol, relocations
from flash_helpers.sass.read.flow import reach

_CALLS = struct.Struct("<ii")  # symbols of the caller and the callee, which is negative for none


def static_smem(
    sections: Mapping[str, Section],
    symbols: Sequence[Symbol],
    kernel: Symbol,
    reserved: int | None,
) -> int:
    """Bytes of shared memory of a kernel, less those that the driver reserves.

    `reserved`: bytes with which the linker starts the section .nv.shared.<kernel>, 1024 on sm_90. A
    section of fewer bytes holds none of them. None for code that is not linked.
    """
    section = sections.get(f".nv.shared.{kernel.name}", NOTHING)
    if reserved is None:
        return _unlinked_smem(sections, symbols, kernel, section)
    return section.size - reserved if section.size >= reserved else section.size


def _unlinked_smem(
    sections: Mapping[str, Section], symbols: Sequence[Symbol], kernel: Symbol, own: Section
) -> int:
    """Bytes of the variables that the linker will put together: those in the kernel's own section,
    and those that the kernel or a function that it calls names. Variables of templates and of
    inline functions are in no kernel's section. As the linker does it, the largest alignment comes
    first."""
    named = {s.index for s in symbols if s.is_shared and own.index and s.section == own.index}
    at = 0 if named else own.size
    for function in _called(sections, kernel.index):
        if function < len(symbols):
            code = f".text.{symbols[function].name}"
            named.update(symbol for _, symbol in relocations(sections, code))
    variables = [s for s in symbols if s.is_shared and s.index in named]
    for variable in sorted(variables, key=lambda v: -v.value):
        at += -at % max(variable.value, 1) + variable.size
    return at


def _called(sections: Mapping[str, Section], kernel: int) -> set[int]:
    """Symbols of the functions that a kernel calls, directly or not, and its own."""
    callees = defaultdict(list)
    graph = sections.get(".nv.callgraph", NOTHING).data
    for caller, callee in _CALLS.iter_unpack(graph[: len(graph) // _CALLS.size * _CALLS.size]):
        callees[caller].append(callee)
    return {symbol for symbol in reach(kernel, callees.__getitem__) if symbol >= 0}
