"""Formulas follow a Python function on all of its paths."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
from exported_calls import evaluate

from flash_helpers.export.description import in_json
from flash_helpers.export.formulas import MARK, Formula, Path, explore, refusals, value_of

FUNCTIONS: dict[str, Callable] = {
    "sums": lambda a, b: 3 - a + b - 2 + a * -4,
    "rounded up": lambda a, b: -(-a // b) + -(-7 * a // 3),
    "quotients below zero": lambda a, b: (a - b) // b * 100 + (a - b) % b,
    "the smaller and the larger": lambda a, b: max(min(a, b, 9), 3),
    "a branch in a branch": lambda a, b: (a if a % 3 else b) if b > 4 else a * b,
    "a truth value": lambda a, b: 1 if a - b else 2,
    "a comparison of both ends": lambda a, b: 1 if 3 <= a <= b else 0,
    "a divisor that is positive where it is used": lambda a, b: a % (b - 3) if b > 3 else a,
    "a loop with an end": lambda a, b: sum(1 for i in range(5) if i * b < a),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_formula_is_what_the_function_returns(name) -> None:
    path, function = Path(), FUNCTIONS[name]
    a, b = (path.symbol(letter, 1, 12) for letter in "ab")
    found = value_of(explore(path, lambda: function(a, b), {}), path, lambda value: value)
    assert found is not None
    for values in itertools.product(range(1, 13), repeat=2):
        wanted = function(*values)
        assert evaluate(in_json(found), dict(zip("ab", values, strict=True))) == wanted, values
        assert found.low <= wanted <= found.high


def test_a_condition_that_the_ranges_decide_is_no_branch() -> None:
    path = Path()
    a = path.symbol("a", 1, 5)
    found = value_of(explore(path, lambda: min(a, 9), {}), path, lambda value: value)
    assert found is a


def test_a_refusal_has_its_conditions_and_its_values() -> None:
    def function(a: Formula) -> Formula:
        if a % 4:
            raise ValueError(f"{a} is no multiple of 4: use {-(-a // 4) * 4}")
        return a

    path = Path()
    a = path.symbol("a", 1, 50)
    (((condition,), text),) = refusals(explore(path, lambda: function(a), {}))
    assert condition.text == "(a % 4) != 0"
    assert re.sub(f"{MARK}.{MARK}", "…", text) == "… is no multiple of 4: use …"
    assert [formula.text for formula in path.named] == ["a", "(((a + 3) / 4) * 4)"]


def test_a_function_that_needs_a_number_is_refused_by_name() -> None:
    path = Path()
    a = path.symbol("a", 1, 5)
    with pytest.raises(TypeError, match="a is no number"):
        explore(path, lambda: [0, 1, 2][a], {})
    with pytest.raises(TypeError, match="unhashable"):
        explore(path, lambda: {a} == {3}, {})


def test_a_formula_beyond_64_bits_is_refused() -> None:
    a = Path().symbol("a", 0, 2**40)
    with pytest.raises(OverflowError, match=re.escape("(a * a) is from 0 to")):
        a * a
