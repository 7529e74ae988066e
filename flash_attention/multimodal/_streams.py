"""Operators on a sequence and its context, each computed by one kernel of the registry: what the
modules' fused operations have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attention._operators import below_autograd, compile_while_tracing, define
from flash_attention.multimodal._recomputed import Recomputed
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.registry.problem import Problem
from flash_helpers.runtime.call import compute
from flash_helpers.runtime.tensors import Laid, element_of, posed_problem
from flash_helpers.tune.best import choose_config, newest_that_takes

MOST_KEPT = 1024  # answers for different sizes
# Batch, length and context that stand for all others while torch.compile traces a call.
TRACED = (1, 256, 64)


def chosen(problem: Problem, device: torch.device) -> Config:
    """Return the config that computes a problem. On a CPU, which simulates it, this is the newest
    one, measured or not, of an operation whose steps all wait for a measurement.

    Raises ValueError or RuntimeError if there is none.
    """
    try:
        return choose_config(problem, device)
    except RuntimeError:
        config = newest_that_takes(problem) if device.type == "cpu" else None
        if config is None:
            raise
        return config


def has_kernel(
    device: torch.device, dtype: torch.dtype, make: Callable[[Element], Problem]
) -> bool:
    """Whether a kernel computes a problem of a dtype on a device."""
    try:
        chosen(make(Element.from_name(str(dtype).removeprefix("torch."))), device)
    except (RuntimeError, ValueError):
        return False
    return True


def sizes_asked(batch: int, length: int, context: int) -> tuple[int, int, int]:
    """Return the sizes for which a call asks for a kernel: while torch.compile traces it, those
    that stand for all others."""
    if torch.compiler.is_compiling():
        return TRACED[0], TRACED[1], TRACED[2] if context else 0
    return batch, length, context


def wants_gradients(tensors: Iterable[Tensor]) -> bool:
    """Whether autograd will ask for gradients of one of the tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


@dataclass(frozen=True)
class StreamsOperator:
    """An operator that returns an output of a sequence and one of its context, and maybe others,
    from tensors that an operation's problem names.

    inputs: the operator's tensors, in its order, of which the first is the first of the problem.
    options: options of the problem, behind them. outputs: those of the sequence and of the context.
    new: makes an output from the inputs and the stream's prefix, "" or "context_"; None for a
    context without one. none: makes the result in place of that, from the sequence's output. given:
    makes an input into what a kernel takes. formula: returns the outputs from the inputs and the
    options by operators with gradients, which the operator's are computed by; None if it has none.
    others: further outputs, which are returned behind the two. other: makes one of these from the
    inputs and its name; None where a call has none.
    """

    problem: type[Problem]
    inputs: tuple[str, ...]
    options: tuple[str, ...]
    outputs: tuple[str, str]
    new: Callable[[Mapping[str, Tensor], str], Tensor | None]
    none: Callable[[Tensor], Tensor]
    given: Callable[[Tensor], Tensor] = lambda x: x
    formula: Callable[..., tuple[Tensor, ...]] | None = None
    others: tuple[str, ...] = ()
    other: Callable[[Mapping[str, Tensor], str], Tensor | None] = lambda tensors, name: None

    def define(self) -> Callable[..., Any]:
        """Define the operator, which has the operation's name, and return it."""
        needed = self.inputs[: next(n for n, x in enumerate(self.inputs) if self._may_miss(x))]
        tensors = (f"Tensor{'' if name in needed else '?'} {name}" for name in self.inputs)
        options = (f"{self._kind(name)} {name}" for name in self.options)
        returned = ", ".join(["Tensor"] * (len(self.outputs) + len(self.others)))
        schema = f"{self.problem.operation}({', '.join((*tensors, *options))}) -> ({returned})"
        gradient = self._differentiable if self.formula else None
        return define(schema, self._computed, self._fake, gradient)

    def _may_miss(self, name: str) -> bool:
        return name in self.problem.optional

    def _kind(self, option: str) -> str:
        kinds = {"int": "int", "float": "float", "bool": "bool"}
        return kinds[str(self.problem.__dataclass_fields__[option].type)]

    def _asked(self, args: tuple[Any, ...]) -> tuple[dict[str, Tensor], tuple[None, Any]]:
        """Return the tensors of a call by name, with the context's output and other ones, and what
        is asked of `compute`."""
        number = len(self.inputs)
        pairs = zip(self.inputs, args[:number], strict=True)
        found = {name: x for name, x in pairs if x is not None}
        context = self.new(found, "context_")
        if context is not None:
            found[self.outputs[1]] = context
        further = {name: self.other(found, name) for name in self.others}
        found |= {name: x for name, x in further.items() if x is not None}
        return found, (None, tuple(zip(self.options, args[number:], strict=True)))

    def _choose(self, asked: tuple[Any, Any], tensors: Mapping[str, Laid]) -> Config:
        first = self.inputs[0]
        element = element_of(first, tensors[first], self.problem.elements)
        problem = posed_problem(self.problem, element, tensors, **dict(asked[1]))
        return chosen(problem, tensors[first].device)

    def _all(self, found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        own, *rest = (*self.outputs, *self.others)
        y = found[own]
        return y, *(found[name] if name in found else self.none(y) for name in rest)

    def _computed(self, *args: Any) -> tuple[Tensor, ...]:
        tensors, asked = self._asked(args)
        own = self.outputs[0]
        names = tuple(name for name in self.problem.axes if name in tensors or name == own)
        given = [None if name == own else self.given(tensors[name]) for name in names]
        found = compute(self.problem, asked, names, given, self._choose)
        return self._all(dict(zip(names, found, strict=True)))

    def _differentiable(self, keys: torch._C.DispatchKeySet, *args: Any) -> tuple[Tensor, ...]:
        formula, number = self.formula, len(self.inputs)
        assert formula is not None
        found: tuple[Tensor, ...] = Recomputed.apply(
            below_autograd(self.problem.operation, keys, args),
            lambda *inputs: formula(*inputs, *args[number:]),
            *args[:number],
        )
        return found

    def _fake(self, *args: Any) -> tuple[Tensor, ...]:
        tensors, asked = self._asked(args)
        first = tensors[self.inputs[0]]
        compile_while_tracing(self._choose(asked, tensors), first.device)
        y = self.new(tensors, "")
        assert y is not None
        return self._all({**tensors, self.outputs[0]: y})
