"""A look at a file of PTX that runs nothing: its kernels, and the parts that are refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from flash_helpers import gpu
from flash_helpers.console.symbols import demangled
from flash_helpers.ptx.errors import LaunchError, PtxSyntaxError, UnsupportedInstruction
from flash_helpers.ptx.read.module import Function
from flash_helpers.ptx.run.kernel import Kernel
from flash_helpers.ptx.run.loading import load_ptx


def check_file(path: Path) -> tuple[str, bool]:
    """The kernels of a file as text, and whether any part of one is refused.

    Raises PtxError for a file that is no complete PTX, OSError for one that cannot be read.
    """
    module = load_ptx(path)
    count = len(module.kernels)
    lines = [f"{path}: {module.module.target}, {count} kernel{'' if count == 1 else 's'}"]
    any_refused = False
    for name in module.kernels:
        lines += ["", demangled(name)]
        try:
            kernel = module.kernel(name)
            lines += [f"  {line}" for line in _described(kernel)]
            refused = [*_refused(kernel)]
        except (PtxSyntaxError, LaunchError) as error:
            refused = [str(error)]
        any_refused |= bool(refused)
        lines += [f"  {line}" for line in refused or ["refused: nothing"]]
    return "\n".join(lines) + "\n", any_refused


def _described(kernel: Kernel) -> Iterator[str]:
    function = kernel.function
    yield f"parameters: {_parameters(function)}"
    bound = function.directives.get("reqntid") or function.directives.get("maxntid")
    threads = f"at most {math.prod(bound)}" if bound else f"at most {gpu.MAX_THREADS}"
    yield f"threads per block: {threads}"
    if compiled := function.directives.get("reqnctapercluster"):
        yield f"blocks per cluster: {math.prod(compiled)}"
    most = gpu.SMEM_BYTES.get(gpu.capability_of(kernel.module.target))
    limit = "" if most is None else f" of {most:,}"
    yield f"static shared memory per block: {kernel.static_shared_bytes:,}{limit} bytes"


def _parameters(function: Function) -> str:
    told = []
    for parameter in function.parameters:
        is_structure = parameter.type == "b8" and parameter.size > 1
        told.append(f"{parameter.size} bytes" if is_structure else parameter.type)
    return ", ".join(told) or "none"


def _refused(kernel: Kernel) -> Iterator[str]:
    """One line for each kind of instruction that is refused, at its first place."""
    places = {i.line: i.location for i in kernel.function.instructions}
    times: Counter[str] = Counter()
    first: dict[str, UnsupportedInstruction] = {}
    for refusal in kernel.refusals():
        times[refusal.opcode] += 1
        first.setdefault(refusal.opcode, refusal)
    for opcode, refusal in first.items():
        place = places.get(refusal.line)
        also = f" ({times[opcode]} times)" if times[opcode] > 1 else ""
        yield f"refused: {refusal}{f', {place}' if place else ''}{also}"
