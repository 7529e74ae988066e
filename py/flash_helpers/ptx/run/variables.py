"""Variables of a module in global and constant memory, and their initial values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from flash_helpers.ptx.read.module import Module, Variable
from flash_helpers.ptx.run.memory.regions import ARENA_BASE, DeviceMemory

_CODE_BASE = 0x7B00_0000_0000
"""Address of the first function: they can be stored and compared, not read."""
_CODE_SIZE = 16


def reachable(module: Module, names: Iterable[str]) -> dict[str, Variable]:
    """The module's variables of these names, and those whose address is in an initial value of one
    of these, in the order of the file. Raises PtxSyntaxError for one that cannot be read."""
    found, todo = set(), list(names)
    while todo:
        variable = module.variables.get(name := todo.pop())
        if variable is None or name in found:
            continue
        if variable.problem is not None:
            raise variable.problem
        found.add(name)
        todo.extend(address.symbol.name for address in variable.addresses)
    return {name: v for name, v in module.variables.items() if name in found}


def place_variables(
    module: Module,
    variables: Iterable[Variable],
    memory: DeviceMemory,
    before: dict[str, int],
    others: Mapping[str, int],
) -> dict[str, int]:
    """Allocates variables of global and constant memory; returns their addresses, those of the
    module's functions, and `others`: addresses of symbols that initial values may name.

    `before`: addresses of the module's variables that were allocated before. They keep their
    values, and the module's new ones are added.
    """
    code = {name: _CODE_BASE + _CODE_SIZE * i for i, name in enumerate(module.functions)}
    wanted = [v for v in variables if v.space in ("global", "const")]
    new = [v for v in wanted if v.name not in before or v is not module.variables.get(v.name)]
    placed = {v.name: memory.allocate(max(v.size, 1), v.alignment) for v in new}
    symbols = {**code, **others, **before, **placed}
    for variable in new:
        if variable.initial is not None:
            initialise(variable, symbols, memory)
        if variable is module.variables.get(variable.name):
            before[variable.name] = placed[variable.name]
    return symbols


def initialise(variable: Variable, symbols: Mapping[str, int], memory: DeviceMemory) -> None:
    """Writes the initial value of a variable to global memory. `symbols`: addresses by name."""
    data = bytearray(variable.initial or b"")
    for stored in variable.addresses:
        address = (symbols[stored.symbol.name] + stored.symbol.offset) >> stored.shift
        part = address & ((1 << 8 * stored.size) - 1)
        data[stored.offset : stored.offset + stored.size] = part.to_bytes(stored.size, "little")
    offset = symbols[variable.name] - ARENA_BASE
    memory.words(1)[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
