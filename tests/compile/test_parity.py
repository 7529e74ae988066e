"""NVRTC and nvcc of one version write the same code, or code that differs in addresses alone.

Two differences of the compilers show in PTX. NVRTC puts the constants of namespaces and structs
into global memory, where nothing reads them, and gives kernels weak linkage. And it has no 32-bit
pointers to shared memory: `mov.u64 %rd, smem; cvt.u32.u64 %r, %rd` stands for `mov.u32 %r, smem`,
and an index into a shared array is computed in 64 bits.

Measured with 13.0.88 of both. The machine code of ampere and overlap for sm_80 is equal byte by
byte: either form of the address is folded there. For sm_90, where the address of shared memory is
computed, it is not. That of hopper has other registers and up to 6 other
integer instructions; the main loops of h12 and h30 have equally many instructions, 521 and 364, and
that of h1 has 548 beside 542. That of softmax has one or two integer instructions more or less.
One kernel of backward_sync, at d_head 96, has equal machine code as well. With a softcap or with
variable lengths family backward has up to three branches and selects more or less: one compiler
takes a branch where the other selects, and keeps a flag of a loop in a predicate. So do steps d2 to
d4 of family decode, a1, a2 and a6 of norm_cluster, and nc1. In d5 one compiler copies the loops
over parts for each answer of a branch in them, and only what moves and multiplies tiles is
compared; so in d8.
Machine code of families layer_norm, rms_norm, softmax, softmax_backward and diagonal_backward is
equal where a warp has a row, and that of families diagonal, merge_states and append, since there is
no shared memory. That of jo1 to jo3 is equal as well, and that of jo6 to jo10; jo4 and jo5 have
additions and shifts in another order. In n3 and a2 one compiler loads the addresses of weight and
bias again. In w1 up to four multiplications, a negation and an insertion of bits are more in one
compiler's code, and in nc1 an insertion of bits. In a5 and a6 one compiler adds up numbers of
elements again behind a branch.
"""

import re
from collections import Counter
from pathlib import Path

import pytest
from both_compilers import Result, compile_unit, compiler_called
from normal_ptx import normal_ptx
from tiers import listed_configs, matrix_mark

from flash_helpers.compile.codegen import families_in_library, kernel_unit
from flash_helpers.compile.ptxas import parse_ptxas_log
from flash_helpers.kernel_configs import FAMILIES, Config
from flash_helpers.sass.read.elf import read_sections

ROOT = Path(__file__).resolve().parents[2]
SAME_MACHINE_CODE = {"ampere", "overlap", "diagonal", "merge_states", "append"}
SAME_INSTRUCTIONS = {"hopper"}
"""Families whose PTX has the same instructions but for the form of an address."""
INTEGER = re.compile(r"(?:add|sub|mul|mad|shl|shr|and|or|xor|cvt|cvta|mov)\b.*\.[usb](?:32|64)$")
"""Instructions that compute addresses, among other things."""
SAME_ALTHOUGH = {
    "p5_bf16_d96_Br64_Bc32",
    # rows of a warp: no shared memory
    *(f"ad1_{dtype}_w4_c1_t16" for dtype in ("fp16", "bf16")),
    *(f"{step}_{dtype}_w4_c16_t32" for step in ("n4", "r1") for dtype in ("fp16", "bf16", "fp32")),
    *(f"n7_{dtype}_w16_c8_t512" for dtype in ("fp16", "bf16", "fp32")),
    *(f"n8_{dtype}_w8_c4_t256" for dtype in ("fp16", "bf16", "fp32")),
    *(
        f"{step}_{dtype}_w4_c4_t32"
        for step in ("s4", "f1", "i1")
        for dtype in ("fp16", "bf16", "fp32")
    ),
    *(
        f"{step}_{dtype}_w4_c2_t32_f2"
        for step in ("n6", "r2", "s5")
        for dtype in ("fp16", "bf16", "fp32")
    ),
    *(
        f"{step}_{dtype}_d16_Bc64_w{warps}"
        for step, warps in (("jo1", 4), ("jo2", 4), ("jo3", 16), ("jo6", 4))
        for dtype in ("fp16", "bf16")
    ),
    *(
        f"{step}_{dtype}_d16_Bc256_w16"
        for step in ("jo7", "jo8", "jo9", "jo10")
        for dtype in ("fp16", "bf16")
    ),
}
"""Configs of other families whose machine code is equal, too."""
CHOOSES_OTHERWISE = {"backward": ("softcap", "varlen")}
"""Flags of a family's configs with which one compiler takes a branch where the other selects."""
STEPS_CHOOSE_OTHERWISE = {"a1", "a2", "a6", "d2", "d3", "d4", "nc1"}
"""Steps of which all configs do so."""
LOADS_ARGUMENTS = {"a2", "n3", "n9"}
"""Steps in which one compiler loads an argument again where the other keeps it."""
OTHER_FACTORS = {"n9", "nc1", "w1", "w2"}
"""Steps in which one compiler has a few more multiplications, negations and insertions of bits."""
ADDS_AGAIN = {"a5", "a6"}
"""Steps in which one compiler adds up numbers of elements again behind a branch."""
COPIES_LOOPS = {"d5", "d8"}
"""Steps whose loops over parts one compiler copies for each answer of a branch in them."""
OF_TILES = re.compile(r"wgmma|cp\.async|mbarrier|stmatrix|bar\.|barrier|griddep")
"""Instructions that copy and multiply tiles, and wait for them."""
FACTOR = re.compile(r"(?:neg|mul|bfi)\b")
CHOICE = re.compile(r"(?:bra|selp|setp|mov)\b")


