"""Bulk copies: what they move, when it is there, and what of their operands is undefined."""

import numpy as np
import pytest
from tma_snippets import EXPECT, INIT, LOAD, LOAD_BYTES, run, wait

from flash_helpers.ptx import (
    BulkCopyError,
    Counts,
    Lint,
    MisalignedError,
    OutOfBoundsError,
    OverlappingStoresLint,
    PendingCopyError,
    RaceError,
    TensorMap,
    UninitialisedReadError,
    UnsupportedInstruction,
)
from flash_helpers.ptx.run.memory.boxes import Box
from flash_helpers.ptx.run.memory.regions import ARENA_BASE

# Of the first allocation, which `run` makes of the input.
INPUT = ARENA_BASE + 4096
DATA = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
MADE = f"@%p0 {INIT} [bar], 1;\nbar.sync 0;\n"
STORE_ALL = """
shl.b32 %r30, %tid, 4;
cvt.u64.u32 %rd10, %r30;
add.u64 %rd10, %rd10, %rd1;
mov.u32 %r31, smem;
add.u32 %r30, %r30, %r31;
ld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r30];
st.global.v4.u32 [%rd10], {%r20, %r21, %r22, %r23};
"""
"""Shared memory from `smem` on, 16 bytes of each thread, to the output."""
FILL = """
shl.b32 %r30, %tid, 4;
mov.u32 %r31, smem;
add.u32 %r30, %r30, %r31;
add.u32 %r29, %tid, 1000;
st.shared.v4.u32 [%r30], {%r29, %r29, %r29, %r29};
fence.proxy.async;
bar.sync 0;
"""
"""The inverse: 1000 + the thread's number, four times."""
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
REDUCE = STORE.replace("cp.async", "cp.reduce.async").replace(".tile", ".add.tile")
WAIT_ALL = "@%p0 cp.async.bulk.commit_group;\n@%p0 cp.async.bulk.wait_group 0;\n"


def loaded(tensor_map: TensorMap, *coordinates: int, threads: int = 32, **options) -> np.ndarray:
    """Shared memory after a load of one box, uint32."""
    at = ", ".join(map(str, coordinates))
    load = LOAD.replace("2d", f"{len(coordinates)}d")
    body = f"""{MADE}
    @%p0 {EXPECT} [bar], {tensor_map.box_bytes};
    @%p0 {load} [smem], [%rd2, {{{at}}}], [bar];
    {wait("bar", 0)}{STORE_ALL}"""
    return run(body, results=4 * threads, block=threads, tensor_map=tensor_map, **options)[1]


SAME_BOX = {
    "with a cache hint, after prefetches": ("""
        createpolicy.fractional.L2::evict_first.b64 %rd5, 1.0;
        prefetch.tensormap [%rd2];
        cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd2, {0, 4}];
        cp.async.bulk.prefetch.L2.global.L2::cache_hint [%rd0], 128, %rd5;
    """, ".L2::cache_hint", ", %rd5"),
    "by a mask with the only block": ("mov.u16 %h0, 1;", ".multicast::cluster", ", %h0"),
    "over poison, which ends where bytes come": ("""
        ld.shared.u32 %r5, [smem+4096];
        st.shared.u32 [smem], %r5;
        fence.proxy.async;
        bar.sync 0;
    """, "", ""),
}  # fmt: skip


