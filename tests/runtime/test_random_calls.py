"""Random calls, most of which are wrong somewhere: each is right, or refused with a way out. The
seeds are new in each run; a failure names them."""

import secrets

import pytest
from random_calls import drawn, faults

from flash_helpers.runtime import call


def new_seeds(count: int) -> range:
    first = secrets.randbelow(2**31)
    return range(first, first + count)


def check(seeds: range, **how: bool) -> None:
    if found := faults(seeds, **how):
        pytest.fail("\n".join(found), pytrace=False)


def test_calls_are_taken_or_refused_in_words(monkeypatch):
    def compute_nothing(self: call.ReadyCall, *_: object) -> None:
        for x in self.outputs.values():
            x.zero_()

    monkeypatch.setattr(call.ReadyCall, "simulate", compute_nothing)
    check(new_seeds(500))


@pytest.mark.matrix("overlap")  # attention() takes it on the CPU
def test_calls_are_right_in_the_simulator_or_refused_in_words():
    check(new_seeds(500), has_values=True)


def test_a_seed_is_one_call():
    once, again, other = (drawn(seed) for seed in (5, 5, 6))
    assert once.text == again.text != other.text


def test_a_wrong_result_is_a_fault(monkeypatch):
    class Empty:
        def run(self: call.ReadyCall) -> None:
            for x in self.outputs.values():
                x.fill_(3)

    monkeypatch.setattr(call.ReadyCall, "run", Empty.run)
    assert any("AssertionError" in fault for fault in faults(range(60), has_values=True))
