"""decode(): what it computes, what torch.compile sees, what it refuses."""

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.operations.decode.inputs import draw
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.reference import reference
from flash_helpers.runtime import call

DOCS = Path(__file__).resolve().parents[2] / "docs/using.md"


def computed(problem: Decode, given: dict[str, torch.Tensor], **others: Any) -> Any:
    """What decode() computes of a problem's inputs."""
    q, k, v = (given[name] for name in "qkv")
    options = problem.call_options()
    left, right = (options.pop(f"window_{side}") for side in ("left", "right"))
    window = tuple(-1 if bound is None else bound for bound in (left, right))
    places = {name: x for name, x in given.items() if name not in "qkv"}
    return flash_attention.decode(q, k, v, **places, **options, window_size=window, **others)


def assert_right(problem: Decode, given: dict[str, torch.Tensor]) -> None:
    right = reference(problem, given)
    o, lse = computed(problem, given, return_lse=True)
    for found, name in ((o, "o"), (lse, "lse")):
        error = measure_error(found, right.expected[name])
        assert error.within(right.bounds[name]), f"{name} of {problem}: {error}"


def drawn_problem(seed: int) -> Decode:
    """A small problem: lengths, pages, rows of a shared cache and options as it comes."""
    draws = random.Random(seed)
    kv_heads, len_q, batch = draws.choice((1, 2)), draws.choice((1, 1, 3)), draws.randint(1, 3)
    page_size = draws.choice((0, 0, 1, 3, 16))
    room = page_size * draws.randint(1, 40 // page_size) if page_size else draws.randint(1, 40)
    return Decode(
        *(batch, kv_heads * draws.choice((1, 2, 5)), len_q, 64),
        len_k=room,
        kv_heads=kv_heads,
        page_size=page_size,
        pages=batch * (room // page_size) + draws.randint(0, 2) if page_size else 0,
        caches=0 if page_size else draws.choice((0, batch + 2)),
        total_k=draws.choice((None, draws.randint(0, batch * room))),
        causal=draws.random() < 0.7,
        window_left=draws.choice((None, None, 0, 9)),
        softcap=draws.choice((0.0, 0.0, 2.0)),
        sinks=draws.random() < 0.3,
        softmax_scale=draws.choice((None, 0.3)),
        return_lse=True,
    )


class TestResult:
    @pytest.mark.parametrize("seed", range(3))
    def test_is_attention_on_each_sequences_keys(self, seed):
        problem = drawn_problem(seed)
        assert_right(problem, draw("normal", problem, seed=seed))

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(3, 40))
    def test_is_attention_on_many_more_caches(self, seed):
        problem = drawn_problem(seed)
        assert_right(problem, draw("normal", problem, seed=seed))

    def test_of_pages_is_that_of_their_keys_side_by_side(self):
        torch.manual_seed(0)
        q, k, v = (torch.randn(n, s, 2, 64).bfloat16() for n, s in ((2, 1), (8, 4), (8, 4)))
        table = torch.tensor([[3, 1, -7], [5, 6, 2]]).int()  # the first has two pages
        lengths = torch.tensor([7, 12]).int()
        o = flash_attention.decode(q, k, v, cache_seqlens=lengths, block_table=table)
        side_by_side = (
            torch.stack([x[row].flatten(0, 1) for row in ([3, 1, 0], [5, 6, 2])]) for x in (k, v)
        )
        assert torch.equal(o, flash_attention.decode(q, *side_by_side, cache_seqlens=lengths))

    def test_of_pages_with_heads_before_keys_is_a_matter_of_strides(self):
        problem = Decode(2, 4, len_k=12, kv_heads=2, d_head=64, page_size=4, total_k=17)
        given = draw("normal", problem)
        for name in "kv":
            given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)
            assert not given[name].is_contiguous()
        assert_right(problem, given)

    def test_of_an_expanded_cache_is_that_of_its_copies(self):
        q, k = torch.randn(3, 1, 4, 64).half(), torch.randn(1, 9, 2, 64).half()
        expanded = k.expand(3, -1, -1, -1)
        o = flash_attention.decode(q, expanded, expanded)
        copies = expanded.contiguous()
        assert torch.equal(o, flash_attention.decode(q, copies, copies))

    def test_is_written_to_a_given_tensor(self):
        problem = Decode(2, 2, len_k=5, d_head=64, kv_heads=1)
        given = draw("normal", problem)
        o = torch.empty_like(given["q"])
        version = o._version
        found, lse = computed(problem, given, o=o, return_lse=True)
        assert found is o and o._version > version
        own, own_lse = computed(problem, given, return_lse=True)
        assert torch.equal(o, own) and torch.equal(lse, own_lse)
        assert computed(problem, given, o=o) is o


