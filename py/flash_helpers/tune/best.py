"""best_config(): the fastest config that a sweep found for a GPU; choose_config(): the config
for a problem.

Winners come from the files configs/best_*.json of the repository, measured choices from
configs/choice_*.json.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flash_helpers.compile.codegen import BEST_PATTERN, CONFIG_FOLDER
from flash_helpers.compile.package import package_folder, sources_root
from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import (
    FAMILIES,
    OPERATIONS,
    STEPS,
    Config,
    Element,
    Problem,
)
from flash_helpers.registry.choice import first_that_takes, preferred_steps
from flash_helpers.registry.family import Step
from flash_helpers.registry.selection import UsageError, find_steps, variant_for
from flash_helpers.runtime import library, tensors
from flash_helpers.tune.choices import Choices, load_choices
from flash_helpers.tune.winners import BestConfig, BestConfigs, load_best

# Octaves by which a problem is farther that was measured on a GPU of another name: kernels that are
# the fastest on one card of a compute capability are nearly so on the others.
OTHER_GPU = 3.0


def best_config(
    step: str | int,
    dtype: torch.dtype | Element | str,
    device: torch.device | str | int | None = None,
    *,
    causal: bool = False,
    seq_len: int | None = None,
) -> Config:
    """The fastest config of a step and dtype on a device, according to sweeps.

    step: id, such as "v16"; a number alone means the ampere family.
    dtype: such as torch.bfloat16 or "bf16".
    device: the current CUDA device by default.
    causal: choose for causal problems.
    seq_len: choose for problems of about this length; by default for the mean over lengths.

    The result is the first of these that is known and listed:
      1. the winner of a sweep on a GPU of this name. If steps were tuned together, it may be a
         config of an earlier step that was faster.
      2. the winner on another GPU of the same compute capability, the first by the GPU's name.
      3. the step's fixed config, or the causal config of its tile. Steps without options to tune
         have only this one, and so does the CPU, where kernels are simulated.
    Raises ValueError for a step or dtype that does not exist, for a step without a causal kernel if
    `causal` is set. Raises RuntimeError if the package is not installed.
    """
    found = find_steps(str(step)) or ()
    if len(found) != 1:
        raise UsageError(f"step {step!r} is not one of {', '.join(STEPS)}")
    element = _element_type(dtype)
    listed = set(library.kernels())
    options = {"causal": causal}
    for config in _winners(found[0], element, _gpu(device), options, lambda e: e.at_size(seq_len)):
        if config in listed:
            return config
    fixed = FAMILIES[found[0].family].fixed_config(found[0], element)
    made_for = [
        config
        for config in fixed.variants()
        if bool(config.supports.options.get("causal")) == causal
    ]
    if not made_for:
        raise UsageError(f"step {found[0].id} has no causal kernel: choose a later one of hopper")
    return library.resolve(made_for[0])


def choose_config(problem: Problem, device: torch.device) -> Config:
    """Return the listed config that computes a problem on a device when the call names none.

    The result is the first of these that supports the problem:
      1. configs that were measured on the nearest problem of a grid, on a GPU of its compute
         capability, the fastest expected first (`Choices.ranked`). A problem that was measured on a
         GPU of another name counts as `OTHER_GPU` farther. Files that tell nothing of the problem
         (`Choices.tells_of`) come last;
      2. of the preferred steps (`Family.preferred`) of each family that runs on the device, the
         newest family first: winners of their sweeps for such problems, of a family the fastest for
         this problem first (`BestConfig.for_problem`), and their variants (`Config.variants`);
      3. the fixed configs of these steps and their variants. So a family that was never measured is
         taken where no measured config of another supports the problem.
    The fastest is that for `Problem.for_choice`: one kernel for pieces of keys of one size.
    A problem that asks for the same bits in every call (`AttentionBackward.deterministic`) is
    supported by configs of deterministic steps alone, winners and measured ones too.
    A kernel that the library lacks is compiled.
    If the step was not swept yet, the last swept step before it gives the tiles of the winners.

    Raises ValueError, with the nearest supported problem, if no config supports it. Raises
    RuntimeError for a GPU that runs no kernel, and if the package is not installed.
    """
    own = [family for family in FAMILIES.values() if family.operation.name == problem.operation]
    on_gpu = device.type == "cuda"
    found = tensors.device_for(own[0] if on_gpu else own[-1], device)
    return config_for(problem, found if on_gpu else None)


def config_for(problem: Problem, gpu: Device | None) -> Config:
    """Return the config that `choose_config` takes on a GPU, which need not be present. gpu: None
    is the CPU. Sizes that are symbols have conditions on them by the config's refusals alone."""
    return first_that_takes(problem, _candidates(_example(problem.for_choice()), gpu))


def _example(problem: Problem) -> Problem:
    """Return a problem with the sizes that a trace has as examples in place of symbols. Compared as
    symbols, speeds would tie the traced program to sizes of which the same is the fastest."""
    symbols = {
        name: size.node.hint or 1  # none without an example
        for name, size in vars(problem).items()
        if isinstance(size, torch.SymInt)
    }
    return replace(problem, **symbols) if symbols else problem


