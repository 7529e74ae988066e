"""The checks that every call must pass before a pointer reaches a kernel.

Tensors are named by their problem (`Problem.axes`). Each function returns or raises; none of them
needs a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from flash_helpers.gpu import FIRST_WITH_CLUSTERS, Device, largest_device
from flash_helpers.registry.config import Config
from flash_helpers.registry.family import Family
from flash_helpers.registry.problem import Constant, Element, Problem, Role, Tensor
from flash_helpers.runtime import driver

Own = TypeVar("Own", bound=Problem)

_OVERLAP_WORK = 100_000  # steps after which two interleaved tensors count as overlapping


class Layout(NamedTuple):
    """The facts of a tensor that a launch depends on, except for its address; strides in elements.

    It has the attributes that the checks below read from a tensor, under the same names.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        """Return the strides of all dimensions, in elements."""
        return self.strides


Laid = torch.Tensor | Layout


def torch_dtype(element: Element) -> torch.dtype:
    """Return the torch dtype of an element type."""
    return getattr(torch, element.torch_name)


def element_of(name: str, tensor: Laid, known: Collection[Element] = tuple(Element)) -> Element:
    """Return the element type of a tensor. Raises TypeError if it is none of the known ones."""
    for element in known:
        if tensor.dtype == torch_dtype(element):
            return element
    accepted = " or ".join(str(torch_dtype(element)) for element in known)
    raise TypeError(
        f"{name} is {tensor.dtype} and the kernels take {accepted}: convert it with .to()"
    )


def check_types(tensors: Mapping[str, object]) -> None:
    """Raises TypeError for an object that is no dense tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: pass a torch.Tensor")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} has layout {tensor.layout}: pass a dense tensor")


def posed_problem(
    kind: type[Own], dtype: Element, tensors: Mapping[str, Laid], *, taker: str = "", **options: Any
) -> Own:
    """Return the problem of an operation that tensors pose, whether a kernel takes it or not.

    `tensors`: tensors by name, in the order of `kind.axes`; they need no memory. An optional tensor
    that is given is used, or computed. `dtype`: dtype of the problem. `taker`: name of the function
    or kernel that takes the tensors, for messages. `options`: fields that no tensor tells.

    Raises TypeError for a tensor of another element type than the problem has; ValueError for
    devices and shapes that do not fit together or are empty, and for all that the problem refuses.
    """
    shapes = _shapes(kind, tensors)
    try:
        problem = kind.posed(shapes, dtype, **options)
    except KeyError as error:
        (name,) = error.args
        if name not in kind.axes:
            raise
        raise ValueError(f"{name} is missing: {kind.operation} takes it, pass it") from error
    _check_given(problem.tensors, tensors, kind.operation, taker)
    return problem


def constant_call(
    kind: type[Problem], config: Config | None, tensors: Mapping[str, Laid], **options: Any
) -> Constant | None:
    """Return the call on tensors if its outputs are known without a kernel (`Problem.constant`);
    None for all others. `config`: the config that is asked for, if one is. Raises the errors of
    `posed_problem`."""
    if all(map(all, (tensor.shape for tensor in tensors.values()))):
        return None
    first = next(iter(tensors))
    dtype = config.dtype if config else element_of(first, tensors[first], kind.elements)
    found = kind.constant(_shapes(kind, tensors), dtype, **options)
    if found is not None:
        taker = config.short_form() if config else ""
        _check_given(found.tensors, tensors, kind.operation, taker)
    return found


def _shapes(kind: type[Problem], tensors: Mapping[str, Laid]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors. Raises ValueError for several devices, and for numbers of
    dimensions that are not those of the problem."""
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        if tensor.device != tensors[first].device:
            raise ValueError(
                f"{name} is on {tensor.device} and {first} on {tensors[first].device}: move them "
                "to one device"
            )
        axes = kind.axes[name]
        if tensor.ndim != len(axes):
            raise ValueError(
                f"{name} has {tensor.ndim} dimensions, shape {tuple(tensor.shape)}: pass "
                f"({', '.join(axes)})"
            )
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _check_given(
    wanted: Iterable[Tensor], tensors: Mapping[str, Laid], operation: str, taker: str
) -> None:
    """Raises ValueError for an input that is missing, TypeError for a tensor of another element
    type than a call takes. `taker`: as for `posed_problem`."""
    elements = {}
    for each in wanted:
        elements[each.name] = torch_dtype(each.element)
        if each.role is Role.IN and each.name not in tensors:
            raise ValueError(f"{each.name} is missing: {operation} takes it, pass it")
    for name, tensor in tensors.items():
        if tensor.dtype != elements[name]:
            raise TypeError(
                f"{name} is {tensor.dtype} and {taker or operation} takes {elements[name]}: "
                f"convert it with .to({elements[name]})"
                + (", or choose a config of its own dtype" if taker else "")
            )


def problem_for(config: Config, tensors: Mapping[str, Laid], **options: Any) -> Problem:
    """Return the problem that tensors pose to a config, whether it takes the problem or not.

    Options that are not given are those that the config fixes, such as a mask. Raises as
    `posed_problem` does, and TypeError for a dtype that is not the config's.
    """
    return posed_problem(
        config.family.operation.problem,
        config.dtype,
        tensors,
        taker=config.short_form(),
        **{**config.supports.options, **options},
    )


def check_problem(config: Config, tensors: Mapping[str, Laid], **options: Any) -> Problem:
    """Return `problem_for`. Raises ValueError, too, for a problem that the config refuses."""
    problem = problem_for(config, tensors, **options)
    if reason := config.refusal(problem):
        raise ValueError(reason)
    return problem


