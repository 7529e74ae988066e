"""Registers that an instruction reads and writes, by its text.

The number of registers of an operand follows from the opcode. The tests check it against nvdisasm
(`-plr -lrm wide`). Registers that calls change are missing. Standard library only.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import BRANCHES, CALLS
from flash_helpers.sass.read.records import Operation

_REGISTER = re.compile(r"(?<![\w.])(UR|UP|R|P|B)(\d+|R\b)((?:\.[A-Z]\w*|\.64)*)")
_PREDICATE = re.compile(r"U?P[\dT]")
_ALL_PREDICATES = range(7)

_ADDRESS_FIRST = CALLS | frozenset({"BRX", "RET", "JMX", "BRXU", "JMXU"})  # of 64 bits
_READS_ONLY = (BRANCHES | _ADDRESS_FIRST) | frozenset(
    {"BAR", "DEPBAR", "WARPSYNC", "BSYNC", "EXIT", "NANOSLEEP", "KILL", "YIELD", "BPT"}
)  # though a register or a predicate stands first
_ENDS_WITH_A_PREDICATE = frozenset({"VOTE", "VOTEU", "ELECT"})  # that is read
_GLOBAL = frozenset({"LDG", "STG", "LD", "ST", "ATOM", "ATOMG", "RED", "REDG"})
_HAS_DESCRIPTOR = 0x800  # of the encoding
_DESCRIPTOR_OF_LOAD, _DESCRIPTOR = 32, 64  # the first of six bits
_NO_REGISTER = 0x3F  # URZ
_OF_TWO = frozenset({"FADD2", "FMUL2", "FFMA2"})
_SIZES = {"64": 2, "128": 4, "256": 8}
_WHOLE_OF_64 = frozenset({"S64", "U64"})


class Access(NamedTuple):
    """A register that an instruction reads or writes. `name`: such as "R4", "UR4", "P0" or "B0"."""

    name: str
    is_written: bool


@functools.lru_cache(maxsize=1 << 16)
def accesses(predicate: str, opcode: str, operands: str) -> tuple[Access, ...]:
    """The accesses of an instruction in the order of its text, one per register of an operand.

    `predicate`, `opcode`, `operands`: as in `records.Operation`. Instructions that print alike
    except for the numbers of registers have equally many accesses, in the same places.
    """
    found = [Access(match[1] + match[2], False) for match in _REGISTER.finditer(predicate)]
    parts = operands.split(", ")
    written = _written(opcode, parts)
    for position, operand in enumerate(parts):
        for match in _REGISTER.finditer(operand):
            kind, number = match[1], match[2]
            if number == "R":  # PR and UPR, of which a mask tells some
                mask = int(parts[-1], 16) if parts[-1].startswith("0x") else 0x7F
                numbers = [n for n in _ALL_PREDICATES if mask >> n & 1]
            elif kind in ("R", "UR"):
                width = _width(opcode, parts, position, written, match)
                numbers = list(range(int(number), int(number) + width))
            else:
                numbers = [int(number)]
            found += [Access(f"{kind}{n}", position in written) for n in numbers]
    return tuple(found)


def _written(opcode: str, parts: list[str]) -> range:
    """Positions of the operands that are written: the first ones, at most one register and
    predicates beside it."""
    base = opcode.partition(".")[0]
    if base in _READS_ONLY:
        return range(0)
    if base in ("R2P", "UR2UP", "BSSY"):
        return range(1)
    if base == "BREAK":
        return range(len(parts) - 1, len(parts))
    if base == "FCHK" or "SETP" in base or base.endswith("PLOP3"):
        return range(next((n for n, p in enumerate(parts[:2]) if not _PREDICATE.fullmatch(p)), 2))
    registers = 0
    for end, part in enumerate(parts):
        if _PREDICATE.fullmatch(part):
            if base in _ENDS_WITH_A_PREDICATE and end == len(parts) - 1:
                return range(end)
            continue
        registers += 1
        if registers > 1 or not re.fullmatch(r"(U?R|B)(\d+|Z)", part):
            return range(end)
    return range(len(parts))


def _width(
    opcode: str, parts: list[str], position: int, written: range, match: re.Match[str]
) -> int:
    """Number of registers that a mention of one stands for."""
    operand, base = parts[position], opcode.partition(".")[0]
    before = operand[: match.start()]
    if before.endswith("["):
        outside = re.search(r"(\w*)\[$", before)
        return _in_brackets(opcode, outside[1] if outside else "", match, parts, position)
    if "[" in before:
        return 1
    if base in _ADDRESS_FIRST:
        return 2
    # operands are told apart by where they stand among those that are read
    read = sum(not _PREDICATE.fullmatch(p) for p in parts[written.stop : position])
    return _of_operand(opcode, position in written, read)


def _in_brackets(
    opcode: str, outside: str, match: re.Match[str], parts: list[str], position: int
) -> int:
    """The width of a register that stands first in brackets. `outside`: the text before them."""
    base, *modifiers = opcode.split(".")
    if outside == "gdesc":
        return 4  # descriptors of A and B, also where A is in registers
    if outside in ("desc", "cx"):
        return 2
    if "64" in match[3].split("."):
        return 2
    if base in ("UTMALDG", "UTMASTG", "UTMAREDG", "UTMAPF") and position < 2:
        dimensions = next((int(m[0]) for m in modifiers if re.fullmatch(r"[1-5]D", m)), 0)
        first = 2 + dimensions if base == "UTMALDG" else 1 + dimensions
        return first if position == 0 else 2
    if base in _GLOBAL and "E" in modifiers and match[1] in ("R", "UR") and not match[3]:
        return 1 if "desc" in parts[position] else 2  # before sm_80 there is no ".64"
    return 1


def _of_operand(opcode: str, is_written: bool, read: int) -> int:
    """The width of a register that stands alone. `read`: number of operands that are read
    before."""
    base, *modifiers = opcode.split(".")
    name = opcodes.classify(opcode)
    size = max((_SIZES[m] for m in modifiers if m in _SIZES), default=1)
    if name == opcodes.TENSOR:
        return _of_tensor(opcode, is_written, read)
    if name == opcodes.FP64 or base in _OF_TWO:
        return 2
    if base == "DSETP" or (base == "ISETP" and _WHOLE_OF_64 & {*modifiers}):
        return 2
    if base in ("IMAD", "UIMAD"):
        if "WIDE" in modifiers:
            return 2 if is_written or read == 2 else 1
        return 2 if "HI" in modifiers and not is_written and read == 2 else 1
    if name == opcodes.CONVERSION:
        return _of_conversion(base, modifiers, is_written)
    if base in ("LDSM", "STSM"):
        return next((int(m) for m in reversed(modifiers) if m in ("1", "2", "4")), 1)
    if base in ("CS2R", "CS2UR"):
        return 1 if "32" in modifiers else 2
    if name == opcodes.ATOMIC and {"F64", *_WHOLE_OF_64} & {*modifiers}:
        return 2
    return size


def _of_conversion(base: str, modifiers: list[str], is_written: bool) -> int:
    types = [m for m in modifiers if re.fullmatch(r"[FSU](8|16|32|64)", m)]
    if base == "F2F":
        return 2 if types[0 if is_written else 1 :][:1] == ["F64"] else 1
    if base == "FRND":
        return 2 if "F64" in types else 1
    floating = (base == "I2F") == is_written
    if floating:
        return 2 if "F64" in types else 1
    return 2 if _WHOLE_OF_64 & {*types} else 1


def _of_tensor(opcode: str, is_written: bool, read: int) -> int:
    shape = opcodes.tensor_shape(opcode)
    if shape is None:
        return 1
    m, n, k = shape
    base, *modifiers = opcode.split(".")
    lanes = 32 * (opcodes.GROUP_WARPS if base in opcodes.GROUP_TENSOR else 1)
    result = 64 if base == "DMMA" else 16 if "F16" in modifiers[1:2] else 32
    # B of a warp group is told by a descriptor
    if is_written or read >= (1 if base in opcodes.GROUP_TENSOR else 2):
        elements, bits = m * n, result
    else:
        elements, bits = (k * n if read else m * k), _factor_bits(base, modifiers)
    return max(elements * bits // (32 * lanes), 1)


def _factor_bits(base: str, modifiers: list[str]) -> int:
    if base == "DMMA":
        return 64
    if base in ("HMMA", "HGMMA"):
        return 32 if "TF32" in modifiers else 16
    if base in ("BMMA", "BGMMA"):
        return 1
    return 4 if {"S4", "U4"} & {*modifiers} else 8


def unprinted_reads(operation: Operation) -> list[str]:
    """The uniform registers that an access to global memory of sm_80 to sm_89 takes for its
    descriptor, without printing them: a pair, which its encoding names."""
    is_global = operation.base in _GLOBAL or operation.base == "LDGSTS"
    is_bare = ".64" in operation.operands and "desc" not in operation.operands
    if not (is_global and is_bare and operation.encoding & _HAS_DESCRIPTOR):
        return []
    at = _DESCRIPTOR_OF_LOAD if operation.base in ("LD", "LDG") else _DESCRIPTOR
    first = operation.encoding >> at & _NO_REGISTER
    return [] if first == _NO_REGISTER else [f"UR{first}", f"UR{first + 1}"]


def operation_accesses(operation: Operation) -> tuple[Access, ...]:
    """`accesses` of an instruction."""
    return accesses(operation.predicate, operation.opcode, operation.operands)
