"""attention() and forward(), and their registration as torch custom operators."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from flash_helpers.kernel_configs import Config
from flash_helpers.ptx import Run
from flash_helpers.runtime.call import compute, prepare
from flash_helpers.runtime.library import resolve
from flash_helpers.runtime.tensors import Laid, check_shapes, check_types, posed_problem
from flash_helpers.tune.best import choose_config

_FP32_EPSILON = 2.0**-24  # scales that differ by less are the same to a kernel

# -- operators -------------------------------------------------------------------------------------
# What torch.compile, tracers, transforms and autograd see. Not torch.library.custom_op, the layers
# of which take longer than all that is done here.

_LIBRARY = torch.library.Library("flash_attention", "FRAGMENT")
_KEYS = torch._C.DispatchKey
# All but those of a call on plain tensors that nobody traces, transforms or watches.
_OTHER_KEYS = ~functools.reduce(
    int.__or__,
    (
        torch._C.DispatchKeySet(key).raw_repr()
        for key in (_KEYS.CPU, _KEYS.AutogradCPU, _KEYS.CUDA, _KEYS.AutogradCUDA)
    ),
)


class _NoBackward(torch.autograd.Function):
    """Takes part in a graph to refuse what leads through it."""

    @staticmethod
    def forward(_: Any, function: Callable, *args: Any) -> Any:
        return function(*args)

    @staticmethod
    def backward(*_: Any) -> None:
        raise RuntimeError(
            "flash_attention has no backward pass: call it under torch.no_grad(), or on q.detach()"
        )


def _define(schema: str, function: Callable, fake: Callable) -> Callable:
    """The operator of a schema. function: of dense tensors. fake: the result without memory."""
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    operator = getattr(torch.ops.flash_attention, name).default

    def redispatch(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)

    def at_autograd(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return _NoBackward.apply(redispatch, keys, *args)
        if keys.raw_repr() & _OTHER_KEYS:
            return redispatch(keys, *args)
        return function(*args)  # where it would lead to, but dispatching takes time

    def checked(function: Callable) -> Callable:
        def call(*args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            for tensor in tensors:
                if tensor.layout is not torch.strided:
                    check_types(dict(zip("qkvo", tensors, strict=False)))
            return function(*args)

        return call

    _LIBRARY.impl(name, at_autograd, "Autograd", with_keyset=True)
    _LIBRARY.impl(name, checked(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_attention::{name}", checked(fake), lib=_LIBRARY)
    return operator


def _compute_out(
    cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor
) -> None:
    compute(cfg, q, k, v, o)
    if not o.is_inference():  # autograd would see that a tensor it has saved was overwritten
        torch.autograd.graph.increment_version(o)


def _compute_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
) -> torch.Tensor:
    return compute((causal, softmax_scale, return_lse), q, k, v, choose=_choose)


def _choose(options: tuple[bool, float | None, bool], q: Laid) -> Config:
    """The config that attention() computes with. options: causal, softmax_scale, return_lse."""
    causal, softmax_scale, return_lse = options
    problem = posed_problem({"q": q})
    usual = softmax_scale is None or math.isclose(
        softmax_scale, 1 / math.sqrt(problem.d_head), rel_tol=_FP32_EPSILON
    )
    asked = {"causal": causal, "softmax_scale": not usual, "return_lse": return_lse}
    return choose_config(problem, q.device, [name for name, wanted in asked.items() if wanted])


def _fake(cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    check_shapes(resolve(cfg), {"q": q, "k": k, "v": v})
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _fake_out(cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> None:
    check_shapes(resolve(cfg), {"q": q, "k": k, "v": v, "o": o})


def _fake_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
) -> torch.Tensor:
    check_shapes(_choose((causal, softmax_scale, return_lse), q), {"q": q, "k": k, "v": v})
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


_forward = _define("forward(str cfg, Tensor q, Tensor k, Tensor v) -> Tensor", compute, _fake)
_forward_out = _define(
    "forward_out(str cfg, Tensor q, Tensor k, Tensor v, Tensor(a!) o) -> ()",
    _compute_out,
    _fake_out,
)
_attention = _define(
    # No defaults: Inductor passes by name what has one, which makes a call 1 µs longer.
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, bool return_lse) "
    "-> Tensor",
    _compute_attention,
    _fake_attention,
)


# -- what users call -------------------------------------------------------------------------------


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor:
    """softmax(q kᵀ · softmax_scale) v for every batch and head, by the kernel that is best for it.

    That is the first that supports the problem among, for the last step of each family of kernels
    that the device runs, the newest family first: the fastest config known for it
    (`best_config`), its fixed config. Nothing is padded or copied to make it fit.

    q, k, v: (batch, seq, heads, d_head), fp16 or bf16, on one device, of the layouts that `forward`
        takes.
    causal: query i sees keys 0 to i only. softmax_scale: 1/sqrt(d_head) by default.
    return_lse: also return (o, lse): of each row, (batch, heads, seq), the natural logarithm of the
        sum of exp(q kᵀ · softmax_scale), fp32.

    Returns o, of the shape and dtype of q, contiguous. Runs where and how `forward` does, under
    torch.compile and in CUDA graphs too, and has no backward pass either.

    Raises what `forward` raises. A ValueError names what no kernel supports, and the nearest that
    one does; at the moment causal, another softmax_scale and return_lse are among it.
    """
    _check_tensors(q, k, v)
    scale = None if softmax_scale is None else float(softmax_scale)
    return _attention(q, k, v, bool(causal), scale, bool(return_lse))


def forward(
    cfg: Config | str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(d_head)) v for every batch and head, by the kernel of `cfg`.

    cfg: a config, or its short form, that the library was built with (`kernels()`).
    q, k, v: (batch, seq, heads, d_head), of the config's dtype, on one device; d_head 128,
        seq a multiple of B_r and B_c. Any strides that are multiples of 8 elements, 1 in the last
        dimension, from 16-byte aligned memory.
    o: written and returned if given, with the same shape, dtype and device, overlapping nothing;
        otherwise a new contiguous tensor.

    Runs on a CUDA device's current stream, without synchronising. On CPU tensors it runs the
    kernel's PTX in the simulator (see `simulate`), which needs no GPU; a large shape is announced
    with an estimate and a progress bar on stderr. There is no backward pass: differentiating
    through the result raises RuntimeError.

    Raises TypeError for a wrong type or dtype; ValueError for any other wrong argument and for a
    config that was not built; RuntimeError on a device that is neither the CPU nor CUDA of compute
    capability 8.0, or with CUDA's text when the launch fails. Nothing is launched then. A fault
    that the simulator finds in the kernel is a RuntimeError with its text, and `o` is as before.
    """
    name = cfg if isinstance(cfg, str) else _short_form(cfg)
    if o is None:
        _check_tensors(q, k, v)
        return _forward(name, q, k, v)
    _check_tensors(q, k, v, o)
    _forward_out(name, q, k, v, o)
    return o


