"""What opcodes are: their class, the pipe that executes them, and what they cost there.

A cost is the number of cycles for which one warp instruction occupies a pipe of an SM, all four
sub-partitions taken together: 32 lanes over the results per clock and SM. A pipe of which each
sub-partition has 16 lanes thus takes 0.5 cycles. Sub-partitions work side by side, so that a warp
alone waits four times as long as that. Standard library only.

Sources, as the rows below name them:

- guide: CUDA C++ Programming Guide 12.6, "Arithmetic Instructions", results per clock and SM.
- profiler: Nsight Compute's Kernel Profiling Guide, "Pipelines": which instructions a pipe takes.
- forum: NVIDIA developer forum, threads 302018 and 108729: the ALU executes integers but IMAD,
  logic, and data movement; on 8.0 the FMA pipe executes IMAD and FP32; from 8.6 on it has two
  halves, of which FMA heavy executes IMAD and FP32, FMA lite FP32 only, and FP16 takes both.
- XLA: its device description of the A100.
- measured: mma.sync on an H100, instructions and cycles as Nsight Compute counts them
  (benchmarks/mma_cycles.py).

A source that ends in a question mark is from memory or deduced; nothing else may rest on it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

UNKNOWN_PIPE = "unknown"
OTHER = "other"

ISSUE_CYCLES = 0.25  # four schedulers an SM, an instruction a cycle each
# Cycles from an HMMA to the first instruction that may use its result: Mesa's table for its NAK
# compiler, and nvdisasm's own.
HMMA_LATENCY = (17, 27)

TENSOR = "tensor"
LDMATRIX = "ldmatrix"
ASYNC_COPY = "async copy"
SHARED_LOAD = "shared load"
SHARED_STORE = "shared store"
GLOBAL_LOAD = "global load"
GLOBAL_STORE = "global store"
LOCAL_LOAD = "local load"
LOCAL_STORE = "local store"
FP32 = "fp32"
FP32_MINMAX = "fp32 min/max"
FP16 = "fp16"
FP64 = "fp64"
MUFU = "special function"
CONVERSION = "conversion"
INTEGER_ADD = "integer add"
INTEGER_OTHER = "integer other"
IMAD = "imad"
IMAD_WIDE = "imad wide"
IMAD_MOVE = "imad as move"
IMAD_SHIFT = "imad as shift"
IMAD_ADD = "imad as add"
LOGIC = "logic"
SHIFT = "shift"
LEA = "lea"
PERMUTE = "permute"
MOVE = "move"
UNIFORM = "uniform"
PREDICATE = "predicate"
SHUFFLE = "shuffle"
VOTE = "vote"
ATOMIC = "atomic"
TEXTURE = "texture"
BULK_COPY = "bulk copy"
BARRIER = "barrier"
CONTROL_FLOW = "control flow"
CONSTANT_LOAD = "constant load"
SPECIAL_REGISTER = "special register"
NOP = "nop"

# Of each class its pipe, where a source tells it, and its opcodes.
_TABLE: Mapping[str, tuple[str, str]] = {
    TENSOR: ("tensor", "HMMA IMMA DMMA BMMA QMMA OMMA HGMMA IGMMA QGMMA BGMMA"),
    LDMATRIX: ("lsu", "LDSM"),
    ASYNC_COPY: ("lsu", "LDGSTS"),
    SHARED_LOAD: ("lsu", "LDS"),
    SHARED_STORE: ("lsu", "STS STSM"),
    GLOBAL_LOAD: ("lsu", "LDG LD"),
    GLOBAL_STORE: ("lsu", "STG ST"),
    LOCAL_LOAD: ("lsu", "LDL"),
    LOCAL_STORE: ("lsu", "STL"),
    FP32: ("fma", "FFMA FADD FMUL FFMA32I FADD32I FMUL32I FSWZADD"),
    FP32_MINMAX: ("alu", "FMNMX FMNMX3"),
    FP16: ("fma", "HADD2 HMUL2 HFMA2 HMNMX2 HADD2_32I HMUL2_32I HFMA2_32I VHMNMX"),
    FP64: ("fp64", "DADD DMUL DFMA"),
    MUFU: ("xu", "MUFU"),
    CONVERSION: ("xu", "F2F F2FP F2I I2F I2FP FRND I2I"),
    INTEGER_ADD: ("alu", "IADD3 IADD IADD32I VIADD"),
    INTEGER_OTHER: (
        "alu",
        "IABS IMNMX VIMNMX VIMNMX3 VIADDMNMX ISCADD BMSK SGXT POPC FLO BREV VABSDIFF VABSDIFF4 "
        "LEPC",
    ),
    IMAD: ("fma", "IMAD IMUL IDP IDP4A IMAD32I IMUL32I"),
    LOGIC: ("alu", "LOP3 LOP LOP32I"),
    SHIFT: ("alu", "SHF SHL SHR"),
    LEA: ("alu", "LEA"),
    PERMUTE: ("alu", "PRMT"),
    MOVE: ("alu", "MOV MOV32I CS2R SEL FSEL MOVM"),
    UNIFORM: (
        "uniform",
        "R2UR UBMSK UBREV UCLEA UFLO UIADD3 UIMAD UIADD UISETP ULEA ULOP ULOP3 ULOP32I UMOV UP2UR "
        "UPLOP3 UPOPC UPRMT UPSETP UR2UP USEL USGXT USHF USHL USHR UVIADD UVIMNMX UF2FP UFADD "
        "UFMUL UFFMA UFSETP UFSEL UFMNMX UI2F UF2I ULEPC UMEMBAR UIABS",
    ),
    PREDICATE: ("alu", "ISETP FSETP DSETP HSETP2 PLOP3 PSETP P2R R2P FSET HSET2 FCHK"),
    SHUFFLE: ("lsu", "SHFL"),
    VOTE: (UNKNOWN_PIPE, "VOTE VOTEU MATCH REDUX ELECT"),
    ATOMIC: ("lsu", "ATOM ATOMG ATOMS RED REDG REDS"),
    TEXTURE: ("tex", "TEX TLD TLD4 TMML TXD TXQ SULD SUST SUATOM SURED SUQUERY"),
    BULK_COPY: (
        UNKNOWN_PIPE,
        "UBLKCP UBLKPF UBLKRED UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH",
    ),
    BARRIER: (
        UNKNOWN_PIPE,
        "BAR B2R R2B DEPBAR LDGDEPBAR LDTRAM MEMBAR ERRBAR CCTL CCTLL CCTLT FENCE SYNCS ARRIVES "
        "WARPGROUP WARPGROUPSET USETMAXREG UCGABAR_ARV UCGABAR_WAIT ACQBULK PREEXIT",
    ),
    CONTROL_FLOW: (
        "cbu",
        "BRA BRX BRXU JMP JMX JMXU CALL JCAL RET EXIT KILL BSSY BSYNC BREAK WARPSYNC BMOV RPCMOV "
        "YIELD NANOSLEEP BPT RTT PMTRIG",
    ),
    CONSTANT_LOAD: ("adu", "LDC ULDC LDCU"),
    SPECIAL_REGISTER: ("lsu", "S2R S2UR"),
    NOP: (UNKNOWN_PIPE, "NOP"),
}
_CLASS_OF = MappingProxyType(
    {base: name for name, (_, bases) in _TABLE.items() for base in bases.split()}
)
_IMAD_FORMS = MappingProxyType(
    {"MOV": IMAD_MOVE, "SHL": IMAD_SHIFT, "IADD": IMAD_ADD, "WIDE": IMAD_WIDE}
)

IMAD_CLASSES = (IMAD, *_IMAD_FORMS.values())
CLASSES = (
    *(name for row in _TABLE for name in (IMAD_CLASSES if row == IMAD else (row,))),
    OTHER,
)
_PIPE_OF = MappingProxyType(
    {name: own for name, (own, _) in _TABLE.items()}
    | dict.fromkeys(IMAD_CLASSES, "fma")
    | {OTHER: UNKNOWN_PIPE}
)
# Members of those classes of which no source tells, or sources differ: F2FP runs on the FP16 pipe
# before 8.6 and on the ALU from then on, but is listed with a quarter of the ALU's throughput too.
_WITHOUT_PIPE = frozenset(
    {"F2FP", "I2FP", "I2I", "FCHK", "DSETP", "HSET2", "HSETP2", "R2UR", "S2UR", "ULDC", "LDCU"}
    | {"MOVM", "IDP", "LEPC", "ULEPC"}
)
_GUIDE_AT_64 = frozenset(
    {"IADD3", "IADD", "IADD32I", "VIADD", "LOP3", "LOP", "LOP32I", "SHF", "SHL", "SHR"}
    | {"ISETP", "FSETP", "FMNMX", "IMNMX", "VIMNMX"}
)


@dataclass(frozen=True)
class Throughput:
    """What is known of an opcode's throughput.

    cycles: of an SM, for one warp instruction (see the module). source: where the number is from.
    certain: False where the source is memory, or a deduction.
    """

    cycles: float
    source: str
    certain: bool = True


_GUIDE = "CUDA C++ Programming Guide 12.6, arithmetic instructions"
_SHARED = "wavefronts of 128 bytes, one a clock?"
_IMAD_SOURCE = "as integer instructions?"


def classify(opcode: str, operands: str = "") -> str:
    """The class of an opcode with its modifiers, one of CLASSES; "other" for one that is not known.

    IMAD has five classes, since ptxas uses the multiplier to move, shift and add too.
    operands: as printed; they alone tell that `IMAD.U32 R2, RZ, RZ, UR4` is a move.
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

    From 8.6 on "fma" is both halves of the FMA pipe, "fmaheavy" the one that multiplies integers.
    """
    name = classify(opcode)
    if opcode.partition(".")[0] in _WITHOUT_PIPE:
        return UNKNOWN_PIPE
    if capability < 86:
        return "fp16" if name == FP16 else _PIPE_OF[name]
    return "fmaheavy" if name in IMAD_CLASSES else _PIPE_OF[name]


@functools.cache
def throughput(opcode: str, capability: int) -> Throughput | None:
    """What one warp instruction costs its pipe, with the source; None where nothing is known.

    Shared-memory accesses are taken to be free of bank conflicts. Tensor instructions of 8.6 and
    8.9 are those of GeForce: cards for professionals take half as long.

    capability: such as 90; for others than 80, 86, 89 and 90 nothing is known.
    """
    if capability not in (80, 86, 89, 90):
        return None
    base = opcode.partition(".")[0]
    name = classify(opcode)
    if name == TENSOR:
        return _tensor_throughput(opcode, capability)
    if name in (LDMATRIX, SHARED_LOAD, SHARED_STORE):
        return _shared_throughput(opcode)
    if name == FP32:
        return Throughput(0.5 if capability == 80 else 0.25, _GUIDE)
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


def _tensor_throughput(opcode: str, capability: int) -> Throughput | None:
    if not opcode.startswith("HMMA.16816.F32"):
        return None
    if capability == 80:
        return Throughput(2.0, "XLA's device description of the A100")
    if capability == 90:
        return Throughput(1.5, "measured with mma.sync on an H100")
    return Throughput(8.0, "half of the professional cards' rate, 4 cycles?", certain=False)


def _shared_throughput(opcode: str) -> Throughput:
    """128 bytes a clock: four 8x8 matrices, or 16 bytes a lane, take four."""
    modifiers = opcode.split(".")
    if modifiers[0] in ("LDSM", "STSM"):
        width = next((int(m) for m in reversed(modifiers) if m in ("1", "2", "4")), 1)
    else:
        width = next((int(m) // 32 for m in modifiers if m in ("64", "128")), 1)
    return Throughput(float(width), _SHARED, certain=False)