def check_strides(
    config: Config, problem: Problem, tensors: Mapping[str, Laid]
) -> dict[str, tuple[int, ...]]:
    """Return the strides of the tensors. Raises ValueError for strides that the config does not
    take."""
    found = {}
    for name, tensor in tensors.items():
        found[name] = strides = kernel_strides(tensor)
        if reason := config.supports.layout_refusal(problem.tensor(name), strides):
            raise ValueError(reason)
    return found


def check_alignment(alignments: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError unless every tensor begins at a multiple of its own alignment in bytes."""
    for name, tensor in tensors.items():
        if tensor.data_ptr() % alignments[name]:
            raise ValueError(
                f"{name} starts at address {tensor.data_ptr():#x}, not a multiple of "
                f"{alignments[name]} bytes: call .clone()"
            )


def kernel_strides(tensor: Laid) -> tuple[int, ...]:
    """Return the strides in elements; 0 where a size of 1 makes them meaningless."""
    return tuple(
        stride if size > 1 else 0
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def check_output_layout(name: str, tensor: Laid) -> None:
    """Raises ValueError if two elements of an output share memory."""
    covered = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride <= covered:
            raise ValueError(
                f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}, so that "
                "elements share memory or are interleaved: pass a contiguous tensor"
            )
        covered += stride * (size - 1)


def check_output(others: Mapping[str, torch.Tensor], own: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless an output, whose name is `own`, can be written while the others are
    read or written."""
    if tensor.requires_grad:
        raise ValueError(
            f"{own} requires grad and is overwritten: pass {own}.detach(), or leave {own} out"
        )
    check_output_layout(own, tensor)
    for name, other in others.items():
        one, two = _addresses(tensor), _addresses(other)
        # numpy takes any number, unlike what its stubs say
        if np.may_share_memory(one, two, max_work=_OVERLAP_WORK):  # type: ignore[arg-type]
            raise ValueError(
                f"{own} overlaps {name} in memory, which is used while {own} is written: pass "
                f"another tensor, or leave {own} out"
            )


def span_bytes(tensor: Laid) -> int:
    """Return the bytes from a tensor's first byte to the one behind its last, gaps included."""
    if not all(tensor.shape):
        return 0
    elements = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in elements)) * tensor.dtype.itemsize


class _Span:
    """The addresses of a tensor's elements in the form that numpy reads."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "typestr": f"|V{tensor.element_size()}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
        }


def _addresses(tensor: torch.Tensor) -> np.ndarray:
    # Only the addresses are ever looked at: the memory may be a GPU's.
    return np.asarray(_Span(tensor))


def with_strides(tensor: Tensor, strides: tuple[int, ...], fill: float) -> torch.Tensor:
    """Return a CPU tensor in memory of its own with these strides (0 along a dimension of size 1).
    All elements and the gaps between them are `fill`."""
    pairs = zip(tensor.shape, strides, strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in pairs)
    memory = torch.full((length,), fill, dtype=torch_dtype(tensor.element))
    return memory.as_strided(tensor.shape, strides)


@functools.cache
def gpu_device(index: int) -> Device:
    """Return the facts of a CUDA device that launches need. Raises RuntimeError if it is absent."""
    if index >= (count := torch.cuda.device_count()):
        raise RuntimeError(f"there is no CUDA device {index}: torch finds {count or 'none'}")
    properties = torch.cuda.get_device_properties(index)
    capability = properties.major, properties.minor
    counted = _counted_clusters(index, capability)
    return Device(properties.name, capability, properties.multi_processor_count, counted)


def _counted_clusters(index: int, capability: tuple[int, int]) -> tuple[tuple[int, int, int], ...]:
    """Return what the driver says of clusters (`Device.counted`); nothing of a GPU without."""
    major, minor = capability
    if major < FIRST_WITH_CLUSTERS:
        return ()
    with torch.cuda.device(index):
        torch.empty(1, device="cuda")  # makes a context
        return driver.counted_clusters(10 * major + minor)


def device_for(family: Family[Any], device: torch.device) -> Device:
    """Return the GPU that a call of the family's kernels is made for. For CPU tensors, whose
    kernels are simulated, it is the largest GPU of the family's first target.

    Raises RuntimeError for a device that neither runs the kernels nor simulates them.
    """
    if device.type == "cpu":
        return largest_device(family.capabilities[0])
    if device.type == "meta":
        raise RuntimeError(
            "the tensors are on meta, where they have shapes and no data: make them on a CUDA "
            "device or the CPU; to ask for shapes alone, call under "
            "torch._subclasses.FakeTensorMode, or use torch.compile"
        )
    if device.type != "cuda":
        raise RuntimeError(
            f"the kernels run on CUDA devices, and in the simulator on the CPU, and the tensors "
            f"are on {device}: move them to one of these"
        )
    found = gpu_device(torch.cuda.current_device() if device.index is None else device.index)
    check_capability(family, found.name, found.capability)
    return found


def check_capability(family: Family[Any], name: str, capability: tuple[int, int]) -> None:
    """Raises RuntimeError for a GPU that lacks the instructions of the kernels."""
    if reason := family.refusal_on(name, capability):
        raise RuntimeError(reason)


def device_index(device: torch.device | str | int | None) -> int:
    """Return the number of a CUDA device; None is the current one.

    Raises ValueError for another device, RuntimeError where there is none.
    """
    if isinstance(device, int):
        return device
    wanted = torch.device("cuda" if device is None else device)
    if wanted.type != "cuda":
        raise ValueError(f"device {wanted} is not a CUDA device: pass one, such as 'cuda:0'")
    if wanted.index is not None:
        return wanted.index
    if not torch.cuda.is_available():
        raise RuntimeError("the kernels need a CUDA device and torch finds none")
    return torch.cuda.current_device()


def named(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
    """Return the tensors that are there, by name."""
    return {name: tensor for name, tensor in tensors if tensor is not None}
