"""One self-contained page: CUDA, PTX and SASS of kernels, each line linked to the lines made of it,
and each kernel as a diff against the one before it. Without `files` it loads no other files."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from flash_helpers.ptx.read.flow import Phase
from flash_helpers.sass.analyse.counts import WORK, Bucket, buckets
from flash_helpers.sass.analyse.diff import block_phases, diff_kernels, normalised_ptx, ptx_names
from flash_helpers.sass.analyse.ptx_links import read_kernel_ptx
from flash_helpers.sass.analyse.rows import MARK_MEANING, Line, Row, line_rows, sass_rows
from flash_helpers.sass.read.choice import identifiers
from flash_helpers.sass.read.control import NO_SCOREBOARD
from flash_helpers.sass.read.opcodes import classify
from flash_helpers.sass.read.records import (
    INSTRUCTION_BYTES,
    Control,
    Instruction,
    Kernel,
    SassError,
    SourceLine,
)
from flash_helpers.sass.read.symbols import demangled, with_demangled_symbols

_ASSETS = resources.files("flash_helpers.sass.show") / "page_assets"
_SCRIPTS = ("links.js", "rows.js", "changes.js", "detail.js", "page.js")  # one program, in order

# pipe: (class of the style sheet, what it executes)
_PIPES: Mapping[str, tuple[str, str]] = {
    "tensor": ("c-tensor", "mma"),
    "lsu": ("c-memory", "shared, global and local memory, shuffles"),
    "fma": ("c-fp32", "FP32; on 8.0 IMAD, too"),
    "fmaheavy": ("c-heavy", "IMAD, whatever it is used for"),
    "fp16": ("c-fp32", "packed half precision"),
    "fp64": ("c-other", "double precision"),
    "alu": ("c-integer", "integers, logic, minima, moves"),
    "xu": ("c-special", "special functions, conversions"),
    "uniform": ("c-uniform", "one value for the whole warp"),
    "cbu": ("c-other", "branches"),
    "adu": ("c-other", "constants"),
    "tex": ("c-other", "textures"),
    "unknown": ("c-other", "no source tells"),
}
_PIPE_NUMBER = {name: number for number, name in enumerate(_PIPES)}

# A line table may name any file of the disk; only these may come into a page.
_SOURCE_SUFFIXES = (".cu", ".cuh", ".h", ".hpp", ".hxx", ".inl", ".c", ".cc", ".cpp", ".cxx", ".py")
_INSTRUCTION = re.compile(r"(?:@!?%\w+\s+)?([a-z]\w*)")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")

PANES: Mapping[str, str] = {"cuda": "CUDA", "ptx": "PTX", "sass": "SASS"}  # name: title

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class PageKernel:
    """A kernel of the page.

    `name`: short name for the picker. `title`: a further description, or "". `facts`: pairs of a
    term and its value. `ptx_sources`: the CUDA lines of PTX lines, innermost first, as
    `ptx_links.ptx_sources` finds them; what is not in it is taken from the SASS that the line
    became.
    """

    kernel: Kernel
    name: str
    title: str
    facts: Sequence[tuple[str, str]]
    ptx_sources: Mapping[int, tuple[SourceLine, ...]]


class _Numbering(dict[T, int]):
    """Items by their number, in the order in which they were first asked for."""

    def __missing__(self, thing: T) -> int:
        return self.setdefault(thing, len(self))


def page_html(
    kernels: Sequence[PageKernel],
    sources: Mapping[str, str],
    title: str,
    *,
    nav: str = "",
    overview: str = "",
    shown: int = 0,
    files: Sequence[Mapping[str, str]] = (),
) -> str:
    """The HTML of the page. Each kernel but the first is shown as a diff against the one before it.

    `sources`: texts of the CUDA files, by the paths that the kernels' line tables have, such as
    `read_sources` finds them; other files are named, but not shown. `nav`: HTML with links to other
    pages. `overview`: HTML to stand above the panes, such as `picture.overview_html` makes.
    `shown`: index of the kernel that is shown first. `files`: for each kernel the script file of
    each pane, by the pane's name, relative to the page, as `page_parts.pane_scripts` makes them;
    the page loads a file when its pane is first looked at. Without `files` the page holds all of
    it, and loads nothing.
    """
    named = {line.file for page in kernels for i in page.kernel.instructions for line in i.source}
    index = {
        "shown": shown,
        "pipes": [
            {"name": name, "colour": colour, "what": what}
            for name, (colour, what) in _PIPES.items()
        ],
        "marks": {mark.value: meaning for mark, meaning in MARK_MEANING.items()},
        "kernels": [
            {
                "name": page.name,
                "title": page.title,
                "symbol": demangled(page.kernel.symbol),
                "facts": [list(fact) for fact in page.facts],
                **({"panes": dict(files[number])} if files else {}),
            }
            for number, page in enumerate(kernels)
        ],
        "sources": {} if files else {p: text for p, text in sources.items() if p in named},
    }
    data = {}
    for number, page in enumerate(kernels):
        if not files:
            data[f"kernel-{number}"] = kernel_data(page)
        if number:
            before = kernels[number - 1].kernel
            data[f"diff-{number}"] = _diff_data(before, page.kernel, sources)
    names = [page.name for page in kernels]
    parts = {
        **{pane: _pane_links(title, pane, names, files) for pane, title in PANES.items()},
        "loaded": " 'self' file:" if files else "",
        "title": html.escape(title),
        "style": _asset("page.css"),
        "nav": nav,
        "overview": overview,
        "index": _json(index),
        "data": "\n".join(
            f'<script type="application/json" id="{name}">{_json(value)}</script>'
            for name, value in data.items()
        ),
        "script": "\n".join(map(_asset, _SCRIPTS)),
    }
    return re.sub(r"@(\w+)@", lambda match: parts[match[1]], _asset("page.html"))


def _pane_links(
    title: str, pane: str, names: Sequence[str], files: Sequence[Mapping[str, str]]
) -> str:
    """Links to the files of a pane, shown until they are loaded; they need no script."""
    links = " and ".join(
        f'<a href="{html.escape(of[pane])}">{title} of {html.escape(name)}</a>'
        for name, of in zip(names, files, strict=False)
    )
    return f'<p class="empty">{links}</p>' if links else ""


def read_sources(
    kernels: Iterable[Kernel], root: Path, *, elsewhere: bool = False
) -> dict[str, str]:
    """The texts of the source files of kernels, by the paths of their line tables.

    Files that are not below `root` are left out. `elsewhere`: take them, too, where the line table
    has their whole path and their name is that of a source file. Files are left out that have
    changed since a kernel was built, so that a line that the kernel names is gone, empty or a
    comment. A line inlined into its own file does not tell: ptxas 13.0 names some lines of headers
    as lines of the file that they are inlined into.
    """
    named: dict[str, set[int]] = defaultdict(set)
    for kernel in kernels:
        for chain in {i.source for i in kernel.instructions}:
            for line, outer in itertools.zip_longest(chain, chain[1:]):
                of_file = named[line.file]
                if outer is None or outer.file != line.file:
                    of_file.add(line.line)
    found = {}
    folder = root.resolve()
    for name, numbers in sorted(named.items()):
        path = root / name
        is_absolute = Path(name).is_absolute()
        is_inside = not is_absolute and path.resolve().is_relative_to(folder)
        is_wanted = is_inside or (elsewhere and is_absolute and path.suffix in _SOURCE_SUFFIXES)
        if is_wanted and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            if not _is_out_of_date(text, numbers):
                found[name] = text
    return found


def _is_out_of_date(text: str, numbers: Iterable[int]) -> bool:
    lines = [line.strip() for line in text.split("\n")]
    # code of the compiler's own has no line
    named = (lines[number - 1] if number <= len(lines) else "" for number in numbers if number > 0)
    return any(not line or line.startswith("//") for line in named)


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _json(value: object) -> str:
    """JSON that may stand in a script element: nothing in it can end the element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def packed_control(control: Control) -> int:
    """Stall in bits 0 to 3, yield in 4, write scoreboard in 5 to 7, read scoreboard in 8 to 10,
    wait mask in 11 to 16."""
    write, read = (
        NO_SCOREBOARD if number is None else number
        for number in (control.write_scoreboard, control.read_scoreboard)
    )
    return control.stall | control.yields << 4 | write << 5 | read << 8 | control.wait_mask << 11


