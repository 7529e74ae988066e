"""Classes, pipes and costs of opcodes."""

from __future__ import annotations

import pytest
from sass_text import ARCHITECTURES, progression_kernels

from flash_helpers.sass.analyse.counts import Bucket, buckets
from flash_helpers.sass.read.opcodes import (
    CLASSES,
    OTHER,
    UNKNOWN_PIPE,
    classify,
    cost,
    pipe,
    throughput,
)

CAPABILITIES = (80, 86, 89, 90)


@pytest.mark.parametrize(
    ("opcode", "name"),
    (
        ("HMMA.16816.F32.BF16", "tensor"),
        ("IMMA.16832.S8.S8", "tensor"),
        ("LDSM.16.MT88.4", "ldmatrix"),
        ("LDGSTS.E.BYPASS.LTC128B.128", "async copy"),
        ("LDS.128", "shared load"),
        ("STS", "shared store"),
        ("LDG.E.128.CONSTANT", "global load"),
        ("STG.E.EF.128", "global store"),
        ("LDL.LU", "local load"),
        ("STL.64", "local store"),
        ("FFMA", "fp32"),
        ("FMNMX", "fp32 min/max"),
        ("MUFU.EX2", "special function"),
        ("F2FP.BF16.F32.PACK_AB", "conversion"),
        ("I2F.U32.RP", "conversion"),
        ("IADD3.X", "integer add"),
        ("LOP3.LUT", "logic"),
        ("SHF.R.U32.HI", "shift"),
        ("LEA.HI.X.SX32", "lea"),
        ("PRMT", "permute"),
        ("CS2R", "move"),
        ("SEL", "move"),
        ("UIADD3", "uniform"),
        ("ISETP.GE.AND", "predicate"),
        ("PLOP3.LUT", "predicate"),
        ("SHFL.BFLY", "shuffle"),
        ("BAR.SYNC.DEFER_BLOCKING", "barrier"),
        ("DEPBAR.LE", "barrier"),
        ("BRA", "control flow"),
        ("BSSY", "control flow"),
        ("ULDC.64", "constant load"),
        ("S2UR", "special register"),
        ("NOP", "nop"),
    ),
)
def test_the_class_of_an_opcode(opcode, name):
    assert classify(opcode) == name


@pytest.mark.parametrize(
    ("opcode", "operands", "name"),
    (
        ("IMAD", "R1, R2, R3, R4", "imad"),
        ("IMAD.X", "R1, R2, 0x1, R4, P0", "imad"),
        ("IMAD.WIDE.U32", "R2, R5, 0x800, RZ", "imad wide"),
        ("IMAD.MOV.U32", "R1, RZ, RZ, R2", "imad as move"),
        ("IMAD.U32", "R1, RZ, RZ, UR4", "imad as move"),
        ("IMAD.U32", "R1, R2, 0x3, RZ", "imad"),
        ("IMAD.SHL.U32", "R1, R2, 0x8, RZ", "imad as shift"),
        ("IMAD.IADD", "R1, R2, 0x1, R3", "imad as add"),
    ),
)
def test_the_multiplier_is_used_for_other_things_too(opcode, operands, name):
    assert classify(opcode, operands) == name


@pytest.mark.parametrize("opcode", ("FROBNICATE.X9", "", ".", "imad", "UNHEARD", "123"))
@pytest.mark.parametrize("capability", (*CAPABILITIES, 70, 120))
def test_what_is_not_known_is_said_and_never_an_error(opcode, capability):
    assert classify(opcode, "R1") == OTHER
    assert pipe(opcode, capability) == UNKNOWN_PIPE
    assert cost(opcode, capability) is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_opcode_of_the_library_has_a_class(architecture):
    for kernel in progression_kernels(architecture).values():
        for i in kernel.instructions:
            assert classify(i.opcode, i.operands) in set(CLASSES) - {OTHER}, i.text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_opcode_has_a_cost_only_where_it_has_a_pipe(architecture):
    for kernel in progression_kernels(architecture).values():
        for i, kind in zip(kernel.instructions, buckets(kernel.instructions), strict=True):
            if i.cost is not None and kind is not Bucket.PADDING:
                assert i.pipe != UNKNOWN_PIPE, i.text


@pytest.mark.parametrize(
    ("opcode", "per_clock"),
    (
        # results per clock and SM of 8.0, 8.6, 8.9 and 9.0: CUDA C++ Programming Guide
        ("FADD", (64, 128, 128, 128)),
        ("FFMA", (64, 128, 128, 128)),
        ("IADD3", (64, 64, 64, 64)),
        ("LOP3.LUT", (64, 64, 64, 64)),
        ("SHF.L.U32", (64, 64, 64, 64)),
        ("ISETP.GE.AND", (64, 64, 64, 64)),
        ("FMNMX", (64, 64, 64, 64)),
        ("MUFU.EX2", (16, 16, 16, 16)),
        ("SHFL.BFLY", (32, 32, 32, 32)),
    ),
)
def test_costs_are_32_lanes_over_the_results_per_clock(opcode, per_clock):
    for capability, results in zip(CAPABILITIES, per_clock, strict=True):
        found = throughput(opcode, capability)
        assert found is not None and found.certain
        assert found.cycles == 32 / results


@pytest.mark.parametrize(
    ("opcode", "wavefronts"),
    (
        ("LDSM.16.M88.4", 4),
        ("LDSM.16.MT88.2", 2),
        ("LDSM.16.M88", 1),
        ("LDS", 1),
        ("LDS.U.64", 2),
        ("LDS.128", 4),
        ("STS.U16", 1),
        ("STS.128", 4),
        ("STSM.16.M88.4", 4),
    ),
)
def test_a_shared_access_takes_a_cycle_for_128_bytes(opcode, wavefronts):
    found = throughput(opcode, 90)
    assert found is not None
    assert found.cycles == wavefronts
    assert not found.certain


def test_tensor_costs_are_those_of_the_peak_rates():
    # A100: 312 TFLOP/s with 108 SMs at 1.41 GHz, NVIDIA A100 Tensor Core GPU Architecture
    flops_a_cycle = 312e12 / 108 / 1.41e9
    assert cost("HMMA.16816.F32", 80) == pytest.approx(2 * 16 * 8 * 16 / flops_a_cycle, rel=0.01)
    assert cost("HMMA.16816.F32.BF16", 90) == cost("HMMA.16816.F32", 90)
    assert cost("HMMA.16816.F16", 90) is None


def test_f2fp_is_unknown_since_sources_differ():
    for capability in CAPABILITIES:
        assert pipe("F2FP.BF16.PACK_AB", capability) == UNKNOWN_PIPE
        assert cost("F2FP.BF16.PACK_AB", capability) is None


def test_integers_are_multiplied_by_one_half_of_the_fma_pipe_from_8_6_on():
    assert pipe("IMAD", 80) == pipe("FFMA", 80) == pipe("FFMA", 86) == "fma"
    assert [pipe("IMAD.MOV.U32", c) for c in (86, 89, 90)] == ["fmaheavy"] * 3
