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


def test_clusters_are_counted_for_the_blocks_that_fill_an_sm(monkeypatch) -> None:
    """An SM of sm_90 has 228 KB, of which each block has 1 KB reserved."""
    asked = {}

    def most_clusters(self, blocks, n_threads, shared_bytes):
        assert n_threads == 32
        asked[blocks, shared_bytes] = len(asked)
        return asked[blocks, shared_bytes]

    monkeypatch.setattr(driver.LoadedKernel, "__init__", lambda self, image, symbol, smem: None)
    monkeypatch.setattr(driver.LoadedKernel, "most_clusters", most_clusters)
    counted = driver.counted_clusters(90)
    kilobytes = {1: 227, 2: 113, 3: 75, 4: 56}
    shapes = {(blocks, per_sm): n for blocks, per_sm, n in counted}
    assert shapes == {
        (blocks, per_sm): asked[blocks, 1024 * size]
        for per_sm, size in kilobytes.items()
        for blocks in (2, 4, 8)
    }


def test_a_count_of_clusters_is_asked_for_with_their_size(monkeypatch) -> None:
    def called(name, place, function, config):
        assert name == "cuOccupancyMaxActiveClusters"
        found = config._obj
        (size,) = (found.attributes[i] for i in range(found.n_attributes))
        assert (size.id, [*size.value]) == (4, [8, 1, 1])
        assert ([*found.sizes], found.shared_bytes) == ([8, 1, 1, 64, 1, 1], 1024)
        place._obj.value = 14

    monkeypatch.setattr(driver, "_call", called)
    kernel = object.__new__(driver.LoadedKernel)
    kernel._function = None
    assert kernel.most_clusters(8, 64, 1024) == 14
