"""Mutants: real PTX with a few tokens or lines deleted, doubled, swapped, replaced or cut off."""

import functools
import random
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flash_helpers.ptx import DeviceMemory, Kernel, PtxError, load_ptx
from flash_helpers.ptx.read.module import Variable

_ENTRY = re.compile(r"^(?:\.visible )?\.entry .*?^\}\n", re.DOTALL | re.MULTILINE)
_TOKEN = re.compile(r"[\w$%]+|\.[\w:]+|[ \t]+|.", re.DOTALL)
_HOSTILE = (
    *"{}[]()<>@!;:,.+-|/\"\\'\0é٣",
    *("08", "-1", "0", "1.5", "0f7F800000", "1.0e999", "99999999999999999999", "4294967296"),
    *("_", "%r1", "%p1", "%rd1", "%f1", "%nobody", "%tid.x", "%envreg1", "%clock", "WARP_SZ"),
    *(".pred", ".b64", ".f16x2", ".b128", ".v4", ".shared", ".local", ".param", ".sync", ".reg"),
    *("bra", "call", "ret", "brx.idx", "bar.sync", "mma", "ld", "st.shared", "/*", "//", "\n"),
)
_BLOCK, _SHARED_BYTES, _BUFFER_BYTES = 64, 16 * 1024, 16 * 1024


@dataclass(frozen=True)
class Mutant:
    """A spoilt text, known by the seed that makes it from the texts."""

    seed: int
    origin: str
    text: str

    def __str__(self) -> str:
        return f"mutant {self.seed} of {self.origin}"


class Hang(BaseException):
    """A mutant took too long. Not an Exception, which the code under test might catch."""


def kernels_of(paths: Sequence[Path]) -> dict[str, str]:
    """Texts of one kernel each, with all that is not a kernel in their file, by file and number."""
    texts = {}
    for path in paths:
        whole = path.read_text()
        entries = _ENTRY.findall(whole)
        for i, entry in enumerate(entries):
            others = [e for j, e in enumerate(entries) if j != i]
            text = whole
            for other in others:
                text = text.replace(other, "")
            assert entry in text
            texts[f"{path.name} kernel {i}"] = text
    return texts


def mutants(texts: dict[str, str], seeds: Sequence[int]) -> Iterator[Mutant]:
    """One mutant for each seed."""
    names = sorted(texts)
    for seed in seeds:
        choose = random.Random(seed)
        origin = choose.choice(names)
        tokens = _TOKEN.findall(texts[origin])
        for _ in range(choose.choice((1, 1, 1, 2, 4))):
            tokens = _spoilt(choose, tokens, texts[choose.choice(names)])
        yield Mutant(seed, origin, "".join(tokens))


def _spoilt(choose: random.Random, tokens: list[str], other: str) -> list[str]:
    """One mutation. other: a text to take lines from."""
    solid = [i for i, token in enumerate(tokens) if not token.isspace()]
    if len(solid) < 2:
        return tokens
    if choose.random() < 0.3:
        return _TOKEN.findall(_with_other_lines(choose, "".join(tokens), other))
    i = choose.choice(solid)
    alike = [n for n in solid if _kind(tokens[n]) == _kind(tokens[i])]
    j, k = choose.choice(alike), choose.choice(solid)
    first, second, third = tokens[i], tokens[j], tokens[k]
    mutated = list(tokens)
    mutation = choose.choice(
        ["delete", "double", "swap", "alike", "any", "hostile", "insert", "digit", "digit"]
    )
    if mutation == "swap":
        mutated[i], mutated[j] = second, first
    elif mutation == "digit":
        mutated[i] = re.sub(r"\d", lambda _: choose.choice("0123456789"), first, count=1)
    else:
        hostile = choose.choice(_HOSTILE)
        mutated[i : i + 1] = {
            "delete": [],
            "double": [first, first],
            "alike": [second],
            "any": [third],
            "hostile": [hostile],
            "insert": [hostile, first],
        }[mutation]
    return mutated


@functools.cache
def _kind(token: str) -> str:
    """Registers, opcodes, modifiers, numbers and the like; of punctuation each is its own."""
    return re.sub(r"\w+", "", token) + ("0" if token[0].isdigit() else "a" * token[0].isalpha())


def _with_other_lines(choose: random.Random, text: str, other: str) -> str:
    lines, strange = text.splitlines(keepends=True), other.splitlines(keepends=True)
    a, b, c = (
        choose.randrange(len(lines)),
        choose.randrange(len(lines)),
        choose.randrange(len(strange)),
    )
    mutation = choose.choice(["delete", "double", "swap", "splice", "end"])
    if mutation == "end" and choose.random() < 0.3:
        return text[: choose.randrange(len(text))]
    if mutation == "delete":
        del lines[a]
    elif mutation == "double":
        lines.insert(a, lines[b])
    elif mutation == "swap":
        lines[a], lines[b] = lines[b], lines[a]
    else:
        lines[a:a] = strange[c : c + choose.randint(1, 12)]
    return "".join(lines)


def outcome(mutant: Mutant, max_instructions: int) -> str:
    """The outcome of reading a mutant and running its kernels: "runs", or the name of the
    documented error. Anything else comes through."""
    ended = "no kernel"
    try:
        module = load_ptx(mutant.text + "\n")
    except PtxError as error:
        return type(error).__name__
    for name in module.kernels:
        try:
            _launch(module.kernel(name), mutant.seed, max_instructions)
            ended = "runs"
        except PtxError as error:
            ended = type(error).__name__
            assert str(error)
    return ended


def _launch(kernel: Kernel, seed: int, max_instructions: int) -> None:
    memory = DeviceMemory()
    arguments = [_argument(parameter, memory) for parameter in kernel.function.parameters]
    kernel.launch(
        grid=2,
        block=_BLOCK,
        shared_bytes=_SHARED_BYTES,
        args=arguments,
        memory=memory,
        keep_going=seed % 2 == 0,
        max_instructions=max_instructions,
    )


def _argument(parameter: Variable, memory: DeviceMemory) -> int | float | bytes:
    if parameter.size == 8:
        return memory.upload(np.zeros(_BUFFER_BYTES, np.uint8))
    if parameter.size < 8:
        return (_BLOCK).to_bytes(parameter.size, "little")
    # A structure: pointers first, as far as one can tell.
    pointer = memory.upload(np.zeros(_BUFFER_BYTES, np.uint8))
    return (pointer.to_bytes(8, "little") * (min(parameter.size, 4096) // 8 + 1))[: parameter.size]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises Hang after so many seconds of the processor, however busy it is with others."""

    def ring(signum: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
