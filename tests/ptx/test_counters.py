"""Counts of bulk copies, of waits on mbarriers, and by role."""

import pytest
from ptx_snippets import entry
from tma_snippets import BARRIER_INITS, EXPECT, INIT, LOAD, LOAD_BYTES, run, wait

from flash_helpers.ptx import Counts, Phase, load_ptx

STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
BEGIN = f"@%p0 {INIT} [bar], 1;\n@%p0 {BARRIER_INITS}\nbar.sync 0;\n"
STORED = "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n"
MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, "
    "{%r20, %r21, %r22, %r23}, {%r24, %r25}, {%f0, %f1, %f2, %f3};\n"
)
ZEROS = "".join(f"mov.b32 %r{n}, 0;\n" for n in range(20, 26))
ZEROS += "".join(f"mov.f32 %f{n}, 0f00000000;\n" for n in range(4))
FLOATS = ".reg .f32 %f<4>;\n"


def tma(counts: Counts) -> tuple[int, int, int, int]:
    return counts.tma_requests, counts.tma_boxes, counts.tma_bytes, counts.tma_sectors


def of(opcode: str, body: str, **options) -> Counts:
    """Counts of the one opcode that begins so."""
    found, _ = run(BEGIN + body, **options)
    (counts,) = (c for o, c in found.counters.by_opcode().items() if o.startswith(opcode))
    return counts


def load(x: int, y: int) -> str:
    """A box of 32 x 4 float32 of a tensor of 32 x 64."""
    return (
        f"@!%p0 bra LOADED;\n{EXPECT} [bar], 512;\n"
        f"{LOAD} [smem], [%rd2, {{{x}, {y}}}], [bar];\nLOADED:\n" + wait("bar", 0)
    )


class TestBulkCopies:
    @pytest.mark.parametrize("place", [(0, 8), (16, 62), (-16, -2), (64, 0)])
    def test_what_is_filled_in_counts_as_loaded(self, place):
        assert tma(of(LOAD, load(*place))) == (1, 1, 512, 16)

    @pytest.mark.parametrize(
        ("place", "sectors"), [((0, 8), 16), ((16, 62), 2 * 2), ((4, 0), 4 * 4), ((32, 0), 0)]
    )
    def test_a_store_sends_what_is_inside(self, place, sectors):
        x, y = place
        body = f"st.shared.u32 [smem], %tid;\n@%p0 {STORE} [%rd2, {{{x}, {y}}}], [smem];\n{STORED}"
        with_fault = {"keep_going": True}  # most of the box is what nobody wrote
        assert tma(of(STORE, body, **with_fault)) == (1, 1, 512, sectors)

    @pytest.mark.parametrize(("start", "sectors"), [(0, 2), (16, 3), (32, 2)])
    def test_bytes_in_a_row(self, start, sectors):
        body = (
            f"@!%p0 bra LOADED;\n{EXPECT} [bar], 64;\nadd.u64 %rd0, %rd0, {start};\n"
            f"{LOAD_BYTES} [smem], [%rd0], 64, [bar];\nLOADED:\n" + wait("bar", 0)
        )
        assert tma(of(LOAD_BYTES, body)) == (1, 1, 64, sectors)

    def test_lanes_of_a_warp_share_a_request(self):
        body = (
            f"@%p0 {EXPECT} [bar], 96;\nbar.sync 0;\nshl.b32 %r0, %tid, 4;\nmov.u32 %r1, smem;\n"
            "add.u32 %r1, %r1, %r0;\n"
            "setp.ge.u32 %p1, %tid, 29;\nsetp.lt.and.u32 %p1, %tid, 35, %p1;\n"
            f"@%p1 {LOAD_BYTES} [%r1], [%rd0], 16, [bar];\n" + wait("bar", 0)
        )
        assert tma(of(LOAD_BYTES, body)) == (2, 6, 96, 6)

    def test_a_prefetch_moves_nothing(self):
        prefetch = "cp.async.bulk.prefetch.tensor.2d.L2.global.tile"
        assert tma(of(prefetch, f"@%p0 {prefetch} [%rd2, {{0, 0}}];\n")) == (1, 1, 0, 0)


class TestWaits:
    def test_who_comes_early_sleeps(self):
        counts = of("mbarrier.try_wait", load(0, 0), block=96, grid=2)
        assert (counts.mbarrier_waits, counts.blocked) == (6, 6)
        assert counts.waits == 0

    def test_who_comes_late_does_not(self):
        counts = of("mbarrier.test_wait", load(0, 0) + wait("bar", 0, "test_wait"), block=96)
        assert (counts.mbarrier_waits, counts.blocked) == (3, 0)

    def test_bulk_groups_are_waited_for(self):
        assert of("cp.async.bulk.wait_group", STORED).waits == 2


