"""Loading a module and launching its kernels."""

from __future__ import annotations

import itertools
import math
import operator
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TextIO

import numpy as np

from flash_helpers import gpu
from flash_helpers.console.file_kinds import FileKind, kind_of, mistaken
from flash_helpers.console.symbols import demangled
from flash_helpers.ptx.errors import (
    LaunchError,
    Lint,
    NotPtxError,
    PtxSyntaxError,
    SimulatorError,
    UnsupportedInstruction,
)
from flash_helpers.ptx.read.calls import without_calls
from flash_helpers.ptx.read.flow import Program, build_program
from flash_helpers.ptx.read.module import Function, Immediate, Module, Special, Symbol, Variable
from flash_helpers.ptx.read.reader import read_ptx
from flash_helpers.ptx.read.types import TYPE_NAMES, size_of
from flash_helpers.ptx.run.asynchronous.mbarriers import MBARRIER_BYTES
from flash_helpers.ptx.run.asynchronous.register_pool import entry_registers
from flash_helpers.ptx.run.batches import most_resident, run_batches
from flash_helpers.ptx.run.count.counters import Counters, LineCounts
from flash_helpers.ptx.run.count.tally import Tally
from flash_helpers.ptx.run.execute.observe import Observer
from flash_helpers.ptx.run.execute.scheduler import Scheduler
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.instructions.access import STRONG, access_size, space_of
from flash_helpers.ptx.run.machine import Launch, Machine
from flash_helpers.ptx.run.memory.regions import ARENA_BASE, DeviceMemory
from flash_helpers.ptx.run.watch.faults import FaultLog

Argument = int | float | bool | np.generic | bytes
Progress = Callable[[int, int], None]

_BATCH_LANES = 2048
"""Lanes run together, about: enough to hide the cost of a NumPy call, few enough to stay in
cache."""

_WORD = 32  # bytes: the widest access

_CODE_BASE = 0x7B00_0000_0000
"""Address of the first function: they can be stored and compared, not read."""
_CODE_SIZE = 16
_MAX_VARIABLE_BYTES = 1 << 30
"""Of the simulator: global variables that a kernel names, together."""
_WORKSPACE_BYTES = 256

DEFAULT_MAX_INSTRUCTIONS = 20_000_000


@dataclass(frozen=True)
class Run:
    """A finished launch. n_blocks: that have run. faults: those that `keep_going` collected, and
    lints: what is suspicious, if it was asked for; one for each instruction and kind."""

    kernel: str
    n_blocks: int
    counters: Counters
    faults: tuple[SimulatorError, ...]
    lints: tuple[Lint, ...] = ()

    def __repr__(self) -> str:
        total = self.counters.total
        counts = {
            "blocks": self.n_blocks,
            "warp instructions": total.instructions,
            "mma": total.mma,
            "bank conflicts": total.bank_conflicts,
            "faults": len(self.faults),
        }
        told = ", ".join(f"{name} {n:,}" for name, n in counts.items())
        return f"<Run of {self.kernel}: {told}>"

    @cached_property
    def by_line(self) -> list[LineCounts]:
        """Counts by line of CUDA source (innermost line of inlined code)."""
        return self.counters.by_line()

    def report(self) -> str:
        """The collected faults and lints as text."""
        return "\n".join(map(str, (*self.faults, *self.lints)))


