"""Arrivals at mbarriers and waits there, by the scope of their release and acquire."""

import pytest
from tma_snippets import INIT, run

from flash_helpers.ptx import BlockScopeLint, Lint, RaceError

WRITE = "st.shared::cluster.u32 [%r1], 7;"


def hand_over(arrive: str, wait: str = "", *, to: int = 0, write: str = WRITE) -> tuple[Lint, ...]:
    """The lints of a kernel in which warp 1 of block 1 writes to block 0 or to its own block, where
    warp 0 waits and reads. `to`: the block's rank."""
    body = f"""
    mov.u32 %r0, %cluster_ctarank;
    @%p0 {INIT} [bar], 32;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r1, smem;
    mapa.shared::cluster.u32 %r1, %r1, {to};
    mov.u32 %r2, bar;
    mapa.shared::cluster.u32 %r2, %r2, {to};
    setp.eq.u32 %p1, %r0, 1;
    setp.eq.and.u32 %p1, %warp, 1, %p1;
    @!%p1 bra READ;
    {write}
    mbarrier.arrive{arrive}.shared::cluster.b64 _, [%r2];
    bra END;
    READ:
    setp.eq.u32 %p1, %r0, {to};
    setp.eq.and.u32 %p1, %warp, 0, %p1;
    @!%p1 bra END;
    WAIT: mbarrier.try_wait.parity{wait}.shared::cta.b64 %p7, [bar], 0;
    @!%p7 bra WAIT;
    ld.shared.u32 %r3, [smem];
    st.global.u32 [%rd1], %r3;
    END:
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    launch, out = run(body, grid=2, cluster=2, block=64, target="sm_90", lints=True)
    assert out[0] == 7
    return launch.lints


RELEASE, ACQUIRE = ".release.cluster", ".acquire.cluster"


@pytest.mark.parametrize(("arrive", "wait"), [(RELEASE, ACQUIRE), ("", ""), (RELEASE, "")])
def test_the_cluster_orders_blocks(arrive: str, wait: str) -> None:
    hand_over(arrive, wait)


@pytest.mark.parametrize(
    ("arrive", "wait"),
    [
        (".release.cta", ACQUIRE),
        (".relaxed.cluster", ACQUIRE),
        (RELEASE, ".acquire.cta"),
        (RELEASE, ".relaxed.cluster"),
        ("", ".acquire.cta"),
    ],
)
def test_less_does_not(arrive: str, wait: str) -> None:
    with pytest.raises(RaceError, match="read of shared address 0 and write by warp 1"):
        hand_over(arrive, wait)


@pytest.mark.parametrize("arrive", [".release.cta", RELEASE])
@pytest.mark.parametrize("wait", [".acquire.cta", ACQUIRE])
def test_a_block_needs_no_more_than_its_own(arrive: str, wait: str) -> None:
    hand_over(arrive, wait, to=1)


RELEASED = ("fence.acq_rel.cluster;", "membar.gl;", "fence.sc.sys;")
KEPT = ("", "fence.acq_rel.cta;", "membar.cta;", "fence.proxy.async;")


@pytest.mark.parametrize("fence", KEPT)
def test_an_arrival_without_a_scope_releases_to_its_block(fence: str) -> None:
    (lint,) = hand_over("", write=f"{WRITE} {fence}")
    assert type(lint) is BlockScopeLint
    assert lint.site.opcode.startswith("mbarrier.arrive")
    assert "what its thread has written at" in str(lint) and "st.shared::cluster.u32" in str(lint)


@pytest.mark.parametrize("fence", RELEASED)
def test_fences_release_to_the_cluster(fence: str) -> None:
    assert hand_over("", write=f"{WRITE} {fence}") == ()


def test_nothing_is_said_of_the_scope_of_the_cluster_or_of_the_own_block() -> None:
    assert hand_over(RELEASE) == ()
    assert hand_over("", to=1) == ()
