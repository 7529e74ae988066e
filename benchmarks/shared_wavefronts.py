#!/usr/bin/env python3
"""Count the wavefronts of accesses to shared memory, by Nsight Compute."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import random
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from flash_helpers.console.command_line import make_parser
from flash_helpers.console.progress import bar
from flash_helpers.console.tables import Table
from flash_helpers.gpu import WARP
from flash_helpers.measure.command_line import (
    add_results_arguments,
    provenance_here,
    run_measurement,
)
from flash_helpers.measure.nsight import NsightCompute, ProfilerError
from flash_helpers.measure.results import Provenance, RecordFile
from flash_helpers.runtime.backend import find_backend
from flash_helpers.runtime.driver import LoadedKernel

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results/shared_wavefronts_h200.json"
METRIC = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
TILE_BYTES = 16384
OFF = 0xFFFF_FFFF  # instead of the address, for a lane that takes no part

DESCRIPTION = f"""\
Launch one warp that accesses shared memory once, for each kind of access and each of several
hundred patterns of addresses. The patterns have conflicts, words that lanes share, and lanes that
take no part. The accesses are loads and stores of 4, 8 and 16 bytes per lane, stmatrix and atomics.
Nsight Compute counts the wavefronts. The tests compare the simulator's counts
(flash_helpers.ptx.run.count.tally) with {RESULTS}.
"""

EXAMPLES = f"""\
examples:
  count, print a summary and write {RESULTS}; needs a GPU of compute capability 9.0 and ncu:
    python benchmarks/shared_wavefronts.py
  in a copy without git, and keeping the data elsewhere:
    python benchmarks/shared_wavefronts.py --commit 68cfc22 --json wavefronts.json

