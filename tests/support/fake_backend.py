"""A backend that computes attention on the CPU, and the breakages that tests give it."""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flash_helpers.kernel_configs import (
    AttentionForward,
    Config,
    FlashForwardKernelConfig,
    get_listed_configs,
)
from flash_helpers.runtime.backend import Backend, Findings

ROOT = Path(__file__).resolve().parents[2]


def load_tool(path: str) -> ModuleType:
    """The command line at `path`, relative to the repository's root, as a module."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_tool(
    capsys: pytest.CaptureFixture[str], tool: str | ModuleType, *arguments: object
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command line, which is loaded if its path is given."""
    main = load_tool(tool).main if isinstance(tool, str) else tool.main
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def float32_kernel(
    config: FlashForwardKernelConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
) -> torch.Tensor:
    """Attention as a kernel rounds it: P and O in the tensors' dtype, all else in float32."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    Q, K, V = (x.transpose(1, 2).float() for x in (q, k, v))
    S = Q @ K.mT / math.sqrt(q.shape[-1])
    if config.supports.causal:
        S = S.masked_fill(torch.ones_like(S).triu(1).bool(), -math.inf)
    P = torch.exp(S - S.amax(-1, keepdim=True))
    PV = P.to(q.dtype).float() @ V
    return o.copy_((PV / P.sum(-1, keepdim=True)).transpose(1, 2))


ARRIVAL = """{
.reg .b32 %thread;
.reg .pred %one;
mov.u32 %thread, %tid.x;
setp.lt.u32 %one, %thread, 32;
@%one bar.arrive 9, 128;
}"""
"""PTX that is legal and suspicious: warp 0 arrives at a barrier, and nobody waits there."""

Damage = Callable[[FlashForwardKernelConfig, torch.Tensor], None]


def fake_backend(damage: Damage = lambda config, o: None) -> Backend:
    """All kernels of the registry, computed by `float32_kernel` and then damaged in place."""

    def execute(
        config: Config, tensors: Sequence[torch.Tensor], options: Mapping[str, Any]
    ) -> Findings:
        operation = config.family.operation
        by_axes = zip(operation.problem.axes, tensors, strict=False)
        given = {name: x for name, x in by_axes if x is not None}
        problem = operation.problem.posed(
            {name: tuple(x.shape) for name, x in given.items()},
            config.dtype,
            **{**options, **config.supports.options},
        )
        outputs = [x.name for x in problem.outputs]
        if operation.problem is AttentionForward:
            float32_kernel(config, *tensors[:4])
        else:
            named = {x.name: given[x.name] for x in problem.inputs}
            expected = operation.part("reference").reference(problem, named).expected
            for name in outputs:
                given[name].copy_(expected[name])
        damage(config, given[outputs[0]])
        return Findings()

    return Backend(torch.device("cpu"), "a fake device", execute, tuple(get_listed_configs()))
