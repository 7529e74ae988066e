"""Accesses of the async proxy's agents to shared memory, and who knows of them."""

import numpy as np
import pytest
from ptx_snippets import entry

from flash_helpers.gpu import WARP
from flash_helpers.ptx import (
    AbsentBlockError,
    OutlivedError,
    PendingCopyError,
    ProxyError,
    RaceError,
    load_ptx,
)
from flash_helpers.ptx.run.geometry import Geometry
from flash_helpers.ptx.run.watch.faults import FaultLog
from flash_helpers.ptx.run.watch.order import Knowledge, Order, Strength, join
from flash_helpers.ptx.run.watch.shared import WatchedMemory

PROGRAM = load_ptx(
    entry("bar.sync 0;\ntrap;\nbrkpt;\npmevent 1;", before='.file 1 "kernel.cu"\n')
).kernel("k")
BAR, TRAP, BRKPT, PMEVENT = range(4)  # positions of instructions, to tell sites apart

BLOCKS = 3
TMA = "TMA for mbarrier at shared address 16"
WGMMA = "wgmma of warpgroup 0"


def lanes_of(warp, block=0, lanes=range(WARP)):
    return (warp * BLOCKS + block) * WARP + np.array(list(lanes))


PRODUCER = lanes_of(0, lanes=[0])
CONSUMER = lanes_of(1)
ONE = lanes_of(1, lanes=[3])


class World:
    """Three blocks of four warps with 1024 bytes of shared memory each, in granules of 16."""

    def __init__(self, cluster=1):
        blocks = tuple((x, 0, 0) for x in range(BLOCKS))
        self.geometry = Geometry(blocks, 4 * WARP, cluster)
        self.shared = WatchedMemory(self.geometry, 1024, 16, FaultLog(PROGRAM.program, False))
        self.order = self.shared.order

    def touch(self, action, lanes, address, position=BAR, strength=None):
        """Each of the lanes touches the 16 bytes at an address in its block; in a "matrix read" all
        lanes of their warps do."""
        kind = action.removeprefix("matrix ")
        rows = (self.shared.base[lanes] + address) >> 4
        value = np.zeros((lanes.size, 4), np.uint32) if action == "write" else None
        more = {} if strength is None else {"strength": strength}
        more["is_of_warp"] = kind != action
        return self.shared.lanes.note(kind, position, rows, 16, lanes, value, **more)

    def begin(self, action, lanes, address, size=64, name=TMA, position=TRAP):
        """An agent of each lane's block begins; what the first lane knows is what it relies on."""
        blocks = self.geometry.block_of(lanes)
        agents = np.array([self.order.agent(int(b), name) for b in blocks])
        each = [self.order.knowledge(lanes[i : i + 1]) for i in range(lanes.size)]
        issued = self.order.stacked(each)
        granules = self.shared.granules_at(blocks, np.full((lanes.size, 1), address), size)
        begin = (
            self.shared.agents.begin_write if action == "write" else self.shared.agents.begin_read
        )
        return begin(position, agents, lanes, issued, granules)

    def written(self, lanes=PRODUCER, address=128):
        """What is known to who has waited for an agent's write, which has ended."""
        (write,) = self.begin("write", lanes, address)
        return self.end(write)

    def end(self, access):
        """An agent's access ends. What is known to who has waited for it."""
        known = np.zeros((1, access.agent + 1), np.int64)
        known[0, access.agent] = self.shared.agents.end([access])
        return Knowledge(known)

    def barrier(self, lanes):
        self.order.release([self.order.arrive(lanes)], lanes)


@pytest.fixture
def world():
    return World()


