"""Live registers, found by the data flow: nvdisasm, where it counts them, is the witness."""

from pathlib import Path

import pytest
from fake_backend import run_tool
from sass_text import kernel

from flash_helpers.kernel_configs import Config
from flash_helpers.measure import live_registers
from flash_helpers.measure.live_registers import (
    LiveComparison,
    LiveRecord,
    compare_kernels,
    compared,
    listed,
)
from flash_helpers.measure.machine_code import own_chosen
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.hopper import HOPPER
from flash_helpers.registry.rows import SOFTMAX
from flash_helpers.runtime import library
from flash_helpers.sass.read.disassembler import find_disassemblers
from flash_helpers.sass.read.liveness import live_registers as found_live
from flash_helpers.sass.read.liveness import why_unknown
from flash_helpers.sass.read.reader import chosen_kernels, load_kernels
from flash_helpers.sass.read.records import INSTRUCTION_BYTES, Kernel, LiveRegisters

pytestmark = pytest.mark.slow

TARGETS = ("sm_90", "sm_90a")
OWN = [family.progression()[1] for family in (HOPPER, SOFTMAX)]


def check(path: Path) -> int:
    """Every count of nvdisasm is that of the reader; returns their number."""
    rows = compared(path, find_disassemblers("nvdisasm")[0].path)
    for of, address, live, is_equal in rows:
        text = of.instructions[address // INSTRUCTION_BYTES].text
        assert is_equal, (of.symbol, hex(address), text, live)
    return len(rows)


@pytest.mark.parametrize(
    "name",
    [
        *(f"{name}.sm_{a}" for name in ("spills", "unrolled", "filler") for a in (80, 90)),
        "roles.sm_90a",
        "one.sm_90a",
    ],
)
def test_are_those_of_nvdisasm(name: str, planted: Path) -> None:
    assert check(planted / f"{name}.cubin") > 5


@pytest.mark.parametrize("config", OWN, ids=Config.short_form)
def test_of_own_kernels_are_those_of_nvdisasm(config: Config) -> None:
    assert check(library.code_paths([config], "sm_90")[config.short_form()]) > 50


def test_kernels_of_the_library_and_others_are_compared_for_their_own_architecture() -> None:
    configs = [AMPERE.progression()[1], *OWN]
    chosen = {name: own_chosen(name, configs if name == "sm_90" else OWN[:1]) for name in TARGETS}
    found = compare_kernels(chosen, "")
    assert [(x.architecture, x.kernels) for x in found.architectures] == [
        ("sm_90", 2),
        ("sm_90a", 1),
    ]


def test_a_column_that_nvdisasm_leaves_out_is_zero() -> None:
    listing = """
        .section        .text.one,"ax",@progbits
                                              // |  GPR  | UGPR  |
        /*0000*/                   S2R R0 ;   // |  1    |       |
        /*0010*/                   EXIT ;     // |       |  3    |
    """
    assert [*listed(listing)] == [
        ("one", 0, LiveRegisters(1, 0, 0, 0)),
        ("one", 0x10, LiveRegisters(0, 0, 3, 0)),
    ]


def test_kernels_are_compared_and_the_differences_are_counted(monkeypatch, planted) -> None:
    path = planted / "unrolled.sm_90.cubin"
    chosen = {"sm_90": chosen_kernels(path, "sm_90", (), member="")}
    found = compare_kernels(chosen, "0123456789")
    (record,) = found.architectures
    assert (record.architecture, record.kernels) == ("sm_90", 1)
    assert record.equal == record.instructions > 50
    assert found.ptxas == "13.0.88" and found.nvdisasm.startswith("13.")
    number = record.instructions
    assert f"| sm_90 | 1 | {number} | {number} | 100.000% |" in found.markdown()
    (own,) = load_kernels(path)
    wrong = [
        (own.symbol, 0, LiveRegisters(255, 0, 0, 0)),
        (own.symbol, 16, own.instructions[1].live),
    ]
    monkeypatch.setattr(live_registers, "listed", lambda text: wrong)
    (record,) = compare_kernels(chosen, "").architectures
    assert record == LiveRecord("sm_90", 1, 2, 1)


def test_the_file_has_both_architectures_of_the_page(root: Path) -> None:
    found = LiveComparison.load(root / live_registers.RESULTS)
    assert [record.architecture for record in found.architectures] == ["sm_90", "sm_90a"]
    assert all(0 < record.equal <= record.instructions for record in found.architectures)


def test_of_an_older_compiler_are_those_of_the_newer(load) -> None:
    """nvdisasm counts none in cubins of CUDA 12; ptxas 12.9 and 13.0 make the same code here."""
    kernels = [
        {k.symbol: k for k in load(name)} for name in ("ends12_9.sm_90.cubin", "ends.sm_90.cubin")
    ]
    old, new = (found["spills_beside_array"] for found in kernels)
    assert [i.text for i in old.instructions] == [i.text for i in new.instructions]
    assert [i.live for i in old.instructions] == [i.live for i in new.instructions]
    assert max(i.live.general for i in old.instructions if i.live) <= old.resources.registers


def general(text: str, *starts: int) -> list[int]:
    planted = kernel(text)
    found = found_live(planted.instructions, planted.blocks, starts)
    return [live.general - 1 for live in found]  # less the stack pointer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # R2 and R3 until they are read
        ("MOV R2, 1\nMOV R3, 2\nIADD3 R4, R2, R3, RZ\nSTS [R4], R4\nEXIT", [1, 2, 3, 1, 0]),
        # a pair and four
        ("LDG.E.128 R4, desc[UR4][R2.64]\nSTG.E.128 desc[UR4][R2.64], R4\nEXIT", [6, 6, 0]),
        # what a guard may leave as it is, is needed before
        ("MOV R2, 1\n@P0 MOV R2, 2\nSTS [RZ], R2\nEXIT", [1, 1, 1, 0]),
        # a value that a loop needs is live in all of it
        ("MOV R2, 1\nloop: MOV R3, 2\n@P0 BRA loop\nSTS [RZ], R2\nEXIT", [1, 2, 1, 1, 0]),
        ("MOV R2, 1\nloop: IADD3 R3, R2, 1, RZ\n@P0 BRA loop\nEXIT", [1, 2, 1, 0]),
        # filler that never executes needs nothing
        ("@!PT LDS RZ, [RZ]\nMOV R2, 1\nEXIT", [0, 1, 0]),
    ],
)
def test_of(text: str, expected: list[int]) -> None:
    assert general(text) == expected


