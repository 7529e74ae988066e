"""The calls of kernels that a module's forward makes, recorded on the CPU without computing any."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash_helpers.kernel_configs import Config
from flash_helpers.registry.problem import Problem
from flash_helpers.runtime import simulator
from flash_helpers.runtime.call import calls_logged
from flash_helpers.runtime.tensors import problem_for

NAMESPACE = "flash_attention"
# Operators that read nothing of their input but its shape, dtype and device.
_OF_SHAPES = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
_WAY_OUT = (
    "use a module of flash_attention.multimodal or a function of flash_attention that has a kernel "
    "for it, or compute it before the bundle's inputs or behind its outputs"
)


@dataclass(frozen=True)
class RecordedCall:
    """A call of an operation. `problem`: what its tensors pose. `tensors`: inputs and outputs, by
    name. `options`: of the problem, by name. `wanted`: outputs that are computed, None for all.
    `where`: the module that makes the call, such as blocks.0.attention."""

    problem: Problem
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any]
    wanted: frozenset[str] | None
    where: str

    @property
    def read(self) -> list[Tensor]:
        """Tensors that the kernels read."""
        return [self.tensors[tensor.name] for tensor in self.problem.inputs]

    @property
    def written(self) -> list[Tensor]:
        """Tensors that the kernels write."""
        return [self.tensors[tensor.name] for tensor in self.problem.outputs]


@dataclass(frozen=True)
class Recording:
    """The calls of a forward, in order, and the tensors that it takes and returns, by name. Values
    of those that depend on the inputs are undefined; all others are constants."""

    calls: Sequence[RecordedCall]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


def storage_of(x: Tensor) -> int:
    """Return the address of a tensor's storage, by which tensors that share it are known."""
    return x.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    """Sees every operator of a forward.

    `fixed`: storages of the module, and of constants that a call reads. `inputs`: those of the
    inputs. `live`: those with values that depend on the inputs, which are theirs and the outputs of
    calls.
    """

    def __init__(self, fixed: set[int], inputs: set[int]) -> None:
        super().__init__()
        self._fixed, self._inputs, self._live = fixed, inputs, set(inputs)
        self._kept: list[Any] = []  # so that no storage's address is used twice
        self.calls: list[RecordedCall] = []
        self.modules: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == NAMESPACE:
            # Its code is seen by this mode too, since it may copy a tensor before the kernel
            with self:
                cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
                return func.redispatch(cpu, *args, **kwargs)
        name, given = func._schema.name, _tensors((args, kwargs))
        is_live = any(storage_of(x) in self._live for x in given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse(name, "draws random numbers, and each run of a bundle is the same")
        if func._schema.is_mutable and (is_live or self._writes_fixed(func, args, kwargs)):
            self._refuse(name, "writes into a tensor, and no kernel does that here")
        found = func(*args, **kwargs)
        if is_live and name not in _OF_SHAPES and not self._is_view(found, given):
            self._refuse(name, "computes, and no kernel of this package does that here")
        self._kept.append(found)
        return found

    def _writes_fixed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        arguments = func._schema.arguments
        given = {**dict(zip((x.name for x in arguments), args, strict=False)), **kwargs}
        written = [given.get(argument.name) for argument in arguments if argument.is_write]
        return any(storage_of(x) in self._fixed for x in _tensors(written))

    @staticmethod
    def _is_view(found: Any, given: Sequence[Tensor]) -> bool:
        """Whether a result is views of what was given, which hold the same numbers."""
        own = {storage_of(x) for x in given}
        leaves = tree_leaves(found)
        return bool(leaves) and all(
            isinstance(x, Tensor)
            and (storage_of(x) in own or not x.numel())
            and not x.is_neg()
            and not x.is_conj()
            for x in leaves
        )

    def record(
        self,
        config: Config,
        tensors: Mapping[str, Tensor],
        *,
        keep_going: bool = False,
        device: object = None,
        wanted: frozenset[str] | None = None,
        **options: Any,
    ) -> None:
        """Record a call, in place of `simulator.run_shipped`, whose arguments these are."""
        kind = config.family.operation.problem
        ordered = {name: tensors[name] for name in kind.axes if name in tensors}
        problem = problem_for(config, ordered, **options)
        call = RecordedCall(problem, ordered, options, wanted, self.where)
        written = {storage_of(x) for x in call.written}
        name = f"{NAMESPACE}::{kind.operation}"
        if written & (self._fixed | self._inputs):
            self._refuse(name, "writes into an input or a weight, which stay as they are")
        if any(_bytes_in(call.written, x) < x.untyped_storage().nbytes() for x in call.written):
            self._refuse(name, "writes a part of a tensor, whose rest a bundle does not know")
        self._live |= written
        self._fixed |= {storage_of(x) for x in call.read} - self._live
        self._kept.append(ordered)
        self.calls.append(call)

    @property
    def where(self) -> str:
        """The module whose forward runs; "" for the exported one itself."""
        return self.modules[-1] if self.modules else ""

    def _refuse(self, name: str, reason: str) -> None:
        where = f"module {self.where}" if self.where else "the module itself"
        raise ValueError(f"{name} in {where} {reason}: {_WAY_OUT}")


def _bytes_in(tensors: Sequence[Tensor], storage: Tensor) -> int:
    """Return the bytes of the tensors that share the storage of one, which do not overlap."""
    own = storage_of(storage)
    return sum(x.numel() * x.element_size() for x in tensors if storage_of(x) == own)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


@contextmanager
def _named_modules(module: nn.Module, names: list[str]) -> Iterator[None]:
    """Keep the names of the modules whose forward runs, the innermost last. Hooks of the modules
    themselves would be part of what they compute."""
    known = {id(part): name for name, part in module.named_modules()}

    def before(part: nn.Module, _: Any) -> None:
        names.append(known.get(id(part), type(part).__name__))

    def behind(*_: Any) -> None:
        names.pop()

    handles = [
        register_module_forward_pre_hook(before),
        register_module_forward_hook(behind, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copied(name: str, value: Any) -> Tensor:
    """Return an input of its own memory on the CPU, contiguous."""
    if value.layout != torch.strided or not value.numel():
        raise ValueError(
            f"input {name} has shape {tuple(value.shape)} and layout {value.layout}: pass a dense "
            "tensor with elements"
        )
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def _outputs(found: Any) -> dict[str, Tensor]:
    """Return what a forward returns, by name."""
    if isinstance(found, Tensor):
        return {"output": found}
    if isinstance(found, Mapping):
        pairs = [(str(name), x) for name, x in found.items()]
    elif isinstance(found, (tuple, list)):
        pairs = [(f"output{n}", x) for n, x in enumerate(found)]
    else:
        pairs = [("output", found)]
    for name, x in pairs:
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: a bundle returns tensors")
        if not name.isidentifier():
            raise ValueError(f"output {name!r} is no name: use letters, digits and _")
    return {name: x for name, x in pairs if x is not None}


def recorded(module: nn.Module, given: Sequence[Any] | Mapping[str, Any]) -> Recording:
    """Return the calls of a module's forward. The module is on the CPU; nothing else may use it, or
    the simulator, meanwhile.

    given: arguments of forward, in order or by name. Tensors are inputs; all else is part of the
    recording.

    Raises ValueError for an operator that computes and has no kernel, TypeError for arguments and
    results that are no tensors.
    """
    if isinstance(given, Tensor):
        raise TypeError("the inputs are one tensor: pass a list of it, [x]")
    by_name = isinstance(given, Mapping)
    bound = inspect.signature(module.forward).bind(
        *(() if by_name else given), **(dict(given) if isinstance(given, Mapping) else {})
    )
    arguments = bound.arguments
    if nested := [n for n, x in arguments.items() if not isinstance(x, Tensor) and _tensors(x)]:
        raise TypeError(f"{nested[0]} has tensors inside: give each as an argument of forward")
    inputs = {n: _copied(n, x) for n, x in arguments.items() if isinstance(x, Tensor)}
    arguments.update(inputs)
    weights = [*module.parameters(), *module.buffers()]
    recorder = _Recorder(set(map(storage_of, weights)), set(map(storage_of, inputs.values())))
    with (
        torch.no_grad(),
        calls_logged(None),  # a log reads tensors, which hold nothing yet
        patch.object(simulator, "run_shipped", recorder.record),
        _named_modules(module, recorder.modules),
        recorder,
    ):
        found = module(*bound.args, **bound.kwargs)
    return Recording(recorder.calls, inputs, _outputs(found))
