"""The block with the meaning of each part of a short form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from flash_helpers.console.tables import Table
from flash_helpers.course.arguments import DTYPE, Arguments
from flash_helpers.course.evidence import Evidence
from flash_helpers.kernel_configs import FAMILIES
from flash_helpers.registry.family import Family
from flash_helpers.registry.selection import UsageError

# Meanings by the name of the field, in Markdown for the page of the glossary. For other fields the
# comment in the config's class serves.
_MEANINGS: Mapping[str, str] = {
    "dtype": "format of the elements, [bf16 or fp16](#bf16)",
    "d_head": "columns of Q, K, V and O, [d_head](#d_head)",
    "B_r": "rows of Q per thread block, [B_r](#b_r)",
    "B_c": "keys per block of keys, [B_c](#b_c)",
    "n_warps": "[warps](#warp) per thread block",
    "async_copy": "copies to shared memory are [cp.async](#cpasync)",
    "eager_load_blocks": "[eager copies](#eager-copies) of K and V",
    "swizzled": "tiles in shared memory are [swizzled](#swizzle)",
    "Q_mma_load_K_tiles": "[k-tiles](#k-tile) of Q that are loaded into registers at once; "
    "0: the whole tile, loaded once and kept",
    "K_mma_load_K_tiles": "the same for K; 0: the whole tile",
    "V_mma_load_K_tiles": "the same for V; 0: the whole tile",
    "mma_double_buffer_loads": "fragments of K and V are [double-buffered](#double-buffer)",
    "optimized_softmax": "the [scale is folded](#folded-scale) into one FFMA",
    "static_row_stride": "[static stride](#static-stride), in elements",
    "K_slots": "on [wgmma](#wgmma): [tiles](#tile) of K in shared memory, a [ring](#ring)",
    "V_slots": "the same for V, on wgmma",
    "ping_pong": "the [warpgroups](#warpgroup) take [turns](#ping-pong) at the tensor cores",
    "cluster": "[thread blocks](#thread-block) of a [cluster](#cluster), which share the loads of "
    "K and V; 2 without this part",
    "d_v": "head size of V and O; that of Q and K without this part",
    "causal": "a causal mask, aligned to the bottom right: the last query sees all keys",
}


def short_forms_block(evidence: Evidence, arguments: Arguments) -> str:
    """Table of the parts of each family's fixed configs, in order."""
    rows: dict[tuple[str, str], list[str]] = {}
    for family in FAMILIES.values():
        for field, part, meaning in _rows(family):
            of_step = family.name if field == fields(family.config)[0].name else ""
            rows.setdefault((field, of_step), [f"`{part}`", f"`{field}`", meaning])
    return Table(["part", "field", "says"], list(rows.values()), "lll").markdown()


def _rows(family: Family) -> Iterator[tuple[str, str, str]]:
    """Name, part and meaning of each field. The part is taken from the last step with the field in
    its fixed config; for a flag that no fixed config sets, it is the flag's word."""
    for field in fields(family.config):
        part = field.metadata["short"]
        meaning = _MEANINGS.get(field.name, field.metadata["comment"])
        if part == family.prefix:
            meaning = f"number of the [step](#step) of family {family.name}"
        if not meaning:
            raise UsageError(f"{family.name}: field {field.name} has no comment")
        for step in family.steps.values():
            part = family.fixed_config(step, DTYPE).part(field.name) or part
        yield field.name, part, meaning