@dataclass(frozen=True)
class Kernel:
    """One entry of a module. function: without calls.

    Raises PtxSyntaxError if a variable that it names cannot be read.
    """

    module: Module
    function: Function

    def __post_init__(self) -> None:
        _ = self._variables  # said now rather than when it is launched

    @property
    def name(self) -> str:
        """The entry's name, as mangled."""
        return self.function.name

    @cached_property
    def program(self) -> Program:
        """Its instructions in the order in which the simulator runs them."""
        return build_program(self.function)

    @property
    def static_shared_bytes(self) -> int:
        """Shared memory that the kernel declares with a size."""
        return self._shared_layout[1]

    @cached_property
    def _named(self) -> tuple[set[str], set[str]]:
        """Symbols and special registers that the instructions name."""
        named = [o for i in self.function.instructions for o in i.named()]
        return tuple({o.name for o in named if isinstance(o, kind)} for kind in (Symbol, Special))

    @cached_property
    def _variables(self) -> list[Variable]:
        """The function's own, and those of the module that it names, or whose address the initial
        value of one of these holds."""
        functions, own = self.module.functions, self.function.variables
        local = {v.name for v in own}
        found: dict[str, Variable] = {}
        todo = [*self._named[0], *(a.symbol.name for v in own for a in v.addresses)]
        while todo:
            name = todo.pop()
            variable = self.module.variables.get(name)
            if variable is None or name in found:
                continue
            if variable.problem is not None:
                raise variable.problem
            found[name] = variable
            todo.extend(address.symbol.name for address in variable.addresses)
        for variable in (*found.values(), *own):
            for name in (a.symbol.name for a in variable.addresses):
                if name not in found and name not in functions and name not in local:
                    raise PtxSyntaxError(
                        f"the initial value of {variable.name} names {name}, which is not defined",
                        variable.line,
                    )
        return [*(v for v in self.module.variables.values() if v.name in found), *own]

    @cached_property
    def _shared_layout(self) -> tuple[dict[str, int], int]:
        """Offsets of shared variables, and the size of those whose size is known."""
        shared = [v for v in self._variables if v.space == "shared"]
        dynamic = [v for v in shared if v.external and v.size == 0]
        offsets, end = _placed([v for v in shared if v not in dynamic])
        if dynamic:
            end = _aligned(end, max(v.alignment for v in dynamic))
            offsets.update((v.name, end) for v in dynamic)
        return offsets, end

    def launch(
        self,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        shared_bytes: int = 0,
        args: Sequence[Argument] = (),
        memory: DeviceMemory | None = None,
        *,
        cluster: Sequence[int] | int | None = None,
        keep_going: bool = False,
        strict_barriers: bool = False,
        strict_wgmma: bool = False,
        lints: bool = False,
        registers: int | None = None,
        max_instructions: int = DEFAULT_MAX_INSTRUCTIONS,
        progress: Progress | None = None,
        observer: Observer | None = None,
        target: str | None = None,
        before: Run | None = None,
        output: TextIO | None = None,
        seed: int | None = None,
    ) -> Run:
        """Runs the kernel; returns what was counted, and the faults if they were collected.

        grid: blocks in x, y and z. block: threads of a block in x, y and z. shared_bytes: dynamic
        shared memory of a block. args: one value for each parameter: a number, of Python or NumPy,
        or bytes for a structure passed by value. memory: the global memory that pointers among them
        refer to. cluster: blocks of a cluster in x, y and z, which divide those of the grid; None
        for what the kernel is compiled for (`__cluster_dims__`), or no clusters. More than 8 are
        run too, though a GPU wants cudaFuncAttributeNonPortableClusterSizeAllowed for them.
        keep_going: collect faults in `Run.faults` rather than raise the first one.
        strict_barriers: a barrier that waits for the whole block is a fault if a thread has ended
        before it; from compute capability 7.0 on it waits for the others only. strict_wgmma: a
        wgmma.wait_group waits for its own warp's part of the products alone, not for that of the
        warpgroup. lints: collect in `Run.lints` what is legal and suspicious (`errors.Lint`).
        registers: of a thread when the kernel begins, as ptxas reports them, for
        setmaxnreg; by its directives if None (`register_pool.entry_registers`).
        max_instructions: a warp that runs more raises InstructionLimitError. progress: called with
        the number of blocks done and the number of blocks. observer: is shown registers and shared
        memory while the kernel runs. target: compute capability whose limits the launch must keep,
        such as sm_90a; the module's own if None. before: a run of this kernel whose counts and
        faults this one goes on with; it is used up. output: what the kernel's printf writes to, in
        place of standard output. seed: bulk copies and products of wgmma complete at
        random times, and mbarrier.try_wait gives up at random, by this; without it they complete as
        late as can be.

        A kernel that synchronises its grid (it reads %envreg1 and 2, as cooperative groups do) is
        launched cooperatively: all of its blocks are resident together.

        Raises LaunchError for a launch that cannot exist, of which nothing has run;
        UnsupportedInstruction as soon as a thread reaches an instruction that is not known, so that
        what is written before that stays in memory; SimulatorError for a fault of the kernel,
        unless keep_going.
        """
        grid3, block3 = _three(grid, "grid"), _three(block, "block")
        shared_bytes = _count(shared_bytes, "shared_bytes")
        target = self.module.target if target is None else target
        threads = math.prod(block3)
        memory = DeviceMemory() if memory is None else memory
        self._check_launch(grid3, block3, shared_bytes, target)
        cluster3 = self._cluster(cluster, grid3, target)
        launch = self._launch(grid3, block3, shared_bytes, args, memory, target)
        if registers is None:
            registers = entry_registers(self.function)
        more = {"strict_wgmma": strict_wgmma, "lints": lints, "registers": registers}
        launch = replace(launch, cluster=cluster3, output=output, seed=seed, **more)
        log = FaultLog(self.program, keep_going)
        tally, n_blocks = Tally(self.program), math.prod(grid3)
        if before is not None:
            tally, n_blocks = before.counters.tally, n_blocks + before.n_blocks
            log.go_on_with(before.faults, before.lints)
        blocks = _by_cluster(grid3, cluster3 or (1, 1, 1))
        cluster_size = math.prod(cluster3 or ())
        n_batches = max(1, round(len(blocks) * _aligned(threads, gpu.WARP) / _BATCH_LANES))
        if launch.workspace:
            n_batches = 1
        done = 0

        def begin(some: tuple[tuple[int, int, int], ...]) -> Scheduler:
            geometry = Geometry(some, threads, cluster_size)
            machine = Machine(self.program, launch, geometry, memory, log, tally)
            return Scheduler(machine, max_instructions, observer, strict_barriers=strict_barriers)

        def ended(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, len(blocks))

        with np.errstate(all="ignore"):
            run_batches(
                blocks,
                -(-len(blocks) // n_batches),
                most_resident(target, threads, launch.shared_bytes),
                begin,
                memory,
                ended,
                cluster_size,
            )
        found = (tuple(log.faults.values()), tuple(log.lints.values()))
        return Run(self.name, n_blocks, Counters(tally), *found)

    def _check_launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        target: str,
    ) -> None:
        if any(n > most for n, most in zip(grid, gpu.MAX_GRID, strict=True)):
            raise LaunchError(
                f"a grid of {grid}: the limits are {', '.join(map(str, gpu.MAX_GRID))}"
            )
        try:
            smem_bytes = gpu.SMEM_BYTES[gpu.capability_of(target)]
        except (ValueError, KeyError):
            known = ", ".join(f"sm_{capability}" for capability in gpu.SMEM_BYTES)
            raise LaunchError(
                f"the limits of {target} are not known: give one of these as target: {known}"
            ) from None
        threads = math.prod(block)
        if threads > gpu.MAX_THREADS or block[2] > gpu.MAX_BLOCK_Z:
            raise LaunchError(
                f"a block of {block} has {threads} threads; {target} allows {gpu.MAX_THREADS} "
                f"and {gpu.MAX_BLOCK_Z} in z: use a smaller block"
            )
        bound = self.function.directives.get("maxntid") or self.function.directives.get("reqntid")
        if bound and threads > math.prod(bound):
            raise LaunchError(
                f"a block of {threads} threads, but {self.name} is compiled for at most "
                f"{math.prod(bound)}: launch fewer or change __launch_bounds__"
            )
        total = self.static_shared_bytes + shared_bytes
        if total > smem_bytes:
            raise LaunchError(
                f"{total} bytes of shared memory a block ({self.static_shared_bytes} static, "
                f"{shared_bytes} dynamic), but {target} has {smem_bytes}: use smaller "
                "tiles or another target"
            )
        for limit, space, owner in _SPACE_LIMITS:
            size = _placed([v for v in self._variables if v.space == space])[1]
            if size > limit:
                raise LaunchError(f"{size} bytes of {space} memory {owner}: the limit is {limit}")

    def _cluster(
        self, given: Sequence[int] | int | None, grid: tuple[int, int, int], target: str
    ) -> tuple[int, int, int] | None:
        """Blocks of a cluster, as the launch or the kernel says (PTX ISA 9.0, "Cluster Dimension
        Directives")."""
        directives = self.function.directives
        if "blocksareclusters" in directives:
            raise LaunchError(f"{self.name} counts its grid in clusters, which is not simulated")
        compiled = directives.get("reqnctapercluster")
        required = _three(compiled, "reqnctapercluster") if compiled else None
        cluster = required if given is None else _three(given, "cluster")
        if cluster is None:
            if "explicitcluster" in directives:
                raise LaunchError(f"{self.name} must be launched with clusters: give cluster")
            return None
        size = math.prod(cluster)
        if gpu.capability_of(target) < 90:
            raise LaunchError(f"a cluster of {cluster}: {target} has none, sm_90 is the first")
        if required not in (None, cluster):
            raise LaunchError(
                f"a cluster of {cluster}, but {self.name} is compiled for {required}: leave it out "
                "or change __cluster_dims__"
            )
        most, *_ = directives.get("maxclusterrank", (gpu.MAX_CLUSTER,))
        if size > gpu.MAX_CLUSTER:
            raise LaunchError(
                f"a cluster of {cluster} has {size} blocks: the limit is {gpu.PORTABLE_CLUSTER}, "
                f"or {gpu.MAX_CLUSTER} with cudaFuncAttributeNonPortableClusterSizeAllowed: use "
                "fewer"
            )
        if size > most:
            raise LaunchError(
                f"a cluster of {cluster} has {size} blocks, but {self.name} is compiled for at "
                f"most {most}: use fewer or change __launch_bounds__"
            )
        if any(n % c for n, c in zip(grid, cluster, strict=True)):
            raise LaunchError(
                f"a grid of {grid} is no multiple of its cluster of {cluster}: enlarge the grid to "
                f"{tuple(_aligned(n, c) for n, c in zip(grid, cluster, strict=True))} or choose "
                "another cluster"
            )
        return cluster

    def _pack(self, args: Sequence[Argument]) -> tuple[np.ndarray, dict[str, int]]:
        """Arguments laid out as the kernel reads them, and the parameters' offsets."""
        parameters = self.function.parameters
        if len(args) != len(parameters):
            raise LaunchError(f"{self.name} takes {len(parameters)} arguments, got {len(args)}")
        offsets, end = _placed(parameters)
        if end > gpu.MAX_PARAMETER_BYTES:
            raise LaunchError(f"{end} bytes of parameters: the limit is {gpu.MAX_PARAMETER_BYTES}")
        data = np.zeros(_aligned(end, _WORD), np.uint8)
        for i, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
            found = _argument_bytes(i, parameter, value)
            data[offsets[parameter.name] :][: len(found)] = np.frombuffer(found, np.uint8)
        return data, offsets

    def _launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        args: Sequence[Argument],
        memory: DeviceMemory,
        target: str,
    ) -> Launch:
        parameters, offsets = self._pack(args)
        shared, static = self._shared_layout
        local, local_bytes = _placed([v for v in self._variables if v.space == "local"])
        in_memory = [v for v in self._variables if v.space in ("global", "const")]
        addresses = {v.name: memory.allocate(max(v.size, 1), v.alignment) for v in in_memory}
        code = {name: _CODE_BASE + _CODE_SIZE * i for i, name in enumerate(self.module.functions)}
        symbols = {**code, **offsets, **shared, **local, **addresses}
        for variable in in_memory:
            if variable.initial is not None:
                _initialise(variable, symbols, memory)
        granule, has_flags = self._shared_accesses
        specials = self._named[1]
        asks_scratch = any(name.startswith("%reserved_smem") for name in specials)
        synchronises = not specials.isdisjoint(("%envreg1", "%envreg2"))
        return Launch(
            grid=grid,
            block=block,
            shared_bytes=static + shared_bytes,
            dynamic_bytes=shared_bytes,
            parameters=parameters,
            symbols=symbols,
            local_bytes=_aligned(local_bytes, _WORD),
            granule=granule,
            has_flags=has_flags,
            target=target,
            scratch=_aligned(static + shared_bytes, 128) if asks_scratch else None,
            workspace=memory.allocate(_WORKSPACE_BYTES) if synchronises else 0,
        )

    @cached_property
    def _shared_accesses(self) -> tuple[int, bool]:
        """Bytes of the narrowest access that may be to shared memory; whether one is strong."""
        narrowest, strong = 16, False
        for instruction in self.function.instructions:
            name = instruction.name
            if name in ("ld", "st", "atom", "red") and space_of(instruction) in (
                "shared",
                "generic",
            ):
                with suppress(UnsupportedInstruction):  # refused if it is reached
                    narrowest = min(narrowest, access_size(instruction))
                strong |= bool(instruction.first(STRONG)) or name in ("atom", "red")
            elif name == "barrier":
                # Fences before it order.
                strong |= instruction.has("cluster") and instruction.has("relaxed")
            elif name == "mbarrier":
                narrowest = min(narrowest, MBARRIER_BYTES)
            elif name == "wmma":
                # Elements of less than a byte move four bytes at a time.
                sizes = [size_of(t) for t in instruction.types if t in TYPE_NAMES]
                narrowest = min(narrowest, 4, *sizes)
            elif name == "cp" and len(instruction.operands) > 2:
                size = instruction.operands[2]
                if isinstance(size, Immediate) and size.integer in (4, 8):
                    narrowest = min(narrowest, size.integer)
        return narrowest, strong


