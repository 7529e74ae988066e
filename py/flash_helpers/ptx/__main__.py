"""`python -m flash_helpers.ptx`: check, run and count kernels without a GPU."""

if __name__ == "__main__":
    import flash_helpers.console.quiet_start  # noqa: F401

import sys

from flash_helpers.host.command_line import main

if __name__ == "__main__":
    sys.exit(main())
