#!/usr/bin/env python3
"""Write the map from config to kernel, src/include/flash_kernels.cuh."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "py"))

from flash_helpers.command_line import make_parser, print_text  # noqa: E402
from flash_helpers.compile.codegen import GENERATOR, MAP_HEADER, kernel_map_header  # noqa: E402
from flash_helpers.files import text_diff, write_if_different  # noqa: E402
from flash_helpers.kernel_configs import (  # noqa: E402
    get_kernels_to_build,
    read_configs,
    with_general_siblings,
)

WINNERS = "configs/best_*.json"

EXAMPLES = """\
examples:
  # after a change of the registry, or after a sweep (tools/benchmark/autotune.py)
  python tools/build/generate_kernel_instantiations.py

  # is the committed header up to date? (exit 1 and a diff if not)
  python tools/build/generate_kernel_instantiations.py --check

  # build other configs too: a JSON list of short forms or of config fields
  python tools/build/generate_kernel_instantiations.py --configs configs/mine.json
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; print a diff and exit 1 if the header is stale",
    )
    parser.add_argument(
        "--configs",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help=f"JSON files of configs to build beside the registry's and those of {WINNERS}",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / MAP_HEADER,
        metavar="FILE",
        help=f"header to write or check (default: {MAP_HEADER})",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    configs = get_kernels_to_build()
    for path in [*sorted(ROOT.glob(WINNERS)), *arguments.configs]:
        try:
            configs += read_configs(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
    configs = with_general_siblings(configs)
    text = kernel_map_header(configs)
    if arguments.check:
        found = arguments.output.read_text() if arguments.output.is_file() else ""
        if diff := text_diff(str(arguments.output), found, text):
            print_text(diff)
            print(f"{arguments.output} is stale: run {GENERATOR}", file=sys.stderr)
            return 1
        return 0
    written = write_if_different(arguments.output, text)
    print(f"{arguments.output}: {len(configs)} kernels{'' if written else ', unchanged'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