class TestLoads:
    @pytest.mark.parametrize(
        ("dims", "box", "at"),
        [
            ((2048,), (128,), (256,)),
            ((32, 64), (32, 4), (0, 6)),
            ((32, 16, 4), (16, 4, 2), (16, 2, 1)),
            ((16, 4, 8, 4), (8, 2, 4, 2), (8, 1, 3, 2)),
            ((8, 4, 4, 4, 4), (8, 2, 2, 2, 2), (0, 1, 2, 0, 1)),
            ((32, 64), (32, 4), (-4, 62)),
            ((32, 64), (32, 4), (40, -2)),
        ],
    )
    def test_of_one_to_five_dimensions(self, dims, box, at):
        tensor_map = TensorMap("f32", INPUT, dims, box)
        found = loaded(tensor_map, *at)
        wanted = Box(tensor_map, at).read(DATA.view(np.uint8).reshape(-1), INPUT)
        assert np.array_equal(found, wanted.view(np.uint32))

    def test_a_swizzle(self):
        tensor_map = TensorMap("f32", INPUT, (32, 64), (32, 8), swizzle="128B")
        rows = loaded(tensor_map, 0, 0, threads=64).view(np.float32).reshape(8, 8, 4)
        for r in range(8):
            assert np.array_equal(rows[r, np.arange(8) ^ r].reshape(-1), DATA[r])

    def test_of_bytes_in_a_row(self):
        body = f"""{MADE}
        @%p0 {EXPECT} [bar], 512;
        @%p0 {LOAD_BYTES} [smem], [%rd0+48], 512, [bar];
        {wait("bar", 0)}{STORE_ALL}"""
        found = run(body, block=32, results=128)[1]
        assert np.array_equal(found, DATA.reshape(-1)[12:140].view(np.uint32))

    def test_to_a_generic_map_in_global_memory(self):
        """Maps are found wherever they lie: here, in the input."""
        tensor_map = TensorMap("f32", INPUT + 128, (32, 4), (32, 4))
        data = np.zeros((64, 32), np.float32)
        data.reshape(-1)[:32] = np.frombuffer(tensor_map.encode(), np.float32)
        data.reshape(-1)[32:160] = np.arange(128)
        body = f"""{MADE}
        @%p0 {EXPECT} [bar], 512;
        @%p0 {LOAD} [smem], [%rd0, {{0, 0}}], [bar];
        {wait("bar", 0)}{STORE_ALL}"""
        found = run(body, data, block=32, results=128)[1]
        assert np.array_equal(found.view(np.float32), np.arange(128))

    @pytest.mark.parametrize(("before", "modifier", "operand"), SAME_BOX.values(), ids=SAME_BOX)
    def test_of_one_box(self, before, modifier, operand):
        body = f"""{MADE}{before}
        @%p0 {EXPECT} [bar], 512;
        @%p0 {LOAD}{modifier} [smem], [%rd2, {{0, 4}}], [bar]{operand};
        {wait("bar", 0)}{STORE_ALL}"""
        found = run(body, block=32, results=128)[1]
        assert np.array_equal(found, DATA[4:8].view(np.uint32).ravel())


OUT = INPUT + DATA.nbytes + 4096  # of the output, that `run` allocates next


def out_map(dtype="u32", dims=(32, 16), box=(32, 4), **options) -> TensorMap:
    return TensorMap(dtype, OUT, dims, box, **options)


