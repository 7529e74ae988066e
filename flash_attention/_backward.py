"""The gradients of attention: an operator, and the node of autograd that calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flash_attention._operators import below_autograd, compile_while_tracing, define
from flash_helpers.kernel_configs import Config
from flash_helpers.operations.attention_backward.problem import GRADIENTS, AttentionBackward
from flash_helpers.runtime.call import compute
from flash_helpers.runtime.tensors import Laid, constant_call, element_of, posed_problem
from flash_helpers.tune.best import choose_config

_GIVEN = ("do", "q", "k", "v", "o", "lse")
_BEGINS = ("cu_seqlens_q", "cu_seqlens_k")
_OPTIONS = (
    *("causal", "window_left", "window_right", "softcap", "softmax_scale", "deterministic"),
)
_WANTED = ("of_q", "of_k", "of_v")  # of each gradient, in their order
_CHUNK = 8  # elements: strides are multiples of it, and memory begins at a multiple of 16 bytes
_CHUNK_BYTES = 16

NO_SECOND = (
    "flash_attention has no second derivative: call backward() or torch.autograd.grad() without "
    "create_graph, or use torch.nn.functional.scaled_dot_product_attention with its math backend"
)
NO_LSE = (
    "flash_attention has no gradient of the LSE, and what is differentiated depends on it: use "
    "lse.detach()"
)


def _choose(asked: tuple[object, tuple[tuple[str, Any], ...]], given: Mapping[str, Laid]) -> Config:
    """Return the config that computes the gradients. Raises ValueError, with a way out, if no
    kernel does."""
    element = element_of("do", given["do"], AttentionBackward.elements)
    problem = posed_problem(AttentionBackward, element, given, **dict(asked[1]))
    return choose_config(problem, given["q"].device)


def _named(args: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any], frozenset[str]]:
    """Return the tensors and the options of a call of the operator, by name, and the gradients that
    it asks for."""
    named = dict(zip((*_GIVEN, *_BEGINS, *_OPTIONS, *_WANTED), args, strict=True))
    tensors = {n: named[n] for n in (*_GIVEN, *_BEGINS) if named[n] is not None}
    wanted = (name for name, of in zip(GRADIENTS, _WANTED, strict=True) if named[of])
    return tensors, {name: named[name] for name in _OPTIONS}, frozenset(wanted)


def _compute(*args: Any) -> tuple[torch.Tensor, ...]:
    tensors, options, wanted = _named(args)
    tensors["do"] = _dense(tensors["do"])
    names = tuple(n for n in AttentionBackward.axes if n in tensors or n in GRADIENTS)
    given = tuple(tensors.get(name) for name in names)
    asked = (None, tuple(options.items()))
    found = compute(AttentionBackward, asked, names, given, _choose, wanted=wanted)
    of = {name: found[names.index(name)] for name in GRADIENTS}
    return tuple(x if name in wanted else x.new_empty(0) for name, x in of.items())


def _fake(*args: Any) -> tuple[torch.Tensor, ...]:
    tensors, options, wanted = _named(args)
    if constant_call(AttentionBackward, None, tensors, **options) is None:
        config = _choose((None, tuple(options.items())), tensors)
        compile_while_tracing(config, tensors["q"].device)
    return tuple(
        torch.empty(x.shape if name in wanted else 0, dtype=x.dtype, device=x.device)
        for name, x in ((name, tensors[of]) for name, of in GRADIENTS.items())
    )


_gradients = define(
    "attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, bool causal, int? window_left, "
    "int? window_right, float softcap, float? softmax_scale, bool deterministic, bool of_q, "
    "bool of_k, bool of_v) -> (Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    refusal=NO_SECOND,
)


def gradients(
    given: Sequence[torch.Tensor],
    begins: tuple[torch.Tensor, torch.Tensor] | None,
    *options: Any,
    asked: Sequence[bool] = (True, True, True),
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v; one that is not asked for is empty.

    given: do, q, k, v, o and lse, with a dimension for the batch if `begins` is None. begins:
    cu_seqlens of queries and keys. options: those of the operator, without their names.
    """
    if begins is None:
        return _gradients(*given, None, None, *options, *asked)
    return tuple(x[0] for x in _gradients(*(x[None] for x in given), *begins, *options, *asked))


class _Attention(torch.autograd.Function):
    """A node of the autograd graph that computes o and lse, and keeps them for the gradients.

    `function`: returns both. `lengths`: cu_seqlens_q and cu_seqlens_k, each of which is None
    without sequences of various lengths; with them there is no dimension for the batch. `options`:
    those of the operator of the gradients. PyTorch's switch for deterministic algorithms is read
    when the gradients are computed, or traced, as PyTorch's own attention reads it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        lengths: tuple[torch.Tensor | None, torch.Tensor | None],
        options: tuple[Any, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = function()
        ctx.save_for_backward(q, k, v, sinks, o, lse, *lengths)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(
        ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if dlse is not None:
            raise RuntimeError(NO_LSE)
        none = (None,) * 7
        if do is None:
            return none
        q, k, v, sinks, o, lse, *lengths = ctx.saved_tensors
        _, *asked, of_sinks, _, _ = ctx.needs_input_grad
        found: list[torch.Tensor | None] = [None, None, None]
        if any(asked):
            given = (do, q, k, v, o, lse)
            is_batched = lengths[0] is None
            dense = given if is_batched else tuple(x[None] for x in given)
            *options, deterministic = ctx.options
            deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
            computed = _gradients(*dense, *lengths, *options, deterministic, *asked)
            found = [
                (x if is_batched else x[0]) if wanted else None
                for x, wanted in zip(computed, asked, strict=True)
            ]
        dsinks = _gradient_of_sinks(do, o, lse, sinks) if of_sinks else None
        return (None, *found, dsinks, None, None)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that kernels take, itself or a copy: gradients are often expanded or
    transposed."""
    *outer, last = x.stride()
    if last != 1 or any(step % _CHUNK for step in outer) or 0 in outer:
        x = x.contiguous()
    return x.clone() if x.data_ptr() % _CHUNK_BYTES else x


def _gradient_of_sinks(
    do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the sinks, (heads,): each is a logit without a value, so that dP is 0
    and dS is -P delta."""
    delta = (do.float() * o.float()).sum(-1).transpose(-1, -2)  # (..., heads, len_q)
    P = torch.exp(sinks.float()[:, None] - lse).nan_to_num(0.0)  # -inf less -inf: no sink, no key
    by_head = -(P * delta).sum(-1)
    return by_head.reshape(-1, sinks.shape[0]).sum(0).to(sinks.dtype)


def differentiable(
    name: str,
    keys: torch._C.DispatchKeySet,
    args: tuple[Any, ...],
    tensors: tuple[torch.Tensor | None, ...],
    options: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and lse of an operator, with the node that computes their gradients.

    `name`, `args`: the operator, which returns both, and its arguments. `keys`: dispatch keys of
    the call. `tensors`: q, k, v, sinks, cu_seqlens_q and cu_seqlens_k. `options`: causal, both
    bounds of the window, softcap, softmax_scale and deterministic.
    """
    q, k, v, sinks, *lengths = tensors
    function = below_autograd(name, keys, args)
    return _Attention.apply(function, q, k, v, sinks, tuple(lengths), options)