exit status: 0 counted, 2 wrong usage, no GPU or no profiler, 130 interrupted
"""

# The index of each lane's word; None for a lane that takes no part.
Words = list[int | None]


# -- patterns --------------------------------------------------------------------------------------


def regular() -> dict[str, Words]:
    """Patterns of groups of lanes that share words, and of strides."""
    lanes = range(WARP)
    found = {"linear": [*lanes], "same": [0] * WARP, "reversed": [31 - lane for lane in lanes]}
    for n in (2, 4, 8, 16):
        found[f"div{n}"] = [lane // n for lane in lanes]
        found[f"mod{n}"] = [lane % n for lane in lanes]
    for n in (2, 3, 4, 8, 16, 32):
        found[f"stride{n}"] = [lane * n for lane in lanes]
    return found


def in_pairs() -> dict[str, Words]:
    """Patterns of lanes that share a word with the lane whose number differs in one bit, and of
    halves and quarters of the warp that differ from the rest."""
    lanes, found = range(WARP), {}
    for bit in range(5):
        below = (1 << bit) - 1
        pair = [lane >> (bit + 1) << bit | lane & below for lane in lanes]
        for stride in (1, 2, 4, 8, 16, 32):
            found[f"pair{1 << bit}_stride{stride}"] = [p * stride for p in pair]
        for stride in (1, 8):
            shifted = [p * stride + lane // 16 * 3 for lane, p in enumerate(pair)]
            found[f"pair{1 << bit}_stride{stride}_shifted"] = shifted
    halves = {
        "half0_pair1_half1_pair2": lambda lane: 8 + ((lane - 16) // 4 * 2 | lane & 1),
        "half0_pair1_half1_linear": lambda lane: lane,
    }
    for name, second in halves.items():
        found[name] = [lane // 2 if lane < 16 else second(lane) for lane in lanes]
    for name, second in {"linear": lambda lane: lane, "same": lambda lane: 1}.items():
        found[f"half0_same_half1_{name}"] = [0 if lane < 16 else second(lane) for lane in lanes]
    for n in range(4):
        found[f"quarter{n}_linear_rest_same"] = [x if x // 8 == n else 40 for x in lanes]
    return found


MASKS: Mapping[str, Callable[[int], bool]] = {
    "low16": lambda lane: lane < 16,
    "high16": lambda lane: lane >= 16,
    "even": lambda lane: lane % 2 == 0,
    "odd": lambda lane: lane % 2 == 1,
    "every4": lambda lane: lane % 4 == 0,
    "bit1": lambda lane: not lane & 2,
    "lane0": lambda lane: lane == 0,
    "ends": lambda lane: lane in (0, 31),
    "low8": lambda lane: lane < 8,
    "mid16": lambda lane: 8 <= lane < 24,
    "not5": lambda lane: lane != 5,
    "quarters02": lambda lane: not lane & 8,
}


def masked(name: str, masks: Sequence[str] = tuple(MASKS)) -> dict[str, Words]:
    """A regular pattern in which only some lanes take part."""
    words = regular()[name]
    return {
        f"{name}_{mask}": [w if MASKS[mask](lane) else None for lane, w in enumerate(words)]
        for mask in masks
    }


CHOICES = ((2, 64), (4, 64), (8, 16), (8, 256), (16, 16), (16, 64), (24, 32), (32, 32), (32, 512))


def scattered(
    count: int, seed: int, shared_bits: Sequence[int] = (0,), share_off: float = 0.0
) -> dict[str, Words]:
    """Patterns of random words. shared_bits: bits of the lane's number that do not matter for its
    word. share_off: share of the lanes that take no part."""
    found: dict[str, Words] = {}
    for n in range(count):
        rng = random.Random(1000 * seed + n)
        (some, of), bits = CHOICES[n % len(CHOICES)], shared_bits[n % len(shared_bits)]
        words = rng.sample(range(of), some)
        drawn = {lane & ~bits: rng.choice(words) for lane in range(WARP)}
        chosen: Words = [drawn[lane & ~bits] for lane in range(WARP)]
        if share_off:
            chosen = [None if rng.random() < share_off else word for word in chosen]
        found[f"random{seed}_{n}_k{some}_of{of}_g{bits}"] = chosen
    return found


def for_loads(size: int) -> dict[str, Words]:
    """Patterns for loads of 8 and 16 bytes, which may serve parts of a warp together."""
    return {
        **regular(),
        **in_pairs(),
        **masked("linear"),
        **masked("div2"),
        **scattered(18, 10 + size),
        **scattered(18, 20 + size, (1, 2, 3)),
        **scattered(9, 30 + size, (4, 8, 16)),
        **scattered(12, 40 + size, (0, 1, 2), 0.3),
    }


def for_stores(size: int) -> dict[str, Words]:
    """Patterns for stores of 8 and 16 bytes."""
    return {**regular(), **masked("linear"), **masked("div2"), **scattered(18, 10 + size)}


def for_words() -> dict[str, Words]:
    """Patterns for accesses of 4 bytes, and for atomics: also different words in one bank."""
    lanes = range(WARP)
    return {
        **regular(),
        **masked("linear", ("low16", "even", "lane0")),
        **scattered(9, 70),
        "bank_pairs": [lane // 2 * 32 for lane in lanes],
        "bank_quads": [lane // 4 * 32 for lane in lanes],
        "bank_mod8": [lane % 8 * 32 for lane in lanes],
        "two_addresses_two_banks": [lane % 2 for lane in lanes],
        "two_addresses_one_bank": [lane % 2 * 32 for lane in lanes],
        "two_addresses_one_bank_halves": [lane // 16 * 32 for lane in lanes],
        "same16_rest_linear": [0 if lane < 16 else lane for lane in lanes],
        "same8_rest_linear": [0 if lane < 8 else lane for lane in lanes],
        "same8_same_bank24": [0 if lane < 8 else (lane - 7) * 32 for lane in lanes],
    }


# -- kernels ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Access:
    """A kind of access. size: bytes per lane. instruction: PTX with address %a, 32-bit values %x0
    to %x3 and the 64-bit value %y. counted: last part of the metric's name."""

    size: int
    instruction: str
    counted: str
    patterns: Mapping[str, Words]


