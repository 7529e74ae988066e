"""A module's forward for programs without Python."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def export_bundle(
    module: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    folder: str | Path,
    *,
    arch: str = "90a",
    sms: int | None = None,
) -> Path:
    """Write a module's forward as a bundle, which a program runs by the CUDA driver alone
    (examples/bundle), without Python, PyTorch or a compiler. No GPU is needed. Return the path of
    its description, bundle.txt.

    Every operator that computes must be one of this package that has a kernel for the problem:
    modules of flash_attention.multimodal, or functions of flash_attention. Views of tensors cost
    nothing, and what depends on weights alone is computed now. The module itself stays as it is: a
    copy on the CPU, in eval mode and with backend "kernels", is recorded.

    example_inputs: arguments of forward, in order or by name. Tensors are the bundle's inputs, of
        fixed shapes; all else is part of the bundle.
    folder: made if it does not exist. Files of the same names are replaced, each at once.
    arch: of the machine code, such as "90a", "90" or "80".
    sms: streaming multiprocessors of the GPU, the least that runs the bundle. By default those of
        this machine's GPU, if it has the architecture, or of the largest that has.

    Raises ValueError for an operator that computes and has no kernel, with its name and that of the
    module; for outputs that no kernel writes as a whole; and for an architecture that a kernel is
    not for. Raises TypeError for arguments and results that are no tensors, BuildError for a kernel
    that does not compile, and OSError that names the path.
    """
    # late, since a program that exports nothing needs neither
    from flash_attention.multimodal._attend import BACKENDS
    from flash_helpers.export.bundled_module import write_bundle

    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is a {type(module).__name__}: pass a torch.nn.Module")
    recorded = copy.deepcopy(module).cpu().eval()
    for part in recorded.modules():
        if vars(part).get("backend") in BACKENDS:
            vars(part)["backend"] = "kernels"
    target = f"sm_{arch.removeprefix('sm_')}"
    return write_bundle(recorded, example_inputs, target, Path(folder), sms)