class TestStores:
    FILLED = np.repeat(np.arange(1000, 1032, dtype=np.uint32), 4).reshape(4, 32)

    def test_a_box(self):
        body = f"{FILL}@%p0 {STORE} [%rd2, {{0, 8}}], [smem];\n{WAIT_ALL}"
        found = run(body, block=32, tensor_map=out_map(), results=512)[1].reshape(16, 32)
        assert np.array_equal(found[8:12], self.FILLED)
        assert not found[:8].any() and not found[12:].any()

    def test_what_lies_outside_is_clipped(self):
        body = f"{FILL}@%p0 {STORE} [%rd2, {{16, 14}}], [smem];\n{WAIT_ALL}"
        found = run(body, block=32, tensor_map=out_map(), results=1024)[1].reshape(32, 32)
        wanted = np.zeros((32, 32), np.uint32)
        wanted[14:16, 16:] = self.FILLED[:2, :16]
        assert np.array_equal(found, wanted)

    def test_bytes_in_a_row_that_nobody_waits_for_arrive_all_the_same(self):
        body = f"""{FILL}
        @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd1+64], [smem+16], 256;
        @%p0 cp.async.bulk.commit_group;
        @%p0 cp.async.bulk.wait_group.read 0;"""
        found = run(body, block=32, results=128)[1]
        assert np.array_equal(found[16:80], self.FILLED.ravel()[4:68]) and not found[80:].any()

    def test_they_complete_when_they_are_waited_for(self):
        """The writes of a group are there after wait_group, but need not be after .read, and who
        reads them before is told so."""
        body = f"""{FILL}
        @!%p0 bra END;
        cp.async.bulk.global.shared::cta.bulk_group [%rd1], [smem], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.global.shared::cta.bulk_group [%rd1+16], [smem], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        ld.global.u32 %r0, [%rd1];
        cp.async.bulk.wait_group 1;
        ld.global.u32 %r1, [%rd1];
        ld.global.u32 %r2, [%rd1+16];
        cp.async.bulk.wait_group 0;
        ld.global.u32 %r3, [%rd1+16];
        st.global.v4.u32 [%rd1+32], {{%r0, %r1, %r2, %r3}};
        END:
        """
        found, out = run(body, block=32, results=12, keep_going=True)
        assert out[8:].tolist() == [0, 1000, 0, 1000]
        assert [type(fault) for fault in found.faults] == 2 * [PendingCopyError]
        ptx = [fault.site.ptx_line for fault in found.faults]
        assert ptx[1] == ptx[0] + 3  # of the first and the third load

    def test_only_who_has_waited_may_write_again(self):
        def writes_again(thread, between):
            body = f"""{FILL}
            setp.eq.u32 %p1, %tid, {thread};
            @%p0 {STORE} [%rd2, {{0, 8}}], [smem];
            {WAIT_ALL}{between}
            @%p1 st.shared.u32 [smem], 5;"""
            run(body, block=64, tensor_map=out_map())

        writes_again(0, "")
        writes_again(33, "bar.sync 0;")
        with pytest.raises(RaceError, match="and read by bulk stores of warp 0 lane 0"):
            writes_again(33, "")

    def test_what_nothing_has_written(self):
        body = f"@%p0 {STORE} [%rd2, {{0, 8}}], [smem];\n{WAIT_ALL}"
        with pytest.raises(UninitialisedReadError, match=r"what goes to global memory .*address 0"):
            run(body, block=32, tensor_map=out_map())

    def test_unless_it_is_clipped(self):
        body = f"{FILL}@%p0 {STORE} [%rd2, {{0, 12}}], [smem];\n{WAIT_ALL}"
        tensor_map = out_map(box=(32, 8))
        run(body, block=32, tensor_map=tensor_map)
        with pytest.raises(UninitialisedReadError, match="address 512"):
            run(body.replace("12}", "11}"), block=32, tensor_map=tensor_map)

    def test_poison(self):
        body = f"""
        ld.shared.u32 %r5, [smem+4096];
        {FILL}@%p0 st.shared.u32 [smem+64], %r5;
        @%p0 fence.proxy.async;
        @%p0 {STORE} [%rd2, {{0, 8}}], [smem];\n{WAIT_ALL}"""
        with pytest.raises(UninitialisedReadError, match=r"what goes to global .*address 4096"):
            run(body, block=32, tensor_map=out_map())


