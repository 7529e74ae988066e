"""An exported kernel described in JSON, for programs in any language.

A formula is a number, the name of an input, or a list of an operator and its operands. The
operators +, -, *, / and % have two formulas, and a quotient of whole numbers is rounded down, as in
Python. The operator ? has a condition, the value if it holds and the value if not. The value that
is not chosen may divide by 0: leave it out. A condition is a list, too: < and == have two formulas,
and ! has a condition. Numbers are whole, in 64 bits; those of an input of kind "real" are doubles.

Keys:

- schema: 1. A change that breaks a reader raises it.
- kernel, config, family, operation. options: the config's fields. function: its name in C++.
- target, symbol, compiler. files: name and sha256 of the cubin, the ptx and the header h.
- alignment: bytes; no tensor's address has to be a multiple of more. `refused` has what each needs.
- inputs, in order: name, kind, least, most, meaning. The kinds are "size", "option" (0 or 1),
  "real", "stride" in elements, and "address" on the device, of a tensor or a buffer. The last
  dimension of every tensor has stride 1. A tensor without strides here is contiguous.
- refused: calls that the kernel does not take. The conditions hold together; the reason has {0},
  {1} … for `values`. Each entry supposes that those before it do not apply.
- launch: grid and cluster in blocks (x, y, z: formulas), block in threads, shared_bytes (dynamic).
  programmatic: 1 if the launch may have the attribute
  CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, since the kernel itself waits for the
  launch before it; without it nothing overlaps. Else 0.
- arguments: name, bytes and alignment of the kernel's one parameter. members: name, type, offset,
  bytes, and values, a formula for each number; none for a tensor map.
- tensor_maps: what cuTensorMapEncodeTiled takes for a member of the arguments. data_type,
  swizzle and l2_promotion are as cuda.h numbers them, dims in elements, innermost first, strides in
  bytes, of all dimensions but the innermost, box in elements. Element strides are 1, there is no
  interleaving, and outside of the tensor are zeros.
- buffers: device memory that a call needs beside the tensors: name (its address is an input of this
  name), bytes (0: none), and whether it must be zeros before each launch.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flash_helpers.export.c_header import c_type
from flash_helpers.export.formulas import MARK, Condition, Formula
from flash_helpers.export.launches import LaunchFormula

SCHEMA = 1


def description(launch: LaunchFormula, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description, ready for JSON. `facts`: what the compiled kernel adds: symbol,
    target, compiler and files."""
    config = launch.config
    return {
        "schema": SCHEMA,
        "kernel": launch.kernel,
        "config": config.short_form(),
        "family": config.family.name,
        "operation": config.family.operation.name,
        "options": config.to_dict(),
        "function": launch.function,
        **facts,
        "alignment": config.supports.alignment,
        "inputs": [
            {
                "name": given.name,
                "kind": given.kind,
                "least": given.least,
                "most": given.most,
                "meaning": given.text,
            }
            for given in launch.inputs
        ],
        "refused": [
            {
                "conditions": [*map(in_json, check.conditions)],
                **_reason(check.text, launch.named),
            }
            for check in launch.checks
        ],
        "launch": {
            "grid": [*map(in_json, launch.grid)],
            "cluster": [*map(in_json, launch.cluster)],
            "block": launch.block,
            "shared_bytes": launch.shared_bytes,
            "programmatic": int(launch.programmatic),
        },
        "arguments": {
            "name": launch.layout.name,
            "bytes": launch.layout.size,
            "alignment": launch.layout.alignment,
            "members": [
                {
                    "name": member.name,
                    "type": c_type(member.kind),
                    "offset": member.offset,
                    "bytes": member.kind.size,
                    "values": [*map(in_json, launch.members.get(member.name, ()))],
                }
                for member in launch.layout.members
            ],
        },
        "tensor_maps": [
            {
                "member": found.member.name,
                "offset": found.member.offset,
                "tensor": found.form.tensor,
                "address": in_json(found.address),
                "data_type": found.form.data_type,
                "swizzle": found.form.swizzle_mode,
                "l2_promotion": found.form.promotion_mode,
                "dims": [*map(in_json, found.dims)],
                "strides": [*map(in_json, found.strides)],
                "box": [*map(in_json, found.box)],
            }
            for found in launch.tensor_maps
        ],
        "buffers": [
            {"name": buffer.name, "bytes": in_json(buffer.bytes), "zeroed": buffer.zeroed}
            for buffer in launch.buffers
        ],
    }


def in_json(formula: Formula | Condition) -> Any:
    """Return a formula or a condition in lists."""
    if formula.operands:
        return [formula.operator, *map(in_json, formula.operands)]
    assert isinstance(formula, Formula)  # a condition has operands
    return formula.low if formula.is_constant else formula.operator


def _reason(text: str, named: tuple[Formula, ...]) -> dict[str, Any]:
    """Return a text whose formulas are numbered, and these."""
    parts = re.split(f"{MARK}([0-9]+){MARK}", text)
    values = [in_json(named[int(number)]) for number in parts[1::2]]
    escaped = [part.replace("{", "{{").replace("}", "}}") for part in parts[::2]]
    numbered = "".join(f"{part}{{{i}}}" for i, part in enumerate(escaped[:-1])) + escaped[-1]
    return {"reason": numbered, "values": values}
