"""Formulas of the sizes of a call, taken from the Python functions that launches come from.

A function such as `Config.call` runs on formulas instead of numbers. Where it asks whether a
condition holds, it runs once for each answer, and `explore` returns the tree of all its paths. So
a formula in a C header and the launch from Python have one source. Standard library only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

_LEAST, _MOST = -(2**63), 2**63 - 1  # of an int64_t
MARK = "\x1a"  # on both sides of a formula's number in a text that a path has made


# Answers of conditions, by the conditions' texts.
Facts: TypeAlias = "Mapping[str, tuple[Condition, bool]]"


class _NotANumber(TypeError):
    """A formula in a place that takes numbers only."""


class Path:
    """The answers that a run has for its conditions. `named`: formulas in texts, by their number
    (`MARK`)."""

    def __init__(self) -> None:
        self.named: list[Formula] = []
        self.follow({})

    def follow(self, answers: Facts) -> None:
        """Take a path on which these answers hold."""
        self.answers: dict[str, tuple[Condition, bool]] = {}
        self._ranges: dict[str, tuple[float, float]] = {}
        for condition, holds in answers.values():
            self._learn(condition, holds)

    @property
    def state(self) -> tuple[Any, Any]:
        """All that is known on this path so far."""
        return self.answers, self._ranges

    @state.setter
    def state(self, state: tuple[Any, Any]) -> None:
        self.answers, self._ranges = state

    def _learn(self, condition: Condition, holds: bool) -> None:
        self.answers[condition.text] = condition, holds
        first, second = condition.operands
        if condition.operator == "==":
            self._learn_equality(first, second, holds)
        elif holds:
            self._narrow(first, -math.inf, self.range_of(second)[1] - 1)
            self._narrow(second, self.range_of(first)[0] + 1, math.inf)
        else:
            self._narrow(first, self.range_of(second)[0], math.inf)
            self._narrow(second, -math.inf, self.range_of(first)[1])

    def _learn_equality(self, first: Formula, second: Formula, holds: bool) -> None:
        if first.is_real or second.is_real:
            return
        for formula, other in ((first, second), (second, first)):
            low, high = self.range_of(other)
            if holds:
                self._narrow(formula, low, high)
            elif low == high:  # it may be an end of the formula's range, and is left out of it
                least, most = self.range_of(formula)
                self._narrow(formula, low + 1 if least == low else -math.inf, math.inf)
                self._narrow(formula, -math.inf, high - 1 if most == high else math.inf)
        if holds and first.operator == "%" and second.text == "0":
            divided, divisor = first.operands
            if min(self.range_of(divided)[0], self.range_of(divisor)[0]) > 0:
                self._narrow(divided // divisor, 1, math.inf)

    def _narrow(self, formula: Formula, low: float, high: float) -> None:
        if not formula.is_real:
            known = self.range_of(formula)
            self._ranges[formula.text] = max(low, known[0]), min(high, known[1])

    def range_of(self, formula: Formula) -> tuple[float, float]:
        """Return the least and the largest value of a formula on this path."""
        return self._ranges.get(formula.text, (formula.low, formula.high))

    def symbol(self, name: str, least: float, most: float, is_real: bool = False) -> Formula:
        """Return the formula of an input in a range."""
        return Formula(self, name, (), least, most, is_real)

    def number(self, value: float) -> Formula:
        """Return the formula of a constant."""
        return Formula(self, repr(value), (), value, value, isinstance(value, float))

    def choice(self, condition: Condition, yes: Formula | float, no: Formula | float) -> Formula:
        """Return the formula of one value or the other."""
        first, second = self.formula(yes), self.formula(no)
        low, high = min(first.low, second.low), max(first.high, second.high)
        if first.text == second.text:
            return first.within(low, high)
        operands = (condition, first, second)
        return Formula(self, "?", operands, low, high, first.is_real or second.is_real)

    def formula(self, value: Any) -> Formula:
        """Return a formula as it is, and that of a number."""
        return value if isinstance(value, Formula) else self.number(value)

    def decide(self, condition: Condition) -> bool:
        """Return whether a condition holds on this path. One that may hold or not does, from here
        on."""
        if (known := self.answers.get(condition.text)) is not None:
            return known[1]
        first, second = condition.operands
        if first.text == second.text:
            return condition.operator == "=="
        (low, high), (other_low, other_high) = map(self.range_of, condition.operands)
        if condition.operator == "<":
            if high < other_low or low >= other_high:
                return high < other_low
        elif high < other_low or low > other_high:
            return False
        elif low == high == other_low == other_high:
            return True
        self._learn(condition, True)
        return True


class Formula:
    """A number that depends on inputs of a call: whole, or of double precision if `is_real`.

    `operator`: one of + - * / % and ? (a `Condition` and two formulas); without operands the name
    of an input or a constant. A quotient of whole numbers is rounded down, as in Python. `low`,
    `high`: its least and largest value. `text`: the formula in C's notation, which identifies it.
    """

    __slots__ = ("high", "is_real", "low", "operands", "operator", "path", "text")

    def __init__(
        self,
        path: Path,
        operator: str,
        operands: tuple[Any, ...],
        low: float,
        high: float,
        is_real: bool = False,
    ) -> None:
        self.path = path
        self.operator = operator
        self.operands = operands
        self.low = low
        self.high = high
        self.is_real = is_real
        if not operands:
            self.text = operator
        elif operator == "?":
            condition, yes, no = operands
            self.text = f"({condition.text} ? {yes.text} : {no.text})"
        else:
            self.text = f"({operands[0].text} {operator} {operands[1].text})"
        if not is_real and not _LEAST <= low <= high <= _MOST:
            raise OverflowError(f"{self.text} is from {low} to {high}, beyond 64 bits")

    def within(self, low: float, high: float) -> Formula:
        """Return the formula with another range."""
        return Formula(self.path, self.operator, self.operands, low, high, self.is_real)

    @property
    def is_constant(self) -> bool:
        """Whether it has one value."""
        return not self.operands and self.low == self.high

    def inputs(self) -> set[str]:
        """Return the names of the inputs that it depends on."""
        if not self.operands:
            return set() if self.is_constant else {self.operator}
        return set().union(*(operand.inputs() for operand in self.operands))

    # -- what Python's functions do with a number --------------------------------------------------

    def _of(self, operator: str, first: Formula, second: Formula, *ends: float) -> Formula:
        is_real = first.is_real or second.is_real
        if is_real and operator in "/%":
            raise _NotANumber(f"{first.text} or {second.text} is no whole number")
        ends = (-math.inf, math.inf) if is_real else ends
        return Formula(self.path, operator, (first, second), min(ends), max(ends), is_real)

    def __add__(self, other: Any) -> Formula:
        second = self.path.formula(other)
        if second.is_constant and second.low == 0:
            return self
        if self.is_constant and second.is_constant:
            return self.path.number(self.low + second.low)
        if second.is_constant and self.operator == "+" and self.operands[1].is_constant:
            return self.operands[0] + (self.operands[1].low + second.low)
        if second.is_constant and second.low < 0:
            return self - (-second.low)
        ranges = map(self.path.range_of, (self, second))  # which a refusal may have made smaller
        return self._of("+", self, second, *map(sum, zip(*ranges, strict=True)))

    def __radd__(self, other: Any) -> Formula:
        return self + other

    def __sub__(self, other: Any) -> Formula:
        second = self.path.formula(other)
        if second.is_constant and second.low == 0:
            return self
        if self.is_constant and second.is_constant:
            return self.path.number(self.low - second.low)
        if second.is_constant and self.operator == "+" and self.operands[1].is_constant:
            return self.operands[0] + (self.operands[1].low - second.low)
        return self._of("-", self, second, self.low - second.high, self.high - second.low)

    def __rsub__(self, other: Any) -> Formula:
        return self.path.formula(other) - self

    def __neg__(self) -> Formula:
        if self.operator == "-" and self.operands[0].text == "0":
            return self.operands[1]
        return self._of("-", self.path.number(0), self, -self.high, -self.low)

    def __mul__(self, other: Any) -> Formula:
        first, second = self, self.path.formula(other)
        if first.is_constant:
            first, second = second, first
        if second.is_constant and second.low in (0, 1) and not second.is_real:
            return second if second.low == 0 else first
        if first.is_constant and second.is_constant:
            return self.path.number(first.low * second.low)
        if second.is_constant and second.low < 0:
            return -(first * -second.low)
        ranges = map(self.path.range_of, (first, second))  # which a refusal may have made smaller
        ends = [a * b for a, b in itertools.product(*ranges)]
        return self._of("*", first, second, *ends)

    def __rmul__(self, other: Any) -> Formula:
        return self * other

    def __truediv__(self, other: Any) -> Formula:
        operands = (self, self.path.formula(other))
        if not any(operand.is_real for operand in operands):  # it would be rounded down in C
            raise _NotANumber(f"{self.text} and {operands[1].text} are whole numbers")
        return Formula(self.path, "/", operands, -math.inf, math.inf, is_real=True)

    def __floordiv__(self, other: Any) -> Formula:
        second = self.path.formula(other)
        if self.operator == "-" and self.operands[0].text == "0":  # -(-a // b) is rounded up
            return -((self.operands[1] + (second - 1)) // second)
        if second.is_constant and second.low == 1:
            return self
        if self.is_constant and second.is_constant:
            return self.path.number(self.low // second.low)
        if second.low < 0:
            most = max(abs(self.low), abs(self.high))
            return self._of("/", self, second, -most, most)
        divisors = max(second.low, 1), max(second.high, 1)
        ends = (end // divisor for end in (self.low, self.high) for divisor in divisors)
        return self._of("/", self, second, *ends)

    def __rfloordiv__(self, other: Any) -> Formula:
        return self.path.formula(other) // self

    def __mod__(self, other: Any) -> Formula:
        second = self.path.formula(other)
        if self.text == second.text or (second.is_constant and second.low == 1):
            return self.path.number(0)
        if self.is_constant and second.is_constant:
            return self.path.number(self.low % second.low)
        low, high = min(second.low + 1, 0), max(second.high - 1, 0)
        if self.low >= 0 and second.low >= 0:
            high = min(self.high, high)
        return self._of("%", self, second, low, high)

    def __lt__(self, other: Any) -> Condition:
        return Condition("<", (self, self.path.formula(other)))

    def __gt__(self, other: Any) -> Condition:
        return Condition("<", (self.path.formula(other), self))

    def __le__(self, other: Any) -> Condition:
        return (self > other).inverted

    def __ge__(self, other: Any) -> Condition:
        return (self < other).inverted

    def __eq__(self, other: object) -> Condition:  # type: ignore[override]
        return Condition("==", (self, self.path.formula(other)))

    def __ne__(self, other: object) -> Condition:  # type: ignore[override]
        return (self == other).inverted

    # a set of formulas would tell equal numbers apart
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __index__(self) -> int:
        raise _NotANumber(f"{self.text} is no number")

    def __float__(self) -> float:
        raise _NotANumber(f"{self.text} is no number")

    def __format__(self, _: str) -> str:
        named = self.path.named
        numbers = {formula.text: number for number, formula in enumerate(named)}
        if self.text not in numbers:
            named.append(self)
        return f"{MARK}{numbers.get(self.text, len(numbers))}{MARK}"

    def __str__(self) -> str:
        return format(self)

    def __repr__(self) -> str:
        return f"{self.text} from {self.low} to {self.high}"


class Condition:
    """A comparison of two formulas. `operator`: < or ==, or ! for its opposite. `text`: the
    condition in C's notation, which identifies it."""

    __slots__ = ("operands", "operator", "text")

    def __init__(self, operator: str, operands: tuple[Any, ...]) -> None:
        self.operator = operator
        self.operands = operands
        first, second = operands[0].operands if operator == "!" else operands
        shown = {"<": ">=", "==": "!="}[operands[0].operator] if operator == "!" else operator
        self.text = f"{first.text} {shown} {second.text}"

    @property
    def inverted(self) -> Condition:
        """The condition that holds where this one does not."""
        return self.operands[0] if self.operator == "!" else Condition("!", (self,))

    def inputs(self) -> set[str]:
        """Return the names of the inputs that it depends on."""
        return set().union(*(operand.inputs() for operand in self.operands))

    def __bool__(self) -> bool:
        if self.operator == "!":
            return not self.operands[0]
        return self.operands[0].path.decide(self)


