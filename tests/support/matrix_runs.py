"""Which matrix tests are due, and the record of those that have passed."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from matrix_digest import MatrixDigest, Record, load_record, save_record

from flash_helpers.registry.family import Family

MARKER = "matrix"
OPTION = "--due"
KEY = "matrix_runs"

DigestsOf = Callable[[Family[Any], Collection[Path]], Mapping[Path, MatrixDigest]]
Part = tuple[str, str]
"""The matrix tests of a family in one file: the family's name, and the file, relative to the root.
"""


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


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class MatrixRuns:
    """A pytest plugin: with --due only those matrix tests run whose family, file and what these
    depend on are not as they passed; and a run in which all of a family's matrix tests in a file
    passed writes their digest into the record.

    The record tells nothing of a part of which a run leaves tests out, and of a family that is over
    its budget. Under pytest-xdist each worker collects all tests, so that each hands over the same;
    the controller sees what passed.
    """

    def __init__(
        self,
        families: Mapping[str, Family[Any]],
        record: Path,
        digests_of: DigestsOf,
        over_budget: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.families = families
        self.record = record
        self.digests_of = digests_of
        self.over_budget = over_budget
        self.digests: Record = {}
        """All there are, where the run looks at all tests."""
        self.whole: dict[Part, int] = {}
        """The parts of which all tests are to run: how many they are."""
        self.told: list[str] = []
        self.passed: Counter[Part] = Counter()
        self.failed: set[Part] = set()

    # -- what is to run ----------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[None]:
        part_of = {
            item: (family, file_of(item.nodeid)) for item in items if (family := family_of(item))
        }
        for item, (family, _) in part_of.items():
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
        if is_whole:
            self.digests = self._digests({*part_of.values()}, config.rootpath)
        if config.getoption(OPTION):
            due = self._due()
            left_out = [item for item in items if part_of.get(item) not in due]
            items[:] = [item for item in items if part_of.get(item) in due]
            config.hook.pytest_deselected(items=left_out)
        result = yield
        chosen = Counter(part_of[item] for item in items if item in part_of)
        there_are = Counter(part_of.values())
        self.whole = {part: n for part, n in chosen.items() if n == there_are[part]}
        return result

    def _digests(self, parts: Collection[Part], root: Path) -> Record:
        files: dict[str, list[Path]] = {}
        for family, file in sorted(parts):
            files.setdefault(family, []).append(root / file)
        return {
            (family, path.relative_to(root).as_posix()): digest
            for family, paths in files.items()
            for path, digest in self.digests_of(self.families[family], paths).items()
        }

    def _due(self) -> set[Part]:
        recorded = load_record(self.record)
        why = {
            part: reasons
            for part, digest in self.digests.items()
            if (reasons := digest.differences(recorded.get(part)))
        }
        told: dict[tuple[str, str], list[str]] = {}
        for (family, file), reasons in why.items():
            told.setdefault((family, "; ".join(reasons)), []).append(Path(file).name)
        for (family, text), names in told.items():
            self.told.append(f"matrix: {family}: due, {text}: {', '.join(names)}")
        for family in {family for family, _ in self.digests} - {family for family, _ in why}:
            self.told.append(f"matrix: {family}: not due, it is what passed")
        self.told.sort()
        return {*why}

    # -- what ran ----------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        family = dict(report.user_properties).get(MARKER)
        if family is not None:
            part = str(family), file_of(report.nodeid)
            self.passed[part] += report.when == "call" and report.passed
            if report.failed:
                self.failed.add(part)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        found = getattr(node, "workeroutput", {}).get(KEY)
        if found is not None:
            self.told = found["told"]
            self.digests = {part: MatrixDigest(**digest) for part, digest in found["digests"]}
            self.whole = dict(found["whole"])

    @pytest.hookimpl(trylast=True)  # after what may still fail the run
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            digests = [(part, asdict(digest)) for part, digest in self.digests.items()]
            output[KEY] = {"told": self.told, "digests": digests, "whole": [*self.whole.items()]}
            return
        if self.told and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # nothing was due
        over = self.over_budget()
        passed = {
            part: self.digests[part]
            for part, number in self.whole.items()
            if part in self.digests and self.passed[part] == number
            if part not in self.failed and part[0] not in over
        }
        if passed:
            recorded = load_record(self.record)
            kept = {part: recorded[part] for part in self.digests if part in recorded}
            save_record(self.record, {**kept, **passed})
            families = ", ".join(sorted({family for family, _ in passed}))
            self.told.append(
                f"matrix: {len(passed)} parts of {families}: passed, {self.record.name} says so"
            )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.told:
            terminalreporter.write_line(line)
