"""`python -m flash_attention cache`: list and remove compiled kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone

from flash_helpers.compile.cache import FOLDER_VARIABLE, Entry
from flash_helpers.compile.jit import Jit, default_jit, units_of
from flash_helpers.console.command_line import make_parser, not_negative, print_text, run_tool
from flash_helpers.console.tables import Table, json_text
from flash_helpers.kernel_configs import config_from_short_form

PROGRAM = "python -m flash_attention cache"

DESCRIPTION = f"""\
List the kernels that were compiled at first use and are kept in the cache: the folder that
{FOLDER_VARIABLE} names, or flash_attention in the user's cache folder. With --clear they are
removed instead; a kernel that is needed again is compiled again.

A kernel is stale if its sources, its compiler or the flags have changed, so that no call takes it
any more.
"""

EXAMPLES = """\
examples:
  how much there is:
    python -m flash_attention cache
  remove what earlier versions of the sources have left:
    python -m flash_attention cache --stale --clear
  remove what was not used for a month:
    python -m flash_attention cache --days 30 --clear
  remove everything:
    python -m flash_attention cache --clear

exit status: 0 done, 2 wrong usage, no compiler or a folder that cannot be written, 130 interrupted
"""

CURRENT, STALE, UNKNOWN = "current", "stale", "unknown"
_DAY_S = 24 * 3600


def state_of(jit: Jit, entry: Entry) -> str:
    """Return whether a call would take an entry now; UNKNOWN for a kernel of no config.

    Raises BuildError without a compiler.
    """
    try:
        units = units_of(config_from_short_form(entry.name.partition("__")[0]))
    except ValueError:
        return UNKNOWN
    recipes = [jit.recipe(u, entry.target, entry.debug) for u in units if u.name == entry.name]
    return CURRENT if entry.key in map(jit.key, recipes) else STALE


def age_text(seconds: float) -> str:
    """Return a duration in its largest unit, such as "3 h"."""
    for unit, name in ((_DAY_S, "days"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return "now"


def size_text(entries: Sequence[Entry]) -> str:
    """Return the number of entries and their size."""
    n = len(entries)
    size = sum(entry.n_bytes for entry in entries) / 1e6
    return f"{n} kernel{'' if n == 1 else 's'}, {size:.1f} MB"


def main(argv: Sequence[str] | None = None) -> int:
    """List or remove entries; returns the exit status."""
    parser = make_parser(DESCRIPTION, EXAMPLES, PROGRAM)
    parser.add_argument("--stale", action="store_true", help="only those that no call takes")
    parser.add_argument(
        "--days",
        type=not_negative,
        default=0,
        metavar="N",
        help="only those that were not used for N days",
    )
    parser.add_argument("--clear", action="store_true", help="remove them instead of listing them")
    parser.add_argument("--json", action="store_true", help="list them as JSON")
    arguments = parser.parse_args(argv)
    if arguments.clear and arguments.json:
        parser.error("--json lists, and --clear removes: give one of them")
    return run_tool(
        lambda: run(arguments.stale, arguments.days, arguments.clear, arguments.json),
        *(OSError, RuntimeError),
    )


def run(stale: bool, days: int, clear: bool, as_json: bool) -> None:
    """List the entries, or remove them. Raises BuildError, OSError and RuntimeError."""
    jit = default_jit()
    cache, now = jit.cache, time.time()
    entries = [entry for entry in cache.entries() if now - entry.used >= days * _DAY_S]
    states = {}
    if stale or not clear:
        states = {entry: state_of(jit, entry) for entry in entries}
        entries = [entry for entry in entries if not stale or states[entry] == STALE]
    if clear:
        for entry in entries:
            cache.remove(entry)
        cache.sweep()
        cache.remove_units()
        print(f"removed from {cache.folder}: {size_text(entries)}")
    elif as_json:
        print_text(
            json_text(
                {
                    "folder": str(cache.folder),
                    "entries": [
                        {
                            "name": entry.name,
                            "target": entry.target,
                            "debug": entry.debug,
                            "state": states[entry],
                            "compiler": entry.compiler,
                            "bytes": entry.n_bytes,
                            "used": datetime.fromtimestamp(entry.used, timezone.utc).isoformat(),
                            "folder": entry.folder.name,
                        }
                        for entry in entries
                    ],
                }
            )
        )
    else:
        table = Table(
            ("kernel", "target", "state", "compiler", "KB", "unused for"),
            [
                (
                    entry.name,
                    entry.target + (" debug" if entry.debug else ""),
                    states[entry],
                    entry.compiler,
                    f"{entry.n_bytes / 1e3:.0f}",
                    age_text(now - entry.used),
                )
                for entry in entries
            ],
            "llll",
        )
        title = f"{cache.folder}: {size_text(entries)}"
        print_text(f"{title}\n{table.text()}\n" if entries else f"{title}\n")
