"""attention() and forward(), and their registration as torch custom operators."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import index
from typing import Any, TypeAlias

import torch

from flash_attention._backward import differentiable
from flash_attention._operators import (
    compile_while_tracing,
    define,
    refuse_derivatives,
)
from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import AttentionForward, Config, Element, Problem
from flash_helpers.ptx import Run
from flash_helpers.runtime.call import compile_ahead, compute
from flash_helpers.runtime.call import prepare as ready_call
from flash_helpers.runtime.library import resolve
from flash_helpers.runtime.tensors import (
    Laid,
    check_problem,
    check_types,
    constant_call,
    element_of,
    posed_problem,
)
from flash_helpers.tune.best import choose_config, newest_that_takes

# -- operators -------------------------------------------------------------------------------------

_NAMES = tuple(AttentionForward.axes)  # of tensors, in the operators' order
_QKVO = ("q", "k", "v", "o")
_WITH_LSE = (*_QKVO, "lse")
_ALL_KEYS = (-1, -1)  # a window without bounds
_NO_SOFTCAP = 0.0
_NO_OPTIONS = (None, None, _NO_SOFTCAP)  # no bound before a query and behind it, no softcap
# Finds the config for what was asked and these tensors, with memory or without.
_Choose: TypeAlias = "Callable[[_Asked, Mapping[str, Laid]], Config]"
_Asked: TypeAlias = "tuple[object, tuple[tuple[str, Any], ...]]"
_MOST_KEYS = 2**62  # over any length, and within what an operator takes


def _asked(cfg: str, softmax_scale: float | None) -> tuple[str, tuple[tuple[str, Any], ...]]:
    return cfg, (("softmax_scale", softmax_scale),)


def _compute(
    cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None
) -> torch.Tensor:
    return compute(_config(cfg), _asked(cfg, softmax_scale), _QKVO, (q, k, v, None))[3]


def _config(cfg: str) -> type[AttentionForward]:
    """Return the problem class of a config's operation, which must be attention."""
    operation = resolve(cfg).family.operation
    if operation.problem is not AttentionForward:
        raise ValueError(
            f"{cfg} computes {operation.name}, not {AttentionForward.operation}: call run(), or "
            "choose a config of attention"
        )
    return AttentionForward


def _compute_out(
    cfg: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    softmax_scale: float | None,
    lse: torch.Tensor | None,
) -> None:
    names, given = (_QKVO, (q, k, v, o)) if lse is None else (_WITH_LSE, (q, k, v, o, lse))
    compute(_config(cfg), _asked(cfg, softmax_scale), names, given)
    _overwritten(o, lse)


def _overwritten(*outputs: torch.Tensor | None) -> None:
    """Let autograd notice that saved tensors were overwritten."""
    for output in outputs:
        if output is not None and not output.is_inference():
            torch.autograd.graph.increment_version(output)


def _compute_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None
) -> torch.Tensor:
    asked = None, (("causal", causal), ("softmax_scale", softmax_scale))
    return compute(AttentionForward, asked, _QKVO, (q, k, v, None), _choose)[3]


def _compute_attention_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    asked = None, (("causal", causal), ("softmax_scale", softmax_scale))
    given = (q, k, v, None, _new_lse(q))
    _, _, _, o, lse = compute(AttentionForward, asked, _WITH_LSE, given, _choose)
    return o, lse


def _new_output(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty(*q.shape[:-1], *v.shape[-1:], dtype=q.dtype, device=q.device)


def _new_lse(q: torch.Tensor) -> torch.Tensor:
    if q.ndim != 4:  # refused in the check of all tensors
        return torch.empty(0, device=q.device)
    return torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)


