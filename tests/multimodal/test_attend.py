"""Who computes attention of a module: the choice, its warnings and errors, and that both compute
the same."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import flash_attention
from flash_attention import _forward
from flash_attention.__main__ import main
from flash_attention.multimodal import (
    CrossAttention,
    JointAttention,
    SelfAttention,
    _attend,
    _places,
    attend,
    places,
    rotary_table,
)
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import Problem
from flash_helpers.tune.best import config_for

BF16 = torch.bfloat16


def drawn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def hopper(monkeypatch) -> Iterator[None]:
    """Calls on fake CUDA tensors choose as on an H100, and no call has warned yet."""

    def choose(problem: Problem, _: torch.device) -> object:
        return config_for(problem, largest_device(90))

    for module in (_attend, _forward):
        monkeypatch.setattr(module, "choose_config", choose)
    caches = (_attend._refusal, _attend._warn_once)
    for cache in caches:
        cache.cache_clear()
    with FakeTensorMode():
        yield
    for cache in caches:
        cache.cache_clear()


def on_gpu(
    *shape: int, dtype: torch.dtype = BF16, gradients: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        torch.empty(shape, dtype=dtype, device="cuda", requires_grad=gradients) for _ in range(3)
    )
    return q, k, v


def warned(*calls: tuple[Tensor, ...], **options: object) -> list[str]:
    """The warnings of calls."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for call in calls:
            assert attend(*call, **options).shape == call[0].shape
    return [str(each.message) for each in found]


class TestOnAGpu:
    pytestmark = pytest.mark.usefixtures("hopper")

    @pytest.fixture
    def computed(self, monkeypatch) -> list[int]:
        """The head sizes that attention() computed. PyTorch without CUDA computes nothing."""
        found: list[int] = []

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found.append(q.shape[3])
            return q if q.requires_grad else flash_attention.attention(q, k, v)

        monkeypatch.setattr(_attend, "attention", attention)
        monkeypatch.setattr(_attend, "_by_pytorch", lambda q, *_: q)
        return found

    def test_a_kernel_is_taken_where_the_registry_has_one(self, computed) -> None:
        calls = [on_gpu(2, 20, 2, d_head) for d_head in (64, 96, 128, 192, 256)]
        assert warned(*calls) == [] and computed == [64, 96, 128, 192, 256]

    def test_one_warning_for_each_reason_has_the_words_of_the_registry(self, computed) -> None:
        lengths = [on_gpu(2, length, 8, 16) for length in (20, 30, 20)]
        (text,) = warned(*lengths, on_gpu(2, 20, 8, 16, gradients=True))
        assert "PyTorch computes attention on cuda:0: no kernel of attention_forward" in text
        assert "seq 20, d_head 16; the nearest: d_head 16 is not supported by g10_bf16_d64" in text
        assert "Pass backend='torch'" in text
        (another,) = warned(*lengths, on_gpu(1, 20, 8, 32))
        assert "d_head 32" in another
        assert computed == []

    def test_other_dtypes_masks_and_dropout_are_reasons(self, computed) -> None:
        (text,) = warned(on_gpu(2, 20, 2, 64, dtype=torch.float32))
        assert "q is torch.float32 and the kernels take torch.float16 or torch.bfloat16" in text
        mask = torch.ones(2, 20, dtype=torch.bool, device="cuda")
        (text,) = warned((*on_gpu(2, 20, 2, 64), mask))
        assert "mask: no kernel reads a mask of padding; leave out the padding" in text
        (text,) = warned(on_gpu(2, 20, 2, 64), dropout=0.5)
        assert "dropout: no kernel has it; use dropout 0" in text
        assert computed == []

    def test_a_head_size_without_gradients_is_pytorchs_if_they_are_asked_for(
        self, computed
    ) -> None:
        call = on_gpu(2, 20, 2, 192, gradients=True)
        (text,) = warned(call)
        assert "no kernel of attention_backward" in text and computed == []
        with torch.no_grad():
            assert warned(call) == []
        assert computed == [192]

    def test_what_is_asked_for_is_no_reason_to_warn(self, computed) -> None:
        assert warned(on_gpu(2, 20, 8, 16), on_gpu(2, 20, 2, 64), backend="torch") == []
        assert computed == []
        assert warned(on_gpu(2, 20, 2, 64), backend="kernels") == []
        assert computed == [64]
        with pytest.raises(ValueError, match=r"backend 'kernels': no kernel .* backend='torch'$"):
            attend(*on_gpu(2, 20, 8, 16), backend="kernels")

    def test_no_keys_are_no_reason_either(self, computed) -> None:
        q, _, _ = on_gpu(2, 20, 2, 64)
        none, _, _ = on_gpu(2, 0, 2, 64)
        assert warned((q, none, none)) == [] and computed == [64]


