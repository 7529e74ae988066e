"""From a file with machine code to one record an instruction."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from flash_helpers.kernel_configs import Config, config_from_symbol, find_config
from flash_helpers.sass.read import flow, opcodes
from flash_helpers.sass.read.cache import DisassemblyCache, cache_folder, cubin_digest, entry_key
from flash_helpers.sass.read.containers import Member, cubins_of, read_bytes
from flash_helpers.sass.read.control import CONTROL_BIT, decode_control
from flash_helpers.sass.read.disassembler import Disassembler, find_disassembler, require_new_enough
from flash_helpers.sass.read.disassembly import Disassembly, Request, batches, disassemble
from flash_helpers.sass.read.elf import Cubin, CubinKernel, cubin_capability, read_cubin
from flash_helpers.sass.read.records import (
    INSTRUCTION_BYTES,
    Control,
    Instruction,
    Kernel,
    Operation,
    SassError,
)

LIBRARY = "libflash_attention.so"
_SHOWN_NAMES = 40  # of kernels in an error

Progress = Callable[[int, int], None]


@contextmanager
def progress_bar(description: str) -> Iterator[Progress]:
    """A bar on stderr, if that is a terminal, to be given as `progress` to `load_kernels`."""
    with tqdm(desc=description, unit="kernel", leave=False, disable=None) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance


def list_kernels(
    path: Path,
    architecture: str | None = None,
    kernels: Callable[[str], bool] | None = None,
) -> list[tuple[str, str]]:
    """Architecture and symbol of the kernels in a file, without disassembling.

    architecture, kernels: as for `load_kernels`, which also tells what is raised.
    """
    with cubins_of(path) as members:
        wanted = _choose(path, members, architecture, kernels)
    return [(cubin.architecture, kernel.symbol) for _, cubin, chosen in wanted for kernel in chosen]


def load_kernels(
    path: Path,
    architecture: str | None = None,
    kernels: Callable[[str], bool] | None = None,
    *,
    cache: DisassemblyCache | None = None,
    progress: Progress | None = None,
) -> list[Kernel]:
    """The kernels in a cubin, fatbin, object file, library or program.

    architecture: such as "sm_90"; None takes all. kernels: which symbols to take; None takes all.
    cache: None takes the one in the user's cache folder, see `cache.cache_folder`. progress: called
    with the number of kernels that are read and of all, while they are being disassembled.

    Raises SassError: for a file that is none of these, is damaged or holds no kernel, for an
    architecture or kernels that are not in it, and for a disassembler that is missing or too old.
    """
    with cubins_of(path) as members:
        wanted = _choose(path, members, architecture, kernels)
        return _load(wanted, cache or DisassemblyCache(cache_folder(os.environ)), progress)


def read_member(member: Member) -> Cubin:
    """The headers of a cubin of a file. Raises SassError."""
    return read_cubin(read_bytes(member.path), member.origin, member.architecture)


Choice = tuple[Member, Cubin, Sequence[CubinKernel]]


def library_kernels(
    architecture: str,
    configs: Iterable[Config] | None = None,
    *,
    cache: DisassemblyCache | None = None,
    progress: Progress | None = None,
) -> dict[Config, Kernel]:
    """Forward kernels of the installed library, by config, sorted; configs: None takes all.

    Raises SassError as `load_kernels` does, when the library is not there, and for configs that it
    does not hold.
    """
    path = installed_library()
    wanted = None if configs is None else set(configs)

    def chosen(symbol: str) -> bool:
        config = find_config(symbol)
        return config is not None and (wanted is None or config in wanted)

    found = {
        config_from_symbol(kernel.symbol): kernel
        for kernel in load_kernels(path, architecture, chosen, cache=cache, progress=progress)
    }
    if missing := sorted((wanted or set()) - set(found)):
        raise SassError(
            f"{path} holds no {', '.join(config.short_form() for config in missing)}: "
            "`python -m flash_attention` lists what is built"
        )
    return dict(sorted(found.items()))


def installed_library() -> Path:
    """The kernel library of the installed package flash_attention, which is not imported.

    Raises SassError if it is not there.
    """
    spec = importlib.util.find_spec("flash_attention")
    path = Path(spec.origin).parent / LIBRARY if spec and spec.origin else None
    if path is None or not path.is_file():
        raise SassError(
            "the kernel library is not there: build it with `pip install . ./py` in the repository"
        )
    return path


def _choose(
    path: Path,
    members: Sequence[Member],
    architecture: str | None,
    kernels: Callable[[str], bool] | None,
) -> list[Choice]:
    capability = None if architecture is None else _capability(architecture)
    cubins = [
        (member, cubin)
        for member in members
        if capability is None or cubin_capability(read_bytes(member.path)) == capability
        if (cubin := read_member(member)).kernels
        if architecture in (None, cubin.architecture)
    ]
    if not cubins:
        there = sorted({cubin.architecture for m in members if (cubin := read_member(m)).kernels})
        if not there:
            raise SassError(f"{path} holds device code, but no kernel")
        raise SassError(f"{path} holds no kernel for {architecture}, only for {', '.join(there)}")
    wanted = [
        (member, cubin, [k for k in cubin.kernels if kernels is None or kernels(k.symbol)])
        for member, cubin in cubins
    ]
    wanted = [choice for choice in wanted if choice[2]]
    if not wanted:
        names = sorted({kernel.symbol for _, cubin in cubins for kernel in cubin.kernels})
        shown = ", ".join(names[:_SHOWN_NAMES])
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        raise SassError(f"{path} holds none of the kernels asked for, only {shown}{more}")
    return wanted


def _capability(architecture: str) -> int:
    match = re.fullmatch(r"sm_(\d+)[a-z]?", architecture)
    if match is None:
        raise SassError(f"{architecture!r} is no architecture: write it as in sm_90")
    return int(match[1])


def _load(
    wanted: Sequence[Choice], cache: DisassemblyCache, progress: Progress | None
) -> list[Kernel]:
    nvdisasm = find_disassembler("nvdisasm")
    keys: dict[Request, str] = {}
    for member, cubin, kernels in wanted:
        require_new_enough(nvdisasm, cubin.compiler.name, cubin.compiler.version, cubin.origin)
        digest = cubin_digest(read_bytes(member.path))
        for kernel in kernels:
            key = entry_key(digest, kernel.symbol, str(nvdisasm))
            keys[Request(member, cubin, kernel)] = key
    found = {
        request: disassembly
        for request, key in keys.items()
        if (disassembly := cache.read(key, request.kernel.code)) is not None
    }
    missing = [request for request in keys if request not in found]
    for request, disassembly in _disassemble(nvdisasm, missing):
        cache.write(keys[request], disassembly)
        found[request] = disassembly
        if progress is not None:
            progress(len(found), len(keys))
    if missing:
        cache.prune()
    return [_with_analysis(request, found[request]) for request in keys]


def _disassemble(
    nvdisasm: Disassembler, requests: Sequence[Request]
) -> Iterator[tuple[Request, Disassembly]]:
    """The disassemblies in batches, as they come."""
    workers = len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory(prefix="merged-") as folder,
        ThreadPoolExecutor(workers) as pool,
    ):
        running = {
            pool.submit(disassemble, nvdisasm, batch, Path(folder)): batch
            for batch in batches(requests, workers)
        }
        try:
            for future in as_completed(running):
                yield from zip(running[future].requests, future.result(), strict=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _with_analysis(request: Request, disassembly: Disassembly) -> Kernel:
    """The kernel with all that follows from its instructions."""
    cubin, kernel = request.cubin, request.kernel
    operations = disassembly.operations
    blocks, loops = flow.control_flow(operations)
    block_of = [
        block.index for block in blocks for _ in range(block.start, block.end, INSTRUCTION_BYTES)
    ]
    loop_of: dict[int, int] = {}
    for loop in sorted(loops, key=lambda loop: loop.depth):
        loop_of.update(dict.fromkeys(loop.blocks, loop.index))
    capability = cubin.capability
    controls: dict[int, Control] = {}
    pipes: dict[str, str] = {}
    costs: dict[tuple[str, str], float | None] = {}
    instructions = []
    for operation, block, live, source, ptx_line in zip(
        operations,
        block_of,
        disassembly.live,
        disassembly.sources,
        disassembly.ptx_lines,
        strict=True,
    ):
        opcode, operands, encoding = operation.opcode, operation.operands, operation.encoding
        scheduling = encoding >> CONTROL_BIT
        if scheduling not in controls:
            controls[scheduling] = decode_control(encoding)
        if opcode not in pipes:
            pipes[opcode] = opcodes.pipe(opcode, capability)
        if (opcode, operands) not in costs:
            costs[opcode, operands] = opcodes.cost(opcode, operands, capability)
        instructions.append(
            Instruction(
                operation.address,
                encoding,
                operation.predicate,
                opcode,
                operands,
                operation.target,
                controls[scheduling],
                live,
                source,
                ptx_line,
                block,
                loop_of.get(block),
                pipes[opcode],
                costs[opcode, operands],
            )
        )
    return Kernel(
        symbol=kernel.symbol,
        architecture=cubin.architecture,
        origin=cubin.origin,
        compiler=cubin.compiler,
        resources=replace(
            kernel.resources,
            spill_store_bytes=local_bytes(operations, "STL"),
            spill_load_bytes=local_bytes(operations, "LDL"),
        ),
        instructions=tuple(instructions),
        blocks=blocks,
        loops=loops,
        ptx=cubin.ptx,
    )


_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def local_bytes(operations: Iterable[Operation], base: str) -> int:
    """Bytes that the instructions "STL" or "LDL" of a listing move for a thread, each counted once,
    as ptxas counts spills; those that never execute are left out."""
    return sum(
        next((_WIDTHS[part] for part in operation.opcode.split(".") if part in _WIDTHS), 4)
        for operation in operations
        if operation.base == base and flow.may_execute(operation)
    )
