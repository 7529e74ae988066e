"""Properties of opcodes: their class, the pipe that executes them, and their cost there.

A cost is the number of cycles for which one warp instruction occupies a pipe of an SM, all four
sub-partitions taken together: 32 lanes over the results per clock and SM. A pipe with 16 lanes per
sub-partition thus takes 0.5 cycles. Sub-partitions work side by side, so that a single warp waits
four times as long. Standard library only.

Sources, as the rows below name them:

- guide: CUDA C++ Programming Guide 12.6, "Arithmetic Instructions", results per clock and SM.
- profiler: Nsight Compute's Kernel Profiling Guide, "Pipelines": the instructions of each pipe.
- forum: NVIDIA developer forum, threads 302018 and 108729. The ALU executes integers except IMAD,
  logic, and data movement. On 8.0 the FMA pipe executes IMAD and FP32. From 8.6 on it has two
  halves: FMA heavy executes IMAD and FP32, FMA lite FP32 only, and FP16 takes both.
- XLA: its device description of the A100.
- measured: mma.sync on an H100, instructions and cycles as Nsight Compute counts them
  (benchmarks/mma_cycles.py). wgmma there, by the SM's own clock: 4096 operations per cycle in every
  shape and with either operand A, once two warpgroups issue.
- white papers: NVIDIA's white papers of the A100, the H100, the Turing and the Ada GPUs: dense peak
  rates over SMs and clock. The rates of GeForce cards are those of the Ada paper, which repeats
  them for Ampere; cards for professionals accumulate in fp32 twice as fast. Peaks in 10^12
  operations per second follow.
  RTX 2080 Ti (68 SMs, 1635 MHz): 113.8 in fp16, 56.9 with fp32 sums, 227.7 in int8, 455.4 in int4.
  RTX 4090 (128 SMs, 2520 MHz): 330.3 in fp16, 165.2 with fp32 sums, 660.6 in int8, 1321.2 in int4,
  82.6 in tf32, 660.6 in fp8, 330.3 in fp8 with fp32 sums.
  An RTX 4080 was measured at these rates, except int4 (ReinForce-II/mmapeak, pull request 5).
- specifications: those of GeForce cards, in the same unit.
  RTX 5090 (170 SMs, 2407 MHz): 419 in fp16, 838 in int8.
  RTX 5050 (20 SMs, 2570 MHz): 52.6 in fp16, 26.3 with fp32 sums, 13.2 in tf32, 105.3 in int8 and
  in fp8. They give half for fp8 with fp32 sums, which measurements exceed
  (xzwgit/gpu-flops-bench), and nothing for int4: both count as unknown.
- utilities: CUDA Binary Utilities 13, "Instruction Set Reference", for the classes. Those of Hopper
  and Blackwell were compared with the SASS that ptxas 13.0 makes of the PTX instructions.

A source that ends in a question mark is from memory or deduced; nothing else may rest on it.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

UNKNOWN_PIPE = "unknown"

ISSUE_CYCLES = 0.25  # four schedulers per SM, each one instruction per cycle
# Cycles from an HMMA to the first instruction that may use its result: Mesa's table for its NAK
# compiler, and nvdisasm's own.
HMMA_LATENCY = (17, 27)

_CLASS_OF: dict[str, str] = {}  # of an opcode without modifiers
_PIPE_OF: dict[str, str] = {}  # of a class


def _class(name: str, pipe: str, opcodes: str = "") -> str:
    """A class of opcodes, entered into the two tables. `pipe`: where a source tells it."""
    _CLASS_OF.update(dict.fromkeys(opcodes.split(), name))
    _PIPE_OF[name] = pipe
    return name


TENSOR = _class(
    "tensor",
    "tensor",
    "HMMA IMMA DMMA BMMA QMMA OMMA HGMMA IGMMA QGMMA BGMMA UTCHMMA UTCIMMA UTCQMMA UTCOMMA",
)
TENSOR_MEMORY = _class(
    "tensor memory", UNKNOWN_PIPE, "LDT LDTM STT STTM UTCCP UTCSHIFT UTCATOMSWS UTCSTSWS UVIRTCOUNT"
)
LDMATRIX = _class("ldmatrix", "lsu", "LDSM")
ASYNC_COPY = _class("async copy", "lsu", "LDGSTS STAS REDAS")
SHARED_LOAD = _class("shared load", "lsu", "LDS")
SHARED_STORE = _class("shared store", "lsu", "STS STSM")
GLOBAL_LOAD = _class("global load", "lsu", "LDG LD")
GLOBAL_STORE = _class("global store", "lsu", "STG ST")
LOCAL_LOAD = _class("local load", "lsu", "LDL")
LOCAL_STORE = _class("local store", "lsu", "STL")
FP32 = _class(
    "fp32", "fma", "FFMA FADD FMUL FFMA32I FADD32I FMUL32I FSWZADD FFMA2 FADD2 FMUL2 FHADD FHFMA"
)
FP32_MINMAX = _class("fp32 min/max", "alu", "FMNMX FMNMX3")
FP16 = _class("fp16", "fma", "HADD2 HMUL2 HFMA2 HMNMX2 HADD2_32I HMUL2_32I HFMA2_32I VHMNMX")
FP64 = _class("fp64", "fp64", "DADD DMUL DFMA")
MUFU = _class("special function", "xu", "MUFU")
CONVERSION = _class("conversion", "xu", "F2F F2FP F2I F2IP I2F I2FP FRND I2I I2IP")
INTEGER_ADD = _class("integer add", "alu", "IADD3 IADD IADD32I VIADD")
INTEGER_OTHER = _class(
    "integer other",
    "alu",
    "IABS IMNMX VIMNMX VIMNMX3 VIADDMNMX ISCADD BMSK SGXT POPC FLO BREV VABSDIFF VABSDIFF4 LEPC",
)
IMAD = _class("imad", "fma", "IMAD IMUL IDP IDP4A IMAD32I IMUL32I")
IMAD_MOVE = _class("imad as move", "fma")
IMAD_SHIFT = _class("imad as shift", "fma")
IMAD_ADD = _class("imad as add", "fma")
IMAD_WIDE = _class("imad wide", "fma")
LOGIC = _class("logic", "alu", "LOP3 LOP LOP32I")
SHIFT = _class("shift", "alu", "SHF SHL SHR")
LEA = _class("lea", "alu", "LEA")
PERMUTE = _class("permute", "alu", "PRMT")
MOVE = _class("move", "alu", "MOV MOV32I CS2R SEL FSEL MOVM")
UNIFORM = _class(
    "uniform",
    "uniform",
    "R2UR UBMSK UBREV UCLEA UFLO UIADD3 UIMAD UIADD UISETP ULEA ULOP ULOP3 ULOP32I UMOV UP2UR "
    "UPLOP3 UPOPC UPRMT UPSETP UR2UP USEL USGXT USHF USHL USHR UVIADD UVIMNMX UF2FP UFADD UFMUL "
    "UFFMA UFSETP UFSEL UFMNMX UI2F UF2I ULEPC UMEMBAR UIABS UI2FP UI2I UI2IP UF2IP UFRND UIMNMX "
    "UVIADDR UVIMNMX3",
)
PREDICATE = _class(
    "predicate", "alu", "ISETP FSETP DSETP HSETP2 PLOP3 PSETP P2R R2P FSET HSET2 FCHK QSPC"
)
SHUFFLE = _class("shuffle", "lsu", "SHFL")
VOTE = _class("vote", UNKNOWN_PIPE, "VOTE VOTEU MATCH REDUX CREDUX ELECT")
ATOMIC = _class("atomic", "lsu", "ATOM ATOMG ATOMS RED REDG REDS")
TEXTURE = _class("texture", "tex", "TEX TLD TLD4 TMML TXD TXQ SULD SUST SUATOM SURED SUQUERY")
BULK_COPY = _class(
    "bulk copy",
    UNKNOWN_PIPE,
    "UBLKCP UBLKPF UBLKRED UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH",
)
BARRIER = _class(
    "barrier",
    UNKNOWN_PIPE,
    "BAR B2R R2B DEPBAR LDGDEPBAR LDTRAM MEMBAR ERRBAR CCTL CCTLL CCTLT FENCE SYNCS ARRIVES "
    "WARPGROUP WARPGROUPSET USETMAXREG UCGABAR_ARV UCGABAR_WAIT UCGABAR_SET UCGABAR_GET UTCBAR "
    "CGAERRBAR ACQBULK PREEXIT ACQSHMINIT USETSHMSZ UGETNEXTWORKID",
)
CONTROL_FLOW = _class(
    "control flow",
    "cbu",
    "BRA BRX BRXU JMP JMX JMXU CALL JCAL RET EXIT KILL BSSY BSYNC BREAK WARPSYNC BMOV RPCMOV "
    "YIELD NANOSLEEP BPT RTT PMTRIG ENDCOLLECTIVE",
)
CONSTANT_LOAD = _class("constant load", "adu", "LDC ULDC LDCU")
SPECIAL_REGISTER = _class("special register", "lsu", "S2R S2UR CS2UR")
NOP = _class("nop", UNKNOWN_PIPE, "NOP")
OTHER = _class("other", UNKNOWN_PIPE)
CLASSES = tuple(_PIPE_OF)

_IMAD_FORMS = {"MOV": IMAD_MOVE, "SHL": IMAD_SHIFT, "IADD": IMAD_ADD, "WIDE": IMAD_WIDE}
IMAD_CLASSES = (IMAD, *_IMAD_FORMS.values())
# Members of those classes of which no source tells, or sources differ: F2FP runs on the FP16 pipe
# before 8.6 and on the ALU from then on, but is listed with a quarter of the ALU's throughput too.
_WITHOUT_PIPE = frozenset(
    {"F2FP", "I2FP", "I2I", "FCHK", "DSETP", "HSET2", "HSETP2", "R2UR", "S2UR", "ULDC", "LDCU"}
    | {"MOVM", "IDP", "LEPC", "ULEPC", "F2IP", "I2IP", "QSPC", "STAS", "REDAS", "CS2UR"}
)
_GUIDE_AT_64 = frozenset(
    {"IADD3", "IADD", "IADD32I", "VIADD", "LOP3", "LOP", "LOP32I", "SHF", "SHL", "SHR"}
    | {"ISETP", "FSETP", "FMNMX", "IMNMX", "VIMNMX"}
)


@dataclass(frozen=True)
class Throughput:
    """The throughput of an opcode.

    `cycles`: cycles of an SM per warp instruction (see the module). `source`: the source of the
    number. `certain`: False where the source is memory, or a deduction.
    """

    cycles: float
    source: str
    certain: bool = True


KNOWN = (75, 80, 86, 89, 90)  # compute capabilities
TENSOR_KNOWN = (*KNOWN, 120)  # those of tensor instructions at least

# Instructions that four warps execute together, each issuing them.
GROUP_TENSOR = frozenset({"HGMMA", "IGMMA", "QGMMA", "BGMMA"})
GROUP_WARPS = 4

# Rows, columns and depth of a tile; those of warps, of 8 columns, print nothing between them.
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)|(8|16)(8)(4|8|16|32|64|128|256)")
# Operations per SM and cycle, by the result of `_kind`.
_GEFORCE = {"f16 f16": 1024, "f16 f32": 512, "i8": 2048, "i4": 4096}
_TENSOR_RATES = {
    (capability, kind): rate
    for capability, rates in {
        75: _GEFORCE,
        80: {
            "f16 f16": 2048, "f16 f32": 2048, "tf32": 1024, "i8": 4096, "i4": 8192, "f64": 128,
        },
        86: {**_GEFORCE, "tf32": 256},
        89: {**_GEFORCE, "tf32": 256, "f8 f16": 2048, "f8 f32": 1024},
        90: {
            "f16 f16": 4096, "f16 f32": 4096, "tf32": 2048, "i8": 8192, "f8 f16": 8192,
            "f8 f32": 8192, "f64": 256,
        },
        120: {"f16 f16": 1024, "f16 f32": 512, "tf32": 256, "i8": 2048, "f8 f16": 2048},
    }.items()
    for kind, rate in rates.items()
}  # fmt: skip
_RATE_SOURCES = {
    75: "white paper of Turing, GeForce",
    80: "white paper of the A100, dense peak",
    86: "white paper of Ada, GeForce",
    89: "white paper of Ada, GeForce",
    90: "white paper of the H100, dense peak",
    120: "specifications of the GeForce RTX 50 series",
}
_MEASURED_WGMMA = "measured with wgmma on an H100"

_GUIDE = "CUDA C++ Programming Guide 12.6, arithmetic instructions"
_HMMA_16816_F32 = {
    80: Throughput(2.0, "XLA's device description of the A100"),
    90: Throughput(1.5, "measured with mma.sync on an H100"),
}
_SHARED = "wavefronts of 128 bytes, one per clock?"
_IMAD_SOURCE = "as integer instructions?"


def classify(opcode: str, operands: str = "") -> str:
    """The class of an opcode with its modifiers, one of CLASSES; "other" for an unknown opcode.

    IMAD has five classes, since ptxas uses the multiplier to move, shift and add too. `operands`:
    as printed; they alone tell that `IMAD.U32 R2, RZ, RZ, UR4` is a move.
    """
    base, *modifiers = opcode.split(".")
    name = _CLASS_OF.get(base, OTHER)
    if base != "IMAD":
        return name
    for modifier in modifiers:
        if modifier in _IMAD_FORMS:
            return _IMAD_FORMS[modifier]
    factors = [operand.strip() for operand in operands.split(",")][1:3]
    return IMAD_MOVE if factors == ["RZ", "RZ"] else name


@functools.cache
def pipe(opcode: str, capability: int) -> str:
    """The pipe that executes an opcode on a compute capability such as 90; "unknown" where no
    source tells, or where sources differ.

    From 8.6 on "fma" is both halves of the FMA pipe, and "fmaheavy" the half that multiplies
    integers.
    """
    name = classify(opcode)
    if opcode.partition(".")[0] in _WITHOUT_PIPE:
        return UNKNOWN_PIPE
    if capability < 86:
        return "fp16" if name == FP16 else _PIPE_OF[name]
    return "fmaheavy" if name in IMAD_CLASSES else _PIPE_OF[name]


@functools.cache
def throughput(opcode: str, capability: int) -> Throughput | None:
    """The cost of one warp instruction on its pipe, with the source; None if nothing is known.

    Shared-memory accesses are taken to be free of bank conflicts. Tensor instructions of 7.5, 8.6,
    8.9 and 12.0 are those of GeForce: cards for professionals take half as long. An instruction of
    a warp group, which each of its four warps issues, costs each of them a quarter.

    `capability`: such as 90. Only KNOWN capabilities have costs; those in TENSOR_KNOWN have costs
    of tensor instructions.
    """
    base = opcode.partition(".")[0]
    name = classify(opcode)
    if name == TENSOR:
        return _tensor_throughput(opcode, capability)
    if capability not in KNOWN:
        return None
    if name in (LDMATRIX, SHARED_LOAD, SHARED_STORE):
        return _shared_throughput(opcode)
    if name == FP32:
        return Throughput(0.5 if capability <= 80 else 0.25, _GUIDE)
    if base in _GUIDE_AT_64:
        return Throughput(0.5, _GUIDE)
    if base == "IMAD":
        return Throughput(0.5, _IMAD_SOURCE, certain=False)
    if base in ("MUFU", "F2F", "F2I", "I2F"):
        return Throughput(2.0, _GUIDE)
    if base == "SHFL":
        return Throughput(1.0, _GUIDE)
    return None


def cost(opcode: str, capability: int) -> float | None:
    """The cycles of `throughput`; None where nothing is known."""
    found = throughput(opcode, capability)
    return found.cycles if found else None


def tensor_shape(opcode: str) -> tuple[int, int, int] | None:
    """Rows, columns and depth of the product of a dense tensor instruction. None where the opcode
    does not tell, as for sparse instructions and those that read their shape from a descriptor."""
    _, *modifiers = opcode.split(".")
    if not modifiers or classify(opcode) != TENSOR:
        return None
    match = _SHAPE.fullmatch(modifiers[0])
    if match is None or opcode.startswith("HMMA.884"):  # of Volta
        return None
    rows, columns, depth = map(int, filter(None, match.groups()))
    return rows, columns, depth


def tensor_operations(opcode: str) -> int | None:
    """Operations of a dense tensor instruction, multiplications and additions both counted, that
    one warp issues: a quarter of those of a warp group. None as for `tensor_shape`."""
    shape = tensor_shape(opcode)
    if shape is None:
        return None
    return 2 * math.prod(shape) // (GROUP_WARPS if opcode[:5] in GROUP_TENSOR else 1)


def tensor_peak(capability: int) -> int | None:
    """Most operations per cycle of an SM's tensor cores: dense products of 16 bits with sums in
    fp32, on 9.0 by wgmma. GeForce and None are as in `throughput`."""
    return _TENSOR_RATES.get((capability, "f16 f32"))


def _tensor_throughput(opcode: str, capability: int) -> Throughput | None:
    operations = tensor_operations(opcode)
    if opcode.startswith("HMMA.16816.F32") and capability in _HMMA_16816_F32:
        return _HMMA_16816_F32[capability]
    rate = _TENSOR_RATES.get((capability, _kind(opcode)))
    if operations is None or rate is None:
        return None
    base, kind = opcode.partition(".")[0], _kind(opcode)
    if base in GROUP_TENSOR and capability != 90:
        return None
    if base == "HGMMA" and kind != "tf32":
        return Throughput(operations / rate, _MEASURED_WGMMA)
    # of an H100, HMMA was measured to stay below the peak, which is that of wgmma
    certain = capability == 80 or base in GROUP_TENSOR or kind == "f64"
    return Throughput(operations / rate, _RATE_SOURCES[capability], certain)


def _kind(opcode: str) -> str:
    """The types that the rate of a tensor instruction depends on, such as "f16 f32"."""
    base, *modifiers = opcode.split(".")
    if base == "DMMA":
        return "f64"
    if base in ("IMMA", "IGMMA"):
        return "i4" if {"S4", "U4"} & {*modifiers} else "i8"
    if base in ("QMMA", "QGMMA"):
        return "f8 f32" if "F32" in modifiers else "f8 f16"
    if base not in ("HMMA", "HGMMA"):
        return base
    if "TF32" in modifiers:
        return "tf32"
    return "f16 f32" if "F32" in modifiers else "f16 f16"


def _shared_throughput(opcode: str) -> Throughput:
    """The cost of shared-memory accesses, at 128 bytes per clock: four 8x8 matrices, or 16 bytes
    per lane, take four clocks."""
    modifiers = opcode.split(".")
    if modifiers[0] in ("LDSM", "STSM"):
        width = next((int(m) for m in reversed(modifiers) if m in ("1", "2", "4")), 1)
    else:
        width = next((int(m) // 32 for m in modifiers if m in ("64", "128")), 1)
    return Throughput(float(width), _SHARED, certain=False)
