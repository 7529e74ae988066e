"""Attention of a module with its norms and rotary embedding as one operation: when it is taken, and
that it computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention.multimodal import (
    JointAttention,
    SelfAttention,
    _attention,
    _joint,
    _linear,
    _places,
    _qk_norm_rope,
    _streams,
    rotary_table,
)
from flash_helpers.kernel_configs import Element, Problem
from flash_helpers.registry.choice import first_that_takes
from flash_helpers.registry.joint import JOINT, JointKernelConfig

BF16 = torch.bfloat16
WIDTH, HEADS, LENGTH, TOKENS = 32, 2, 7, 3
STEPS = [JOINT.fixed_config(step, Element.BF16) for step in JOINT.steps.values()]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3).to(BF16)


X, CONTEXT = drawn(2, LENGTH, WIDTH, seed=1), drawn(2, TOKENS, WIDTH, seed=2)
TABLE = rotary_table(LENGTH + 2, WIDTH // HEADS)


def made(kind: type[Any], **options: Any) -> Any:
    """A module with weights of norms that are not 1."""
    torch.manual_seed(0)
    module = kind(WIDTH, HEADS, backend="kernels", **options)
    for name, weights in module.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weights, mean=1.0, std=0.2)
    return module.to(BF16)


@pytest.fixture(params=STEPS, ids=lambda config: config.step.id)
def config(request: pytest.FixtureRequest) -> JointKernelConfig:
    return request.param


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, config: JointKernelConfig) -> Iterator[list[str]]:
    """What is computed from here on: by the kernels of a step, whichever calls take, or by
    the path of all other calls."""
    found: list[str] = []

    def choose(problem: Problem, _: torch.device) -> object:
        if problem.operation != "joint_attention":
            raise ValueError("PyTorch computes linear layers here")
        return first_that_takes(problem, [config])

    def joint_attention(*args: Any) -> tuple[Tensor, Tensor]:
        found.append("one operation")
        return _joint.joint_attention(*args)

    attend = _attention.attend

    def attended(*args: Any, backend: str, **options: Any) -> Tensor:
        found.append("attend")
        return attend(*args, backend="torch", **options)

    monkeypatch.setattr(_streams, "choose_config", choose)
    monkeypatch.setattr(_attention, "joint_attention", joint_attention)
    monkeypatch.setattr(_attention, "attend", attended)
    for module in (_joint, _linear, _qk_norm_rope):
        module._is_taken.cache_clear()
    yield found
    for module in (_joint, _linear, _qk_norm_rope):
        module._is_taken.cache_clear()


def outputs(module: Any, *given: Tensor, **options: Any) -> list[Tensor]:
    with torch.no_grad():
        found = module(*given, **options)
    return [y for y in found if y is not None] if isinstance(found, tuple) else [found]


@pytest.mark.parametrize(
    ("kind", "options", "given"),
    [
        (SelfAttention, {}, (X,)),
        (JointAttention, {}, (X,)),
        (JointAttention, {}, (X, CONTEXT)),
        (JointAttention, {}, (X, CONTEXT[:, :0])),
        (JointAttention, {"returns_context": False}, (X, CONTEXT)),
    ],
    ids=["self", "joint alone", "joint", "no tokens", "last layer"],
)
@pytest.mark.parametrize("rotary", [None, TABLE], ids=["no_rotary", "rotary"])
def test_modules_compute_what_pytorch_does(taken, kind, options, given, rotary) -> None:
    """The error against float64 is at most twice that of PyTorch in bf16."""
    module = made(kind, **options)
    ours = outputs(module, *given, rotary=rotary)
    assert taken == ["one operation"]
    module.backend = "torch"
    usual = outputs(module, *given, rotary=rotary)
    right = outputs(module.double(), *(x.double() for x in given), rotary=rotary)
    for mine, theirs, exact in zip(ours, usual, right, strict=True):
        assert mine.shape == exact.shape and mine.dtype == BF16
        if exact.numel():
            assert 0 < (mine - exact).norm() <= 2 * (theirs - exact).norm()


class TestOtherCalls:
    """Those that the kernels of the operation do not compute."""

    @pytest.fixture(params=STEPS[:1], ids=lambda config: config.step.id)
    def config(self, request: pytest.FixtureRequest) -> JointKernelConfig:
        return request.param

    def test_masks_and_dropout_go_the_usual_way(self, taken) -> None:
        module = made(JointAttention, dropout=0.5)
        module(X, CONTEXT)  # training, with gradients
        with torch.no_grad():
            module(X, CONTEXT)
            module.eval()(X, CONTEXT, mask=torch.tensor([3, 7]))
            module(X, CONTEXT, context_mask=torch.tensor([1, 2]))
        assert taken == ["attend"] * 4

    def test_other_dtypes_and_head_sizes_do_too(self, taken) -> None:
        module = made(SelfAttention)
        wide = SelfAttention(48, 1, backend="kernels").to(BF16)
        with torch.no_grad():
            module.float()(X.float())
            module.double()(X.double(), rotary=TABLE.double())
            wide(drawn(1, 5, 48))
        assert taken == ["attend"] * 3

    def test_what_is_asked_of_pytorch_stays_there(self, taken) -> None:
        module = made(SelfAttention)
        with torch.no_grad():
            for backend in ("torch", "auto"):  # on a CPU
                module.backend = backend
                module(X)
        assert taken == ["attend"] * 2

    def test_autocast_reads_the_norms_weights_in_its_dtype(self, taken) -> None:
        module = made(SelfAttention).float()
        with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
            module(X.float(), rotary=TABLE)
        assert taken == ["one operation"]

    def test_a_table_too_short_is_refused(self, taken) -> None:
        with torch.no_grad(), pytest.raises(ValueError, match="rotary has 6 positions and the seq"):
            made(SelfAttention)(X, rotary=TABLE[:6])
        assert taken == []

    @pytest.mark.parametrize("has_queries", [None, False, True])
    def test_the_operator_is_one_that_pytorch_can_trace(self, taken, has_queries) -> None:
        parts = made(JointAttention).sequence.parts(drawn(1, 5, 3 * WIDTH))
        of_context = made(JointAttention, returns_context=bool(has_queries)).context.parts(
            drawn(1, TOKENS, (3 if has_queries else 2) * WIDTH)
        )
        if has_queries is not None:
            parts |= {f"context_{name}": x for name, x in of_context.items()}
        given = (*map(parts.get, _joint._INPUTS), HEADS, 1e-6)
        given = tuple(x.detach() if isinstance(x, Tensor) else x for x in given)
        torch.library.opcheck(torch.ops.flash_attention.joint_attention.default, given)

    def test_a_module_compiles_to_one_graph(self, taken) -> None:
        module = made(JointAttention)
        right = outputs(module, X, CONTEXT, rotary=TABLE)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        found = outputs(compiled, X, CONTEXT, rotary=TABLE)
        assert all(map(torch.equal, found, right))


def test_the_table_of_places_has_the_operation() -> None:
    part = "QK-RMSNorm, RoPE and attention, heads of 16"
    found = [each for each in _places.places() if each.part == part]
    assert {each.where for each in found} == {"jo2", "jo9"}  # jo9 on Hopper, where it was measured