def both(config: Config, function: str, folder: Path) -> tuple[Result, Result]:
    (target,) = config.family.targets_for([80]) or config.family.targets_for([90])
    unit = folder / f"{config.kernels[function]}.cu"
    unit.write_text(kernel_unit(config, function))
    nvrtc, nvcc = (compiler_called(name) for name in ("NVRTC", "nvcc"))
    if nvrtc.version != nvcc.version:
        pytest.skip(f"{nvrtc.name} and {nvcc.name} are of two versions")
    ours, theirs = (
        compile_unit(compiler, ROOT, unit, f"sm_{target}", folder / f"{unit.stem} {compiler.name}")
        for compiler in (nvrtc, nvcc)
    )
    assert (ours.status, theirs.status) == (0, 0), ours.log + theirs.log
    return ours, theirs


def machine_code(result: Result) -> dict[str, bytes]:
    sections = read_sections(result.cubin, "cubin")
    return {s.name: bytes(s.data) for s in sections if s.name.startswith(".text.")}


def instructions(result: Result) -> Counter[str]:
    """Opcodes of a kernel's PTX, with the number of each."""
    lines = (re.sub(r"^@!?%p\d+ ", "", line) for line in normal_ptx(result.ptx))
    return Counter(line.split(" ")[0] for line in lines if re.match(r"[a-z]", line))


def first_tier(config: Config) -> bool:
    """Whether it is a fixed config of the last step of a family that is compiled at first use."""
    family = config.family
    last = [*family.steps.values()][-1]
    fixed = family.fixed_config(last, family.dtypes[0])
    return config == fixed and family not in families_in_library()


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            config,
            marks=() if first_tier(config) else matrix_mark(config),
            id=config.short_form(),
        )
        for config in listed_configs(ROOT)
    ],
)
def test_a_kernel_is_the_same_by_both_compilers(config: Config, tmp_path: Path) -> None:
    results = [both(config, function, tmp_path) for function in config.kernels]
    same = all(machine_code(ours) == machine_code(theirs) for ours, theirs in results)
    is_same = config.family.name in SAME_MACHINE_CODE or config.short_form() in SAME_ALTHOUGH
    assert same == is_same
    flags = CHOOSES_OTHERWISE.get(config.family.name, ())
    chooses_otherwise = any(getattr(config, flag) for flag in flags)
    chooses_otherwise |= config.step.id in STEPS_CHOOSE_OTHERWISE
    loads_arguments = config.step.id in LOADS_ARGUMENTS
    other_factors = config.step.id in OTHER_FACTORS
    adds_again = config.step.id in ADDS_AGAIN
    counted = OF_TILES if config.step.id in COPIES_LOOPS else re.compile("")
    for ours, theirs in results:
        assert bool(ours.cubin) and len(machine_code(ours)) == 1
        mine, yours = (
            Counter(
                {
                    opcode: number
                    for opcode, number in instructions(result).items()
                    if config.family.name in SAME_INSTRUCTIONS or not INTEGER.match(opcode)
                    if not (chooses_otherwise and CHOICE.match(opcode)) and counted.match(opcode)
                    if not (loads_arguments and opcode.startswith("ld.param"))
                    if not (other_factors and FACTOR.match(opcode))
                    if not (adds_again and opcode == "add.f32")
                }
            )
            for result in (ours, theirs)
        )
        assert mine == yours
        (report,), (expected,) = (parse_ptxas_log(result.log) for result in (ours, theirs))
        assert report.spill_store_bytes == expected.spill_store_bytes
        assert report.barriers == expected.barriers


def test_the_families_are_known() -> None:
    assert set(FAMILIES) > SAME_MACHINE_CODE | SAME_INSTRUCTIONS | {*CHOOSES_OTHERWISE}
