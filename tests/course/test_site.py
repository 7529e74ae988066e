"""The site in its files: what it is made of, where its links lead, what a build leaves behind."""

import html
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from built_site import require_builder, stand_ins
from fake_backend import load_tool

from flash_helpers.course import site
from flash_helpers.course.pages import GLOSSARY, PAGES, Page
from flash_helpers.course.site import SiteError, SiteWarningsError, build_site
from flash_helpers.course.site_links import broken_links
from flash_helpers.course.site_views import View, view_name
from flash_helpers.kernel_configs import STEPS
from flash_helpers.measure.results import RESULTS, BenchmarkResults, load_results

pytestmark = pytest.mark.slow

TOOL = "tools/docs/build_site.py"


def words(text: str) -> str:
    """Text of a page: its article without its tags."""
    article = text[text.index("<article") : text.index("</article>")]
    return html.unescape(re.sub(r"<[^>]+>", "", article))


def pages_of(*names: str) -> list[Page]:
    return [page for page in PAGES if page.name in names]


@pytest.fixture(scope="module")
def few_results(root: Path) -> BenchmarkResults:
    """The measurements of two steps and the libraries."""
    return load_results(root / RESULTS).of_steps(("v1", "v2"))


@pytest.fixture
def repository(
    root: Path, few_results: BenchmarkResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A repository with a README and two listed pages; its views of machine code are empty."""
    require_builder()
    folder = tmp_path / "repository"
    (folder / RESULTS).parent.mkdir(parents=True)
    few_results.save(folder / RESULTS)
    for name in ("assets", "images"):
        shutil.copytree(root / "docs" / name, folder / "docs" / name)
    (folder / "src").mkdir()
    (folder / "src/copy.cuh").write_text("// one\n// two\n__device__ void copy();\n")
    (folder / "README.md").write_text("# The course\n\n[the start](docs/00_start.md#the-idea)\n")
    (folder / "docs/00_start.md").write_text("# Start\n\n## The idea\n\nText.\n")
    (folder / "docs/01_base.md").write_text("# Base\n\nText.\n")
    monkeypatch.setattr(site, "PAGES", pages_of("00_start.md", "01_base.md"))
    monkeypatch.setattr(site, "step_views", lambda *arguments: stand_ins(STEPS.values()))
    return folder


class TestPages:
    """Markdown as GitHub shows it."""

    def page(self, repository: Path, text: str, **options: str) -> str:
        (repository / "docs/01_base.md").write_text(f"# Base\n\n{text}\n")
        output = repository.parent / "site"
        assert build_site(repository, output, **options) == []
        return (output / "01_base.html").read_text(encoding="utf-8")

    def test_markers_vanish_and_what_they_hold_stays(self, repository: Path) -> None:
        text = self.page(
            repository,
            "<!-- build:facts 2 -->\n\n| a | b |\n| --: | :-- |\n| 1 | two |\n\n<!-- /build -->\n\n"
            "<!-- benchmark:begin -->\nthe end\n<!-- benchmark:end -->",
        )
        assert re.search(r"<td[^>]*><p>two</p></td>", text)
        assert "the end" in words(text)
        assert "build:" not in text and "benchmark:" not in text

    def test_markers_in_code_are_text(self, repository: Path) -> None:
        text = self.page(repository, "```\n<!-- build:facts 2 -->\n<!-- /build -->\n```")
        assert "<!-- build:facts 2 -->" in words(text)

    def test_the_menu_takes_the_place_of_links_to_neighbours(self, repository: Path) -> None:
        text = self.page(
            repository,
            "Text.\n\n## Onwards\n\n"
            "<!-- build:next 1 -->\n\n[on, on](00_start.md)\n\n<!-- /build -->",
        )
        assert "on, on" not in text and "Onwards" not in text
        assert 'class="prev-page" href="00_start.html"' in text

    def test_folded_blocks_hold_markdown(self, repository: Path) -> None:
        text = self.page(
            repository,
            "1. Count.\n\n   <details><summary>Answer</summary>\n\n"
            "   ```diff\n   -int a;\n   +int b;\n   ```\n\n   </details>\n\n2. And again.",
        )
        folded = text.partition("<details>")[2].partition("</details>")[0]  # the menu's are open
        assert re.search(r'<span class="gi">\+int b;</span>', folded)
        assert text.count("<ol") == 1

    def test_alerts_and_task_lists_are_known(self, repository: Path) -> None:
        text = self.page(repository, "> [!NOTE]\n> Mind this.\n\n- [x] done\n")
        assert re.search(r'class="[^"]*\bnote\b', text)
        assert "[!NOTE]" not in text and 'type="checkbox"' in text

    def test_code_without_a_language_is_not_coloured(self, repository: Path) -> None:
        text = self.page(repository, "```\nfor x in S: import\n```")
        assert "<span></span>for x in S: import" in text

    @pytest.mark.parametrize(
        ("line", "indent"),
        [
            ("    int a;", 4),
            ("-    int a;", 5),
            ("    // int a;", 7),
            ("$ run", 2),
            (60 * "-", 1),  # a rule of a table
            (60 * " " + "a", 44),
        ],
    )
    def test_long_lines_of_code_are_marked_with_their_indent(
        self, repository: Path, line: str, indent: int
    ) -> None:
        long, short = line.ljust(89, "-"), line.ljust(88, "-")
        text = self.page(repository, f"```text\n{long}\n{short}\n```")
        assert re.findall(r'class="long" style="--indent:(\d+)ch">([^<]*)<', text) == [
            (str(indent), long)
        ]

    def test_links_lead_to_pages_and_places(self, repository: Path) -> None:
        text = self.page(
            repository, "[a](00_start.md#the-idea) [b](../README.md) [c](#more)\n\n## More"
        )
        assert 'href="00_start.html#the-idea"' in text
        assert 'href="index.html"' in text
        assert 'href="#more"' in text

    def test_links_to_terms_say_what_they_are(self, repository: Path, monkeypatch) -> None:
        listed = pages_of("00_start.md", "01_base.md", GLOSSARY.name)
        monkeypatch.setattr(site, "PAGES", listed)
        (repository / GLOSSARY).write_text("# G\n\n## H\n\n### cp.async\nA `copy`. And more.\n")
        text = self.page(repository, "[a](glossary.md#cpasync) [b](glossary.md)")
        assert re.search(r'href="glossary.html#cpasync" title="A copy."', text)
        assert text.count('title="A copy."') == 1

    def test_anchors_are_those_of_github(self, repository: Path) -> None:
        text = self.page(repository, "[a](#one_stage-of-2-x)\n\n## `one_stage`: of 2, x\n")
        assert 'id="one_stage-of-2-x"' in text

    def test_linked_sources_are_copied(self, repository: Path) -> None:
        text = self.page(repository, "[copy](../src/copy.cuh#L3) and [all](../src)")
        assert 'href="files/src/copy.cuh.html#L-3"' in text
        copy = repository.parent / "site/files/src/copy.cuh.html"
        assert re.search(r'id="L-3"[^>]*>.*?3.*?copy', copy.read_text(), re.DOTALL)
        folder = repository.parent / "site/files/src/index.html"
        assert 'href="copy.cuh.html"' in folder.read_text()

    def test_linked_sources_can_be_shown_where_they_are_hosted(self, repository: Path) -> None:
        address = "https://example.org/owner/name/blob/main"
        text = self.page(repository, "[copy](../src/copy.cuh#L3)", repo_url=f"{address}/")
        assert f'href="{address}/src/copy.cuh#L3"' in text
        assert not (repository.parent / "site/files").exists()

    def test_pictures_are_copied(self, repository: Path) -> None:
        (repository / "docs/images/a.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
        text = self.page(repository, "![A square](images/a.svg) ![Lit](images/a.svg#step-1)")
        plain, lit = re.findall(r'<img alt="([^"]*)" src="([^"]*)"', text)
        assert (plain[0], lit[0]) == ("A square", "Lit")
        assert (repository.parent / "site" / plain[1]).is_file()
        assert lit[1] == f"{plain[1]}#step-1"


class TestFaults:
    """Warnings of a build, and the site that is left when it fails."""

    @pytest.mark.parametrize(
        ("text", "warning"),
        [
            (
                "[a](02_swizzle.md)",
                "docs/01_base.md:3: WARNING: link to 02_swizzle.md: there is no",
            ),
            ("[a](../src/move.cuh)", "there is no src/move.cuh in the repository"),
            ("[a](../../x)", "there is no ../x in the repository"),
            ("![a](images/a.svg)", "there is no docs/images/a.svg in the repository"),
            ("[a](00_start.md#the-ide)", "01_base.html links 00_start.html#the-ide: there is no"),
            ("[a](#nowhere)", "01_base.html links #nowhere: there is no such place"),
            ('<img src="https://example.org/a.png">', "nothing may come from elsewhere"),
            ("```nonsense\nx\n```", "nonsense"),
        ],
    )
    def test_are_told_with_their_place(self, repository: Path, text: str, warning: str) -> None:
        (repository / "docs/01_base.md").write_text(f"# Base\n\n{text}\n")
        warnings = build_site(repository, repository.parent / "site")
        assert len(warnings) == 1
        assert warning in warnings[0]

    def test_pages_and_the_list_of_pages_must_agree(self, repository: Path) -> None:
        (repository / "docs/01_base.md").rename(repository / "docs/other.md")
        assert build_site(repository, repository.parent / "site") == [
            "docs/01_base.md is in the list of pages, and not there",
            "docs/other.md is not in the list of pages",
        ]

    def test_views_need_the_sources_that_the_library_was_built_from(
        self, repository: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, *rest = STEPS.values()
        view = View(view_name(first), "<html></html>", ("previous_kernels/v1/forward_kernel.cuh",))
        monkeypatch.setattr(site, "step_views", lambda *arguments: iter([view, *stand_ins(rest)]))
        (warning,) = build_site(repository, repository.parent / "site")
        assert "views/step_01.html cannot show previous_kernels/v1/forward_kernel.cuh" in warning

    def test_strict_leaves_the_site_that_was_there(self, repository: Path) -> None:
        output = repository.parent / "site"
        build_site(repository, output, strict=True)
        before = (output / "01_base.html").read_text()
        (repository / "docs/01_base.md").write_text("# Base\n\n[a](nowhere.md)\n")
        with pytest.raises(SiteWarningsError, match=r"docs/nowhere\.md"):
            build_site(repository, output, strict=True)
        assert (output / "01_base.html").read_text() == before
        assert {path.name for path in repository.parent.iterdir()} == {"repository", "site"}

    @pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
    def test_a_crash_leaves_the_site_that_was_there(
        self, repository: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        output = repository.parent / "site"
        build_site(repository, output)
        before = (output / "index.html").read_text()
        (repository / "README.md").write_text("# Another course\n")

        def fail(*arguments: object) -> Iterator[View]:
            raise error

        monkeypatch.setattr(site, "step_views", fail)
        with pytest.raises(type(error)):
            build_site(repository, output)
        assert (output / "index.html").read_text() == before
        assert {path.name for path in repository.parent.iterdir()} == {"repository", "site"}

    def test_a_new_site_replaces_the_old_one_as_a_whole(self, repository: Path) -> None:
        output = repository.parent / "site"
        build_site(repository, output)
        (output / "left_over.html").write_text("")
        build_site(repository, output)
        assert not (output / "left_over.html").exists()

    def test_what_is_not_a_site_is_not_replaced(self, repository: Path) -> None:
        output = repository.parent / "home"
        output.mkdir()
        (output / "letter.txt").write_text("mine")
        with pytest.raises(SiteError, match="is not a site: name another folder"):
            build_site(repository, output)
        assert (output / "letter.txt").read_text() == "mine"

    def test_a_marker_without_its_partner_is_named(self, repository: Path) -> None:
        (repository / "docs/01_base.md").write_text("# Base\n\n<!-- build:facts 1 -->\n")
        with pytest.raises(SiteError, match=r"docs/01_base\.md:3: "):
            build_site(repository, repository.parent / "site")

    def test_missing_packages_are_named_with_the_way_out(
        self, repository: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(site.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(SiteError, match=r"needs sphinx, myst_parser, furo.*'\.\[docs\]'"):
            build_site(repository, repository.parent / "site")


class TestBrokenLinks:
    """The checker sees what it is there for."""

    def faults(self, folder: Path, body: str) -> list[str]:
        (folder / "other.html").write_text('<p id="here"></p><a name="there"></a>')
        (folder / "page.html").write_text(f"<html><body>{body}</body></html>")
        return broken_links(folder)

    @pytest.mark.parametrize(
        "body",
        [
            '<a href="other.html">x</a>',
            '<a href="other.html#here">x</a> <a href="other.html#there">x</a>',
            '<a href="https://example.org/">elsewhere</a>',
            '<a href="#">top</a>',
            '<img src="data:image/png;base64,xx">',
            '<link href="other.html?v=1">',
        ],
    )
    def test_what_leads_somewhere_is_no_fault(self, tmp_path: Path, body: str) -> None:
        assert self.faults(tmp_path, body) == []

    @pytest.mark.parametrize(
        "body",
        [
            '<a href="absent.html">x</a>',
            '<a href="other.html#nowhere">x</a>',
            '<a href="#nowhere">x</a>',
            '<img src="absent.png">',
            '<script src="https://example.org/x.js"></script>',
            '<link rel="stylesheet" href="//example.org/x.css">',
            '<iframe src="https://example.org/"></iframe>',
        ],
    )
    def test_what_leads_nowhere_is_one(self, tmp_path: Path, body: str) -> None:
        (fault,) = self.faults(tmp_path, body)
        assert fault.startswith("page.html ")


class TestTool:
    def run(self, root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        require_builder()
        return subprocess.run(
            [sys.executable, str(root / TOOL), *arguments],
            capture_output=True,
            text=True,
            timeout=300,
        )

    def test_refuses_a_folder_that_is_no_site(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "letter.txt").write_text("mine")
        done = self.run(root, "--output", str(tmp_path))
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and str(tmp_path) in done.stderr

    def test_a_folder_that_is_no_repository_is_wrong_usage(self, root: Path, tmp_path) -> None:
        done = self.run(root, "--root", str(tmp_path), "--output", str(tmp_path / "site"))
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and "h100.json" in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_strict_faults_exit_with_1(self, repository: Path, monkeypatch, capsys) -> None:
        monkeypatch.setattr(site, "PAGES", pages_of("01_base.md", "02_swizzle.md"))
        output = repository.parent / "site"
        arguments = ["--root", str(repository), "--output", str(output), "--strict"]
        assert load_tool(TOOL).main(arguments) == 1
        error = capsys.readouterr().err
        assert "docs/02_swizzle.md is in the list of pages, and not there" in error
        assert not output.exists()