class TestAWriteByAnAgent:
    @pytest.mark.parametrize("action", ["read", "write", "matrix read", "atomic access"])
    def test_is_nobodys_to_touch_before_it_ends(self, world, action):
        world.begin("write", PRODUCER, 128)
        with pytest.raises(PendingCopyError, match=f"which {TMA} at .*trap.*\n.*will write"):
            world.touch(action, ONE, 176)

    def test_leaves_its_neighbours_alone(self, world):
        world.begin("write", PRODUCER, 128, size=64)
        world.touch("write", ONE, 112)
        world.touch("write", ONE, 192)
        world.touch("write", lanes_of(1, block=1, lanes=[0]), 128)

    @pytest.mark.parametrize("action", ["read", "write", "matrix read"])
    def test_is_unknown_to_who_has_not_waited(self, world, action):
        world.written()
        lanes = CONSUMER if action == "matrix read" else ONE
        with pytest.raises(RaceError, match=f"{action[-5:]} .* write by {TMA} at .*trap") as error:
            world.touch(action, lanes, 128)
        assert "no wait for it between them" in str(error.value)
        assert error.value.address == 128

    def test_is_known_to_a_warp_that_has_waited(self, world):
        world.order.acquire(CONSUMER, [world.written()])
        world.touch("read", CONSUMER, 128)
        world.touch("matrix read", CONSUMER, 128)
        world.order.sync_warps(CONSUMER, np.array([0xFFFF_FFFF]))
        world.touch("write", ONE, 128)
        with pytest.raises(RaceError, match="write by"):
            world.touch("read", lanes_of(2), 144)

    def test_is_known_to_the_one_lane_that_has_waited_until_it_tells_its_warp(self, world):
        world.order.acquire(ONE, [world.written()])
        world.touch("read", ONE, 128)
        with pytest.raises(RaceError):
            world.touch("read", ONE + 1, 128)
        with pytest.raises(RaceError):
            world.touch("matrix read", CONSUMER, 128)
        world.order.sync_warps(CONSUMER, np.array([0xFFFF_FFFF]))
        world.touch("read", ONE + 1, 128)
        world.touch("matrix read", CONSUMER, 128)

    def test_is_carried_on_by_barriers_of_some_lanes_and_of_the_block(self, world):
        world.order.acquire(ONE, [world.written()])
        world.order.sync_warps(lanes_of(1, lanes=range(8)), np.array([0xFF]))
        world.touch("read", lanes_of(1, lanes=[7]), 128)
        with pytest.raises(RaceError):
            world.touch("read", lanes_of(1, lanes=[8]), 128)
        world.order.barrier_all()
        world.touch("read", lanes_of(3), 128)

    def test_is_not_known_by_a_barrier_that_nobody_with_knowledge_passes(self, world):
        world.written()
        world.order.barrier_all()
        with pytest.raises(RaceError, match=TMA):
            world.touch("read", CONSUMER, 128)

    def test_that_was_waited_for_does_not_make_a_later_one_known(self, world):
        known = world.written()
        (second,) = world.begin("write", PRODUCER, 256)
        world.order.acquire(CONSUMER, [known])
        world.touch("read", CONSUMER, 128)
        world.end(second)
        with pytest.raises(RaceError):
            world.touch("read", CONSUMER, 256)

    def test_after_a_write_by_lanes_that_its_issuer_does_not_know(self, world):
        world.touch("write", ONE, 128)
        world.order.proxy_fence(ONE)
        with pytest.raises(RaceError, match=f"write by {TMA} .*128 and write by warp 1 at .*bar"):
            world.begin("write", PRODUCER, 128)

    @pytest.mark.parametrize("action", ["read", "matrix read"])
    def test_after_reads_needs_a_barrier_only(self, world, action):
        world.touch(action, CONSUMER, 128)
        with pytest.raises(RaceError, match="and read by warp 1"):
            world.begin("write", PRODUCER, 128)
        world.order.acquire(PRODUCER, [world.order.knowledge(CONSUMER)])
        world.begin("write", PRODUCER, 128)

    def test_after_reads_by_single_lanes_that_release_alone(self, world):
        world.touch("read", ONE, 128)
        world.touch("read", ONE + 1, 192)
        world.order.acquire(PRODUCER, [world.order.knowledge(ONE)])
        world.begin("write", PRODUCER, 128)
        with pytest.raises(RaceError, match="and read by warp 1"):
            world.begin("write", PRODUCER, 192)

    def test_over_one_in_flight_or_not_waited_for(self, world):
        (first,) = world.begin("write", PRODUCER, 128)
        with pytest.raises(PendingCopyError, match=f"which {TMA} at"):
            world.begin("write", PRODUCER, 176, position=BRKPT)
        known = world.end(first)
        with pytest.raises(RaceError, match=f"write by {TMA} .* and write by {TMA} .*\n.*no wait"):
            world.begin("write", PRODUCER, 176, position=BRKPT)
        world.order.acquire(PRODUCER, [known])
        world.begin("write", PRODUCER, 176, position=BRKPT)

    def test_twice_in_one_instruction(self, world):
        with pytest.raises(RaceError, match="twice"):
            world.begin("write", lanes_of(0, lanes=[0, 1]), 128)

    def test_in_several_blocks_at_once(self, world):
        everywhere = np.concatenate([lanes_of(0, block, [0]) for block in range(BLOCKS)])
        writes = world.begin("write", everywhere, 128)
        known = world.end(writes[1])
        world.order.acquire(lanes_of(1, block=1), [known])
        world.touch("read", lanes_of(1, block=1), 128)
        with pytest.raises(PendingCopyError):
            world.touch("read", lanes_of(1, block=2), 128)


