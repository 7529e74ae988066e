"""attention() and forward(), and their registration as torch custom operators."""

from __future__ import annotations

import functools
import math

import torch

from flash_helpers.kernel_configs import Config
from flash_helpers.ptx import Run
from flash_helpers.runtime.call import prepare
from flash_helpers.runtime.library import resolve
from flash_helpers.runtime.tensors import Layout, check_shapes, check_types, posed_problem
from flash_helpers.tune.best import choose_config

_CHOICES_KEPT = 1024
_FP32_EPSILON = 2.0**-24  # scales that differ by less are the same to a kernel

# -- operators -------------------------------------------------------------------------------------
# What torch.compile, tracers, transforms and autograd see.


@torch.library.custom_op("flash_attention::forward", mutates_args=())
def _forward(cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _compute(cfg, q, k, v)


@_forward.register_fake
def _(cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    check_shapes(resolve(cfg), {"q": q, "k": k, "v": v})
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@torch.library.custom_op("flash_attention::forward_out", mutates_args=("o",))
def _forward_out(
    cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor
) -> None:
    _compute(cfg, q, k, v, o)


@_forward_out.register_fake
def _(cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> None:
    check_shapes(resolve(cfg), {"q": q, "k": k, "v": v, "o": o})


@torch.library.custom_op("flash_attention::attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
) -> torch.Tensor:
    return _compute(_chosen(*_of(q), causal, softmax_scale, return_lse), q, k, v)


@_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
) -> torch.Tensor:
    config = _choose(*_of(q), causal, softmax_scale, return_lse)
    check_shapes(config, {"q": q, "k": k, "v": v})
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _no_backward(*_: object) -> None:
    raise RuntimeError(
        "flash_attention has no backward pass: call it under torch.no_grad(), or on q.detach()"
    )


_forward.register_autograd(_no_backward)
_attention.register_autograd(_no_backward)


# -- a call without an operator --------------------------------------------------------------------


def _compute(
    cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor | None = None
) -> torch.Tensor:
    call = prepare(cfg, {"q": q, "k": k, "v": v}, o)
    call.run()
    return call.output


_ORDINARY_KEYS = functools.reduce(
    int.__or__,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
        for kind in ("CPU", "CUDA")
        for name in (kind, f"Autograd{kind}", f"Autocast{kind}", "ADInplaceOrView", "BackendSelect")
    ),
)


def _is_ordinary(*tensors: torch.Tensor) -> bool:
    """Whether an operator would do no more than `_compute`, which takes less time alone: nothing
    compiles, traces, transforms, profiles or differentiates the call, and the tensors are what they
    seem to be, neither subclasses nor negative views."""
    if torch.compiler.is_compiling():
        return False
    keys = torch._C._dispatch_tls_local_include_set().raw_repr()
    needs_grad = False
    for tensor in tensors:
        keys |= torch._C._dispatch_keys(tensor).raw_repr()
        needs_grad |= tensor.requires_grad
    return not (
        keys & ~_ORDINARY_KEYS
        or (needs_grad and torch.is_grad_enabled())
        or torch.overrides.has_torch_function(tensors)
        or torch.autograd._profiler_enabled()
    )


# -- what users call -------------------------------------------------------------------------------


def _of(q: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """What of q the choice of a kernel depends on."""
    return q.shape, q.dtype, q.device


def _choose(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
) -> Config:
    problem = posed_problem({"q": Layout(shape, (), dtype, device)})
    usual = softmax_scale is None or math.isclose(
        softmax_scale, 1 / math.sqrt(problem.d_head), rel_tol=_FP32_EPSILON
    )
    asked = {"causal": causal, "softmax_scale": not usual, "return_lse": return_lse}
    return choose_config(problem, device, [name for name, wanted in asked.items() if wanted])


@functools.lru_cache(maxsize=_CHOICES_KEPT)
def _chosen(*asked: object) -> str:
    return _choose(*asked).short_form()


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
    check_types({"q": q, "k": k, "v": v})
    scale = None if softmax_scale is None else float(softmax_scale)
    asked = (bool(causal), scale, bool(return_lse))
    if _is_ordinary(q, k, v):
        return _compute(_chosen(*_of(q), *asked), q, k, v)
    return _attention(q, k, v, *asked)


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
        check_types({"q": q, "k": k, "v": v})
        return (_compute if _is_ordinary(q, k, v) else _forward)(name, q, k, v)
    check_types({"q": q, "k": k, "v": v, "o": o})
    if not _is_ordinary(q, k, v, o):
        _forward_out(name, q, k, v, o)
        return o
    if not o.is_inference():  # autograd would see that a tensor it has saved was overwritten
        torch.autograd.graph.increment_version(o)
    return _compute(name, q, k, v, o)


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
    call = prepare(name, inputs, o)
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
    call = prepare(name, inputs, o)
    return call.output, call.simulate(keep_going)


def _short_form(cfg: object) -> str:
    if isinstance(cfg, Config):
        return cfg.short_form()
    raise TypeError(
        f"cfg is a {type(cfg).__name__}: pass a FlashForwardKernelConfig or its short form"
    )