_NumberedLines = Sequence[tuple[int, Line]]


def kernel_data(page: PageKernel) -> dict[str, Any]:
    """The data of a kernel for the page."""
    kernel = page.kernel
    files: _Numbering[str] = _Numbering()
    chains: _Numbering[tuple[SourceLine, ...]] = _Numbering({(): 0})
    costs: _Numbering[float | None] = _Numbering()
    groups: _Numbering[str] = _Numbering()
    instructions = kernel.instructions
    sass = {
        "text": [
            f"{i.predicate}\t{i.opcode}\t{with_demangled_symbols(i.operands)}" for i in instructions
        ],
        "control": [packed_control(i.control) for i in instructions],
        "live": [-1 if i.live is None else i.live.general for i in instructions],
        "ptx": [i.ptx_line or 0 for i in instructions],
        "chain": [chains[i.source] for i in instructions],
        "loop": [-1 if i.loop is None else i.loop for i in instructions],
        "group": [groups[classify(i.opcode, i.operands)] for i in instructions],
        "pipe": [_PIPE_NUMBER.get(i.pipe, _PIPE_NUMBER["unknown"]) for i in instructions],
        "cost": [costs[i.cost] for i in instructions],
        "target": [_target(i, len(instructions)) for i in instructions],
        "idle": [int(kind not in WORK) for kind in buckets(instructions)],
        "spill": [int(i.is_spill) for i in instructions],
    }
    ptx = _ptx_data(page, _ptx_lines(kernel), chains)
    return {
        "sass": sass,
        "ptx": ptx,
        "costs": list(costs),
        "groups": list(groups),
        "blocks": _block_data(kernel),
        "loops": _loop_data(kernel),
        "chains": [
            [number for line in chain for number in (files[line.file], line.line)]
            for chain in chains
        ],
        "files": list(files),
        "main": files[_main_file(kernel)] if files else 0,
    }


