"""Kernels of Hopper's units give in the simulator what an H200 gave, however the asynchronous
operations complete, and are free of faults."""

import json
import math

import numpy as np
import pytest
from fake_backend import ROOT
from hopper_cases import CASES, Case, integers, values
from hopper_launches import launched, module_of

RESULTS = ROOT / "benchmarks" / "results" / "hopper_kernels_h200"
OUTPUTS = np.load(RESULTS.with_suffix(".npz"))
ERRORS = {
    each["case"]: each["error"]
    for each in json.loads(RESULTS.with_suffix(".json").read_text())["outputs"]
}
"""The error of each case on the H200, as `Case.error`."""


EPS = {"bf16": 2.0**-7, "f16": 2.0**-10}
"""From 1 to the next number."""


def moved(case: Case) -> np.ndarray:
    """How far elements of the output of attention may move when each probability is rounded to its
    other neighbour: by eps of the sum of p |v|."""
    q, k, v = (values(case.buffers[name], case.dtype) for name in "QKV")
    p = np.exp(np.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1]))
    p /= p.sum(axis=-1, keepdims=True)
    return EPS[case.dtype] * np.einsum("bhij,bjhd->bihd", p, np.abs(v))


def kept_rows(case: Case, array: np.ndarray) -> np.ndarray:
    """Those of an output that are recorded."""
    return array.reshape(-1, array.shape[-1])[:: case.kept]


def check(name: str, seed: int | None = None) -> None:
    """Runs a case and compares what comes out.

    What was exact on the H200 is. Sums that only the order of their terms makes different round to
    the same 16-bit number or to a neighbour, as do the probabilities of attention. In fp32 the
    simulator is no further from the exact result than the H200, whose tensor cores truncate (Fasi
    et al. 2021, "Numerical behavior of NVIDIA tensor cores"), so they are at most twice that apart.
    """
    case: Case = CASES[name]
    _, found = launched(case, module_of(case.module), seed=seed)
    error = ERRORS[name]
    if not case.bound:
        assert error == 0
        assert np.array_equal(integers(found), integers(case.expected.astype(found.dtype)))
        return
    assert case.error(found) <= case.bound
    recorded = values(OUTPUTS[name], case.dtype)
    kept = values(kept_rows(case, found), case.dtype)
    if case.dtype == "f32":
        assert case.error(found) <= error
        assert np.linalg.norm(kept - recorded) <= 2 * error * np.linalg.norm(recorded)
        return
    _, exponents = np.frexp(np.maximum(np.abs(kept), np.abs(recorded)))
    allowed = np.ldexp(EPS[case.dtype], exponents - 1)
    if case.module == "hopper_attention":
        allowed += kept_rows(case, moved(case))
    assert (np.abs(kept - recorded) <= allowed).all()


@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_an_h200_gave(name) -> None:
    check(name)


@pytest.mark.parametrize("name", CASES)
def test_so_it_does_if_copies_complete_at_random(name) -> None:
    check(name, seed=1)


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(2, 22))
def test_so_it_does_whatever_the_order(seed) -> None:
    for name in CASES:
        check(name, seed)
