"""What the simulator counts of a kernel, kept between runs.

A file of the cache is named by a hash of the kernel's PTX, of the simulator's own source and of the
problem, so that it never gets stale.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import flash_helpers.ptx
import flash_helpers.runtime.simulator
from flash_helpers.check.inputs import make_inputs, tensors_for
from flash_helpers.files import write_if_different
from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.measure.kernel_profile import Simulate
from flash_helpers.ptx import Counts, Phase
from flash_helpers.registry.ampere import PROGRESSION_ROW_STRIDE

FORMAT = 1
SEQ_LEN = 512

OpcodeCounts = Mapping[str, Counts]


@dataclass(frozen=True)
class KernelCounts:
    """phases: counts by opcode of PTX, of each phase."""

    config: Config
    seq_len: int
    phases: Mapping[Phase, OpcodeCounts]

    def total(
        self, phase: Phase | None = None, wanted: Callable[[str], bool] | None = None
    ) -> Counts:
        """The sum over all phases or one, of all opcodes or of those that are wanted."""
        found = Counts()
        for name, counts in self.phases.items():
            for opcode, of_opcode in counts.items():
                if phase in (None, name) and (wanted is None or wanted(opcode)):
                    found.add(of_opcode)
        return found

    def opcodes(self, phase: Phase | None = None) -> dict[str, int]:
        """Instructions by opcode."""
        found: dict[str, int] = {}
        for name, counts in self.phases.items():
            for opcode, of_opcode in counts.items() if phase in (None, name) else ():
                found[opcode] = found.get(opcode, 0) + of_opcode.instructions
        return found


def count_kernel(
    config: Config,
    ptx: Path,
    cache_folder: Path,
    simulate: Simulate,
    seq_len: int = SEQ_LEN,
) -> KernelCounts:
    """The counts of one head of a tensor with the row stride of the progression.

    ptx: the config's file. simulate: `flash_attention.simulate`.

    Raises OSError if there is no PTX, and what `simulate` raises.
    """
    key = json.dumps([FORMAT, _simulator_digest(), _digest([ptx.read_bytes()]), seq_len])
    path = cache_folder / f"{_digest([key.encode()])}.json"
    phases = _read(path)
    if phases is None:
        phases = _simulate(config, simulate, seq_len)
        write_if_different(path, _to_json(phases))
    return KernelCounts(config, seq_len, phases)


def _simulate(config: Config, simulate: Simulate, seq_len: int) -> Mapping[Phase, OpcodeCounts]:
    shape = AttentionForward(1, 1, seq_len, config.d_head, config.dtype)
    inputs = make_inputs("normal", shape, getattr(torch, config.dtype.torch_name))
    _, run = simulate(config, **tensors_for(config, *inputs, PROGRESSION_ROW_STRIDE))
    return MappingProxyType({phase: run.counters.by_opcode(phase) for phase in Phase})


@cache
def _simulator_digest() -> str:
    package = Path(flash_helpers.ptx.__file__).parent
    files = [*sorted(package.glob("*.py")), Path(flash_helpers.runtime.simulator.__file__)]
    return _digest(file.read_bytes() for file in files)


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(hashlib.sha256(part).digest())
    return found.hexdigest()


def _to_json(phases: Mapping[Phase, OpcodeCounts]) -> str:
    return json.dumps(
        {
            phase.value: {opcode: asdict(counts) for opcode, counts in of_phase.items()}
            for phase, of_phase in phases.items()
        }
    )


def _read(path: Path) -> Mapping[Phase, OpcodeCounts] | None:
    """What the file holds; None if it is absent or damaged."""
    try:
        document: dict[str, dict[str, Any]] = json.loads(path.read_text())
        return MappingProxyType(
            {
                phase: {op: Counts(**values) for op, values in document[phase.value].items()}
                for phase in Phase
            }
        )
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return None