# -- the paths of a function -----------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """The end of a path. `value`: the function's result."""

    value: Any


@dataclass(frozen=True)
class Refusal:
    """The end of a path on which the function raises ValueError. `text`: with `MARK`s."""

    text: str


@dataclass(frozen=True)
class Branch:
    """A condition, and what follows if it holds and if not."""

    condition: Condition
    yes: Tree
    no: Tree


Tree: TypeAlias = "Leaf | Refusal | Branch"


def explore(path: Path, function: Callable[[], Any], known: Facts) -> Tree:
    """Return the tree of a function's paths. `known`: the answers that all of them have.

    A ValueError ends a path in a refusal; so does a text that needs the value of a formula.
    """

    def run() -> Leaf | Refusal:
        try:
            return Leaf(function())
        except ValueError as error:
            return Refusal(str(error))
        except _NotANumber:
            if len(path.answers) == len(known):
                raise
            condition, holds = [*path.answers.values()][-1]
            failed = condition if holds else condition.inverted
            return Refusal(f"{failed.text}: no kernel takes that")

    def visit(answers: Facts) -> Tree:
        path.follow(answers)
        tree: Tree = run()
        taken = [*path.answers.values()]
        for number in range(len(taken) - 1, len(answers) - 1, -1):
            condition, _ = taken[number]
            others = [*taken[:number], (condition, False)]
            tree = Branch(condition, tree, visit({other[0].text: other for other in others}))
        return tree

    try:
        return visit(known)
    finally:
        path.follow(known)


