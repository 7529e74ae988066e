"""Counts of the instructions of a launch: predicted from the SASS, or counted in the simulator."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import Config, Problem
from flash_helpers.measure.counts import (
    FILLER,
    ONE_FOR_ONE,
    PIPES,
    WORK,
    CountedKernel,
    OutputComparison,
)
from flash_helpers.measure.machine_code import trips
from flash_helpers.measure.results import size_of
from flash_helpers.runtime.library import ptx_path
from flash_helpers.sass.analyse.counts import Bucket, count_executed, with_buckets
from flash_helpers.sass.analyse.phases import NotDeterminedError, block_executions
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.records import Kernel

if TYPE_CHECKING:
    import torch

    from flash_helpers.ptx import Counters, Run
    from flash_helpers.runtime.backend import Backend

_TMA = "cp.async.bulk.tensor"
# Beginnings of PTX opcodes; each of these instructions becomes one SASS instruction.
_FAMILIES = {
    "mma": ("mma.",),
    "ldmatrix": ("ldmatrix.",),
    "cp.async": ("cp.async.ca.", "cp.async.cg."),
    "shared store": ("st.shared",),
    "shared load": ("ld.shared",),
    "global store": ("st.global",),
}
_WGMMA_FAMILIES = {
    "wgmma": ("wgmma.mma_async.",),
    "TMA load": tuple(f"{_TMA}.{n}d.shared::cluster.global." for n in range(1, 6)),
    "TMA store": tuple(f"{_TMA}.{n}d.global.shared::cta." for n in range(1, 6)),
    "stmatrix": ("stmatrix.",),
}
_ROLES_COUNTED = {"wgmma": "HGMMA", "TMA loads": "UTMALDG", "TMA stores": "UTMASTG"}


def _named(config: Config, problem: Problem) -> dict[str, Any]:
    return {"name": config.short_form(), "problem": problem.record()}


# -- from the SASS ---------------------------------------------------------------------------------


def predict_launch(kernel: Kernel, config: Config, shape: Problem) -> CountedKernel:
    """Predict the counts of all warps of a launch from the machine code's text; for a kernel on
    wgmma, only the counts of the opcodes in ONE_FOR_ONE.

    The warps of a kernel on wgmma have roles, and spin where they wait. For them, a prediction
    covers opcodes that ptxas makes one for one of PTX, as often as the simulator executes the PTX.

    Raises NotDeterminedError where nothing can be predicted, and as `run_kernel` does.
    """
    if any(instruction.base in opcodes.GROUP_TENSOR for instruction in kernel.instructions):
        return _predict_roles(kernel, config, shape)
    times = block_executions(kernel, trips(kernel, config, size_of(shape)))
    device = largest_device(kernel.capability)
    call = config.call(shape, shape.strides(), device)
    warps = sum(launch.n_blocks * launch.n_warps for launch in call.launches)
    by_base: Counter[str] = Counter()
    for instruction in kernel.instructions:
        by_base[instruction.base] += times[instruction.block]
    return CountedKernel(
        **_named(config, shape),
        compiler=str(kernel.compiler),
        predicted={name: warps * n for name, n in _counts_of_warp(kernel, times).items()},
        predicted_opcodes={name: warps * n for name, n in sorted(by_base.items()) if n},
    )


def _counts_of_warp(kernel: Kernel, times: Sequence[int]) -> dict[str, int]:
    """Counts of work and filler, of each class of opcodes, and of each pipe, filler left out.

    times: executions of each basic block.
    """
    counts = count_executed(kernel, times)
    pipes: Counter[str] = Counter()
    for instruction, kind in with_buckets(kernel):
        if kind in (Bucket.EXECUTED, Bucket.PREDICATED):
            pipes[instruction.pipe] += times[instruction.block]
    # From compute capability 8.6 on, the heavy half is a part of the FMA pipe.
    pipes["fma"] += pipes["fmaheavy"]
    return {
        WORK: counts.work,
        FILLER: counts.by_bucket[Bucket.FILLER],
        **{name: counts.by_class.get(name, 0) for name in opcodes.CLASSES},
        **{f"{pipe} pipe": pipes[pipe] for pipe in PIPES},
    }


def _predict_roles(kernel: Kernel, config: Config, shape: Problem) -> CountedKernel:
    """Predict counts by opcode. An opcode is left out if its number differs between machine code
    and PTX. `predicted_opcodes` also leaves out opcodes under a predicate: a GPU counts an
    instruction even if its predicate is false."""
    from flash_helpers.runtime.simulator import load_kernel

    ptx = load_kernel(config, ptx_path(config))
    run, _ = _simulated(config, shape)
    executed = run.counters.by_opcode()
    in_text = Counter(instruction.base for instruction in kernel.instructions)
    predicated = {instruction.base for instruction in kernel.instructions if instruction.predicate}
    counts = {
        opcode: sum(c.instructions for name, c in executed.items() if re.match(pattern, name))
        for opcode, pattern in ONE_FOR_ONE.items()
        if in_text[opcode]
        == sum(bool(re.match(pattern, i.opcode)) for i in ptx.program.instructions)
    }
    if not counts:
        raise NotDeterminedError(
            f"the counts of {config.short_form()} cannot be predicted: no opcode occurs as often "
            "in its machine code as in its PTX"
        )
    return CountedKernel(
        **_named(config, shape),
        compiler=str(kernel.compiler),
        predicted={n: counts[opcode] for n, opcode in _ROLES_COUNTED.items() if opcode in counts},
        predicted_opcodes={name: n for name, n in counts.items() if name not in predicated},
    )


# -- from the simulator ----------------------------------------------------------------------------


def _simulated(config: Config, shape: Problem) -> tuple[Run, dict[str, torch.Tensor]]:
    from flash_helpers.check.tensors import tensors_for
    from flash_helpers.runtime.simulator import load_kernel, run_kernel

    inputs = config.family.operation.part("inputs").draw("normal", shape)
    tensors = tensors_for(config, shape, inputs)
    kernel = load_kernel(config, ptx_path(config))
    return run_kernel(config, kernel, tensors, **shape.call_options()), tensors


def simulated_counts(counters: Counters) -> dict[str, int]:
    """The simulator's counts by name. A kernel on `wgmma` has other families of instructions."""
    by_opcode, total = counters.by_opcode(), counters.total
    counts = {"instructions": total.instructions}
    if total.wgmma:
        counts["bytes of wgmma operands"] = total.wgmma_bytes
    for family, prefixes in (_WGMMA_FAMILIES if total.wgmma else _FAMILIES).items():
        found = [count for opcode, count in by_opcode.items() if opcode.startswith(prefixes)]
        counts[f"{family} instructions"] = sum(c.instructions for c in found)
        counts[f"{family} conflicts"] = sum(c.bank_conflicts for c in found)
        counts[f"{family} wavefronts"] = sum(c.shared_wavefronts for c in found)
        counts[f"{family} sectors"] = sum(c.global_sectors + c.tma_sectors for c in found)
    return counts


