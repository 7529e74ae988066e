"""Gaps between the tensor instructions of one product of a warpgroup."""

from sass_text import kernel

from flash_helpers.sass.analyse.phases import main_loop
from flash_helpers.sass.analyse.products import Gaps, product_gaps


def hgmma(accumulators: int, last: bool = False) -> str:
    end = ", gsb0" if last else ""
    return f"HGMMA.64x128x16.F32.BF16 R{accumulators}, gdesc[UR12], R{accumulators}{end}"


def gaps(body: str) -> Gaps:
    found = kernel(f"loop: NOP\n{body}\n@P0 BRA loop\nEXIT")
    return product_gaps(found, main_loop(found))


def test_what_comes_before_and_after_a_product_is_none_of_its_own() -> None:
    assert gaps(f"FADD R1, R1, R1\n{hgmma(24)}\n{hgmma(24, last=True)}\nFADD R1, R1, R1") == Gaps()


def test_instructions_and_moves_to_uniform_registers_are_counted() -> None:
    between = "R2UR UR12, R88\nUMOV UR14, UR10\nR2UR UR13, R89"
    product = f"{hgmma(24)}\n{between}\n{hgmma(24)}\n{between}\n{hgmma(24, last=True)}"
    assert gaps(product) == Gaps(instructions=6, moves=4)


def test_what_is_never_executed_does_not_count() -> None:
    assert gaps(f"{hgmma(24)}\n@!PT LDS RZ, [RZ]\n{hgmma(24, last=True)}") == Gaps()


def test_another_product_has_other_accumulators_or_is_of_another_group() -> None:
    between = "UIADD3 UR10, UR8, 0x80, URZ"
    assert gaps(f"{hgmma(24)}\n{between}\n{hgmma(88, last=True)}") == Gaps()
    assert gaps(f"{hgmma(24, last=True)}\n{between}\n{hgmma(24, last=True)}") == Gaps()


def test_products_of_single_warps_have_none() -> None:
    hmma = "HMMA.16816.F32 R4, R8, R12, R4"
    assert gaps(f"{hmma}\nFADD R1, R1, R1\n{hmma}") == Gaps()
