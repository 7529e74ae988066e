"""Control words: their fields, and the bits that the text shows too."""

from collections.abc import Callable

import pytest
from sass_text import DEFAULT, guard_text, in_tiers, kernels_of, of_version, parts_of

from flash_helpers.kernel_configs import Config
from flash_helpers.measure.machine_code import listed_configs
from flash_helpers.sass.read.control import control_text, decode_control
from flash_helpers.sass.read.records import Control, Instruction

pytestmark = pytest.mark.slow

FILES = (
    "spills.sm_80.cubin",
    "spills.sm_90.cubin",
    "unrolled.sm_80.cubin",
    "filler.sm_90.cubin",
    "predicates.sm_80.cubin",
    "several.sm_80.cubin",
    "several.sm_90.cubin",
    "old.sm_80.cubin",
    "old.sm_90.cubin",
)
# three register operands behind the destination, in the order of the reuse bits
TERNARY = ("FFMA", "HMMA", "IMAD")


def word(**fields: int) -> int:
    """An instruction word with some bits set: bit_N is the value of the field that begins there."""
    return sum(value << int(name.removeprefix("bit_")) for name, value in fields.items())


@pytest.fixture(scope="module", params=[*FILES, *parts_of(listed_configs(DEFAULT))])
def instructions(request: pytest.FixtureRequest, load: Callable) -> list[Instruction]:
    if request.param not in FILES:
        return instructions_of(request.param)
    return [i for kernel in load(request.param) for i in kernel.instructions]


def instructions_of(configs: tuple[Config, ...]) -> list[Instruction]:
    return [i for kernel in kernels_of(configs, DEFAULT).values() for i in kernel.instructions]


class TestFields:
    def test_lie_where_the_sources_say(self) -> None:
        encoding = word(bit_105=5, bit_110=2, bit_113=7, bit_116=0b100001, bit_122=0b101)
        assert decode_control(encoding) == Control(5, True, 2, None, 0b100001, 0b101)

    def test_yield_is_a_zero_bit(self) -> None:
        assert not decode_control(word(bit_109=1)).yields

    def test_are_printed_in_columns(self) -> None:
        assert control_text(Control(2, True, 0, None, 0b110, 0b001)) == "s02 y w0 r- b:-12--- u:a--"
        assert control_text(Control(13, False, None, 5, 0, 0)) == "s13 - w- r5 b:------ u:---"

    def test_guard(self) -> None:
        assert guard_text(word(bit_12=3, bit_15=1)) == "@!P3"
        assert guard_text(word(bit_12=7)) == ""
        assert guard_text(word(bit_12=7, bit_15=1)) == "@!PT"
        assert guard_text(word(bit_12=0), uniform=True) == "@UP0"


class TestEveryInstruction:
    def test_guard_bits_are_the_guard_that_is_printed(self, instructions) -> None:
        for i in instructions:
            uniform = i.predicate.startswith(("@UP", "@!UP"))
            assert guard_text(i.encoding, uniform) == i.predicate, i

    def test_as_many_reuse_bits_as_operands_printed_with_reuse(self, instructions) -> None:
        for i in instructions:
            assert i.control.reuse.bit_count() == i.operands.count(".reuse"), i

    def test_whoever_waits_waits_for_a_barrier_that_is_raised_somewhere(self, instructions) -> None:
        raised = {i.control.write_scoreboard for i in instructions}
        raised |= {i.control.read_scoreboard for i in instructions}
        for i in instructions:
            waited = {barrier for barrier in range(6) if i.control.wait_mask >> barrier & 1}
            assert waited <= raised, i


class TestTheLibrary:
    @in_tiers(listed_configs(DEFAULT))
    def test_reuse_bits_stand_for_the_operands_in_order(self, configs: tuple[Config, ...]) -> None:
        seen = set()
        for i in instructions_of(configs):
            sources = i.operands.split(", ")[1:]
            if i.base in TERNARY and len(sources) == 3:
                shown = [".reuse" in operand for operand in sources]
                assert [bool(i.control.reuse >> bit & 1) for bit in range(3)] == shown, i
                seen.add(i.control.reuse)
        if of_version(1) in configs:  # the part that leads
            assert seen >= {0b000, 0b001, 0b010, 0b100}


def test_a_loaded_value_is_waited_for(load: Callable) -> None:
    """The barrier that a load raises until its result is written is in the wait mask of an
    instruction that comes after it and reads the result."""
    (kernel,) = load("unrolled.sm_90.cubin")
    checked = 0
    for index, i in enumerate(kernel.instructions):
        if i.base != "LDG":
            continue
        register = i.operands.split(", ")[0]
        waited = 0
        for later in kernel.instructions[index + 1 :]:
            waited |= later.control.wait_mask
            if register in later.operands.replace(".reuse", "").split(", ")[1:]:
                assert waited >> i.control.write_scoreboard & 1, (i, later)
                checked += 1
                break
            if later.base in ("BRA", "EXIT"):
                break
    assert checked
