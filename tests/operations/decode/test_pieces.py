"""Pieces of keys that a call asks for: a sequence has the same bits whatever is beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from random_caches import alone, asked, drawn, drawn_inputs, last_configs
from tiers import matrix_mark, stands_for_its_step

from flash_helpers.check.tensors import tensors_for
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import FAMILIES, STEPS, Config
from flash_helpers.operations.decode import OPERATION
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.reference import lengths_of
from flash_helpers.runtime.simulator import run_shipped
from flash_helpers.tune.best import config_for

DECODING = [family for family in FAMILIES.values() if family.operation is OPERATION]
CUT = [
    config
    for family in DECODING
    for config in last_configs(family)
    if config.supports.keys_per_piece or config.supports.max_pieces > 1
]
OF_FIRST_TIER = [config for config in CUT if stands_for_its_step(config)]


def device_of(config: Config, sms: int) -> Device:
    return replace(largest_device(config.family.capabilities[0]), sms=sms)


def bits(
    config: Config, problem: Decode, given: Mapping[str, torch.Tensor], sms: int = 132
) -> list[torch.Tensor]:
    """The outputs as whole numbers, sequences first."""
    tensors = tensors_for(config, problem, given)
    run = run_shipped(config, tensors, device=device_of(config, sms), **problem.call_options())
    assert run.faults == ()
    found = {x.name: tensors[x.name] for x in problem.outputs}
    return [found["o"].view(torch.int16), found["lse"].view(torch.int32)]


def assert_alone_is_the_same(config: Config, seed: int) -> None:
    """Each sequence of a random cache has the bits that it has alone: in its own room, in pages, in
    more room, on a GPU with few SMs."""
    problem = drawn(seed, config).problem
    # of a hidden page a kernel reads nothing: zeros, which no bit of a result tells from numbers
    problem = replace(problem, return_lse=True, **{**NONE, **asked(config, 1 + seed % 2)})
    given = drawn_inputs(
        replace(drawn(seed, config), problem=problem, distribution="normal"), "cpu"
    )
    together = bits(config, problem, given)
    for n, length in enumerate(lengths_of(problem, given)):
        keys = max(length, 1)
        longer = 16 * -(-(keys + 3 * config.supports.B_c) // 16)
        for room, page_size, sms in ((keys, 0, 3), (longer, 16, 132)):
            own = bits(config, *alone(problem, given, n, room, page_size), sms)
            for x, y in zip(together, own, strict=True):
                assert torch.equal(x[n], y[0]), f"seed {seed}, sequence {n} of {problem}"


NONE = {"pieces": 0, "keys_per_piece": 0}


@pytest.mark.parametrize("seed", [3])
@pytest.mark.parametrize("config", OF_FIRST_TIER, ids=Config.short_form)
def test_a_sequence_has_the_same_bits_alone(config, seed) -> None:
    assert_alone_is_the_same(config, seed)


@pytest.mark.parametrize(
    "config", [pytest.param(c, marks=matrix_mark(c), id=c.short_form()) for c in CUT]
)
def test_a_sequence_has_the_same_bits_alone_in_many_caches(config) -> None:
    for seed in range(200, 203):
        assert_alone_is_the_same(config, seed)


@pytest.mark.parametrize("config", OF_FIRST_TIER, ids=Config.short_form)
def test_bits_depend_on_the_gpu_where_pieces_have_neither_a_number_nor_a_size(config) -> None:
    # few outputs may have the same bits by chance
    problem = Decode(1, 16, len_k=16 * config.supports.B_c, dtype=config.dtype, return_lse=True)
    problem = config.supports.adapted(problem)
    given = drawn_inputs(replace(drawn(0, config), problem=problem, distribution="normal"), "cpu")
    few, many = (bits(config, problem, given, sms) for sms in (1, 132))
    assert all(map(torch.equal, few, many)) == config.supports.keys_per_piece
    own = replace(problem, **asked(config))
    few, many = (bits(config, own, given, sms) for sms in (1, 132))
    assert all(map(torch.equal, few, many))


@pytest.mark.parametrize("step", ["c5", "d8"])  # which combine pieces in a launch of its own
def test_a_launch_has_as_many_thread_blocks_as_room_and_window_have_pieces(step) -> None:
    family = FAMILIES[STEPS[step].family]
    config = family.fixed_config(STEPS[step], family.dtypes[-1])
    B_c = config.supports.B_c
    for len_k, window_left, keys, pieces in (
        (10 * B_c, None, B_c, 10),
        (10 * B_c + 1, None, 2 * B_c, 6),
        (10 * B_c, None, 100 * B_c, 1),
        (10 * B_c, 0, B_c, 2),  # two queries, the first of which may be the last key of a piece
        (10 * B_c, B_c - 1, B_c, 2),
        (10 * B_c, B_c, B_c, 3),
        (10 * B_c, 8 * B_c + 1, B_c, 10),
    ):
        problem = Decode(
            3, 1, len_q=2, len_k=len_k, window_left=window_left, keys_per_piece=keys, causal=True
        )
        call = config.call(problem, problem.strides(), device_of(config, 132))
        assert call.launches[0].grid == (3, 1, pieces)
        assert len(call.launches) == 1 + (pieces > 1)


def test_pieces_of_all_sequences_are_shared_by_as_many_thread_blocks_as_there_is_room_for() -> None:
    step = FAMILIES["decode"].steps["d13"]
    config = FAMILIES["decode"].fixed_config(step, CUT[0].dtype)
    room = 2 if config.slots == 3 else 1  # thread blocks of an SM
    for batch, sms, grid in (
        (1, 132, (2, 8, 1)),  # a thread block for each piece of each of two heads
        (40, 3, (2, 3 * room // 2, 1)),
        (40, 9, (2, 9 * room // 2, 1)),
    ):
        problem = Decode(batch, 2, kv_heads=2, len_k=8 * config.B_c, keys_per_piece=config.B_c)
        call = config.call(problem, problem.strides(), device_of(config, sms))
        assert [launch.grid for launch in call.launches] == [grid]
        parts, counters = call.buffers
        assert counters.bytes == 4 * batch * 2
        assert parts.bytes == 4 * batch * 2 * 8 * config.B_r * (config.d_head + 2)


class TestChoice:
    H100 = largest_device(90)

    @pytest.mark.parametrize(
        ("options", "on_cpu", "on_hopper"),
        [({}, "c4", "d12"), ({"pieces": 2}, "c4", "d5"), ({"keys_per_piece": 64}, "c5", "d13")],
    )
    def test_of_a_call_that_asks_for_pieces_is_the_step_that_takes_them(
        self, options, on_cpu, on_hopper
    ):
        problem = Decode(2, 8, len_k=300, **options)
        found = [config_for(problem, gpu).step.id for gpu in (None, self.H100)]
        assert found == [on_cpu, on_hopper]

    def test_is_made_for_the_same_problem_whatever_depends_on_the_batch(self):
        usual = {"heads": 8, "kv_heads": 2, "len_q": 2}
        problems = [
            Decode(1, len_k=100, **usual),
            Decode(9, len_k=3200, page_size=16, total_k=700, window_left=50, **usual),
            Decode(9, len_k=3200, caches=4, window_right=1, **usual),
        ]
        for own in problems:
            assert own.for_choice() is own
        for option in ({"pieces": 1}, {"keys_per_piece": 128}):
            assert len({replace(own, **option).for_choice() for own in problems}) == 1
            other = replace(problems[0], heads=4, **option)
            assert other.for_choice() != replace(problems[0], **option).for_choice()


@pytest.mark.parametrize(
    ("step", "options", "text"),
    [
        ("d4", {"pieces": 2}, "pieces 2 is not supported by {}: choose a step that takes p"),
        ("d7", {"pieces": 1}, "pieces 1 is not supported by {}: choose a step that takes p"),
        ("d8", {"pieces": 1}, "pieces 1 is not supported by {}: choose a step that takes p"),
        ("c5", {"pieces": 1}, "pieces 1 is not supported by {}: choose a step that takes p"),
        ("d5", {"keys_per_piece": 64}, "keys_per_piece 64 is not supported by {}: choose a step "
         "that takes keys_per_piece, or pass pieces"),
        ("d5", {"pieces": 65536}, "pieces 65536 is over the limit 65535 of a CUDA grid: use 65535"),
        ("d8", {"keys_per_piece": 100}, "keys_per_piece 100 is not a multiple of the 64 keys that "
         "{} computes at once: use 128"),
        ("c5", {"keys_per_piece": 32}, "keys_per_piece 32 is not a multiple of the 64 keys th"),
        ("d8", {"keys_per_piece": 64, "len_k": 64 * 65536}, "keys_per_piece 64 makes over 65535 pie"
         "ces of len_k 4194304, the limit of a CUDA grid: use 128 or more"),
    ],
)  # fmt: skip
def test_pieces_that_a_kernel_does_not_cut_are_refused(step, options, text) -> None:
    (config,) = (
        family.fixed_config(own, CUT[0].dtype)
        for family in DECODING
        for own in family.steps.values()
        if own.id == step
    )
    found = config.refusal(Decode(1, 1, **{"len_k": 200, "dtype": config.dtype, **options}))
    assert found.startswith(text.format(config.short_form())), found
