"""Print the kernels, the GPU that they would run on, their compiler, and where the parts of a
transformer block run; or run a command."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from typing import Any

from flash_helpers.compile.jit import default_jit
from flash_helpers.console.command_line import make_parser, print_text, run_tool
from flash_helpers.runtime import library

PROG = "python -m flash_attention"

DESCRIPTION = """\
Print the kernels, the GPU that they would run on, their compiler, and where the parts of a block of
flash_attention.multimodal run; or run a command.

commands, each with a --help of its own:
  cache     list and remove the kernels that were compiled at first use
  export    write kernels for programs that launch them without Python
  replay    run a call that the log of calls saved again
"""

EXAMPLES = """\
examples:
  what is installed:
    python -m flash_attention
  which kernels were compiled at first use:
    python -m flash_attention cache

exit status: 0 done, 1 the library cannot be loaded, 2 wrong usage, 130 interrupted
"""

COMMANDS = {
    "cache": "flash_helpers.compile.cache_command",
    "export": "flash_helpers.export.command",
    "replay": "flash_helpers.check.replay",
}
"""Modules of the commands, each with a `main(arguments)`; only the one that runs is
imported."""


def device_text() -> str:
    """The current CUDA device, or the reason why there is none."""
    import torch  # late, so that --help is fast

    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(index)
        return f"cuda:{index} {torch.cuda.get_device_name(index)}, sm_{major}{minor}"
    if torch.version.cuda is None:
        return "none (this torch is built for the CPU only)"
    return "none (torch finds no CUDA device or no driver for it)"


def compiler_text() -> str:
    """The compiler of kernels at first use, or the reason why there is none."""
    try:
        return default_jit().compiler.name
    except RuntimeError as error:
        return f"none ({error})"


def summary() -> dict[str, Any]:
    """The printed facts, ready for JSON."""
    import torch

    from flash_attention.multimodal import places

    major, minor = library.cuda_version()
    kernels = [config.short_form() for config in library.kernels()]
    return {
        "library": str(library.library_path()),
        "cuda": f"{major}.{minor}",
        "architectures": library.architectures(),
        "torch": torch.__version__,
        "device": device_text(),
        "compiler": compiler_text(),
        "cache": str(default_jit().cache.writable),
        "block": [asdict(place) for place in places()],
        "kernels": kernels,
    }


def main(argv: list[str] | None = None) -> int:
    """Print the summary, or run the command that is named first; returns the exit status."""
    parser = make_parser(DESCRIPTION, EXAMPLES, PROG)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "command", nargs="?", choices=COMMANDS, metavar="COMMAND", help="one of the above"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the command")
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        return run_tool(lambda: print_summary(arguments.json))
    module = importlib.import_module(COMMANDS[arguments.command])
    return module.main(arguments.arguments)


def print_summary(as_json: bool) -> int:
    """Print the summary; returns 1 if the library cannot be loaded."""
    try:
        found = summary()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    from flash_attention.multimodal import places_table

    kernels = found.pop("kernels")
    del found["block"]
    lines = [
        f"{name:14}{' '.join(value) if isinstance(value, list) else value}"
        for name, value in [*found.items(), ("kernels", len(kernels))]
    ]
    lines += [f"  {name}" for name in kernels]
    print_text("\n".join([*lines, "", places_table().text()]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