class TestGlobalMemory:
    """Nobody may write bytes that a pending copy reads, nor touch those that it writes."""

    LOADED = f"""{MADE}
    @%p0 {EXPECT} [bar], 512;
    @%p0 {LOAD} [smem], [%rd2, {{0, 4}}], [bar];
    FIRST
    {wait("bar", 0)}
    THEN
    """
    STORED = f"""{FILL}
    @%p0 {STORE} [%rd2, {{0, 8}}], [smem];
    @%p0 cp.async.bulk.commit_group;
    @%p0 cp.async.bulk.wait_group.read 0;
    FIRST
    @%p0 cp.async.bulk.wait_group 0;
    THEN
    """

    @pytest.mark.parametrize(
        ("body", "access", "tensor_map", "words"),
        [
            (LOADED, "@%p0 st.global.u32 [%rd0+512], 7;", None, "reads, issued at"),
            (LOADED, "@%p0 st.global.u64 [%rd0+1016], 7;", None, "reads, issued at"),
            (LOADED, "@%p0 red.global.add.u32 [%rd0+640], 7;", None, "reads, issued at"),
            (STORED, "@%p0 st.global.u32 [%rd1+1024], 7;", out_map(), "writes, issued at"),
            (STORED, "@%p0 ld.global.u32 %r0, [%rd1+1532];", out_map(), "writes, issued at"),
        ],
    )
    def test_touched_too_early(self, body, access, tensor_map, words):
        right = body.replace("FIRST", "").replace("THEN", access)
        run(right, block=32, tensor_map=tensor_map)
        wrong = body.replace("FIRST", access).replace("THEN", "")
        with pytest.raises(PendingCopyError, match=f"which a bulk copy {words}"):
            run(wrong, block=32, tensor_map=tensor_map)

    @pytest.mark.parametrize(
        ("body", "access", "tensor_map"),
        [
            (LOADED, "@%p0 st.global.u32 [%rd0+508], 7;", None),
            (LOADED, "@%p0 st.global.u32 [%rd0+1024], 7;", None),
            (LOADED, "@%p0 ld.global.u32 %r0, [%rd0+512];", None),
            (STORED, "@%p0 ld.global.u32 %r0, [%rd1+1020];", out_map()),
            (STORED, "@%p0 st.global.u32 [%rd1+1536], 7;", out_map()),
        ],
    )
    def test_beside_it_all_may_be_touched(self, body, access, tensor_map):
        run(body.replace("FIRST", access).replace("THEN", ""), block=32, tensor_map=tensor_map)

    def test_between_the_rows_of_a_box_too(self):
        tensor_map = out_map(dims=(64, 8), box=(32, 4))
        body = self.STORED.replace("0, 8}", "0, 0}").replace("THEN", "")
        run(body.replace("FIRST", "@%p0 st.global.u32 [%rd1+128], 7;"), tensor_map=tensor_map)
        with pytest.raises(PendingCopyError):
            run(body.replace("FIRST", "@%p0 st.global.u32 [%rd1+256], 7;"), tensor_map=tensor_map)

    # A store from what LOADED has brought; a load, complete, of what STORED has written.
    STORE_BACK = f"""
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0+ADDRESS], [smem], 16;
    {WAIT_ALL}"""
    LOAD_BACK = f"""
    @%p0 {INIT} [bar], 1;
    @%p0 {EXPECT} [bar], 16;
    @%p0 {LOAD_BYTES} [smem+4096], [%rd1+ADDRESS], 16, [bar];
    bar.sync 0;
    {wait("bar", 0)}"""

    @pytest.mark.parametrize(
        ("body", "access", "tensor_map", "words", "start", "at", "seed"),
        [
            (LOADED, STORE_BACK, None, "write .* which a bulk copy reads", INPUT, 512, None),
            (LOADED, STORE_BACK, None, "write .* which a bulk copy reads", INPUT, 1008, None),
            (STORED, LOAD_BACK, out_map(), "read .* which a bulk copy writes", OUT, 1024, None),
            (STORED, LOAD_BACK, out_map(), "read .* which a bulk copy writes", OUT, 1520, 1),
        ],
    )
    def test_by_another_copy(self, body, access, tensor_map, words, start, at, seed):
        access = access.replace("ADDRESS", str(at))
        options = {"block": 32, "tensor_map": tensor_map, "seed": seed}
        run(body.replace("FIRST", "").replace("THEN", access), **options)
        with pytest.raises(PendingCopyError, match=words) as caught:
            run(body.replace("FIRST", access).replace("THEN", ""), **options)
        assert caught.value.address == start + at

    @pytest.mark.parametrize("address", [1008, 1536])
    def test_beside_it_copies_may_be_made(self, address):
        access = self.LOAD_BACK.replace("ADDRESS", str(address))
        body = self.STORED.replace("FIRST", access).replace("THEN", "")
        run(body, block=32, tensor_map=out_map())

    @pytest.mark.parametrize(
        ("first", "second", "is_told"),
        [("", "", True), ("", "reduce", True), ("reduce", "", True), ("reduce", "reduce", False)],
    )
    def test_stores_to_the_same_bytes_are_a_lint(self, first, second, is_told):
        first, second = ((REDUCE if which else STORE) for which in (first, second))
        commit = "@%p0 cp.async.bulk.commit_group;\n"

        def lints(row: int, between: str = "", **options) -> list[Lint]:
            body = f"""{FILL}
            @%p0 {first} [%rd2, {{0, 4}}], [smem];
            {commit}{between}
            @%p0 {second} [%rd2, {{0, {row}}}], [smem];
            {WAIT_ALL}"""
            return [*run(body, block=32, tensor_map=out_map(), lints=True, **options)[0].lints]

        found = lints(7)
        assert [type(lint) for lint in found] == [OverlappingStoresLint] * is_told
        if is_told:
            assert found[0].address == OUT + 7 * 128 and "either may be last" in str(found[0])
        assert lints(8) == []
        assert lints(7, "@%p0 cp.async.bulk.wait_group 0;") == []
        assert len(lints(7, "@%p0 cp.async.bulk.wait_group.read 0;", seed=1)) == is_told

    def test_reductions_go_together(self):
        body = self.STORED.replace(STORE, REDUCE).replace("THEN", "")
        atomic = "@%p0 red.global.add.u32 [%rd1+1024], 7;"
        found = run(body.replace("FIRST", atomic), block=32, tensor_map=out_map())[1]
        assert found[256] == 1007
        with pytest.raises(PendingCopyError):
            run(body.replace("FIRST", atomic.replace("red", "st").replace(".add", "")), block=32,
                tensor_map=out_map())  # fmt: skip