class TestAReadByAnAgent:
    def written(self, world, lanes=PRODUCER):
        world.touch("write", lanes, 128)
        world.order.proxy_fence(lanes)

    @pytest.mark.parametrize("action", ["write", "atomic access"])
    def test_is_nobodys_to_write_before_it_ends(self, world, action):
        self.written(world)
        world.begin("read", PRODUCER, 128, size=16, name=WGMMA)
        with pytest.raises(RaceError, match=f"read by {WGMMA} .*trap.*\n.*may still be going on"):
            world.touch(action, PRODUCER, 128)

    def test_can_be_read_by_all_meanwhile(self, world):
        self.written(world)
        world.begin("read", PRODUCER, 128, size=16, name=WGMMA)
        world.touch("read", PRODUCER, 128)
        world.begin("read", PRODUCER, 128, size=16, name="bulk store of warp 0 lane 0")

    def test_is_unknown_to_who_has_not_waited(self, world):
        self.written(world)
        (read,), _ = world.begin("read", PRODUCER, 128, size=16, name=WGMMA)
        known = world.end(read)
        with pytest.raises(RaceError, match=f"read by {WGMMA} .*\n.*no wait for it"):
            world.touch("write", PRODUCER, 128)
        with pytest.raises(RaceError, match=f"write by {TMA} .* and read by {WGMMA}"):
            world.begin("write", PRODUCER, 64, size=128)
        world.order.acquire(PRODUCER, [known])
        world.touch("write", PRODUCER, 128)

    def test_of_what_a_later_one_still_reads(self, world):
        self.written(world)
        (first,), _ = world.begin("read", PRODUCER, 128, size=16, name=WGMMA)
        (second,), _ = world.begin("read", PRODUCER, 128, size=16, name=WGMMA)
        world.order.acquire(PRODUCER, [world.end(first)])
        with pytest.raises(RaceError, match="going on"):
            world.touch("write", PRODUCER, 128)
        world.order.acquire(PRODUCER, [world.end(second)])
        world.touch("write", PRODUCER, 128)

    def test_of_what_another_warp_wrote(self, world):
        self.written(world, ONE)
        with pytest.raises(RaceError, match=f"read by {WGMMA} .* and write by warp 1"):
            world.begin("read", PRODUCER, 128, size=16, name=WGMMA)
        world.barrier(np.r_[lanes_of(0), CONSUMER])
        world.begin("read", PRODUCER, 128, size=16, name=WGMMA)

    def test_of_what_another_agent_writes(self, world):
        (write,) = world.begin("write", PRODUCER, 128)
        with pytest.raises(PendingCopyError, match=f"read by {WGMMA} .* which {TMA}"):
            world.begin("read", ONE, 128, name=WGMMA)
        known = world.end(write)
        with pytest.raises(RaceError, match=f"read by {WGMMA} .* write by {TMA}"):
            world.begin("read", ONE, 128, name=WGMMA)
        world.order.acquire(ONE, [known])
        world.begin("read", ONE, 128, name=WGMMA)

    def test_tells_what_nobody_wrote(self, world):
        self.written(world)
        _, unwritten = world.begin("read", PRODUCER, 112, size=48, name=WGMMA)
        assert unwritten.tolist() == [[True, False, True]]
        _, unwritten = world.begin("read", PRODUCER, 128, size=16, name=WGMMA)
        assert unwritten is None

    def test_of_flags(self, world):
        world.touch("write", ONE, 128, strength=Strength(is_strong=True))
        with pytest.raises(RaceError, match="and write by warp 1"):
            world.begin("read", PRODUCER, 128, name=WGMMA)


