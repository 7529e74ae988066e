"""The problem of attention's backward pass. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from flash_helpers.operations.attention_forward.problem import AttentionForward
from flash_helpers.registry.problem import Constant, Element, Role, Tensor, option

_AXES = AttentionForward.axes["q"]
_GIVEN = ("do", "q", "k", "v", "o")
GRADIENTS: Mapping[str, str] = MappingProxyType({"dq": "q", "dk": "k", "dv": "v"})
# Heads of a call from C: 64 bits count the bytes of a buffer with 8 for each query.
MAX_EXPORTED_HEADS = 8192
_BEGINS = ("cu_seqlens_q", "cu_seqlens_k")


@dataclass(frozen=True, order=True)
class AttentionBackward(AttentionForward):
    """The gradients of Q, K and V, given that of O, of a problem of the forward pass.

    Sizes, masks, softcap and sequences are those of `AttentionForward`. Inputs are dO, Q, K, V, O
    and the LSE, the last two as the forward pass returns them. With S the logits, hidden ones left
    out, and dO and O row by row:

        P = exp(S - LSE)                 delta = sum over d of dO O
        dV = P^T dO                      dP = dO V^T
        dS = P (dP - delta)              times 1 - (S / softcap)^2 with a softcap
        dQ = softmax_scale dS K          dK = softmax_scale dS^T Q

    dK and dV are summed over the heads of Q that share a head of K and V. A query that sees no key
    has an LSE of -infinity and adds 0 to every gradient; a key that no query sees has gradients
    of 0.

    `deterministic`: every call gives the same bits for the same inputs. Without it the last bits of
    dQ may differ from call to call; those of dK and dV never do.

    Sinks, and a d_v other than d_head, have no kernel and are refused. Raises ValueError for them,
    and as `AttentionForward` does.
    """

    operation: ClassVar[str] = "attention_backward"
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            **dict.fromkeys(_GIVEN, _AXES),
            "lse": AttentionForward.axes["lse"],
            **dict.fromkeys(GRADIENTS, _AXES),
            **{name: AttentionForward.axes[name] for name in _BEGINS},
        }
    )
    optional: ClassVar[frozenset[str]] = frozenset(_BEGINS)

    heads: int = option("heads of Q", most=MAX_EXPORTED_HEADS)
    # Fields of the forward pass that no command line sets here.
    _: KW_ONLY
    sinks: bool = False
    d_v: int = None  # type: ignore[assignment] # `__post_init__` sets it
    return_lse: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks:
            raise ValueError(
                "sinks: attention_backward computes no gradient of them: multiply o by "
                "torch.sigmoid(lse - sinks) in the forward pass, which PyTorch differentiates"
            )
        if self.d_v != self.d_head:
            raise ValueError(
                f"d_v {self.d_v} with d_head {self.d_head}: attention_backward takes equal head "
                "sizes: pad the smaller with zeros"
            )
        if self.return_lse:
            raise ValueError("return_lse: the LSE is an input of attention_backward: leave it out")

    @classmethod
    def posed(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Element,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        window_left: int | None = None,
        window_right: int | None = None,
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> AttentionBackward:
        """Return the problem of do, q, k, v, o and lse, and of dq, dk and dv where they are
        given."""
        forward = AttentionForward.posed(
            cls._of_forward(shapes),
            dtype,
            causal=causal,
            softmax_scale=softmax_scale,
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
        )
        return cls.of(forward, deterministic=deterministic)

    @classmethod
    def of(cls, forward: AttentionForward, *, deterministic: bool = False) -> AttentionBackward:
        """Return the problem of the gradients of a forward pass, whose LSE may be an output."""
        return cls(**{**vars(forward), "return_lse": False}, deterministic=deterministic)

    @classmethod
    def _of_forward(cls, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the forward pass's tensors. Raises ValueError for a gradient that
        has another shape than its tensor."""
        for name, of in {"do": "o", **GRADIENTS}.items():
            if shapes.get(name, shapes[of]) != shapes[of]:
                raise ValueError(
                    f"{name} has shape {shapes[name]} and {of} {shapes[of]}: a gradient has the "
                    "shape of its tensor"
                )
        return {name: shapes[name] for name in AttentionForward.axes if name in shapes}

    @classmethod
    def constant(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: Element,
        *,
        deterministic: bool = False,
        **options: Any,
    ) -> Constant | None:
        """Return gradients of 0 without a kernel, if there is no batch, head, query or key."""
        if not {"do", "q", "k", "v", "o", "lse"} <= shapes.keys():
            return None
        forward = AttentionForward.constant(cls._of_forward(shapes), dtype, **options)
        if forward is None:
            return None
        own = {tensor.name: tensor for tensor in forward.tensors}
        given = {"do": own["o"], **{name: own[name] for name in ("q", "k", "v", "o", "lse")}}
        tensors = [replace(x, name=name, role=Role.IN) for name, x in given.items()]
        tensors += [replace(own[of], name=name, role=Role.OUT) for name, of in GRADIENTS.items()]
        tensors += [own[name] for name in _BEGINS]
        return Constant(tuple(tensors), dict.fromkeys(GRADIENTS, 0.0))

    def _variations(self) -> list[str]:
        """Return what `AttentionForward._variations` does, and determinism."""
        return super()._variations() + ["deterministic"] * self.deterministic

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """do, q, k, v, o, lse, the outputs dq, dk and dv, and where sequences begin."""
        own = {tensor.name: tensor for tensor in super().tensors}
        given = {"do": own["o"], **{name: own[name] for name in ("q", "k", "v", "o", "lse")}}
        return (
            *(replace(x, name=name, role=Role.IN) for name, x in given.items()),
            *(replace(own[of], name=name, role=Role.OUT) for name, of in GRADIENTS.items()),
            *(own[name] for name in _BEGINS),
        )

    @property
    def operations(self) -> int:
        """Floating-point operations of the five products S, dP, dV, dQ and dK, of which the forward
        pass has two of the same size."""
        return super().operations * 5 // 2
