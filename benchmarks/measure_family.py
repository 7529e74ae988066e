#!/usr/bin/env python3
"""Measure the speed of a family's steps, with one file of results per kind of problem."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flash_helpers.compile.codegen import listed_configs
from flash_helpers.console.command_line import make_parser, output_folder, run_tool
from flash_helpers.kernel_configs import FAMILIES, Config, Element
from flash_helpers.measure.asked import (
    add_measured_options,
    asked_sizes,
    measured_problem,
    swept_option,
)
from flash_helpers.registry.family import Family
from flash_helpers.tune.winners import load_best

ROOT = Path(__file__).resolve().parents[1]
MAIN = "main"  # the kind that is left out of its file's name
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
WHOLE = (512, 1024, 2048, 4096, 7680, 15360)  # which tiles of 192 rows and 80 keys divide, too
ALONE = (1024, 2048, 4096, 8192, 16384)
ODD = (1000, 1024, 4000, 4096, 8191, 8192, 15360)
DESCRIPTION = """\
Run pt_bench.py once for each kind of problem that the family takes, the shortest first. A family of
attention has its last steps and the winners of sweeps measured on one sequence at a time, on causal
problems, on grouped heads, in both dtypes and at odd lengths. The last step and the winners are
also measured with a causal mask and without, in bursts and sustained. A family of the backward pass
has its last step measured on grouped heads, with a causal mask, in both dtypes and at head size 64.
A family of decode has its last steps measured on one sequence, on pages of 1, 16, 64 and 256 keys,
with 1, 8 and 16 heads on one, and on 64 sequences of one length and of lognormal lengths; the last
step in all dtypes, and for pieces of 256, 1024 and 2048 keys; and steps for a cache in fp8 on that.
A family of another operation has its last steps measured in all dtypes. At the end all steps are
measured beside each other, but for those for a cache in fp8.

The files are FOLDER/FAMILY_KIND_GPU.json. A run can be interrupted at any time: the same command
continues with the files in FOLDER. FlashAttention-3 takes part if fa3_fwd is installed. Further
options go to each pt_bench.py.
"""
EXAMPLES = """\
examples:
  all kinds of family hopper, within about half an hour:
    python benchmarks/measure_family.py hopper build/results h200 --commit 68cfc22
  the commands, without running them:
    python benchmarks/measure_family.py hopper build/results h200 --list