def merged(path: Path, function: Callable[[], Any], known: Facts) -> Formula | float | None:
    """Return a function's result on all of its paths as one formula; as it is if it has one path;
    None if it refuses one.

    It may be called on a path of another function, which `known` belongs to, too. That function
    then goes on as one path instead of as many.
    """

    def within_range() -> Any:
        found = function()
        return found.within(*path.range_of(found)) if isinstance(found, Formula) else found

    taken = path.state
    try:
        tree = explore(path, within_range, known)
    except _NotANumber:
        return None
    finally:
        path.state = taken
    if isinstance(tree, Leaf):
        return tree.value
    return None if refusals(tree) else value_of(tree, path, lambda value: value)


def facts(tree: Tree) -> Facts | None:
    """Return the answers that all accepted paths have in common; None if there is no such path."""
    if isinstance(tree, Refusal):
        return None
    if isinstance(tree, Leaf):
        return {}
    condition, yes, no = tree.condition, facts(tree.yes), facts(tree.no)
    if yes is None or no is None:
        found, answer = (no, False) if yes is None else (yes, True)
        return None if found is None else {**found, condition.text: (condition, answer)}
    return {text: value for text, value in yes.items() if text in no and no[text][1] == value[1]}


def refusals(tree: Tree) -> list[tuple[tuple[Condition, ...], str]]:
    """Return the conditions of each refusal, which hold together, and its text. Conditions that
    follow from the refusals before it are left out."""
    if isinstance(tree, Refusal):
        return [((), tree.text)]
    if not isinstance(tree, Branch):
        return []
    yes, no = tree.condition, tree.condition.inverted
    if isinstance(tree.yes, Refusal):
        return [((yes,), tree.yes.text), *refusals(tree.no)]
    if isinstance(tree.no, Refusal):
        return [((no,), tree.no.text), *refusals(tree.yes)]
    if_yes, if_no = refusals(tree.yes), refusals(tree.no)  # each once: a tree has thousands
    shared = _shared_end(_told(if_yes), _told(if_no))
    return [
        *(((yes, *under), text) for under, text in if_yes[: len(if_yes) - shared]),
        *(((no, *under), text) for under, text in if_no[: len(if_no) - shared]),
        *if_yes[len(if_yes) - shared :],
    ]


def _told(found: list[tuple[tuple[Condition, ...], str]]) -> list[tuple[list[str], str]]:
    """Return refusals as texts, by which they are compared."""
    return [([x.text for x in under], text) for under, text in found]


def _shared_end(first: list[Any], second: list[Any]) -> int:
    """Return the number of items at the ends of both lists that are equal."""
    pairs = zip(reversed(first), reversed(second), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def leaves(tree: Tree) -> Iterator[Any]:
    """Yield the results of all accepted paths."""
    if isinstance(tree, Leaf):
        yield tree.value
    elif isinstance(tree, Branch):
        yield from leaves(tree.yes)
        yield from leaves(tree.no)


def value_of(tree: Tree, path: Path, pick: Callable[[Any], Formula | float]) -> Formula | None:
    """Return the formula of a part of the result; None if no path is accepted."""
    if isinstance(tree, Refusal):
        return None
    if isinstance(tree, Leaf):
        return path.formula(pick(tree.value))
    yes, no = (value_of(branch, path, pick) for branch in (tree.yes, tree.no))
    if yes is None or no is None:
        return no if yes is None else yes
    return path.choice(tree.condition, yes, no)