# Warp 0 loads two boxes, warps 1 and 2 multiply six times, warp 3 does nothing.
ROLES = f"""
{BEGIN}
setp.eq.u32 %p1, %warp, 3;
@%p1 bra END;
setp.eq.u32 %p1, %warp, 0;
mov.u32 %r0, 0;
@!%p1 bra CONSUMER;
PRODUCER:
setp.ne.u32 %p2, %lane, 0;
@%p2 bra NEXT;
{EXPECT} [bar], 512;
{LOAD} [smem], [%rd2, {{0, %r0}}], [bar];
NEXT:
{wait("bar", "%r0")}
add.u32 %r0, %r0, 1;
setp.lt.u32 %p2, %r0, 2;
@%p2 bra PRODUCER;
bra END;
CONSUMER:
{ZEROS}
MULTIPLY:
{MMA}
add.u32 %r0, %r0, 1;
setp.lt.u32 %p2, %r0, 6;
@%p2 bra MULTIPLY;
END:
bar.sync 0;
"""


class TestRoles:
    def test_by_what_warps_do(self):
        counters = run(ROLES, block=128, grid=3, declarations=FLOATS)[0].counters
        roles = counters.by_role()
        assert {name: role.warps for name, role in roles.items()} == {
            "producer": (0,), "consumer": (1, 2), "others": (3,), "several": (),
        }  # fmt: skip
        main = {name: role.phases[Phase.MAIN_LOOP] for name, role in roles.items()}
        assert tma(main["producer"]) == (6, 6, 3 * 2 * 512, 3 * 2 * 16)
        assert main["producer"].blocked == main["producer"].mbarrier_waits == 3 * 2
        assert main["consumer"].mma == 3 * 2 * 6
        assert main["consumer"].instructions == 3 * 2 * 6 * 4
        assert roles["several"].phases[Phase.PROLOGUE].barriers == 3 * 4
        assert roles["several"].phases[Phase.EPILOGUE].barriers == 3 * 4
        total = Counts()
        for role in roles.values():
            for counts in role.phases.values():
                total.add(counts)
        assert total == counters.total

    def test_who_loads_and_multiplies_consumes(self):
        body = ZEROS + MMA + BEGIN + load(0, 0)
        roles = run(body, block=32, declarations=FLOATS)[0].counters.by_role()
        assert {name: role.warps for name, role in roles.items()} == {"consumer": (0,)}

    def test_a_launch_that_goes_on_with_larger_blocks(self):
        text = entry("bar.sync 0;\n")
        kernel = load_ptx(text).kernel("k")
        small = kernel.launch(1, 64)
        both = kernel.launch(2, 128, before=small).counters
        assert both.by_role()["others"].warps == (0, 1, 2, 3)
        assert both.total.barriers == 2 + 2 * 4
        last = kernel.launch(1, 32, before=kernel.launch(1, 128)).counters
        assert last.total.barriers == 4 + 1


class TestPhases:
    LOADS = (
        "mov.u32 %r0, 0;\nFILL:\n@!%p0 bra NEXT;\n"
        f"{LOAD_BYTES} [smem], [%rd0], 16, [bar];\n{EXPECT} [bar], 16;\nNEXT:\n"
        + wait("bar", "%r0")
        + "add.u32 %r0, %r0, 1;\nsetp.lt.u32 %p2, %r0, 2;\n@%p2 bra FILL;\n"
    )

    def loads_by_phase(self, body: str) -> list[int]:
        counters = run(BEGIN + body, declarations=FLOATS)[0].counters
        return [counts.tma_boxes for counts in counters.by_phase().values()]

    def test_loads_ahead_of_the_products_are_the_prologue(self):
        products = f"{ZEROS}mov.u32 %r1, 0;\nMULTIPLY:\n{MMA}add.u32 %r1, %r1, 1;\n"
        products += "setp.lt.u32 %p2, %r1, 3;\n@%p2 bra MULTIPLY;\n"
        assert self.loads_by_phase(self.LOADS + products) == [2, 0, 0]

    def test_without_products_every_loop_is_the_main_loop(self):
        assert self.loads_by_phase(self.LOADS) == [0, 2, 0]
