"""Launches by the driver, without one."""

import pytest

from flash_helpers.runtime import driver


@pytest.mark.parametrize(
    ("cluster", "programmatic", "wanted"),
    [
        ((1, 1, 1), False, []),
        ((2, 1, 1), False, [(4, [2, 1, 1])]),
        ((1, 1, 1), True, [(6, [1, 0, 0])]),
        ((2, 1, 1), True, [(4, [2, 1, 1]), (6, [1, 0, 0])]),
    ],
)
def test_a_launch_has_the_attributes_that_it_needs(
    monkeypatch, cluster, programmatic, wanted
) -> None:
    """By the numbers of CUlaunchAttributeID."""
    sent = []

    def called(name, config, *_):
        found = config._obj
        attributes = [found.attributes[i] for i in range(found.n_attributes)]
        sent.append((name, [(each.id, [*each.value]) for each in attributes]))

    monkeypatch.setattr(driver, "_call", called)
    kernel = object.__new__(driver.LoadedKernel)
    kernel._function = None
    kernel.start((1, 1, 1), 32, [], cluster=cluster, programmatic=programmatic)
    assert sent == [("cuLaunchKernelEx", wanted)]
