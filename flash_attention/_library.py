"""The C ABI of libflash_attention.so, bound with ctypes.

The structures mirror src/include/flash_attention.cuh and src/flash_attention.cu, field by field.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType

import torch

from flash_helpers.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    differing_fields,
    nearest_config,
)

LIBRARY_PATH = Path(__file__).resolve().parent / "libflash_attention.so"

_C_TYPES = {"int": ctypes.c_int, "DType": ctypes.c_int, "bool": ctypes.c_bool}


class Config(ctypes.Structure):
    """FlashForwardKernelConfig."""

    _fields_ = tuple((f.name, _C_TYPES[str(f.type)]) for f in fields(FlashForwardKernelConfig))


class TensorStrides(ctypes.Structure):
    """Strides in elements."""

    _fields_ = (("batch", ctypes.c_int64), ("row", ctypes.c_int64), ("head", ctypes.c_int64))


class ForwardKernelArgs(ctypes.Structure):
    """What a kernel is launched with: device pointers, strides, and the sequence length."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in "QKVO"),
        *((f"{name}_strides", TensorStrides) for name in "QKVO"),
        ("seq_len", ctypes.c_int),
    )


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes on one device.

    registers and local_bytes (spills and stack): per thread. static_smem_bytes and
    dynamic_smem_bytes: shared memory per block. max_threads: per block, with these registers.
    resident_blocks_per_sm: blocks that one multiprocessor runs at a time.
    """

    registers: int
    static_smem_bytes: int
    dynamic_smem_bytes: int
    local_bytes: int
    max_threads: int
    resident_blocks_per_sm: int


class _Resources(ctypes.Structure):
    _fields_ = tuple((field.name, ctypes.c_int) for field in fields(KernelResources))


@functools.cache
def load(path: Path = LIBRARY_PATH) -> ctypes.CDLL:
    """The library with its signatures declared. Raises RuntimeError if it is not there."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(
            f"the kernel library cannot be loaded ({error}): build it with `pip install . ./py` in "
            "the repository"
        ) from error
    config, args, resources = map(ctypes.POINTER, (Config, ForwardKernelArgs, _Resources))
    integer = ctypes.c_int
    signatures = {
        "flash_kernel_count": (integer, []),
        "flash_kernel_describe": (integer, [integer, config]),
        "flash_forward": (
            integer,
            [config, args, integer, integer, integer, ctypes.c_void_p],
        ),
        "flash_kernel_resources": (integer, [config, integer, resources]),
        "flash_cuda_version": (integer, []),
        "flash_architectures": (ctypes.c_char_p, []),
        "flash_last_error": (ctypes.c_char_p, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what}: {load().flash_last_error().decode()}")


def to_c(config: FlashForwardKernelConfig) -> Config:
    """The config as the library takes it."""
    return Config(**{field.name: getattr(config, field.name) for field in fields(config)})


def _from_c(config: Config) -> FlashForwardKernelConfig:
    values = {name: getattr(config, name) for name, _ in Config._fields_}
    return FlashForwardKernelConfig(**{**values, "dtype": DType(values["dtype"])})


@functools.cache
def _built() -> Mapping[FlashForwardKernelConfig, Config]:
    library = load()
    built = {}
    for index in range(library.flash_kernel_count()):
        config = Config()
        _check(library.flash_kernel_describe(index, config), f"kernel {index}")
        built[_from_c(config)] = config
    return MappingProxyType(built)


def kernels() -> list[FlashForwardKernelConfig]:
    """The configs that the library was built with, sorted.

    Raises RuntimeError if the library is not there.
    """
    return list(_built())


@functools.lru_cache(maxsize=1024)
def resolve(cfg: FlashForwardKernelConfig | str) -> FlashForwardKernelConfig:
    """The built config that `cfg`, a config or a short form, names.

    Raises TypeError for another type; ValueError for a text that is no short form, for an
    impossible config, and for one that was not built.
    """
    if isinstance(cfg, str):
        config = FlashForwardKernelConfig.from_short_form(cfg)
    elif isinstance(cfg, FlashForwardKernelConfig):
        config = cfg
    else:
        raise TypeError(
            f"cfg is a {type(cfg).__name__}: pass a FlashForwardKernelConfig or its short form"
        )
    if config not in _built():
        nearest = nearest_config(config, _built())
        asked, found = config.to_dict(), nearest.to_dict()
        differences = ", ".join(
            f"{name} {found[name]} instead of {asked[name]}"
            for name in differing_fields(config, nearest)
        )
        raise ValueError(
            f"{config.short_form()} was not built; the nearest that was is {nearest.short_form()} "
            f"({differences}). To build it, list it in a JSON file, run "
            "tools/build/generate_kernel_instantiations.py --configs FILE, then pip install ."
        )
    return config


def launch(
    config: FlashForwardKernelConfig,
    args: ForwardKernelArgs,
    batch: int,
    n_heads: int,
    device: int,
    stream: int,
) -> None:
    """Launch a built kernel on a stream handle of a device. Raises RuntimeError with CUDA's text.

    Nothing is checked here: the pointers must be valid.
    """
    status = load().flash_forward(_built()[config], args, batch, n_heads, device, stream)
    _check(status, config.short_form())


def resources(
    cfg: FlashForwardKernelConfig | str, device: torch.device | str | int | None = None
) -> KernelResources:
    """What a built kernel takes on a CUDA device (default: the current one).

    Raises ValueError for a config that was not built or a device that is no CUDA device, and
    RuntimeError with CUDA's text.
    """
    config = resolve(cfg)
    found = _Resources()
    status = load().flash_kernel_resources(_built()[config], _device_index(device), found)
    _check(status, config.short_form())
    return KernelResources(**{name: getattr(found, name) for name, _ in _Resources._fields_})


def _device_index(device: torch.device | str | int | None) -> int:
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


def cuda_version() -> tuple[int, int]:
    """The CUDA release that the library was built with, e.g. (13, 0)."""
    version = load().flash_cuda_version()
    return version // 1000, version % 1000 // 10


def architectures() -> list[str]:
    """What the library holds code for, e.g. ["sm_80", "sm_90", "compute_80"]."""
    return load().flash_architectures().decode().split()
