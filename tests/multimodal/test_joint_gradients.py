"""Gradients of joint attention by recomputation: those of float64 within the rule, from the inputs
alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention.multimodal import JointAttention, SelfAttention, _joint, rotary_table

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16
WIDTH, HEADS, LENGTH, TOKENS = 32, 2, 7, 3
TABLE = rotary_table(LENGTH + 2, WIDTH // HEADS)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3


X, CONTEXT = drawn(2, LENGTH, WIDTH, seed=1), drawn(2, TOKENS, WIDTH, seed=2)
WEIGHTS = drawn(LENGTH, WIDTH, seed=3)


def made(kind: type[Any], backend: str, dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(0)
    module = kind(WIDTH, HEADS, backend=backend, **options)
    for name, weights in module.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weights, mean=1.0, std=0.2)
    return module.to(dtype)


def loss(module: Any, given: list[Tensor], rotary: Tensor | None) -> Tensor:
    found = module(*given, rotary=rotary)
    outputs = [y for y in found if y is not None] if isinstance(found, tuple) else [found]
    return sum((y.float() * WEIGHTS[: y.shape[1]]).sum() for y in outputs)


def gradients(module: Any, given: tuple[Tensor, ...], rotary: Tensor | None) -> list[Tensor]:
    """Those of the inputs and of all weights, in float64; 0 where there is none."""
    dtype = next(module.parameters()).dtype
    leaves = [x.to(dtype).detach().clone().requires_grad_() for x in given]
    loss(module, leaves, rotary).backward()
    every = (*leaves, *module.parameters())
    return [torch.zeros_like(x).double() if x.grad is None else x.grad.double() for x in every]


@pytest.mark.parametrize(
    ("kind", "options", "given"),
    [
        (SelfAttention, {}, (X,)),
        (JointAttention, {}, (X, CONTEXT)),
        (JointAttention, {"returns_context": False}, (X, CONTEXT)),
    ],
    ids=["self", "joint", "last layer"],
)
@pytest.mark.parametrize("rotary", [None, TABLE], ids=["no_rotary", "rotary"])
def test_gradients_are_right(monkeypatch, kind, options, given, rotary) -> None:
    """The error against float64 is at most twice that of PyTorch in bf16, and an attention that is
    left out of the gradients is seen."""
    right, usual, ours = (
        torch.cat(
            [x.flatten() for x in gradients(made(kind, backend, dtype, **options), given, rotary)]
        )
        for backend, dtype in (("torch", torch.float64), ("torch", BF16), ("kernels", BF16))
    )
    bound = 2 * (usual - right).norm()
    assert 0 < (ours - right).norm() <= bound
    attend = _joint.attend
    monkeypatch.setattr(_joint, "attend", lambda q, k, v: attend(q.detach(), k, v))
    wrong = gradients(made(kind, "kernels", BF16, **options), given, rotary)
    assert (torch.cat([x.flatten() for x in wrong]) - right).norm() > bound


def test_the_graph_keeps_the_inputs_alone() -> None:
    """No tensor of queries and keys is kept behind its norm, and no probabilities."""

    def kept(backend: str) -> int:
        found: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        module = made(JointAttention, backend, BF16)
        weights = {x.untyped_storage().data_ptr() for x in module.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss(module, [X.to(BF16), CONTEXT.to(BF16)], TABLE)
        return sum(size for place, size in found.items() if place not in weights)

    assert kept("kernels") < 0.6 * kept("torch")


def test_only_what_is_asked_for_has_a_gradient() -> None:
    module = made(JointAttention, "kernels", BF16).requires_grad_(False)
    module.sequence.q_norm.weight.requires_grad_()
    context = CONTEXT.to(BF16).requires_grad_()
    loss(module, [X.to(BF16), context], TABLE).backward()
    found = {name for name, x in module.named_parameters() if x.grad is not None}
    assert found == {"sequence.q_norm.weight"} and context.grad.any()


def test_a_second_derivative_is_refused() -> None:
    module, x = made(SelfAttention, "kernels", BF16), X.to(BF16).requires_grad_()
    (first,) = torch.autograd.grad(loss(module, [x], TABLE), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.float().square().sum().backward()


def test_gradients_are_the_same_when_compiled() -> None:
    modules = [made(JointAttention, "kernels", BF16) for _ in range(2)]
    given = [X.to(BF16), CONTEXT.to(BF16)]
    loss(modules[0], given, TABLE).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(modules[1], given, TABLE).backward()
    for one, other in zip(*(m.parameters() for m in modules), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_gradients_of_any_batch_are_compiled(monkeypatch) -> None:
    """The recomputation is traced with symbols as sizes, and asks for a kernel of attention too."""
    attend = _joint.attend
    monkeypatch.setattr(_joint, "attend", lambda *qkv: attend(*qkv, backend="kernels"))
    sizes = {"width": 64, "heads": 1}
    module = SelfAttention(**sizes, backend="kernels").to(BF16)
    given = [drawn(3, LENGTH, 64, seed=1).to(BF16)]

    def compiled_loss(x: Tensor) -> Tensor:
        return module(x).float().square().sum()

    torch.compile(compiled_loss, fullgraph=True, dynamic=True, backend="aot_eager")(
        *given
    ).backward()
    found = [x.grad for x in module.parameters()]
    module.zero_grad()
    compiled_loss(*given).backward()
    for one, other in zip(found, module.parameters(), strict=True):
        assert one is not None and other.grad is not None and torch.equal(one, other.grad)


@pytest.mark.parametrize(
    ("backend", "with_gradients", "is_fused"),
    [("kernels", True, True), ("auto", True, False), ("auto", False, True)],
)
def test_a_compiled_training_asks_for_the_kernel_by_name(
    monkeypatch, backend, with_gradients, is_fused
) -> None:
    """By default the compiler has all of it, since it fuses what would be computed twice."""
    module = made(JointAttention, backend, BF16).requires_grad_(with_gradients)
    monkeypatch.setattr(JointAttention, "may_take_kernels", lambda *_: True)  # as on a GPU
    names: list[str] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compile(module, fullgraph=True, backend=compiler)(X.to(BF16), CONTEXT.to(BF16))
    assert any("joint_attention" in name for name in names) == is_fused