class TestTheProxyFence:
    """`fence.proxy.async` between what a thread writes and what an agent then touches."""

    @pytest.mark.parametrize("action", ["read", "write"])
    def test_is_missing(self, world, action):
        world.touch("write", PRODUCER, 128)
        with pytest.raises(ProxyError, match=r"128 and write by warp 0 .*\n.*no fence\.proxy"):
            world.begin(action, PRODUCER, 128)

    def test_of_the_writer_before_the_barrier(self, world):
        world.touch("write", ONE, 128)
        world.order.proxy_fence(CONSUMER)
        world.barrier(np.r_[lanes_of(0), CONSUMER])
        world.begin("read", PRODUCER, 128)

    def test_of_the_issuer_after_the_barrier(self, world):
        world.touch("write", ONE, 128)
        world.barrier(np.r_[lanes_of(0), CONSUMER])
        world.order.proxy_fence(PRODUCER)
        world.begin("read", PRODUCER, 128)

    def test_of_somebody_between_the_two(self, world):
        world.touch("write", ONE, 128)
        between = lanes_of(2, lanes=[5])
        world.order.acquire(between, [world.order.knowledge(ONE)])
        world.order.proxy_fence(between)
        world.order.acquire(PRODUCER, [world.order.knowledge(between)])
        world.begin("read", PRODUCER, 128)

    def test_of_somebody_beside_the_path(self, world):
        world.touch("write", ONE, 128)
        world.order.proxy_fence(lanes_of(2))
        world.barrier(np.r_[lanes_of(0), CONSUMER])
        with pytest.raises(ProxyError):
            world.begin("read", PRODUCER, 128)

    def test_before_the_write(self, world):
        world.order.proxy_fence(CONSUMER)
        world.touch("write", ONE, 128)
        world.barrier(np.r_[lanes_of(0), CONSUMER])
        with pytest.raises(ProxyError):
            world.begin("read", PRODUCER, 128)

    def test_of_one_lane_is_for_what_that_lane_knows(self, world):
        world.touch("write", ONE, 128)
        world.touch("write", ONE + 1, 144)
        world.order.proxy_fence(ONE)
        world.order.barrier_all()
        world.begin("read", PRODUCER, 128, size=16)
        with pytest.raises(ProxyError):
            world.begin("read", PRODUCER, 144, size=16)

    def test_of_one_lane_after_a_barrier_of_some_of_its_warp(self, world):
        world.touch("write", ONE, 128)
        world.order.sync_warps(lanes_of(1, lanes=[3, 4]), np.array([0b11000]))
        world.order.proxy_fence(ONE + 1)
        world.begin("read", ONE + 1, 128, size=16)

    def test_of_the_warp_in_parts(self, world):
        world.touch("write", CONSUMER[16:17], 128)
        world.order.proxy_fence(CONSUMER[:16])
        world.order.proxy_fence(CONSUMER[16:])
        world.order.barrier_all()
        world.begin("read", PRODUCER, 128, size=16)

    def test_is_not_needed_after_what_an_agent_wrote(self, world):
        world.order.acquire(ONE, [world.written()])
        world.touch("read", ONE, 128)
        world.begin("read", ONE, 128, name=WGMMA)

    def test_is_carried_by_flags(self, world):
        release = Strength(is_strong=True, releases=True)
        acquire = Strength(is_strong=True, acquires=True)
        world.touch("write", ONE, 128)
        world.order.proxy_fence(ONE)
        world.touch("write", ONE, 512, strength=release)
        world.touch("read", PRODUCER, 512, strength=acquire)
        world.begin("read", PRODUCER, 128, size=16)