exit status: 0 all kinds were measured, 1 a kernel failed, 2 wrong usage or nothing was run,
130 interrupted
"""


@dataclass(frozen=True)
class Kind:
    """A kind of problem, and the kernels measured on it.

    name: in the file's name; "" for the family's main file. sizes: if empty, the operation's own.
    options: of pt_bench.py. steps: number of steps, counted from the last; None for all steps.
    all_dtypes: whether all dtypes of the family are measured, instead of one. winners: whether the
    winners of sweeps take part. d_head: the head size, if it is not that of the family's steps.
    """

    name: str
    sizes: tuple[int, ...] = ()
    options: tuple[str, ...] = ("--load", "sustained")
    steps: int | None = 3
    dtype: Element = Element.BF16
    all_dtypes: bool = False
    causal: bool = False
    winners: bool = True
    d_head: int | None = None

    def dtypes(self, family: Family) -> tuple[Element, ...]:
        """The element types that are measured."""
        return tuple(family.dtypes) if self.all_dtypes else (self.dtype,)

    def kernels(self, family: Family, built: Sequence[Config]) -> list[Config]:
        """The built configs that are measured, steps in order and then winners: those for the
        problems of the family's benchmark, with its head size and without a window or a softcap."""
        dtypes = self.dtypes(family)
        own = [
            variant
            for fixed in family.progression()
            for variant in fixed.variants()
            if variant.dtype in dtypes and is_causal(variant) == self.causal
            if variant.supports.sizes == self.head_sizes(fixed)
            if getattr(variant.supports, "fp8_cache", False) == (_FP8_CACHE in self.options)
            if not getattr(variant.supports, "exact", ())
        ]
        steps = list(dict.fromkeys(config.step for config in own))
        wanted = steps if self.steps is None else steps[-self.steps :]
        found = [config for config in own if config.step in wanted]
        if self.winners:
            found += winners(family, dtypes, self.causal)
        return [config for config in dict.fromkeys(found) if config in built]

    def head_sizes(self, fixed: Config) -> Mapping[str, int]:
        """The sizes of the kernels that are measured for a step with this fixed config."""
        own = fixed.supports.sizes
        return own if self.d_head is None else dict.fromkeys(own, self.d_head)

    def taking(self, family: Family, configs: Sequence[Config]) -> list[Config]:
        """Return the configs that take a problem of this kind; none if a size is taken by none."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_measured_options(parser)
        asked, _ = parser.parse_known_args(self.asked(family))
        operation = family.operation
        problems = [measured_problem(asked, operation, n) for n in asked_sizes(asked, operation)]
        of_sizes = [
            {config for config in configs if not config.refusal(problem.in_dtype(config.dtype))}
            for problem in problems
        ]
        return [c for c in configs if any(c in own for own in of_sizes)] if all(of_sizes) else []

    def command(self, family: Family, folder: Path, gpu: str) -> list[str]:
        """Arguments of pt_bench.py, without the kernels."""
        dtype = "all" if self.all_dtypes else self.dtype.short
        name = "_".join(filter(None, (family.name, self.name, gpu)))
        return [
            *("--rounds", "3", "--resume", "--json", str(folder / f"{name}.json")),
            *("--dtype", dtype, *self.asked(family)),
        ]

    def asked(self, family: Family) -> list[str]:
        """Options of pt_bench.py that ask for the kind's problems and loads."""
        first = family.progression()[0]
        compiled = {name for name, value in first.supports.options.items() if value is True}
        compiled |= {"causal"} if self.causal else set()
        d_head = self.head_sizes(first).get("d_head")
        usual = getattr(family.operation.measured(family.operation.measured_at[0]), "d_head", None)
        head = ["--d-head", str(d_head)] if d_head not in (None, usual) else []
        sizes = [swept_option(family.operation), *map(str, self.sizes)] if self.sizes else []
        return [*self.options, *(f"--{name}" for name in sorted(compiled)), *head, *sizes]


_SUSTAINED = ("--load", "sustained")
_FP8_CACHE = "--fp8-cache"
_ALL_STEPS = Kind("", (), (), None)
_CACHES = (2048, 8192)  # keys of a sequence, of 64 sequences and of 16
_ALONE = (1024, 8192, 131072)
_OF_64 = (*_SUSTAINED, "--batch", "64")
KINDS = {
    "attention_forward": (
        Kind("alone_causal", ALONE, (*_SUSTAINED, "--batch", "1"), causal=True),
        Kind("alone", ALONE, (*_SUSTAINED, "--batch", "1")),
        Kind("grouped", LENGTHS, (*_SUSTAINED, "--heads", "32", "--kv-heads", "8"), causal=True),
        Kind("causal", LENGTHS, steps=6, causal=True),
        Kind("causal_fp16", LENGTHS, dtype=Element.FP16, causal=True),
        Kind(
            *("mantissa", WHOLE, (*_SUSTAINED, "--mantissa-bits", "7"), 1),
            all_dtypes=True,
            winners=False,
        ),
        Kind("last_dtypes", WHOLE, all_dtypes=True),
        Kind("odd", ODD, steps=1),
        Kind("best", LENGTHS, (), steps=1),
        Kind("best_causal", LENGTHS, (), steps=1, causal=True),
        replace(_ALL_STEPS, sizes=WHOLE),
    ),
    "attention_backward": (
        Kind("grouped", LENGTHS, (*_SUSTAINED, "--heads", "32", "--kv-heads", "8"), steps=1),
        Kind("causal", LENGTHS, steps=1, causal=True),
        Kind("last_dtypes", LENGTHS, steps=1, all_dtypes=True),
        Kind("d64_causal", LENGTHS, steps=1, causal=True, d_head=64),
        Kind("d64", LENGTHS, steps=1, d_head=64),
        _ALL_STEPS,
    ),
    "decode": (
        Kind("alone", _ALONE, ("--batch", "1")),
        *(
            Kind(f"pages_{size}", _CACHES, (*_SUSTAINED, "--page-size", str(size)))
            for size in (1, 16, 64, 256)
        ),
        *(
            Kind(f"group_{32 // kv_heads}", _CACHES, (*_SUSTAINED, "--kv-heads", str(kv_heads)))
            for kv_heads in (32, 4, 2)  # 8 is usual
        ),
        # as many keys in sequences of one length, and of lengths that differ as those of texts do
        Kind("uniform", (2000,), _OF_64),
        Kind("lognormal", (8192,), (*_OF_64, "--total-k", "128000")),
        *(
            Kind(f"keys_per_piece_{n}", _CACHES, (*_SUSTAINED, "--keys-per-piece", str(n)), steps=1)
            for n in (256, 1024, 2048)
        ),
        Kind("dtypes", _CACHES, steps=1, all_dtypes=True),
        Kind("fp8", _CACHES, (*_SUSTAINED, _FP8_CACHE), all_dtypes=True, winners=False),
        Kind("fp8_alone", _ALONE, (_FP8_CACHE, "--batch", "1"), winners=False),
        _ALL_STEPS,
    ),
}
OTHER_KINDS = (
    Kind("dtypes", (), ("--load", "burst"), all_dtypes=True),
    _ALL_STEPS,
)  # of an operation without its own


