"""Kernels that a wheel brings compiled. The compiler is a stand-in, except where they run."""

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from both_compilers import nvrtc_compiler
from fake_toolchain import FakeCompiler

from flash_helpers.compile.cache import Cache
from flash_helpers.compile.jit import Jit, units_of
from flash_helpers.compile.prebuild import VARIABLE, prebuild
from flash_helpers.compile.toolchain import ARCHITECTURES_VARIABLE, BuildError
from flash_helpers.kernel_configs import config_from_short_form
from flash_helpers.runtime import library
from flash_helpers.runtime.simulator import run_shipped

pytestmark = pytest.mark.slow

V1 = "v1_bf16_d128_Br64_Bc64_w4_async_Q0_K0_V0"
NOT_LISTED = "s3_bf16_w16_c2"


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "compiled"


@pytest.fixture
def make(root, folder) -> Callable[..., list[tuple[str, str]]]:
    """Fills the folder; returns names and targets of what is in it."""

    def make(names: str, architectures: str = "80 90") -> list[tuple[str, str]]:
        environ = {VARIABLE: names, ARCHITECTURES_VARIABLE: architectures, "MAX_JOBS": "2"}
        prebuild(root, folder, lambda line: None, environ, lambda environ: FakeCompiler())
        return [(entry.name, entry.target) for entry in Cache(folder).entries()]

    return make


def test_names_are_steps_and_configs_listed_or_not(make):
    both = {V1, NOT_LISTED}
    targets = {"compute_80", "sm_80", "sm_90"}
    assert {*make(f"{V1} {NOT_LISTED}")} == {(n, t) for n in both for t in targets}
    assert {name for name, _ in make("s1", "90")} == {"s1_fp16_w8", "s1_bf16_w8", "s1_fp32_w8"}


def test_a_family_has_the_architectures_that_it_is_made_for(make):
    h1 = "h1_bf16_d128_Br64_Bc128_K1_V1"
    assert make(h1, "80 90") == [(h1, "compute_90a"), (h1, "sm_90a")]
    assert make(h1, "80") == [(h1, "compute_90a")]


def test_what_is_made_needs_no_compiler(make, folder, root, tmp_path):
    def none():
        raise BuildError("there is no compiler")

    make(V1)
    jit = Jit(root, Cache(tmp_path / "cache", folder), none, jobs=1)
    (found,) = jit.get(units_of(config_from_short_form(V1)), "sm_90")
    assert found.folder.parent == folder


def test_what_a_wheel_brings_runs_in_the_simulator_without_a_compiler(
    root, folder, tmp_path, monkeypatch
):
    def none():
        raise BuildError("there is no compiler")

    environ = {VARIABLE: NOT_LISTED, ARCHITECTURES_VARIABLE: "90"}
    prebuild(root, folder, lambda line: None, environ, lambda environ: nvrtc_compiler())
    jit = Jit(root, Cache(tmp_path / "cache", folder), none, jobs=1)
    monkeypatch.setattr(library, "default_jit", lambda: jit)
    x = torch.randn(2, 512, dtype=torch.bfloat16)
    y = torch.full_like(x, math.nan)
    run_shipped(config_from_short_form(NOT_LISTED), {"x": x, "y": y})
    torch.testing.assert_close(y, x.softmax(dim=-1))
    assert not (tmp_path / "cache").exists()
    with pytest.raises(BuildError, match="there is no compiler"):
        run_shipped(config_from_short_form("s1_bf16_w8"), {"x": x, "y": y})


def test_nothing_of_an_earlier_build_is_left(make, folder):
    make(V1, "80 90")
    assert make(V1, "90") == [(V1, "compute_80"), (V1, "sm_90")]
    assert make("") == [] and not folder.exists()


def test_an_unknown_name_is_told_with_the_variable(make):
    with pytest.raises(BuildError, match=f"{VARIABLE}: 'h99': the steps are .*nearest is h30"):
        make("h99")


def test_a_folder_that_cannot_be_written_is_an_error(make, folder, monkeypatch):
    """Root may write anywhere, so that the refusal is simulated."""
    make_folder = os.mkdir

    def refuse(path, *arguments, **options):
        if str(path).startswith(str(folder)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return make_folder(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(BuildError, match=r"compiled cannot be filled .No space left.*: make room"):
        make(V1)
