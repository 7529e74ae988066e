"""Joint attention of a sequence and its context: its problem, its bounds, and its kernels in the
simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import plain_multimodal as plain
import pytest
import torch
from tiers import committed, each

import flash_attention
from flash_attention import multimodal
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import FAMILIES, Config, Element
from flash_helpers.operations.joint_attention import OPERATION
from flash_helpers.operations.joint_attention.baselines import attended, run
from flash_helpers.operations.joint_attention.grid import UNRELATED, distance
from flash_helpers.operations.joint_attention.inputs import draw, rotary_table
from flash_helpers.operations.joint_attention.problem import JointAttention
from flash_helpers.operations.joint_attention.problems import DISTRIBUTIONS
from flash_helpers.operations.joint_attention.reference import joint_float64, reference
from flash_helpers.registry.joint import JOINT, JointKernelConfig
from flash_helpers.registry.joint_cluster import JOINT_CLUSTER, JointClusterKernelConfig
from flash_helpers.runtime.call import prepare

CONFIGS = committed(OPERATION)
Tensors = dict[str, torch.Tensor]

STEPS = {**JOINT.steps, **JOINT_CLUSTER.steps}

each_config = each(CONFIGS)


def fixed(step: str, dtype: Element = Element.BF16) -> Config:
    return FAMILIES[STEPS[step].family].fixed_config(STEPS[step], dtype)


@pytest.fixture
def bf16() -> JointKernelConfig:
    return JOINT.fixed_config(JOINT.steps["jo1"], Element.BF16)


def drawn(problem: JointAttention, distribution: str = "normal") -> Tensors:
    """The inputs, and an empty output of the context if the problem has one."""
    found = draw(distribution, problem)
    if problem.has("context_o"):
        found["context_o"] = torch.full_like(found["context_q"], math.nan)
    return found


def check(config: Config, problem: JointAttention, given: Tensors) -> Tensors:
    """Simulate, watched, and compare with the reference; return the outputs."""
    call = prepare(config, *problem.arranged(given), **problem.call_options())
    assert call.problem == problem
    found = call.simulate(keep_going=True)
    assert not found.faults
    wanted = reference(problem, given)
    assert {*wanted.bounds} == {tensor.name for tensor in problem.outputs}
    for name, bound in wanted.bounds.items():
        error = measure_error(call.tensors[name], wanted.expected[name])
        assert error.within(bound), (name, error.excess(bound))
    return {name: call.tensors[name] for name in wanted.bounds}


def packed(*parts: torch.Tensor, gap: int = 8) -> tuple[torch.Tensor, ...]:
    """The same values as slices of one projection, with rows of NaN behind each."""
    batch, tokens, width = parts[0].shape
    memory = torch.full((batch, tokens + 1, len(parts) * width + gap), math.nan)
    rows = memory.to(parts[0].dtype)[:, :tokens]
    slices = rows[..., : len(parts) * width].split(width, -1)
    return tuple(own.copy_(x) for own, x in zip(slices, parts, strict=True))


# -- the problem and the reference -----------------------------------------------------------------


def test_each_tensor_is_moved_once() -> None:
    problem = JointAttention(2, 4, 10, 16, context=3, rotary=True)
    rows, weights, table = 2 * 13 * 64, 4 * 64, 10 * 16
    assert problem.bytes == 2 * (4 * rows + weights) + 4 * table
    assert problem.operations == 4 * 2 * 4 * 13 * 13 * 16
    alone = replace(problem, context_queries=False)
    assert problem.bytes - alone.bytes == 2 * (2 * 2 * 3 * 64 + 64)
    assert alone.operations == 4 * 2 * 4 * 10 * 13 * 16
    assert JointAttention.from_record(problem.record()) == problem
    assert "no context_queries" in str(alone)


@pytest.mark.parametrize("context", [0, 3])
def test_the_reference_is_the_plain_formulation(context: int) -> None:
    """Against attention by one query, head and complex number at a time, with projections that
    leave everything as it is."""
    heads, length, d_head = 2, 5, 4
    problem = JointAttention(2, heads, length, d_head, context=context, rotary=True, eps=0.1)
    inputs = draw("normal", problem)
    found = joint_float64(problem, inputs)
    eye = torch.eye(3 * problem.width, dtype=torch.float64)
    for sample in range(2):
        parts = []
        for stream in ("", "context_") if context else ("",):
            rows = torch.cat([inputs[f"{stream}{name}"][sample] for name in "qkv"], -1).double()
            state = {"qkv.weight": eye}
            state |= {f"{n}_norm.weight": inputs[f"{stream}{n}_weight"] for n in "qk"}
            parts.append(plain.of_stream(state, rows, heads, 0.1, None if stream else 10000.0))
        q, k, v = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        right = plain.attention(q, k, v, [True] * (length + context))
        mine = torch.cat([found[name][sample] for name in sorted(found, reverse=True)])
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)  # the table is fp32


def test_the_table_is_that_of_the_modules() -> None:
    assert torch.equal(rotary_table(7, 16), multimodal.rotary_table(7, 16))


@pytest.mark.parametrize("dtype", JOINT.dtypes)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_pytorch_is_within_the_bound_and_one_wrong_element_is_not(
    distribution: str, dtype: Element
) -> None:
    problem = JointAttention(2, 2, 40, 16, dtype, context=7, rotary=True)
    inputs = draw(distribution, problem)
    wanted = reference(problem, inputs)
    found = run("pytorch_joint", problem, inputs)
    for name, bound in wanted.bounds.items():
        expected = wanted.expected[name]
        assert measure_error(found[name], expected).max_abs <= bound.max_abs
        found[name][1, 2, 3] += 0.1 * expected.abs().max() + 0.05
        assert not measure_error(found[name], expected).within(bound)


def test_what_is_measured_in_torch_compile_is_one_graph() -> None:
    inputs = draw("normal", OPERATION.small)
    compiled = torch.compile(attended, backend="eager", fullgraph=True, dynamic=False)
    found, right = (f(OPERATION.small, inputs) for f in (compiled, attended))
    assert found.keys() == right.keys() == {"o", "context_o"}
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: JointAttention(0, 1, 1), "batch 0 is not positive"),
        (lambda: JointAttention(1, 1, 1, context=-1), "context -1 is negative: use 0"),
        (lambda: JointAttention(1, 1, 1, 3, rotary=True), "d_head 3 is odd"),
        (lambda: JointAttention(1, 1, 1, eps=-1.0), "eps -1.0 is not a number from 0 on"),
        (lambda: JointAttention(1, 1, 1, softmax_scale=-1.0), "softmax_scale -1 is not from"),
    ],
)
def test_sizes_and_options_that_mean_nothing_are_refused(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


# -- the kernels, simulated ------------------------------------------------------------------------


@each(CONFIGS, once=True)
def test_two_samples_with_their_contexts_are_right(config: JointKernelConfig) -> None:
    problem = JointAttention(2, 2, 21, 16, config.dtype, context=50, rotary=True)
    first, second = (check(config, problem, drawn(problem)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in ("o", "context_o"))


@each_config
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_inputs_are_right(config: JointKernelConfig, distribution: str) -> None:
    problem = JointAttention(1, 2, 20, 16, config.dtype, context=5, rotary=True)
    check(config, problem, drawn(problem, distribution))


@each_config
def test_the_corners_of_the_declaration_are_right(config: JointKernelConfig) -> None:
    for problem in config.supports.corners():
        check(config, problem, drawn(problem))


@each_config
def test_slices_of_a_packed_projection_are_taken_as_they_are(config: JointKernelConfig) -> None:
    problem = JointAttention(2, 2, 9, 16, config.dtype, context=3, rotary=True)
    given = drawn(problem)
    found = check(config, problem, given)
    for names in (("q", "k", "v"), ("context_q", "context_k", "context_v")):
        given |= zip(names, packed(*(given[name] for name in names)), strict=True)
    (given["o"],) = packed(torch.zeros_like(found["o"]), gap=2)
    memory = given["o"].as_strided((2, 9, 34), given["o"].stride())
    again = check(config, problem, given)
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert memory[..., 32:].isnan().all()  # nothing is written between the rows


@pytest.mark.parametrize("d_head", [32, 64])
@pytest.mark.parametrize("step", STEPS)
def test_heads_of_other_sizes_are_right(step: str, d_head: int) -> None:
    config = fixed(step).of_size(d_head)
    problem = JointAttention(1, 2, 19, d_head, context=2, rotary=True)
    check(config, problem, drawn(problem))


@pytest.mark.parametrize("heads", [1, 3, 5, 9, 16, 33])
def test_rows_of_any_width_have_lanes(heads: int) -> None:
    """8, 16 or 32 lanes, some without a chunk, or with several."""
    config = JOINT.fixed_config(JOINT.steps["jo6"], Element.BF16).replace(n_warps=3)
    problem = JointAttention(2, heads, 5, context=2, rotary=True)
    check(config, problem, drawn(problem))


def opposed(problem: JointAttention, first: int) -> Tensors:
    """Queries of one direction. The first keys point away from it, so that their scores are as far
    below 0 as those of the keys behind them are above it."""
    given = drawn(problem)
    noise = torch.Generator().manual_seed(1)
    for name in ("q", "k"):
        drift = torch.randn(given[name].shape, generator=noise) / 16
        given[name] = (1 + drift).to(given[name].dtype)
    given["k"][:, :first].neg_()
    return given


@pytest.mark.parametrize("step", ["jo7", "jo8", "jo9", "jo10"])
@pytest.mark.parametrize(("B_c", "first"), [(256, 32), (64, 64)])
@pytest.mark.parametrize("dtype", JOINT.dtypes)
def test_a_maximum_behind_the_first_keys_is_right(
    step: str, B_c: int, first: int, dtype: Element
) -> None:
    """Scores grow by 2 · 16 · scale · log2(e) octaves: by less than P holds, or by more."""
    config = JOINT.fixed_config(JOINT.steps[step], dtype).replace(B_c=B_c, n_warps=4)
    for scale in (0.25, 0.5, 8.0):  # 12, 23, 369 octaves
        problem = JointAttention(1, 1, 70, 16, dtype, softmax_scale=scale)
        check(config, problem, opposed(problem, first))


@pytest.mark.parametrize("first", [32, 64])
@pytest.mark.parametrize("dtype", JOINT_CLUSTER.dtypes)
def test_warps_begin_again_alone_where_all_keys_are_there(dtype: Element, first: int) -> None:
    """Queries of the first warp see the keys as before; those of the others are opposed to them."""
    config = fixed("jc1", dtype).replace(B_c=128, n_warps=4)
    for scale in (0.25, 0.5, 8.0):
        problem = JointAttention(1, 2, 70, 16, dtype, softmax_scale=scale)
        given = opposed(problem, first)
        given["q"][:, :16] = drawn(problem)["q"][:, :16]
        check(config, problem, given)


@pytest.mark.parametrize("step", ["jo7", "jo8", "jo9", "jo10", "jc1"])
def test_first_keys_of_minus_infinity_are_left_out(step: str) -> None:
    """Keys that overflow fp16 behind the norm, and scores of -infinity with each query."""
    config = fixed(step, Element.FP16)
    problem = JointAttention(1, 1, 64, 16, Element.FP16, context=9, context_queries=False)
    given = drawn(problem)
    given["q"][..., 0] = given["q"][..., 0].abs() + 0.1
    given["k"].zero_()
    given["k"][..., 0] = -1
    given["k_weight"].fill_(60000)
    check(config, problem, given)


@pytest.mark.parametrize(
    ("name", "heads", "d_head"),
    [
        ("jc1_bf16_d16_Bc64_w3_k8", 7, 16),
        ("jc1_fp16_d16_Bc64_w1_k2", 1, 16),  # three thread blocks of queries
        ("jc1_bf16_d16_Bc64_w5_k4", 3, 16),
        ("jc1_bf16_d32_Bc64_w2_k2", 2, 32),  # more lanes of a row than blocks
        ("jc1_bf16_d64_Bc64_w4_k8", 6, 64),
    ],
)
def test_clusters_with_any_number_of_heads_are_right(name: str, heads: int, d_head: int) -> None:
    """Each head is scaled by another power of two, so that the norm needs the sums of all heads."""
    config = JointClusterKernelConfig.from_short_form(name)
    problem = JointAttention(2, heads, 34, d_head, config.dtype, context=3, rotary=True)
    given = drawn(problem)
    factors = torch.tensor([0.5 ** (head % 5) for head in range(heads)]).repeat_interleave(d_head)
    for stream in ("", "context_"):
        for x in "qk":
            given[stream + x] *= factors.to(given[stream + x].dtype)
    check(config, problem, given)


@pytest.mark.parametrize(
    ("name", "value"), [("q", math.nan), ("k", math.nan), ("k", math.inf), ("v", -math.inf)]
)
@pytest.mark.parametrize("step", ["jo2", "jo8", "jo10", "jc1"])
def test_what_is_not_finite_spreads_as_in_pytorch(step: str, name: str, value: float) -> None:
    config = fixed(step, Element.BF16)
    problem = JointAttention(1, 2, 40, 16)
    given = drawn(problem)
    given[name][0, 37, 5] = value
    call = prepare(config, *problem.arranged(given), **problem.call_options())
    call.simulate()
    found, right = call.tensors["o"], attended(problem, given)["o"]
    for of_kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(of_kind(found), of_kind(right))


@pytest.mark.parametrize("step", ["jo1", "jo2", "jo3"])
def test_any_number_of_warps_shares_a_block_of_keys(step: str) -> None:
    for B_c, n_warps in ((32, 3), (64, 5)):
        config = JOINT.fixed_config(JOINT.steps[step], Element.BF16)
        problem = JointAttention(1, 1, 34, context=1, rotary=True)
        check(config.replace(B_c=B_c, n_warps=n_warps), problem, drawn(problem))


@pytest.mark.parametrize(
    ("tile", "d_head"),
    [
        ("Bc32_w16_Br128_col64", 16),  # two thread blocks for 5 heads
        ("Bc64_w16_Br64_col128", 16),
        ("Bc32_w8_Br64_col128", 16),
        ("Bc32_w8_Br16_col128", 16),
        ("Bc32_w5_Br64_col80", 16),  # a warp for each of 5 heads
        ("Bc32_w3_Br96_col32", 32),
        ("Bc64_w16_Br32_col256", 32),  # a chunk for each lane
    ],
)
@pytest.mark.parametrize("step", ["jo4", "jo5"])
def test_thread_blocks_of_other_queries_and_heads_are_right(
    step: str, tile: str, d_head: int
) -> None:
    config = JointKernelConfig.from_short_form(f"{step}_bf16_d{d_head}_{tile}")
    problem = JointAttention(1, 5, 34, d_head, context=1, rotary=True)
    check(config, problem, drawn(problem))


def test_a_token_of_the_context_is_one_of_the_sequence_that_is_not_turned(
    bf16: JointKernelConfig,
) -> None:
    """With the same weights and without rotary embedding, where a token stands tells nothing."""
    joined = JointAttention(1, 2, 11)
    given = drawn(joined)
    whole = check(bf16, joined, given)["o"]
    apart = JointAttention(1, 2, 8, context=3)
    cut = {name: given[name] for name in ("q_weight", "k_weight")}
    cut |= {f"context_{name}": x for name, x in cut.items()}
    for name in "qkv":
        cut[name], cut[f"context_{name}"] = given[name].split([8, 3], 1)
    cut["context_o"] = torch.empty_like(given["q"][:, 8:])
    found = check(bf16, apart, cut)
    assert torch.equal(torch.cat((found["o"], found["context_o"]), 1), whole)


# -- launches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "launches"),
    [*zip(JOINT.steps, (3, 2, 1, 1, 1, *[2] * 5), strict=True)],
)
def test_launches_and_buffers_go_from_step_to_step(step: str, launches: int) -> None:
    config = JOINT.fixed_config(JOINT.steps[step], Element.BF16)
    problem = OPERATION.measured(186)
    call = config.call(problem, problem.strides(), device_of_all())
    assert len(call.launches) == launches
    assert sum(buffer.bytes for buffer in call.buffers) == (
        0 if launches == 1 else 2 * 64 * 250 * 128 * 2
    )
    plain_problem = replace(problem, rotary=False)
    call = config.call(plain_problem, plain_problem.strides(), device_of_all())
    assert len(call.launches) == min(launches, 2)


@pytest.mark.parametrize(
    ("name", "batch", "grid"),
    [
        ("jo3_bf16_d16_Bc64_w16", 64, (1, 8, 64)),
        ("jo4_bf16_d16_Bc32_w16_Br128_col128", 64, (2, 1, 64)),
        ("jo4_bf16_d16_Bc32_w16_Br32_col128", 1, (8, 1, 1)),
        ("jo4_bf16_d16_Bc32_w16_Br128_col64", 1, (2, 2, 1)),
    ],
)
def test_a_thread_block_has_some_queries_and_heads(
    name: str, batch: int, grid: tuple[int, int, int]
) -> None:
    config = JointKernelConfig.from_short_form(name)
    problem = replace(OPERATION.measured(186), batch=batch)
    (launch,) = config.call(problem, problem.strides(), device_of_all()).launches
    assert launch.grid == grid
    assert launch.shared_bytes == config.smem_bytes <= 99 * 1024


def test_a_cluster_has_the_heads_of_some_queries_of_a_sample() -> None:
    problem = OPERATION.measured(186)
    for n_warps, tiles in ((16, 1), (8, 2), (4, 4)):
        config = fixed("jc1").replace(n_warps=n_warps)
        call = config.call(problem, problem.strides(), device_of_all())
        (launch,) = call.launches
        assert launch.grid == (tiles, 8, 64)
        assert launch.cluster == (1, 8, 1)
        assert not call.buffers
    config = fixed("jc1").replace(cluster_blocks=4)
    (launch,) = config.call(replace(problem, heads=3), problem.strides(), device_of_all()).launches
    assert launch.grid == (1, 4, 64)


def test_other_configs_of_clusters_take_more_keys() -> None:
    problem = JointAttention(1, 8, 512, context=64)
    assert "576 keys, over the limit 256" in fixed("jc1").refusal(problem)
    taking = [c.short_form() for c in fixed("jc1").variants() if not c.refusal(problem)]
    assert taking == ["jc1_bf16_d16_Bc768_w16_k8"]


def device_of_all():
    return OPERATION.part("faults").device_of(JOINT.progression()[0])


# -- refusals --------------------------------------------------------------------------------------

Q, WEIGHT = torch.zeros(1, 5, 32).bfloat16(), torch.ones(32).bfloat16()
TABLE = rotary_table(5, 16)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q": Q.float()}, TypeError, "q is torch.float32 and jo1_bf16_d16_Bc64_w4 takes"),
        ({"k": Q[:, :4]}, ValueError, r"k has shape \(1, 4, 32\) and q \(1, 5, 32\)"),
        ({"q": Q[:, :0]}, ValueError, "q has seq 0, shape"),
        ({"q_weight": WEIGHT[:16]}, ValueError, r"q_weight must have shape \(32,\)"),
        ({"rotary": TABLE[:4]}, ValueError, "rotary has 4 positions and q 5 tokens.*a longer"),
        ({"rotary": rotary_table(9, 16)}, ValueError, "rotary has 9 positions.* its first 5"),
        ({"rotary": TABLE[:, :4]}, ValueError, r"rotary has shape \(5, 4, 2\) and heads of 16"),
        ({"rotary": TABLE.bfloat16()}, TypeError, "rotary is torch.bfloat16"),
        ({"rotary": TABLE.mT.contiguous().mT}, ValueError, "rotary has strides.*must be contig"),
        ({"context_k": Q}, ValueError, "context_v is missing"),
        (
            {"context_k": Q[..., :16], "context_v": Q, "context_k_weight": WEIGHT},
            *(ValueError, r"context_k has shape \(1, 5, 16\) and q \(1, 5, 32\)"),
        ),
        (
            {"context_k": Q[:, :0], "context_v": Q[:, :0], "context_k_weight": WEIGHT},
            *(ValueError, "context_k has token 0.*leave out all tensors"),
        ),
        (
            {"context_k": Q, "context_v": Q, "context_k_weight": WEIGHT, "context_q": Q},
            *(ValueError, "context_q is given without context_o"),
        ),
        ({"v": torch.zeros(1, 5, 36).bfloat16()[..., :32]}, ValueError, "multiples of 8"),
        ({"v": torch.zeros(1, 5, 64).bfloat16()[..., ::2]}, ValueError, "stride 2 in its last"),
        ({"heads": 3}, ValueError, "width 32.*not a multiple of heads 3: pass heads = width"),
        ({"heads": 1}, ValueError, "d_head 32 is not 16"),
        ({"eps": math.nan}, ValueError, "eps nan is not a number from 0 on"),
    ],
)
def test_tensors_that_a_kernel_does_not_take_are_refused(
    changes, error: type[Exception], text: str, bf16: JointKernelConfig
) -> None:
    options = {"heads": 2, **{n: changes[n] for n in ("heads", "eps") if n in changes}}
    given = dict.fromkeys("qkv", Q) | {"q_weight": WEIGHT, "k_weight": WEIGHT}
    given |= {name: x for name, x in changes.items() if name not in options}
    with pytest.raises(error, match=text):
        flash_attention.run(bf16, *JointAttention.arranged(given), **options)


def test_more_than_a_grid_has_is_refused(bf16: JointKernelConfig) -> None:
    assert "batch 65536 is over the limit 65535" in bf16.refusal(JointAttention(65536, 1, 1))
    assert "heads 65536 is over the limit" in bf16.refusal(JointAttention(1, 65536, 1))
    assert not bf16.refusal(JointAttention(1024, 8, 186, context=256))
    assert "heads 9 is over the limit 8 of the thread blocks" in fixed("jc1").refusal(
        JointAttention(1, 9, 1)
    )
    assert "split the call by batch" in bf16.refusal(JointAttention(2**15, 8, 2**15))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((1, Element.BF16, 128, 64, 4), "d_head 128 is not built: choose one of 16, 32, 64"),
        ((1, Element.BF16, 16, 48, 4), "B_c 48 is not 32 or 64"),
        ((7, Element.BF16, 16, 32, 8), "B_c 32 is not 64, 128 or 256: choose one of these"),
        ((6, Element.BF16, 16, 64, 8, 64), "B_r 64 and columns 0: jo6 has 16 queries of each"),
        ((1, Element.BF16, 16, 64, 17), "n_warps 17 is not from 1 to 16"),
        ((1, Element.FP32, 16, 64, 4), "family joint has fp16 and bf16"),
        ((3, Element.BF16, 16, 64, 4, 64, 0), "B_r 64: jo3 fixes B_r 0; choose jo4"),
        ((4, Element.BF16, 16, 32, 16, 128, 120), "columns 120 is not a multiple of d_head 16"),
        ((4, Element.BF16, 16, 32, 16, 128, 512), "columns 512 is not .* up to 256: choose 128"),
        ((4, Element.BF16, 16, 32, 4, 64, 128), "n_warps 4 is not a multiple of 8, the heads"),
        ((4, Element.BF16, 16, 32, 16, 48, 128), "B_r 48 is not a multiple of 32.* choose 32"),
        ((4, Element.BF16, 16, 64, 16, 128, 128), "128 columns .* limit 96 .* choose B_r 64"),
        ((4, Element.BF16, 64, 64, 16, 128, 128), "128 columns .* limit 96 .* choose B_c 32"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_with_a_way_out(fields, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        JointKernelConfig(*fields)


@pytest.mark.parametrize(
    ("tile", "text"),
    [
        ("d128_Bc256_w16_k8", "d_head 128 is not built: choose one of 16, 32, 64"),
        ("d16_Bc96_w16_k8", "B_c 96 is not built: choose one of 64, 128, 256, 512, 768"),
        ("d16_Bc256_w16_k3", "cluster_blocks 3 is not built: choose one of 2, 4, 8"),
        ("d16_Bc256_w17_k8", "n_warps 17 is not from 1 to 16"),
        ("d64_Bc768_w16_k8", "233472 bytes of shared memory, over the limit 232448"),
    ],
)
def test_a_config_of_clusters_that_cannot_be_built_is_refused(tile: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        JointClusterKernelConfig.from_short_form(f"jc1_bf16_{tile}")


def test_the_choice_knows_problems_by_their_tokens_and_samples() -> None:
    asked = OPERATION.measured(186)
    assert distance(asked, asked) == distance(asked, replace(asked, dtype=Element.FP16)) == 0
    assert distance(asked, replace(asked, batch=128)) == 1
    assert distance(asked, replace(asked, length=436)) == 2  # as many queries again, and keys
    assert distance(asked, replace(asked, d_head=32)) >= UNRELATED