_FOUR = "{%x0, %x1, %x2, %x3}"
_STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"

ACCESSES: Mapping[str, Access] = {
    "ld_b32": Access(4, "ld.shared.b32 %x0, [%a];", "ld", for_words()),
    "ld_b64": Access(8, "ld.shared.b64 %y, [%a];", "ld", for_loads(8)),
    "ld_v4_b32": Access(16, f"ld.shared.v4.b32 {_FOUR}, [%a];", "ld", for_loads(16)),
    "st_b32": Access(4, "st.shared.b32 [%a], %x0;", "st", for_words()),
    "st_b64": Access(8, "st.shared.b64 [%a], %y;", "st", for_stores(8)),
    "st_v4_b32": Access(16, f"st.shared.v4.b32 [%a], {_FOUR};", "st", for_stores(16)),
    "stmatrix_x4": Access(16, f"{_STMATRIX} [%a], {_FOUR};", "st", scattered(9, 80)),
    **{
        name: Access(size, instruction, "atom", for_words())
        for name, size, instruction in (
            ("atom_add_u32", 4, "atom.shared.add.u32 %x0, [%a], %x1;"),
            ("red_add_one", 4, "red.shared.add.u32 [%a], 1;"),
            ("atom_exch_b32", 4, "atom.shared.exch.b32 %x0, [%a], %x1;"),
            ("atom_cas_b32", 4, "atom.shared.cas.b32 %x0, [%a], 0, %x1;"),
            ("atom_exch_b64", 8, "atom.shared.exch.b64 %y, [%a], %y;"),
            ("atom_cas_b64", 8, "atom.shared.cas.b64 %y, [%a], 0, %y;"),
            ("red_max_s32", 4, "red.shared.max.s32 [%a], %x1;"),
            ("red_or_b32", 4, "red.shared.or.b32 [%a], %x1;"),
            ("red_add_f32", 4, "red.shared.add.f32 [%a], 0f3F800000;"),
            ("red_add_f16x2", 4, "red.shared.add.noftz.f16x2 [%a], %x1;"),
            ("red_max_u64", 8, "red.shared.max.u64 [%a], %y;"),
        )
    },
}


def addresses(access: Access, words: Words) -> list[int]:
    """Argument of a kernel for each lane: the byte offset of its word, or OFF."""
    return [OFF if word is None else word * access.size for word in words]


def module() -> str:
    """PTX of one kernel per access, each of one warp. A kernel takes a pointer to the addresses and
    a pointer to its results (64 bytes per lane)."""
    kernels = []
    for name, access in ACCESSES.items():
        first = ""
        if access.counted != "st":
            zero = {4: "b32 [%a], 0", 8: "b64 [%a], 0", 16: "v4.b32 [%a], {0, 0, 0, 0}"}
            first = f"@%p st.shared.{zero[access.size]};\nbar.warp.sync 0xffffffff;"
        guard = "" if "aligned" in access.instruction else "@%p "
        kernels.append(f"""
.visible .entry {name}(.param .align 8 .b8 pointers[16])
{{
.reg .pred %p; .reg .b32 %a, %x<4>; .reg .b64 %in, %out, %y;
.shared .align 128 .b8 tile[{TILE_BYTES}];
ld.param.u64 %in, [pointers];
ld.param.u64 %out, [pointers+8];
mov.u32 %x0, %tid.x;
mad.wide.u32 %in, %x0, 4, %in;
mad.wide.u32 %out, %x0, 64, %out;
ld.global.u32 %a, [%in];
setp.ne.u32 %p, %a, {OFF};
mov.u32 %x1, tile;
@%p add.u32 %a, %a, %x1;
add.u32 %x1, %x0, 3;
mov.u32 %x2, 0;
mov.u32 %x3, 0;
cvt.u64.u32 %y, %x1;
{first}
{guard}{access.instruction}
st.global.v4.b32 [%out], {_FOUR};
st.global.b64 [%out+16], %y;
ret;
}}
""")
    return ".version 8.0\n.target sm_90\n.address_size 64\n" + "".join(kernels)