def is_causal(config: Config) -> bool:
    """Whether a config is compiled for causal problems."""
    return bool(config.supports.options.get("causal"))


def winners(family: Family, dtypes: Sequence[Element], causal: bool) -> Iterator[Config]:
    """Configs of the family's last step that won a sweep on any GPU."""
    files = sorted((ROOT / "configs").glob("best_*.json"))
    entries = [entry for path in files for entry in load_best(path).best]
    entries = [entry for entry in entries if bool(entry.options.get("causal")) == causal]
    for step in reversed(family.steps):
        if own := [entry for entry in entries if entry.step == step]:
            for entry in own:
                for n in (None, *entry.sizes):
                    yield from (c for c in entry.at_size(n) if c.dtype in dtypes)
            return


def commands(
    family: Family, folder: Path, gpu: str, more: Sequence[str], only: Sequence[str] | None = None
) -> list[list[str]]:
    """Arguments of pt_bench.py for each kind of problem that the family takes, or for the named
    kinds. Raises ValueError for an unknown name."""
    built = listed_configs(ROOT)
    kinds = {kind.name or MAIN: kind for kind in KINDS.get(family.operation.name, OTHER_KINDS)}
    if unknown := set(only or ()) - {*kinds}:
        raise ValueError(
            f"{family.name} has no kind {', '.join(sorted(unknown))}: choose {', '.join(kinds)}"
        )
    chosen = [(kinds[name], kinds[name].kernels(family, built)) for name in only or kinds]
    found = [(kind, kind.taking(family, configs)) for kind, configs in chosen]
    return [
        [*kind.command(family, folder, gpu), *more, "--kernel", *(c.short_form() for c in configs)]
        for kind, configs in found
        if configs
    ]


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line, and the options that go to pt_bench.py; exits with 2 if it is
    wrong."""
    parser = make_parser(DESCRIPTION, EXAMPLES)
    parser.add_argument("family", choices=list(FAMILIES))
    parser.add_argument("folder", type=output_folder, metavar="FOLDER")
    parser.add_argument("gpu", metavar="GPU", help="end of the files' names, such as h200")
    parser.add_argument(
        "--kind", nargs="+", metavar="KIND", help=f"kinds ({MAIN}: all steps; default: all kinds)"
    )
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or list; returns the exit status."""
    arguments, more = parse_arguments(argv)

    def run() -> int:
        worst = 0
        family, folder = FAMILIES[arguments.family], arguments.folder
        for own in commands(family, folder, arguments.gpu, more, arguments.kind):
            command = [sys.executable, "tools/benchmark/pt_bench.py", *own]
            print(shlex.join(command), flush=True)
            if not arguments.list:
                arguments.folder.mkdir(parents=True, exist_ok=True)
                status = subprocess.run(command, cwd=ROOT, check=False).returncode
                worst = max(worst, status)
            if worst > 1:
                break
        return worst

    return run_tool(run, OSError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
