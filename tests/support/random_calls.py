"""Random calls of attention's functions, most of which are wrong somewhere, drawn from a seed."""

import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from attention_configs import attention_progression

import flash_attention
from flash_attention import flash_attn, flash_attn_3
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import config_from_short_form
from flash_helpers.operations.attention_forward.reference import attention_reference

T = TypeVar("T")

# Words of a way out, in a refusal.
WAY_OUT = re.compile(
    r"\b(call|choose|convert|examples?|leave|make|move|must|no step|pad|pass|scale|split|switches|"
    r"use|without)\b"
)
# PyTorch's own words for an output that no memory holds.
NO_MEMORY = re.compile("can't allocate memory|out of memory")

CONFIGS = tuple(config.short_form() for config in attention_progression())
BAD_CONFIGS = ("", "v7", "o5_bf16_d127_Br128_Bc64_w4", "s3_bf16_w8_c4", "\0", 7, None)
NO_TENSORS = (None, 1.0, "q", [[1.0]], torch.bfloat16)
DTYPES = (torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64, torch.uint8)
SCALES = (0, -1.0, math.nan, math.inf, -math.inf, 1e-300, 1e300, 10**400, "1", True, [1], 1j)
FLAGS = (0, 1, None, "no", torch.tensor(True))
WINDOWS = (
    (0, 0),
    (5, -1),
    (-1, 0),
    (3, 200),
    (10**30, -1),
    (-2, 3),
    (1,),
    (1, 2, 3),
    5,
    None,
    "ab",
)
WINDOWS += ((1.5, 2), (True, False), [1, 2])
SOFTCAPS = (30, 1e-3, *SCALES[1:])
NUMBERS = (-1, 0.1, math.nan, math.inf, "1", None, True, 2**70)


@dataclass(frozen=True)
class RandomCall:
    """A call. `text`: its seed, the function, and what is special about it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    text: str

    def __call__(self) -> Any:
        """Make the call."""
        return self.function(*self.args, **self.options)

    def check(self, found: Any, has_values: bool) -> None:
        """Raise AssertionError for a wrong result. `has_values`: whether it was computed."""
        o, lse = found[:2] if isinstance(found, tuple) else (found, self.options.get("lse"))
        q, k, v = self._inputs()
        assert (o.shape, o.dtype, o.device) == ((*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
        if lse is not None:
            assert (lse.numel(), lse.dtype) == (q.numel() // q.shape[-1], torch.float32)
        if not has_values:
            return
        if q.ndim == 4:
            self._check_values(o, lse, q, k, v)
            return
        # a GPU's kernels, which do not refuse them, take begins before row 0 for 0
        bounds = (pairwise(x.clamp(min=0).tolist()) for x in self.args[3:5])
        for own, seen in zip(*bounds, strict=True):
            rows, keys = slice(*own), slice(*seen)
            part = None if lse is None else lse[None, :, rows]
            self._check_values(o[None, rows], part, *(x[None] for x in (q[rows], k[keys], v[keys])))

    def _inputs(self) -> Sequence[torch.Tensor]:
        if self.function is flash_attn.flash_attn_qkvpacked_func:
            return self.args[0].unbind(-3)
        return self.args[1:4] if self.function is flash_attention.forward else self.args[:3]

    def _check_values(self, o: torch.Tensor, lse: torch.Tensor | None, *qkv: torch.Tensor) -> None:
        given = self.options
        sinks = given.get("sinks")
        if not all(x.numel() for x in qkv):
            unseen = -math.inf if sinks is None else sinks[:, None].float()
            assert not o.any() and (lse is None or (lse == unseen).all())
            return
        left, right = (None if n == -1 else min(n, 2**40) for n in given["window_size"])
        causal = given.get("causal", False)
        if self.function is flash_attention.forward:
            causal = config_from_short_form(self.args[0]).supports.options["causal"]
        options = {"causal": causal, "window_left": left, "window_right": right, "sinks": sinks}
        options |= {name: given[name] for name in ("softmax_scale", "softcap")}
        wanted = attention_reference(*qkv, **options)
        assert measure_error(o, wanted.expected["o"]).within(wanted.bounds["o"])
        if lse is not None:
            assert measure_error(lse, wanted.expected["lse"]).within(wanted.bounds["lse"])


class Draw:
    """The choices of one call. `device`: of its tensors. `has_values`: whether these differ from
    one another, which takes longer than all other choices."""

    def __init__(self, seed: int, device: str, has_values: bool) -> None:
        self.random = random.Random(seed)
        self.values = torch.Generator().manual_seed(seed) if has_values else None
        self.device = device
        self.said: list[str] = []

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor."""
        if self.values is None:
            return torch.ones(tuple(shape), dtype=dtype, device=self.device)
        x = torch.randn(tuple(shape), generator=self.values) + 0.1
        return x.to(self.device, dtype)

    def one(self, *choices: T) -> T:
        """Return one of some values."""
        return self.random.choice(choices)

    def chance(self, share: float) -> bool:
        """Return True in a share of the calls."""
        return self.random.random() < share

    def say(self, text: str, value: T) -> T:
        """Return a value that is special, and remember it for the text."""
        shown = f"{tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:60]
        self.said.append(f"{text} {shown}")
        return value

    def usual_or(self, name: str, usual: T, others: Sequence[Any], share: float = 0.1) -> Any:
        """Return the usual value, or in a share of the calls one of the others."""
        return self.say(name, self.one(*others)) if self.chance(share) else usual