def test_a_call_changes_what_its_routine_writes() -> None:
    text = (
        "MOV R2, 1\nMOV R20, 0x40\nCALL.REL.NOINC routine\nSTS [R2], R4\nEXIT\n"
        "routine: IADD3 R4, R2, 1, RZ\nRET.REL.NODEC R20 0x0"
    )
    # R4 is the routine's; R2 lives on behind the call; R20 and R21 hold where it returns to
    assert general(text)[:4] == [2, 3, 3, 2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("BRX R2 -0x10\nEXIT", "the jump at 0x0000 has no table of targets"),
        ("MOV R2, 1\nCALL.REL.NOINC 0x4000\nEXIT", "the call at 0x0010 leaves the kernel's own"),
        ("NEWOP R2, R4\nEXIT", "the opcode NEWOP is not known"),
        ("MOV R2, 1\nEXIT", ""),
    ],
)
def test_that_are_not_known_have_a_reason(text: str, reason: str) -> None:
    assert why_unknown(kernel(text).instructions, {}, False).startswith(reason or "")
    assert bool(why_unknown(kernel(text).instructions, {}, False)) == bool(reason)


def test_of_a_device_function_are_not_known_and_the_report_says_why(load, planted, capsys) -> None:
    found: dict[str, Kernel] = {k.symbol: k for k in load("functions.sm_90.cubin")}
    assert {i.live for i in found["_Z5twicei"].instructions} == {None}
    tool, name = "tools/analysis/sass_report.py", f"{planted / 'functions.sm_90.cubin'}#twice"
    _, out, _ = run_tool(capsys, tool, name)
    assert "how many are live is not known: it is a device function" in out
