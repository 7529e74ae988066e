"""The order of tiles on devices of any number of SMs: a cluster divides the grid, and each tile is
taken once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from general_hopper import WITH_CLUSTERS, WITH_PAIRS, general

from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import AttentionForward

H100 = largest_device(90)


@pytest.mark.parametrize("step", [WITH_CLUSTERS, WITH_PAIRS], ids=["rows", "heads"])
@pytest.mark.parametrize("sms", [2, 3, 5, 7, 131, 133])
@pytest.mark.parametrize("len_q", [100, 513, 2048])
def test_a_cluster_divides_the_grid(step, sms, len_q):
    config = general(step, causal=True)
    problem = AttentionForward(1, 12, len_q, kv_heads=2, causal=True)
    device = replace(H100, sms=sms)
    order = config.order(problem, device)
    assert order.cluster == 2
    assert order.n_blocks % order.cluster == 0
    assert 0 < order.n_blocks <= sms
    (launch,) = config.call(problem, problem.strides(), device).launches
    assert launch.n_blocks == order.n_blocks
    assert all(blocks % each == 0 for blocks, each in zip(launch.grid, launch.cluster, strict=True))


@pytest.mark.parametrize("step", [WITH_CLUSTERS, WITH_PAIRS], ids=["rows", "heads"])
@pytest.mark.parametrize("sms", [3, 7, 131])
@pytest.mark.parametrize(("len_q", "counts"), [(300, False), (2048, True)])
def test_tiles_are_each_one_blocks(step, sms, len_q, counts):
    problem = AttentionForward(2, 12, len_q, kv_heads=2, causal=True)
    order = general(step, causal=True).order(problem, replace(H100, sms=sms))
    known = [n for block in range(order.n_blocks) for n in order.known_tiles(block)]
    every = range(order.cluster * order.n_tiles)
    assert order.counts == (counts and order.n_tiles > 2 * (sms // 2))
    assert sorted(known) == [*every][: len(known)]
    assert order.counts or len(known) == len(every)
    tiles = order.tiles()
    assert len(tiles) == len({*tiles}) == len(every)
