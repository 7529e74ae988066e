"""The values of the backward pass's kernels, read from the simulator, beside blockwise Python."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from attention_tensors import on_sms
from fake_backend import fake_backend
from tiers import committed, each

from flash_helpers.check import debugging
from flash_helpers.check.debugging import compare_with_reference
from flash_helpers.check.errors import measure_error
from flash_helpers.check.faults import Fault, nth, other_chunk, swap
from flash_helpers.check.planting import plant
from flash_helpers.kernel_configs import Config, Element
from flash_helpers.operations.attention_backward import OPERATION
from flash_helpers.operations.attention_backward.faults import FAULTS
from flash_helpers.operations.attention_backward.inputs import draw
from flash_helpers.operations.attention_backward.problem import GRADIENTS, AttentionBackward
from flash_helpers.operations.attention_backward.reference import reference
from flash_helpers.operations.attention_backward.trace import compare
from flash_helpers.operations.attention_backward.trace.blockwise import Blockwise
from flash_helpers.operations.attention_backward.trace.compare import (
    FACTORS,
    Comparison,
    Excerpt,
    Traced,
)
from flash_helpers.operations.attention_backward.trace.recorder import Record
from flash_helpers.operations.attention_backward.trace.shared_rows import SharedRows
from flash_helpers.operations.attention_forward.trace.compare import Disagreement
from flash_helpers.operations.attention_forward.trace.recorder import UntraceableKernel
from flash_helpers.ptx import Phase
from flash_helpers.registry.backward import BACKWARD
from flash_helpers.registry.backward_sync import BACKWARD_SYNC
from flash_helpers.runtime.library import ptx_path

pytestmark = pytest.mark.slow

BF16 = Element.BF16
# Neither dtype is read in another way.
CONFIGS = [config for config in committed(OPERATION) if config.dtype is BF16]
PLAIN = [c for c in CONFIGS if not c.supports.causal and not c.supports.exact]
READ = ("Q", "K", "S", "LSE", "P", "dO", "V", "dP", "delta")


def own_problem(config: Config) -> AttentionBackward:
    """Two blocks of either kind, and where the kernel takes any length, a few rows more."""
    whole = config.supports.whole
    lengths = (whole, whole) if config.supports.blocks else (2 * config.B_c + 3, 2 * config.B_c + 7)
    return config.supports.problem(1, 1, *lengths)


def compared(config: Config, problem: AttentionBackward, **options: Any) -> Comparison:
    found = compare_with_reference(config, problem, **options)
    assert isinstance(found, Comparison)
    return found


def assert_right(config: Config, problem: AttentionBackward, **options: Any) -> Comparison:
    found = compared(config, problem, **options)
    assert found.disagreement is None
    assert found.faults == ()
    return found


def is_complete(kernel: Traced, name: str) -> bool:
    return not np.isnan(kernel.record.values[name][0]).any()


class TestEveryQuantityOfEveryKernelAgrees:
    @each(PLAIN)
    def test_and_is_read_in_all_blocks(self, config):
        found = assert_right(config, own_problem(config))
        sums = {name for kernel in found.traced for name in kernel.record.values} & {*FACTORS}
        assert sums == {"dQ", "dK", "dV"}
        for kernel in found.traced:
            own_sums = [name for name in FACTORS if name in kernel.record.values]
            names = [*READ, *own_sums, *(FACTORS[name] for name in own_sums)]
            assert {*kernel.record.values} == {*names}
            assert all(is_complete(kernel, name) for name in names)

    @each(c for c in CONFIGS if c not in PLAIN)
    def test_with_what_is_compiled_in(self, config):
        assert_right(config, next(config.supports.corners()))


def sync_config(step: str = "", **changes: Any) -> Config:
    """A step of backward_sync, the last one by default."""
    *_, last = BACKWARD_SYNC.steps
    return BACKWARD_SYNC.fixed_config(BACKWARD_SYNC.steps[step or last], BF16).replace(**changes)


def step_config(step: str, **changes: Any) -> Config:
    config = next(c for c in CONFIGS if c.step.id == step)
    return config.replace(**changes)


class TestGeneralProblems:
    @pytest.mark.parametrize(("step", "turns"), [("p3", [3, 2]), ("p5", [2])])
    def test_grouped_heads_a_scale_and_rows_beyond_whole_tiles(self, step, turns):
        options = {"kv_heads": 1, "softmax_scale": 0.2}
        problem = AttentionBackward(2, 2, 67, len_k=99, **options)
        found = assert_right(sync_config(step), problem)
        assert [kernel.turns().max() for kernel in found.traced] == turns

    @pytest.mark.parametrize(("len_q", "len_k"), [(70, 99), (99, 70)])
    def test_what_a_causal_tile_leaves_out_is_nan_in_both_texts(self, len_q, len_k):
        problem = AttentionBackward(1, 1, len_q, len_k=len_k, causal=True)
        found = assert_right(sync_config(causal=True, B_r=64), problem)
        for kernel in found.traced:
            S = kernel.record.values["S"][0][0, 0]
            assert np.isfinite(S[found.blockwise.visible]).all()
            assert np.isnan(S).any()
        right, own = (text.splitlines() for text in found.texts(Excerpt()))
        places = [[re.sub(r"[-+.e0-9]+", "0", line) for line in lines] for lines in (right, own)]
        assert [line.split() for line in places[0]] == [line.split() for line in places[1]]
        assert any("nan" in line for line in own)

    def test_a_window_and_a_softcap(self):
        config = sync_config(window=True, softcap=True)
        problem = AttentionBackward(1, 1, 99, len_k=70, window_left=20, window_right=5, softcap=5.0)
        assert_right(config, problem)

    def test_warps_that_share_rows_have_a_copy_each(self):
        config = sync_config("p3").of_size(256)
        found = assert_right(config, AttentionBackward(1, 1, 40, d_head=256))
        dq, dkdv = found.traced
        assert len(dq.record.values["S"]) == 1
        first, second = dkdv.record.values["S"]
        assert np.array_equal(first, second)
        assert (dkdv.record.warps_of("S", 0) != dkdv.record.warps_of("S", 1)).all()

    def test_a_warp_whose_keys_lie_behind_the_end_has_none_of_the_tile_before(self):
        """One thread block takes both tiles, the second of which has three keys."""
        config = step_config("b12")
        problem = AttentionBackward(1, 1, 64, len_k=config.B_c + 3)
        assert_right(config, problem, gpu=on_sms(1))

    @pytest.mark.parametrize("distribution", OPERATION.distributions)
    def test_any_inputs_of_either_dtype(self, distribution):
        assert_right(sync_config(), AttentionBackward(1, 1, 40), distribution=distribution)
        # the small values of fp16 lose digits
        last = [*BACKWARD.steps.values()][-1]
        config = BACKWARD.fixed_config(last, Element.FP16)
        assert_right(config, own_problem(config), distribution=distribution)


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 4.0}, {"window_left": 9}])
def test_the_blockwise_outputs_are_the_gradients(options):
    problem = AttentionBackward(1, 4, 50, len_k=80, kv_heads=2, dtype=BF16, **options)
    inputs = draw("normal", problem)
    right = reference(problem, inputs)
    found = Blockwise(problem, inputs).outputs()
    assert {*found} == {*GRADIENTS}
    for name, output in found.items():
        error = measure_error(output.values.to(torch.bfloat16), right.expected[name])
        assert error.within(right.bounds[name])


# -- wrong kernels ---------------------------------------------------------------------------------

MAIN_LOOP = Phase.MAIN_LOOP
CAUSAL = AttentionBackward(1, 1, 64, len_k=128, causal=True)  # the first 64 keys are seen by all
SEVERAL = AttentionBackward(1, 1, 128)  # blocks, in each kernel but b4's dq_kernel
no_shuffle = swap(r"shfl\S+\s+(%r\d+)\|%p\d+, .*;", r"mov.b32 \1, 0;")
no_scale = swap(r"(fma\.rn\.f32\s+%f\d+, %f\d+), %f\d+,", r"\1, 0f3F800000,")
no_mask = swap(r"selp\.f32\s+(%f\d+), (%f\d+), .*;", r"mov.f32 \1, \2;")
begun_anew = swap(r"accumulates, %r\d+, 0", "accumulates, 0, 0")
DQ_SUM = nth(16)  # behind the steps of S and dP


@pytest.mark.parametrize(
    ("fault", "problem", "quantity", "kernel", "block"),
    [
        (
            Fault("p1", BF16, MAIN_LOOP, r"shfl", no_shuffle, nth(0), kernel="delta_kernel"),
            SEVERAL, "delta", "dq_kernel", 0,
        ),
        (
            Fault("p1", BF16, MAIN_LOOP, r"fma\.rn\.f32", no_scale, kernel="dkdv_kernel"),
            SEVERAL, "P", "dkdv_kernel", 0,
        ),
        (
            Fault("p1", BF16, MAIN_LOOP, r"ldmatrix", other_chunk, nth(1), kernel="dq_kernel"),
            SEVERAL, "K", "dq_kernel", 0,
        ),
        (
            Fault(
                "p1", BF16, MAIN_LOOP, r"selp\.f32", no_mask, kernel="dq_kernel",
                options={"causal": True},
            ),
            CAUSAL, "dS of dQ", "dq_kernel", 2,
        ),
        (
            Fault(
                "p1", BF16, MAIN_LOOP, r"selp\.f32", no_mask, kernel="dkdv_kernel",
                options={"causal": True},
            ),
            CAUSAL, "P of dV", "dkdv_kernel", 0,
        ),
        (
            Fault(
                "b2", BF16, MAIN_LOOP, r"setp\.ne\.b32\s+accumulates", begun_anew, DQ_SUM,
                kernel="dq_kernel",
            ),
            SEVERAL, "dQ", "dq_kernel", 1,
        ),
    ],
)  # fmt: skip
def test_the_trace_names_where_a_kernel_begins_to_be_wrong(fault, problem, quantity, kernel, block):
    found = compared(fault.config, problem, ptx=plant(fault).ptx)
    assert found.faults == ()
    first = found.disagreement
    assert isinstance(first, Disagreement)
    assert (first.quantity, first.kernel, first.block) == (quantity, kernel, block)


def test_the_trace_names_a_block_that_keeps_what_the_one_before_has_left():
    config = step_config("b4")
    lines = ptx_path(config, "dkdv_kernel").read_text().split("\n")
    product = next(n for n, line in enumerate(lines) if "wgmma.mma_async" in line)
    flag = next(n for n in range(product, 0, -1) if "setp.ne.b32 accumulates" in lines[n])
    lines[flag] = re.sub(r"%r\d+, 0", "1, 0", lines[flag])
    # so that the first block begins with zeros
    registers = re.findall(r"%f\d+", lines[product])
    begin = max(n for n, line in enumerate(lines) if re.match(r"\s*\.reg .*<\d+>;", line))
    lines[begin] += "".join(f"\nmov.f32 {register}, 0f00000000;" for register in registers)
    found = compared(config, SEVERAL, ptx="\n".join(lines))
    first = found.disagreement
    assert isinstance(first, Disagreement)
    assert (first.quantity, first.kernel, first.turn) == ("S", "dkdv_kernel", 1)
    # row and column are the key and the query
    assert (first.row_block, first.warp, first.row, first.column) == (0, 0, 0, 64)
    assert "S, dkdv_kernel, query block 1, row block 0 (batch 0, head 0), warp 0" in str(first)


def test_outputs_are_compared_last():
    fault = FAULTS["p1: dK lacks the scale, which S has"]
    found = compared(fault.config, SEVERAL, ptx=plant(fault).ptx)
    assert str(found.disagreement).startswith("dk (batch 0, seq 0, heads 0, d_head 0): got ")


def test_on_a_gpu_the_outputs_alone_are_compared(monkeypatch):
    inputs = draw("normal", SEVERAL.in_dtype(BF16))
    right = Blockwise(SEVERAL, inputs).outputs()
    outputs = {name: output.values.to(torch.bfloat16) for name, output in right.items()}
    monkeypatch.setattr(debugging, "find_backend", lambda device: fake_backend())
    monkeypatch.setattr(compare, "run_on", lambda *_: outputs)
    assert_right(sync_config(), SEVERAL, device="cuda")
    outputs["dv"][0, 70, 0, 5] += 1
    found = compared(sync_config(), SEVERAL, device="cuda")
    assert str(found.disagreement).startswith("dv (batch 0, seq 70, heads 0, d_head 5): got ")


def test_a_trace_that_takes_too_much_memory_is_refused():
    with pytest.raises(ValueError, match="over 1024 MiB: use a shorter sequence or fewer heads"):
        Record(AttentionBackward(1, 64, 4096)).array("Q")


def test_a_kernel_whose_rows_come_in_another_way_is_refused(monkeypatch):
    monkeypatch.setattr(SharedRows, "wants", staticmethod(lambda instruction: False))
    with pytest.raises(UntraceableKernel, match=r"dq_kernel of p.* multiplies no rows of Q and K"):
        compared(sync_config("p3"), SEVERAL)


def test_several_sequences_are_refused():
    problem = AttentionBackward(1, 1, 80, sequences=2)
    with pytest.raises(ValueError, match="2 sequences are not traced at once"):
        compared(sync_config(varlen=True), problem)


# -- text ------------------------------------------------------------------------------------------


def test_both_texts_have_the_same_lines():
    problem = AttentionBackward(1, 1, 67)
    found = compared(sync_config("p3"), problem, distribution="countable")
    right, own = (text.splitlines() for text in found.texts(Excerpt(row_block=1, blocks=[1])))
    titles = [line for line in own if not re.match(r" *\d+: ", line)]
    assert titles == [line for line in right if not re.match(r" *\d+: ", line)]
    assert titles[:2] == [
        "Q, dq_kernel, key block 1, row block 1",
        "K, dq_kernel, key block 1, row block 1",
    ]
    assert "dK, dkdv_kernel, query block 1, row block 1" in titles
    assert titles[-3:] == ["dq", "dk", "dv"]
    assert [line.split(":")[0] for line in own] == [line.split(":")[0] for line in right]
    at = own.index("S, dq_kernel, key block 1, row block 1")
    # integers; the sequence has three rows of the second tile
    assert own[at + 1 : at + 4] == right[at + 1 : at + 4]
    assert [line.split(":")[0].strip() for line in own[at + 1 : at + 4]] == ["64", "65", "66"]


def test_an_excerpt_has_the_rows_of_a_warp():
    found = compared(step_config("b4"), SEVERAL)
    _, own = found.texts(Excerpt(warp=5))
    rows = own.partition("S, dkdv_kernel, query block 1, row block 0\n")[2].splitlines()[:16]
    assert [int(row.split(":")[0]) for row in rows] == [*range(80, 96)]
    lse = own.partition("LSE, dkdv_kernel, query block 1, row block 0\n")[2].splitlines()[:64]
    assert [int(row.split(":")[0]) for row in lse] == [*range(64, 128)]
    assert all(len(row.split()) == 2 for row in lse)
