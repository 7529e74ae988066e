"""What every call has to satisfy before a pointer reaches a kernel.

Tensors are (batch, seq, heads, d_head). Each function returns nothing or raises; none of them
needs a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from flash_helpers.kernel_configs import AttentionForward, Config, DType
from flash_helpers.registry.family import Family
from flash_helpers.registry.problem import ELEMENT_BYTES, Strides

_DIMENSIONS = ("batch", "seq", "heads", "d_head")
_OVERLAP_WORK = 100_000  # steps after which two interleaved tensors count as overlapping


class Layout(NamedTuple):
    """All of a tensor that a launch depends on but where it begins; strides in elements.

    It has what the checks below ask of a tensor, under the same names.
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
        """Of all dimensions, in elements."""
        return self.strides


Laid = torch.Tensor | Layout


def check_types(tensors: Mapping[str, object]) -> None:
    """Raises TypeError for what is no dense tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: pass a torch.Tensor")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} has layout {tensor.layout}: pass a dense tensor")


def check_shapes(config: Config, tensors: Mapping[str, Laid]) -> AttentionForward:
    """dtype, device and shape of q, k, v and, if given, o; the problem that they pose.

    Works on tensors without memory too. Raises TypeError for a dtype, ValueError for the rest.
    """
    for name, tensor in tensors.items():
        _check_dtype(config, name, tensor)
    problem = posed_problem(tensors)
    if reason := config.refusal(problem):
        raise ValueError(reason)
    return problem


def posed_problem(tensors: Mapping[str, Laid]) -> AttentionForward:
    """What tensors of one element type ask for, whether a kernel takes it or not.

    Raises TypeError for a dtype that no kernel takes, ValueError for devices and shapes that do not
    fit together or are empty.
    """
    first, *others = tensors
    for name in others:
        if tensors[name].device != tensors[first].device:
            raise ValueError(
                f"{name} is on {tensors[name].device} and {first} on {tensors[first].device}: "
                "move them to one device"
            )
    for name, tensor in tensors.items():
        if tensor.ndim != len(_DIMENSIONS):
            raise ValueError(
                f"{name} has {tensor.ndim} dimensions, shape {tuple(tensor.shape)}: pass "
                f"({', '.join(_DIMENSIONS)})"
            )
    shape = tuple(tensors[first].shape)
    for name in others:
        if tensors[name].shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensors[name].shape)} and {first} {shape}: all must be "
                "equal (queries and keys of one length, one K and V head for each Q head)"
                f"{_repeated_heads(name, tensors[name].shape, shape)}"
            )
    for dimension, size in zip(_DIMENSIONS, shape, strict=True):
        if size == 0:
            raise ValueError(
                f"{first} has {dimension} 0, shape {shape}: attention over nothing has no value, "
                "every size must be at least 1"
            )
    batch, seq_len, heads, d_head = shape
    return AttentionForward(batch, heads, seq_len, d_head, _element_type(first, tensors[first]))


def _repeated_heads(name: str, shape: torch.Size, wanted: tuple[int, ...]) -> str:
    """The way out for a K or V of grouped heads."""
    if shape[2] and wanted[2] % shape[2] == 0 and shape[2] != wanted[2]:
        times = wanted[2] // shape[2]
        return f"; for grouped heads pass {name}.repeat_interleave({times}, dim=2)"
    return ""


def _element_type(name: str, tensor: Laid) -> DType:
    for dtype in DType:
        if tensor.dtype == getattr(torch, dtype.torch_name):
            return dtype
    known = " or ".join(f"torch.{dtype.torch_name}" for dtype in DType)
    raise TypeError(f"{name} is {tensor.dtype} and the kernels take {known}: convert it with .to()")


def _check_dtype(config: Config, name: str, tensor: Laid) -> None:
    wanted = getattr(torch, config.dtype.torch_name)
    if tensor.dtype != wanted:
        raise TypeError(
            f"{name} is {tensor.dtype} and {config.short_form()} takes {wanted}: convert it with "
            f".to({wanted}), or choose a config of its own dtype if it is fp16 or bf16"
        )


def check_strides(config: Config, tensors: Mapping[str, Laid]) -> dict[str, Strides]:
    """Copies of whole chunks must be possible. Raises ValueError."""
    chunk = config.supports.chunk_bytes
    found = {}
    for name, tensor in tensors.items():
        if tensor.stride()[-1] != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride()[-1]} in its last dimension and must have 1: "
                "call .contiguous()"
            )
        found[name] = strides = kernel_strides(tensor)
        supports = config.supports
        for dimension, stride, most in (
            ("batch", strides.batch, supports.max_stride),
            ("seq", strides.row, supports.max_row_stride),
            ("heads", strides.head, supports.max_stride),
        ):
            if stride * ELEMENT_BYTES % chunk:
                raise ValueError(
                    f"{name} has {dimension} stride {stride}, not a multiple of "
                    f"{chunk // ELEMENT_BYTES} elements ({chunk} bytes): call .contiguous()"
                )
            if stride > most:
                raise ValueError(
                    f"{name} has {dimension} stride {stride}, over the limit of {most} elements: "
                    "call .contiguous()"
                )
    return found


def check_alignment(chunk_bytes: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Tensors begin at multiples of what is copied at once. Raises ValueError."""
    for name, tensor in tensors.items():
        if tensor.data_ptr() % chunk_bytes:
            raise ValueError(
                f"{name} starts at address {tensor.data_ptr():#x}, not a multiple of "
                f"{chunk_bytes} bytes: call .clone()"
            )


def kernel_strides(tensor: Laid) -> Strides:
    """Strides of batch, seq and heads in elements; 0 where a size of 1 makes them meaningless."""
    return Strides(
        *(
            stride if size > 1 else 0
            for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
        )
    )


def check_output_layout(o: Laid) -> None:
    """No two elements of o share memory. Raises ValueError."""
    covered = 0
    for stride, size in sorted(zip(o.stride(), o.shape, strict=True)):
        if size == 1:
            continue
        if stride <= covered:
            raise ValueError(
                f"o has strides {o.stride()} for shape {tuple(o.shape)}, so that elements share "
                "memory or are interleaved: pass a tensor made by torch.empty_like(q)"
            )
        covered += stride * (size - 1)


def check_output(inputs: Mapping[str, torch.Tensor], o: torch.Tensor) -> None:
    """o can be written while the inputs are read. Raises ValueError."""
    if o.requires_grad:
        raise ValueError("o requires grad and is overwritten: pass o.detach(), or leave o out")
    check_output_layout(o)
    for name, tensor in inputs.items():
        if np.may_share_memory(_addresses(o), _addresses(tensor), max_work=_OVERLAP_WORK):
            raise ValueError(
                f"o overlaps {name} in memory, which is read while o is written: pass another "
                "tensor, or leave o out"
            )


def span_bytes(tensor: Laid) -> int:
    """From a tensor's first byte to the one behind its last, whatever lies between."""
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


def check_device(family: Family, device: torch.device) -> None:
    """Raises RuntimeError for a device that neither runs the kernels nor simulates them."""
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise RuntimeError(
            f"the kernels run on CUDA devices, and in the simulator on the CPU, and the tensors "
            f"are on {device}: move them to one of these"
        )
    check_capability(
        family, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    )


def check_capability(family: Family, name: str, capability: tuple[int, int]) -> None:
    """Raises RuntimeError for a GPU that lacks the instructions that the kernels are made of."""
    if reason := family.refusal_on(name, capability):
        raise RuntimeError(reason)


def device_index(device: torch.device | str | int | None) -> int:
    """The number of a CUDA device; None is the current one.

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
