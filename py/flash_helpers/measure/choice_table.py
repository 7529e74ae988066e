"""Tables of what calls take that name no kernel: the steps that `attention()` takes, and the speed
of what is taken on an operation's grid of problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flash_helpers.console.tables import Table, number
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import FAMILIES, OPERATIONS, AttentionForward, Config, Element
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.registry.operation import Operation
from flash_helpers.registry.selection import names_of
from flash_helpers.tune.choices import Choices, MeasuredProblem

REFUSED = "refused"

Choose = Callable[[Any, Device | None], Config]  # of a problem

_PLACES: Mapping[str, Device | None] = MappingProxyType(
    {
        "Hopper": largest_device(90),
        "other GPUs, from compute capability 8.0": largest_device(80),
        "CPU tensors": None,
    }
)
_OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "no mask": {},
        "causal": {"causal": True},
        "window": {"window_left": 100, "window_right": 100},
        "softcap": {"softcap": 50.0},
        "sinks": {"sinks": True},
        "variable lengths": {"sequences": 8},
    }
)


def choice_table(choose: Choose) -> str:
    """Markdown of the steps that `choose` takes, in bf16 for 16 heads of 4096 queries and keys: a
    row for each head size that a kernel is built for."""
    rows = []
    for d_head, d_v in sorted(_head_sizes()):
        size = f"{d_head}" if d_head == d_v else f"{d_head}, V {d_v}"
        rows.append([size, *(_taken(choose, d_head, d_v, gpu) for gpu in _PLACES.values())])
    return Table(["d_head", *_PLACES], rows, "rlll").markdown()


def _head_sizes() -> set[tuple[int, int]]:
    families = [family for family in FAMILIES.values() if family.operation is OPERATION]
    declared = [
        variant.supports
        for family in families
        for step in family.steps.values()
        for variant in family.fixed_config(step, Element.BF16).variants()
    ]
    return {(d_head, s.d_v or d_head) for s in declared for d_head in s.d_heads}


def _taken(choose: Choose, d_head: int, d_v: int, gpu: Device | None) -> str:
    """The options by the steps that take them."""
    by_step: dict[str, list[str]] = {}
    for name, option in _OPTIONS.items():
        problem = AttentionForward(1, 16, 4096, d_head, d_v=d_v, **option)
        try:
            step = choose(problem, gpu).step.id
        except ValueError:
            step = REFUSED
        by_step.setdefault(step, []).append(name)
    if len(by_step) == 1:
        return f"all: {step}"
    return "; ".join(f"{', '.join(names)}: {step}" for step, names in by_step.items())


def grid_tables(found: Sequence[Choices], choose: Choose, groups: Sequence[str]) -> str:
    """Markdown of the speed of what `choose` takes beside the libraries, on groups of a grid: a
    table for each group and GPU. Raises ValueError for a group that was not measured."""
    known = {m.group for file in found for m in file.problems}
    if unknown := [group for group in groups if group not in known]:
        raise ValueError(f"no group {unknown[0]!r} was measured: choose {', '.join(sorted(known))}")
    parts = []
    for file in found:
        of_group = [[m for m in file.problems if m.group == group] for group in groups]
        tables = [_grid_table(file, own, choose) for own in of_group if own]
        parts += [*tables, _how(file)] if tables else []
    return "\n\n".join(parts)


def _grid_table(file: Choices, problems: Sequence[MeasuredProblem], choose: Choose) -> str:
    """A row for each problem: the ratio is that to the fastest library, and a copy is none."""
    operation = OPERATIONS[problems[0].asked.operation]
    libraries = {name: operation.short_name(name) for m in problems for name in m.libraries}
    configs = [choose(measured.asked, file.provenance.device) for measured in problems]
    names = [config.step.id for config in configs]
    if len({*names}) == 1:
        names = names_of(configs)
    rows = []
    for measured, config, name in zip(problems, configs, names, strict=True):
        ms = measured.kernels[config.short_form()]
        others = [measured.libraries.get(library) for library in libraries]
        rivals = [ms for name, ms in measured.libraries.items() if name != operation.ceiling]
        speeds = [_speed(operation, measured, time) for time in (ms, *others)]
        row = [str(measured.asked), name, *speeds, f"{min(rivals) / ms:.2f}" if rivals else ""]
        if ceiling := measured.libraries.get(operation.ceiling):
            row.append(f"{ceiling / ms:.2f}")
        rows.append(row)
    unit = operation.metric.unit
    header = ["problem", "kernel", f"ours, {unit}", *libraries.values(), "ratio"]
    header += [f"of {operation.short_name(operation.ceiling)}"] if operation.ceiling else []
    return Table(header, rows, "ll").markdown()


def _speed(operation: Operation, measured: MeasuredProblem, ms: float | None) -> str:
    return "" if ms is None else number(operation.metric.speed(measured.asked, ms), 0)


def _how(file: Choices) -> str:
    """The machine and the protocol in a folded paragraph."""
    load, measured = file.protocol.loads[0], file.provenance
    packages = ", ".join(f"{package.name} {package.version}" for package in file.libraries)
    text = (
        f"The ratio is that to the fastest library. Medians of {file.protocol.rounds} samples of "
        f"{load.sample_ms:g} ms, in turns without a pause, replayed from CUDA graphs. Kernels that "
        "are a few percent apart change places from run to run. "
    )
    software = (f"PyTorch {measured.torch}", f"cuDNN {measured.cudnn}", packages)
    summary = '<details markdown="1">\n<summary>How it was measured</summary>'
    return f"{summary}\n\n{text}{measured.sentence(*software)}\n\n</details>"