def _target(instruction: Instruction, n_instructions: int) -> int:
    """Index of the instruction to which a jump goes; -1 without one."""
    if instruction.target is None:
        return -1
    index = instruction.target // INSTRUCTION_BYTES
    return index if index < n_instructions else -1


def _main_file(kernel: Kernel) -> str:
    """The file of the kernel itself: the outermost file of most instructions; "" if unknown."""
    outermost = [i.source[-1].file for i in kernel.instructions if i.source]
    return max(sorted(set(outermost)), key=outermost.count, default="")


def _block_data(kernel: Kernel) -> list[dict[str, Any]]:
    phases = block_phases(kernel)
    return [
        {
            "start": block.start // INSTRUCTION_BYTES,
            "from": list(block.predecessors),
            "to": list(block.successors),
            "phase": phases[block.index].value,
        }
        for block in kernel.blocks
    ]


def _loop_data(kernel: Kernel) -> list[dict[str, int]]:
    found = []
    kinds = buckets(kernel.instructions)
    for loop in kernel.loops:
        blocks = [kernel.blocks[index] for index in loop.blocks]
        inside = [
            kind
            for block in blocks
            for kind in kinds[block.start // INSTRUCTION_BYTES : block.end // INSTRUCTION_BYTES]
        ]
        found.append(
            {
                "first": min(block.start for block in blocks) // INSTRUCTION_BYTES,
                "last": max(block.end for block in blocks) // INSTRUCTION_BYTES - 1,
                "length": len(inside),
                "filler": inside.count(Bucket.FILLER),
            }
        )
    return found


def _ptx_data(
    page: PageKernel, rows: _NumberedLines, chains: _Numbering[tuple[SourceLine, ...]]
) -> dict[str, Any]:
    kernel = page.kernel
    phases = [line.phase for _, line in rows]
    made = {i.ptx_line for i in kernel.instructions}
    instructions = {number for number, line in rows if line.opcode is not None}
    vanished = len(instructions - made)
    return {
        "line": [number for number, _ in rows],
        "text": [line.text for _, line in rows],
        "chain": [
            chains[page.ptx_sources[number]] if number in page.ptx_sources else -1
            for number, _ in rows
        ],
        "isInstruction": [int(number in instructions) for number, _ in rows],
        "loop": phases.index(Phase.MAIN_LOOP) if Phase.MAIN_LOOP in phases else -1,
        "note": (
            f"{len(instructions)} instructions, {vanished} without SASS of their own"
            if rows
            else "The cubin holds no PTX: compile with -lineinfo."
        ),
    }


@lru_cache(maxsize=2)  # of a step's parent, and of the step, which is the next one's parent
def _ptx_lines(kernel: Kernel) -> _NumberedLines:
    """The lines of the kernel's PTX with their numbers; empty ones are left out."""
    try:
        ptx = read_kernel_ptx(kernel)
        phases = {i.line: ptx.phase(n) for n, i in enumerate(ptx.program.instructions)}
    except SassError:
        phases = {}
    found: list[tuple[int, Line]] = []
    phase = None
    for number, text in reversed(_entry_lines(kernel)):  # a label is of the phase that it begins
        phase = phases.get(number, phase)
        shown = with_demangled_symbols(" ".join(text.replace(kernel.symbol, "kernel").split()))
        if shown:
            opcode = _INSTRUCTION.match(shown)
            alike = normalised_ptx(text, kernel.symbol)
            found.append((number, Line(shown, alike, opcode and opcode[1], phase, ptx_names(text))))
    return found[::-1]


def _cuda_lines(kernel: Kernel, text: str) -> list[Line]:
    """The lines of a kernel's file; the kernel's namespace, or else its own name, and blanks may
    differ in lines that are alike."""
    name = re.compile(rf"\b{re.escape(identifiers(kernel.symbol)[0])}\b")
    return [Line(line, name.sub("", " ".join(line.split()))) for line in text.split("\n") if text]


def _diff_data(before: Kernel, after: Kernel, sources: Mapping[str, str]) -> dict[str, Any]:
    """The rows of each pane, as runs; see `_runs`. CUDA: of the kernels' own files. None where one
    of the two has no text."""
    pair = (before, after)
    cuda = [_cuda_lines(kernel, sources.get(_main_file(kernel), "")) for kernel in pair]
    ptx = [[line for _, line in _ptx_lines(kernel)] for kernel in pair]
    return {
        "cuda": _runs(line_rows(*cuda)) if all(cuda) else None,
        "ptx": _runs(line_rows(*ptx)) if all(ptx) else None,
        "sass": _runs(sass_rows(diff_kernels(before, after))),
    }


def _runs(rows: Iterable[Row]) -> list[list[str | int]]:
    """Runs of rows: mark, index before, index after, and number of consecutive rows; an index is -1
    on a side without a line."""
    runs: list[list[Any]] = []
    for mark, *sides in rows:
        before, after = (-1 if side is None else side for side in sides)
        if runs:
            last, first_before, first_after, length = runs[-1]
            following = [n if n < 0 else n + length for n in (first_before, first_after)]
            if last == mark.value and following == [before, after]:
                runs[-1][3] += 1
                continue
        runs.append([mark.value, before, after, 1])
    return runs


def _entry_lines(kernel: Kernel) -> list[tuple[int, str]]:
    """The numbered lines of the kernel's PTX; those of the other kernels of its module left out."""
    lines = list(enumerate((kernel.ptx or "").split("\n"), start=1))
    entries = [(number, match[1]) for number, text in lines if (match := _ENTRY.search(text))]
    starts = [number for number, name in entries if name == kernel.symbol]
    if not starts:
        return lines
    following = [number for number, _ in entries if number > starts[0]]
    end = following[0] if following else len(lines) + 1
    return [(number, text) for number, text in lines if starts[0] <= number < end]
