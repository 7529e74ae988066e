#!/usr/bin/env bash
# Strip a SASS listing of addresses and other text that shifts with every inserted instruction:
# flash_helpers.sass.show.clean_listing, whose --help tells the usage.
set -euo pipefail

python=${PYTHON:-python3}
if ! "$python" -c 'import flash_helpers' 2> /dev/null; then
    echo "flash_helpers is not installed for $python: pip install ./py, or name another interpreter" \
        "in PYTHON" >&2
    exit 2
fi
exec "$python" -m flash_helpers.sass.show.clean_listing "$@"
