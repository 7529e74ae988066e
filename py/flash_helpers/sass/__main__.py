"""`python -m flash_helpers.sass`: list, report on, compare and extract machine code."""

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import sys

from flash_helpers.measure.sass_commands.command_line import main

if __name__ == "__main__":
    sys.exit(main())
