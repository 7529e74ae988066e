"""Random caches in the simulator: each is right, whatever its lengths, pages, options and strides
are."""

from __future__ import annotations

import pytest
import random_caches
import torch
from random_caches import NO_PAGE, Cache, drawn, faults, faults_of, last_configs
from tiers import each, matrix_mark

from flash_helpers.kernel_configs import FAMILIES, Config
from flash_helpers.operations.decode import OPERATION
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.registry.decode_sync import DECODE_SYNC
from flash_helpers.registry.problem import Element

FIRST, MATRIX = range(10, 18), range(18, 218)  # seed 14 has several pieces
DECODING = [family for family in FAMILIES.values() if family.operation is OPERATION]
CASES = [
    pytest.param(configs, seeds, marks=marks, id=f"{configs[0].family.name} {len(seeds)}")
    for configs in map(last_configs, DECODING)
    for seeds, marks in ((FIRST, ()), (MATRIX, matrix_mark(configs[0])))
]


@pytest.mark.parametrize(("configs", "seeds"), CASES)
def test_caches_are_right_whatever_their_lengths_and_strides_are(configs, seeds) -> None:
    if found := faults(seeds, configs):
        pytest.fail("\n".join(found), pytrace=False)


PAGED = [
    config
    for family in DECODING
    for config in (family.fixed_config(step, Element.BF16) for step in family.steps.values())
    if config.supports.pages
]


@pytest.mark.parametrize("unused", [NO_PAGE, -1, None], ids=["outside", "negative", "of NaN"])
@each(PAGED)
def test_pages_that_a_window_hides_are_not_read(config, unused) -> None:
    # the tile's first block of keys begins before key 94, the first that a query sees
    problem = Decode(2, 4, len_k=100, kv_heads=2, page_size=4, total_k=195, window_left=5)
    strides = {x.name: x.strides for x in problem.tensors if x.name in "qkvo"}
    problem = config.supports.adapted(problem)
    assert not faults_of(Cache(problem, "normal", strides, 0, unused), config, "cpu")


CONFIG = DECODE_SYNC.fixed_config(DECODE_SYNC.steps["c4"], Element.BF16)
CUT = DECODE_SYNC.fixed_config(DECODE_SYNC.steps["c5"], Element.BF16)  # in pieces of a size


def test_a_seed_is_one_cache() -> None:
    once, again, other = (drawn(seed, CONFIG) for seed in (5, 5, 6))
    assert once == again != other and str(once) != str(other)


def test_seeds_have_every_kind_of_cache() -> None:
    found = [drawn(seed, CONFIG) for seed in MATRIX]
    problems = [cache.problem for cache in found]
    assert {1, 2, 3, 4, 5} == {p.batch for p in problems}
    assert {*range(1, 17)} <= {p.heads // p.kv_heads for p in problems}
    assert len({p.len_q for p in problems}) > 10 and len({p.page_size for p in problems}) > 15
    for name in ("causal", "sinks", "softcap", "return_lse", "page_size", "caches"):
        assert {bool(getattr(p, name)) for p in problems} == {False, True}
    of_pieces = [drawn(seed, config).problem for config in (CONFIG, CUT) for seed in MATRIX]
    assert {0, 1, 2, 9} <= {p.pieces for p in of_pieces}
    assert {0, 64, 128, 192} <= {p.keys_per_piece for p in of_pieces}
    for name in ("window_left", "window_right", "total_k"):
        assert {getattr(p, name) is None for p in problems} == {False, True}
    assert any(p.total_k == 0 for p in problems)
    assert any(p.len_k > 3 * CONFIG.supports.B_c for p in problems)
    # in memory heads lie in rows, rows in heads, and gaps are between them
    k = [(cache.strides["k"], cache.problem.tensor("k").shape) for cache in found]
    assert {strides[1] > strides[2] for strides, (_, _, heads, _) in k if heads > 1} == {
        True,
        False,
    }
    assert {strides[0] > rows * heads * d_head for strides, (_, rows, heads, d_head) in k} == {
        True,
        False,
    }


def wrongly(config: Config, problem: object, tensors: dict[str, torch.Tensor]) -> tuple[str, ...]:
    """A kernel whose outputs are all 0, one of which it writes beside its elements."""
    for name in {"o", "lse"} & tensors.keys():
        tensors[name].fill_(0)
    o = tensors["o"]
    o.as_strided((1,), (1,), o.storage_offset() - 1).fill_(0)
    return ()


def test_wrong_results_and_what_is_written_beside_them_are_found(monkeypatch) -> None:
    monkeypatch.setattr(random_caches, "computed", wrongly)
    found = faults([7], [CONFIG])
    assert any("o: max abs error" in fault for fault in found)
    assert any(fault.endswith("o: written beside its elements") for fault in found)
    assert all(fault.startswith(f"{CONFIG.short_form()}, seed 7") for fault in found)