class TestToAnotherBlock:
    """The block of rank 0 sends 64 bytes from `smem` on, of which FIRST writes some, to rank 1."""

    BODY = f"""{MADE}
    mov.u32 %r8, %cluster_ctarank;
    setp.eq.u32 %p1, %r8, 0;
    setp.lt.and.u32 %p2, %tid, 16, %p1;
    shl.b32 %r9, %tid, 2;
    mov.u32 %r10, smem;
    add.u32 %r9, %r9, %r10;
    FIRST
    fence.proxy.async;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @!%p1 bra RECEIVE;
    @!%p0 bra END;
    mapa.shared::cluster.u32 %r11, smem, 1;
    mapa.shared::cluster.u32 %r12, bar, 1;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
      [%r11+1024], [smem], 64, [%r12];
    bra END;
    RECEIVE:
    @%p0 {EXPECT} [bar], 64;
    {wait("bar", 0)}
    ld.shared.u32 %r0, [smem+1072];
    @%p0 st.global.u32 [%rd1], %r0;
    END:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """

    def sent(self, first: str) -> int:
        body = self.BODY.replace("FIRST", first)
        launch = {"block": 32, "grid": 2, "cluster": 2, "target": "sm_90"}
        return int(run(body, results=1, **launch)[1][0])

    def test_what_was_written(self):
        assert self.sent("@%p2 st.shared.u32 [%r9], %tid;") == 12

    def test_what_nothing_has_written(self):
        first = "setp.lt.and.u32 %p3, %tid, 12, %p1;\n@%p3 st.shared.u32 [%r9], %tid;"
        words = r"that goes to global memory .*address 48, .*had written\n .*cp\.async\.bulk"
        with pytest.raises(UninitialisedReadError, match=words):
            self.sent(first)

    def test_poison(self):
        first = "ld.shared.u32 %r7, [smem+4096];\n@%p2 st.shared.u32 [%r9], %r7;"
        with pytest.raises(UninitialisedReadError, match=r"address 4096, .*\n.*ld\.shared"):
            self.sent(first)


