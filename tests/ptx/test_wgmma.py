"""wgmma: what it computes and when, what it reads, what it counts."""

import numpy as np
import pytest
from wgmma_snippets import COMMIT, DONE, FENCE, WAIT, Snippet, chunks, descriptor, mma

from flash_helpers.ptx import (
    ComputedProduct,
    DeadlockError,
    MatrixDescriptorError,
    Observer,
    OutOfBoundsError,
    PendingCopyError,
    Phase,
    ProxyError,
    RaceError,
    UnfinishedError,
    UninitialisedReadError,
    UnsupportedInstruction,
)
from flash_helpers.ptx.run.asynchronous.wgmma_fragments import rounded_sum
from flash_helpers.ptx.run.watch.agents import AgentWatch

RNG = np.random.default_rng(15)


def integers(*shape):
    return RNG.integers(-8, 9, shape)


def elements(values, type_name):
    """Small integers as 16-bit floats."""
    if type_name == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def operands(n, type_name="f16"):
    """A, B and the arguments of a snippet that multiplies them."""
    a, b = integers(64, 16), integers(n, 16)
    image = np.concatenate([chunks(elements(x, type_name)) for x in (a, b)])
    image = np.resize(image, -(-image.size // 2048) * 2048)
    return a, b, {"image": image, "arguments": {"A": descriptor(0), "B": descriptor(2048)}}


def snippet(body, **options):
    """One whose operands may hold anything."""
    return Snippet(body, **operands(8)[2], **options)


def fill(value, count, letter="d"):
    bits = np.float32(value).view(np.uint32)
    return "\n".join(f"mov.f32 %{letter}{i}, 0f{bits:08X};" for i in range(count))


class TestValues:
    @pytest.mark.parametrize("n", [8, 24, 128, 256])
    @pytest.mark.parametrize("type_name", ["f16", "bf16"])
    def test_d_gets_a_times_b_and_what_it_was(self, n, type_name):
        a, b, rest = operands(n, type_name)
        body = fill(3, n // 2) + FENCE + mma("%A", "%B", n, t=type_name) + DONE
        found = Snippet(body, outputs=n // 2, **rest).run(grid=2).matrix()
        assert found.shape == (2, 64, n)
        assert (found == a @ b.T + 3).all()

    def test_an_observer_is_shown_the_matrices_when_the_group_retires(self):
        a, b, rest = operands(8)
        seen = []
        observer = Observer(lambda i: i.name == "wgmma", seen.append, seen.append)
        body = fill(3, 4) + FENCE + mma("%A", "%B") + DONE
        Snippet(body, **rest).run(grid=2, observer=observer)
        names = [found.instruction.opcode.split(".")[1] for found in seen]
        assert names == ["fence", "mma_async", "commit_group", "mma_async", "wait_group"]
        (found,) = (found for found in seen if isinstance(found, ComputedProduct))
        order = np.lexsort((found.warps, found.blocks[:, 0]))
        assert found.blocks[order, 0].tolist() == 4 * [0] + 4 * [1]
        assert (found.a[order].reshape(2, 64, 16) == a).all()
        assert (found.b == b.T).all()
        assert (found.d[order].reshape(2, 64, 8) == a @ b.T + 3).all()
        # two chunks a row, of A by the rows of a warp
        assert found.b_is_k_major
        rows = np.concatenate([found.a_addresses(i) for i in order[:4]])
        assert rows.shape == (64, 2) and np.unique(rows).size == 128
        assert np.array_equal(found.b_addresses(0), found.b_addresses(7))
        assert found.b_addresses(0).shape == (8, 2)

    def test_without_scale_d_what_d_was_does_not_matter(self):
        a, b, rest = operands(8)
        body = fill(np.nan, 4) + FENCE + mma("%A", "%B", adds="0") + DONE
        assert (Snippet(body, **rest).run().matrix() == a @ b.T).all()

    @pytest.mark.parametrize("signs, sign", [("-1, 1", -1), ("1, -1", -1), ("-1, -1", 1)])
    def test_signs(self, signs, sign):
        a, b, rest = operands(8)
        body = fill(3, 4) + FENCE + mma("%A", "%B", rest=f"{signs}, 0, 0") + DONE
        assert (Snippet(body, **rest).run().matrix() == sign * (a @ b.T) + 3).all()

    @pytest.mark.parametrize("of_a", [0, 1])
    @pytest.mark.parametrize("of_b", [0, 1])
    def test_transposed(self, of_a, of_b):
        # Of M or N by 16 elements, core matrices 8 x 8: swapped in pairs and within each.
        a, b = integers(64, 16), integers(16, 16)
        images = []
        for matrix, is_transposed in ((a, of_a), (b, of_b)):
            blocks = elements(matrix, "f16").reshape(-1, 8, 2, 8).transpose(0, 2, 1, 3)
            blocks = blocks.swapaxes(2, 3) if is_transposed else blocks
            images.append(np.ascontiguousarray(blocks).reshape(-1).view(np.uint8))
        image = np.resize(np.concatenate(images), 4096)
        body = fill(0, 8) + FENCE + mma("%A", "%B", 16, rest=f"1, 1, {of_a}, {of_b}") + DONE
        arguments = {"A": descriptor(0), "B": descriptor(2048)}
        found = Snippet(body, image, outputs=8, arguments=arguments).run().matrix()
        assert (found == a @ b.T).all()

    def test_a_in_registers(self):
        a, b, rest = operands(8, "bf16")
        halves = elements(a, "bf16")
        lane = np.arange(128)
        inputs = {}
        for i in range(4):
            row = 16 * (lane // 32) + lane % 32 // 4 + 8 * (i % 2)
            column = 2 * (lane % 4) + 8 * (i // 2)
            pair = np.stack([halves[row, column], halves[row, column + 1]], axis=1)
            inputs[f"a{i}"] = np.ascontiguousarray(pair).view(np.uint32)[:, 0]
        body = fill(1, 4) + FENCE
        body += mma("{%a0, %a1, %a2, %a3}", "%B", t="bf16", rest="1, 1, 0") + DONE
        assert (Snippet(body, inputs=inputs, **rest).run().matrix() == a @ b.T + 1).all()

    def test_sums_in_f16_round_once(self):
        a, b, rest = operands(16)
        body = "\n".join(f"mov.b32 %h{i}, 0x64006400;" for i in range(4))  # 1024
        body += FENCE + mma("%A", "%B", 16, d="h", d_type="f16") + DONE
        d = Snippet(body, outputs=4, letter="h", **rest).run().d
        values = d.view(np.float16).reshape(4, 128, 2)
        expected = (a @ b.T + 1024).astype(np.float16)
        for i in range(4):
            for lane in range(128):
                row = 16 * (lane // 32) + lane % 32 // 4 + 8 * (i % 2)
                column = 8 * (i // 2) + 2 * (lane % 4)
                assert (values[i, lane] == expected[row, column : column + 2]).all()

    def test_a_descriptor_is_read_when_the_product_is_issued(self):
        a, b, rest = operands(8)
        body = fill(0, 4) + FENCE + mma("%A", "%B") + "add.s64 %A, %A, 16; mov.b64 %B, 0;" + DONE
        assert (Snippet(body, **rest).run().matrix() == a @ b.T).all()

    def test_steps_of_k_accumulate_and_round_each(self):
        # Each step adds 1: to 2^24 that is a tie, which goes to the even number below.
        both = np.eye(64, 16, dtype=int), np.ones((8, 16), int)
        image = np.concatenate([chunks(elements(x, "f16")) for x in both])
        body = fill(2.0**24, 4) + FENCE + 3 * mma("%A", "%B") + DONE
        arguments = {"A": descriptor(0), "B": descriptor(2048)}
        found = Snippet(body, np.resize(image, 4096), arguments=arguments).run().matrix()[0]
        assert (found[:16] == 2.0**24).all()


ROUNDINGS = [
    ("f32", 2.0**24, [1.5], 2.0**24 + 2),  # three sums of 0.5 would stay
    ("f32", 2.0**24, [1.0], 2.0**24),
    ("f32", 2.0**24, [1.0, 1.0], 2.0**24),  # two instructions round twice
    ("f32", 1.0, [2.0**-24 + 2.0**-50], 1 + 2.0**-23),
    ("f16", 2048.0, [1.0 + 2.0**-30], 2050.0),  # by way of f32 it would be a tie
    ("f16", 65504.0, [15.0], 65504.0),
    ("f16", 65504.0, [16.0], np.inf),
]


@pytest.mark.parametrize("type_name, start, products, expected", ROUNDINGS)
def test_each_sum_is_rounded_once_to_the_nearest_and_a_tie_to_even(
    type_name, start, products, expected
):
    d = np.full((1, 16, 8), start)
    with np.errstate(over="ignore"):
        for x in products:
            d = rounded_sum(d, np.full(d.shape, x), type_name)
    assert (d == expected).all()


class TestRoles:
    """Warpgroups that do different things at different times."""

    def test_two_warpgroups_read_their_own_a_and_one_b(self):
        a, b = integers(128, 16), integers(8, 16)
        image = np.concatenate([chunks(elements(x, "f16")) for x in (a, b)])
        body = "setp.ge.u32 %p, %thread, 128;\n@%p add.u64 %A, %A, 128;\n"
        body += fill(1, 4) + FENCE + mma("%A", "%B") + DONE
        arguments = {"A": descriptor(0), "B": descriptor(4096)}
        result = Snippet(body, np.resize(image, 6144), arguments=arguments).run(256, grid=3)
        for group in (0, 1):
            expected = a[64 * group :][:64] @ b.T + 1
            assert (result.matrix(256, group) == expected).all()

    def test_blocks_of_a_cluster(self):
        a, b, rest = operands(8)
        body = fill(1, 4) + FENCE + mma("%A", "%B") + DONE
        assert (Snippet(body, **rest).run(grid=4, cluster=2).matrix() == a @ b.T + 1).all()

    def test_a_warpgroup_beside_a_warp_that_does_something_else(self):
        a, b, rest = operands(8)
        body = fill(0, 4) + "setp.ge.u32 %p, %thread, 128;\n@%p bra OTHER;\n"
        body += FENCE + mma("%A", "%B") + DONE + "OTHER:"
        result = Snippet(body, **rest).run(160, grid=2)
        assert (result.matrix(160) == a @ b.T).all()
        assert (result.d.view(np.float32).reshape(4, 2, 160)[:, :, 128:] == 0).all()

    def test_warps_that_come_one_after_the_other(self):
        a, b, rest = operands(8)
        # Warp w goes round w times before its product.
        body = fill(0, 4) + "shr.u32 %r5, %thread, 5;\nmov.u32 %r6, 0;\nROUND:\n"
        body += "setp.ge.u32 %p, %r6, %r5;\n@%p bra MULTIPLY;\nadd.u32 %r6, %r6, 1;\nbra ROUND;\n"
        body += "MULTIPLY:\n" + FENCE + mma("%A", "%B") + DONE
        assert (Snippet(body, **rest).run(grid=2).matrix() == a @ b.T).all()


# Group 0 computes d, group 1 e.
TWO_GROUPS = (
    f"{fill(0, 4)}\n{fill(0, 4, 'e')}\n{FENCE}\n{mma('%A', '%B')}\n{COMMIT}\n"
    f"{mma('%A', '%B', d='e', rest='-1, 1, 0, 0')}\n{COMMIT}\n"
)
# Warp 0 waits for its group and tells warp 4, which writes over B before the others wait.
OVERWRITTEN = f"""
{fill(0, 4)}
setp.ge.u32 %p, %thread, 128;
@%p bra OVERWRITE;
{FENCE}
{mma("%A", "%B")}
{COMMIT}
setp.lt.u32 %p, %thread, 32;
@%p bra WAIT;
bar.sync 2, 128;
WAIT:
{WAIT}
@%p bar.sync 1, 64;
bra DONE;
OVERWRITE:
bar.sync 1, 64;
mad.lo.u32 %r5, %thread, 4, {2048 - 4 * 128};
st.shared.u32 [%r5], 0;
bar.sync 2, 128;
DONE:
"""


class TestGroups:
    def test_a_wait_lets_the_newest_groups_go_on(self):
        a, b, rest = operands(8)
        kept = "\n".join(f"mov.f32 %d{i + 50}, %d{i};" for i in range(4))
        back = "\n".join(f"mov.f32 %d{i}, %d{i + 50};" for i in range(4))
        body = f"{TWO_GROUPS}wgmma.wait_group.sync.aligned 1;\n{kept}\n{WAIT}\n{back}"
        assert (Snippet(body, **rest).run().matrix() == a @ b.T).all()

    @pytest.mark.parametrize("letter, sign", [("d", 1), ("e", -1)])
    def test_a_wait_for_all(self, letter, sign):
        a, b, rest = operands(8)
        result = Snippet(TWO_GROUPS + WAIT, letter=letter, **rest).run()
        assert (result.matrix() == sign * (a @ b.T)).all()

    def test_operands_are_free_once_one_warp_has_waited(self):
        a, b, rest = operands(8)
        assert (Snippet(OVERWRITTEN, **rest).run(160, grid=2).matrix(160) == a @ b.T).all()

    def test_each_warp_frees_its_own_part_alone_where_it_is_strict(self):
        with pytest.raises(RaceError, match="read by wgmma of warp 1 at"):
            snippet(OVERWRITTEN).run(160, strict_wgmma=True)

    def test_a_wait_sleeps_until_all_four_warps_have_committed(self):
        # Warps 1 to 3 commit only after warp 0 has gone on from its wait: nobody does.
        body = f"""
        {fill(0, 4)}
        {FENCE}
        {mma("%A", "%B")}
        setp.lt.u32 %p, %thread, 32;
        @%p bra COMMIT;
        bar.sync 1;
        COMMIT:
        {COMMIT}
        {WAIT}
        @%p bar.sync 1;
        """
        with pytest.raises(DeadlockError) as caught:
            snippet(body).run()
        text = str(caught.value)
        assert "for wgmma groups up to number 1 of their warpgroup" in text
        assert "which warps 1, 2, 3 have not committed" in text
        assert "96 of 128 threads wait, 0 have ended" in text
        snippet(body).run(strict_wgmma=True)

    def test_empty_groups(self):
        a, b, rest = operands(8)
        body = fill(0, 4) + FENCE + mma("%A", "%B") + 3 * COMMIT
        body += "wgmma.wait_group.sync.aligned 2;"
        assert (Snippet(body, **rest).run().matrix() == a @ b.T).all()


class TestSharedMemory:
    """The accesses that the reads of a wgmma are checked against."""

    MULTIPLY = fill(0, 4) + FENCE + mma("%A", "%B") + COMMIT

    @pytest.mark.parametrize("start", [0, 2048])
    def test_generic_writes_need_a_proxy_fence(self, start):
        again = f"mad.lo.u32 %r5, %thread, 4, {start};\nst.shared.u32 [%r5], 0;\nbar.sync 0;\n"
        with pytest.raises(ProxyError, match="read by wgmma of warpgroup 0"):
            snippet(again + self.MULTIPLY + WAIT).run()
        snippet(again + "fence.proxy.async;\nbar.sync 0;" + self.MULTIPLY + WAIT).run()

    def test_a_barrier_must_stand_between(self):
        with pytest.raises(RaceError, match=r"read by wgmma.*and write by warp"):
            snippet(self.MULTIPLY + WAIT, visible="fence.proxy.async;").run()

    def test_the_rows_of_a_of_each_warp_may_be_its_own_business(self):
        a, b, rest = operands(8)
        # Each warp writes its 16 rows, 512 bytes, over those from the image.
        rows = """
        mad.lo.u32 %r5, %thread, 16, 0;
        ld.shared.v4.b32 {%v0, %v1, %v2, %v3}, [%r5];
        st.shared.v4.b32 [%r5], {%v0, %v1, %v2, %v3};
        fence.proxy.async;
        bar.warp.sync -1;
        """
        assert (Snippet(rows + self.MULTIPLY + WAIT, **rest).run().matrix() == a @ b.T).all()

    @pytest.mark.parametrize("place", [0, 16 * 127, 2048, 2048 + 255])
    def test_nobody_may_write_what_is_being_read(self, place):
        late = f"setp.eq.u32 %p, %thread, 77;\n@%p st.shared.u8 [{place}], 1;\n"
        with pytest.raises(RaceError, match=r"read by wgmma of warpgroup 0 at .*\n.*going on"):
            snippet(self.MULTIPLY + late + WAIT).run()
        unclosed = self.MULTIPLY.replace(COMMIT, "") + WAIT + late
        with pytest.raises(RaceError, match=r"no wgmma\.commit_group stands between"):
            snippet(unclosed).run()
        snippet(self.MULTIPLY + WAIT + late).run()

    def test_a_copy_that_is_pending(self):
        copy = "setp.eq.u32 %p, %thread, 0;\n"
        copy += "@%p cp.async.cg.shared.global [2048], [%rd0], 16;\nbar.sync 0;\n"
        with pytest.raises(PendingCopyError, match=r"cp\.async"):
            snippet(copy + self.MULTIPLY + WAIT).run()

    @pytest.mark.parametrize("name, address", [("A", 4096 - 2032), ("B", 4096 - 240)])
    def test_reads_beyond_shared_memory(self, name, address):
        _, _, rest = operands(8)
        rest["arguments"][name] = descriptor(address)
        with pytest.raises(OutOfBoundsError, match=f"{name} by 16 bytes at shared address 4096"):
            Snippet(self.MULTIPLY + WAIT, **rest).run()
        rest["arguments"][name] = descriptor(address - 16)
        Snippet(self.MULTIPLY + WAIT, **rest).run()


class TestProductsInARow:
    """Products with nothing but arithmetic in between, whose reads begin together."""

    ONCE = mma("%A", "%B")
    STEPS = fill(0, 4) + FENCE + ONCE + "add.s64 %B, %B, 8;\n" + 3 * ONCE + COMMIT

    def begun(self, monkeypatch, body, **options):
        """How many reads each call begins. The image is 4096 zeros."""
        counts, begin_read = [], AgentWatch.begin_read

        def count(self, position, agents, *rest):
            counts.append(agents.size)
            return begin_read(self, position, agents, *rest)

        monkeypatch.setattr(AgentWatch, "begin_read", count)
        arguments = {"A": descriptor(0), "B": descriptor(2048)}
        Snippet(body, arguments=arguments).run(**options)
        return counts

    def test_are_checked_at_once(self, monkeypatch):
        # Of B one read of each product, of A one of each warp besides.
        assert self.begun(monkeypatch, self.STEPS + WAIT) == [4, 16]

    def test_in_several_blocks(self, monkeypatch):
        assert self.begun(monkeypatch, self.STEPS + WAIT, grid=3) == [12, 48]

    @pytest.mark.parametrize(
        "between",
        ["ld.shared.u32 %r5, [0];", COMMIT, FENCE, "bar.warp.sync -1;", "fence.proxy.async;"],
    )
    def test_not_with_anything_else_in_between(self, monkeypatch, between):
        body = self.STEPS.replace(COMMIT, between) + self.ONCE + COMMIT
        assert self.begun(monkeypatch, body + WAIT) == [4, 16, 1, 4]

    def test_not_with_one_that_may_not_be_executed(self, monkeypatch):
        body = "setp.ge.u32 %q, %thread, 128;\n" + self.STEPS.replace(COMMIT, "@%q " + self.ONCE)
        assert self.begun(monkeypatch, body + DONE) == [4, 16]

    def test_of_several_shapes(self, monkeypatch):
        wide = fill(0, 16, "e") + mma("%A", "%B", 32, d="e")
        assert self.begun(monkeypatch, fill(0, 4) + FENCE + self.ONCE + wide + DONE) == [1, 4, 1, 4]

    def test_a_write_between_them(self):
        late = "setp.eq.u32 %p, %thread, 77;\n@%p st.shared.u8 [2048], 1;\n"
        with pytest.raises(RaceError, match="read by wgmma of warpgroup 0"):
            snippet(fill(0, 4) + FENCE + self.ONCE + late + self.ONCE + DONE).run()

    def test_the_one_that_reads_too_early_is_told(self):
        # 8 x 8 of B behind those that the first product reads are written without a fence.
        write = "mad.lo.u32 %r5, %thread, 4, 2304;\nst.shared.u32 [%r5], 0;\nbar.sync 0;\n"
        second = mma("%A", "%B", rest="-1, 1, 0, 0")
        body = fill(0, 4) + FENCE + self.ONCE + "add.s64 %B, %B, 16;\n" + second + DONE
        with pytest.raises(ProxyError, match="read by wgmma") as caught:
            snippet(write + body).run()
        line = snippet(write + body).text(128).splitlines()[caught.value.site.ptx_line - 1]
        assert "-1, 1, 0, 0" in line


@pytest.mark.parametrize("name", ["A", "B"])
class TestDescriptors:
    def test_all_warps_must_have_one(self, name):
        body = f"setp.ge.u32 %p, %thread, 96;\n@%p add.u64 %{name}, %{name}, 8;\n"
        with pytest.raises(MatrixDescriptorError, match=f"descriptor of {name} is .*another warp"):
            snippet(body + TestSharedMemory.MULTIPLY + WAIT).run()

    def test_all_lanes_must_have_one(self, name):
        body = f"setp.eq.u32 %p, %thread, 37;\n@%p add.u64 %{name}, %{name}, 8;\n"
        with pytest.raises(MatrixDescriptorError, match=f"descriptor of {name} is") as caught:
            snippet(body + TestSharedMemory.MULTIPLY + WAIT).run()
        assert (caught.value.thread.warp, caught.value.thread.lane) == (1, 5)

    def test_bits_of_no_field(self, name):
        _, _, rest = operands(8)
        rest["arguments"][name] |= 1 << 15
        with pytest.raises(MatrixDescriptorError, match="bits set that belong to none"):
            Snippet(TestSharedMemory.MULTIPLY + WAIT, **rest).run()


class TestPoison:
    """Bytes that nothing has written, in rows of A, columns of B and registers."""

    def run(self, body="", stored=128, columns=range(8), missing=None, inputs=None):
        """Runs with all of shared memory written but 16 bytes at `missing`; stores the columns of D
        that threads below `stored` hold."""
        _, _, rest = operands(8)
        rest["image"] = np.zeros(4096, np.uint8)
        skip = ""
        if missing is not None:
            skip = f"setp.ne.u32 %q, %r0, {missing};\n@%q "
        snippet = Snippet("", **rest)
        snippet.outputs = 0
        keep = [i for i in range(4) if i % 2 in {c % 2 for c in columns}]
        store = f"setp.lt.u32 %p, %thread, {stored};\n@!%p bra END;\n"
        store += "\n".join(f"st.global.f32 [%at], %d{i};" for i in keep) + "\nEND:\n"
        snippet.body = "ld.param.u64 %at, [p_out];\n" + (body or TestSharedMemory.MULTIPLY)
        snippet.body += WAIT + store
        text = snippet.text
        snippet.text = lambda threads: text(threads).replace("st.shared.v4", f"{skip}st.shared.v4")
        return snippet.run()

    def test_a_row_of_a(self):
        # Row 20 of A, first half: of warp 1, lanes 16 to 19. 128 bytes for each 8 x 8.
        missing = 256 * 2 + 4 * 16
        with pytest.raises(UninitialisedReadError, match=f"address {missing}, which") as caught:
            self.run(missing=missing)
        thread = caught.value.thread
        assert (thread.warp, thread.lane) == (1, 16)
        self.run(missing=missing, stored=32)

    def test_a_column_of_b(self):
        missing = 2048 + 3 * 16  # column 3: of lanes with t = 1, odd registers
        with pytest.raises(UninitialisedReadError, match=f"address {missing}, which") as caught:
            self.run(missing=missing)
        assert caught.value.thread.lane == 1
        self.run(missing=missing, columns=[0, 2])

    def test_an_accumulator(self):
        load = "ld.shared.f32 %d2, [3072];\n"
        fill_some = "\n".join(f"mov.f32 %d{i}, 0f00000000;" for i in (0, 1, 3))
        rest = FENCE + "\n" + mma("%A", "%B") + COMMIT
        with pytest.raises(UninitialisedReadError, match="address 3072, which"):
            self.run(load + fill_some + rest, missing=3072)
        # Without scale-d it is not read.
        rest = FENCE + "\n" + mma("%A", "%B", adds="0") + COMMIT
        self.run(load + fill_some + rest, missing=3072)

    def test_a_in_registers(self):
        load = "ld.shared.b32 %a2, [3072];\n" + "".join(f"mov.b32 %a{i}, 0;" for i in (0, 1, 3))
        multiply = mma("{%a0, %a1, %a2, %a3}", "%B", rest="1, 1, 0") + COMMIT
        body = fill(0, 4) + "setp.eq.u32 %p, %thread, 42;\nmov.b32 %a2, 0;\n@%p " + load
        body += FENCE + multiply
        with pytest.raises(UninitialisedReadError, match="address 3072, which") as caught:
            self.run(body, missing=3072)
        # Lanes 8 to 11 of warp 1 hold rows 2 and 10; register 2 is of row 2.
        assert (caught.value.thread.warp, caught.value.thread.lane) == (1, 8)
        self.run(body, missing=3072, stored=32)

    def test_a_descriptor(self):
        body = "ld.shared.b32 %r5, [3072];\ncvt.u64.u32 %rd5, %r5;\nand.b64 %rd5, %rd5, 0;\n"
        body += "ld.shared.u64 %rd6, [3072];\nshr.u64 %rd6, %rd6, 60;\nadd.u64 %A, %A, %rd6;\n"
        with pytest.raises(UninitialisedReadError, match="a descriptor or scale-d of this wgmma"):
            self.run(body + TestSharedMemory.MULTIPLY, missing=3072)

    def test_what_comes_out_clean_cleans_the_registers(self):
        load = "".join(f"ld.shared.f32 %d{i}, [3072];\n" for i in range(4))
        body = load + FENCE + mma("%A", "%B", adds="0") + COMMIT
        self.run(body, missing=3072)


class TestCounts:
    def test_by_shape(self):
        _, _, rest = operands(24)
        body = fill(0, 12) + FENCE + 2 * mma("%A", "%B", 24)
        body += mma("{%a0, %a1, %a2, %a3}", "%B", 8, "e", rest="1, 1, 0") + DONE
        run = Snippet(body, **rest).run(grid=3).run
        by_opcode = run.counters.by_opcode()
        both = by_opcode["wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16"]
        assert both.wgmma == both.instructions == 3 * 4 * 2
        assert both.mma_flops == 3 * 2 * (2 * 64 * 24 * 16)
        assert both.wgmma_bytes == 3 * 2 * (64 + 24) * 32
        assert both.shared_bytes == both.shared_wavefronts == both.mma == 0
        alone = by_opcode["wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"]
        assert (alone.wgmma, alone.mma_flops) == (3 * 4, 3 * 2 * 64 * 8 * 16)
        assert alone.wgmma_bytes == 3 * 8 * 32
        assert run.counters.total.waits == 3 * 4

    def test_the_loop_with_wgmma_is_the_main_loop(self):
        body = fill(0, 4) + "mov.u32 %r5, 0;\nNEXT:\n" + FENCE + mma("%A", "%B") + COMMIT
        body += "add.u32 %r5, %r5, 1;\nsetp.lt.u32 %p, %r5, 3;\n@%p bra NEXT;\n" + WAIT
        phases = snippet(body).run().run.counters.by_phase()
        assert phases[Phase.MAIN_LOOP].wgmma == 12
        assert phases[Phase.MAIN_LOOP].shared_requests == 0
        assert phases[Phase.PROLOGUE].shared_requests and not phases[Phase.PROLOGUE].wgmma


class TestRefused:
    @pytest.mark.parametrize(
        "opcode, reason",
        [
            ("m64n8k16.f16.bf16.bf16", "sums of bf16 are f32"),
            ("m64n8k16.f32.f16.bf16", "f16 with bf16"),
            ("m64n8k32.f32.e4m3.s8", "e4m3 with s8"),
            ("m64n8k32.s32.e4m3.e4m3", "sums of e4m3 are f16 or f32"),
            ("m64n8k32.f32.f16.f16", "one of m64n8k16"),
            ("m64n40k32.s32.s8.s8", "one of m64n8k32"),
            ("m64n8k256.s32.b1.b1.xor.popc", "single bits, of a dense A, take .and.popc"),
            ("m64n8k32.f32.e4m3.e4m3.satfinite", "only products of s8 and u8 take .satfinite"),
            ("m64n8k32.f32.e4m3.e4m3", "4 literals where 2 are due"),
            ("m64n8k32.s32.s8.u8", "4 literals where 0 are due"),
            ("sp.m64n8k32.f32.f16.f16", "2 literals where 4 are due"),
        ],
    )
    def test_by_name(self, opcode, reason):
        body = FENCE + mma("%A", "%B").replace("m64n8k16.f32.f16.f16", opcode)
        with pytest.raises(UnsupportedInstruction, match=reason):
            snippet(body).run()

    @pytest.mark.parametrize("literals", ["2, 1, 0, 0", "1, 1, 2, 0", "1, 1, 0, %r0", "1, 1, 0"])
    def test_operands(self, literals):
        with pytest.raises(UnsupportedInstruction):
            snippet(FENCE + mma("%A", "%B", rest=literals)).run()


class TestSeeds:
    """A fifth warp is kept busy, so that there are moments at which products may be computed."""

    BUSY = """
    setp.lt.u32 %p, %thread, 128;
    @%p bra MULTIPLY;
    mov.u32 %r8, 0;
    MORE:
    add.u32 %r8, %r8, 1;
    setp.lt.u32 %q, %r8, 20;
    @%q bra MORE;
    bra READY;
    MULTIPLY:
    """

    def products(self, seed, between="", last=WAIT, **options):
        a, b, rest = operands(8)
        pause = "mov.u32 %r9, 0;\nWAIT_A_BIT: add.u32 %r9, %r9, 1;\nsetp.lt.u32 %q, %r9, 20;\n"
        pause += "@%q bra WAIT_A_BIT;\n"
        steps = 3 * (mma("%A", "%B") + COMMIT)
        body = fill(3, 4) + self.BUSY + FENCE + steps + pause + between + last + "\nREADY:"
        outputs = 4 if last else 0
        result = Snippet(body, outputs=outputs, **rest).run(160, seed=seed, **options)
        return a, b, result

    @pytest.mark.parametrize("seed", [None, *range(5)])
    def test_do_not_change_the_result(self, seed):
        a, b, result = self.products(seed)
        assert (result.matrix(160) == 3 * (a @ b.T) + 3).all()

    def test_decide_when_products_are_computed(self):
        """Seen in what they should not do: read what is overwritten while they may read it."""
        found = set()
        overwrite = "setp.lt.u32 %p, %thread, 1; @%p st.shared.u64 [2048], 0;\n"
        for seed in (None, *range(8)):
            a, b, result = self.products(seed, overwrite, keep_going=True)
            assert RaceError in {type(fault) for fault in result.run.faults}
            found.add(result.matrix(160).tobytes() == (3 * (a @ b.T) + 3).astype("f4").tobytes())
        assert found == {True, False}

    @pytest.mark.parametrize("seed", [None, *range(5)])
    def test_none_ends_before_it_was_waited_for(self, seed):
        with pytest.raises(UnfinishedError):
            self.products(seed, last="")