def drawn(seed: int, device: str = "cpu", has_values: bool = False) -> RandomCall:
    """Return the call of a seed. Other arguments are those of `Draw`."""
    draw = Draw(seed, device, has_values)
    kind = draw.one(_attention, _attention, _forward, _forward, _flash_attn, _flash_attn_3)
    function, args, options = kind(draw)
    name = f"{function.__module__}.{function.__name__}"
    return RandomCall(function, args, options, ", ".join([f"seed {seed}: {name}", *draw.said]))


def _attention(draw: Draw) -> Any:
    options = {
        "causal": draw.usual_or("causal", draw.chance(0.3), FLAGS, 0.05),
        "return_lse": draw.usual_or("return_lse", draw.chance(0.3), FLAGS, 0.05),
        "deterministic": draw.usual_or("deterministic", draw.chance(0.3), FLAGS, 0.05),
        **_shared(draw),
    }
    q, k, v = _tensors(draw)
    return flash_attention.attention, (q, k, v), options | _sinks(draw, q)


def _shared(draw: Draw) -> dict[str, Any]:
    """Draw the options that all functions have."""
    return {
        "softmax_scale": draw.usual_or("softmax_scale", None, (0.1, *SCALES), 0.07),
        "window_size": draw.usual_or("window_size", (-1, -1), WINDOWS),
        "softcap": draw.usual_or("softcap", 0.0, SOFTCAPS, 0.05),
    }


def _sinks(draw: Draw, q: Any) -> dict[str, Any]:
    """Draw sinks for the heads of q, in a share of the calls."""
    if not isinstance(q, torch.Tensor) or q.ndim != 4 or draw.chance(0.9):
        return {}
    sinks = draw.say("sinks", draw.tensor(q.shape[2:3], q.dtype))
    return {"sinks": _spoilt(draw, "sinks", sinks) if draw.chance(0.3) else sinks}


def _forward(draw: Draw) -> Any:
    cfg = draw.usual_or("config", draw.one(*CONFIGS), BAD_CONFIGS)
    q, k, v = _tensors(draw)
    options = _shared(draw) | _sinks(draw, q)
    if isinstance(q, torch.Tensor) and q.ndim == 4 and q.numel() < 2**22:
        if draw.chance(0.4):
            options["o"] = _spoilt(draw, "o", draw.tensor(q.shape, q.dtype))
            if draw.chance(0.1):
                options["o"] = draw.say("o is an input", draw.one(q, k, v))
        if draw.chance(0.3):
            shape = (q.shape[0], q.shape[2], q.shape[1])
            options["lse"] = _spoilt(draw, "lse", draw.tensor(shape, torch.float32))
    return flash_attention.forward, (cfg, q, k, v), options


