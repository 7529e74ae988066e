"""How much a run of the tests simulates of each family's kernels, held against its budget."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from flash_helpers.kernel_configs import find_config
from flash_helpers.ptx import Kernel, Run
from flash_helpers.registry.family import Family

KEY = "simulated_work"


class SimulatedWork:
    """A pytest plugin that counts the warp instructions of every finished simulation in the tests'
    own processes, by family, and fails a run that goes over a family's budget. A test's own family
    has none.

    budget: the family's field that has it. Under pytest-xdist each worker hands its counts to the
    controller, which adds them up.
    """

    def __init__(self, families: Mapping[str, Family], budget: str = "simulated_budget") -> None:
        self.families = families
        self.budget = budget
        self.done: Counter[str] = Counter()
        self.patch = pytest.MonkeyPatch()

    def budget_of(self, name: str) -> int:
        """Warp instructions of a family's kernels that the run may simulate."""
        return getattr(self.families[name], self.budget)

    def over_budget(self) -> list[str]:
        """The families that are over their budgets."""
        return [name for name in self.families if self.done[name] > self.budget_of(name)]

    def excesses(self) -> list[str]:
        """A line for each family that is over its budget."""
        return [
            f"{name}: {self.done[name]:,} warp instructions simulated, over the family's budget of "
            f"{self.budget_of(name):,}: test smaller shapes, or raise the family's {self.budget} "
            "in the registry"
            for name in self.over_budget()
        ]

    def pytest_configure(self) -> None:
        launch = Kernel.launch

        def counted(kernel: Kernel, *args: Any, before: Run | None = None, **options: Any) -> Run:
            already = before.counters.total.instructions if before else 0
            run = launch(kernel, *args, before=before, **options)
            config = find_config(run.kernel)
            if config is not None and config.family.name in self.families:
                self.done[config.family.name] += run.counters.total.instructions - already
            return run

        self.patch.setattr(Kernel, "launch", counted)

    def pytest_unconfigure(self) -> None:
        self.patch.undo()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.done.update(getattr(node, "workeroutput", {}).get(KEY, {}))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        worker_output = getattr(session.config, "workeroutput", None)
        if worker_output is not None:
            worker_output[KEY] = dict(self.done)
        elif self.over_budget() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, done in sorted(self.done.items()):
            terminalreporter.write_line(
                f"simulated: {name} {done:,} of {self.budget_of(name):,} warp instructions"
            )
        for line in self.excesses():
            terminalreporter.write_line(line, red=True)