def launch(name: str) -> int:
    """Launch an access with each of its patterns; returns the exit status. Raises DriverError."""
    access = ACCESSES[name]
    words = [addresses(access, words) for words in access.patterns.values()]
    tables = torch.from_numpy(np.array(words, np.uint32).view(np.int32)).cuda()
    results = torch.empty(64 * WARP, dtype=torch.uint8, device="cuda")
    kernel = LoadedKernel(module().encode(), name, 0)
    for table in tables:
        arguments = struct.pack("<2Q", table.data_ptr(), results.data_ptr())
        kernel.start((1, 1, 1), WARP, [arguments])
    torch.cuda.synchronize()
    return 0


# -- counting --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountedPattern:
    """One launch. access: a key of ACCESSES. words: index of each lane's word, in units of the
    access's size; None for a lane that takes no part."""

    access: str
    pattern: str
    words: tuple[int | None, ...]
    wavefronts: int


@dataclass(frozen=True)
class SharedWavefronts(RecordFile):
    """Counts of one run. profiler: its version."""

    FORMAT: ClassVar[int] = 1
    HOLDS: ClassVar[str] = "wavefronts of shared memory"

    provenance: Provenance
    profiler: str
    patterns: tuple[CountedPattern, ...]

    def table(self) -> Table:
        """Table of one row per access."""
        rows = []
        for name in dict.fromkeys(p.access for p in self.patterns):
            counts = {p.pattern: p.wavefronts for p in self.patterns if p.access == name}
            shown = [str(counts.get(p, "")) for p in ("linear", "same", "div2", "stride2")]
            rows.append([name, str(len(counts)), *shown])
        header = [
            "access",
            "patterns",
            "one word per lane",
            "one word",
            "one for two lanes",
            "every second",
        ]
        return Table(header, rows)


def count(profiler: NsightCompute, name: str) -> list[CountedPattern]:
    """Count the launches of one access. Raises ProfilerError."""
    access = ACCESSES[name]
    metric = METRIC.format(access.counted)
    command = [sys.executable, __file__, "--launch", name]
    found = [run.values.get(metric) for run in profiler.profile(command, name, (metric,), name)]
    if len(found) != len(access.patterns) or None in found:
        raise ProfilerError(f"this GPU does not count {metric} of every launch")
    return [
        CountedPattern(name, pattern, tuple(words), int(wavefronts))
        for (pattern, words), wavefronts in zip(access.patterns.items(), found, strict=True)
    ]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with 2 if it is wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    add_results_arguments(parser, ROOT, RESULTS, "the counts")
    parser.add_argument("--launch", choices=list(ACCESSES), help="only launch, for ncu")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, command: str) -> int:
    """Count, print and write; returns the exit status. Raises KernelsNotRun and ProfilerError."""
    if arguments.launch:
        return launch(arguments.launch)
    backend = find_backend("cuda")
    profiler = NsightCompute.find()
    accesses = bar(list(ACCESSES), desc="wavefronts", unit="access")
    found = SharedWavefronts(
        provenance_here(backend, command, arguments, ROOT),
        f"Nsight Compute {profiler.version()}",
        tuple(pattern for name in accesses for pattern in count(profiler, name)),
    )
    print(f"{found.table().text()}\n\n{found.provenance.sentence(found.profiler)}")
    found.save(arguments.json)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Count; returns the exit status."""
    arguments = parse_arguments(argv)
    return run_measurement(
        run,
        arguments,
        "shared_wavefronts.py",
        argv,
        ProfilerError,
        ValueError,
        RuntimeError,
        OSError,
    )


if __name__ == "__main__":
    sys.exit(main())
