"""Classes, pipes and costs of opcodes."""

import pytest
from sass_text import ARCHITECTURES, PROGRESSION, in_tiers, kernels_of

from flash_helpers.sass.analyse.counts import Bucket, buckets
from flash_helpers.sass.read.opcodes import (
    CLASSES,
    OTHER,
    UNKNOWN_PIPE,
    classify,
    cost,
    pipe,
    tensor_operations,
    tensor_peak,
    throughput,
)

CAPABILITIES = (80, 86, 89, 90)


# those of Hopper and Blackwell as ptxas 13.0 makes them of wgmma, tcgen05, cp.async.bulk, mbarrier
# and cluster instructions
CLASS_OF = {
    "tensor": (
        "HMMA.16816.F32.BF16 IMMA.16832.S8.S8 HGMMA.64x128x16.F32.BF16 "
        "QGMMA.64x128x32.F32.E4M3.E4M3 UTCHMMA UTCIMMA UTCQMMA UTCOMMA"
    ),
    "ldmatrix": "LDSM.16.MT88.4",
    "async copy": "LDGSTS.E.BYPASS.LTC128B.128 STAS",
    "shared load": "LDS.128",
    "shared store": "STS",
    "global load": "LDG.E.128.CONSTANT",
    "global store": "STG.E.EF.128",
    "local load": "LDL.LU",
    "local store": "STL.64",
    "fp32": "FFMA FFMA2",
    "fp32 min/max": "FMNMX",
    "special function": "MUFU.EX2",
    "conversion": "F2FP.BF16.F32.PACK_AB I2F.U32.RP",
    "integer add": "IADD3.X",
    "logic": "LOP3.LUT",
    "shift": "SHF.R.U32.HI",
    "lea": "LEA.HI.X.SX32",
    "permute": "PRMT",
    "move": "CS2R SEL",
    "uniform": "UIADD3",
    "predicate": "ISETP.GE.AND PLOP3.LUT",
    "shuffle": "SHFL.BFLY",
    "barrier": (
        "BAR.SYNC.DEFER_BLOCKING DEPBAR.LE SYNCS.ARRIVE.TRANS64.A1T0 UTCBAR WARPGROUP.ARRIVE "
        "USETMAXREG.DEALLOC.CTAPOOL FENCE.VIEW.ASYNC.S UCGABAR_ARV UCGABAR_WAIT CGAERRBAR "
        "ACQBULK PREEXIT UGETNEXTWORKID.SELFCAST"
    ),
    "control flow": "BRA BSSY",
    "constant load": "ULDC.64 LDCU.64",
    "special register": "S2UR",
    "nop": "NOP",
    "tensor memory": (
        "LDTM.x2 STTM UTCCP.T.S UTCSHIFT.DOWN UTCATOMSWS.FIND_AND_SET.ALIGN "
        "UVIRTCOUNT.DEALLOC.SMPOOL"
    ),
    "bulk copy": (
        "UTMALDG.2D UTMASTG.2D UTMAREDG.2D.ADD UTMAPF.L2.2D UTMACCTL.PF UTMACMDFLUSH UBLKCP.S.G"
    ),
    "vote": "ELECT",
}


@pytest.mark.parametrize("name", CLASS_OF)
def test_the_class_of_an_opcode(name):
    for opcode in CLASS_OF[name].split():
        assert classify(opcode) == name, opcode


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


@in_tiers(PROGRESSION)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_opcode_of_the_library_has_a_class_and_a_pipe_where_it_has_a_cost(
    architecture, configs
):
    for kernel in kernels_of(configs, architecture).values():
        for i, kind in zip(kernel.instructions, buckets(kernel.instructions), strict=True):
            assert classify(i.opcode, i.operands) in set(CLASSES) - {OTHER}, i.text
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
    # H100: 989.4 TFLOP/s dense in 16 bits with 132 SMs at 1.83 GHz
    flops_a_cycle = 989.4e12 / 132 / 1.83e9
    assert flops_a_cycle == pytest.approx(4096, rel=0.01)
    assert (tensor_peak(80), tensor_peak(90), tensor_peak(100)) == (2048, 4096, None)
    for n in (8, 64, 128, 256):
        of_group = 2 * 64 * n * 16 / 4096
        assert cost(f"HGMMA.64x{n}x16.F32.BF16", 90) == of_group / 4 == n / 8
        # of 8 bits twice as deep, and of 32 half as deep, in the same time
        assert cost(f"QGMMA.64x{n}x32.F32.E4M3.E4M3", 90) == n / 8
        assert cost(f"IGMMA.64x{n}x32.S8.S8", 90) == n / 8
        assert cost(f"HGMMA.64x{n}x8.F32.TF32", 90) == n / 8


