"""The experiments on step o5 and their compilation.

docs/tuning.md is the log of expectations and outcomes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flash_helpers.compile.codegen import kernel_unit
from flash_helpers.compile.cubins import Cubin
from flash_helpers.compile.sources import Unit, included_files
from flash_helpers.kernel_configs import Element
from flash_helpers.measure.results import ResourceRecord
from flash_helpers.registry.overlap import OVERLAP
from flash_helpers.sass.analyse.occupancy import occupancy
from flash_helpers.tune.process import CompiledConfig, KernelFile

if TYPE_CHECKING:
    from flash_helpers.measure.benchmark import Contender
    from flash_helpers.runtime.backend import Execute

DTYPE = Element.BF16
PARENT = OVERLAP.steps["o5"]
CONFIG = OVERLAP.fixed_config(PARENT, DTYPE)
_COMMENT = re.compile(r"\s*//.*")


@dataclass(frozen=True)
class Experiment:
    """A kernel that differs from its parent in one point, and has the parent's launch.

    title: the point. header: path of the kernel's header, relative to the root. namespace: of the
    kernel.
    """

    name: str
    title: str
    header: str
    namespace: str

    def unit(self, dtype: Element = DTYPE) -> Unit:
        """The unit to compile."""
        config = CONFIG.replace(dtype=dtype)
        options = {"name": self.name, "header": self.header, "namespace": self.namespace}
        return Unit(self.name, kernel_unit(config, **options))


# The parent first, then the experiments in the log's order.
EXPERIMENTS = (
    Experiment("parent", "step o5", str(PARENT.source), PARENT.namespace),
    Experiment(
        "immediate_distances",
        "distances of copies in the instructions",
        "benchmarks/experiments/immediate.cuh",
        PARENT.namespace,
    ),
    Experiment(
        "optimistic_maximum",
        "no maximum in the steady state",
        "benchmarks/experiments/optimistic.cuh",
        "optimistic",
    ),
)


def resources(cubin: Cubin) -> ResourceRecord:
    """Resources of an experiment's kernel on the architecture that it was compiled for."""
    config, report = cubin.config, cubin.report
    held = occupancy(
        report.architecture,
        report.registers,
        config.smem_bytes,
        config.n_threads,
        report.barriers or 0,
    )
    return ResourceRecord(
        name=cubin.name,
        registers=report.registers,
        local_bytes=report.stack_bytes,
        smem_bytes=config.smem_bytes,
        blocks_per_sm=held.blocks,
    )


def contender(cubin: Cubin, execute: Execute) -> Contender:
    """The kernel as a contender of the benchmark, run by `execute`. Raises as `cubin_contender`
    does."""
    from flash_helpers.tune.worker import cubin_contender  # imports torch

    name = cubin.config.short_form()  # all experiments share a config
    compiled = CompiledConfig(name, (KernelFile(name, str(cubin.path), cubin.symbol),))
    return replace(cubin_contender(compiled, execute), name=cubin.name, config=None)


def source_digest(root: Path) -> str:
    """Digest of the experiments' sources: the units and the files that they include, without
    comments and blank lines."""
    digest = hashlib.sha256()
    for experiment in EXPERIMENTS:
        unit = experiment.unit().text
        texts = [path.read_text(encoding="utf-8") for path in included_files(root, unit)]
        for text in (*texts, unit):
            lines = (_COMMENT.sub("", line).rstrip() for line in text.splitlines())
            digest.update("\n".join(line for line in lines if line).encode() + b"\0")
    return digest.hexdigest()[:16]
