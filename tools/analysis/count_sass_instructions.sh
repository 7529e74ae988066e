#!/usr/bin/env bash
# Count the instructions of SASS by opcode: flash_helpers.sass.show.listing_counts, whose --help tells
# the usage.
set -euo pipefail

python=${PYTHON:-python3}
if ! "$python" -c 'import flash_helpers' 2> /dev/null; then
    echo "flash_helpers is not installed for $python: pip install ./py, or name another interpreter" \
        "in PYTHON" >&2
    exit 2
fi
exec "$python" -m flash_helpers.sass.show.listing_counts "$@"
