"""When a call compiles its kernel: not while a CUDA graph is captured, and before a compiled
function runs. The compiler is a stand-in."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from fake_toolchain import FakeCompiler
from torch._subclasses import FakeTensorMode

import flash_attention
from flash_helpers.compile.cache import Cache
from flash_helpers.compile.jit import Jit
from flash_helpers.gpu import largest_device
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.hopper import HOPPER
from flash_helpers.runtime import call, library

H1 = next(config for config in HOPPER.progression() if config.dtype.short == "bf16")
(NAME,) = H1.kernels.values()
H100 = largest_device(90)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def compiled(root: Path, tmp_path: Path, monkeypatch) -> Callable[[], list[str]]:
    """The kernels that were compiled into an empty cache so far."""
    jit = Jit(root, Cache(tmp_path / "cache"), FakeCompiler, jobs=2)
    monkeypatch.setattr(library, "default_jit", lambda: jit)
    return lambda: [entry.name for entry in jit.cache.entries()]


class TestCapture:
    """A CUDA graph is being captured."""

    @pytest.fixture(autouse=True)
    def captures(self, monkeypatch) -> None:
        registered: list[str] = []  # not in the library, in which they would stay
        monkeypatch.setattr(
            library, "_register", lambda name, *_: (registered.append(name), len(registered))[1]
        )
        monkeypatch.setattr(library, "_compiled", {})
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def test_a_kernel_that_was_never_compiled_is_refused_with_the_way_out(self, compiled) -> None:
        with pytest.raises(RuntimeError) as error:
            call._numbers(H1, H100, 0)
        assert str(error.value) == (
            f"{NAME} was not compiled for sm_90a yet, and a CUDA graph is being captured: call "
            f'flash_attention.prepare("{H1.short_form()}") before the capture'
        )
        assert compiled() == []

    def test_one_that_was_compiled_before_is_taken(self) -> None:
        before = library.numbers([H1], (9, 0))
        assert call._numbers(H1, H100, 0) == before

    def test_one_of_the_cache_is_taken(self) -> None:
        library.numbers([H1], (9, 0))
        library._compiled.clear()  # as in a process that has launched nothing
        assert [*call._numbers(H1, H100, 0)] == [NAME]


def test_a_debugger_gets_its_own_code_of_the_librarys_kernels_too(root, tmp_path, monkeypatch):
    """The simulator gets the PTX of every day."""
    v1 = AMPERE.progression()[0]
    ptx, code = library.ptx_path(v1), library.code_paths([v1], "sm_90")[v1.short_form()]
    jit = Jit(root, Cache(tmp_path / "debugged"), FakeCompiler, jobs=2, debug=True)
    monkeypatch.setattr(library, "default_jit", lambda: jit)
    assert library.ptx_path(v1) == ptx and jit.cache.entries() == []
    assert library.code_paths([v1], "sm_90")[v1.short_form()] != code
    library.ptx_path(H1)
    assert {entry.target: entry.debug for entry in jit.cache.entries()} == {
        "sm_90": True,
        "compute_90a": False,
    }


class TestTracing:
    def test_compiles_before_the_function_runs(self, compiled, monkeypatch) -> None:
        there: list[list[str]] = []
        monkeypatch.setattr(call.ReadyCall, "run", lambda self: there.append(compiled()))
        function = torch.compile(
            lambda q, k, v: flash_attention.forward(H1, q, k, v), fullgraph=True, backend="eager"
        )
        q = torch.zeros(1, 128, 1, 128, dtype=torch.bfloat16)
        torch._dynamo.reset()
        assert function(q, q, q).shape == q.shape
        assert there == [sorted(each.short_form() for each in H1.siblings())]

    def test_of_fake_tensors_alone_compiles_nothing(self, compiled) -> None:
        with FakeTensorMode():
            q = torch.zeros(1, 128, 1, 128, dtype=torch.bfloat16)
            assert flash_attention.forward(H1, q, q, q).shape == q.shape
            assert flash_attention.attention(q, q, q).shape == q.shape
        assert compiled() == []
