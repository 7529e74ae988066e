"""The real kernels, in the simulator: right within the rule for GPUs, watched and counted."""

from __future__ import annotations

import math

import pytest
import torch

import flash_attention
from flash_helpers.check.inputs import DISTRIBUTIONS, make_inputs
from flash_helpers.check.reference import AttentionReference, attention_reference, measure_error
from flash_helpers.check.sanity import SMALL_SHAPE
from flash_helpers.kernel_configs import (
    LAST_VERSION,
    VERSIONS,
    AttentionForward,
    DType,
    FlashForwardKernelConfig,
    get_kernel_progression_configs,
    get_kernels_to_build,
)
from flash_helpers.ptx import Phase, Run

PROGRESSION = get_kernel_progression_configs()
OTHERS = [config for config in get_kernels_to_build() if config not in PROGRESSION]
BATCH_AND_HEADS = AttentionForward(batch=2, heads=3, seq_len=128)


def short_form(value: object) -> str | None:
    return value.short_form() if isinstance(value, FlashForwardKernelConfig) else None


def of_version(number: int, dtype: DType = DType.BF16) -> FlashForwardKernelConfig:
    return next(c for c in PROGRESSION if c.version == number and c.dtype == dtype)


def torch_dtype(config: FlashForwardKernelConfig) -> torch.dtype:
    return getattr(torch, config.dtype.torch_name)


