"""A programmatic launch: global memory is touched only behind griddepcontrol.wait."""

import pytest
from tma_snippets import ARRIVE, BARRIER_INITS, EXPECT, INIT, LOAD, LOAD_BYTES, run, wait

from flash_helpers.ptx import LaunchOrderError, Run

WAIT = "griddepcontrol.wait;\n"
MBARRIER = f"@%p0 {INIT} [bar], 1;\n@%p0 {BARRIER_INITS}\nbar.sync 0;\n"
STORE = "@%p0 st.global.u32 [%rd1], %tid;\n"
ACCESSES = {
    "load": "ld.global.u32 %r1, [%rd0];\n",
    "generic load": "ld.u32 %r1, [%rd0];\n",
    "store": STORE,
    "atomic": "red.global.add.u32 [%rd1], %tid;\n",
    "cp.async": "@%p0 cp.async.ca.shared.global [smem], [%rd0], 4;\ncp.async.wait_all;\n",
    "bulk load": f"""
        @%p0 {EXPECT} [bar], 64;
        @%p0 {LOAD_BYTES} [smem], [%rd0], 64, [bar];
        {wait("bar", 0)}
        """,
    "tensor load": f"""
        @%p0 {EXPECT} [bar], 512;
        @%p0 {LOAD} [smem], [%rd2, {{%r0, %r0}}], [bar];
        {wait("bar", 0)}
        """,
    "bulk store": """
        @%p0 st.shared.v4.u32 [smem], {%r0, %r0, %r0, %r0};
        fence.proxy.async;
        @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [smem], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        """,
}
HARMLESS = {
    "a prefetch": "prefetch.global.L2 [%rd0];\n",
    "a bulk prefetch": "@%p0 cp.async.bulk.prefetch.L2.global [%rd0], 64;\n",
    "parameters and shared memory": "@%p0 st.shared.u32 [smem], %tid;\n",
    "the next launch let begin": "griddepcontrol.launch_dependents;\n",
}


def ran(body: str, *, programmatic: bool = True, **options: object) -> Run:
    start = f"mov.u32 %r0, 0;\n{MBARRIER}"
    found, _ = run(start + body, target="sm_90", programmatic=programmatic, **options)
    return found


class TestAccesses:
    @pytest.mark.parametrize("access", ACCESSES.values(), ids=ACCESSES)
    def test_before_the_wait_are_told(self, access: str) -> None:
        with pytest.raises(LaunchOrderError, match="that the launch before may still"):
            ran(access + WAIT)

    @pytest.mark.parametrize("access", ACCESSES.values(), ids=ACCESSES)
    def test_behind_the_wait_are_right(self, access: str) -> None:
        ran(WAIT + access)

    @pytest.mark.parametrize("access", ACCESSES.values(), ids=ACCESSES)
    def test_of_a_launch_that_is_not_programmatic_are_right(self, access: str) -> None:
        ran(access + WAIT, programmatic=False)

    @pytest.mark.parametrize("what", HARMLESS.values(), ids=HARMLESS)
    def test_that_change_and_see_nothing_are_right(self, what: str) -> None:
        ran(what + WAIT + STORE)

    def test_of_a_kernel_that_never_waits_are_told(self) -> None:
        with pytest.raises(LaunchOrderError, match="read or write"):
            ran("griddepcontrol.launch_dependents;\n" + STORE)


class TestWaitsOfOneThread:
    """Thread 0 waits, and thread 32 reads global memory."""

    ONE = f"@%p0 {WAIT}"
    READ = "setp.eq.u32 %p1, %tid, 32;\n@%p1 ld.global.u32 %r1, [%rd0];\n"

    @pytest.mark.parametrize(
        "order",
        [
            "bar.sync 0;\n",
            "barrier.cluster.arrive; barrier.cluster.wait;\n",
            f"@%p0 {ARRIVE} [bar];\n{wait('bar', 0)}",
        ],
        ids=["barrier", "cluster barrier", "mbarrier"],
    )
    def test_serve_all_that_synchronise_with_it(self, order: str) -> None:
        ran(self.ONE + order + self.READ)

    def test_serve_threads_that_see_its_copy_arrive(self) -> None:
        ran(self.ONE + ACCESSES["tensor load"] + self.READ)

    @pytest.mark.parametrize("order", ["", "bar.warp.sync 0xffffffff;\n"])
    def test_serve_no_others(self, order: str) -> None:
        with pytest.raises(LaunchOrderError):
            ran(self.ONE + order + self.READ)

    def test_serve_no_thread_that_synchronised_before(self) -> None:
        with pytest.raises(LaunchOrderError):
            ran(f"bar.sync 0;\n{self.ONE}{self.READ}")


def test_each_instruction_is_told_with_the_number_of_its_lanes() -> None:
    found = ran(ACCESSES["load"] + ACCESSES["atomic"] + WAIT, keep_going=True)
    assert [(type(x), x.count) for x in found.faults] == [(LaunchOrderError, 64)] * 2
    assert "read that the launch before may still write: wait first" in str(found.faults[0])


def test_no_count_changes() -> None:
    body = WAIT + ACCESSES["load"] + "bar.sync 0;\n"
    totals = [ran(body, programmatic=on).counters.total for on in (True, False)]
    assert totals[0] == totals[1]
