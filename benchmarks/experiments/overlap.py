"""The experiments on version 16's main loop: which there are, and how they are compiled.

The loops are in overlap.cuh, the log of what was expected and what came out in docs/tuning.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flash_helpers.compile.codegen import kernel_unit
from flash_helpers.compile.cubins import Cubin, Source, included_files
from flash_helpers.kernel_configs import TWO_STAGES, DType, FlashForwardKernelConfig
from flash_helpers.measure.benchmark import Contender
from flash_helpers.measure.results import ResourceRecord
from flash_helpers.registry.ampere import AMPERE, STAGES_STEP
from flash_helpers.sass.analyse.occupancy import occupancy
from flash_helpers.tune.process import KernelFile
from flash_helpers.tune.worker import cubin_contender

HEADER = "benchmarks/experiments/overlap.cuh"
DTYPE = DType.BF16
_COMMENT = re.compile(r"\s*//.*")


@dataclass(frozen=True)
class Experiment:
    """One variant of version 16's main loop, in bf16.

    parent: the experiment that it differs from in one thing; "" for the first. title: that thing.
    options: of the config, where they differ from the large tile's with two stages.
    loop: C++ type in namespace experiments that stands in for version 16's own loop, or "".
    """

    name: str
    parent: str
    title: str
    options: Mapping[str, Any]
    loop: str = ""

    @property
    def config(self) -> FlashForwardKernelConfig:
        """What the kernel is launched as; experiments may share it."""
        fixed = AMPERE.fixed_config(AMPERE.steps[STAGES_STEP], DTYPE)
        return fixed.replace(**{**TWO_STAGES, **self.options})

    def unit(self) -> str:
        """Translation unit with the one kernel."""
        loop = f"    using Loop = experiments::{self.loop};\n" if self.loop else ""
        return kernel_unit(self.config, self.name, HEADER, loop)


def _options(lazy_rescale: bool, mma_row_sum: bool, **others: Any) -> dict[str, Any]:
    return {"lazy_rescale": lazy_rescale, "mma_row_sum": mma_row_sum, **others}


_ONE_STAGE = _options(False, False, kv_stages=1)
_EAGER, _LAZY, _BOTH = _options(False, False), _options(True, False), _options(True, True)


_BY_KEY = ".copies_by_key = true"
_COPIES = ".copies = experiments::Copies"


def _ring(name: str, title: str, options: str, parent: str = "two_stages") -> Experiment:
    loop = f"Ring<value, experiments::RingOptions{{{options}}}>"
    return Experiment(name, parent, title, _BOTH, loop)


# In the order of the log.
EXPERIMENTS = (
    Experiment("one_stage", "", "version 16 at the large tile, one buffer each", _ONE_STAGE),
    Experiment(
        "whole_tiles",
        "one_stage",
        "two buffers, one barrier a block instead of four",
        _EAGER,
        "WholeTiles<value>",
    ),
    Experiment("whole_tiles_lazy", "whole_tiles", "lazy rescale", _LAZY, "WholeTiles<value>"),
    Experiment(
        "pipelined", "whole_tiles", "S of the next block before P @ V", _EAGER, "Pipelined<value>"
    ),
    Experiment("pipelined_lazy", "pipelined", "lazy rescale", _LAZY, "Pipelined<value>"),
    Experiment(
        "pipelined_keys_32",
        "pipelined_lazy",
        "B_c 32, half of Q in registers",
        {**_LAZY, "B_c": 32},
        "Pipelined<value, 4>",
    ),
    Experiment(
        "sub_blocks_32",
        "whole_tiles_lazy",
        "S of the next 32 keys before the softmax of these",
        _LAZY,
        "SubBlocks<value, 32>",
    ),
    Experiment(
        "sub_blocks_16", "sub_blocks_32", "16 keys at a time", _LAZY, "SubBlocks<value, 16>"
    ),
    Experiment(
        "ring", "whole_tiles", "fragments through a ring, barrier before the softmax", _EAGER
    ),
    Experiment("ring_lazy", "ring", "lazy rescale", _LAZY),
    Experiment("ring_mma_sum", "ring", "row sums by mma", _options(False, True)),
    Experiment("two_stages", "ring_lazy", "row sums by mma: step 16 with two stages", _BOTH),
    Experiment("ring_keys_32", "two_stages", "B_c 32", {**_BOTH, "B_c": 32}),
    _ring("ring_ahead_1", "loads 1 ahead, not 2", ".ahead = 1"),
    _ring("ring_ahead_3", "loads 3 ahead", ".ahead = 3"),
    _ring("ring_copies_first", "copies before V's first fragments", ".copies_first = true"),
    _ring("ring_by_key", "addresses of copies from the key", _BY_KEY),
    _ring(
        "ring_first_version",
        "3 ahead, copies first, by key",
        f".ahead = 3, .copies_first = true, {_BY_KEY}",
    ),
    _ring("ring_vote", "a vote before the maxima", ".vote = true"),
    _ring("ring_barrier_first", "barrier at the top of a block", ".barrier_first = true"),
    _ring("ring_immediate", "distances of copies in the instructions", f"{_COPIES}::immediate"),
    _ring(
        "ring_interleaved", "copies spread over P @ V", f"{_COPIES}::interleaved", "ring_immediate"
    ),
    _ring("ring_again", "nothing: the control", ""),
)


def resources(cubin: Cubin) -> ResourceRecord:
    """What an experiment's kernel takes on the architecture that it was compiled for."""
    config, report = cubin.config, cubin.report
    held = occupancy(
        report.architecture,
        report.registers,
        config.smem_bytes,
        config.n_threads,
        report.barriers or 0,
    )
    return ResourceRecord(
        name=cubin.source.name,
        registers=report.registers,
        local_bytes=report.stack_bytes,
        smem_bytes=config.smem_bytes,
        blocks_per_sm=held.blocks,
    )


def contender(cubin: Cubin) -> Contender:
    """The kernel for the benchmark; a CUDA context must be current. Raises DriverError."""
    file = KernelFile(cubin.config.short_form(), str(cubin.path), cubin.symbol)
    # several experiments share a config
    return replace(cubin_contender(file), name=cubin.source.name, config=None)


def source_digest(root: Path) -> str:
    """Digest of all that the experiments' machine code is made from, but the compiler: the files
    that they include, without comments and blank lines, and the units."""
    digest = hashlib.sha256()
    units = [experiment.unit() for experiment in EXPERIMENTS]
    texts = [path.read_text(encoding="utf-8") for path in included_files(root, units[0])]
    for text in (*texts, *units):
        lines = (_COMMENT.sub("", line).rstrip() for line in text.splitlines())
        digest.update("\n".join(line for line in lines if line).encode() + b"\0")
    return digest.hexdigest()[:16]


def sources() -> list[Source]:
    """What is compiled, in the order of the log."""
    return [Source(found.name, found.config, found.unit()) for found in EXPERIMENTS]
