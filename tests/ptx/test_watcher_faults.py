"""Mistakes planted in a right kernel are caught, by the watcher or by the result.

Each fault is an edit of the PTX of a small attention kernel, made where the CUDA source says a
certain thing. Watched faults must also lead to the line that a reader has to look at.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from flash_helpers.ptx import (
    BarrierError,
    DeviceMemory,
    MisalignedError,
    MissingLanesError,
    OutOfBoundsError,
    PendingCopyError,
    RaceError,
    SimulatorError,
    UninitialisedReadError,
    load_ptx,
)

KERNELS = Path(__file__).parent / "kernels"
SOURCE = (KERNELS / "attention.cu").read_text().splitlines()
PTX = (KERNELS / "attention.ptx").read_text()
KERNEL = "__halfLb0"
SWIZZLED = "bfloat16Lb1"
SEQ, D_HEAD = 256, 64
SHARED_BYTES = 3 * 64 * D_HEAD * 2


@dataclass(frozen=True)
class Fault:
    """An edit, and what must come of it.

    source: part of the CUDA line; opcode: regular expression; edit: from the PTX line to the new
    one; which: the matches to edit, None for all; error: the fault that is raised, None for a wrong
    result; at: part of the CUDA line that the message must name.
    """

    source: str
    opcode: str
    edit: Callable[[str], str]
    which: slice | None = None
    error: type[SimulatorError] | None = None
    at: str = ""
    kernel: str = KERNEL


def drop(line: str) -> str:
    return ""


def swap(pattern: str, replacement: str) -> Callable[[str], str]:
    def edit(line: str) -> str:
        changed = re.sub(pattern, replacement, line)
        assert changed != line, f"{pattern} does not occur in {line}"
        return changed

    return edit


COPY = '"l"(gmem + row * row_stride + chunk * 8)'
LDMATRIX = ': "r"(shared_address(row)));'
TO_MOVE = swap(r"\w+\.f32\s+(%\w+), (%\w+), %\w+;", r"mov.f32 \1, \2;")

FAULTS = {
    "the barrier after the wait is dropped": Fault(
        "__syncthreads();", "bar.sync", drop, slice(0, 1), RaceError, LDMATRIX
    ),
    "the barrier before the next copies is dropped": Fault(
        "__syncthreads();", "bar.sync", drop, slice(1, 2), RaceError, COPY
    ),
    "the wait is dropped": Fault(
        "cp.async.wait_group 0", "cp.async.wait", drop, error=PendingCopyError, at=LDMATRIX
    ),
    "the wait is off by one": Fault(
        "cp.async.wait_group 0", "cp.async.wait", swap("0;", "1;"), error=PendingCopyError,
        at=LDMATRIX,
    ),
    "the commit is missing": Fault(
        "cp.async.commit_group", "cp.async.commit", drop, slice(1, 2), PendingCopyError, LDMATRIX
    ),
    "a copy is missing": Fault(
        COPY, "cp.async.cg", drop, slice(0, 3), UninitialisedReadError, LDMATRIX
    ),
    "one row past the end of V": Fault(
        COPY, "cp.async.cg", swap(r"\[(%rd\w+)\]", r"[\1+128]"), slice(-4, None),
        OutOfBoundsError, COPY,
    ),
    "two warps take the same rows": Fault(
        "warp = threadIdx.x / 32", r"shr\.u32", swap("5;", "6;"), error=RaceError,
        at="reinterpret_cast<uint32_t &>(Q_smem",
    ),
    "a shuffle names too few lanes": Fault(
        "__shfl_xor_sync(~0u, m_new, 1)", "shfl", swap(", -1;|, %r\\w+;", ", 268435455;"),
        slice(0, 1), MissingLanesError, "__shfl_xor_sync(~0u, m_new, 1)",
    ),
    "a fragment is loaded from between two chunks": Fault(
        "shared_address(row)", "ldmatrix", swap(r"\[(%r\w+)\]|\[(%r\w+)\+(\w+)\]", r"[\1\2+8]"),
        slice(0, 1), MisalignedError, LDMATRIX,
    ),
    "one warp leaves before the barrier": Fault(
        "const int lane", r"mov\.u32",
        lambda line: line + "\n\tsetp.gt.u32 %p1, %r1, 95;\n\t@%p1 ret;", slice(0, 1),
        BarrierError, "__syncthreads();",
    ),
    "the loads of V forget to transpose": Fault(
        "shared_address(row)", r"ldmatrix.*trans", swap(r"\.trans", "")
    ),
    "the loads do not swizzle": Fault(
        "chunk ^ (row % 8)", r"xor", swap(r"xor\.b32\s+(%\w+), (%\w+), .*;", r"mov.b32 \1, \2;"),
        slice(-12, -8), kernel=SWIZZLED,
    ),
    "O is not rescaled": Fault("O_acc[n][2 * h] *= rescale", r"mul\.f32", TO_MOVE),
    "l is not rescaled": Fault(
        "l[h] += S[n][2 * h + i]", r"fma\.rn\.f32",
        swap(r"fma\.rn\.f32\s+(%\w+), (%\w+), %\w+, (%\w+);", r"add.f32 \1, \2, \3;"),
    ),
    "the maximum stays in its lane": Fault(
        "__shfl_xor_sync(~0u, m_new, 2)", r"max\.f32", TO_MOVE
    ),
    "the sum stays in its lane": Fault("__shfl_xor_sync(~0u, l[h], 1)", r"add\.f32", TO_MOVE),
    "a shuffle goes to the wrong lane": Fault(
        "__shfl_xor_sync(~0u, m_new, 2)", "shfl",
        swap(r"(shfl\S+\s+%\w+\|%\w+, %\w+), %\w+,", r"\1, 4,"), slice(0, 1),
    ),
    "every other block of keys is skipped": Fault(
        "for (int j = 0; j < args.seq_len / B_c; ++j)", r"add\.s32", swap("1;", "2;"),
        slice(-1, None),
    ),
    "the halves of P are exchanged": Fault(
        "__floats2half2_rn(lo, hi)", r"cvt\.rn\.f16x2",
        swap(r"(%f\w+), (%f\w+); \}", r"\2, \1; }"), slice(0, 8),
    ),
    "the fragments of K are exchanged": Fault(
        '"r"(a[3]), "r"(b0), "r"(b1)', "mma",
        swap(r"(\}, \{)(%r\w+),\s*(%r\w+)(\})", r"\1\3,\2\4"), slice(0, 8),
    ),
}  # fmt: skip


def plant(fault: Fault) -> str:
    """The PTX with the fault in it."""
    kernel = load_ptx(PTX).kernel(fault.kernel)
    lines = PTX.split("\n")
    found = []
    for instruction in kernel.function.instructions:
        frames = instruction.location.frames() if instruction.location else ()
        here = [f for f in frames if f.file == "attention.cu"]
        if any(fault.source in SOURCE[f.line - 1] for f in here) and re.match(
            fault.opcode, instruction.opcode
        ):
            found.append(instruction.line - 1)
    chosen = sorted(found)[fault.which or slice(None)]
    assert chosen, "the fault has nowhere to go"
    for index in chosen:
        lines[index] = fault.edit(lines[index])
    return "\n".join(lines)


def bits_of(x: np.ndarray, kernel: str) -> np.ndarray:
    if kernel == KERNEL:
        return x.astype(np.float16).view(np.uint16)
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def values_of(bits: np.ndarray, kernel: str) -> np.ndarray:
    if kernel == KERNEL:
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def error_of(text: str, kernel: str, shared_bytes: int = SHARED_BYTES) -> float:
    """Runs attention; the relative Frobenius error of its output."""
    rng = np.random.default_rng(3)
    # Rows of growing size, so that the running maximum really changes from block to block.
    x = (rng.standard_normal((3, SEQ, D_HEAD)) + 0.3) * np.linspace(0.5, 2, SEQ)[:, None]
    inputs = [bits_of(a, kernel) for a in x]
    q, k, v = (values_of(b, kernel) for b in inputs)
    memory = DeviceMemory()
    addresses = [memory.upload(b) for b in inputs]
    out = memory.upload(np.zeros((SEQ, D_HEAD), np.uint16))
    load_ptx(text).kernel(kernel).launch(
        grid=SEQ // 64,
        block=128,
        shared_bytes=shared_bytes,
        args=[struct.pack("<4Qqi4x", *addresses, out, D_HEAD, SEQ)],
        memory=memory,
        strict_barriers=True,
    )
    s = q @ k.T / math.sqrt(D_HEAD)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    want = p / p.sum(axis=1, keepdims=True) @ v
    got = values_of(memory.download(out, (SEQ, D_HEAD), np.uint16), kernel)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


BOUND = {KERNEL: 1e-3, SWIZZLED: 8e-3}


@pytest.mark.parametrize("kernel", BOUND)
def test_the_kernel_without_a_fault_is_right(kernel):
    assert error_of(PTX, kernel) < BOUND[kernel]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name):
    fault = FAULTS[name]
    text = plant(fault)
    if fault.error is None:
        # Twice the bound would do; a fault that hides among roundings would be a weak test.
        assert not error_of(text, fault.kernel) < 2 * BOUND[fault.kernel]
        return
    with pytest.raises(fault.error) as caught:
        error_of(text, fault.kernel)
    named = [int(n) for n in re.findall(r"attention\.cu:(\d+)", str(caught.value))]
    assert any(fault.at in SOURCE[n - 1] for n in named), str(caught.value)


def test_a_launch_with_too_little_shared_memory_is_caught():
    with pytest.raises(OutOfBoundsError, match="bytes of shared memory"):
        error_of(PTX, KERNEL, SHARED_BYTES - 2048)
