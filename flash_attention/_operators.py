"""The operators that torch.compile, tracers, transforms and autograd see.

torch.library.custom_op is not used: its layers take longer than all work of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from flash_helpers.kernel_configs import Config
from flash_helpers.runtime.call import compile_ahead
from flash_helpers.runtime.tensors import check_types

_LIBRARY = torch.library.Library("flash_attention", "FRAGMENT")
_KEYS = torch._C.DispatchKey
# All dispatch keys except those of a call on plain tensors without tracing or transforms.
_OTHER_KEYS = ~functools.reduce(
    int.__or__,
    (
        torch._C.DispatchKeySet(key).raw_repr()
        for key in (_KEYS.CPU, _KEYS.AutogradCPU, _KEYS.CUDA, _KEYS.AutogradCUDA)
    ),
)


_NO_BACKWARD = (
    "flash_attention has no backward pass for this function, as it has for attention(): call it "
    "under torch.no_grad(), or on q.detach(), k.detach() and v.detach()"
)


class _NoBackward(torch.autograd.Function):
    """A node of the autograd graph that refuses differentiation through it."""

    @staticmethod
    def forward(ctx: Any, refusal: str, function: Callable, *args: Any) -> Any:
        ctx.refusal = refusal
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(ctx.refusal)


def _refuse_transforms(args: Sequence[Any]) -> None:
    """Refuse torch.func.grad and its like, which `_NoBackward` does not catch."""
    is_tracked = torch._C._functorch.is_gradtrackingtensor
    if any(is_tracked(arg) for arg in args if isinstance(arg, torch.Tensor)):
        raise RuntimeError(
            "flash_attention has no backward pass for torch.func.grad, vjp or jacrev: use "
            "backward() or torch.autograd.grad(), or pass q.detach(), k.detach() and v.detach()"
        )


def refuse_tangents(args: Sequence[Any]) -> None:
    """Refuse forward-mode derivatives, which PyTorch would take for zero."""
    tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            "flash_attention has no forward-mode derivative, and torch.func.jvp or "
            "torch.autograd.forward_ad asks for one: pass the primals alone, or use "
            "torch.nn.functional.scaled_dot_product_attention"
        )


def refuse_derivatives(function: str, *tensors: torch.Tensor | None) -> None:
    """Refuse derivatives and transforms of a function that is no operator, which see nothing of
    it."""
    given = [x for x in tensors if x is not None]
    refuse_tangents(given)
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        _refuse_transforms(given)
        raise RuntimeError(_NO_BACKWARD)
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in given):
        raise RuntimeError(
            f"{function}() is no operator and torch.func's transforms, such as vmap, cannot see "
            "it: call attention() or forward()"
        )


def below_autograd(
    name: str, keys: torch._C.DispatchKeySet, args: Sequence[Any]
) -> Callable[[], Any]:
    """Return a call of an operator that autograd does not see. keys: of a call that it saw."""
    operator = getattr(torch.ops.flash_attention, name).default

    def call() -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)

    return call


def compile_while_tracing(config: Config, device: torch.device) -> None:
    """Compile a config's kernels while torch.compile or torch.export traces a call of it, so that
    no run of what they make has to. Fake tensors alone, as of FakeTensorMode, compile nothing."""
    is_traced = torch._guards.TracingContext.try_get() is not None
    if is_traced and (device.type == "cpu" or torch.cuda.is_available()):
        compile_ahead(config.siblings(), device)


def define(
    schema: str,
    function: Callable,
    fake: Callable,
    gradient: Callable[..., Any] | None = None,
    refusal: str = _NO_BACKWARD,
) -> Callable:
    """Define the operator of a schema. function: computes on dense tensors. fake: makes the result
    without memory. gradient: computes the result, and the graph of autograd, from the call's
    dispatch keys and its arguments. refusal: the text of the error for a derivative, where there is
    no `gradient`."""
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    operator = getattr(torch.ops.flash_attention, name).default
    names = [argument.name for argument in operator._schema.arguments]
    written = [argument.is_write for argument in operator._schema.arguments]
    read = slice(written.index(True)) if any(written) else slice(None)
    outputs = [name for name, is_written in zip(names, written, strict=True) if is_written]

    def redispatch(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)

    def at_autograd(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            refuse_tangents(args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args[read]):
            _refuse_transforms(args)
            if any(written):
                raise RuntimeError(
                    f"{_NO_BACKWARD}; what is written into {' or '.join(outputs)} has no gradient"
                )
            if gradient is not None:
                return gradient(keys, *args)
            return _NoBackward.apply(refusal, redispatch, keys, *args)
        if keys.raw_repr() & _OTHER_KEYS:
            if any(written) and keys.has(_KEYS.Negative):
                raise ValueError(
                    "a tensor is a negative view, whose memory holds the other sign, and "
                    f"{' or '.join(outputs)} is written: call .resolve_neg(), or leave out what "
                    "need not be given"
                )
            return redispatch(keys, *args)
        return function(*args)  # dispatching would end here too, and takes time

    def checked(function: Callable) -> Callable:
        def call(*args: Any) -> Any:
            tensors = {n: x for n, x in zip(names, args, strict=True) if torch.is_tensor(x)}
            if any(tensor.layout is not torch.strided for tensor in tensors.values()):
                check_types(tensors)
            return function(*args)

        return call

    _LIBRARY.impl(name, at_autograd, "Autograd", with_keyset=True)
    _LIBRARY.impl(name, checked(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_attention::{name}", checked(fake), lib=_LIBRARY)
    return operator