def forward_timed(
    cfg: Config | str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float]:
    """As `forward`, and how long the kernel took on the GPU, in milliseconds (CUDA events).

    Waits for the kernel to end. One launch on an idle GPU includes the time to launch it.
    Raises RuntimeError for CPU tensors too: the simulator has no clock.
    """
    inputs = {"q": q, "k": k, "v": v}
    check_types(inputs if o is None else {**inputs, "o": o})
    name = cfg if isinstance(cfg, str) else _short_form(cfg)
    call = prepare(name, q, k, v, o)
    if call.is_simulated:
        raise RuntimeError(
            "forward_timed needs a CUDA device and the tensors are on the CPU, where kernels are "
            "simulated without a clock: move them to a GPU, or count with simulate()"
        )
    stream = torch.cuda.current_stream(q.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    call.run()
    end.record(stream)
    end.synchronize()
    return call.output, begin.elapsed_time(end)


def simulate(
    cfg: Config | str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
    *,
    keep_going: bool = False,
) -> tuple[torch.Tensor, Run]:
    """As `forward` on CPU tensors, and what the simulator counted.

    keep_going: collect the faults of the kernel in `Run.faults` rather than raise the first one.

    Raises what `forward` raises, and ValueError for tensors that are not on the CPU.
    """
    inputs = {"q": q, "k": k, "v": v}
    check_types(inputs if o is None else {**inputs, "o": o})
    if q.device.type != "cpu":
        raise ValueError(f"q is on {q.device} and the simulator runs on the CPU: call .cpu()")
    name = cfg if isinstance(cfg, str) else _short_form(cfg)
    call = prepare(name, q, k, v, o)
    return call.output, call.simulate(keep_going)


def _check_tensors(*args: object) -> None:
    """Refuse here what an operator would refuse in words of its own."""
    for arg in args:
        if not isinstance(arg, torch.Tensor):
            check_types(dict(zip("qkvo", args, strict=False)))


def _short_form(cfg: object) -> str:
    if isinstance(cfg, Config):
        return cfg.short_form()
    raise TypeError(
        f"cfg is a {type(cfg).__name__}: pass a FlashForwardKernelConfig or its short form"
    )
