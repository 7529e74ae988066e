"""Results of the simulator's kernels for Hopper on a GPU, as the benchmark recorded it."""

import sys

import numpy as np
import pytest
from fake_backend import ROOT

from flash_helpers.ptx.tensor_map import TensorMap

sys.path.insert(0, str(ROOT / "benchmarks"))

import hopper_kernels as tool
from hopper_cases import CASES, WHOLE, map_variants, values

FOUND = tool.HopperKernels.load(ROOT / tool.RESULTS)
FIELDS = {str(fields): fields for fields in map_variants()}
COUNTED = {launch.case: launch for launch in FOUND.launches}


def test_every_case_was_right_on_an_h200() -> None:
    assert FOUND.provenance.gpu == "NVIDIA H200"
    assert [output.case for output in FOUND.outputs] == list(CASES)
    assert all(output.error <= CASES[output.case].bound for output in FOUND.outputs)
    assert list(COUNTED) == list(WHOLE)


def test_what_was_written_is_kept_where_rounding_decides() -> None:
    with np.load((ROOT / tool.RESULTS).with_suffix(".npz")) as kept:
        assert set(kept) == {name for name, case in CASES.items() if case.bound}
        for name, rows in kept.items():
            case = CASES[name]
            expected = tool.recorded(case, case.expected)
            error = np.linalg.norm(values(rows, case.dtype) - expected)
            assert 0 < error <= case.bound * np.linalg.norm(expected)


def is_allowed(fields: str) -> bool:
    try:
        TensorMap(**FIELDS[fields])
    except ValueError:
        return False
    return True


def test_a_tensor_map_may_be_what_the_driver_takes() -> None:
    taken = {verdict.fields: verdict.is_taken for verdict in FOUND.maps}
    assert taken.keys() == FIELDS.keys()
    assert [f for f in FIELDS if is_allowed(f) != taken[f]] == []


# Tiles of 64 x 128 and 16 of k: four warps for each.
@pytest.mark.parametrize(
    ("case", "instructions"),
    [
        ("gemm_bf16", 4 * 7 * 4 * 4),
        ("gemm_a_registers", 4 * 4 * 4 * 4),
        ("gemm_cluster_bf16", 2 * 2 * 2 * 7 * 4 * 4),
        ("attention_bf16", 2 * 2 * 2 * (8 + 8) * 4),
    ],
)
def test_wgmma_is_counted_by_warps(case, instructions) -> None:
    assert COUNTED[case].counts["sm__inst_executed_pipe_tensor_op_gmma.sum"] == instructions
    assert COUNTED[case].opcodes["HGMMA.64x128x16.F32.BF16"] == instructions
