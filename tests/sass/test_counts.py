"""The four buckets, and counts by class and opcode."""

import pytest
from sass_text import ARCHITECTURES, PROGRESSION, in_tiers, kernel, kernels_of, operations

from flash_helpers.sass.analyse.counts import Bucket, buckets, count_all, count_blocks, count_loop
from flash_helpers.sass.read.records import INSTRUCTION_BYTES

pytestmark = pytest.mark.slow

TEXT = """
    MOV R1, R2
    @PT MOV R1, R2
    @P0 FADD R1, R1, R1
    @!P3 LDS R1, [R2]
    @!PT LDS RZ, [RZ]
    @!UPT UIADD3 URZ, URZ, URZ, URZ
    NOP
    loop: HMMA.16816.F32 R4, R8, R12, R4
    HMMA.16816.F32.BF16 R4, R8, R12, R4
    @!PT LDS RZ, [RZ]
    @P0 BRA loop
    EXIT
    self: BRA self
    NOP
    NOP
"""


def test_each_instruction_is_in_one_of_four_buckets():
    executed, predicated = Bucket.EXECUTED, Bucket.PREDICATED
    filler, padding = Bucket.FILLER, Bucket.PADDING
    assert buckets(operations(TEXT)) == [
        *(executed, executed, predicated, predicated, filler, filler, executed),
        *(executed, executed, filler, predicated, executed),
        *(padding, padding, padding),
    ]


def test_filler_and_padding_are_no_work():
    counts = count_all(operations(TEXT))
    assert sum(counts.by_bucket.values()) == 15
    assert counts.work == 9
    assert {kind.value: n for kind, n in counts.by_bucket.items()} == {
        "executed": 6,
        "predicated": 3,
        "filler": 3,
        "padding": 3,
    }
    assert counts.by_base["LDS"] == 1
    assert "UIADD3" not in counts.by_base
    # the NOP among the code is issued like everything else
    assert counts.by_base["NOP"] == 1


def test_counts_are_by_class_and_by_opcode_with_and_without_modifiers():
    counts = count_all(operations(TEXT))
    assert counts.by_class["tensor"] == counts.tensor == counts.by_base["HMMA"] == 2
    assert counts.by_opcode["HMMA.16816.F32"] == counts.by_opcode["HMMA.16816.F32.BF16"] == 1
    assert list(counts.by_base)[:2] == ["HMMA", "MOV"]
    assert counts.per_tensor(counts.work) == 4.5
    assert count_all(operations("EXIT")).per_tensor(1) is None


def test_a_loop_and_a_block_are_counted_alone():
    planted = kernel(TEXT)
    (loop,) = planted.loops
    counts = count_loop(planted, loop)
    assert (counts.work, counts.by_bucket[Bucket.FILLER], counts.tensor) == (3, 1, 2)
    parts = [count_blocks(planted, [block.index]) for block in planted.blocks]
    counted = sum(sum(part.by_bucket.values()) for part in parts)
    assert counted == len(planted.instructions)
    assert sum(part.work for part in parts) == count_all(planted.instructions).work


@in_tiers(PROGRESSION)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_buckets_cover_every_kernel_of_the_library(architecture, configs):
    for found in kernels_of(configs, architecture).values():
        counts = count_all(found.instructions)
        size = found.blocks[-1].end // INSTRUCTION_BYTES
        assert sum(counts.by_bucket.values()) == size
        for by in (counts.by_opcode, counts.by_base, counts.by_class):
            assert sum(by.values()) == counts.work
        # at least the jump to itself, which ptxas puts behind every kernel
        assert counts.by_bucket[Bucket.PADDING] >= 1
        guards = [i.predicate for i in found.instructions]
        assert counts.by_bucket[Bucket.FILLER] == sum(g in ("@!PT", "@!UPT") for g in guards)
