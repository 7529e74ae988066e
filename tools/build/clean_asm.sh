#!/usr/bin/env bash
# Strip from a SASS listing what moves when an instruction does: flash_helpers.sass.show.clean_listing,
# which tells its usage.
set -euo pipefail

python=${PYTHON:-python3}
if ! "$python" -c 'import flash_helpers' 2> /dev/null; then
    echo "flash_helpers is not installed for $python: pip install ./py, or name another interpreter" \
        "in PYTHON" >&2
    exit 2
fi
exec "$python" -m flash_helpers.sass.show.clean_listing "$@"
