"""The real kernels, in the simulator: right within the rule for GPUs, watched and counted."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from attention_configs import attention_progression
from attention_tensors import FEW_SMS
from hopper_steps import LAST_OF_HOPPER
from tiers import committed, each

import flash_attention
from flash_helpers.check.errors import Reference, measure_error, relative_bound
from flash_helpers.check.tensors import tensors_for
from flash_helpers.kernel_configs import (
    STEPS,
    AttentionForward,
    Config,
    Element,
)
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.operations.attention_forward.inputs import QKV, draw, make_inputs
from flash_helpers.operations.attention_forward.problems import DISTRIBUTIONS
from flash_helpers.operations.attention_forward.reference import (
    attention_float64,
    attention_reference,
)
from flash_helpers.ptx import Phase, Run
from flash_helpers.registry.general import GENERAL
from flash_helpers.registry.hopper import HOPPER
from flash_helpers.registry.mma_sync import MMA_M, MMA_ROW_SUM
from flash_helpers.registry.problem import Role
from flash_helpers.registry.wgmma import PIECE, REPLAYS
from flash_helpers.runtime.simulator import run_shipped

pytestmark = pytest.mark.slow

COMMITTED = committed(OPERATION)
PROGRESSION = attention_progression()
# those with the maximum of a tile's first block: rows that it does not fit are computed again,
# which takes long and has a test of its own
OPTIMISTIC = [step for step in STEPS.values() if REPLAYS in step.traits]
WITH_SIBLING = [config for config in PROGRESSION if len(config.siblings()) > 1]
SUMMING = STEPS["o5"]  # whose l is P @ 1
LAZY = next(
    config for config in COMMITTED if config.step is SUMMING and not config.static_row_stride
)


def torch_dtype(config: Config) -> torch.dtype:
    return getattr(torch, config.dtype.torch_name)


def shape_of(tensor: torch.Tensor) -> AttentionForward:
    batch, seq_len, heads, d_head = tensor.shape
    return AttentionForward(batch, heads, seq_len, d_head)


def inputs_of(config: Config, problem: AttentionForward) -> QKV:
    return make_inputs("normal", problem, torch_dtype(config))


def assert_right(output: torch.Tensor, reference: Reference) -> None:
    error, bound = measure_error(output, reference.expected["o"]), reference.bounds["o"]
    assert error.within(bound), f"{error} is over {bound}"


simulate = functools.partial(flash_attention.simulate, device=FEW_SMS)


# -- every kernel, once, on all that can go wrong --------------------------------------------------

BATCH = 2


@functools.cache
def mixed(
    names: tuple[str, ...], seq_len: int, d_head: int, dtype: torch.dtype
) -> tuple[QKV, list[Reference]]:
    """Inputs whose heads are of different distributions, all of the named ones, and what is right
    for each head of each batch."""
    one, n_heads = AttentionForward(1, 1, seq_len, d_head), -(-len(names) // BATCH)
    heads = [
        make_inputs(names[n % len(names)], one, dtype, seed=n // len(names))
        for n in range(BATCH * n_heads)
    ]
    inputs = tuple(
        torch.cat(of_all, dim=2).unflatten(2, (BATCH, n_heads)).squeeze(0).transpose(0, 1)
        for of_all in zip(*heads, strict=True)
    )
    return inputs, [attention_reference(*head) for head in heads]


def blocks_of(config: Config) -> int:
    """The shortest sequence of two blocks of the longer kind and three of the shorter."""
    whole = config.supports.whole
    wanted = max(2 * whole, 3 * min(config.B_r, config.B_c))
    whole *= getattr(config, "cluster_blocks", 1)
    return -(-wanted // whole) * whole


def distributions_for(config: Config) -> tuple[str, ...]:
    """All that the kernel takes."""
    return tuple(n for n in DISTRIBUTIONS if n != "large_logits" or config.step not in OPTIMISTIC)


def strided(config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
    """q, k, v and o as views of one packed tensor, and the rest of it; NaN where nothing is.

    Rows are as far apart as the config asks for itself; without a wish, V has its heads before its
    sequence, so that strides differ.
    """
    problem = shape_of(q)
    own = config.own_strides(problem)["q"][1] or problem.row_stride
    chosen = own if own > problem.row_stride else 5 * problem.row_stride
    packed = torch.full((*q.shape[:2], chosen), torch.nan, dtype=q.dtype)
    parts = packed.unflatten(2, (-1, problem.d_head)).split(problem.heads, dim=2)
    q_at, o_at, k_at, v_at, *rest = parts
    if own == problem.row_stride:
        rest.append(v_at)
        v_at = torch.empty_like(v.transpose(1, 2)).transpose(1, 2)
    for view, values in ((q_at, q), (k_at, k), (v_at, v)):
        view.copy_(values)
    return (q_at, k_at, v_at, o_at), rest


# causal configs have tests of their own: their counts tell of blocks that are skipped; all views
# have one head size
@each(
    c
    for c in COMMITTED
    if not c.supports.causal and not c.supports.exact and c.supports.d_v is None
)
def test_every_kernel_is_right_on_strided_heads_of_all_distributions(config) -> None:
    d_head = config.supports.d_heads[0]
    inputs, references = mixed(
        distributions_for(config), blocks_of(config), d_head, torch_dtype(config)
    )
    views, rest = strided(config, *inputs)

    output, run = simulate(config, *views)

    assert output is views[-1]
    assert config.short_form() in run.kernel and run.faults == ()
    for n, reference in enumerate(references):
        batch, head = divmod(n, inputs[0].shape[2])
        assert_right(output[batch : batch + 1, :, head : head + 1], reference)
    assert all(torch.equal(view, x) for view, x in zip(views, inputs, strict=False))
    assert all(part.isnan().all() for part in rest)
    assert_counts(config, shape_of(inputs[0]), run)


def assert_counts(config: Config, problem: AttentionForward, run: Run) -> None:
    """Work that the shape of the problem asks of a kernel."""
    total = run.counters.total
    tiles = problem.len_q // config.B_r * problem.heads * problem.batch
    blocks = len(config.key_blocks(problem.len_q))
    products = total.mma if config.family.is_portable else total.wgmma
    assert products == tiles * config.n_warps * blocks * config.mma_per_key_block
    if MMA_ROW_SUM not in config.step.traits:
        assert total.mma_flops == problem.operations
    # Q and O once; K and V once for each block of queries
    tensor_bytes = problem.bytes // 4
    moved = total.global_bytes + total.tma_bytes
    if problem.d_head % PIECE == 0:  # else the boxes of TMA end beyond the columns
        assert moved == (2 + 2 * problem.len_q // config.B_r) * tensor_bytes
        assert (total.global_sectors + total.tma_sectors) * 32 == moved
    if getattr(config, "swizzled", True):  # from v2 on always
        assert total.bank_conflicts == 0
    else:
        # eight rows of an 8x8 matrix, 256 bytes apart, fall on the same banks
        opcodes = run.counters.by_opcode().items()
        loads = [counts for opcode, counts in opcodes if opcode.startswith("ldmatrix")]
        assert {c.shared_wavefronts for c in loads} == {
            8 * c.shared_ideal_wavefronts for c in loads
        }


def assert_right_on(
    config: Config, problem: AttentionForward, inputs: dict[str, torch.Tensor] | None = None
) -> Run:
    """Each output that the problem has, with all of its options and optional inputs."""
    inputs = inputs or draw("normal", problem)
    tensors = tensors_for(config, problem, inputs)
    run = run_shipped(config, tensors, device=FEW_SMS, **problem.call_options())
    assert config.short_form() in run.kernel and run.faults == ()
    right = OPERATION.part("reference").reference(problem, inputs)
    for tensor in problem.tensors:
        if tensor.role is Role.OUT:
            error = measure_error(tensors[tensor.name], right.expected[tensor.name])
            assert error.within(right.bounds[tensor.name]), f"{tensor.name} of {problem}: {error}"
    return run


@each(COMMITTED, once=True)
def test_every_kernel_is_right_for_one_block(config) -> None:
    assert_right_on(config, next(config.supports.corners()))


@each(COMMITTED, at_corners=True)
def test_every_kernel_is_right_at_the_corners_that_it_declares(config) -> None:
    _, *corners = config.supports.corners()  # the first is one block: see above
    for corner in corners:
        assert_right_on(config, corner)


# -- hopper's optimistic maximum: rows that the first block's does not fit, computed again --------

POWERS_ABOVE = (12, 16, 20, 100, 126.5, 129, 300)  # of two: of one key above the first block


@functools.cache
def last_of_hopper(dtype: Element) -> Config:
    return HOPPER.fixed_config(LAST_OF_HOPPER, dtype)


def rows_of_warps(config: Config) -> tuple[QKV, Reference]:
    """Two blocks of queries and keys. Each warp has a column of Q and K of its own, with which its
    rows' logits go another way in the second block, in powers of two: one key goes up; the whole
    block goes up or down; all keys are equal."""
    generator = torch.Generator().manual_seed(1)
    first = config.B_c
    shape = (1, 2 * first, 1, config.d_head)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    n_warps = shape[1] // 16
    q *= 0.05
    q[..., :n_warps] = k[..., :n_warps] = 0
    for warp in range(n_warps):
        q[0, warp * 16 :][:16, 0, warp] = 4
    power = math.log(2) * math.sqrt(config.d_head) / 4
    for warp, above in enumerate(POWERS_ABOVE):
        k[0, first + 70, 0, warp] = above * power
    k[0, first:, 0, len(POWERS_ABOVE)] = 200 * power
    k[0, first:, 0, len(POWERS_ABOVE) + 1] = -200 * power
    equal = slice((n_warps - 1) * 16, n_warps * 16)
    q[0, equal] = 0
    inputs = tuple(x.to(torch_dtype(config)) for x in (q, k, v))
    return inputs, attention_reference(*inputs)


@pytest.mark.parametrize("dtype", HOPPER.dtypes)
def test_rows_that_outgrow_the_first_blocks_maximum_are_right(dtype) -> None:
    config = last_of_hopper(dtype)
    inputs, reference = rows_of_warps(config)
    output, run = simulate(config, *inputs)
    assert run.counters.total.mma > 0  # rows were computed again
    assert_right(output, reference)


@pytest.mark.parametrize(
    ("causal", "heads", "seq_len"),
    [
        (True, 3, 260),
        *(
            pytest.param(*case, marks=pytest.mark.matrix(HOPPER.name))
            for case in ((False, 2, 260), (False, 1, 640), (True, 1, 640), (True, 2, 640))
        ),
    ],
)
def test_rows_of_any_tile_of_a_cluster_are_computed_again(causal, heads, seq_len) -> None:
    """Tiles of either thread block, and later tiles of a cluster: of one head the last tile has
    no rows; of two heads causal ones come from a counter, of three every other lot goes
    backwards."""
    variant = last_of_hopper(Element.BF16).replace(causal=causal)
    problem = AttentionForward(1, heads, seq_len, kv_heads=1, causal=causal)
    q, k, v = inputs_of(variant, problem)
    q[..., 0] = k[..., 0] = 0
    k[:, 5, :, 0] = 1  # taken last, and far over the maximum of the first block
    for row in (130, seq_len - 1):
        q[:, row, :, 0] = 2000
    reference = attention_reference(q, k, v, causal=causal)
    output, run = simulate(variant, q, k, v)
    assert run.counters.total.mma > 0
    assert_right(output, reference)


def test_sinks_are_apart_from_the_logits_by_any_amount_in_all_rows() -> None:
    """Rows without keys, rows that are computed again, and others."""
    last = [*GENERAL.steps.values()][-1]
    config = GENERAL.fixed_config(last, Element.BF16).of_size(64).replace(causal=True)
    problem = AttentionForward(
        1, 4, 174, 64, Element.BF16, len_k=164, causal=True, sinks=True, return_lse=True
    )
    inputs = draw("normal", problem)
    inputs["q"][..., 0] = inputs["k"][..., 0] = 0
    inputs["k"][:, 5, :, 0] = 1  # in the third block that is taken
    inputs["q"][:, 169, :, 0] = 2000
    inputs["sinks"][:] = torch.tensor([0.5, 60, 400, -math.inf])
    run = assert_right_on(config, problem, inputs)
    assert run.counters.total.mma > 0  # rows were computed again


@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_infinite_logits_and_nan_are_where_pytorch_has_them(infinity) -> None:
    config = last_of_hopper(Element.BF16)
    q, k, v = inputs_of(config, AttentionForward(1, 1, 2 * config.B_c))
    q[..., 0] = 0
    q[:, :16, :, 0] = 1  # one warp's: zero times infinity is NaN in all other rows
    q[:, 16:32, :, 0] = -1
    k[:, : config.B_c if infinity < 0 else 1, :, 0] = infinity
    v[:, 3, :, 5] = math.nan
    expected = attention_float64(q, k, v)
    output, _ = simulate(config, q, k, v)
    finite = expected.isfinite()
    assert finite.any() and not finite.all()
    assert torch.equal(output.isfinite(), finite)
    error = measure_error(output[finite], expected[finite])
    assert error.relative <= relative_bound(output.dtype)


@pytest.mark.parametrize("dtype", HOPPER.dtypes)
def test_the_last_step_of_hopper_is_as_exact_as_the_plain_one(dtype) -> None:
    last = last_of_hopper(dtype)
    plain = HOPPER.fixed_config(HOPPER.steps["h1"], dtype)
    inputs = inputs_of(last, AttentionForward(1, 2, 2 * last.B_c))
    expected = attention_float64(*inputs)
    error, plain_error = (
        measure_error(flash_attention.forward(config, *inputs), expected).relative
        for config in (last, plain)
    )
    assert 0 < error <= 1.1 * plain_error


# -- which kernel runs, and on what ----------------------------------------------------------------


@each(WITH_SIBLING)
def test_a_kernel_gives_way_to_its_sibling_for_other_row_strides(config) -> None:
    problem = next(config.supports.corners())
    other = config.runs_as(problem.strides())
    assert other != config
    inputs = inputs_of(config, problem)
    output, run = simulate(config, *inputs)
    assert other.short_form() in run.kernel and config.short_form() not in run.kernel
    assert_right(output, attention_reference(*inputs))


def test_one_head_expanded_to_all_is_right() -> None:
    config = PROGRESSION[-1]
    q, k, v = inputs_of(config, AttentionForward(2, 1, 128))
    wide = [x.expand(2, 128, 3, 128) for x in (q, k, v)]
    o = flash_attention.forward(config, *wide)
    assert torch.equal(o, flash_attention.forward(config, *(x.contiguous() for x in wide)))


def test_the_result_does_not_depend_on_how_it_is_asked_for() -> None:
    config = PROGRESSION[0]
    inputs = inputs_of(config, next(config.supports.corners()))
    o = flash_attention.forward(config, *inputs)
    by_name = flash_attention.forward(config.short_form(), *inputs)
    given = torch.empty_like(o)
    assert flash_attention.forward(config, *inputs, given) is given
    counted, run = simulate(config, *inputs)
    assert all(torch.equal(o, other) for other in (by_name, given, counted))
    assert run.faults == ()


# -- counts ----------------------------------------------------------------------------------------


def test_counts_grow_with_blocks_and_phases_are_told_apart() -> None:
    step = STEPS["v3"]
    config = step_config = next(c for c in PROGRESSION if c.step is step)
    small, large = (
        simulate(config, *inputs_of(step_config, AttentionForward(1, 1, n)))[1] for n in (64, 128)
    )
    before, after = small.counters.by_phase(), large.counters.by_phase()
    for phase in (Phase.PROLOGUE, Phase.EPILOGUE):
        assert after[phase].global_bytes >= 2 * before[phase].global_bytes > 0
    assert after[Phase.MAIN_LOOP].mma == 4 * before[Phase.MAIN_LOOP].mma
    assert sum(counts.instructions for counts in after.values()) == (
        large.counters.total.instructions
    )


@pytest.mark.parametrize(
    ("growth", "blocks_rescaled"),
    [(0.0, 1), (2.5, 1), (8.5, 4), (4.5, 2)],
    ids=["constant", "below the limit in all", "above it", "above it every second block"],
)
def test_lazy_rescale_multiplies_only_where_the_maximum_has_grown(growth, blocks_rescaled) -> None:
    config = LAZY
    n_blocks, d_head = 4, config.d_head
    problem = AttentionForward(1, 1, n_blocks * config.B_c, d_head)
    # Every logit of a block of keys is the same power of two, greater from block to block.
    exponents = torch.zeros(problem.len_q)
    for turn, block in enumerate(config.key_blocks(problem.len_q)):
        exponents[block * config.B_c :][: config.B_c] = growth * turn
    unit = math.log(2) * math.sqrt(d_head)  # one power of two in P, before the scale
    q, k = torch.zeros(2, *problem.shape)
    q[..., 0] = 2**6
    k[0, :, 0, 0] = exponents * unit / 2**6
    v = torch.randn(problem.shape, generator=torch.Generator().manual_seed(0)) + 0.5
    q, k, v = (x.to(torch_dtype(config)) for x in (q, k, v))

    output, run = simulate(config, q, k, v)

    assert_right(output, attention_reference(q, k, v))
    multiplications = sum(
        counts.instructions
        for opcode, counts in run.counters.by_opcode().items()
        if opcode.startswith("mul") and opcode.endswith("f32")
    )
    (launch,) = config.call(problem, problem.strides(), FEW_SMS).launches
    row_tiles = config.B_r // config.n_warps // MMA_M
    # O's and l's accumulators, of which l's have two columns alike
    rescale = row_tiles * (d_head // 8 * 4 + 4)
    once = row_tiles * (d_head // 8 * 4)  # O / l at the end
    a_block = row_tiles * 2  # the maximum's own scale
    assert multiplications == launch.n_blocks * launch.n_warps * (
        blocks_rescaled * rescale + n_blocks * a_block + once
    )