@dataclass(frozen=True)
class PtxModule:
    """A loaded PTX file. file: its path, for messages."""

    module: Module
    file: str = "PTX"

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of all entries, as mangled."""
        return tuple(f.name for f in self.module.entries)

    def kernel(self, name: str) -> Kernel:
        """The entry of this name, mangled or as in C++ (white space does not matter), with its
        namespaces and parameters or without ("scale<float>"); or else the only entry whose name
        contains it.

        Raises LaunchError if no entry fits, or several do; PtxSyntaxError if something cannot be
        read in the kernel, a function that it calls, or a variable that it names.
        """
        function = self._entry(name)
        try:
            for called in _called(self.module, function):
                if called.problem is not None:
                    raise called.problem
            return Kernel(self.module, without_calls(self.module, function))
        except PtxSyntaxError as error:
            raise PtxSyntaxError(error.message, error.line, self.file) from None

    def _entry(self, name: str) -> Function:
        function, entries = self.module.functions.get(name), self.module.entries
        if function is not None and function.is_entry:
            return function
        wanted = "".join(name.strip().removeprefix("void ").split())
        names = {f.name: _names(f.name) for f in entries}
        found = [f for f in entries if wanted in names[f.name]]
        if not found:
            found = [f for f in entries if any(wanted in n for n in (f.name, *names[f.name]))]
        if len(found) != 1:
            problem = "no kernel is named" if not found else "several kernels are named"
            there = "\n  ".join(demangled(f.name) for f in found or entries) or "(none)"
            raise LaunchError(f"{problem} {name!r}; the file holds\n  {there}")
        return found[0]


def _names(symbol: str) -> tuple[str, ...]:
    """What a symbol is called in C++, without white space: all of it; without result and
    parameters; without namespaces."""
    whole = demangled(symbol).removeprefix("void ")
    start, end, depth = 0, len(whole), 0
    for i, character in enumerate(whole):
        if depth == 0 and whole.startswith("::", i):
            start, end = i + 2, len(whole)
        elif depth == 0 and character == "(":
            end = i
        depth += (character in "<(") - (character in ">)")
    return tuple("".join(n.split()) for n in (whole, whole[:end], whole[start:end]))


def _called(module: Module, function: Function) -> Iterator[Function]:
    """The function, and all that it may call, directly or not."""
    found, todo = {function.name}, [function]
    while todo:
        function = todo.pop()
        yield function
        calls = (i for i in function.instructions if i.name == "call")
        for name in {o.name for call in calls for o in call.operands if isinstance(o, Symbol)}:
            if name in module.functions and name not in found:
                found.add(name)
                todo.append(module.functions[name])


def _is_text(source: str) -> bool:
    """Whether a string is PTX rather than a path."""
    without_comments = re.sub(r"/\*.*?(?:\*/|$)", "", source)
    return "\n" in source or "\0" in source or without_comments.lstrip().startswith(".version")


def load_ptx(source: str | bytes | Path) -> PtxModule:
    """Reads PTX, given as text, as the bytes of one (which may end with NUL), or as the path of a
    file. A string of one line is text if it begins with `.version`, comments aside, else a path.

    What is not understood inside a function or a variable refuses the kernels that use it, when
    they are asked for (`PtxModule.kernel`); the others are not concerned.

    Raises PtxSyntaxError for what is no whole PTX module, NotPtxError for content of another kind,
    OSError for a file that cannot be read.
    """
    if isinstance(source, str) and _is_text(source):
        source = source.encode(errors="replace")
    if isinstance(source, bytes):
        data, file = source, "PTX"
        kind = kind_of(data)
        if kind not in (None, FileKind.PTX):
            raise NotPtxError(f"the text is {kind.value}, not PTX")
    else:
        data, file = Path(source).read_bytes(), str(source)
        if error := mistaken(source, data, FileKind.PTX):
            raise NotPtxError(error)
    if b"\0" in data.rstrip(b"\0"):
        raise NotPtxError(f"{file} is not PTX: it holds bytes that no text does")
    try:
        return PtxModule(read_ptx(data.decode(errors="replace").rstrip("\0")), file)
    except PtxSyntaxError as error:
        raise PtxSyntaxError(error.message, error.line, file) from None


def _count(value: int | np.integer, name: str) -> int:
    """A number that is not negative."""
    try:
        count = operator.index(value)
    except TypeError:
        raise LaunchError(f"{name} is {value!r}: give an integer") from None
    if count < 0:
        raise LaunchError(f"{name} is {count}: give 0 or more")
    return count


def _three(value: Sequence[int] | int, name: str) -> tuple[int, int, int]:
    values = value if isinstance(value, Sequence | np.ndarray) else (value,)
    if not 1 <= len(values) <= 3 or isinstance(value, str | bytes):
        raise LaunchError(f"{name} is {value!r}: give one to three positive numbers")
    x, y, z = (*(_count(v, name) for v in values), 1, 1)[:3]
    if 0 in (x, y, z):
        raise LaunchError(f"{name} is {value!r}: give one to three positive numbers")
    return x, y, z


def _by_cluster(
    grid: tuple[int, int, int], cluster: tuple[int, int, int]
) -> list[tuple[int, int, int]]:
    """`ctaid` of all blocks, those of a cluster in a row; x runs fastest, as in `%ctarank`."""
    counts = [n // c for n, c in zip(grid, cluster, strict=True)]
    firsts, inner = (itertools.product(*map(range, reversed(n))) for n in (counts, cluster))
    ranks = list(inner)
    x, y, z = cluster
    return [(i * x + di, j * y + dj, k * z + dk) for k, j, i in firsts for dk, dj, di in ranks]


def _aligned(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _placed(variables: Sequence[Variable]) -> tuple[dict[str, int], int]:
    """Offsets of variables one after the other, and where the last one ends."""
    offsets, end = {}, 0
    for variable in variables:
        offsets[variable.name] = _aligned(end, max(variable.alignment, 1))
        end = offsets[variable.name] + variable.size
    return offsets, end


_SPACE_LIMITS = (
    (gpu.MAX_LOCAL_BYTES, "local", "a thread"),
    (gpu.MAX_CONSTANT_BYTES, "const", "a module"),
    (_MAX_VARIABLE_BYTES, "global", "in variables"),
)


def _argument_bytes(index: int, parameter: Variable, value: Argument) -> bytes:
    what, size = f"argument {index}", parameter.size
    if isinstance(value, bytes | bytearray | memoryview):
        if len(bytes(value)) != size:
            raise LaunchError(f"{what} has {len(bytes(value))} bytes, its parameter {size}")
        return bytes(value)
    value = bool(value) if isinstance(value, np.bool_) else value
    if isinstance(value, np.generic) and not isinstance(value, np.integer | np.float64):
        if value.nbytes != size or value.dtype.kind not in "fcV":
            raise LaunchError(
                f"{what} is a {value.dtype} of {value.nbytes} bytes, its parameter has "
                f"{size} (.{parameter.type})"
            )
        if parameter.type[0] in "fb":
            return value.tobytes()
        value = float(value)
    if not isinstance(value, float):
        try:
            value = operator.index(value)
        except TypeError:
            raise LaunchError(
                f"{what} is a {type(value).__name__}: give an int, a NumPy scalar or bytes"
            ) from None
    if parameter.type in ("f32", "f64"):
        with suppress(OverflowError):
            return struct.pack("<f" if size == 4 else "<d", float(value))
        raise LaunchError(f"{what} is {value}, which does not fit .{parameter.type}")
    if isinstance(value, float):
        raise LaunchError(f"{what} is a float, its parameter is .{parameter.type}")
    if parameter.type == "b8" and size > 8:
        raise LaunchError(f"{what} is passed by value in {size} bytes: give bytes")
    bits = 8 * size
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        raise LaunchError(f"{what} is {value}, which does not fit {bits} bits")
    return (value & ((1 << bits) - 1)).to_bytes(size, "little")


def _initialise(variable: Variable, symbols: Mapping[str, int], memory: DeviceMemory) -> None:
    data = bytearray(variable.initial)
    for stored in variable.addresses:
        address = (symbols[stored.symbol.name] + stored.symbol.offset) >> stored.shift
        part = address & ((1 << 8 * stored.size) - 1)
        data[stored.offset : stored.offset + stored.size] = part.to_bytes(stored.size, "little")
    offset = symbols[variable.name] - ARENA_BASE
    memory.words(1)[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
