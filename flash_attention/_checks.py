"""What every call has to satisfy before a pointer reaches a kernel.

Tensors are (batch, seq, heads, d_head). Each function returns nothing or raises; none of them
needs a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from flash_helpers.kernel_configs import CHUNK_BYTES, ELEMENT_BYTES, FlashForwardKernelConfig

MAX_HEADS = 65535  # the grid's y: CUDA C++ Programming Guide, "Technical Specifications"
MAX_SEQ_LEN = 2**31 - 1  # seq_len is an int
MAX_ROW_STRIDE = (2**31 - 1) // 128  # 32 warps step through 128 rows in 32-bit arithmetic
LOWEST_CAPABILITY = (8, 0)

_CHUNK_ELEMENTS = CHUNK_BYTES // ELEMENT_BYTES
_DIMENSIONS = ("batch", "seq", "heads", "d_head")
_OVERLAP_WORK = 100_000  # steps after which two interleaved tensors count as overlapping


def check_types(tensors: Mapping[str, object]) -> None:
    """Raises TypeError for what is no dense tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: pass a torch.Tensor")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} has layout {tensor.layout}: pass a dense tensor")


def check_shapes(config: FlashForwardKernelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """dtype, device and shape of q, k, v and, if given, o.

    Works on tensors without memory too. Raises TypeError for a dtype, ValueError for the rest.
    """
    for name, tensor in tensors.items():
        _check_dtype(config, name, tensor)
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
    for name in others:
        if tensors[name].shape != tensors[first].shape:
            raise ValueError(
                f"{name} has shape {tuple(tensors[name].shape)} and {first} "
                f"{tuple(tensors[first].shape)}: all must be equal (queries and keys of one "
                "length, one K and V head for each Q head)"
            )
    _check_sizes(config, first, tensors[first])


def _check_dtype(config: FlashForwardKernelConfig, name: str, tensor: torch.Tensor) -> None:
    wanted = getattr(torch, config.dtype.torch_name)
    if tensor.dtype != wanted:
        raise TypeError(
            f"{name} is {tensor.dtype} and {config.short_form()} takes {wanted}: convert it with "
            f".to({wanted}), or choose a config of its own dtype if it is fp16 or bf16"
        )


def _check_sizes(config: FlashForwardKernelConfig, name: str, tensor: torch.Tensor) -> None:
    _, seq_len, n_heads, d_head = tensor.shape
    for dimension, size in zip(_DIMENSIONS, tensor.shape, strict=True):
        if size == 0:
            raise ValueError(
                f"{name} has {dimension} 0, shape {tuple(tensor.shape)}: attention over nothing "
                "has no value, every size must be at least 1"
            )
    if d_head != config.d_head:
        raise ValueError(
            f"{name} has d_head {d_head} and the kernels are built for {config.d_head}: pad the "
            f"last dimension with zeros to {config.d_head} if it is smaller (and scale q, since "
            f"the kernels divide by sqrt({config.d_head}))"
        )
    for limit_name, block in (("B_r", config.B_r), ("B_c", config.B_c)):
        if seq_len % block:
            raise ValueError(
                f"seq_len {seq_len} is not a multiple of {limit_name} {block} "
                f"({config.short_form()}): cut it to a multiple, or choose a config whose "
                f"{limit_name} divides it"
            )
    if seq_len > MAX_SEQ_LEN:
        raise ValueError(f"seq_len {seq_len} is over the limit {MAX_SEQ_LEN}: split the problem")
    if n_heads > MAX_HEADS:
        raise ValueError(
            f"heads {n_heads} is over the limit {MAX_HEADS} of a CUDA grid: split the call by heads"
        )


def check_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Strides and alignment: 16-byte copies must be possible. Raises ValueError."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(-1)} in its last dimension and must have 1: "
                "call .contiguous()"
            )
        for dimension, stride in zip(_DIMENSIONS, kernel_strides(tensor), strict=False):
            if stride % _CHUNK_ELEMENTS:
                raise ValueError(
                    f"{name} has {dimension} stride {stride}, not a multiple of {_CHUNK_ELEMENTS} "
                    f"elements ({CHUNK_BYTES} bytes): call .contiguous()"
                )
        if kernel_strides(tensor)[1] > MAX_ROW_STRIDE:
            raise ValueError(
                f"{name} has seq stride {kernel_strides(tensor)[1]}, over the limit of "
                f"{MAX_ROW_STRIDE} elements: call .contiguous()"
            )
        if tensor.data_ptr() % CHUNK_BYTES:
            raise ValueError(
                f"{name} starts at address {tensor.data_ptr():#x}, not a multiple of "
                f"{CHUNK_BYTES} bytes: call .clone()"
            )


def kernel_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Strides of batch, seq and heads in elements; 0 where a size of 1 makes them meaningless."""
    batch, row, head = (
        stride if size > 1 else 0
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )
    return batch, row, head


def check_output(inputs: Mapping[str, torch.Tensor], o: torch.Tensor) -> None:
    """o can be written while the inputs are read. Raises ValueError."""
    if o.requires_grad:
        raise ValueError("o requires grad and is overwritten: pass o.detach(), or leave o out")
    if _may_overlap_itself(o):
        raise ValueError(
            f"o has strides {o.stride()} for shape {tuple(o.shape)}, so that elements share "
            "memory or are interleaved: pass a tensor made by torch.empty_like(q)"
        )
    for name, tensor in inputs.items():
        if np.may_share_memory(_addresses(o), _addresses(tensor), max_work=_OVERLAP_WORK):
            raise ValueError(
                f"o overlaps {name} in memory, which is read while o is written: pass another "
                "tensor, or leave o out"
            )


def _may_overlap_itself(tensor: torch.Tensor) -> bool:
    covered = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride <= covered:
            return True
        covered += stride * (size - 1)
    return False


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


def check_device(device: torch.device) -> None:
    """Raises RuntimeError for a device that neither runs the kernels nor simulates them."""
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise RuntimeError(
            f"the kernels run on CUDA devices, and in the simulator on the CPU, and the tensors "
            f"are on {device}: move them to one of these"
        )
    check_capability(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """Raises RuntimeError for a GPU that lacks the instructions that the kernels are made of."""
    if capability < LOWEST_CAPABILITY:
        raise RuntimeError(
            f"{name} has compute capability {capability[0]}.{capability[1]} and the kernels need "
            f"{LOWEST_CAPABILITY[0]}.{LOWEST_CAPABILITY[1]} (Ampere) or higher: use another GPU"
        )
