#!/usr/bin/env python3
"""Compare the machine code of kernels: resources, instructions, and changes."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.measure.sass_commands import compare
from flash_helpers.measure.sass_commands.compare import EXAMPLES, parse_arguments

__all__ = ["EXAMPLES", "main", "parse_arguments"]

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return compare.main(argv, ROOT)


if __name__ == "__main__":
    sys.exit(main())
