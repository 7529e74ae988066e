"""What attention on several ranks refuses, and how it ends when a rank fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ring_cases
import torch
import torch.distributed as dist
from ranks import SHORT_S, Ranks, Refused

from flash_attention.distributed import positions, ring_attention, shard, unshard
from flash_attention.distributed._group import Ranks as RanksOfGroup

D_HEAD = 64


def shards(length: int, heads: int = 2, kv_heads: int = 2, **options: Any) -> ring_cases.Arrays:
    """q, k and v of a shard."""
    options.setdefault("dtype", torch.bfloat16)
    return {
        name: torch.zeros(1, length, n, D_HEAD, **options)
        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    }


def refusals(
    ranks: Ranks, function: str, *of_rank: tuple[ring_cases.Arrays, dict[str, Any]]
) -> list[Refused]:
    """The exceptions of all ranks, each of which has tensors and options of its own."""
    found = ranks.run(ring_cases.call, len(of_rank), function=function, of_rank=of_rank)
    assert all(isinstance(each, Refused) for each in found), found
    return found


# -- in one process --------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path):
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "call",
    [
        lambda: ring_attention(*shards(4).values()),
        lambda: shard(torch.zeros(1, 4)),
        lambda: unshard(torch.zeros(1, 4)),
        lambda: positions(4),
    ],
    ids=["ring_attention", "shard", "unshard", "positions"],
)
def test_a_group_that_is_not_initialised_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"is not initialised: call torch\.distributed\.init"):
        call()


def test_a_device_that_the_backend_does_not_take_is_refused(alone) -> None:
    with pytest.raises(ValueError, match=r"q is on meta, .* tensors on cpu: move it there, or"):
        ring_attention(*shards(4, device="meta").values())
    with pytest.raises(ValueError, match=r"x is on meta, .* tensors on cpu"):
        unshard(torch.zeros(4, device="meta"))


def test_gloo_takes_no_cuda_tensors(alone) -> None:
    ranks = RanksOfGroup.of(None, "ring_attention")
    q = SimpleNamespace(device=torch.device("cuda", 0), is_cuda=True)
    with pytest.raises(ValueError, match=r"q is on cuda:0, .*\(cpu:gloo,cuda:gloo\) .* on cpu"):
        ranks.check_device({"q": q})  # type: ignore[dict-item]


def test_a_capture_in_a_cuda_graph_is_refused(alone, monkeypatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    ranks = RanksOfGroup.of(None, "ring_attention")
    tensors: Any = {"q": SimpleNamespace(device=torch.device("cuda", 0), is_cuda=True)}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ranks.check_device(tensors)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"while a CUDA graph is captured.* Call it outside"):
        ranks.check_device(tensors)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"placement": "spiral"}, ValueError, "choose one of contiguous, zigzag, striped"),
        ({"group": "all"}, TypeError, "group is a str: pass a ProcessGroup"),
        ({"causal": "yes"}, TypeError, "causal is 'yes'"),
        ({"window_size": (3, -2)}, ValueError, r"window_size is \(3, -2\)"),
        ({"cu_seqlens": [0, 7]}, ValueError, r"q has 4 dimensions.*\(shard, heads, d_head\)"),
        ({"check_shards": 1}, TypeError, "check_shards is 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(alone, options, error, text) -> None:
    with pytest.raises(error, match=text):
        ring_attention(*shards(8).values(), **options)


@pytest.mark.parametrize(
    ("begins", "options", "error", "text"),
    [
        ([1, 8], {}, ValueError, "begins with 1: pass 0 first"),
        ([0, 6, 4, 8], {}, ValueError, "falls from 6 to 4 at sequence 1"),
        ([0, 3, 8], {}, ValueError, "sequence 0 has length 3, .* multiple of 2: pad it with 1"),
        ([0, 4], {}, ValueError, "ends with 4, which is 4 rows for each of 1 ranks, and q has 8"),
        ([0.5], {}, TypeError, "pass whole numbers"),
        ([0, 8], {"window_size": (2, 0)}, ValueError, "choose placement 'striped'"),
        (torch.zeros(2, device="meta"), {}, ValueError, "cu_seqlens is on meta, and the host"),
        (torch.zeros(2), {}, TypeError, "cu_seqlens is torch.float32"),
    ],
    ids=str,
)
def test_wrong_lengths_are_refused(alone, begins, options, error, text) -> None:
    packed = [x[0] for x in shards(8).values()]
    with pytest.raises(error, match=text):
        ring_attention(*packed, cu_seqlens=begins, **options)


def test_a_mask_needs_as_many_queries_as_keys(alone) -> None:
    q, k, v = (*shards(8).values(),)
    with pytest.raises(ValueError, match="8 queries and 6 keys: a mask and cu_seqlens need"):
        ring_attention(q, k[:, :6], v[:, :6], causal=True)
    with pytest.raises(ValueError, match="length 7, and placement 'zigzag' has two halves"):
        ring_attention(q[:, :7], k[:, :7], v[:, :7], causal=True)


def test_shards_of_what_is_no_whole_are_refused(alone) -> None:
    with pytest.raises(
        ValueError, match=r"the sequence has length 7, .* of 2: pad it with 1 more, to 8"
    ):
        shard(torch.zeros(1, 7))
    with pytest.raises(ValueError, match=r"dim is 2 and x has shape \(1, 8\)"):
        shard(torch.zeros(1, 8), dim=2)
    with pytest.raises(ValueError, match="ends with 6 and the whole has 8 rows"):
        shard(torch.zeros(8), cu_seqlens=[0, 6])
    with pytest.raises(RuntimeError, match="no backward pass"):
        unshard(torch.zeros(1, 8, requires_grad=True))


# -- in several ------------------------------------------------------------------------------------


def test_unequal_shards_are_refused_on_all_ranks(ranks) -> None:
    found = refusals(ranks, "ring", (shards(8), {}), (shards(12), {}), (shards(8), {}))
    for each, (own, other) in zip(found, ((8, 12), (12, 8), (8, 12)), strict=True):
        assert each.kind == "ValueError"
        assert f"shard length is {own} on rank" in each.text
        assert f"and {other} on rank" in each.text
        assert "pass equal shards" in each.text


def test_options_that_differ_are_refused_on_all_ranks(ranks) -> None:
    of_rank = [(shards(8), {"causal": causal}) for causal in (True, False)]
    for each in refusals(ranks, "ring", *of_rank):
        assert "causal is" in each.text
    of_rank = [(shards(8), {"softmax_scale": scale}) for scale in (0.1, 0.2)]
    for each in refusals(ranks, "ring", *of_rank):
        assert "softmax_scale is" in each.text and "another value" in each.text


def test_what_one_rank_refuses_no_other_waits_for(ranks) -> None:
    fp32 = shards(8, dtype=torch.float32)
    first, second = refusals(ranks, "ring", (shards(8), {}), (fp32, {}))
    assert first.kind == "ValueError"
    assert "rank 1 has refused its arguments" in first.text
    assert second.kind == "TypeError" and "float32" in second.text


def test_what_no_kernel_takes_is_refused_on_all_ranks(ranks) -> None:
    odd = {name: x[..., :40] for name, x in shards(8).items()}
    for each in refusals(ranks, "ring", (odd, {}), (odd, {})):
        assert each.kind == "ValueError" and "d_head 40" in each.text
    # and the group still works
    assert ranks.run(
        ring_cases.call, 2, function="ring", of_rank=[(shards(8), {"causal": True})] * 2
    ) == ["ok", "ok"]


@pytest.mark.parametrize(
    ("heads", "text"), [((3, 3), "q: 3 heads"), ((4, 1), "k and v: 1 heads")], ids=str
)
def test_heads_that_the_group_does_not_divide_are_refused(ranks, heads, text) -> None:
    for each in refusals(ranks, "ulysses", *[(shards(8, *heads), {})] * 2):
        assert each.kind == "ValueError" and text in each.text
        assert "2 ranks does not divide: call ring_attention()" in each.text


@pytest.mark.parametrize("of", ["lse", "a gradient"])
def test_what_has_no_gradient_is_refused(ranks, of) -> None:
    for each in ranks.run(ring_cases.differentiate, 1, given=shards(8), of=of):
        assert isinstance(each, Refused) and each.kind == "RuntimeError"
        assert ("no gradient of the LSE" if of == "lse" else "no second derivative") in each.text


@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("begins", [None, (0, 12, 12, 36)], ids=["one", "several"])
def test_shards_are_joined_in_order(ranks, placement, begins) -> None:
    found = ranks.run(ring_cases.whole_of_shards, 3, begins=begins, placement=placement)
    length = 24 if begins is None else begins[-1]
    own = torch.cat([of_rank for _, _, of_rank in found])
    assert own.sort().values.tolist() == [*range(length)]
    for tokens, places, _ in found:
        assert tokens.tolist() == [*range(length)]
        expected = [*range(length)] if begins is None else [*range(12), *range(24)]
        assert places.tolist() == expected


def test_a_mesh_of_one_dimension_is_taken(ranks) -> None:
    given = {name: x + 1 for name, x in shards(16).items()}
    for o in ranks.run(ring_cases.on_mesh, 4, given=given):
        assert isinstance(o, torch.Tensor), o
        assert torch.equal(o, given["v"])  # means of values that are all 1


@pytest.mark.parametrize("check_shards", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "waits"])
def test_ranks_whose_neighbour_fails_end_with_an_error(tmp_path, leaves, check_shards) -> None:
    ranks = Ranks(3, tmp_path)
    asked = {"absent": 1, "given": shards(8), "leaves": leaves, "check_shards": check_shards}
    try:
        first, absent, last = ranks.run(ring_cases.call_unless, 3, may_fail=True, **asked)
    finally:
        ranks.stop()
    assert isinstance(absent, Refused) == leaves
    doing = "agree on its arguments" if check_shards else "exchange keys and values with ranks"
    for rank, found in ((0, first), (2, last)):
        assert isinstance(found, tuple), found
        text, seconds = found
        assert f"ring_attention: rank {rank} of 3 could not {doing}" in text
        assert "A rank has failed, has left, or has not called" in text
        assert seconds < 3 * SHORT_S
