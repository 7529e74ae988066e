"""The reader of machine code: from a file to one record per instruction."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flash_helpers.console.progress import Progress
from flash_helpers.gpu import capability_of
from flash_helpers.sass.read import flow, opcodes
from flash_helpers.sass.read.cache import DisassemblyCache, cache_folder, cubin_digest, entry_key
from flash_helpers.sass.read.choice import (
    Found,
    choose,
    listed,
    members_named,
    require_one,
    require_one_member,
)
from flash_helpers.sass.read.containers import Member, cubins_of, read_cubins, warn
from flash_helpers.sass.read.control import decode_control
from flash_helpers.sass.read.cubin import Cubin
from flash_helpers.sass.read.disassembler import (
    Disassembler,
    find_disassemblers,
    require_new_enough,
)
from flash_helpers.sass.read.disassembly import (
    LARGEST_BATCH,
    Batch,
    Disassembly,
    Request,
    batches,
    disassemble,
)
from flash_helpers.sass.read.lines import Chain
from flash_helpers.sass.read.liveness import why_unknown
from flash_helpers.sass.read.records import (
    INSTRUCTION_BYTES,
    Instruction,
    Kernel,
    Operation,
    SassError,
)

_COMPILERS_BANK = 2
_AT_ONCE = 2 * LARGEST_BATCH  # kernels: those of a library take some megabytes each
_REFUSAL = "CUDA architecture"  # in what nvdisasm says of one that it no longer reads

SourcesOf = Callable[[str, Sequence[Chain]], Sequence[Chain]]


class FoundKernel(NamedTuple):
    """A kernel or a device function of a file. `member`: the name of its cubin in the file; "" if
    the file is the cubin. `is_linked`: False for code that is to be linked on the device."""

    architecture: str
    symbol: str
    member: str
    is_function: bool
    is_linked: bool = True

    @property
    def found(self) -> Found:
        """Architecture and symbol, by which kernels are chosen."""
        return self[:2]


def find_kernels(
    path: Path, architecture: str | None = None, names: Iterable[str] = (), member: str = ""
) -> list[FoundKernel]:
    """The kernels and device functions in a file, without disassembling; the arguments and errors
    are those of `iter_kernels`."""
    return [kernel for _, kernel in chosen_kernels(path, architecture, names, member)]


def iter_kernels(
    path: Path,
    architecture: str | None = None,
    names: Iterable[str] = (),
    member: str = "",
    *,
    cache: DisassemblyCache | None = None,
    sources: SourcesOf | None = None,
    progress: Progress | None = None,
) -> Iterator[Kernel]:
    """The kernels and device functions in a cubin, fatbin, object file, library or program, a few
    of them in memory at a time.

    `architecture`: such as "sm_90"; None takes all. `names`: names of the kernels to take, as in
    `choice.matching`; without names, all. `member`: name of a cubin in the file, or a part of it.
    `cache`: None takes the cache in the user's cache folder, see `cache.cache_folder`. `sources`:
    maps a kernel's symbol and the CUDA lines of its instructions to the lines of the records.
    `progress`: called with the number of kernels read and the number of all, during disassembly.

    Raises SassError for a file of another kind, one that is damaged or holds no kernel, for an
    architecture, a member or a name that is not in it, and for a missing disassembler. A
    `SassWarning` at the end names the kernels that no disassembler reads, or that are too new for
    it; it is an error if there are no others.
    """
    chosen = chosen_kernels(path, architecture, names, member)
    return read_chosen(chosen, cache, sources=sources, progress=progress)


def load_kernels(
    path: Path,
    architecture: str | None = None,
    names: Iterable[str] = (),
    member: str = "",
    *,
    cache: DisassemblyCache | None = None,
    sources: SourcesOf | None = None,
    progress: Progress | None = None,
) -> list[Kernel]:
    """All kernels of `iter_kernels`, with its arguments and errors."""
    chosen = chosen_kernels(path, architecture, names, member)
    return [*read_chosen(chosen, cache, sources=sources, progress=progress)]


def load_kernel(
    path: Path,
    architecture: str | None = None,
    names: Iterable[str] = (),
    member: str = "",
    *,
    sources: SourcesOf | None = None,
    progress: Progress | None = None,
) -> Kernel:
    """The one kernel of a file that is asked for; the arguments are those of `iter_kernels`.

    Raises SassError as that does, and also if several kernels are left, even of one name in several
    members.
    """
    chosen = chosen_kernels(path, architecture, names, member)
    require_one(str(path), [kernel.found for _, kernel in chosen])
    require_one_member(str(path), chosen[0][1].symbol, [kernel.member for _, kernel in chosen])
    return next(read_chosen(chosen, sources=sources, progress=progress))


Chosen = Sequence[tuple[Member, FoundKernel]]


def chosen_kernels(
    path: Path, architecture: str | None, names: Iterable[str], member: str
) -> Chosen:
    """The kernels of a file that are asked for, each with the member that holds it, without
    disassembling. The arguments and errors are those of `iter_kernels`.

    A library that was linked on the device holds the unlinked code, too, which never runs: it is
    left out for a kernel that is there linked, unless `member` names it."""
    try:
        capability = None if architecture is None else capability_of(architecture)
    except ValueError as error:
        raise SassError(str(error)) from error
    # all of them only to say what there is
    there = _kernels_of(cubins_of(path, capability)) or _kernels_of(cubins_of(path))
    if not there:
        raise SassError(f"{path} holds device code, but no kernel")
    if member:
        known = list(dict.fromkeys(kernel.member for _, kernel in there))
        members = members_named(str(path), known, member)
        there = [pair for pair in there if pair[1].member in members]
    else:
        linked = {kernel.found for _, kernel in there if kernel.is_linked}
        there = [pair for pair in there if pair[1].is_linked or pair[1].found not in linked]
    wanted = set(choose(str(path), [k.found for _, k in there], architecture, names))
    return [(cubin, kernel) for cubin, kernel in there if kernel.found in wanted]


def _kernels_of(members: Iterable[Member]) -> Chosen:
    return [
        (
            member,
            FoundKernel(
                cubin.architecture,
                kernel.symbol,
                member.name,
                kernel.is_function,
                is_linked=not cubin.relocatable,
            ),
        )
        for member, cubin in read_cubins(members)
        for kernel in cubin.kernels
    ]


def read_chosen(
    chosen: Chosen,
    cache: DisassemblyCache | None = None,
    *,
    sources: SourcesOf | None = None,
    progress: Progress | None = None,
) -> Iterator[Kernel]:
    """The kernels in their order, _AT_ONCE at a time; see `iter_kernels`. Their cubins are read
    again, so that unwanted cubins of a large file take no memory."""
    cache = cache or DisassemblyCache(cache_folder())
    tools = find_disassemblers("nvdisasm")
    cubin_of = functools.lru_cache(maxsize=1)(Member.cubin)
    digest = functools.lru_cache(maxsize=1)(lambda member: cubin_digest(member.read()))
    problems: dict[str, list[str]] = {}  # symbols by what hinders reading them
    refused: dict[str, SassError] = {}  # by architecture
    count = 0
    for start in range(0, len(chosen), _AT_ONCE):
        requests = []
        outcomes: dict[Request, Disassembly | SassError] = {}
        missing: dict[Request, str] = {}  # keys of the cache
        for member, wanted in chosen[start : start + _AT_ONCE]:
            cubin = cubin_of(member)
            kernel = next(k for k in cubin.kernels if k.symbol == wanted.symbol)
            request = Request(member, cubin, kernel)
            requests.append(request)
            key = entry_key(digest(member), kernel.symbol, str(tools[0]))
            kept = cache.read(key, kernel.code)
            known = kept or refused.get(cubin.architecture) or _too_new(tools[0], cubin)
            if known:
                outcomes[request] = known
            else:
                missing[request] = key
        for request, outcome in _disassemble(tools, [*missing]):
            outcomes[request] = outcome
            architecture = request.cubin.architecture
            if isinstance(outcome, Disassembly):
                cache.write(missing[request], outcome)
            elif _REFUSAL in str(outcome):
                refused[architecture] = SassError(f"{architecture} cannot be read: {outcome}")
        if missing:
            cache.prune()
        for done, request in enumerate(requests, start=start + 1):
            outcome = outcomes.pop(request)
            if isinstance(outcome, SassError):
                why = str(refused.get(request.cubin.architecture, outcome))
                problems.setdefault(why, []).append(request.kernel.symbol)
                continue
            if missing and progress is not None:
                progress(done, len(chosen))
            count += 1
            yield _with_analysis(request, outcome, sources)
    if problems and not count:
        raise SassError(next(iter(problems)))
    warn(f"{why}: left out: {listed(symbols)}" for why, symbols in problems.items())


def _too_new(tool: Disassembler, cubin: Cubin) -> SassError | None:
    try:
        require_new_enough(tool, cubin.compiler.name, cubin.compiler.version, cubin.origin)
    except SassError as error:
        return error
    return None


def _disassemble(
    tools: Sequence[Disassembler], requests: Sequence[Request]
) -> Iterator[tuple[Request, Disassembly | SassError]]:
    """The disassemblies in batches, as they come."""
    workers = len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory(prefix="merged-") as folder,
        ThreadPoolExecutor(workers) as pool,
    ):
        running = {
            pool.submit(_outcomes, tools, batch, Path(folder)): batch
            for batch in batches(requests, workers)
        }
        try:
            for future in as_completed(running):
                yield from zip(running[future].requests, future.result(), strict=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _outcomes(
    tools: Sequence[Disassembler], batch: Batch, folder: Path
) -> Sequence[Disassembly | SassError]:
    """The disassembly of each request, or the reason that there is none."""
    try:
        return disassemble(tools, batch, folder)
    except SassError as error:
        if not batch.merged or _REFUSAL in str(error):
            return [error] * len(batch.requests)
    alone = (Batch((request,), merged=False) for request in batch.requests)
    return [outcome for one in alone for outcome in _outcomes(tools, one, folder)]


def _with_analysis(request: Request, disassembly: Disassembly, sources: SourcesOf | None) -> Kernel:
    """The kernel with all values that follow from its instructions."""
    cubin, kernel = request.cubin, request.kernel
    operations, capability = disassembly.operations, cubin.capability
    chains: Sequence[Chain] = disassembly.sources
    if sources is not None:
        chains = sources(kernel.symbol, chains)
    spills = kernel.spills or frozenset()
    blocks, loops = flow.control_flow(operations, kernel.jump_tables)
    loop_of: dict[int, int] = {}
    for loop in sorted(loops, key=lambda loop: loop.depth):
        loop_of.update(dict.fromkeys(loop.blocks, loop.index))
    instructions = tuple(
        Instruction(
            o.address,
            o.encoding,
            o.predicate,
            o.opcode,
            o.operands,
            o.target,
            decode_control(o.encoding),
            live,
            source,
            ptx_line,
            block,
            loop_of.get(block),
            opcodes.pipe(o.opcode, capability),
            opcodes.cost(o.opcode, capability),
            o.address in spills,
        )
        for o, block, live, source, ptx_line in zip(
            operations,
            (b.index for b in blocks for _ in range(b.start, b.end, INSTRUCTION_BYTES)),
            disassembly.live,
            chains,
            disassembly.ptx_lines,
            strict=True,
        )
    )
    recursive = flow.calls_itself(operations, kernel.jump_tables)
    of_local = [i for i in instructions if i.base in ("LDL", "STL") and flow.may_execute(i)]
    untold = bool(of_local) and kernel.spills is None
    spilling = [i for i in of_local if i.is_spill]
    return Kernel(
        symbol=kernel.symbol,
        architecture=cubin.architecture,
        origin=cubin.origin,
        compiler=cubin.compiler,
        resources=replace(
            kernel.resources,
            stack_bytes=None if recursive else kernel.resources.stack_bytes,
            spill_store_bytes=None if untold else local_bytes(spilling, "STL"),
            spill_load_bytes=None if untold else local_bytes(spilling, "LDL"),
        ),
        instructions=instructions,
        blocks=blocks,
        loops=loops,
        ptx=cubin.ptx_of(kernel.symbol),
        is_function=kernel.is_function,
        constants=_constants(cubin, kernel.symbol),
        why_not_live=why_unknown(operations, kernel.jump_tables, kernel.is_function),
    )


def _constants(cubin: Cubin, symbol: str) -> dict[int, bytes]:
    """The compiler's own constant bank of a kernel, by number. The linker has yet to fill that of
    relocatable code; the host fills the others."""
    section = cubin.sections.get(f".nv.constant{_COMPILERS_BANK}.{symbol}")
    if section is None or cubin.relocatable:
        return {}
    return {_COMPILERS_BANK: section.data[: len(section.data) // 4 * 4]}


_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def local_bytes(operations: Iterable[Operation], base: str) -> int:
    """Bytes per thread that the "STL" or "LDL" among some instructions move, each counted once;
    those that never execute are left out."""
    return sum(
        next((_WIDTHS[part] for part in operation.opcode.split(".") if part in _WIDTHS), 4)
        for operation in operations
        if operation.base == base and flow.may_execute(operation)
    )
