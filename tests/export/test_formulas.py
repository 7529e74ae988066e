"""Formulas follow a Python function on all of its paths."""

import itertools
import re
from collections.abc import Callable

import pytest
from exported_calls import evaluate

from flash_helpers.export.description import in_json
from flash_helpers.export.formulas import (
    MARK,
    Formula,
    Path,
    explore,
    leaves,
    merged,
    refusals,
    value_of,
)

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
    "a number that is an end of its range": lambda a, b: (a - 1) % b if a == 1 else b % (a - 1),
    "one that is the other": lambda a, b: min(a, b + 1) if a == b else max(a, b),
    "a quotient without a remainder": lambda a, b: max(a // b, 1) if a % b == 0 else a,
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


def test_what_follows_from_an_equality_is_no_branch() -> None:
    path = Path()
    a, b = path.symbol("a", 0, 5), path.symbol("b", 1, 9)

    def function() -> int:
        if a == 0:
            return 1 if a < 1 else 2
        if b % a:
            return 3
        return 4 if a > 0 and b // a > 0 else 5

    found = value_of(explore(path, function, {}), path, lambda value: value)
    assert found is not None
    assert found.text == "(a == 0 ? 1 : ((b % a) == 0 ? 4 : 3))"


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


def test_refusals_that_both_answers_share_come_once() -> None:
    def function() -> None:
        if a == 1 and b < 3:
            raise ValueError("b is small")
        if b == 7:
            raise ValueError("b is 7")

    path = Path()
    a, b = path.symbol("a", 1, 5), path.symbol("b", 1, 9)
    found = [
        ([condition.text for condition in conditions], text)
        for conditions, text in refusals(explore(path, function, {}))
    ]
    assert found == [(["a == 1", "b < 3"], "b is small"), (["b == 7"], "b is 7")]


def test_a_merged_function_is_one_path_of_the_one_that_calls_it() -> None:
    def smaller() -> Formula | float:
        return min(a, b, 5)

    def with_number(found: Formula | float | None) -> Formula | float:
        assert found is not None
        return found * 2 if a < 9 and found > 1 else found

    path = Path()
    a, b = path.symbol("a", 1, 12), path.symbol("b", 1, 12)
    trees = [
        explore(path, lambda: with_number(smaller()), {}),
        explore(path, lambda: with_number(merged(path, smaller, {})), {}),
    ]
    assert [len([*leaves(tree)]) for tree in trees] == [9, 3]
    found = [value_of(tree, path, lambda value: value) for tree in trees]
    values = [in_json(formula) for formula in found if formula is not None]
    for numbers in itertools.product(range(1, 13), repeat=2):
        first, second = (evaluate(x, dict(zip("ab", numbers, strict=True))) for x in values)
        assert first == second


def test_the_range_of_a_merged_function_is_that_of_its_paths() -> None:
    path = Path()
    a = path.symbol("a", 1, 100)
    found = merged(path, lambda: max(min(a, 9), 3), {})
    assert isinstance(found, Formula)
    assert (found.low, found.high) == (3, 9)


def test_a_function_that_refuses_a_path_is_not_merged() -> None:
    def function() -> Formula:
        if a > 3:
            raise ValueError("a is large")
        return a

    path = Path()
    a = path.symbol("a", 1, 5)
    assert merged(path, function, {}) is None
    assert merged(path, lambda: [4, 5][a], {}) is None


def test_a_function_that_needs_a_number_is_refused_by_name() -> None:
    path = Path()
    a = path.symbol("a", 1, 5)
    with pytest.raises(TypeError, match="a is no number"):
        explore(path, lambda: [0, 1, 2][a], {})
    with pytest.raises(TypeError, match="unhashable"):
        explore(path, lambda: {a} == {3}, {})
    with pytest.raises(TypeError, match="a and 2 are whole numbers"):
        explore(path, lambda: a / 2, {})


def test_a_formula_beyond_64_bits_is_refused() -> None:
    a = Path().symbol("a", 0, 2**40)
    with pytest.raises(OverflowError, match=re.escape("(a * a) is from 0 to")):
        a * a