def test_on_cpu_tensors_auto_is_pytorch_without_a_warning(monkeypatch) -> None:
    monkeypatch.setattr(_attend, "attention", None)
    q = drawn(1, 5, 2, 64)
    assert warned((q, q, q), (q.float(),) * 3) == []
    assert torch.equal(attend(q, q, q), attend(q, q, q, backend="torch"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"q": drawn(1, 5, 2, 16)}, "d_head 16 is not supported by .*: pad the last dimension"),
        ({"q": drawn(1, 5, 2, 64, dtype=torch.float32)}, "q is torch.float32 and the kernels take"),
        ({"mask": torch.ones(1, 5, dtype=torch.bool)}, "no kernel reads a mask of padding"),
        ({"dropout": 0.1}, "dropout: no kernel has it"),
        ({"backend": "cuda"}, "backend is 'cuda': pass 'auto' or 'torch' or 'kernels'"),
    ],
)
def test_kernels_that_are_asked_for_are_an_error_where_there_are_none(call, message) -> None:
    q = call.pop("q", drawn(1, 5, 2, 64))
    with pytest.raises(ValueError, match=message):
        attend(q, q, q, **{"backend": "kernels", **call})


def test_a_query_that_sees_no_key_has_0_and_no_gradient() -> None:
    q, k, v = (drawn(2, 3, 2, 4, dtype=torch.float64, seed=n).requires_grad_() for n in range(3))
    mask = torch.tensor([[False] * 3, [True, False, True]])
    o = attend(q, k, v, mask)
    assert not o[0].any() and o[1].all()
    for of_each in torch.autograd.grad(o.sum(), (q, k, v)):
        assert not of_each[0].any() and of_each[1].any() and of_each.isfinite().all()


@pytest.mark.slow
def test_kernels_compute_what_pytorch_does_in_each_module() -> None:
    """In the simulator, at heads of 64, against PyTorch in float64."""
    width, heads, length, tokens = 128, 2, 7, 3
    x, context = drawn(1, length, width, seed=1), drawn(1, tokens, width, seed=2)
    table = rotary_table(length, width // heads)
    torch.manual_seed(0)
    calls = [
        (JointAttention(width, heads), (x, context), {"rotary": table}),
        (SelfAttention(width, heads), (x,), {"rotary": table}),
        (CrossAttention(width, heads), (x, context), {}),
    ]
    for module, tensors, options in calls:
        module.to(BF16)
        errors = {}
        with torch.no_grad():
            for backend in ("kernels", "torch"):
                module.backend = backend
                errors[backend] = module(*tensors, **options)
            module.double()
            right = module(*(y.double() for y in tensors), **options)
        first = [y[0] if isinstance(y, tuple) else y for y in (*errors.values(), right)]
        kernels, pytorch = ((y - first[-1]).norm() / first[-1].norm() for y in first[:2])
        assert 0 < kernels < 2 * pytorch


@pytest.mark.slow
def test_a_module_with_kernels_compiles_to_one_graph() -> None:
    module = SelfAttention(64, 1, backend="kernels").to(BF16)
    x = drawn(1, 5, 64)
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), module(x))


# -- python -m flash_attention ---------------------------------------------------------------------


def test_the_command_tells_what_runs_where(capsys) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("part of a multimodal block"))
    header, _, *rows = (line.split("  ") for line in lines[begin:])
    names = [cell.strip() for cell in header if cell.strip()][1:]
    assert {"sm_80", "sm_90"} <= {*names}
    by_part = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    hopper = {part: dict(zip(names, cells, strict=True)) for part, cells in by_part.items()}
    large = [n for n, problem in _places.parts().items() if getattr(problem, "d_head", 0) > 16]
    for part in large:
        problem = _places.parts()[part]
        for name in names:
            config = config_for(problem, largest_device(int(name.removeprefix("sm_"))))
            assert hopper[part][name] == config.step.id
    assert {*hopper["attention, heads of 16"].values()} == {"PyTorch"}


def test_json_has_the_configs_and_the_reasons(capsys) -> None:
    assert main(["--json"]) == 0
    block = json.loads(capsys.readouterr().out)["block"]
    assert len(block) == len(places())
    of_16 = [each for each in block if each["part"] == "attention, heads of 16"]
    assert all("d_head 16 is not supported by" in each["reason"] for each in of_16)
    of_64 = [each for each in block if each["part"] == "attention, heads of 64"]
    assert [each["reason"] for each in of_64] == [""] * len(of_64)


def test_the_table_follows_the_registry(monkeypatch) -> None:
    """Without a kernel for a problem, the part is PyTorch's."""

    def refuse(problem: Problem, gpu: Device) -> object:
        raise ValueError(f"none on {gpu.name}")

    monkeypatch.setattr(_places, "config_for", refuse)
    found = places.__wrapped__()
    assert {each.where for each in found} == {"PyTorch"}
    assert {each.reason for each in found} >= {"none on sm_80", "none on sm_90"}


def test_the_package_imports_its_modules_for_models_when_they_are_used() -> None:
    assert flash_attention.multimodal.SelfAttention is SelfAttention
    with pytest.raises(AttributeError, match="module 'flash_attention' has no attribute 'models'"):
        _ = flash_attention.models
