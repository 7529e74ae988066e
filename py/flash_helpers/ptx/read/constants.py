"""Constant expressions (PTX ISA 9.0, "Constant Expressions").

Integers have 64 bits, and are signed unless an operand is not: a literal with `U` or one that needs
all 64 bits, a cast to `.u64`, or the result of a bitwise operation. `%` takes its operands as
unsigned numbers, as ptxas 13.0 does: -7 % 3 is 0.
"""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

NAMED = {"WARP_SZ": 32}
"""Constants with a name."""

_TOKEN = re.compile(
    r"\s*(?:(?P<bits>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b)"
    r"|(?P<float>\d+\.\d*(?:[eE][-+]?\d+)?)"
    r"|(?P<integer>(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?\b)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<cast>\(\s*\.[su]64\s*\))"
    r"|(?P<operator>&&|\|\||<<|>>|<=|>=|==|!=|[-+*/%<>&^|!~?:()]))",
    re.ASCII,
)
_DEEPEST = 64
_MODULUS = 1 << 64


@dataclass(frozen=True)
class _Value:
    """A number, and whether it is an unsigned integer."""

    number: int | float
    is_unsigned: bool = False

    @property
    def is_float(self) -> bool:
        return isinstance(self.number, float)

    @property
    def as_unsigned(self) -> int:
        return self.integer % _MODULUS

    @property
    def integer(self) -> int:
        if isinstance(self.number, float):
            raise ValueError("a number of floating point where an integer is due")
        return self.number


def _integer(value: int, is_unsigned: bool = False) -> _Value:
    value %= _MODULUS
    is_negative = not is_unsigned and value >> 63
    return _Value(value - _MODULUS if is_negative else value, is_unsigned)


def _quotient(a: float, b: float) -> int | float:
    if not b:
        raise ValueError("a division by zero")
    if isinstance(a, int) and isinstance(b, int):
        magnitude = abs(a) // abs(b)
        return -magnitude if (a < 0) != (b < 0) else magnitude
    return a / b


def _remainder(a: int, b: int) -> int:
    if not b:
        raise ValueError("a division by zero")
    return a % b


_Numbers = Callable[[float, float], "int | float | bool"]
_ARITHMETIC: Mapping[str, _Numbers] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _quotient,
}
_COMPARISONS: Mapping[str, _Numbers] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_UNSIGNED: Mapping[str, Callable[[int, int], int]] = {
    "%": _remainder,
    "&": operator.and_,
    "^": operator.xor,
    "|": operator.or_,
}
_LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="),
           ("<<", ">>"), ("+", "-"), ("*", "/", "%"))  # fmt: skip
"""Binary operators, the weakest first."""


def _binary(name: str, a: _Value, b: _Value) -> _Value:
    if name in ("&&", "||"):
        both = bool(a.number), bool(b.number)
        return _integer(all(both) if name == "&&" else any(both))
    if name in _UNSIGNED:
        return _integer(_UNSIGNED[name](a.as_unsigned, b.as_unsigned), is_unsigned=True)
    if name in ("<<", ">>"):
        shift = min(b.as_unsigned, 64)
        shifted = a.integer << shift if name == "<<" else a.integer >> shift
        return _integer(shifted, a.is_unsigned)
    is_unsigned = a.is_unsigned or b.is_unsigned
    x, y = a.number, b.number
    if is_unsigned and not (a.is_float or b.is_float):
        x, y = a.as_unsigned, b.as_unsigned
    if name in _COMPARISONS:
        return _integer(bool(_COMPARISONS[name](x, y)))
    found = _ARITHMETIC[name](x, y)
    return _Value(found) if isinstance(found, float) else _integer(int(found), is_unsigned)


class _Expression:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.token: re.Match[str] | None = None
        self.advance()

    def advance(self) -> None:
        if not self.text[self.position :].strip():
            self.token = None
            return
        self.token = _TOKEN.match(self.text, self.position)
        if self.token is None:
            raise ValueError("no constant expression")
        self.position = self.token.end()

    def takes(self, *operators: str) -> str | None:
        """The operator that comes next, if it is one of these."""
        found = self.token["operator"] if self.token else None
        if found not in operators:
            return None
        self.advance()
        return found

    def conditional(self) -> _Value:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} expressions within expressions")
        chosen = self.binary(0)
        if self.takes("?"):
            first = self.conditional()
            if not self.takes(":"):
                raise ValueError("a ':' is due")
            second = self.conditional()
            if chosen.is_float:
                raise ValueError("a number of floating point where an integer is due")
            chosen = first if chosen.number else second
            if not chosen.is_float and (first.is_unsigned or second.is_unsigned):
                chosen = _integer(chosen.integer, is_unsigned=True)
        self.depth -= 1
        return chosen

    def binary(self, level: int) -> _Value:
        if level == len(_LEVELS):
            return self.unary()
        found = self.binary(level + 1)
        while name := self.takes(*_LEVELS[level]):
            found = _binary(name, found, self.binary(level + 1))
        return found

    def unary(self) -> _Value:
        before: list[str] = []
        while name := self.takes("+", "-", "!", "~") or self.cast():
            before.append(name)
            if len(before) > _DEEPEST:
                raise ValueError(f"more than {_DEEPEST} operators before a number")
        found = self.primary()
        for name in reversed(before):
            if name == "-":
                number = -found.number
                found = (
                    _Value(number) if found.is_float else _integer(int(number), found.is_unsigned)
                )
            elif name == "!":
                found = _integer(not found.number)
            elif name == "~":
                found = _integer(~found.integer, is_unsigned=True)
            elif name != "+":
                found = _integer(found.integer, is_unsigned=name == "u")
        return found

    def cast(self) -> str | None:
        found = self.token["cast"] if self.token else None
        if found is None:
            return None
        self.advance()
        return "u" if "u" in found else "s"

    def primary(self) -> _Value:
        if self.takes("("):
            found = self.conditional()
            if not self.takes(")"):
                raise ValueError("a ')' is due")
            return found
        if self.token is None:
            raise ValueError("a number is due")
        kind, text = self.token.lastgroup, self.token[self.token.lastgroup or 0]
        self.advance()
        if kind == "name" and text in NAMED:
            return _integer(NAMED[text])
        if kind == "float" and math.isfinite(float(text)):
            return _Value(float(text))
        if kind == "bits":
            form = ">f" if text[1] in "fF" else ">d"
            return _Value(*struct.unpack(form, bytes.fromhex(text[2:])))
        if kind == "integer":
            return _literal(text)
        raise ValueError("a number is due")


def _literal(text: str) -> _Value:
    digits = text.removesuffix("U")
    octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
    value = int(digits, 8 if octal else 0) if len(digits) < 70 else _MODULUS
    if value >= _MODULUS:
        raise ValueError("an integer of more than 64 bits")
    return _Value(value, is_unsigned=text != digits or value >> 63 == 1)


def evaluate(text: str) -> int | float:
    """The value of a constant expression. Raises ValueError for any other text."""
    expression = _Expression(text)
    found = expression.conditional()
    if expression.token is not None:
        raise ValueError("no constant expression")
    return found.number
