#!/usr/bin/env python3
"""Disassemble kernels, with control words, live registers and source lines."""

from __future__ import annotations

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import sys

from flash_helpers.measure.sass_commands.extract import EXAMPLES, extract, main, parse_arguments

__all__ = ["EXAMPLES", "extract", "main", "parse_arguments"]


if __name__ == "__main__":
    sys.exit(main())