class TestKnowledge:
    def test_of_a_warp_holds_the_deeds_of_all_its_lanes(self, world):
        world.touch("write", CONSUMER[7:8], 128)
        world.order.acquire(PRODUCER, [world.order.knowledge(CONSUMER)])
        world.touch("read", PRODUCER, 128)

    def test_of_a_lane_holds_its_own(self, world):
        world.touch("write", ONE, 128)
        world.touch("write", ONE + 1, 144)
        world.order.acquire(PRODUCER, [world.order.knowledge(ONE)])
        world.touch("read", PRODUCER, 128)
        with pytest.raises(RaceError):
            world.touch("read", PRODUCER, 144)

    def test_ends_when_it_is_taken(self, world):
        known = world.order.knowledge(CONSUMER)
        world.touch("write", ONE, 128)
        world.order.acquire(PRODUCER, [known])
        with pytest.raises(RaceError):
            world.touch("read", PRODUCER, 128)

    def test_of_several_is_joined(self, world):
        world.touch("write", ONE, 128)
        world.touch("write", lanes_of(2, lanes=[0]), 144)
        first = world.order.knowledge(ONE)
        both = join([first, world.order.knowledge(lanes_of(2, lanes=[0]))])
        world.order.acquire(PRODUCER, [both])
        world.touch("read", PRODUCER, 128)
        world.touch("read", PRODUCER, 144)

    def test_holds_what_a_lane_knows_of_its_mates(self, world):
        world.touch("write", ONE, 128)
        world.order.sync_warps(lanes_of(1, lanes=[3, 4]), np.array([0b11000]))
        world.order.acquire(PRODUCER, [world.order.knowledge(ONE + 1)])
        world.touch("read", PRODUCER, 128)

    def test_that_all_have_in_common(self, world):
        lanes = np.r_[lanes_of(0), CONSUMER]
        for lane, address in ((lanes_of(2, lanes=[0]), 128), (lanes_of(3, lanes=[0]), 144)):
            world.touch("write", lane, address)
        world.order.proxy_fence(np.r_[lanes_of(2), lanes_of(3)])
        first, second = (world.order.knowledge(lanes_of(w)) for w in (2, 3))
        world.order.acquire(lanes, [first])
        world.order.acquire(lanes[1:], [second])
        each = world.order.common_knowledge(np.unique(lanes // WARP))
        common = each.min(axis=1, keepdims=True)
        agent, lane = np.array([world.order.agent(0, WGMMA)]), lanes[:1]

        def read(address):
            at = world.shared.granules_at(np.array([0]), np.array([[address]]), 16)
            world.shared.agents.begin_read(TRAP, agent, lane, common, at)

        read(128)
        with pytest.raises(RaceError, match="write by warp 3"):
            read(144)

    def test_that_all_have_in_common_holds_their_own_deeds(self, world):
        lanes = np.r_[lanes_of(0), CONSUMER]
        world.touch("write", ONE, 128)
        world.barrier(lanes)
        world.touch("write", PRODUCER, 144)
        world.order.proxy_fence(lanes)
        for warp, address in ((1, 128), (0, 144)):
            common = world.order.common_knowledge(np.array([warp * BLOCKS]))
            at = world.shared.granules_at(np.array([0]), np.array([[address]]), 16)
            agents = np.array([world.order.agent(0, WGMMA)])
            world.shared.agents.begin_read(TRAP, agents, lanes_of(warp)[:1], common, at)


def end(world, lanes):
    """Threads end."""
    world.shared.agents.end_blocks(world.shared.presence.end(lanes))


class TestTheEndOfABlock:
    """Nobody may touch its shared memory any more."""

    def test_while_an_agent_writes_to_it(self, world):
        world.begin("write", PRODUCER, 128)
        end(world, world.geometry.lanes_of(1))
        with pytest.raises(
            OutlivedError,
            match=rf"write by {TMA} of shared address 128, whose block has ended:\n.*none of",
        ) as caught:
            end(world, world.geometry.lanes_of(0))
        assert caught.value.thread.warp == 0 and caught.value.site.opcode == "trap"

    def test_before_anybody_has_waited_for_what_an_agent_reads(self, world):
        world.touch("write", PRODUCER, 128)
        world.order.proxy_fence(PRODUCER)
        (read,), _ = world.begin("read", PRODUCER, 128, size=16, name=WGMMA)
        world.end(read)
        with pytest.raises(OutlivedError, match=f"read by {WGMMA}"):
            end(world, world.geometry.lanes_of(0))

    def test_after_one_of_its_threads_has_waited(self, world):
        world.order.acquire(ONE, [world.written()])
        end(world, world.geometry.lanes_of(0))

    def test_of_whose_agents_the_last_deed_was_not_waited_for(self, world):
        (first,) = world.begin("write", PRODUCER, 128)
        (second,) = world.begin("write", PRODUCER, 256)
        world.order.acquire(ONE, [world.end(first)])
        world.end(second)
        with pytest.raises(OutlivedError, match="shared address 256"):
            end(world, world.geometry.lanes_of(0))

    def test_comes_with_its_last_thread(self, world):
        world.begin("write", PRODUCER, 128)
        end(world, world.geometry.lanes_of(0)[:-1])
        with pytest.raises(OutlivedError):
            end(world, world.geometry.lanes_of(0)[-1:])


class TestAnAgentInAnotherBlock:
    """Lane 0 of block 0 lets TMA write to block 1 of its cluster, whose mbarrier it is."""

    @pytest.fixture
    def world(self):
        return World(cluster=3)

    def begin(self, world):
        agents = np.array([world.order.agent(1, TMA)])
        granules = world.shared.granules_at(np.array([1]), np.array([[128]]), 64)
        known = world.order.stacked([world.order.knowledge(PRODUCER)])
        (write,) = world.shared.agents.begin_write(TRAP, agents, PRODUCER, known, granules)
        return write

    def meet(self, world):
        lanes = np.arange(world.geometry.lanes)
        world.order.acquire(lanes, [world.order.knowledge(lanes)])

    def test_that_may_not_have_begun(self, world):
        with pytest.raises(
            AbsentBlockError, match=r"write of shared address 128 of the block of rank 1, which may"
        ):
            self.begin(world)
        self.meet(world)
        self.begin(world)

    def test_that_has_ended(self, world):
        self.meet(world)
        end(world, world.geometry.lanes_of(1))
        with pytest.raises(AbsentBlockError, match="rank 1, which has ended"):
            self.begin(world)

    def test_that_ends_before_it_is_done(self, world):
        self.meet(world)
        self.begin(world)
        end(world, world.geometry.lanes_of(0))
        with pytest.raises(
            OutlivedError,
            match=f"write by {TMA} of the block of rank 1 of shared address 128 of the block of ra",
        ):
            end(world, world.geometry.lanes_of(1))

    def test_that_has_waited(self, world):
        self.meet(world)
        write = self.begin(world)
        world.order.acquire(lanes_of(2, block=1), [world.end(write)])
        world.touch("read", lanes_of(2, block=1), 128)
        with pytest.raises(RaceError, match="read of shared address 128 and write by TMA"):
            world.touch("read", lanes_of(1, block=1), 128)
        for block in range(3):
            end(world, world.geometry.lanes_of(block))

    def test_that_reads_and_writes_there(self, world):
        self.meet(world)
        world.touch("read", lanes_of(3, block=1), 128)
        with pytest.raises(
            RaceError, match="128 of the block of rank 1 and read by warp 3 of the block of rank 1"
        ):
            self.begin(world)


class TestOrder:
    """The floor: a time up to which everybody knows everything, below which nothing is asked."""

    def test_is_raised_by_barriers_of_all_with_agents_too(self, world):
        world.order.agent(0, TMA)
        before = world.order.floor
        world.order.barrier_all()
        assert world.order.floor > before

    def test_stays_below_what_a_single_lane_misses(self, world):
        world.order.acquire(ONE, [world.order.knowledge(lanes_of(2))])
        others = np.setdiff1d(np.arange(world.geometry.lanes), ONE)
        for block in range(BLOCKS):
            mine = others[world.geometry.block_of(others) == block]
            world.barrier(mine)
        world.touch("write", PRODUCER, 128)
        world.barrier(others[world.geometry.block_of(others) == 0])
        with pytest.raises(RaceError):
            world.touch("read", ONE, 128)

    def test_agents_of_the_blocks_of_a_cluster_differ(self):
        order = Order(Geometry(tuple((x, 0, 0) for x in range(4)), WARP, cluster=2))
        assert order.agent(0, TMA) == order.agent(2, TMA) != order.agent(1, TMA)
        assert order.agent_name(order.agent(3, TMA)) == f"{TMA} of the block of rank 1"

    def test_a_barrier_of_the_block_is_none_of_the_cluster(self):
        world = World(cluster=3)
        world.touch("write", lanes_of(0, block=1, lanes=[0]), 128)
        world.order.barrier_all()
        world.touch("read", lanes_of(2, block=1), 128)
        rows = (world.shared.base[lanes_of(0, block=1)[:1]] + 128) >> 4
        with pytest.raises(RaceError):
            world.shared.lanes.note("read", BRKPT, rows, 16, lanes_of(0, block=0)[:1])
