"""Family general: the head sizes and variable lengths that it is built for, and what attention
takes for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_helpers.gpu import LIMITS, largest_device
from flash_helpers.kernel_configs import AttentionForward, Config, Element
from flash_helpers.registry.general import GENERAL, TILES
from flash_helpers.tune.best import config_for

H100 = largest_device(90)
LAST = GENERAL.progression()[-1]
SIZES = sorted(TILES)


def problem(d_head: int, d_v: int, *, causal: bool = False) -> AttentionForward:
    sizes = (2, 4, 300, d_head, Element.BF16)
    return AttentionForward(*sizes, d_v=d_v or d_head, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d_head", "d_v"), SIZES)
def test_the_variants_have_each_head_size_with_and_without_a_mask(d_head, d_v, causal) -> None:
    asked = problem(d_head, d_v, causal=causal)
    (config,) = (variant for variant in LAST.variants() if not variant.refusal(asked))
    assert config.smem_bytes <= LIMITS[90].smem_bytes
    assert config.of_size(d_head, d_v).variants()[0].v_columns == asked.d_v


@pytest.mark.parametrize(("d_head", "d_v"), SIZES)
def test_hopper_has_no_other_family_for_other_head_sizes_than_128(d_head, d_v) -> None:
    chosen = config_for(problem(d_head, d_v), H100)
    assert chosen.family is GENERAL or (d_head, d_v) == (128, 0)


def test_a_head_size_between_them_is_refused_with_those_that_are_built() -> None:
    with pytest.raises(ValueError, match=r"d_head 80 with d_v 80 of V is not built: .* 96 with 96"):
        LAST.replace(d_head=80)


@pytest.mark.parametrize(
    ("d_head", "d_v", "box_and_dims"),
    [
        (128, 0, ((64, 128, 2, 1, 1), (64, 300, 2, 4, 2))),
        (96, 0, ((64, 128, 1, 1, 1), (96, 300, 1, 4, 2))),  # the last piece is clipped at 96
        (192, 128, ((64, 80, 2, 1, 1), (64, 300, 2, 4, 2))),
    ],
)
def test_pieces_of_v_are_copied_at_once_if_they_are_whole(d_head, d_v, box_and_dims) -> None:
    asked = problem(d_head, d_v)
    (launch,) = LAST.of_size(d_head, d_v).call(asked, asked.strides(), H100).launches
    (found,) = (tensor_map for _, tensor_map in launch.tensor_maps if tensor_map.tensor == "v")
    assert (found.box, found.dims) == box_and_dims


@pytest.mark.parametrize("config", GENERAL.progression(), ids=Config.short_form)
def test_a_launch_is_programmatic_if_its_kernel_waits_for_the_one_before(config, root) -> None:
    asked = AttentionForward(2, 4, 256, 128, config.dtype)
    (launch,) = config.call(asked, asked.strides(), H100).launches
    waits = "wait_for_launch_before();" in (root / config.step.source).read_text()
    assert launch.programmatic == waits


def lengths_of(total: int, several: int, **options: object) -> AttentionForward:
    return AttentionForward(1, 4, total, sequences=several, **options)


@pytest.mark.parametrize(("d_head", "d_v"), SIZES)
def test_hopper_takes_sequences_of_various_lengths_of_every_head_size(d_head, d_v) -> None:
    asked = replace(problem(d_head, d_v, causal=True), batch=1, len_k=500, sequences=3)
    config = config_for(asked, H100)
    assert (config.family, config.varlen, config.causal) == (GENERAL, True, True)
    assert config.cluster == 1
    assert "no cu_seqlens is not supported" in config.refusal(replace(asked, sequences=0))


def test_two_thread_blocks_share_no_loads_of_sequences_of_various_lengths() -> None:
    with pytest.raises(ValueError, match=r"varlen with cluster 2: .* choose cluster 1"):
        LAST.replace(varlen=True, cluster=2)


VARLEN = LAST.replace(varlen=True, cluster=1)


def test_no_more_tiles_are_numbered_than_any_lengths_of_that_total_need() -> None:
    for lengths in ([1] * 200, [127, 1, 0, 385], [0, 0, 384], [129] * 5, [128]):
        order = VARLEN.order(lengths_of(sum(lengths), len(lengths)), H100)
        needed = sum(-(-length // VARLEN.B_r) for length in lengths)
        assert needed <= order.q_tiles <= needed + len(lengths)
        assert order.n_blocks == min(4 * order.q_tiles, H100.sms)


def test_more_tiles_than_a_number_holds_are_refused() -> None:
    assert VARLEN.refusal(lengths_of(2**31 - 1000, 2**29 - 2**24)) == ""
    assert "tiles of queries, over the limit" in VARLEN.refusal(lengths_of(2**31 - 1000, 2**29))


@pytest.mark.parametrize("causal", [False, True])
def test_a_counter_hands_out_sequences_of_various_lengths(causal) -> None:
    config = VARLEN.replace(causal=causal)
    assert config.order(lengths_of(50_000, 64, causal=causal), H100).counts


@pytest.mark.parametrize("name", "qkvo")
def test_a_batch_of_a_tensor_map_ends_where_a_sequence_does(name) -> None:
    total = {"q": 300, "k": 500, "v": 500, "o": 300}[name]
    asked = lengths_of(300, 3, len_k=500, kv_heads=2)
    (launch,) = VARLEN.call(asked, asked.strides(), H100).launches
    (found,) = (tensor_map for _, tensor_map in launch.tensor_maps if tensor_map.tensor == name)
    row = asked.strides()[name][1] * 2
    assert found.dims[1] == total and found.dims[4] == total + 1
    for end in (0, 1, total):  # the row behind the last of batch `end`
        assert found.offset + total * found.strides[0] + end * found.strides[3] == end * row


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({"Q_slots": 0}, "Q_slots 0: there is no tile: use 1 or more"),
        (
            {"Q_slots": 1, "B_r": 128, "ping_pong": True},
            "Q_slots 1: the next tile begins before this one ends: use 2 or more",
        ),
        (
            {"K_slots": 7, "V_slots": 6},
            "2 slots of Q, 7 of K and 6 of V need 272 bytes for their barriers, over the limit "
            "256: lower one of them",
        ),
        ({"Q_slots": 3, "K_slots": 6, "V_slots": 5}, "need 272 bytes for their barriers"),
    ],
)
def test_slots_that_no_kernel_has_room_for_are_refused(slots, message) -> None:
    small = LAST.of_size(64).replace(B_r=64, ping_pong=False)
    with pytest.raises(ValueError, match=message):
        small.replace(**slots)


def test_one_slot_of_q_makes_room_for_two_of_v() -> None:
    before, after = (
        GENERAL.fixed_config(GENERAL.steps[step], Element.BF16).of_size(256)
        for step in ("g9", "g10")
    )
    assert (before.Q_slots, before.V_slots, before.B_c) == (2, 1, 64)
    assert (after.Q_slots, after.V_slots, after.B_c) == (1, 2, 80)
    with pytest.raises(ValueError, match="use 2 or more"):
        after.at_step(GENERAL.steps["g9"])


def test_each_slot_of_q_takes_its_tile_of_shared_memory() -> None:
    config = LAST.of_size(64)
    one_more = config.replace(K_slots=5, V_slots=5, Q_slots=3)
    assert one_more.smem_bytes == config.smem_bytes + 256 * 128 - 2 * 64 * 128
