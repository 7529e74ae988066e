"""Panes of a page in files of their own: a script for each pane of each kernel, which the page
loads when the pane is first looked at. A page opened from a file can load a script, but no JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from flash_helpers.sass.show.page import PageKernel, kernel_data

_LINKS = {"sass": ("ptx", "chain"), "ptx": ("line", "chain")}  # columns that link the panes' lines
_OF_CUDA = ("files", "main", "chains")


def pane_scripts(
    page: PageKernel, sources: Mapping[str, str], files: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Name and text of the script file of each pane of a kernel.

    `sources`: as for `page.page_html`. `files`: the names by pane, as the page has them. The file
    of the CUDA pane holds what links the lines of all three panes, too.
    """
    data = kernel_data(page)
    named = {path: sources[path].split("\n") for path in data["files"] if path in sources}
    cuda: dict[str, Any] = {"sources": named, **{key: data.pop(key) for key in _OF_CUDA}}
    for pane, columns in _LINKS.items():
        cuda[pane] = {column: data[pane].pop(column) for column in columns}
    ptx = {"ptx": data.pop("ptx")}
    for pane, part in (("cuda", cuda), ("ptx", ptx), ("sass", data)):
        yield files[pane], f"viewPart({json.dumps(files[pane])}, {_readable(part)});\n"


def _readable(value: Any) -> str:
    """JSON with each line of code on a line of its own, which can be read without the page."""
    if isinstance(value, dict):
        items = ",\n".join(f"{json.dumps(key)}:{_readable(item)}" for key, item in value.items())
        return f"{{{items}}}"
    if isinstance(value, list) and value and isinstance(value[0], str):
        lines = ",\n".join(map(json.dumps, value))
        return f"[\n{lines}\n]"
    return json.dumps(value, separators=(",", ":"))
