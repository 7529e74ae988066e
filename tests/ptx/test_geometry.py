"""Which thread each lane of a batch is."""

import numpy as np
import pytest

from flash_helpers.gpu import WARP
from flash_helpers.ptx.errors import Thread
from flash_helpers.ptx.run.geometry import Geometry

BLOCKS = tuple((x, 0, 0) for x in range(6))


@pytest.fixture(params=[1, 2, 3])
def geometry(request):
    return Geometry(BLOCKS, threads=80, cluster=request.param)


def test_a_warp_of_all_blocks_is_a_slice(geometry):
    for warp in range(geometry.warps_per_block):
        lanes = np.flatnonzero(geometry.warp_of(np.arange(geometry.lanes)) == warp)
        assert (np.diff(lanes) == 1).all()
        assert lanes.size == WARP * len(BLOCKS)


def test_block_and_thread_are_found_again(geometry):
    lanes = np.arange(geometry.lanes)
    block, thread = geometry.block_of(lanes), geometry.thread_of(lanes)
    assert (geometry.lane_of(block, thread) == lanes).all()
    assert (np.sort(geometry.lanes_of(1)) == np.flatnonzero(block == 1)).all()
    assert (geometry.thread_of(geometry.lanes_of(1)) == np.arange(96)).all()


def test_cluster_and_place_are_found_again(geometry):
    lanes = np.arange(geometry.lanes)
    cluster, place = geometry.cluster_of(lanes), geometry.place_of(lanes)
    assert (geometry.lane_at(cluster, place) == lanes).all()
    assert set(place.tolist()) == set(range(geometry.lanes_per_cluster))
    assert (geometry.block_of(lanes) // geometry.cluster == cluster).all()


def test_a_lane_is_named_by_block_warp_and_lane(geometry):
    lane = geometry.lane_of(4, 2 * WARP + 7)
    assert geometry.thread(lane) == Thread((4, 0, 0), warp=2, lane=7)