def _flash_attn(draw: Draw) -> Any:
    options = {
        "dropout_p": draw.usual_or("dropout_p", 0.0, NUMBERS, 0.05),
        **_shared(draw),
        "causal": draw.usual_or("causal", draw.chance(0.3), FLAGS, 0.05),
        "alibi_slopes": draw.usual_or("alibi_slopes", None, (torch.ones(2), 1.0), 0.05),
        "deterministic": draw.usual_or("deterministic", draw.chance(0.5), FLAGS, 0.05),
        "return_attn_probs": draw.usual_or("return_attn_probs", draw.chance(0.3), FLAGS, 0.05),
    }
    q, k, v = _tensors(draw)
    if draw.chance(0.4):
        return flash_attn.flash_attn_func, (q, k, v), options
    if draw.chance(0.3):
        packed = _spoilt(
            draw, "qkv", draw.tensor((1, 64, draw.one(2, 3, 3, 3), 2, 128), torch.float16)
        )
        return flash_attn.flash_attn_qkvpacked_func, (packed,), options
    q, k, v = (x[0] if isinstance(x, torch.Tensor) and x.ndim and len(x) else x for x in (q, k, v))
    return flash_attn.flash_attn_varlen_func, (q, k, v, *_lengths(draw, q, k)), options


def _flash_attn_3(draw: Draw) -> Any:
    options = {
        **_shared(draw),
        "causal": draw.usual_or("causal", draw.chance(0.3), FLAGS, 0.05),
        "attention_chunk": draw.usual_or("attention_chunk", 0, NUMBERS, 0.05),
        "num_splits": draw.usual_or("num_splits", draw.one(0, 1), NUMBERS, 0.05),
        "pack_gqa": draw.usual_or("pack_gqa", draw.one(None, True, False), FLAGS[:2], 0.05),
        "deterministic": draw.usual_or("deterministic", draw.chance(0.3), FLAGS, 0.05),
        "qv": draw.usual_or("qv", None, (torch.ones(2), 1.0), 0.05),
        "return_attn_probs": draw.usual_or("return_attn_probs", draw.chance(0.3), FLAGS, 0.05),
    }
    return flash_attn_3.flash_attn_func, tuple(_tensors(draw)), options


def _tensors(draw: Draw) -> list[Any]:
    """Draw q, k and v: tensors that fit, but for what is said."""
    batch, heads = draw.one(1, 1, 1, 2), draw.one(1, 1, 2)
    len_q = draw.one(64, 128, 128, 1, 5, 100)
    len_k = len_q if draw.chance(0.7) else draw.one(64, 128, 1, 77)
    kv_heads = heads if draw.chance(0.7) else draw.usual_or("kv_heads", 1, (0, 3, 5))
    d_head = draw.usual_or("d_head", 128, (64, 96, 256, 0, 1, 127, 129, 512), 0.2)
    if draw.chance(0.1):
        batch = draw.say("batch", 0)
    if draw.chance(0.1):
        len_q = draw.say("len_q", 0)
    if draw.chance(0.1):
        len_k = draw.say("len_k", 0)
    dtype = draw.usual_or("dtype", draw.one(torch.bfloat16, torch.bfloat16, torch.float16), DTYPES)
    q = draw.tensor((batch, len_q, heads, d_head), dtype)
    k, v = (draw.tensor((batch, len_k, kv_heads, d_head), dtype) for _ in range(2))
    if draw.chance(0.1):
        q, k, v = (draw.say("heads first", x.transpose(1, 2).contiguous()) for x in (q, k, v))
    found: list[Any] = [q, k, v]
    if draw.chance(0.35):
        which = draw.random.randrange(3)
        found[which] = _spoilt(draw, "qkv"[which], found[which])
    return found