def _choose(asked: _Asked, given: Mapping[str, Laid]) -> Config:
    """Return the config that attention() uses. asked: None, and the options.

    Raises ValueError, with a way out, if no kernel computes the problem.
    """
    element = element_of("q", given["q"], AttentionForward.elements)
    options, problem = dict(asked[1]), None
    try:
        problem = posed_problem(AttentionForward, element, given, **options)
        return choose_config(problem, given["q"].device)
    except ValueError as error:
        way_out = _transposed_text(given, element, options)
        if not way_out and problem is not None and given["q"].device.type == "cpu":
            way_out = _simulated_text(problem)
        if not way_out:
            raise
        raise ValueError(f"{error}; {way_out}") from None


def _transposed_text(given: Mapping[str, Laid], element: Element, options: dict[str, Any]) -> str:
    """Return the way out for tensors that seem to be (batch, heads, seq, d_head); "" for other
    tensors."""
    shapes = {name: tuple(given[name].shape) for name in "qkv"}
    if any(len(shape) != 4 for shape in shapes.values()) or shapes["q"][2] <= shapes["q"][1]:
        return ""
    shapes = {name: (b, seq, heads, d) for name, (b, heads, seq, d) in shapes.items()}
    try:
        problem = AttentionForward.posed(shapes, element, **options)
    except ValueError:
        return ""
    if newest_that_takes(problem) is None:
        return ""
    return (
        "if q, k and v are (batch, heads, seq, d_head), pass q.transpose(1, 2), k.transpose(1, 2) "
        "and v.transpose(1, 2)"
    )


def _simulated_text(problem: AttentionForward) -> str:
    """Return the call that computes a problem on CPU tensors; "" if there is none."""
    config = newest_that_takes(problem)
    if config is None:
        return ""
    arguments = [f'"{config.short_form()}", q, k, v']
    if not problem.has_usual_scale:
        arguments.append(f"softmax_scale={problem.softmax_scale:g}")
    if problem.has_window:
        bounds = (problem.window_left, problem.window_right)
        left, right = (-1 if bound is None else bound for bound in bounds)
        arguments.append(f"window_size=({left}, {right})")
    if problem.softcap:
        arguments.append(f"softcap={problem.softcap:g}")
    arguments += ["sinks=sinks"] * problem.sinks + ["lse=lse"] * problem.return_lse
    return (
        "on CPU tensors attention() takes only kernels of the portable families; "
        f"forward({', '.join(arguments)}) simulates a kernel that computes this problem, and "
        "simulate() counts it too"
    )


def _check_fake(
    cfg: str | None,
    given: Mapping[str, Laid],
    kind: type[Problem] = AttentionForward,
    choose: _Choose = _choose,
    **options: Any,
) -> None:
    """Raises what a call raises for tensors without memory. cfg: None for attention(), and for
    other operators that take none."""
    config = None
    if cfg is not None:
        _config(cfg)
        config = resolve(cfg)
    if constant_call(kind, config, given, **options) is not None:
        return
    if config is None:
        config = choose((None, tuple(options.items())), given)
    else:
        check_problem(config, given, **options)
    compile_while_tracing(config, given["q"].device)


def _fake(
    cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None
) -> torch.Tensor:
    _check_fake(cfg, {"q": q, "k": k, "v": v}, softmax_scale=softmax_scale)
    return _new_output(q, v)


def _fake_out(
    cfg: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    softmax_scale: float | None,
    lse: torch.Tensor | None,
) -> None:
    given = {"q": q, "k": k, "v": v, "o": o}
    given = given if lse is None else {**given, "lse": lse}
    _check_fake(cfg, given, softmax_scale=softmax_scale)


def _fake_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None
) -> torch.Tensor:
    given = {"q": q, "k": k, "v": v}
    _check_fake(None, given, causal=causal, softmax_scale=softmax_scale)
    return _new_output(q, v)


def _fake_attention_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = _new_lse(q)
    given = {"q": q, "k": k, "v": v, "lse": lse}
    _check_fake(None, given, causal=causal, softmax_scale=softmax_scale)
    return _new_output(q, v), lse


_ANY_ATTENTION = "attention_options_lse"  # the operator that takes every option and returns both


