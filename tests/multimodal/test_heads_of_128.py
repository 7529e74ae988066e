"""Modules with heads of 128: Q, K and V by one operation before attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention.multimodal import (
    JointAttention,
    SelfAttention,
    _attention,
    _places,
    _qk_norm_rope,
    rotary_table,
)

BF16 = torch.bfloat16
WIDTH, HEADS, LENGTH, TOKENS = 128, 1, 5, 2


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3).to(BF16)


X, CONTEXT = drawn(1, LENGTH, WIDTH, seed=1), drawn(1, TOKENS, WIDTH, seed=2)
TABLE = rotary_table(LENGTH + 2, WIDTH // HEADS)


def made(kind: type[Any], **options: Any) -> Any:
    """A module with weights of norms that are not 1."""
    torch.manual_seed(0)
    module = kind(WIDTH, HEADS, **({"backend": "kernels"} | options))
    for name, weights in module.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weights, mean=1.0, std=0.2)
    return module.to(BF16)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is computed from here on."""
    found: list[str] = []
    before, attend = _attention.qk_norm_rope, _attention.attend

    def one_operation(*args: Any) -> tuple[Tensor, ...]:
        found.append("qk_norm_rope")
        return before(*args)

    def attended(*args: Any, backend: str, **options: Any) -> Tensor:
        found.append("attend")
        return attend(*args, backend="torch", **options)

    monkeypatch.setattr(_attention, "qk_norm_rope", one_operation)
    monkeypatch.setattr(_attention, "attend", attended)
    return found


def outputs(module: Any, *given: Tensor, **options: Any) -> list[Tensor]:
    with torch.no_grad():
        found = module(*given, **options)
    return [y for y in found if y is not None] if isinstance(found, tuple) else [found]


CASES = pytest.mark.parametrize(
    ("kind", "options", "given"),
    [
        (SelfAttention, {}, (X,)),
        (JointAttention, {}, (X, CONTEXT)),
        (JointAttention, {}, (X, CONTEXT[:, :0])),
        (JointAttention, {"returns_context": False}, (X, CONTEXT)),
    ],
    ids=["self", "joint", "no tokens", "last layer"],
)


def close(module: Any, given: tuple[Tensor, ...], rotary: Tensor | None) -> None:
    """The error against float64 is at most twice that of PyTorch in bf16."""
    ours = outputs(module, *given, rotary=rotary)
    module.backend = "torch"
    usual = outputs(module, *given, rotary=rotary)
    right = outputs(module.double(), *(x.double() for x in given), rotary=rotary)
    for mine, theirs, exact in zip(ours, usual, right, strict=True):
        assert mine.shape == exact.shape and mine.dtype == BF16
        if exact.numel():
            assert 0 < (mine - exact).norm() <= 2 * (theirs - exact).norm()


@CASES
@pytest.mark.parametrize("rotary", [None, TABLE], ids=["no_rotary", "rotary"])
def test_modules_compute_what_pytorch_does(taken, kind, options, given, rotary) -> None:
    close(made(kind, **options), given, rotary)
    assert taken == ["qk_norm_rope", "attend", "attend", "attend"]  # the last two by PyTorch


def test_attention_is_a_kernel_too() -> None:
    close(made(JointAttention), (drawn(1, 16, WIDTH), CONTEXT), rotary_table(16, WIDTH))


def test_values_of_a_sequence_alone_are_not_copied() -> None:
    parts = made(SelfAttention).sequence.parts(drawn(1, 2, 3 * WIDTH))
    with torch.no_grad():
        _, _, v = _qk_norm_rope.qk_norm_rope(parts, HEADS, 1e-6)
    assert v.data_ptr() == parts["v"].data_ptr() and v.shape == (1, 2, HEADS, WIDTH)


def test_weights_at_any_address_are_taken(taken) -> None:
    module = made(SelfAttention)
    right = outputs(module, X, rotary=TABLE)
    norm = module.sequence.q_norm
    moved = torch.empty(WIDTH + 1, dtype=BF16)[1:].copy_(norm.weight.detach())
    norm.weight = torch.nn.Parameter(moved)
    table = torch.stack((TABLE[..., 0], TABLE[..., 1]), 0).permute(1, 2, 0)
    assert torch.equal(outputs(module, X, rotary=table)[0], right[0])
    assert taken.count("qk_norm_rope") == 2


def test_other_calls_go_the_usual_way(taken) -> None:
    """Gradients, masks, dropout, other dtypes, and what is asked of PyTorch."""
    module = made(JointAttention)
    module(X, CONTEXT)
    with torch.no_grad():
        module(X, CONTEXT, mask=torch.tensor([3]))
        made(JointAttention, dropout=0.5)(X, CONTEXT)
        made(SelfAttention).float()(X.float())
        made(SelfAttention, backend="torch")(X)
        made(SelfAttention, backend="auto")(X)  # on a CPU
    assert taken == ["attend"] * 6


@pytest.mark.parametrize("has_queries", [None, False, True])
def test_the_operator_is_one_that_pytorch_can_trace(has_queries) -> None:
    parts = made(JointAttention).sequence.parts(drawn(1, 2, 3 * WIDTH))
    of_context = made(JointAttention, returns_context=bool(has_queries)).context.parts(
        drawn(1, 1, (3 if has_queries else 2) * WIDTH)
    )
    if has_queries is not None:
        parts |= {f"context_{name}": x for name, x in of_context.items()}
    else:
        del parts["v"]
    given = (*map(parts.get, _qk_norm_rope._INPUTS), HEADS, 1e-6)
    given = tuple(x.detach() if isinstance(x, Tensor) else x for x in given)
    torch.library.opcheck(torch.ops.flash_attention.qk_norm_rope.default, given)


def test_a_module_compiles_to_one_graph(taken) -> None:
    module = made(JointAttention)
    right = outputs(module, X, CONTEXT, rotary=TABLE)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, outputs(compiled, X, CONTEXT, rotary=TABLE), right))


def test_the_table_of_places_has_the_operation() -> None:
    part = "QK-RMSNorm, RoPE, heads of 128"
    assert {each.where for each in _places.places() if each.part == part} == {"qr1", "qr2"}