class TestMaps:
    def test_are_not_to_be_loaded(self):
        with pytest.raises(BulkCopyError, match="of a tensor map: it is opaque"):
            run("ld.param.u32 %r0, [map+64];", block=32)
        with pytest.raises(BulkCopyError, match=r"__grid_constant__"):
            run("ld.u64 %rd5, [%rd2];", block=32)

    @pytest.mark.parametrize("space", ["", ".global", ".const"])
    def test_in_global_memory_are_neither(self, space):
        """The input begins with two maps, of which the kernel prefetches a box."""
        tensor_map = TensorMap("f32", INPUT, (4, 4), (4, 4))
        data = np.frombuffer(2 * tensor_map.encode() + bytes(256), np.uint8)
        load = f"ld{space}.u64 %rd5, [%rd0+OFFSET];"
        tma = "@%p0 cp.async.bulk.prefetch.tensor.2d.L2.global [%rd0+128, {0, 0}];"

        def launch(body: str) -> Counts:
            found, _ = run(body, data=data, tensor_map=tensor_map, block=32)
            return found.counters.total

        assert launch(tma + load.replace("OFFSET", "256")).tma_requests == 1
        assert launch(load.replace("OFFSET", "0")).global_requests == (space != ".const")
        for offset in (0, 120, 128, 248):
            with pytest.raises(BulkCopyError, match="8 bytes of a tensor map") as caught:
                launch(tma + load.replace("OFFSET", str(offset)))
            assert caught.value.address == INPUT + offset


REDUCED = np.array([5, 7, 0xFFFF_FFF0, 0], np.uint32)
BY = np.array([3, 9, 0x20, 1], np.uint32)