def simulate_launch(
    config: Config, shape: Problem, backend: Backend | None = None
) -> CountedKernel:
    """Count one kernel in the simulator. If the backend is a GPU, compare the outputs on the same
    inputs, too.

    shape: a problem for which the config itself is launched.
    """
    from flash_helpers.check.debugging import run_on

    run, tensors = _simulated(config, shape)
    outputs = None
    if backend is not None:
        inputs = {tensor.name: tensors[tensor.name] for tensor in shape.inputs}
        found = run_on(backend, config, shape, inputs)
        name = shape.outputs[0].name
        outputs = compare_outputs(found[name], tensors[name])
    return CountedKernel(
        **_named(config, shape), predicted=simulated_counts(run.counters), outputs=outputs
    )


def compare_outputs(one: torch.Tensor, other: torch.Tensor) -> OutputComparison:
    """Compare two tensors of one 16-bit dtype and shape. Raises ValueError if these differ."""
    import torch

    if one.dtype != other.dtype or one.shape != other.shape or one.element_size() != 2:
        raise ValueError(
            f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)} are not "
            "tensors of one 16-bit dtype and shape"
        )
    difference = (one.double() - other.double()).abs()
    _, exponent = torch.frexp(one.double().abs().amax(-1, keepdim=True))
    unit = torch.finfo(one.dtype).eps * torch.exp2((exponent - 1).double())

    def ordered(x: torch.Tensor) -> torch.Tensor:
        """Integers for which neighbouring floats are neighbours; both zeros become 0."""
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return OutputComparison(
        bit_equal=(one.view(torch.int16) == other.view(torch.int16)).double().mean().item(),
        max_ulps=int((ordered(one) - ordered(other)).abs().max()),
        max_row_ulps=(difference / unit).max().item(),
        max_abs=difference.max().item(),
    )