def is_ahead(problem: Problem, device: torch.device) -> bool:
    """Whether kernels were no slower than the operation's libraries on the nearest problem that was
    measured (`choose_config`). True for the CPU, and where nothing was measured."""
    gpu = _gpu(device)
    files = _measured(problem, gpu) if gpu else []
    return not files or files[0].is_ahead(problem)


def newest_that_takes(problem: Problem) -> Config | None:
    """Return the listed config of the last step in the newest family that takes a problem, on any
    GPU or in the simulator; None without one."""
    newest = sorted(library.kernels(), key=lambda c: (c.family.rank, c.step.number), reverse=True)
    return next((config for config in newest if not config.refusal(problem)), None)


def _candidates(problem: Problem, gpu: Device | None) -> tuple[Config, ...]:
    operation = OPERATIONS[problem.operation]
    listed = set(library.kernels())
    measured: dict[Config, None] = {}
    others: dict[Config, None] = {}
    for step in preferred_steps(operation, gpu.capability if gpu else None):
        fixed = FAMILIES[step.family].fixed_config(step, problem.dtype)
        if fixed not in listed:
            continue
        others |= _variants([fixed])
        made_for = variant_for(fixed, problem)
        if gpu and not made_for.supports.lacking(problem):
            options = made_for.supports.options
            swept = _last_swept(step, problem.dtype, gpu, options)
            in_order = functools.partial(BestConfig.for_problem, problem=problem, device=gpu)
            best = _winners(swept, problem.dtype, gpu, options, in_order)
            measured |= _variants(
                c for c in (_succeeded(w, swept, step) for w in best) if c in listed
            )
    found = _from_grid(problem, gpu) | measured | others
    if not found:
        raise RuntimeError(
            f"there is no kernel for {gpu.name if gpu else 'the CPU'} in {problem.dtype.short}: "
            "`python -m flash_attention` lists the kernels"
        )
    return tuple(found)


def _from_grid(problem: Problem, gpu: Device | None) -> dict[Config, None]:
    """The configs measured on the nearest problem, the fastest expected first; none for the
    CPU."""
    if gpu is None:
        return {}
    files = _measured(problem, gpu)
    return dict.fromkeys(config for file in files for config in file.ranked(problem, gpu))


def _measured(problem: Problem, gpu: Device) -> list[Choices]:
    """The files of a GPU's compute capability, that with the nearest problem first."""
    capability = ".".join(map(str, gpu.capability))
    files = load_choices(sources_root(package_folder()) / CONFIG_FOLDER)
    own = [file for file in files if file.provenance.compute_capability == capability]
    return sorted(
        own,
        key=lambda file: (
            not file.tells_of(problem),
            file.distance(problem) + OTHER_GPU * (file.provenance.gpu != gpu.name),
        ),
    )


def _variants(configs: Iterable[Config]) -> dict[Config, None]:
    """The variants of configs, in order."""
    return dict.fromkeys(variant for config in configs for variant in config.variants())


def _last_swept(step: Step, dtype: Element, gpu: Device | None, options: Mapping[str, Any]) -> Step:
    """The family's last step with a winner of a sweep, up to and including `step`; `step` itself if
    there is none."""
    steps = [*FAMILIES[step.family].steps.values()][: step.number]
    known = (s for s in reversed(steps) if _winners(s, dtype, gpu, options, BestConfig.at_size))
    return next(known, step)


def _succeeded(config: Config, swept: Step, step: Step) -> Config:
    """The swept step's config as a config of `step`, unless `step` cannot have the tile. A config
    of a third step stays."""
    if config.step is swept:
        with contextlib.suppress(ValueError):
            return config.at_step(step)
    return config


def _element_type(dtype: torch.dtype | Element | str) -> Element:
    return (
        dtype
        if isinstance(dtype, Element)
        else Element.from_name(str(dtype).removeprefix("torch."))
    )


def _winners(
    step: Step,
    dtype: Element,
    gpu: Device | None,
    options: Mapping[str, Any],
    in_order: Callable[[BestConfig], list[Config]],
) -> list[Config]:
    """Winners in the file of this GPU, then in the files of other GPUs of its compute capability;
    none for the CPU."""
    if gpu is None:
        return []
    capability = ".".join(map(str, gpu.capability))
    own: list[Config] = []
    near: list[Config] = []
    for file in _files(sources_root(package_folder()) / CONFIG_FOLDER):
        entry = file.find(step.id, dtype.short, **options)
        if entry and file.compute_capability == capability:
            (own if file.gpu == gpu.name else near).extend(in_order(entry))
    return [*own, *near]


def _gpu(device: torch.device | str | int | None) -> Device | None:
    """The GPU of a CUDA device, the current device by default; None for any other device."""
    wanted = torch.device("cuda", device) if isinstance(device, int) else device
    if wanted is not None and torch.device(wanted).type != "cuda":
        return None
    return tensors.gpu_device(tensors.device_index(wanted)) if torch.cuda.is_available() else None


@functools.cache
def _files(folder: Path) -> tuple[BestConfigs, ...]:
    return tuple(load_best(path) for path in sorted(folder.glob(BEST_PATTERN)))