def reduced(operation: str, type_name: str, old: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Four words of global memory after a reduction by four others, which stand behind them."""
    body = f"""
    ld.global.v4.u32 {{%r0, %r1, %r2, %r3}}, [%rd0];
    ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd0+16];
    @%p0 st.global.v4.u32 [%rd1], {{%r0, %r1, %r2, %r3}};
    @%p0 st.shared.v4.u32 [smem], {{%r4, %r5, %r6, %r7}};
    fence.proxy.async;
    @%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{type_name}
      [%rd1], [smem], 16;
    {WAIT_ALL}"""
    data = np.concatenate([old.view(np.uint8), by.view(np.uint8), np.zeros(4096, np.uint8)])
    tensor_map = TensorMap("u8", INPUT, (32,), (16,))
    return run(body, data, block=32, results=4, tensor_map=tensor_map)[1]


class TestReductions:
    @pytest.mark.parametrize(
        ("operation", "type_name", "wanted"),
        [
            ("add", "u32", [8, 16, 0x10, 1]),
            ("min", "u32", [3, 7, 0x20, 0]),
            ("min", "s32", [3, 7, 0xFFFF_FFF0, 0]),
            ("max", "u32", [5, 9, 0xFFFF_FFF0, 1]),
            ("max", "s32", [5, 9, 0x20, 1]),
            ("inc", "u32", [0, 8, 0, 1]),
            ("dec", "u32", [3, 6, 0x20, 1]),
            ("and", "b32", [1, 1, 0x20, 0]),
            ("or", "b64", [7, 15, 0xFFFF_FFF0, 1]),
            ("xor", "b32", [6, 14, 0xFFFF_FFD0, 1]),
        ],
    )
    def test_of_integers(self, operation, type_name, wanted):
        assert reduced(operation, type_name, REDUCED, BY).tolist() == wanted

    def test_of_64_bits(self):
        found = reduced("add", "u64", REDUCED, BY).view(np.uint64)
        assert found.tolist() == (REDUCED.view(np.uint64) + BY.view(np.uint64)).tolist()
        found = reduced("min", "s64", REDUCED, BY).view(np.int64)
        assert found.tolist() == [5 | 7 << 32, 0xFFFF_FFF0]

    def test_of_floats(self):
        tiny = np.float32(1e-40)
        old = np.array([1.5, -2, tiny, 1e-38], np.float32)
        by = np.array([0.25, 5, 1, -0.95e-38], np.float32)
        assert reduced("add", "f32", old, by).view(np.float32).tolist() == [1.75, 3, 1, 0]
        old, by = np.array([1.5, -2], np.float64), np.array([1e-9, 5])
        assert reduced("add", "f64", old, by).view(np.float64).tolist() == [1.5 + 1e-9, 3]

    def test_of_halves(self):
        old = np.array([1.5, -2, 3, 2048, 6e-8, 1, 2, 3], np.float16)
        by = np.array([0.25, 5, 4, 1, 6e-8, 0, -4, 9], np.float16)
        assert np.array_equal(reduced("add.noftz", "f16", old, by).view(np.float16), old + by)
        assert np.array_equal(reduced("min", "f16", old, by).view(np.float16), np.minimum(old, by))
        bits = (old.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        found = reduced("max", "bf16", bits, bits[::-1].copy())
        wanted = np.maximum(old, old[::-1]).astype(np.float32).view(np.uint32) >> 16
        assert np.array_equal(found.view(np.uint16), wanted)

    @pytest.mark.parametrize(
        ("operation", "type_name"), [("min", "f32"), ("inc", "s32"), ("add", "s64"), ("or", "u32")]
    )
    def test_types_that_it_has_not(self, operation, type_name):
        with pytest.raises(UnsupportedInstruction, match=f"{operation} has the types"):
            reduced(operation, type_name, REDUCED, BY)

    @pytest.mark.parametrize(
        ("operation", "dtype", "wanted"),
        [("add", "u32", 2008), ("and", "s32", 1000 & 1008), ("max", "s64", 1008)],
    )
    def test_of_a_box(self, operation, dtype, wanted):
        """Thread i holds 1000 + i; the second box begins with what thread 8 holds."""
        reduce = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group"
        store = f"@%p0 {STORE} [%rd2, {{0, 8}}], [smem];\n{WAIT_ALL}"
        body = f"{FILL}{store}@%p0 {reduce} [%rd2, {{0, 8}}], [smem+128];\n{WAIT_ALL}"
        size = int(dtype[1:]) // 8
        tensor_map = out_map(dtype, (128 // size, 16), (16 // size, 1))
        found = run(body, block=32, tensor_map=tensor_map, results=512)[1].reshape(16, 32)
        assert found[8, :4].tolist() == [wanted] * 4 and not found[8, 4:].any()

    @pytest.mark.parametrize(
        ("operation", "dtypes"),
        [
            ("add", "u32 s32 u64 f16 f32 f64 bf16"),
            ("min", "u32 s32 u64 s64 f16 bf16"),
            ("max", "u32 s32 u64 s64 f16 bf16"),
            *((name, "u32") for name in ("inc", "dec")),
            *((name, "u32 s32 u64") for name in ("and", "or", "xor")),
        ],
    )
    def test_of_a_box_has_the_types_that_a_gpu_takes(self, operation, dtypes):
        """An H200 ran these; any other was an illegal instruction."""
        body = f"""{FILL}
        @%p0 cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.bulk_group
          [%rd2, {{0, 0}}], [smem];
        {WAIT_ALL}"""
        for dtype in ["u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16"]:
            size = int(dtype.lstrip("usbf")) // 8
            tensor_map = out_map(dtype, (128 // size, 16), (16 // size, 1))
            if dtype in dtypes.split():
                run(body, block=32, tensor_map=tensor_map)
                continue
            told = f"{operation} of a tensor map of .* {dtype} .*: it has {dtypes.split()[0]}"
            with pytest.raises(BulkCopyError, match=told):
                run(body, block=32, tensor_map=tensor_map)


class TestOperands:
    @pytest.mark.parametrize(
        ("copy", "error", "words"),
        [
            (f"{LOAD} [smem+64], [%rd2, {{0, 0}}], [bar];", MisalignedError, "a multiple of 128"),
            (f"{LOAD} [smem], [%rd2+32, {{0, 0}}], [bar];", MisalignedError, "tensor map at .*64"),
            (f"{LOAD} [smem], [%rd0, {{0, 0}}], [bar];", BulkCopyError, "TensorMap.encode has not"),
            (f"{LOAD} [smem], [%rd1+1048576, {{0, 0}}], [bar];", OutOfBoundsError, "a tensor map"),
            (
                f"{LOAD} [smem+8064], [%rd2, {{0, 0}}], [bar];", OutOfBoundsError,
                "512 bytes at shared address 8064, but the block has 8256",
            ),
            (
                f"{LOAD} [smem], [%rd2, {{3, 0}}], [bar];", BulkCopyError,
                r"a box at \(3, 0\) of a tensor map of 32 x 64 f32 .* begin 12 bytes .* of 16",
            ),
            (
                f"{LOAD.replace('2d', '3d')} [smem], [%rd2, {{0, 0, 0}}], [bar];", BulkCopyError,
                "3 coordinates for a tensor map .* 2 dimensions",
            ),
            (
                f"{STORE} [%rd2, {{0, -1}}], [smem];", BulkCopyError,
                r"a box at \(0, -1\) .* must not be negative",
            ),
            (
                f"{LOAD}.multicast::cluster [smem], [%rd2, {{0, 0}}], [bar], %h0;", BulkCopyError,
                "the mask 0x3 of a cluster of 1 block",
            ),
            (f"{LOAD_BYTES} [smem+8], [%rd0], 16, [bar];", MisalignedError, "shared memory at"),
            (f"{LOAD_BYTES} [smem], [%rd0+8], 16, [bar];", MisalignedError, "global memory at"),
            (f"{LOAD_BYTES} [smem], [%rd0], 24, [bar];", BulkCopyError, "24 bytes: give"),
            (
                f"{LOAD_BYTES} [smem+8192], [%rd0], 128, [bar];", OutOfBoundsError,
                "128 bytes at shared address 8192",
            ),
            (
                f"{LOAD_BYTES} [smem], [%rd0+8128], 128, [bar];", OutOfBoundsError,
                "128 bytes .* 0 bytes past the end of the 8192-byte",
            ),
            (
                "cp.async.bulk.global.shared::cta.bulk_group [%rd1+4096], [smem], 16;",
                OutOfBoundsError, "past the end of the 4096-byte",
            ),
        ],
    )  # fmt: skip
    def test_that_are_undefined(self, copy, error, words):
        body = f"{MADE}{FILL}mov.u16 %h0, 3;\n@%p0 {copy}"
        with pytest.raises(error, match=words) as caught:
            run(body, block=32)
        assert "cp.async.bulk" in str(caught.value) and "warp 0 lane 0" in str(caught.value)

    def test_a_map_of_more_than_there_is(self):
        with pytest.raises(OutOfBoundsError, match=r"of a tensor map .* past the end of the 8192"):
            loaded(TensorMap("f32", INPUT, (32, 65), (32, 4)), 0, 61)

    def test_a_map_that_begins_before_the_tensor(self):
        earlier = TensorMap("f32", INPUT - 4096, (32, 96), (32, 4))
        own = TensorMap("f32", INPUT, (32, 64), (32, 4))
        assert np.array_equal(loaded(earlier, 0, 32), loaded(own, 0, 0))
        with pytest.raises(OutOfBoundsError, match=r"of a tensor map .* 128 bytes before the 8192"):
            loaded(earlier, 0, 31)

    def test_all_that_is_outside_may_lie_anywhere(self):
        assert not loaded(TensorMap("f32", INPUT, (32, 64), (32, 4)), 1 << 20, 1 << 30).any()