def _attention_gradient(
    keys: torch._C.DispatchKeySet,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    options = (causal, *_NO_OPTIONS, softmax_scale, False)
    tensors = (q, k, v, None, None, None)
    return differentiable(_ANY_ATTENTION, keys, (q, k, v, None, *options), tensors, options)


def _define_with_options(
    schema: str, kind: type[AttentionForward] = AttentionForward, choose: _Choose = _choose
) -> Callable:
    """Define an operator that takes every option, by the names of its arguments. Operators without
    windows, softcap, sinks and `deterministic`, which only the gradients read, have functions of
    their own, since each argument takes time.

    kind: problem class of the operation. choose: finds the config where the schema has none.
    """
    before, _, after = schema.partition(" -> ")
    names = [argument.split()[-1] for argument in before.partition("(")[2][:-1].split(",")]

    def call(args: Sequence[Any]) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
        """Return the config, if one is asked for, the tensors in the order of calls, o among them,
        and the options."""
        given = dict(zip(names, args, strict=True))
        given |= {"lse": _new_lse(given["q"])} if "," in after else {}
        tensors = {name: given.pop(name, None) for name in kind.axes}
        cfg = given.pop("cfg", None)
        given.pop("deterministic", None)
        return cfg, {n: x for n, x in tensors.items() if x is not None or n == "o"}, given

    def results(tensors: Mapping[str, Any]) -> Any:
        if after == "()":
            return None
        return (tensors["o"], tensors["lse"]) if "," in after else tensors["o"]

    def function(*args: Any) -> Any:
        cfg, tensors, options = call(args)
        asked = cfg, tuple(options.items())
        given = tuple(tensors), tuple(tensors.values())
        found = (
            compute(kind, asked, *given, choose)
            if cfg is None
            else compute(_config(cfg), asked, *given)
        )
        if after == "()":
            _overwritten(tensors["o"], tensors.get("lse"))
        return results(dict(zip(tensors, found, strict=True)))

    def fake(*args: Any) -> Any:
        cfg, tensors, options = call(args)
        given = {name: x for name, x in tensors.items() if x is not None}
        _check_fake(cfg, given, kind, choose, **options)
        return results({"o": _new_output(given["q"], given["v"]), **given})

    def gradient(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        named = dict(zip(names, args, strict=True))
        tensors = (*(named[name] for name in ("q", "k", "v", "sinks")), None, None)
        options = tuple(named[name] for name in ("causal", *_OPTIONS, "deterministic"))
        found = differentiable(_ANY_ATTENTION, keys, args, tensors, options)
        return found if "," in after else found[0]

    is_attention = schema.startswith("attention")
    return define(schema, function, fake, gradient if is_attention else None)


# No defaults: Inductor passes arguments with defaults by name, which makes a call 1 µs longer.
_forward = define(
    "forward(str cfg, Tensor q, Tensor k, Tensor v, float? softmax_scale) -> Tensor",
    _compute,
    _fake,
)
_forward_out = define(
    "forward_out(str cfg, Tensor q, Tensor k, Tensor v, Tensor(a!) o, float? softmax_scale, "
    "Tensor(b!)? lse) -> ()",
    _compute_out,
    _fake_out,
)
_attention = define(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale) -> Tensor",
    _compute_attention,
    _fake_attention,
    lambda *args: _attention_gradient(*args)[0],
)
_attention_lse = define(
    "attention_lse(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale) "
    "-> (Tensor, Tensor)",
    _compute_attention_lse,
    _fake_attention_lse,
    _attention_gradient,
)
_OPTIONS = ("window_left", "window_right", "softcap", "softmax_scale")
_WINDOWED = "int? window_left, int? window_right, float softcap, float? softmax_scale"
_forward_options = _define_with_options(
    f"forward_options(str cfg, Tensor q, Tensor k, Tensor v, Tensor? sinks, {_WINDOWED}) -> Tensor"
)
_forward_options_out = _define_with_options(
    "forward_options_out(str cfg, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor(a!) o, "
    f"{_WINDOWED}, Tensor(b!)? lse) -> ()"
)
_attention_options = _define_with_options(
    "attention_options(Tensor q, Tensor k, Tensor v, Tensor? sinks, bool causal, "
    f"{_WINDOWED}, bool deterministic) -> Tensor"
)
_attention_options_lse = _define_with_options(
    "attention_options_lse(Tensor q, Tensor k, Tensor v, Tensor? sinks, bool causal, "
    f"{_WINDOWED}, bool deterministic) -> (Tensor, Tensor)"
)


# -- functions for users ---------------------------------------------------------------------------


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = _ALL_KEYS,
    softcap: float = _NO_SOFTCAP,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(q kᵀ · softmax_scale) v for each batch and head, by the best kernel for the
    problem.

    The first kernel that supports the problem is taken, of:
      1. those measured on the nearest problem of a grid, on this GPU or one of its compute
         capability, the fastest expected first;
      2. the last step of each family that the device runs, the newest family first: winners of
         sweeps, then the step's fixed config, and variants of both for the problem's options.
    Tensors are neither padded nor copied to fit a kernel.

    q: (batch, len_q, heads, d_head), fp16 or bf16.
    k, v: (batch, len_k, kv_heads, d_head), with the dtype and device of q. kv_heads divides heads,
        and head h of q uses head h // (heads // kv_heads) of k and v. v may have another d_head.
        Layouts are as for `forward`.
    causal: query i sees key j if j <= i + len_k - len_q. The mask is aligned to the bottom right,
        where the last query meets the last key. PyTorch's is_causal is aligned to the top left,
        which is another mask if the lengths differ.
    window_size: (left, right): query i sees key j if i' - left <= j <= i' + right, where i' is i +
        len_k - len_q. -1 is no bound. With causal, right is 0 whatever is passed, and a right of 0
        is causal.
    softcap: a logit x = q kᵀ · softmax_scale becomes softcap · tanh(x / softcap); 0 leaves it.
    sinks: (heads,), with the dtype and device of q, contiguous: one more logit for each head, which
        is neither scaled nor capped. It counts in the sum of exponentials and adds nothing to o.
    softmax_scale: 1/sqrt(d_head) by default.
    return_lse: also return, for each row, the natural logarithm of the sum of exp(x) over the
        logits x of the keys that the row sees, and over its head's sink: (batch, heads, len_q),
        fp32.
    deterministic: compute gradients by kernels alone that give the same bits in every call. Without
        it the fastest kernels are taken. Some of these add the gradient of q in memory in any
        order, so that its last bits may differ from call to call; o, lse and the gradients of k, v
        and sinks never differ. torch.use_deterministic_algorithms(True), with warn_only too, sets
        it for all calls. That switch is read when the backward pass runs, and under torch.compile
        when it is traced; a change of the switch traces anew.

    Returns o, with the dtype and sizes of q and the d_head of v, contiguous; with return_lse
    (o, lse). A query that sees no key has 0 in o, and its sink or -inf in lse. No kernel runs if
    there is no batch, head, query or key, and sizes and options that no kernel takes are taken
    then; d_head is at least 1. Runs on the same devices as `forward`, under torch.compile and in
    CUDA graphs too.

    Autograd has the gradients of q, k, v and sinks, by kernels of operation attention_backward,
    which take equal head sizes of q and v. The gradient of lse, second derivatives and torch.func's
    transforms are refused.

    Raises the errors of `forward`. A ValueError names the property that no kernel of the device
    supports, and the nearest supported problem. A table in docs/using.md lists the lengths, heads
    and options that each family of kernels takes.
    """
    _check_tensors(q, k, v)
    _check_flag("causal", causal)
    _check_flag("return_lse", return_lse)
    _check_flag("deterministic", deterministic)
    scale = _scale(softmax_scale)
    options = None
    if window_size is not _ALL_KEYS or softcap is not _NO_SOFTCAP or sinks is not None:
        options = _options(window_size, softcap, sinks)
    if options is not None or deterministic:
        function = _attention_options_lse if return_lse else _attention_options
        return function(q, k, v, sinks, causal, *(options or _NO_OPTIONS), scale, deterministic)
    function = _attention_lse if return_lse else _attention
    return function(q, k, v, causal, scale)


def attention_into(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    *,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    softmax_scale: float | None,
) -> torch.Tensor:
    """Write what `attention` returns into o, which has any strides that `forward` takes, and return
    the LSE. For functions that autograd does not look into: this is no operator."""
    options = zip(_OPTIONS, _options(window_size, softcap, None) or _NO_OPTIONS, strict=False)
    scale = _scale(softmax_scale)
    asked = None, (("causal", causal), *options, ("softmax_scale", scale))
    lse = _new_lse(q)
    compute(AttentionForward, asked, _WITH_LSE, (q, k, v, o, lse), _choose)
    return lse


def forward(
    cfg: Config | str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
    *,
    window_size: tuple[int, int] = _ALL_KEYS,
    softcap: float = _NO_SOFTCAP,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax(q kᵀ · softmax_scale) v for each batch and head, by the kernel of `cfg`. If
    the config is causal, the mask is that of `attention`.

    cfg: a config, or its short form (`kernels()` lists configs; any other valid one will do).
    q, k, v: (batch, seq, heads, d_head), with the config's dtype, on one device. `cfg.supports`
        tells the shapes: d_head 128, and one seq for all tensors that is a multiple of B_r and B_c,
        unless the step takes more. Strides are multiples of 8 elements, 1 in the last dimension.
        q, k, v and o begin at multiples of 16 bytes.
    o: written and returned if given, with the shape, dtype and device of q and the d_head of v,
        without overlap with other tensors; otherwise a new contiguous tensor.
    window_size, softcap, sinks, softmax_scale: as for `attention`.
    lse: written if given, as `attention` returns it: (batch, heads, seq), fp32, contiguous, without
        overlap with other tensors.

    Runs on a CUDA device's current stream, without synchronising. On CPU tensors it runs the
    kernel's PTX in the simulator (see `simulate`), which needs no GPU. For a large shape, stderr
    shows an estimate of the time and a progress bar. Tensors without elements are computed without
    a kernel, as by `attention`. It has no gradient, as `attention` has: differentiating through it
    raises RuntimeError, and so do `o` and `lse` beside inputs that require grad, outside of
    torch.no_grad().

    Raises TypeError for a wrong type or dtype; ValueError for any other wrong argument;
    RuntimeError on a device that is neither the CPU nor CUDA of compute
    capability 8.0, and with CUDA's text if the launch fails. After these errors no kernel has run.
    A fault that the simulator finds in the kernel is a RuntimeError with the fault's text, and `o`
    is unchanged.
    """
    name = cfg if isinstance(cfg, str) else _short_form(cfg)
    scale = _scale(softmax_scale)
    options = None
    if window_size is not _ALL_KEYS or softcap is not _NO_SOFTCAP or sinks is not None:
        options = _options(window_size, softcap, sinks)
    if o is None and lse is None:
        _check_tensors(q, k, v)
        if options is not None:
            return _forward_options(name, q, k, v, sinks, *options, scale)
        return _forward(name, q, k, v, scale)
    if o is None:
        _check_tensors(q, k, v)
        o = _new_output(q, v)
    _check_tensors(q, k, v, o)
    if lse is not None:
        check_types({"lse": lse})
    if options is not None:
        _forward_options_out(name, q, k, v, sinks, o, *options, scale, lse)
    else:
        _forward_out(name, q, k, v, o, scale, lse)
    return o


def forward_timed(
    cfg: Config | str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float]:
    """Compute as `forward` does; return o and the kernel's time on the GPU in milliseconds, by CUDA
    events.

    Waits for the kernel to end. On an idle GPU the time includes the launch. The time is 0 where no
    kernel runs.
    Raises RuntimeError for CPU tensors too: the simulator has no clock.
    """
    inputs = {"q": q, "k": k, "v": v}
    check_types(inputs if o is None else {**inputs, "o": o})
    refuse_derivatives("forward_timed", q, k, v)
    name = cfg if isinstance(cfg, str) else _short_form(cfg)
    _config(name)
    call = ready_call(name, q, k, v, o)
    if call.is_simulated:
        raise RuntimeError(
            "forward_timed needs a CUDA device and the tensors are on the CPU, where kernels are "
            "simulated without a clock: move them to a GPU, or count with simulate()"
        )
    if call.plan.constants is not None:
        call.run()
        return call.output, 0.0
    stream = torch.cuda.current_stream(q.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with call.logged():  # not call.run(): what a log reads does not count
        begin.record(stream)
        call.plan.run(call.addresses)
        end.record(stream)
    end.synchronize()
    return call.output, begin.elapsed_time(end)


def run(
    cfg: Config | str, *tensors: torch.Tensor | None, **options: Any
) -> dict[str, torch.Tensor]:
    """Compute any operation by the kernel of `cfg`; return its outputs by name.

    cfg: a config, or its short form (`kernels()` lists configs; any other valid one will do). Its
        operation defines the tensors, such as x and y for the softmax along rows.
    tensors: inputs and outputs, in the operation's order. An output that is None or left out is
        allocated, contiguous. A given output is written; it must not overlap other tensors. Tensors
        that are optional come last.
    options: of the operation, such as softmax_scale.

    Runs on the same devices as `forward`, but is not a torch operator: torch.compile does not see
    it, and there is no backward pass. Raises the errors of `forward`.
    """
    config = resolve(cfg)
    operation = config.family.operation
    axes = operation.problem.axes
    if len(tensors) > len(axes):
        raise ValueError(
            f"{operation.name} takes at most {len(axes)} tensors ({', '.join(axes)}): not "
            f"{len(tensors)}"
        )
    given = {name: x for name, x in zip(axes, tensors, strict=False) if x is not None}
    if not given:
        raise ValueError(f"{operation.name} takes {', '.join(axes)}: pass the inputs among them")
    parameters = inspect.signature(operation.problem.posed).parameters.values()
    if unknown := options.keys() - {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}:
        raise TypeError(f"{operation.name} has no option {', '.join(sorted(unknown))}")
    for field in fields(operation.problem):
        value = options.get(field.name)
        if field.type == "bool" and field.name in options:
            _check_flag(field.name, value)
        elif field.type == "float" and value is not None:
            options[field.name] = _number(field.name, value, "leave it out")
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{field.name} is {value!r}: pass a whole number, or leave it out")
    check_types(given)
    refuse_derivatives("run", *given.values())
    call = ready_call(config, *tensors, **options)
    call.run()
    return call.outputs


def prepare(
    *what: Config | str | Problem, device: torch.device | str | int | None = None
) -> list[Config]:
    """Compile kernels, several at once, so that no call has to; return their configs.

    A kernel that the library does not hold is otherwise compiled when it is first called, which
    takes seconds and is refused while a CUDA graph is captured. Compiled kernels are kept in a
    cache (`python -m flash_attention cache`). Under torch.compile, kernels are compiled while a
    call is traced.

    what: configs, short forms, or problems such as AttentionForward(...), which stand for the
        kernel that `attention` takes.
    device: where they will run: the current CUDA device by default, or the CPU without one.

    Raises ValueError for a text that is no short form, and for a problem that no kernel computes;
    RuntimeError for a device that cannot run a kernel, and, with the compiler's text, for a kernel
    that does not compile.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    found = [
        choose_config(each, where) if isinstance(each, Problem) else resolve(each) for each in what
    ]
    # and those that run in place of these for some strides
    compile_ahead([sibling for config in found for sibling in config.siblings()], where)
    return found


def simulate(
    cfg: Config | str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
    *,
    window_size: tuple[int, int] = _ALL_KEYS,
    softcap: float = _NO_SOFTCAP,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    lse: torch.Tensor | None = None,
    keep_going: bool = False,
    device: Device | None = None,
) -> tuple[torch.Tensor, Run]:
    """Compute as `forward` does on CPU tensors; return o and the simulated run.

    keep_going: collect the faults of the kernel in `Run.faults` instead of raising the first one.
    device: target GPU of the launches; by default the largest GPU of the first architecture that
        the kernel is compiled for.

    Raises the errors of `forward`, and ValueError for tensors that are not on the CPU or that no
    kernel runs on, since they are empty.
    """
    others = {"o": o, "lse": lse, "sinks": sinks}
    check_types({"q": q, "k": k, "v": v, **{n: x for n, x in others.items() if x is not None}})
    refuse_derivatives("simulate", q, k, v, sinks)
    _check_flag("keep_going", keep_going)
    softmax_scale = _scale(softmax_scale)
    if q.device.type != "cpu":
        raise ValueError(f"q is on {q.device} and the simulator runs on the CPU: call .cpu()")
    name = cfg if isinstance(cfg, str) else _short_form(cfg)
    _config(name)
    left, right, cap = _options(window_size, softcap, sinks) or _NO_OPTIONS
    options = {"window_left": left, "window_right": right, "softcap": cap}
    call = ready_call(name, q, k, v, o, lse, sinks, softmax_scale=softmax_scale, **options)
    return call.output, call.simulate(keep_going, device)


def _check_tensors(*args: object) -> None:
    """Refuse tensors that an operator would refuse with a less clear message."""
    for arg in args:
        if not isinstance(arg, torch.Tensor):
            check_types(dict(zip(_NAMES, args, strict=False)))


def _check_flag(name: str, value: object) -> None:
    """Refuse a value that is not a bool: "no" would count as True."""
    if value is not True and value is not False:
        raise TypeError(f"{name} is {value!r}: pass True or False")


def _options(
    window_size: Any, softcap: Any, sinks: object
) -> tuple[int | None, int | None, float] | None:
    """Return both bounds of a window, None where there is none, and the softcap; None if all that
    and sinks are left out.

    Raises TypeError for values of another type, ValueError for a bound below -1.
    """
    if sinks is not None:
        check_types({"sinks": sinks})
    try:
        left, right = window_size
        bounds = [index(bound) for bound in (left, right)]
    except (TypeError, ValueError):
        bounds = []
    if not bounds or isinstance(left, bool) or isinstance(right, bool):
        raise TypeError(
            f"window_size is {window_size!r}: pass two whole numbers, the keys before and behind "
            "a query that it sees, with -1 for no bound"
        )
    if min(bounds) < -1:
        raise ValueError(
            f"window_size is ({left}, {right}), and a bound is at least 0: pass -1 for no bound"
        )
    found = [None if bound == -1 else min(bound, _MOST_KEYS) for bound in bounds]
    softcap = _number("softcap", softcap, "0 for none")
    if sinks is None and found == [None, None] and softcap == 0:
        return None
    return found[0], found[1], softcap


def _scale(value: Any) -> float | None:
    """Return the softmax scale as a number. Raises TypeError for a value that is not a number."""
    if value is None or type(value) is float:
        return value
    return _number("softmax_scale", value, "None for 1/sqrt(d_head)")


def _number(name: str, value: Any, otherwise: str) -> float:
    """Return an option as a number. Raises TypeError for a value that is not a number."""
    try:
        if not isinstance(value, (str, bool)):
            return float(value)
    except OverflowError:
        return math.inf  # refused as that is
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{name} is {value!r}: pass a number, or {otherwise}")


def _short_form(cfg: object) -> str:
    if isinstance(cfg, Config):
        return cfg.short_form()
    raise TypeError(
        f"cfg is a {type(cfg).__name__}: pass a FlashForwardKernelConfig or its short form"
    )
