"""Clusters: blocks that see each other's shared memory, and wait for each other."""

import numpy as np
import pytest
from ptx_snippets import entry

from flash_helpers.gpu import WARP
from flash_helpers.ptx import load_ptx
from flash_helpers.ptx.run.faults import FaultLog, Geometry
from flash_helpers.ptx.run.memory import RANK_SHIFT
from flash_helpers.ptx.run.shared import SharedMemory


class TestAddresses:
    """A shared::cluster address holds the rank of its block."""

    @pytest.fixture
    def shared(self):
        geometry = Geometry(tuple((x, 0, 0) for x in range(6)), 2 * WARP, cluster=3)
        program = load_ptx(entry("")).kernel("k").program
        return SharedMemory(geometry, 512, 4, FaultLog(program, keep_going=False))

    def test_are_of_blocks_of_the_cluster(self, shared):
        lanes = shared.geometry.lane_of(np.array([0, 1, 5, 4, 4]), np.array([0, 1, 2, 40, 63]))
        ranks = np.array([0, 2, 0, 1, 9])
        blocks, at = shared.resolve((ranks + 1 << RANK_SHIFT) + 8 * ranks, lanes)
        assert blocks.tolist() == [0, 2, 3, 4, -1]
        assert (at == 8 * ranks).all()

    def test_without_a_rank_are_of_the_own_block(self, shared):
        lanes = shared.geometry.lane_of(np.arange(6), np.arange(6))
        blocks, at = shared.resolve(np.array([-4, 0, 16, 508, 512, 600]), lanes)
        assert blocks.tolist() == list(range(6))
        assert at.tolist() == [-4, 0, 16, 508, 512, 600]

    def test_are_inside_if_the_block_is_there_and_has_them(self, shared):
        tag = 1 << RANK_SHIFT
        addresses = np.array([0, -4, 508, 512, tag, 3 * tag + 508, 3 * tag + 512, 4 * tag])
        inside = shared.inside(addresses, 4)
        assert inside.tolist() == [True, False, True, False, True, True, False, False]
