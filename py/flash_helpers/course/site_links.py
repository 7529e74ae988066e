"""Where the links of the pages lead in the site, and whether they lead anywhere."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from posixpath import normpath
from urllib.parse import quote, unquote, urlsplit

FILES = "files"  # folder of the site with copies of the repository's files
LINE_ANCHOR = "L"  # line 7 of a copy is #L-7; elsewhere it is #L7

_LINE = re.compile(r"L(\d+)(?:-L\d+)?")
# Most tags end something or highlight it: they are left out before parsing, which takes longer.
_TELLING_NOTHING = re.compile(r'<span class="[^"<>]*">|</(?!script\b|style\b)\w+>')
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class LinkError(ValueError):
    """A link that leads nowhere; the message says so."""


@dataclass
class LinkTargets:
    """The places of the repository that links of its pages may name.

    root: of the repository. documents: the Markdown files that are pages, and the pages' names.
    made: files that only the site has. repo_url: where all other files can be seen; None for copies
    in the site. wanted: the files and folders to be copied, in the order of the links to them.
    """

    root: Path
    documents: Mapping[PurePosixPath, str]
    made: Collection[PurePosixPath] = ()
    repo_url: str | None = None
    wanted: deque[PurePosixPath] = field(default_factory=deque)

    def file(self, page: PurePosixPath, link: str) -> PurePosixPath:
        """Target of a relative link of the page at `page`, relative to the root.

        Raises LinkError if it is not there.
        """
        path = PurePosixPath(normpath(page.parent / unquote(urlsplit(link).path)))
        if path.parts[:1] == ("..",) or not (self.root / path).exists():
            raise LinkError(f"link to {link}: there is no {path} in the repository")
        return path

    def address(self, page: PurePosixPath, link: str) -> str:
        """Address of a relative link in the site, where all pages lie side by side.

        Raises LinkError if what it names is not there.
        """
        if PurePosixPath(link) in self.made:
            return link
        path = self.file(page, link)
        fragment = urlsplit(link).fragment
        if path in self.documents:
            address = f"{self.documents[path]}.html"
        elif self.repo_url is not None:
            address = f"{self.repo_url.rstrip('/')}/{quote(str(path))}"
        else:
            self.wanted.append(path)
            name = path / "index" if (self.root / path).is_dir() else path
            address = f"{FILES}/{quote(str(name))}.html"
            fragment = _LINE.sub(rf"{LINE_ANCHOR}-\1", fragment)
        return f"{address}#{fragment}" if fragment else address


class _Page(HTMLParser):
    """The places of a page that a link may name, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: dict[str, None] = {}
        self.loaded: dict[str, None] = {}
        self.feed(_TELLING_NOTHING.sub("", text))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.places.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links[values["href"]] = None
        elif _LOADED.get(tag) in values:
            self.loaded[values[_LOADED[tag]]] = None


def broken_links(site: Path) -> list[str]:
    """Links of a site's pages that lead nowhere, and files that they load from elsewhere; a line
    each."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in {**page.links, **page.loaded}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    found.append(f"{name} loads {link}: nothing may come from elsewhere")
                continue
            target = Path(normpath(path.parent / unquote(parts.path))) if parts.path else path
            if not target.is_file():
                found.append(f"{name} links {link}: there is no such file in the site")
            elif target in pages and parts.fragment not in {"", *pages[target].places}:
                found.append(f"{name} links {link}: there is no such place in that page")
    return found