class Problems:
    """Inputs and their float64 result, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple, tuple[tuple[torch.Tensor, ...], AttentionReference]] = {}

    def get(self, shape: AttentionForward, dtype: torch.dtype, distribution: str = "normal"):
        key = (shape, dtype, distribution)
        if key not in self._made:
            inputs = make_inputs(distribution, shape, dtype)
            self._made[key] = inputs, attention_reference(*inputs)
        return self._made[key]


@pytest.fixture(scope="module")
def problems() -> Problems:
    return Problems()


def check(
    problems: Problems,
    config: FlashForwardKernelConfig,
    shape: AttentionForward,
    distribution: str = "normal",
) -> Run:
    """Simulates a kernel on an output full of NaN; any fault that the watcher finds is raised."""
    inputs, reference = problems.get(shape, torch_dtype(config), distribution)
    output = torch.full_like(inputs[0], torch.nan)
    result, run = flash_attention.simulate(config, *inputs, output)
    assert result is output
    error = measure_error(output, reference.expected)
    assert error.within(reference.bound), f"{error} is over {reference.bound}"
    return run


@pytest.mark.parametrize("config", PROGRESSION, ids=short_form)
def test_every_version_is_right_in_both_dtypes(problems, config) -> None:
    run = check(problems, config, SMALL_SHAPE)
    total = run.counters.total
    seq, d = SMALL_SHAPE.seq_len, SMALL_SHAPE.d_head
    assert total.mma_flops == 4 * seq * seq * d
    # Q and O once; K and V once for each block of queries
    assert total.global_bytes == (2 + 2 * seq // config.B_r) * seq * d * 2
    assert total.global_sectors * 32 == total.global_bytes
    if config.swizzled:
        assert total.bank_conflicts == 0
    else:
        # eight rows of an 8x8 matrix, 256 bytes apart, fall on the same banks
        ldmatrix = [
            counts
            for opcode, counts in run.counters.by_opcode().items()
            if opcode.startswith("ldmatrix")
        ]
        assert {c.shared_wavefronts for c in ldmatrix} == {
            8 * c.shared_ideal_wavefronts for c in ldmatrix
        }


def test_the_first_version_has_bank_conflicts_and_the_second_has_none(problems) -> None:
    conflicts = [
        check(
            problems, of_version(number), AttentionForward(1, 1, 128)
        ).counters.total.bank_conflicts
        for number in (1, 2)
    ]
    assert conflicts[0] > 0
    assert conflicts[1] == 0


@pytest.mark.parametrize("config", OTHERS, ids=short_form)
def test_every_other_config_that_is_built_is_right(problems, config) -> None:
    check(problems, config, AttentionForward(1, 1, 256))


@pytest.mark.parametrize("number", VERSIONS)
def test_every_version_is_right_for_one_block(problems, number) -> None:
    check(problems, of_version(number), AttentionForward(1, 1, 64))


@pytest.mark.parametrize("number", [1, 3, 10, LAST_VERSION])
def test_batches_and_heads_are_kept_apart(problems, number) -> None:
    check(problems, of_version(number), BATCH_AND_HEADS)


@pytest.mark.parametrize("config", [c for c in PROGRESSION if c.static_row_stride], ids=short_form)
@pytest.mark.parametrize("seq_len", [64, 128])
def test_a_static_row_stride_is_right_for_its_tensors(problems, config, seq_len) -> None:
    n_heads = config.static_row_stride // config.d_head
    run = check(problems, config, AttentionForward(1, n_heads, seq_len))
    assert config.short_form() in run.kernel


TWO_STAGES = [config for config in OTHERS if config.kv_stages == 2]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("config", TWO_STAGES, ids=short_form)
def test_two_stages_are_right_for_other_inputs(problems, config, distribution) -> None:
    n_heads = config.static_row_stride // config.d_head or 1
    check(problems, config, AttentionForward(1, n_heads, 128), distribution)


@pytest.mark.parametrize("seq_len", [128, 384])
@pytest.mark.parametrize("dtype", DType)
def test_two_stages_take_an_even_and_an_odd_number_of_turns(problems, dtype, seq_len) -> None:
    config = next(c for c in TWO_STAGES if c.dtype == dtype and not c.static_row_stride)
    check(problems, config, AttentionForward(2, 3, seq_len))


@pytest.mark.parametrize(
    ("growth", "blocks_rescaled"),
    [(0.0, 1), (2.5, 1), (8.5, 4), (4.5, 2)],
    ids=["constant", "below the limit in all", "above it", "above it every second block"],
)
def test_lazy_rescale_multiplies_only_where_the_maximum_has_grown(growth, blocks_rescaled) -> None:
    config = next(c for c in TWO_STAGES if c.dtype == DType.BF16 and not c.static_row_stride)
    assert config.lazy_rescale
    n_blocks, d_head = 4, config.d_head
    shape = (1, n_blocks * config.B_c, 1, d_head)
    # Every logit of a block of keys is the same power of two; blocks are walked backwards.
    exponents = growth * torch.arange(n_blocks - 1, -1, -1).repeat_interleave(config.B_c)
    unit = math.log(2) * math.sqrt(d_head)  # one power of two in P, before the scale
    q = torch.zeros(shape)
    q[..., 0] = 2**6
    k = torch.zeros(shape)
    k[0, :, 0, 0] = exponents * unit / 2**6
    v = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 0.5
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))

    output, run = flash_attention.simulate(config, q, k, v)

    reference = attention_reference(q, k, v)
    assert measure_error(output, reference.expected).within(reference.bound)
    multiplications = sum(
        counts.instructions
        for opcode, counts in run.counters.by_opcode().items()
        if opcode.startswith("mul") and opcode.endswith("f32")
    )
    warps = config.n_warps * shape[1] // config.B_r
    row_tiles = config.B_r // config.n_warps // 16
    # O's and l's accumulators, of which l's have two columns alike
    rescale = row_tiles * (d_head // 8 * 4 + 4)
    once = row_tiles * (d_head // 8 * 4)  # O / l at the end
    a_block = row_tiles * 2  # the maximum's own scale
    assert multiplications == warps * (blocks_rescaled * rescale + n_blocks * a_block + once)


def test_a_static_row_stride_gives_way_to_the_general_sibling(problems) -> None:
    config = of_version(LAST_VERSION)
    run = check(problems, config, BATCH_AND_HEADS)
    assert config.short_form() not in run.kernel
    assert config.general().short_form() in run.kernel


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("number", [1, 10, LAST_VERSION])
def test_other_inputs_are_right(problems, number, distribution) -> None:
    check(problems, of_version(number), AttentionForward(1, 1, 192), distribution)


@pytest.mark.parametrize("number", [1, LAST_VERSION])
def test_strided_views_are_read_and_written_in_place(problems, number) -> None:
    config = of_version(number)
    inputs, reference = problems.get(BATCH_AND_HEADS, torch_dtype(config))
    batch, seq, heads, d_head = inputs[0].shape
    packed = torch.full((batch, seq, 4, heads, d_head), torch.nan, dtype=inputs[0].dtype)
    packed[:, :, 0] = inputs[0]
    packed[:, :, 2] = inputs[1]
    head_major = inputs[2].transpose(1, 2).contiguous().transpose(1, 2)
    output = packed[:, :, 1]
    flash_attention.forward(config, packed[:, :, 0], packed[:, :, 2], head_major, output)
    error = measure_error(output.contiguous(), reference.expected)
    assert error.within(reference.bound)
    assert torch.equal(packed[:, :, 0], inputs[0]) and torch.equal(packed[:, :, 2], inputs[1])
    assert packed[:, :, 3].isnan().all()


def test_one_head_expanded_to_all_is_right() -> None:
    config = of_version(LAST_VERSION)
    q, k, v = make_inputs("normal", AttentionForward(2, 1, 64), torch.bfloat16)
    wide = [x.expand(2, 64, 3, 128) for x in (q, k, v)]
    o = flash_attention.forward(config, *wide)
    assert torch.equal(o, flash_attention.forward(config, *(x.contiguous() for x in wide)))


def test_the_result_does_not_depend_on_how_it_is_asked_for() -> None:
    config = of_version(7)
    inputs = make_inputs("normal", AttentionForward(1, 1, 64), torch.bfloat16)
    o = flash_attention.forward(config, *inputs)
    by_name = flash_attention.forward(config.short_form(), *inputs)
    given = torch.empty_like(o)
    assert flash_attention.forward(config, *inputs, given) is given
    counted, run = flash_attention.simulate(config, *inputs)
    assert all(torch.equal(o, other) for other in (by_name, given, counted))
    assert run.faults == ()


def test_counts_grow_with_blocks_and_phases_are_told_apart(problems) -> None:
    config = of_version(3)
    small, large = (
        check(problems, config, AttentionForward(1, 1, seq)).counters for seq in (128, 256)
    )
    for phase in (Phase.PROLOGUE, Phase.EPILOGUE):
        assert large.by_phase()[phase].global_bytes >= 2 * small.by_phase()[phase].global_bytes > 0
    assert large.by_phase()[Phase.MAIN_LOOP].mma == 4 * small.by_phase()[Phase.MAIN_LOOP].mma
    assert sum(counts.instructions for counts in large.by_phase().values()) == (
        large.total.instructions
    )