class TestPieces:
    @pytest.mark.parametrize("cut", [{"pieces": 3}, {"keys_per_piece": 64}])
    def test_give_a_sequence_the_same_bits_in_every_batch(self, cut):
        problem = Decode(3, 4, len_k=400, kv_heads=2, d_head=64, total_k=700, **cut)
        given = draw("normal", problem)
        assert_right(problem, given)
        together = computed(problem, given, return_lse=True)
        for n, length in enumerate(given["cache_seqlens"].tolist()):
            one = {name: x[n : n + 1] for name, x in given.items()}
            for name in "kv":
                one[name] = one[name][:, : max(length, 1)].contiguous()
            alone = computed(problem, one, return_lse=True)
            assert all(map(torch.equal, alone, (x[n : n + 1] for x in together)))
        usual = computed(replace(problem, **NOT_CUT), given, return_lse=True)
        assert not all(map(torch.equal, together, usual))

    @pytest.mark.parametrize(
        ("cut", "error", "message"),
        [
            ({"pieces": -1}, ValueError, "pieces -1 is negative: use 0 for the kernel's choice"),
            ({"pieces": True}, TypeError, "pieces is True: pass a whole number, or 0 for the ker"),
            ({"pieces": 2**70}, ValueError, "is over the limit 65535 of a CUDA grid: use 65535"),
            ({"keys_per_piece": 64.0}, TypeError, r"keys_per_piece is 64\.0: pass a whole number"),
            ({"keys_per_piece": 100}, ValueError, "keys_per_piece 100 is not a multiple of the 64"),
            (
                {"keys_per_piece": 64, "pieces": 1},
                ValueError,
                "pieces 1 with keys_per_piece 64: pa",
            ),
        ],
    )
    def test_that_no_kernel_cuts_are_refused(self, cut, error, message):
        with pytest.raises(error, match=message):
            flash_attention.decode(cache(2, 1, 4, 64), cache(), cache(), **cut)

    def test_of_any_size_over_the_room_are_one(self):
        q, k = cache(2, 1, 4, 64), cache()
        found = [flash_attention.decode(q, k, k, keys_per_piece=n) for n in (64, 2**70)]
        assert torch.equal(*found)


NOT_CUT = {"pieces": 0, "keys_per_piece": 0}
LENGTHS = torch.tensor([3, 0]).int()
TABLE = torch.zeros(2, 2).int()


def cache(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape or (2, 20, 2, 64)).to(dtype)


class TestLengths:
    def test_of_no_keys_gives_zeros(self):
        o, lse = flash_attention.decode(
            cache(2, 1, 4, 64), cache(), cache(), cache_seqlens=LENGTHS, return_lse=True
        )
        assert o[0].all() and not o[1].any()
        assert lse[0].isfinite().all() and (lse[1] == -math.inf).all()

    def test_of_no_keys_and_sinks_gives_zeros_and_the_sinks(self):
        sinks = cache(4)
        o, lse = flash_attention.decode(
            *(cache(2, 1, 4, 64), cache(), cache()),
            cache_seqlens=LENGTHS,
            sinks=sinks,
            return_lse=True,
        )
        assert not o[1].any() and torch.allclose(lse[1, :, 0], sinks.float())

    @pytest.mark.parametrize(("length", "counts_as"), [(21, 20), (2**31 - 1, 20), (-1, 0)])
    def test_outside_of_the_room_are_the_nearest_in_it(self, length, counts_as):
        q, k, v = cache(1, 1, 4, 64), cache(1, 20, 2, 64), cache(1, 20, 2, 64)
        found = [
            flash_attention.decode(q, k, v, cache_seqlens=torch.tensor([n]).int())
            for n in (length, counts_as)
        ]
        assert torch.equal(*found)

    @pytest.mark.parametrize(
        ("q", "k", "places"),
        [
            ((0, 1, 4, 64), (0, 20, 2, 64), {"cache_seqlens": LENGTHS[:0]}),
            ((2, 0, 4, 64), (2, 20, 2, 64), {"cache_seqlens": LENGTHS}),
            ((2, 1, 4, 64), (2, 0, 2, 64), {"cache_seqlens": LENGTHS}),
            ((2, 1, 4, 64), (0, 16, 2, 64), {"block_table": TABLE[:, :0]}),
        ],
        ids=["no sequence", "no query", "no room", "no pages"],
    )
    def test_without_anything_need_no_kernel(self, q, k, places):
        o, lse = flash_attention.decode(
            cache(*q), cache(*k), cache(*k), **places, return_lse=True, causal=False
        )
        assert o.shape == q and not o.any()
        assert lse.shape == (q[0], q[2], q[1]) and (lse == -math.inf).all()


