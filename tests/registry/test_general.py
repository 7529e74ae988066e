"""Family general: the head sizes that it is built for, and what attention takes for them."""

from __future__ import annotations

import pytest

from flash_helpers.gpu import LIMITS, largest_device
from flash_helpers.kernel_configs import AttentionForward, Element
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
    measured = config_for(problem(128, 0), H100)
    chosen = config_for(problem(d_head, d_v), H100)
    assert measured.family.name == "hopper"
    assert chosen.family is (measured.family if (d_head, d_v) == (128, 0) else GENERAL)


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
