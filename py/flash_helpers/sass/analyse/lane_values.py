"""Values that the lanes of one warp hold, and the instructions that compute them from others.

A value is known where it follows from the thread's number and from constants: an integer if all 32
lanes hold the same, or else one integer per lane. Registers hold 32 bits, predicates 0 or 1.
Standard library only.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from flash_helpers.gpu import WARP

Lanes = int | tuple[int, ...]  # of all lanes, or of each

_MASK = 0xFFFFFFFF
_OPERAND = re.compile(r"([-~!|]?)(U?[RP])(\d+|Z|T)\|?(?:\.reuse)?")
_NUMBER = re.compile(r"-?0x[0-9a-f]+")
_DECIMAL = re.compile(r"-?[0-9.]+(?:e[-+]?\d+)?")
PREDICATE = re.compile(r"!?U?P[0-9T]")
_CONSTANT = re.compile(r"c\[0x([0-9a-f]+)\]\[(?:(U?R(?:\d+|Z)))?\+?(?:(-?0x[0-9a-f]+))?\]")
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


_SIGNS: Mapping[str, Callable[[int], int]] = {
    "-": operator.neg,
    "~": operator.invert,
    "!": operator.not_,
    "|": lambda word: abs(_signed(word)),
}


@dataclass(frozen=True)
class Words:
    """An instruction's text, taken apart. `written`, `read`: names of the registers and predicates
    that it may write and read; the guard is left out."""

    base: str
    modifiers: frozenset[str]
    operands: tuple[str, ...]
    written: tuple[str, ...]
    read: tuple[str, ...]


@dataclass
class WarpState:
    """The known values of one warp at one place. `values`: by the name of a register or predicate.
    `warp`: the warp's number; None if the block has more than one dimension. `constants`: by
    the number of a constant bank, those of its words that are known, by their addresses."""

    warp: int | None
    constants: Mapping[int, Mapping[int, int]]
    values: dict[str, Lanes] = field(default_factory=dict)

    def only(self, names: Collection[str]) -> WarpState:
        """A state with some of the values, to be changed apart."""
        values = {name: lanes for name, lanes in self.values.items() if name in names}
        return WarpState(self.warp, self.constants, values)

    def set(self, name: str, lanes: Lanes | None) -> None:
        """Let a register hold a value."""
        if lanes is None:
            self.values.pop(name, None)
        else:
            self.values[name] = lanes

    def meet(self, other: WarpState) -> bool:
        """Keep the values that both states know. True if that is less than before."""
        before = len(self.values)
        self.values = dict(self.values.items() & other.values.items())
        return len(self.values) < before

    def value(self, operand: str) -> Lanes | None:
        """The value of an operand as printed: a register, a predicate, a number or a constant; None
        if it is not known."""
        if _NUMBER.fullmatch(operand):
            return int(operand, 16) & _MASK
        match = _OPERAND.fullmatch(operand)
        if match is None:
            return self.constant(operand, 0)
        sign, kind, number = match.groups()
        lanes = int(number == "T") if number in "ZT" else self.values.get(kind + number)
        return each_lane(_SIGNS[sign], lanes) if sign and lanes is not None else lanes

    def constant(self, operand: str, word: int) -> Lanes | None:
        """A word of a constant bank, counted from the one that an operand names."""
        match = _CONSTANT.fullmatch(operand)
        if match is None:
            return None
        bank, index, offset = match.groups()
        words = self.constants.get(int(bank, 16), {})
        start = self.value(index) if index else 0
        if start is None:
            return None
        first = int(offset or "0x0", 16) + 4 * word

        def read(at: int) -> int:
            return words.get(at + first, -1)

        lanes = each_lane(read, start, masked=False)
        return None if -1 in ((lanes,) if isinstance(lanes, int) else lanes) else lanes


def is_followed(words: Words) -> bool:
    """Whether the results of an instruction can be known."""
    return words.base in _COMPUTED


def written_values(words: Words, state: WarpState) -> dict[str, Lanes | None]:
    """The value of each register and predicate that an instruction writes, in a state."""
    compute = _COMPUTED.get(words.base)
    known = compute(words, state) if compute and words.written else {}
    return {name: known.get(name) for name in words.written}


_Known = dict[str, Lanes | None]


def each_lane(function: Callable[..., int], *operands: Lanes, masked: bool = True) -> Lanes:
    """A function of the values of each lane."""
    mask = _MASK if masked else -1
    if all(isinstance(operand, int) for operand in operands):
        return int(function(*operands)) & mask
    columns = [(o,) * WARP if isinstance(o, int) else o for o in operands]
    found = tuple(int(function(*lane)) & mask for lane in zip(*columns, strict=True))
    return found[0] if len(set(found)) == 1 else found


def _of_all(function: Callable[..., int], values: Sequence[Lanes | None]) -> Lanes | None:
    """A function of values, None where one of them is not known."""
    known = [lanes for lanes in values if lanes is not None]
    return each_lane(function, *known) if len(known) == len(values) else None


def _sources(words: Words, state: WarpState) -> list[Lanes | None]:
    """The operands that are read, as printed, predicates too."""
    start = next((n for n, o in enumerate(words.operands) if not PREDICATE.fullmatch(o)), 0) + 1
    return [state.value(operand) for operand in words.operands[start:]]


def _register(words: Words, lanes: Lanes | None) -> _Known:
    """The first register that is written; beside it only predicates may be."""
    name = next((name for name in words.written if "R" in name), None)
    return {} if name is None else {name: lanes}


def _special(words: Words, state: WarpState) -> _Known:
    source = words.operands[-1]
    if source == "SRZ":
        return dict.fromkeys(words.written, 0)
    if source == "SR_TID.X" and state.warp is not None:
        first = WARP * state.warp
        return _register(words, tuple(range(first, first + WARP)))
    return _register(words, tuple(range(WARP)) if source == "SR_LANEID" else None)


def _move(words: Words, state: WarpState) -> _Known:
    source = words.operands[1]
    number = _CONSTANT.fullmatch(source) and len(words.written)
    if number:
        return {n: state.constant(source, k) for k, n in enumerate(words.written)}
    if len(words.written) > 1 or not words.modifiers <= {"U32", "64"}:
        return {}
    return _register(words, state.value(source))


def _load_constant(words: Words, state: WarpState) -> _Known:
    if not words.modifiers <= {"64", "128"}:
        return {}
    return {n: state.constant(words.operands[1], k) for k, n in enumerate(words.written)}


def _to_uniform(words: Words, state: WarpState) -> _Known:
    lanes = state.value(words.operands[-1])
    return _register(words, lanes if isinstance(lanes, int) else None)


def _half_constant(words: Words, state: WarpState) -> _Known:
    """`HFMA2 R3, -RZ, RZ, 0, 5.96e-08`, with which ptxas writes a constant on the FMA pipe: -0 * 0
    plus two numbers of 16 bits, the upper half first."""
    usual = words.operands[1:3] == ("-RZ", "RZ") and words.modifiers <= {"MMA"}
    if not usual or len(words.operands) != 5:
        return {}
    halves = words.operands[3:]
    if not all(_DECIMAL.fullmatch(half) for half in halves):
        return {}
    high, low = (struct.unpack("<H", struct.pack("<e", float(half)))[0] for half in halves)
    return _register(words, high << 16 | low)


def _add(words: Words, state: WarpState) -> _Known:
    if {"X", "64"} & words.modifiers:
        return {}
    terms = [o for o in words.operands[1:] if not PREDICATE.fullmatch(o)]
    return _register(words, _of_all(lambda *each: sum(each), [state.value(o) for o in terms]))


def _multiply_add(words: Words, state: WarpState) -> _Known:
    sources = _sources(words, state)
    if "X" in words.modifiers or len(sources) != 3:
        return {}
    a, b, c = sources
    if {"WIDE", "HI"} & words.modifiers:
        # the third operand has 64 bits, and is zero where ptxas divides by a constant
        if words.operands[3] not in ("RZ", "URZ"):
            return {}
        read: Callable[[int], int] = int if "U32" in words.modifiers else _signed
        high = _of_all(lambda x, y: read(x) * read(y) >> 32, [a, b])
        if "HI" in words.modifiers:
            return _register(words, high)
        low = _of_all(operator.mul, [a, b])
        return dict(zip(words.written, (low, high), strict=False))
    if 0 in (a, b):
        return _register(words, c)
    return _register(words, _of_all(lambda x, y, z: x * y + z, sources))


def _logic(words: Words, state: WarpState) -> _Known:
    """A truth table of three words, and whether any bit of the result is set."""
    sources = _sources(words, state)
    if "LUT" not in words.modifiers or len(sources) < 4 or not isinstance(sources[3], int):
        return {}
    table = sources[3]

    def result(a: int, b: int, c: int) -> int:
        found = 0
        for n in range(8):
            if table >> n & 1:
                found |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
        return found

    lanes = _of_all(result, sources[:3])
    known: _Known = dict.fromkeys(words.written, None)
    known |= _register(words, lanes)
    if PREDICATE.fullmatch(words.operands[0]) and lanes is not None:
        set_ = each_lane(lambda word: word != 0, lanes)
        holds = _combined("PAND" not in words.modifiers, set_, sources[-1])
        known[words.operands[0]] = holds
    return known


def _shift(words: Words, state: WarpState) -> _Known:
    """A funnel shift of two words, of which the lower comes first."""
    signed = bool({"S32", "S64"} & words.modifiers)
    to_left, upper = "L" in words.modifiers, "HI" in words.modifiers

    def result(low: int, by: int, high: int) -> int:
        by = by & 31 if "W" in words.modifiers else min(by, 32)
        both = (_signed(high) if signed else high) << 32 | low
        moved = both << by if to_left else both >> by
        return moved >> 32 if upper else moved

    sources = _sources(words, state)
    # the word that the result has no bit of
    unread = {(True, False): 2, (False, True): 0}.get((to_left, upper))
    if len(sources) != 3:
        return {}
    if unread is not None:
        sources[unread] = 0
    return _register(words, _of_all(result, sources))


def _shift_add(words: Words, state: WarpState) -> _Known:
    if "X" in words.modifiers:
        return {}
    sources = [state.value(o) for o in words.operands[1:] if not PREDICATE.fullmatch(o)]
    if "HI" not in words.modifiers and len(sources) == 3:
        return _register(words, _of_all(lambda a, b, by: (a << (by & 31)) + b, sources))
    if "SX32" in words.modifiers and len(sources) == 3:
        lanes = _of_all(lambda a, b, by: (_signed(a) << (by & 31) >> 32) + b, sources)
        return _register(words, lanes)
    if "HI" in words.modifiers and len(sources) == 4:
        lanes = _of_all(lambda a, b, c, by: ((c << 32 | a) << (by & 31) >> 32) + b, sources)
        return _register(words, lanes)
    return {}


def _select(words: Words, state: WarpState) -> _Known:
    sources = _sources(words, state)
    if len(sources) != 3:
        return {}
    a, b, chosen = sources
    if isinstance(chosen, int):
        return _register(words, (a if chosen else b))
    if a == b:
        return _register(words, a)
    return _register(words, _of_all(lambda x, y, p: x if p else y, sources))


def _minimum(words: Words, state: WarpState) -> _Known:
    """The least or the largest of two words, the first of which may be a sum."""
    key: Callable[[int], int] = int if "U32" in words.modifiers else _signed

    def result(*operands: int) -> int:
        *terms, b, is_least = operands
        a = sum(terms) & _MASK
        return min(a, b, key=key) if is_least else max(a, b, key=key)

    sources = _sources(words, state)
    if words.operands[1:3] == ("PT", "PT"):  # predicates that are not written, from 10.0 on
        sources = sources[2:]
    usual = len(sources) == 3 + words.base.startswith("VIADD")
    usual = usual and words.modifiers <= {"U32", "S32"}
    return _register(words, _of_all(result, sources) if usual else None)


def _permute(words: Words, state: WarpState) -> _Known:
    def result(a: int, chosen: int, b: int) -> int:
        held, found = b << 32 | a, 0
        for n in range(4):
            code = chosen >> 4 * n & 0xF
            byte = held >> 8 * (code & 7) & 0xFF
            found |= ((0xFF if byte >> 7 else 0) if code & 8 else byte) << 8 * n
        return found

    sources = _sources(words, state)
    usual = len(sources) == 3 and not words.modifiers
    return _register(words, _of_all(result, sources) if usual else None)


def _shuffle(words: Words, state: WarpState) -> _Known:
    """The value of another lane, as far as that is the same for all lanes, or the lane is told."""
    if len(words.operands) != 5:
        return {}
    _, name, source, lane, clamp = words.operands
    held, chosen = state.value(source), state.value(lane)
    if isinstance(held, tuple):
        told = "IDX" in words.modifiers and state.value(clamp) == WARP - 1
        held = held[chosen % WARP] if told and isinstance(chosen, int) else None
    return {name: held}


def _compare(words: Words, state: WarpState) -> _Known:
    sources = [state.value(operand) for operand in words.operands[2:]]
    holds = next((_COMPARISONS[m] for m in words.modifiers if m in _COMPARISONS), None)
    if holds is None or {"EX", "U64", "S64"} & words.modifiers or len(sources) != 3:
        return {}
    read = int if "U32" in words.modifiers else _signed
    lanes = _of_all(lambda a, b: holds(read(a), read(b)), sources[:2])
    opposite = None if lanes is None else each_lane(operator.not_, lanes)
    if not {"OR", "AND"} & words.modifiers:
        return {}
    either = "OR" in words.modifiers
    return {
        words.operands[1]: _combined(either, opposite, sources[2]),
        words.operands[0]: _combined(either, lanes, sources[2]),
    }


def _combined(either: bool, a: Lanes | None, b: Lanes | None) -> Lanes | None:
    """The disjunction or conjunction of two predicates; one of them may suffice."""
    decides = int(either)
    if decides in (a, b):
        return decides
    return _of_all(operator.or_ if either else operator.and_, [a, b])


def _predicate_logic(words: Words, state: WarpState) -> _Known:
    """Truth tables of three predicates, of which some may not be known."""
    operands = words.operands
    if len(operands) < 7:
        return {}
    sources = [state.value(operand) for operand in operands[2:5]]
    known: _Known = {}
    for target, table in zip(operands[1::-1], operands[:4:-1], strict=False):
        bits = state.value(table) or 0

        def result(a: int, b: int, c: int, bits: Lanes = bits) -> int:
            return bits >> (4 * a + 2 * b + c) & 1 if isinstance(bits, int) else 0

        found = set()
        for guess in product((0, 1), repeat=sum(lanes is None for lanes in sources)):
            rest = iter(guess)
            told = [next(rest) if lanes is None else lanes for lanes in sources]
            found.add(each_lane(result, *told))
        known[target] = found.pop() if len(found) == 1 else None
    return known


def _vote(words: Words, state: WarpState) -> _Known:
    """A vote on a predicate that all lanes agree on."""
    if not PREDICATE.fullmatch(words.operands[0]) or not {"ALL", "ANY"} & words.modifiers:
        return {}
    lanes = state.value(words.operands[-1])
    return {words.operands[0]: lanes if isinstance(lanes, int) else None}


def _to_predicates(words: Words, state: WarpState) -> _Known:
    match = re.fullmatch(r"(U?R(?:\d+|Z))(?:\.B([0-3]))?", words.operands[1])
    lanes = state.value(match[1]) if match else None
    if match is None or lanes is None:
        return {}
    first = 8 * int(match[2] or "0")
    places = {name: first + int(name.lstrip("UP")) for name in words.written}
    return {
        name: each_lane(lambda word, place: word >> place & 1, lanes, place)
        for name, place in places.items()
    }


def _from_predicates(words: Words, state: WarpState) -> _Known:
    if len(words.operands) != 4 or words.modifiers:
        return {}
    kept, mask = (state.value(operand) for operand in words.operands[2:])
    kind = words.operands[1].removesuffix("R")
    if kept is None or not isinstance(mask, int):
        return {}
    bits = [state.value(f"{kind}{n}") for n in range(7) if mask >> n & 1]
    places = [n for n in range(7) if mask >> n & 1]

    def result(before: int, *held: int) -> int:
        return before & ~mask | sum(bit << n for bit, n in zip(held, places, strict=True))

    return _register(words, _of_all(result, [kept, *bits]))


_COMPUTED: Mapping[str, Callable[[Words, WarpState], _Known]] = {
    **dict.fromkeys(("S2R", "S2UR", "CS2R"), _special),
    **dict.fromkeys(("MOV", "UMOV"), _move),
    **dict.fromkeys(("LDC", "ULDC", "LDCU"), _load_constant),
    "R2UR": _to_uniform,
    "HFMA2": _half_constant,
    **dict.fromkeys(("IADD3", "UIADD3", "VIADD", "UVIADD", "IADD", "UIADD"), _add),
    **dict.fromkeys(("IMAD", "UIMAD"), _multiply_add),
    **dict.fromkeys(("LOP3", "ULOP3"), _logic),
    **dict.fromkeys(("SHF", "USHF"), _shift),
    **dict.fromkeys(("LEA", "ULEA"), _shift_add),
    **dict.fromkeys(("SEL", "USEL"), _select),
    **dict.fromkeys(("IMNMX", "UIMNMX", "VIMNMX", "UVIMNMX", "VIADDMNMX"), _minimum),
    **dict.fromkeys(("PRMT", "UPRMT"), _permute),
    "SHFL": _shuffle,
    **dict.fromkeys(("ISETP", "UISETP"), _compare),
    **dict.fromkeys(("PLOP3", "UPLOP3"), _predicate_logic),
    **dict.fromkeys(("VOTE", "VOTEU"), _vote),
    **dict.fromkeys(("R2P", "UR2UP"), _to_predicates),
    **dict.fromkeys(("P2R", "UP2UR"), _from_predicates),
}