@pytest.fixture
def nothing_runs(monkeypatch) -> None:
    def run(*_: object) -> None:
        raise AssertionError("a kernel runs")

    monkeypatch.setattr(call.ReadyCall, "run", run)


@pytest.mark.usefixtures("nothing_runs")
class TestRefusal:
    """Bad input is refused before a kernel runs, with value, limit and way out."""

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"cache_seqlens": LENGTHS.long()}, TypeError, r"cache_seqlens is torch\.int64 and .*"
             r"torch\.int32: convert it"),
            ({"cache_seqlens": LENGTHS.to("meta")}, ValueError, "cache_seqlens is on meta and q on "
             "cpu: move them to one device"),
            ({"cache_seqlens": LENGTHS[:1]}, ValueError, r"cache_seqlens has shape \(1,\) .*: batch"
             r" must be equal, cache_seqlens \(2,\)"),
            ({"cache_seqlens": 3}, TypeError, r"cache_seqlens is a int: pass a torch\.Tensor"),
            ({"cache_seqlens": TABLE[:, 0]}, ValueError, r"cache_seqlens has strides \(2,\) .*"
             r"contiguous: call \.contiguous\(\)"),
            ({"block_table": TABLE.long()}, TypeError, r"block_table is torch\.int64 and"),
            ({"block_table": TABLE[:1]}, ValueError, r"block_table has shape \(1, 2\) .*: batch "),
            ({"block_table": TABLE[0]}, ValueError, r"block_table has 1 dimensions, .*\(batch, bl"),
            ({"block_table": TABLE.mT}, ValueError, "block_table has strides .*contiguous"),
            ({"block_table": TABLE, "k": cache(2, 0, 2, 64), "v": cache(2, 0, 2, 64)}, ValueError,
             r"page_size 0: k has shape \(2, 0, 2, 64\) and a page has at least 1 key: pass"),
            ({"block_table": TABLE, "cache_batch_idx": LENGTHS}, ValueError, "are both given: pass "
             "one of them"),
            ({"cache_batch_idx": LENGTHS.long()}, TypeError, r"cache_batch_idx is torch\.int64"),
            ({"cache_batch_idx": LENGTHS[:1]}, ValueError, "cache_batch_idx has shape .*: batch"),
            ({"k": cache(3, 20, 2, 64), "v": cache(3, 20, 2, 64)}, ValueError, r"k has shape \(3, "
             r"20, 2, 64\) and q \(2, 1, 4, 64\): batch and d_head must be equal"),
            ({"k": cache(2, 20, 3, 64), "v": cache(2, 20, 3, 64)}, ValueError, "k has heads 3, .*q "
             "has 4: use a divisor of 4"),
            ({"v": cache(2, 20, 2, 32)}, ValueError, "v has shape .*: all sizes must be equal"),
            ({"q": cache(1, 4, 64)}, ValueError, r"q has 3 dimensions.*\(batch, seq, heads, d_hea"),
            ({"k": cache(dtype=torch.half)}, TypeError, r"k is torch\.float16 and decode takes"),
            ({"q": cache(2, 1, 4, 32), "k": cache(2, 9, 2, 32), "v": cache(2, 9, 2, 32)},
             ValueError, "d_head 32 is not supported by .*: pad the last dimension with zeros"),
            ({"v": None}, TypeError, r"v is a NoneType: pass a torch\.Tensor"),
            ({"o": cache(2, 1, 4, 32)}, ValueError, r"o has shape .*: all sizes must be equal, o"),
            ({"o": 3}, TypeError, r"o is a int: pass a torch\.Tensor"),
            ({"sinks": cache(3)}, ValueError, r"sinks has shape \(3,\) .*: heads must be equal"),
            ({"causal": 1}, TypeError, "causal is 1: pass True or False"),
            ({"return_lse": None}, TypeError, "return_lse is None: pass True or False"),
            ({"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\), and a bound"),
            ({"softmax_scale": "1"}, TypeError, "softmax_scale is '1': pass a number"),
            ({"softcap": -1.0}, ValueError, "softcap -1: softcap must be from"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
    )  # fmt: skip
    def test_names_what_is_wrong(self, changes, error, message):
        given: dict[str, Any] = {"q": cache(2, 1, 4, 64), "k": cache(), "v": cache(), **changes}
        with pytest.raises(error, match=message):
            flash_attention.decode(given.pop("q"), given.pop("k"), given.pop("v"), **given)

    def test_of_an_output_in_the_memory_of_an_input(self):
        q = cache(2, 1, 4, 64)
        with pytest.raises(ValueError, match="o overlaps q in memory"):
            flash_attention.decode(q, cache(), cache(), o=q)


def test_has_no_gradient():
    q = cache(2, 1, 4, 64).requires_grad_()
    o = flash_attention.decode(q, cache(), cache())
    with pytest.raises(RuntimeError, match="has no backward pass for this function"):
        o.sum().backward()
    with pytest.raises(RuntimeError, match="what is written into o or lse has no gradient"):
        flash_attention.decode(q, cache(), cache(), o=torch.empty_like(q))


@pytest.fixture
def zeros(monkeypatch) -> list[Decode]:
    """The problems whose kernels ran; they compute zeros."""
    found: list[Decode] = []

    def run(self: call.ReadyCall, *_: object) -> None:
        assert isinstance(self.problem, Decode)
        found.append(self.problem)
        for x in self.outputs.values():
            x.zero_()

    monkeypatch.setattr(call.ReadyCall, "simulate", run)
    return found


class TestTracing:
    def test_compiled_code_takes_other_lengths_and_tables(self, zeros):
        def function(q: torch.Tensor, k: torch.Tensor, **places: torch.Tensor) -> torch.Tensor:
            return flash_attention.decode(q, k, k, **places) + 1

        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
        for batch, blocks in ((2, 3), (4, 5), (3, 7)):
            q, k = cache(batch, 1, 4, 64), cache(9, 16, 2, 64)
            places = {
                "cache_seqlens": torch.full((batch,), 5).int(),
                "block_table": torch.zeros(batch, blocks).int(),
            }
            assert torch.equal(compiled(q, k, **places), torch.ones_like(q))
        assert [(p.batch, p.len_k, p.page_size, p.pages) for p in zeros] == [
            *((2, 48, 16, 9), (4, 80, 16, 9), (3, 112, 16, 9)),
        ]

    def test_a_call_is_one_operator_that_reads_no_length(self, zeros):
        def function(q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor) -> Any:
            return flash_attention.decode(q, k, k, cache_seqlens=lengths, return_lse=True)

        make_fx: Callable[..., Any] = torch.fx.experimental.proxy_tensor.make_fx
        with torch._subclasses.FakeTensorMode() as mode:  # which has no values to read
            given = (mode.from_tensor(x) for x in (cache(2, 1, 4, 64), cache(), LENGTHS))
            graph = make_fx(function)(*given).graph
        (node,) = (n for n in graph.nodes if n.op == "call_function" and "flash" in str(n.target))
        assert str(node.target) == "flash_attention.decode_lse.default"
        assert zeros == []

    @pytest.mark.slow
    def test_the_operators_are_what_torch_expects_of_them(self, zeros):
        options = True, 3, None, 0.0, None, 0, 64, False
        q, k = cache(2, 1, 4, 64), cache()
        given = q, k, k, None, LENGTHS, None, None, None, None
        operators = torch.ops.flash_attention
        torch.library.opcheck(operators.decode.default, (*given, *options))
        torch.library.opcheck(operators.decode_lse.default, (*given, *options))
        for lse in (None, torch.empty(2, 4, 1)):
            out = (*given, torch.empty_like(q), *options, lse)
            torch.library.opcheck(operators.decode_out.default, out)

    def test_the_operator_is_what_torch_expects_of_it_on_a_cache_in_fp8(self, zeros):
        options = True, 3, None, 0.0, None, 0, 0, True
        k = cache().to(torch.float8_e4m3fn)
        scale = torch.ones(2, k.shape[2])
        given = cache(2, 1, 4, 64), k, k, None, LENGTHS, None, None, scale, scale
        # the other tests of torch compute with the tensors, which it does not do with fp8
        utils = ("test_faketensor",)
        torch.library.opcheck(
            torch.ops.flash_attention.decode.default, (*given, *options), test_utils=utils
        )


@pytest.mark.slow
def test_the_examples_of_the_page_run():
    section = DOCS.read_text().partition("## Decode\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {"torch": torch, "flash_attention": flash_attention, "device": "cpu"}
    outputs = []
    for block in blocks:
        exec(block, names)
        outputs.append(names["o"])
    of_page, appended, by_wrapper, in_fp8, in_pieces, of_levels = outputs
    assert of_page.shape == appended.shape == (2, 1, 8, 128)
    assert torch.equal(names["places"]["cache_seqlens"], torch.tensor([41, 18]).int())
    assert torch.equal(by_wrapper, appended[:, 0])
    torch.testing.assert_close(in_fp8, appended, atol=0.1, rtol=0.1)
    torch.testing.assert_close(in_pieces, appended)
    q, k, v = (names[name] for name in ("q", "k_pages", "v_pages"))
    lengths, table = (torch.tensor(x).int() for x in ([41, 34], [[3, 0, 5], [3, 0, 1]]))
    alone = flash_attention.decode(q, k, v, cache_seqlens=lengths, block_table=table)
    torch.testing.assert_close(of_levels, alone[:, 0], atol=1e-2, rtol=1e-2)
