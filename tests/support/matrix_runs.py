"""Which families' matrix tests are due, and the record of those that have passed."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from matrix_digest import MatrixDigest, load_record, save_record

from flash_helpers.registry.family import Family

MARKER = "matrix"
OPTION = "--due"
KEY = "matrix_runs"

DigestOf = Callable[[Family[Any], Iterable[Path]], MatrixDigest]


def why_due(family: Family[Any], digest: MatrixDigest, recorded: MatrixDigest | None) -> list[str]:
    """Return the reasons why the matrix tests of a family must run; none if they need not."""
    return digest.differences(recorded) if family.closed else ["it is not closed"]


def family_of(item: pytest.Item) -> str:
    """Return the family that a matrix test is of; "" for a test of another tier, and for one that
    needs a GPU, of which there is no record.

    Raises UsageError for a matrix test that does not name its family.
    """
    marker = item.get_closest_marker(MARKER)
    if marker is None or item.get_closest_marker("gpu"):
        return ""
    if len(marker.args) != 1:
        raise pytest.UsageError(f'{item.nodeid}: name the family, as in mark.matrix("hopper")')
    return marker.args[0]


class MatrixRuns:
    """A pytest plugin: with --due only the matrix tests of the families that are due run; and a run
    in which all matrix tests of a closed family passed writes their digest into the record.

    Nothing is written by a run that fails, or of a part of the tests. Under pytest-xdist each
    worker collects all tests, so that each hands over the same; the controller sees what passed.
    """

    def __init__(
        self, families: Mapping[str, Family[Any]], record: Path, digest_of: DigestOf
    ) -> None:
        self.families = families
        self.record = record
        self.digest_of = digest_of
        self.whole: dict[str, tuple[int, MatrixDigest]] = {}
        """The closed families of which all matrix tests are to run: how many, and their digest."""
        self.told: list[str] = []
        self.passed: Counter[str] = Counter()

    # -- what is to run ----------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[None]:
        of_item = {item: family for item in items if (family := family_of(item))}
        for item, family in of_item.items():
            item.user_properties.append((MARKER, family))
        if MARKER not in config.getoption("markexpr"):
            if config.getoption(OPTION):
                raise pytest.UsageError(f"{OPTION} chooses among matrix tests: add -m {MARKER}")
            return (yield)
        is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not any(
            config.getoption(name, None) for name in ("ignore", "ignore_glob", "lf")
        )
        if config.getoption(OPTION) and not is_whole:
            raise pytest.UsageError(f"{OPTION} looks at all tests: leave paths and --lf out")
        digests = self._digests(of_item) if is_whole else {}
        if config.getoption(OPTION):
            due = self._due(digests)
            left_out = [item for item in items if of_item.get(item) not in due]
            items[:] = [item for item in items if of_item.get(item) in due]
            config.hook.pytest_deselected(items=left_out)
        result = yield
        chosen = Counter(of_item[item] for item in items if item in of_item)
        there_are = Counter(of_item.values())
        self.whole = {
            name: (chosen[name], digest)
            for name, digest in digests.items()
            if self.families[name].closed and chosen[name] == there_are[name]
        }
        return result

    def _digests(self, of_item: Mapping[pytest.Item, str]) -> dict[str, MatrixDigest]:
        files: dict[str, set[Path]] = {name: set() for name in self.families}
        for item, name in of_item.items():
            files[name].add(item.path)
        return {
            name: self.digest_of(self.families[name], paths)
            for name, paths in files.items()
            if paths
        }

    def _due(self, digests: Mapping[str, MatrixDigest]) -> set[str]:
        recorded, due = load_record(self.record), set()
        for name, digest in digests.items():
            reasons = why_due(self.families[name], digest, recorded.get(name))
            if reasons:
                due.add(name)
            text = f"due, {'; '.join(reasons)}" if reasons else "not due, it is what passed"
            self.told.append(f"matrix: {name}: {text}")
        return due

    # -- what ran ----------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        family = dict(report.user_properties).get(MARKER)
        if family is not None and report.when == "call" and report.passed:
            self.passed[str(family)] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        found = getattr(node, "workeroutput", {}).get(KEY, {"whole": {}, "told": []})
        self.told = found["told"]
        self.whole = {
            name: (number, MatrixDigest(**digest))
            for name, (number, digest) in found["whole"].items()
        }

    @pytest.hookimpl(trylast=True)  # after what may still fail the run
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            whole = {name: (n, asdict(digest)) for name, (n, digest) in self.whole.items()}
            output[KEY] = {"whole": whole, "told": self.told}
            return
        if self.told and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # nothing was due
        if session.exitstatus != pytest.ExitCode.OK:
            return
        passed = {
            name: digest
            for name, (number, digest) in self.whole.items()
            if self.passed[name] == number
        }
        if passed:
            save_record(self.record, passed)
            self.told.append(f"matrix: {', '.join(passed)}: passed, {self.record.name} says so")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.told:
            terminalreporter.write_line(line)
