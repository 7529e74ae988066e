"""Options of the command line that follow from the problems' fields."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import fields
from types import MappingProxyType

import pytest
from two_kernels import TOY, SquaresBackwards

from flash_helpers.kernel_configs import OPERATIONS, AttentionForward
from flash_helpers.measure.asked import problem_options
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.registry import selection
from flash_helpers.registry.selection import (
    UsageError,
    add_problem_options,
    asked_problem,
    require_options_of,
)

OWN = OPERATION.name


@pytest.fixture
def two_operations(monkeypatch) -> None:
    both = MappingProxyType({**OPERATIONS, TOY.name: TOY})
    monkeypatch.setattr(selection, "OPERATIONS", both)


def parser(*names: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_problem_options(made, *names)
    return made


def read(*words: str) -> argparse.Namespace:
    return parser().parse_args(words)


def test_are_those_of_all_fields_with_a_help_text():
    assert [*vars(read())][:8] == [
        *("batch", "heads", "len_q", "d_head", "len_k", "kv_heads", "causal", "softmax_scale"),
    ]
    of_all = {
        field.name
        for operation in OPERATIONS.values()
        for field in fields(operation.problem)
        if "help" in field.metadata
    }
    assert {*vars(read())} == of_all
    assert set(vars(read()).values()) == {None}


def test_may_be_some_of_them():
    assert [*vars(parser("causal", "kv_heads").parse_args([]))] == ["kv_heads", "causal"]


def test_have_names_and_types_of_the_fields():
    found = read("--seq", "64", "--kv-heads", "2", "--causal", "--softmax-scale", "0.5")
    assert (found.len_q, found.kv_heads, found.causal, found.softmax_scale) == (64, 2, True, 0.5)
    assert "--softmax-scale X" in parser().format_help()


@pytest.mark.parametrize("words", [["--seq", "long"], ["--batch", "1.5"], ["--causal=1"]])
def test_refuse_other_values(capsys, words):
    with pytest.raises(SystemExit):
        read(*words)
    assert "error: argument --" in capsys.readouterr().err


def test_change_a_problem_and_what_follows_from_them():
    base = AttentionForward(2, 6, 64)
    assert asked_problem(read(), base) == base
    asked = asked_problem(read("--seq", "128", "--causal", "--d-head", "64"), base)
    assert asked == AttentionForward(2, 6, 128, 64, causal=True)
    assert (asked.len_k, asked.softmax_scale) == (128, 1 / 8)


def test_of_windows_softcap_and_sinks_are_read_and_written():
    words = "--window-left 3 --window-right 9 --softcap 2 --sinks --d-v 64"
    asked = asked_problem(read(*words.split()), AttentionForward(1, 2, 16))
    assert asked == AttentionForward(
        1, 2, 16, window_left=3, window_right=9, softcap=2.0, sinks=True, d_v=64
    )
    assert asked_problem(read(*problem_options(asked)), AttentionForward(1, 1, 1)) == asked
    plain = AttentionForward(1, 2, 16)
    assert asked_problem(read(*problem_options(plain)), AttentionForward(1, 1, 1)) == plain


def test_that_pose_no_problem_are_refused():
    with pytest.raises(ValueError, match="heads 6 is not a multiple of kv_heads 4"):
        asked_problem(read("--kv-heads", "4"), AttentionForward(2, 6, 64))


@pytest.mark.usefixtures("two_operations")
class TestTwoOperations:
    def test_say_whose_they_are(self):
        text = " ".join(parser().format_help().split())
        assert f"--factor X of the squares ({TOY.name})" in text
        assert (
            f"--sinks one more logit per head, which adds nothing to the output ({OWN}, decode)"
            in text
        )

    def test_of_the_other_change_no_problem(self):
        asked = asked_problem(read("--factor", "2", "--batch", "3"), SquaresBackwards(5))
        assert asked == SquaresBackwards(5, 2.0)

    def test_that_none_of_the_kernels_has_are_refused(self):
        found = read("--factor", "2")
        require_options_of(found, [TOY.name])
        require_options_of(found, [OWN, TOY.name])
        with pytest.raises(
            UsageError,
            match=f"^--factor is an option of {TOY.name}, and the kernels compute {OWN}: leave",
        ):
            require_options_of(found, [OWN])
        require_options_of(read(), [OWN])


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_run_takes_the_options_that_problems_have_for_a_call(operation) -> None:
    parameters = inspect.signature(operation.problem.posed).parameters.values()
    taken = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    for problem in (operation.small, operation.usual):
        assert problem.call_options().keys() <= taken
