"""Files and folders of the repository as pages of the site, for links that lead out of the docs."""

from __future__ import annotations

import html
import subprocess
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

from flash_helpers.course.site_links import FILES, LINE_ANCHOR, LinkTargets

_MOST_COLOURED = 200_000  # bytes; what is larger is data, and is shown without colours


class SourcePages:
    """Makes the pages of what was linked, and of what the linked folders hold."""

    def __init__(self, targets: LinkTargets) -> None:
        self._targets = targets

    @cached_property
    def _files(self) -> frozenset[PurePosixPath]:
        """Files of the repository: with git all that it does not ignore."""
        root = self._targets.root
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        try:
            listed = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True)
            names = [Path(name) for name in listed.stdout.split("\0") if name]
        except (OSError, subprocess.CalledProcessError):
            names = [path.relative_to(root) for path in root.rglob("*")]
        return frozenset(PurePosixPath(name) for name in names if (root / name).is_file())

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        """Name without `.html`, title and HTML of each page."""
        done: set[PurePosixPath] = set()
        while self._targets.wanted:
            path = self._targets.wanted.popleft()
            if path in done:
                continue
            done.add(path)
            if (self._targets.root / path).is_dir():
                yield f"{FILES}/{path / 'index'}", f"{path}/", self._folder(path)
            else:
                yield f"{FILES}/{path}", str(path), self._file(path)

    def _folder(self, path: PurePosixPath) -> str:
        below = [file.relative_to(path) for file in self._files if file.is_relative_to(path)]
        folders = sorted({file.parts[0] for file in below if len(file.parts) > 1})
        files = sorted(file.name for file in below if len(file.parts) == 1)
        self._targets.wanted.extend(path / name for name in (*folders, *files))
        links = [(f"{quote(name)}/index.html", f"{name}/") for name in folders]
        links += [(f"{quote(name)}.html", name) for name in files]
        items = "".join(
            f'<li><a href="{address}"><code>{html.escape(name)}</code></a></li>'
            for address, name in links
        )
        return f"<h1><code>{html.escape(str(path))}/</code></h1><ul>{items}</ul>"

    def _file(self, path: PurePosixPath) -> str:
        data = (self._targets.root / path).read_bytes()
        heading = f"<h1><code>{html.escape(str(path))}</code></h1>"
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return f"{heading}<p>{len(data):,} bytes that are no text.</p>"
        try:
            lexer = get_lexer_for_filename(path.name) if len(data) <= _MOST_COLOURED else None
        except ClassNotFound:
            lexer = None
        formatter = HtmlFormatter(linenos="inline", lineanchors=LINE_ANCHOR, wrapcode=True)
        return heading + highlight(text, lexer or TextLexer(), formatter)
