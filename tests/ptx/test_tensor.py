"""Matrix instructions: the place of each element is computed here from the PTX ISA's formulas."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_snippets import HEAD

from flash_helpers.ptx import DeviceMemory, Run, load_ptx

LANES = np.arange(32)
GROUP, IN_GROUP = LANES >> 2, LANES % 4  # the ISA's groupID and threadID_in_group


def run_warp(
    instruction: str, inputs: list[np.ndarray], n_outputs: int, wide: bool = False
) -> np.ndarray:
    """Runs one instruction in one warp; returns the registers {o}, (outputs, 32) words.

    inputs: the registers of {0}, {1}, ..., each (registers, 32) words of 32 bits, or of 64 if wide.
    """
    bits, size = (64, 8) if wide else (32, 4)
    memory = DeviceMemory()
    declarations, code, names = [], [], []
    for i, registers in enumerate(inputs):
        own = [f"%i{i}_{j}" for j in range(len(registers))]
        names.append("{" + ", ".join(own) + "}")
        declarations.append(f".reg .b{bits} {', '.join(own)};")
        code.append(f"ld.param.u64 %at, [p{i}];\nmad.wide.u32 %at, %thread, {size}, %at;")
        code += [f"ld.global.b{bits} {name}, [%at+{32 * size * j}];" for j, name in enumerate(own)]
    out = [f"%o{j}" for j in range(n_outputs)]
    declarations.append(f".reg .b{bits} {', '.join(out)};" if out else "")
    code.append(instruction.format(*names, o="{" + ", ".join(out) + "}"))
    code.append(f"ld.param.u64 %at, [p_out];\nmad.wide.u32 %at, %thread, {size}, %at;")
    code += [f"st.global.b{bits} [%at+{32 * size * j}], {name};" for j, name in enumerate(out)]
    parameters = ", ".join(f".param .u64 p{name}" for name in (*range(len(inputs)), "_out"))
    lines = "\n".join(
        [".reg .b32 %thread; .reg .b64 %at;", *declarations, "mov.u32 %thread, %tid.x;"]
    )
    text = f"{HEAD}.visible .entry k({parameters})\n{{\n{lines}\n" + "\n".join(code) + "\nret;\n}\n"
    dtype = np.dtype(f"u{size}")
    args = [memory.upload(np.ascontiguousarray(x).view(dtype)) for x in inputs]
    address = memory.allocate(max(n_outputs, 1) * 32 * size)
    load_ptx(text).kernel("k").launch(1, 32, args=[*args, address], memory=memory)
    return memory.download(address, (n_outputs, 32), dtype)


class TestStmatrix:
    """PTX ISA 9.0, "stmatrix": lane 8 i + r gives the address of row r of matrix i; lane l holds
    elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, of each matrix."""

    @pytest.mark.parametrize("count", [1, 2, 4])
    @pytest.mark.parametrize("trans", ["", ".trans"])
    def test_elements_land_where_the_isa_says(self, count, trans):
        rng = np.random.default_rng(count)
        registers = rng.integers(0, 1 << 32, (count, 32), np.uint64).astype(np.uint32)
        # Each lane reads back the row whose address it gave.
        body = f"""
        .shared .align 16 .b8 tile[1024]; .reg .b32 %row; .reg .pred %gives;
        shl.b32 %row, %thread, 5;
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%row], {{0}};
        bar.warp.sync -1;
        setp.lt.u32 %gives, %thread, {8 * count};
        @%gives ld.shared.v4.b32 {{o}}, [%row];
        """
        rows = run_warp(body, [registers], 4)
        halves = np.ascontiguousarray(rows.T).view(np.uint16)  # (32 lanes, 8 elements)
        given = np.ascontiguousarray(registers).view(np.uint16).reshape(count, 32, 2)
        for matrix in range(count):
            for lane in range(32):
                for element in range(2):
                    row, column = lane // 4, 2 * (lane % 4) + element
                    if trans:
                        row, column = column, row
                    assert halves[8 * matrix + row, column] == given[matrix, lane, element]
