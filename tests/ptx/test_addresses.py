"""A 32-bit address and its immediate wrap around together, modulo 2^32."""

import numpy as np
import pytest
from ptx_snippets import evaluate
from tma_snippets import EXPECT, INIT, LOAD, LOAD_BYTES, run, wait

from flash_helpers.ptx import OutOfBoundsError

# %low: 128 bytes below the start of the memory, as nvcc leaves it for rings of three slots.
LOW = "add.u32 %low, {start}, -128;\n"
DECLARATIONS = """.shared .align 16 .b8 tile[512]; .local .align 16 .b8 stack[64];
.reg .b32 %start, %low; .reg .b64 %wide;"""

SHARED = {
    "ld": "st.shared.u32 [tile+8], 7; ld.shared.u32 %d, [%low+136];",
    "ld.v4": "st.shared.v4.u32 [tile], {1, 2, 3, 7}; ld.shared.v4.u32 {_, _, _, %d}, [%low+128];",
    "st": "st.shared.u32 [%low+136], 7; ld.shared.u32 %d, [tile+8];",
    "st.v2": "st.shared.v2.u32 [%low+136], {1, 7}; ld.shared.u32 %d, [tile+12];",
    "atom": "st.shared.u32 [tile+8], 7; atom.shared.or.b32 %d, [%low+136], 0;",
    "red": "st.shared.u32 [tile], 3; red.shared.add.u32 [%low+128], 4; ld.shared.u32 %d, [tile];",
}


@pytest.mark.parametrize("access", SHARED)
def test_of_shared_memory(access):
    body = "mov.u32 %start, tile;\n" + LOW.format(start="%start") + SHARED[access]
    assert evaluate(body, declarations=DECLARATIONS, threads=1)[0] == 7


def test_of_local_memory():
    body = "mov.u32 %start, stack;\n" + LOW.format(start="%start")
    body += "st.local.u32 [%low+132], 7; ld.local.u32 %d, [stack+4];"
    assert evaluate(body, declarations=DECLARATIONS, threads=1)[0] == 7


def test_of_matrices_by_the_whole_warp():
    body = "mad.lo.u32 %start, %thread, 16, tile;\n" + LOW.format(start="%start")
    body += """stmatrix.sync.aligned.m8n8.x1.shared.b16 [%low+128], {%thread};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%d}, [%low+128];"""
    np.testing.assert_array_equal(evaluate(body, declarations=DECLARATIONS), np.arange(32))


def test_of_copies_and_their_barriers():
    """cp.async, bulk copies of both kinds, and the mbarrier object that counts their bytes."""
    body = f"""
    add.u32 %r1, smem, -1024;
    add.u32 %r2, bar, -1024;
    @%p0 {INIT} [%r2+1024], 1;
    bar.sync 0;
    @!%p0 bra ISSUED;
    {EXPECT} [%r2+1024], 528;
    {LOAD} [%r1+2048], [%rd2, {{0, 0}}], [%r2+1024];
    {LOAD_BYTES} [%r1+1024], [%rd0+16], 16, [%r2+1024];
    cp.async.ca.shared.global [%r1+1040], [%rd0+32], 16;
    cp.async.wait_all;
    ISSUED:
    {wait("%r2+1024", 0)}
    bar.sync 0;
    ld.shared.u32 %r3, [smem];
    ld.shared.u32 %r4, [smem+1028];
    ld.shared.u32 %r5, [smem+16];
    @%p0 st.global.v2.u32 [%rd1], {{%r3, %r4}};
    @%p0 st.global.u32 [%rd1+8], %r5;
    """
    _, found = run(body, target="sm_90")
    np.testing.assert_array_equal(found[:3].view(np.float32), [4, 1, 8])


def test_of_another_block_of_the_cluster():
    body = f"""
    mapa.shared::cluster.u32 %r1, smem, 1;
    mapa.shared::cluster.u32 %r2, bar, 1;
    sub.u32 %r1, %r1, 0x4000000;
    sub.u32 %r2, %r2, 0x4000000;
    mov.u32 %r3, %cluster_ctarank;
    setp.eq.u32 %p1, %r3, 1;
    and.pred %p2, %p0, %p1;
    @%p2 {INIT} [bar], 1;
    @%p2 {EXPECT} [bar], 4;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    setp.eq.and.u32 %p3, %r3, 0, %p0;
    @%p3 st.async.shared::cluster.mbarrier::complete_tx::bytes.u32
        [%r1+0x4000008], 7, [%r2+0x4000000];
    @!%p1 bra DONE;
    {wait("bar", 0)}
    ld.shared.u32 %r4, [smem+8];
    @%p0 st.global.u32 [%rd1], %r4;
    DONE:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """
    _, found = run(body, grid=2, cluster=2, target="sm_90")
    assert found[0] == 7


def test_a_64_bit_register_keeps_its_high_half():
    """A generic address where one of shared memory is due is a mistake, though its low half is an
    address of shared memory."""
    body = "mov.u64 %wide, tile; cvta.shared.u64 %wide, %wide; ld.shared.u32 %d, [%wide+4];"
    with pytest.raises(OutOfBoundsError):
        evaluate(body, declarations=DECLARATIONS, threads=1)
    body = "mov.u64 %wide, tile; sub.u64 %wide, %wide, 128; st.shared.u32 [tile], 7;"
    body += "ld.shared.u32 %d, [%wide+128];"
    assert evaluate(body, declarations=DECLARATIONS, threads=1)[0] == 7