def _spoilt(draw: Draw, name: str, x: torch.Tensor) -> Any:
    """Return a tensor, or what may stand in its place by mistake."""
    shape = list(x.shape)
    changes: list[Callable[[], Any]] = [
        lambda: x,
        lambda: draw.one(*NO_TENSORS),
        lambda: x.to(draw.one(*DTYPES)),
        lambda: x.to("meta"),
        lambda: x.to_sparse(),
        lambda: x.mT if x.ndim > 1 else x,
        lambda: x.flatten(),
        lambda: x[None],
        lambda: x.sum(),
        lambda: x.unbind(0)[0] if shape and shape[0] else x,
        lambda: torch.cat((x, x), -1)[..., ::2],
        lambda: torch.cat((x, x), -1)[..., : shape[-1]],
        lambda: torch.cat((x, x[..., :4]), -1)[..., : shape[-1]],
        lambda: _shifted(x),
        lambda: x[:1].expand(x.shape) if shape and shape[0] else x,
        lambda: x.narrow(draw.random.randrange(x.ndim), 0, 1) if x.numel() else x,
        lambda: torch.cat((x, x), draw.random.randrange(x.ndim)),
        lambda: torch.nn.Parameter(x) if x.is_floating_point() else x,
        lambda: x.new_empty(1).expand(*shape[:1], 2**33, *shape[2:]),
        lambda: torch._neg_view(x) if x.is_floating_point() else x,
        lambda: x.conj(),
    ]
    return draw.say(f"{name} spoilt", draw.one(*changes)())


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values, 2 bytes or one element behind an aligned address."""
    memory = torch.cat((x.flatten()[:1], x.flatten())) if x.numel() else x.new_ones(1)
    return memory[1:].view(x.shape)


def _lengths(draw: Draw, q: Any, k: Any) -> tuple[Any, ...]:
    """Draw cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k."""
    batch = draw.one(1, 2, 3)
    begins = []
    for x in (q, k):
        total = x.shape[0] if isinstance(x, torch.Tensor) and x.ndim and x.shape[0] < 2**20 else 4
        inner = sorted(draw.random.randint(0, total) for _ in range(batch - 1))
        begins.append(torch.tensor([0, *inner, total], dtype=torch.int32).to(draw.device))
    if draw.chance(0.4):
        which = draw.random.randrange(2)
        x = begins[which]
        changes: list[Callable[[], Any]] = [
            lambda: x.flip(0),
            lambda: x + 1,
            lambda: x - 1,
            lambda: x.long(),
            lambda: x.float(),
            lambda: x.tolist(),
            lambda: x[:-1],
            lambda: x[:0],
            lambda: x[None],
            lambda: x.to("meta"),
            lambda: x.repeat_interleave(2)[::2],
            lambda: torch.cat((x, x[-1:])),
            lambda: x * 2**20,
        ]
        begins[which] = draw.say("cu_seqlens", draw.one(*changes)())
    longest = (10**6, 10**6)
    others = (0, -1, 2**40, 1.5, None, True, "3", torch.tensor(128))
    return *begins, *(draw.usual_or("max_seqlen", most, others, 0.1) for most in longest)


def faults(seeds: Iterable[int], device: str = "cpu", has_values: bool = False) -> list[str]:
    """Make the calls of seeds; return those that are neither right nor refused in words."""
    found = []
    for seed in seeds:
        call = drawn(seed, device, has_values)
        try:
            call.check(call(), has_values)
        except (TypeError, ValueError, RuntimeError) as error:
            is_plain = type(error) in (TypeError, ValueError, RuntimeError)
            if not (is_plain and WAY_OUT.search(str(error))) and not NO_MEMORY.search(str(error)):
                found.append(f"{call.text}: {type(error).__name__}: {error}")
        except Exception as error:
            found.append(f"{call.text}: {type(error).__name__}: {error}")
    return found
