"""What every call has to satisfy before a pointer reaches a kernel.

q, k, v and o are (batch, seq, heads, d_head); lse, if it is there, is (batch, heads, seq of q).
Each function returns nothing or raises; none of them needs a GPU.
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
_LSE_DIMENSIONS = ("batch", "heads", "seq")
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


def check_shapes(
    config: Config, tensors: Mapping[str, Laid], softmax_scale: float | None = None
) -> AttentionForward:
    """dtype, device and shape of q, k, v and, if given, o and lse; the problem that they pose.

    Works on tensors without memory too. Raises TypeError for a dtype, ValueError for the rest.
    """
    for name, tensor in tensors.items():
        if name != "lse":
            _check_dtype(config, name, tensor)
    problem = posed_problem(tensors, config.supports.causal, softmax_scale)
    if reason := config.refusal(problem):
        raise ValueError(reason)
    return problem


def posed_problem(
    tensors: Mapping[str, Laid], causal: bool = False, softmax_scale: float | None = None
) -> AttentionForward:
    """What tensors, q and k at least, ask for, whether a kernel takes it or not; with lse, that it
    is written.

    Raises TypeError for a dtype that no kernel takes, and for an lse that is not float32;
    ValueError for devices and shapes that do not fit together or are empty, and for what
    `AttentionForward` refuses.
    """
    q = tensors["q"]
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise ValueError(
                f"{name} is on {tensor.device} and q on {q.device}: move them to one device"
            )
        dimensions = _LSE_DIMENSIONS if name == "lse" else _DIMENSIONS
        if tensor.ndim != len(dimensions):
            raise ValueError(
                f"{name} has {tensor.ndim} dimensions, shape {tuple(tensor.shape)}: pass "
                f"({', '.join(dimensions)})"
            )
    for name in ("q", "k"):
        shape = tuple(tensors[name].shape)
        for dimension, size in zip(_DIMENSIONS, shape, strict=True):
            if size == 0:
                raise ValueError(
                    f"{name} has {dimension} 0, shape {shape}: attention over nothing has no "
                    "value, every size must be at least 1"
                )
    batch, len_q, heads, d_head = q.shape
    _, len_k, kv_heads, _ = tensors["k"].shape
    shapes = {
        "k": ("q", "batch and d_head", (batch, len_k, kv_heads, d_head)),
        "v": ("k", "all sizes", (batch, len_k, kv_heads, d_head)),
        "o": ("q", "all sizes", (batch, len_q, heads, d_head)),
        "lse": ("q", "batch, heads and seq", (batch, heads, len_q)),
    }
    for name, (other, what, wanted) in shapes.items():
        if name in tensors and tuple(tensors[name].shape) != wanted:
            raise ValueError(
                f"{name} has shape {tuple(tensors[name].shape)} and {other} "
                f"{tuple(tensors[other].shape)}: {what} must be equal, {name} {wanted}"
            )
    if (lse := tensors.get("lse")) is not None:
        _check_lse(lse)
    return AttentionForward(
        batch,
        heads,
        len_q,
        d_head,
        _element_type("q", q),
        len_k=len_k,
        kv_heads=kv_heads,
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=lse is not None,
    )


def _check_lse(lse: Laid) -> None:
    if lse.dtype != torch.float32:
        raise TypeError(f"lse is {lse.dtype} and must be torch.float32: pass another tensor")
    _, heads, length = lse.shape
    usual = (heads * length, length, 1)
    sizes = zip(lse.shape, lse.stride(), usual, strict=True)
    if any(size > 1 and stride != wanted for size, stride, wanted in sizes):
        raise ValueError(
            f"lse has strides {tuple(lse.stride())} for shape {tuple(lse.shape)} and must be "
            "contiguous: pass another tensor"
        )


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
    """Of q, k, v and o: copies of whole chunks must be possible. Raises ValueError."""
    chunk = config.supports.chunk_bytes
    found = {}
    for name, tensor in tensors.items():
        if name == "lse":
            continue
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


def check_output(others: Mapping[str, torch.Tensor], o: torch.Tensor, own: str = "o") -> None:
    """An output, whose name is `own`, can be written while the others are read or written. Raises
    ValueError."""
    if o.requires_grad:
        raise ValueError(
            f"{own} requires grad and is overwritten: pass {own}.detach(), or leave {own} out"
        )
    check_output_layout(o)
    for name, tensor in others.items():
        if np.may_share_memory(_addresses(o), _addresses(tensor), max_work=_OVERLAP_WORK):
            raise ValueError(
                f"{own} overlaps {name} in memory, which is used while {own} is written: pass "
                f"another tensor, or leave {own} out"
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
