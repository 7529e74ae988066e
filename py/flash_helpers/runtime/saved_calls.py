"""Calls in files: what a kernel was given, and what it computed.

The outputs are in a file of their own, since a call that ends the process leaves none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flash_helpers.console.files import replaced_file
from flash_helpers.kernel_configs import Config, Problem, config_from_short_form
from flash_helpers.runtime.tensors import span_bytes

SIMULATOR = "the simulator"

_FORMAT = 1
_ALIGNMENT = 512  # bytes, as of memory that PyTorch allocates on a CUDA device


class SavedCallError(ValueError):
    """A file is no saved call that this version reads."""


@dataclass(frozen=True)
class SavedCall:
    """A call from a file. `device`: the one that it ran on, from `device_text`. `inputs`: tensors
    by name, on the CPU. `layouts`: shape, strides and dtype of each output. `outputs`: outputs as
    they were after the call, by name; None if the call did not end."""

    config: Config
    problem: Problem
    device: str
    inputs: Mapping[str, torch.Tensor]
    layouts: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    outputs: Mapping[str, torch.Tensor] | None

    def device_here(self) -> str:
        """Return the CPU or the current CUDA device, whichever the call ran on. Raises ValueError
        if there is no CUDA device here."""
        if self.device == SIMULATOR:
            return "cpu"
        if not torch.cuda.is_available():
            raise ValueError(
                f"the call ran on {self.device} and torch finds no CUDA device here: pass "
                "--simulate to run its kernel in the simulator"
            )
        return "cuda"

    def tensors(self, device: torch.device | str) -> list[torch.Tensor | None]:
        """Return the tensors that a call takes, in the order of `Problem.axes`, on a device: inputs
        as they were, and memory for the outputs. An optional tensor that the call did without is
        None."""
        found: dict[str, torch.Tensor] = {
            name: torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for name, (shape, strides, dtype) in self.layouts.items()
        }
        found |= copies(self.inputs, device)
        return self.problem.arranged(found)


def device_text(device: torch.device) -> str:
    """Return what runs kernels on tensors of a device: SIMULATOR or the GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else SIMULATOR


def copies(
    tensors: Mapping[str, torch.Tensor], device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Return copies of tensors on a device, with the strides of the originals.

    Tensors of one storage share one again. It begins where the first of them did, or up to 511
    bytes before: at a multiple of 512 bytes in the original's storage, so that tensors are aligned
    as they were. Of memory behind and before nothing is copied.
    """
    storages: dict[int, list[str]] = {}
    for name, x in tensors.items():
        storages.setdefault(x.untyped_storage().data_ptr(), []).append(name)
    found = {}
    for names in storages.values():
        begins = {n: tensors[n].storage_offset() * tensors[n].element_size() for n in names}
        first = min(begins.values()) // _ALIGNMENT * _ALIGNMENT
        size = max(begin + span_bytes(tensors[n]) for n, begin in begins.items()) - first
        x = tensors[names[0]]
        memory = torch.empty(0, dtype=torch.uint8, device=x.device)
        memory.set_(x.untyped_storage(), first, (size,), (1,))
        copy = memory.to(device, copy=True).untyped_storage()
        for name in names:
            x = tensors[name]
            offset = (begins[name] - first) // x.element_size()
            empty = torch.empty(0, dtype=x.dtype, device=copy.device)
            found[name] = empty.set_(copy, offset, x.shape, x.stride())
    return {name: found[name] for name in tensors}


def save_call(
    path: Path,
    config: Config,
    problem: Problem,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
) -> None:
    """Write a call, whole or not at all; of its outputs only the layout. Raises OSError, and
    RuntimeError where a tensor cannot be copied."""
    _save(
        path,
        {
            "config": config.short_form(),
            "problem": problem.record(),
            "device": device_text(next(iter(inputs.values())).device),
            "inputs": copies(inputs, "cpu"),
            "outputs": {n: (tuple(x.shape), x.stride(), x.dtype) for n, x in outputs.items()},
        },
    )


def save_outputs(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the outputs of a saved call beside it. Raises as `save_call` does.

    `path`: the call's file."""
    _save(_outputs_path(path), {"outputs": copies(tensors, "cpu")})


def remove(path: Path) -> None:
    """Remove the files of a saved call. Raises OSError."""
    for each in (path, _outputs_path(path)):
        each.unlink(missing_ok=True)


def load_call(path: Path) -> SavedCall:
    """Return a call from its file. Raises OSError, and SavedCallError for a file of another kind or
    version."""
    record = _load(path, "saved call", ("config", "problem", "device", "inputs", "outputs"))
    config = config_from_short_form(record["config"])
    outputs = None
    if _outputs_path(path).is_file():
        outputs = _load(_outputs_path(path), "outputs of a saved call", ("outputs",))["outputs"]
    return SavedCall(
        config,
        config.family.operation.problem.from_record(record["problem"]),
        record["device"],
        record["inputs"],
        record["outputs"],
        outputs,
    )


def _outputs_path(path: Path) -> Path:
    return path.with_suffix(f".outputs{path.suffix}")


def _save(path: Path, record: Mapping[str, Any]) -> None:
    with replaced_file(path) as file:
        torch.save({"format": _FORMAT, **record}, file)


def _load(path: Path, kind: str, fields: Sequence[str]) -> dict[str, Any]:
    try:
        record = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # torch.load documents none of its errors; a file of another kind has any
        record = None
    if not isinstance(record, dict) or not record.keys() >= {"format", *fields}:
        raise SavedCallError(
            f"{path} holds no {kind}: pass a call_*.pt that FLASH_ATTENTION_LOGLEVEL=10 wrote"
        )
    if record["format"] != _FORMAT:
        raise SavedCallError(
            f"{path} has format {record['format']} and this version reads {_FORMAT}: replay it "
            "with the version that wrote it"
        )
    return record
