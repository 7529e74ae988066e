"""best_config(): the fastest config that a sweep found for a GPU, among those that were built.

The files are those of configs/best_*.json in the repository when the library was built.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from flash_attention import _library
from flash_helpers.kernel_configs import (
    VERSIONS,
    DType,
    FlashForwardKernelConfig,
    get_kernel_progression_configs,
)
from flash_helpers.tune.winners import BestConfigs, load_best

CONFIG_FOLDER = _library.LIBRARY_PATH.parent / "configs"


def best_config(
    version: int,
    dtype: torch.dtype | DType | str,
    device: torch.device | str | int | None = None,
) -> FlashForwardKernelConfig:
    """The fastest built config of a version and dtype on a device, as far as sweeps have found out.

    version: 1 to 16. dtype: such as torch.bfloat16 or "bf16". device: the current CUDA device by
        default.

    It is the first of these that is known and was built:
      1. the winner of a sweep on a GPU of this name;
      2. the winner on another GPU of the same compute capability, the first by its name;
      3. the version's config in the progression, as for versions that have nothing to tune and on
         the CPU, where kernels are simulated.
    A winner on this very GPU that was not built is announced by a RuntimeWarning.

    Raises ValueError for a version or dtype that does not exist, and if not even the version's
    config in the progression was built; RuntimeError if the library is not there.
    """
    if version not in VERSIONS:
        raise ValueError(
            f"version {version!r} does not exist: choose one of {min(VERSIONS)} to {max(VERSIONS)}"
        )
    element = _element_type(dtype)
    built = set(_library.kernels())
    for config in _winners(version, element, device):
        if config in built:
            return config
    fixed = next(
        config
        for config in get_kernel_progression_configs()
        if (config.version, config.dtype) == (version, element)
    )
    return _library.resolve(fixed)


def _element_type(dtype: torch.dtype | DType | str) -> DType:
    return dtype if isinstance(dtype, DType) else DType.from_name(str(dtype).removeprefix("torch."))


def _winners(
    version: int, dtype: DType, device: torch.device | str | int | None
) -> list[FlashForwardKernelConfig]:
    gpu = _gpu(device)
    if gpu is None:
        return []
    name, capability = gpu
    files = _files(CONFIG_FOLDER)
    own = _find([file for file in files if file.gpu == name], version, dtype)
    if own and own[0] not in _library.kernels():
        warnings.warn(
            f"the fastest config of v{version} in {dtype.short} on {name}, {own[0].short_form()}, "
            "was not built: run tools/build/generate_kernel_instantiations.py --configs with this "
            "GPU's file in configs/, then pip install .",
            RuntimeWarning,
            stacklevel=3,
        )
    near = [f for f in files if f.gpu != name and f.compute_capability == capability]
    return [*own, *_find(near, version, dtype)]


def _find(
    files: Sequence[BestConfigs], version: int, dtype: DType
) -> list[FlashForwardKernelConfig]:
    found = []
    for file in files:
        # a ValueError: the registry has no such config any more, so that none can be built
        with contextlib.suppress(ValueError):
            config = file.find(version, dtype.short)
            found += [config] if config is not None else []
    return found


def _gpu(device: torch.device | str | int | None) -> tuple[str, str] | None:
    """Name and compute capability of a CUDA device; None if it is none."""
    wanted = torch.device("cuda", device) if isinstance(device, int) else device
    if wanted is not None and torch.device(wanted).type != "cuda":
        return None
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(wanted)
    return properties.name, f"{properties.major}.{properties.minor}"


@functools.cache
def _files(folder: Path) -> tuple[BestConfigs, ...]:
    return tuple(load_best(path) for path in sorted(folder.glob("best_*.json")))
