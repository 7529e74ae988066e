"""Blocks and loops: what jumps and what does not, and every way in which loops nest."""

import itertools
import random
from pathlib import Path

import pytest
from sass_text import loops_as_addresses, operations

from flash_helpers.sass.read.flow import calls_itself, control_flow, padding_start
from flash_helpers.sass.read.reader import load_kernels
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Block, Operation

PLANTED = Path(__file__).parent / "kernels"


def successors(text: str) -> list[list[int]]:
    """For each block, the lines that its successors begin with."""
    blocks, _ = control_flow(operations(text))
    return [
        sorted(blocks[n].start // INSTRUCTION_BYTES for n in block.successors) for block in blocks
    ]


def starts(text: str) -> list[int]:
    return [b.start // INSTRUCTION_BYTES for b in control_flow(operations(text))[0]]


def test_no_code_has_no_blocks():
    assert control_flow([]) == ((), ())


def test_straight_code_is_one_block():
    text = """
        MOV R1, R2
        @P0 FADD R3, R1, R1
        BAR.SYNC.DEFER_BLOCKING 0x0
        EXIT
    """
    assert control_flow(operations(text)) == ((Block(0, 0, 64, (), ()),), ())


def test_a_guarded_branch_may_fall_through_and_a_plain_one_may_not():
    text = """
        @P0 BRA other
        MOV R1, R2
        BRA end
        other: MOV R1, R3
        end: EXIT
    """
    assert starts(text) == [0, 1, 3, 4]
    assert successors(text) == [[1, 3], [4], [4], []]
    blocks, loops = control_flow(operations(text))
    assert blocks[3].predecessors == (1, 2)
    assert loops == ()


@pytest.mark.parametrize(
    ("text", "following"),
    (
        # exits end the way, but for guarded ones
        ("EXIT\nMOV R1, R2\nEXIT", [[], []]),
        ("@PT EXIT\nMOV R1, R2\nEXIT", [[], []]),
        ("@P0 EXIT\nMOV R1, R2\nEXIT", [[1], []]),
        # so do traps, but not break points
        ("BPT.TRAP 0x1\nMOV R1, R2\nEXIT", [[], []]),
        ("@P0 BPT.TRAP 0x1\nMOV R1, R2\nEXIT", [[1], []]),
        ("BPT.INT 0x1\nMOV R1, R2\nEXIT", [[]]),
        # a branch that is turned off for good does not jump
        ("@!PT BRA end\nMOV R1, R2\nend: EXIT", [[]]),
        ("@!UPT BRA end\nMOV R1, R2\nend: EXIT", [[]]),
        # a target outside the kernel leaves it, and a call to an unknown place comes back
        ("@P0 BRA elsewhere\nEXIT", [[1], []]),
        ("CALL.ABS.NOINC R2\nEXIT", [[1], []]),
    ),
)
def test_what_may_follow(text, following):
    assert successors(text) == following


@pytest.mark.parametrize(
    "branch",
    ("BRA P1, end", "BRA.U UP0, end", "BRA.DIV UR4, end", "BRA.CONV ~URZ, end", "@P0 BRA P1, end"),
)
def test_a_branch_with_a_condition_among_its_operands_may_fall_through(branch):
    assert successors(f"{branch}\nMOV R1, R2\nend: EXIT") == [[1, 2], [2], []]


def test_reconvergence_is_no_jump():
    text = """
        BSSY B0, after
        @P0 BRA meet
        @P1 BREAK B0
        WARPSYNC.COLLECTIVE R1, after
        meet: BSYNC B0
        after: EXIT
    """
    assert starts(text) == [0, 2, 4]
    assert successors(text) == [[2, 4], [4], []]


def test_a_computed_jump_has_no_known_successors_but_its_targets_are_analysed():
    assert successors(LOOPS["behind a computed jump"][0]) == [[], [1, 3], [], []]


def test_a_computed_jump_goes_where_its_table_says():
    text = """
        loop: BRX R2, -0x10
        FADD R1, R1, R1
        BRA loop
        FADD R2, R2, R2
        @P0 BRX R4, -0x40
        EXIT
    """
    blocks, loops = control_flow(operations(text), {0: (0x10, 0x30), 0x40: (0, 0x9990)})
    assert [b.start // INSTRUCTION_BYTES for b in blocks] == [0, 1, 3, 5]
    assert [b.successors for b in blocks] == [(1, 2), (0,), (0, 3), ()]
    assert [(loop.header, loop.blocks) for loop in loops] == [(0, {0, 1, 2})]


def test_recursion_is_a_routine_that_calls_itself_be_it_through_another():
    once = """
        CALL.REL.NOINC routine
        EXIT
        routine: @P0 BRA end
        CALL.REL.NOINC other
        end: RET.REL.NODEC R2, kernel
        other: FADD R1, R1, R1
        RET.REL.NODEC R2, kernel
    """
    assert not calls_itself(operations(once))
    again = once.replace("other: FADD R1, R1, R1", "other: CALL.REL.NOINC routine")
    assert calls_itself(operations(again))
    # a loop that calls is no recursion
    looping = "loop: CALL.REL.NOINC routine\n@P0 BRA loop\nEXIT\nroutine: RET.REL.NODEC R2, kernel"
    assert not calls_itself(operations(looping))


# Each loop: the line of its header, the lines that its blocks begin with, its depth.
LOOPS = {
    "of one block": ("""
        MOV R1, RZ
        loop: FADD R1, R1, R1
        @P0 BRA loop
        EXIT
    """, [(1, {1}, 1)]),
    "behind a computed jump": ("""
        BRX R2
        loop: FADD R1, R1, R1
        @P0 BRA loop
        EXIT
        BRA far
    """, [(1, {1}, 1)]),
    # as ptxas 13.0 ends loops for sm_80, sm_86 and sm_89
    "left through a call that never returns": ("""
        MOV R1, RZ
        loop: FADD R1, R1, R1
        @P0 CALL.REL.NOINC out
        BRA loop
        out: STG.E [R2], R1
        EXIT
    """, [(1, {1, 3}, 1)]),
    "left through a call although a routine is called behind it": ("""
        loop: FADD R1, R1, R1
        @P0 CALL.REL.NOINC out
        BRA loop
        out: CALL.REL.NOINC routine
        EXIT
        routine: FADD R1, R1, R1
        RET.REL.NODEC R2, kernel
    """, [(0, {0, 2}, 1)]),
    "that calls a routine, which is in the loop": ("""
        MOV R1, RZ
        loop: CALL.REL.NOINC routine
        FADD R1, R1, R1
        CALL.REL.NOINC routine
        @P0 BRA loop
        EXIT
        routine: FADD R1, R1, R1
        inner: FADD R1, R1, R1
        @P1 BRA inner
        RET.REL.NODEC R2, kernel
    """, [(1, {1, 2, 4, 6, 7, 9}, 1), (7, {7}, 2)]),
    "that calls a routine, which is called from outside too": ("""
        CALL.REL.NOINC routine
        loop: CALL.REL.NOINC routine
        @P0 BRA loop
        EXIT
        routine: FADD R1, R1, R1
        RET.REL.NODEC R2, kernel
    """, [(1, {1, 2}, 1)]),
    "that nest": ("""
        outer: MOV R1, RZ
        middle: MOV R2, RZ
        inner: FADD R1, R1, R1
        @P0 BRA inner
        @P1 BRA middle
        other: FADD R1, R1, R1
        @P2 BRA other
        @P3 BRA outer
        EXIT
    """, [(0, {0, 1, 2, 4, 5, 7}, 1), (1, {1, 2, 4}, 2), (2, {2}, 3), (5, {5}, 2)]),
    "with two ways back to one header": ("""
        loop: @P0 BRA other
        FADD R1, R1, R1
        @P1 BRA loop
        EXIT
        other: FADD R2, R2, R2
        BRA loop
    """, [(0, {0, 1, 4}, 1)]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "loops"), LOOPS.values(), ids=LOOPS)
def test_loops(text, loops):
    assert loops_as_addresses(operations(text)) == loops


def test_loops_know_the_one_around_them():
    _, loops = control_flow(operations(LOOPS["that nest"][0]))
    assert [loop.parent for loop in loops] == [None, 0, 1, 0]


def test_calls_come_back_and_some_never_do():
    assert successors(LOOPS["that calls a routine, which is in the loop"][0])[1] == [2, 6]
    left = LOOPS["left through a call that never returns"][0]
    assert successors(left) == [[1], [3, 4], [1], []]


def test_a_cycle_with_two_entries_is_a_loop_and_terminates():
    text = """
        @P0 BRA second
        first: FADD R1, R1, R1
        second: FADD R2, R2, R2
        @P1 BRA first
        EXIT
    """
    ((header, lines, depth),) = loops_as_addresses(operations(text))
    assert (lines, depth) == ({1, 2}, 1)
    assert header in lines


@pytest.mark.parametrize("architecture", ("sm_80", "sm_90"))
def test_loops_that_nvcc_made(architecture):
    """Two nested loops with `#pragma unroll 1`; a loop in each branch of a condition; a jump table
    in front of a call whose routine loops; none."""
    depths = {
        kernel.symbol: sorted(loop.depth for loop in kernel.loops)
        for kernel in load_kernels(PLANTED / f"several.{architecture}.cubin")
    }
    assert depths["nested"] == [1, 2]
    assert max(depths["divergent"]) == 1 and len(depths["divergent"]) >= 2
    assert depths["table"] == [1]
    assert depths["local_array"] == []


# -- padding ---------------------------------------------------------------------------------------


def test_padding_is_the_jump_to_itself_and_the_nops_behind_it():
    text = """
        NOP
        EXIT
        self: BRA self
        NOP
        NOP
    """
    found = operations(text)
    assert padding_start(found) == 2
    blocks, loops = control_flow(found)
    assert [(b.start, b.end) for b in blocks] == [(0, 32), (32, 48), (48, 80)]
    assert loops == ()


def test_nops_alone_are_padding_behind_an_end():
    assert padding_start(operations("EXIT\nNOP\nNOP")) == 1
    assert padding_start(operations("FADD R1, R1, R1\nNOP")) == 2


def test_an_endless_loop_that_is_run_is_no_padding():
    fallen_into = operations("MOV R1, R2\nself: BRA self\nNOP")
    jumped_to = operations("@P0 BRA self\nEXIT\nself: BRA self\nNOP")
    for found, header in ((fallen_into, 1), (jumped_to, 2)):
        assert padding_start(found) == len(found)
        assert [loop[0] for loop in loops_as_addresses(found)] == [header]


# -- against the definition ------------------------------------------------------------------------


def random_kernel(size: int, generator: random.Random) -> list[Operation]:
    """Blocks of one instruction, each a guarded branch to anywhere, or the end."""
    found = []
    for n in range(size - 1):
        target = generator.randrange(size) * INSTRUCTION_BYTES
        guard = generator.choice(("", "@P0", "@P0"))
        found.append(Operation(n * INSTRUCTION_BYTES, 0, guard, "BRA", hex(target), target))
    return [*found, Operation((size - 1) * INSTRUCTION_BYTES, 0, "", "EXIT", "", None)]


def reachable(blocks: tuple[Block, ...], entry: int, without: int | None = None) -> set[int]:
    found: set[int] = set()
    stack = [entry]
    while stack:
        n = stack.pop()
        if n not in found and n != without:
            found.add(n)
            stack.extend(blocks[n].successors)
    return found


def natural_loops(blocks: tuple[Block, ...]) -> dict[int, set[int]] | None:
    """Loops by header from the definition: an edge to a block that dominates its source, and all
    that reaches the source without passing the header. None if a cycle remains without them."""
    live = reachable(blocks, 0)

    def dominates(a: int, b: int) -> bool:
        return a == b or b not in reachable(blocks, 0, without=a)

    loops: dict[int, set[int]] = {}
    forward: dict[int, list[int]] = {n: [] for n in live}
    for n in live:
        for target in blocks[n].successors:
            if not dominates(target, n):
                forward[n].append(target)
                continue
            body = loops.setdefault(target, {target})
            stack = [n]
            while stack:
                m = stack.pop()
                if m not in body:
                    body.add(m)
                    stack.extend(p for p in blocks[m].predecessors if p in live)
    done: set[int] = set()
    while ready := [n for n in live - done if not set(forward[n]) - done]:
        done.update(ready)
    return loops if done == live else None


def test_loops_are_those_of_the_definition_where_control_flow_is_reducible():
    generator = random.Random(0)
    checked = 0
    for _ in range(600):
        found = random_kernel(generator.randrange(2, 12), generator)
        blocks, loops = control_flow(found)
        expected = natural_loops(blocks)
        if expected is None:
            continue
        live = reachable(blocks, 0)
        assert {loop.header: set(loop.blocks) for loop in loops if loop.header in live} == expected
        checked += bool(expected)
    assert checked > 200


@pytest.mark.parametrize("seed", range(20))
def test_any_control_flow_is_covered_and_nests(seed):
    generator = random.Random(seed)
    found = random_kernel(300, generator)
    blocks, loops = control_flow(found)
    assert blocks[0].start == 0 and blocks[-1].end == len(found) * INSTRUCTION_BYTES
    assert all(a.end == b.start for a, b in itertools.pairwise(blocks))
    for block in blocks:
        assert all(block.index in blocks[n].predecessors for n in block.successors)
    for loop in loops:
        assert loop.header in loop.blocks
        around = [other for other in loops if loop.blocks < other.blocks]
        assert loop.depth == 1 + len(around)
        assert all(
            loop.blocks <= other.blocks
            or other.blocks <= loop.blocks
            or not loop.blocks & other.blocks
            for other in loops
        )


def test_a_long_kernel_needs_no_deep_recursion():
    size = 20_000
    found = [
        Operation(
            n * INSTRUCTION_BYTES, 0, "@P0", "BRA", "0x0", 0 if n == size - 1 else 16 * (n + 1)
        )
        for n in range(size)
    ]
    _, loops = control_flow([*found, Operation(16 * size, 0, "", "EXIT", "", None)])
    assert [(loop.header, len(loop.blocks)) for loop in loops] == [(0, size)]
