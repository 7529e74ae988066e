"""Additions to Sphinx: links as GitHub has them, pictures with a step lit, the way to a step's
view, the folds of the menu, long lines of code, and the definition of a term at the links to it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

from flash_helpers.course.glossary import Term
from flash_helpers.course.pages import GLOSSARY
from flash_helpers.course.site_code import WrappingFormatter
from flash_helpers.course.site_links import FILES, LinkError, LinkTargets
from flash_helpers.course.site_sources import SourcePages

_BEFORE_SPHINX, _AFTER_FURO = 100, 900  # their own handlers have 500
_COMMENT = re.compile(r"\s*<!--.*?-->\s*", re.DOTALL)
_PART = re.compile(r'<p class="caption"[^>]*>(.*?)</p>\s*(<ul\b.*?</ul>)', re.DOTALL)
_SVG_SIZE = re.compile(r'<svg\b[^>]*\bviewBox="\S+ \S+ (\S+) ([^\s"]+)"')
_MENU_SCRIPT = "_static/menu.js"
_log = logging.getLogger(__name__)


@dataclass
class SitePages:
    """The handlers of one build.

    source: the folder that Sphinx reads. targets: of the links. paths: the files of the pages by
    name, relative to the root of the repository. menus: title and name of each page, by caption.
    cards: HTML to stand below the title of a page, by its name. terms: of the glossary. on_page:
    called once for each page that was read and each that is written.
    """

    source: Path
    targets: LinkTargets
    paths: Mapping[str, PurePosixPath]
    menus: Mapping[str, Sequence[tuple[str, str]]]
    cards: Mapping[str, str]
    terms: Sequence[Term]
    on_page: Callable[[], object]
    _source_menus: dict[int, Callable[..., str]] = field(default_factory=dict)

    def connect(self, app: Sphinx) -> None:
        """Take part in a build."""
        app.add_node(nodes.image, override=True, html=(_visit_image, None))
        app.connect("doctree-read", self._read, priority=_BEFORE_SPHINX)
        app.connect("html-collect-pages", self._more_pages)
        app.connect("html-page-context", self._share_menu, priority=_BEFORE_SPHINX)
        app.connect("html-page-context", self._written, priority=_AFTER_FURO)
        assert isinstance(app.builder, StandaloneHTMLBuilder)
        app.builder.highlighter.formatter = WrappingFormatter

    def _read(self, app: Sphinx, document: nodes.document) -> None:
        name = app.env.docname
        for section in list(document.findall(nodes.section)):
            below = section.children[1:]
            if below and all(map(_is_comment, below)) and section.parent is not document:
                section.parent.remove(section)
        for comment in list(document.findall(_is_comment)):
            comment.parent.remove(comment)
        for reference in list(document.findall(nodes.reference)):
            self._link(name, reference)
        for image in list(document.findall(nodes.image)):
            self._image(name, image)
        if name in self.cards:
            title = next(document.findall(nodes.title))
            title.parent.insert(title.parent.index(title) + 1, _raw(self.cards[name]))
        if name == app.config.root_doc:
            document[0].extend(_toctree(name, *menu) for menu in self.menus.items())
        self.on_page()

    def _link(self, name: str, reference: nodes.reference) -> None:
        link = reference.get("refuri", "")
        parts = urlsplit(link)
        if not parts.path or parts.scheme or parts.netloc:
            return
        try:
            address = self.targets.address(self.paths[name], link)
        except LinkError as error:
            _log.warning(str(error), location=reference)
            reference.replace_self(reference.children)
            return
        reference["refuri"] = address
        if address in self._hints:
            reference["reftitle"] = self._hints[address]

    @functools.cached_property
    def _hints(self) -> Mapping[str, str]:
        """Text that the pointer shows over a link to a term, by the link's address."""
        return {f"{GLOSSARY.stem}.html#{term.anchor}": term.sentence for term in self.terms}

    def _image(self, name: str, image: nodes.image) -> None:
        try:
            path = self.targets.file(self.paths[name], image["uri"])
        except LinkError as error:
            _log.warning(str(error), location=image)
            image.replace_self(nodes.Text(image.get("alt", "")))
            return
        copy = self.source / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((self.targets.root / path).read_bytes())
        image["fragment"] = urlsplit(image["uri"]).fragment
        image["uri"] = str(path)
        if _is_panorama(copy):
            image["classes"].append("panorama")

    def _more_pages(self, app: Sphinx) -> Iterator[tuple[str, Mapping[str, Any], str]]:
        for name, title, body in SourcePages(self.targets):
            yield name, {"title": title, "body": f'<div class="source">{body}</div>'}, "page.html"

    def _share_menu(
        self, app: Sphinx, name: str, template: str, context: dict[str, Any], *_: object
    ) -> None:
        """Make the menu of the pages of sources once for each depth of folders: it marks none of
        them, and differs in the way to its pages alone. Sphinx takes 0.1 s for each."""
        if PurePosixPath(name).parts[0] == FILES:
            made = functools.cache(context["toctree"])
            context["toctree"] = self._source_menus.setdefault(name.count("/"), made)

    def _written(
        self, app: Sphinx, name: str, template: str, context: dict[str, Any], *_: object
    ) -> None:
        script = context["pathto"](_MENU_SCRIPT, resource=True)
        menu = _folded(context["furo_navigation_tree"])
        context["furo_navigation_tree"] = f'{menu}<script src="{script}"></script>'
        if name in self.paths:
            self.on_page()


def _visit_image(translator: HTML5Translator, image: nodes.image) -> None:
    """Write an image as Sphinx does, with the fragment of its address, which Sphinx drops."""
    type(translator).visit_image(translator, image)
    if image["fragment"]:
        address = f'src="{image["uri"]}'
        translator.body[-1] = translator.body[-1].replace(address, f"{address}#{image['fragment']}")


def _is_panorama(path: Path) -> bool:
    """Whether a picture is so wide and low that a phone has to scroll along it to read it."""
    size = _SVG_SIZE.search(path.read_text(encoding="utf-8")) if path.suffix == ".svg" else None
    return size is not None and float(size[1]) > 2 * float(size[2])


def _folded(menu: str) -> str:
    """The menu with each part below a caption as a fold, all of them open: without scripts they
    stay so."""
    return _PART.sub(r'<details open><summary class="caption">\1</summary>\2</details>', menu)


def _is_comment(node: nodes.Node) -> bool:
    return isinstance(node, nodes.raw) and _COMMENT.fullmatch(node.astext()) is not None


def _raw(html: str) -> nodes.raw:
    return nodes.raw("", html, format="html")


def _toctree(name: str, caption: str, entries: Sequence[tuple[str, str]]) -> addnodes.toctree:
    """A part of the menu, as the directive of that name makes it."""
    return addnodes.toctree(
        "",
        parent=name,
        entries=entries,
        includefiles=[page for _, page in entries],
        maxdepth=1,
        caption=caption,
        rawcaption=caption,
        glob=False,
        hidden=True,
        includehidden=False,
        numbered=0,
        titlesonly=True,
    )