@pytest.mark.parametrize(
    ("opcode", "operations", "cycles"),
    (
        # of 7.5, 8.0, 8.6, 8.9 and 9.0
        ("HMMA.1688.F32", 2048, (4, 1, 4, 4, 0.5)),
        ("HMMA.1688.F16", 2048, (2, 1, 2, 2, 0.5)),
        ("HMMA.16816.F16", 4096, (4, 2, 4, 4, 1)),
        ("HMMA.1684.F32.TF32", 1024, (None, 1, 4, 4, 0.5)),
        ("IMMA.8816.S8.S8", 2048, (1, 0.5, 1, 1, 0.25)),
        ("IMMA.16832.S8.U8", 8192, (4, 2, 4, 4, 1)),
        ("IMMA.16864.S4.S4", 16384, (4, 2, 4, 4, None)),
        ("DMMA.884", 512, (None, 4, None, None, 2)),
        ("DMMA.16x8x8", 2048, (None, 16, None, None, 8)),
        ("QMMA.16832.F32.E4M3.E4M3", 8192, (None, None, None, 8, 1)),
        ("QMMA.16832.F16.E4M3.E5M2", 8192, (None, None, None, 4, 1)),
        ("HGMMA.64x128x16.F16", 65536, (None, None, None, None, 16)),
        ("BMMA.168256.AND.POPC", 65536, (None,) * 5),
        # sparse ones, and those whose shape stands in a descriptor
        ("HMMA.SP.16832.F32", None, (None,) * 5),
        ("UTCHMMA", None, (None,) * 5),
        ("HMMA.884.F32.F32.STEP0", None, (None,) * 5),
    ),
)
def test_tensor_instructions_cost_by_shape_and_type(opcode, operations, cycles):
    assert tensor_operations(opcode) == operations
    assert tuple(cost(opcode, capability) for capability in (75, *CAPABILITIES)) == cycles
    for capability in (100, 103, 110, 121):
        assert cost(opcode, capability) is None


@pytest.mark.parametrize(
    ("opcode", "cycles"),
    (
        # GeForce RTX 5090: 419 TFLOP/s of fp16 with 170 SMs at 2407 MHz are 1024 a cycle
        ("HMMA.16816.F16", 4),
        ("HMMA.16816.F32.BF16", 8),
        ("HMMA.1688.F32.TF32", 8),
        ("IMMA.16832.S8.S8", 4),
        ("QMMA.16832.F16.E4M3.E4M3", 4),
        # sources differ, or tell nothing
        ("QMMA.16832.F32.E4M3.E4M3", None),
        ("IMMA.16864.S4.S4", None),
        ("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", None),
        ("DMMA.8x8x4", None),
        # only tensor instructions are known
        ("FFMA", None),
    ),
)
def test_costs_of_geforce_blackwell(opcode: str, cycles: float | None) -> None:
    assert cost(opcode, 120) == cycles
    found = throughput(opcode, 120)
    assert found is None or not found.certain


def test_what_was_measured_or_is_documented_for_sure_is_told_from_the_rest():
    def certain(opcode: str, capability: int) -> bool:
        found = throughput(opcode, capability)
        assert found is not None and found.source
        return found.certain

    assert certain("HGMMA.64x128x16.F32.BF16", 90)
    assert certain("DMMA.16x8x8", 90)
    assert certain("IMMA.16832.S8.S8", 80)
    # cards for professionals differ, and an H100's mma.sync stays below its peak
    assert not certain("IMMA.16832.S8.S8", 89)
    assert not certain("HMMA.16816.F16", 90)


@pytest.mark.parametrize(
    "opcode", ("UTMALDG.5D", "UTMASTG.2D", "SYNCS.PHASECHK.TRANS64.TRYWAIT", "R2UR", "USETMAXREG")
)
def test_what_no_source_tells_has_no_cost(opcode):
    assert cost(opcode, 90) is None


def test_f2fp_is_unknown_since_sources_differ():
    for capability in CAPABILITIES:
        assert pipe("F2FP.BF16.PACK_AB", capability) == UNKNOWN_PIPE
        assert cost("F2FP.BF16.PACK_AB", capability) is None


def test_integers_are_multiplied_by_one_half_of_the_fma_pipe_from_8_6_on():
    assert pipe("IMAD", 80) == pipe("FFMA", 80) == pipe("FFMA", 86) == "fma"
    assert [pipe("IMAD.MOV.U32", c) for c in (86, 89, 90)] == ["fmaheavy"] * 3
