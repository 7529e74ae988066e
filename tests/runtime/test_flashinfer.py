"""FlashInfer's wrappers: what plan() makes, what run() computes and what both refuse."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_attention import decode, flashinfer
from flash_attention.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)
from flash_helpers.check.errors import measure_error
from flash_helpers.operations.attention_forward.reference import attention_reference

HEADS, KV_HEADS, D_HEAD, PAGES, PAGE_SIZE = 4, 2, 64, 9, 4
WORKSPACE = torch.empty(0, dtype=torch.uint8)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Four sequences: two pages, none, three, one.
INDPTR, INDICES, LAST = int32(0, 2, 2, 5, 6), int32(7, 2, 0, 5, 3, 1), int32(3, 0, 4, 1)
OF_SEQUENCES, LENGTHS = ([7, 2], [], [0, 5, 3], [1]), (7, 0, 12, 1)
SIZES = (HEADS, KV_HEADS, D_HEAD, PAGE_SIZE)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


def make_cache() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    k, v = (randn(PAGES, PAGE_SIZE, KV_HEADS, D_HEAD) for _ in range(2))
    return k, v


def keys_of(n: int, x: torch.Tensor) -> torch.Tensor:
    """Rows of sequence n, (1, keys, kv_heads, d_head)."""
    return x[OF_SEQUENCES[n]].flatten(0, 1)[: LENGTHS[n]][None]


# Both layouts, and both forms of a cache.
FORMS: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor], Any]]] = {
    "NHD, pair": ("NHD", lambda k, v: (k, v)),
    "NHD, one": ("NHD", lambda k, v: torch.stack((k, v), 1)),
    "HND, pair": ("HND", lambda k, v: tuple(x.transpose(1, 2).contiguous() for x in (k, v))),
    "HND, one": ("HND", lambda k, v: torch.stack((k, v), 1).transpose(2, 3).contiguous()),
}


class TestDecode:
    def planned(self, layout: str = "NHD", **options: Any) -> BatchDecodeWithPagedKVCacheWrapper:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
        wrapper.plan(INDPTR, INDICES, LAST, *SIZES, **options)
        return wrapper

    @pytest.mark.parametrize("form", FORMS)
    def test_is_attention_on_the_pages_of_each_sequence(self, form):
        layout, cache = FORMS[form]
        (k, v), q = make_cache(), randn(4, HEADS, D_HEAD)
        o, lse = self.planned(layout).run(q, cache(k, v), return_lse=True)
        assert (o.shape, o.dtype, lse.shape, lse.dtype) == (
            *(q.shape, q.dtype, (4, HEADS), torch.float32),
        )
        for n in (0, 2, 3):
            right = attention_reference(q[n][None, None], keys_of(n, k), keys_of(n, v))
            assert measure_error(o[n][None, None], right.expected["o"]).within(right.bounds["o"])
            natural = (lse[n] * math.log(2))[None, :, None]
            error = measure_error(natural, right.expected["lse"])
            assert error.within(right.bounds["lse"])
        assert not o[1].any() and (lse[1] == -math.inf).all()

    def test_options_are_those_of_decode(self, attended):
        q, cache, sinks = randn(4, HEADS, D_HEAD), make_cache(), randn(HEADS)
        wrapper = self.planned(window_left=5, logits_soft_cap=30.0, sm_scale=0.2)
        version = q._version
        wrapper.run(q, cache, sinks=sinks, window_left=5)
        assert torch.equal(attended[0]["sinks"], sinks) and q._version == version
        assert torch.equal(attended[0]["cache_seqlens"], int32(*LENGTHS))

    def test_of_a_window_and_a_softcap_is_that_of_decode(self):
        q, (k, v) = randn(4, HEADS, D_HEAD), make_cache()
        wrapper = self.planned(window_left=5, logits_soft_cap=3.0, sm_scale=0.5)
        options = {"window_size": (5, -1), "softcap": 3.0, "softmax_scale": 0.5}
        o = wrapper.run(q, (k, v))
        for n in (0, 2):
            own = decode(q[n][None, None], keys_of(n, k), keys_of(n, v), **options)
            assert torch.equal(o[n][None, None], own)
        assert not torch.equal(o, self.planned().run(q, (k, v)))

    def test_outputs_that_are_given_are_written(self):
        q, cache = randn(4, HEADS, D_HEAD), make_cache()
        out, lse = torch.empty_like(q), torch.empty(4, HEADS)
        wrapper = self.planned()
        found = wrapper.run(q, cache, out=out, lse=lse, return_lse=True)
        assert found[0] is out and found[1] is lse
        expected = wrapper.run_return_lse(q, cache)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        assert wrapper.run(q, cache, out=out) is out

    def test_a_second_plan_takes_the_place_of_the_first(self, attended):
        wrapper = self.planned()
        wrapper.plan(int32(0, 1), int32(4), int32(2), *SIZES, data_type="bfloat16")
        q, cache = randn(1, HEADS, D_HEAD).bfloat16(), [x.bfloat16() for x in make_cache()]
        wrapper.run(q, cache)
        assert attended[0]["block_table"].tolist() == [[4]]
        assert attended[0]["cache_seqlens"].tolist() == [2]

    def test_tables_grow_by_powers_of_two(self, attended):
        wrapper, q, cache = self.planned(), randn(1, HEADS, D_HEAD), make_cache()
        for pages, columns in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8)):
            indices = torch.arange(pages).int()
            wrapper.plan(int32(0, pages), indices, int32(1), *SIZES)
            wrapper.run(q, cache)
            table = attended.pop()["block_table"]
            assert table.shape == (1, columns) and torch.equal(table[0, :pages], indices)

    def test_of_no_pages_at_all(self):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
        wrapper.plan(int32(0, 0, 0), INDICES[:0], int32(0, 0), *SIZES)
        o, lse = wrapper.run(randn(2, HEADS, D_HEAD), make_cache(), return_lse=True)
        assert not o.any() and (lse == -math.inf).all()

    @pytest.mark.slow
    def test_run_reads_no_value(self, attended):
        make_fx: Callable[..., Any] = torch.fx.experimental.proxy_tensor.make_fx
        wrapper = self.planned()
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor
            q, k, v = (fake(x) for x in (randn(4, HEADS, D_HEAD), *make_cache()))
            wrapper._block_table = fake(wrapper._block_table)
            wrapper._cache_seqlens = fake(wrapper._cache_seqlens)
            graph = make_fx(lambda q, k, v: wrapper.run(q, (k, v)))(q, k, v).graph
        assert "flash_attention.decode.default" in str(graph) and attended == []

    def test_is_compiled_whole(self):
        torch._dynamo.reset()
        wrapper, q, cache = self.planned(), randn(4, HEADS, D_HEAD), make_cache()
        compiled = torch.compile(wrapper.run, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q, cache), wrapper.run(q, cache))


class TestPieces:
    """Keys in pieces of a number of pages, or in one."""

    KEYS = (130, 50, 0, 64)  # of sequences

    def run(self, *sequences: int, graph: bool = False, **options: Any) -> Any:
        """Attention of some of the sequences, whose pages are always the same."""
        torch.manual_seed(5)
        q = randn(4, HEADS, D_HEAD)
        k, v = (randn(64, PAGE_SIZE, KV_HEADS, D_HEAD) for _ in range(2))
        pages = [-(-self.KEYS[n] // PAGE_SIZE) for n in sequences]
        begins = [sum(-(-x // PAGE_SIZE) for x in self.KEYS[:n]) for n in sequences]
        indices = [
            63 - page for n, x in zip(begins, pages, strict=True) for page in range(n, n + x)
        ]
        indptr = int32(0, *itertools.accumulate(pages))
        last = int32(*((self.KEYS[n] - 1) % PAGE_SIZE + 1 for n in sequences))
        buffers = [torch.zeros(n).int() for n in (len(indptr), 64, len(last))] if graph else []
        wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", graph, False, *buffers)
        wrapper.plan(indptr, int32(*indices), last, *SIZES, **options)
        return wrapper.run(q[[*sequences]], (k, v), return_lse=True)

    @pytest.mark.parametrize("options", [{"fixed_split_size": 16}, {"disable_split_kv": True}])
    def test_a_sequence_has_the_same_bits_in_every_batch(self, options):
        together = self.run(0, 1, 2, 3, **options)
        for own, graph in (((0,), False), ((3, 0), True), ((1, 2), False)):
            found = self.run(*own, graph=graph, **options)
            assert all(torch.equal(x[[*own]], y) for x, y in zip(together, found, strict=True))
        assert all(x.isfinite().all() for x in self.run(0, **options))

    def test_are_those_of_decode(self, monkeypatch):
        found: list[dict[str, Any]] = []

        def own(*tensors: torch.Tensor, **options: Any) -> Any:
            found.append(options)
            return decode(*tensors, **options)

        monkeypatch.setattr(flashinfer, "decode", own)
        for options, wanted in (
            ({}, {}),
            ({"fixed_split_size": 32}, {"keys_per_piece": 128}),
            ({"disable_split_kv": True}, {"pieces": 1}),
            ({"disable_split_kv": True, "fixed_split_size": 16}, {"pieces": 1}),  # as FlashInfer
        ):
            self.run(0, **options)
            given = found.pop()
            assert {n: given[n] for n in ("pieces", "keys_per_piece") if n in given} == wanted

    @pytest.mark.parametrize(
        ("size", "error", "message"),
        [
            (0, ValueError, "fixed_split_size 0 is less than 1 page: pass 1 or more, or None"),
            (-1, ValueError, "fixed_split_size -1 is less than 1 page"),
            (True, TypeError, "fixed_split_size is True: pass a number of pages"),
            (2.0, TypeError, r"fixed_split_size is 2\.0: pass a number of pages"),
            (10, ValueError, "keys_per_piece 40 is not a multiple of the 64 keys .*: use 64"),
        ],
    )
    def test_of_no_number_of_pages_are_refused(self, size, error, message):
        with pytest.raises(error, match=message):
            self.run(0, fixed_split_size=size)

    def test_of_prefill_are_one(self):
        wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        plan = (QUERIES, INDPTR, INDICES, LAST, *SIZES)
        with pytest.raises(
            ValueError, match="fixed_split_size 16 is not built: pass None: a thread"
        ):
            wrapper.plan(*plan, fixed_split_size=16)
        q, cache = randn(6, HEADS, D_HEAD), make_cache()
        wrapper.plan(*plan)
        usual = wrapper.run(q, cache)
        wrapper.plan(*plan, disable_split_kv=True)
        assert torch.equal(wrapper.run(q, cache), usual)


class TestGraphs:
    """With use_cuda_graph a plan is written to the memory that a captured run reads."""

    def wrapper(self, **options: Any) -> BatchDecodeWithPagedKVCacheWrapper:
        self.buffers = torch.zeros(5).int(), torch.zeros(8).int(), torch.zeros(4).int()
        return BatchDecodeWithPagedKVCacheWrapper(
            *(WORKSPACE, "NHD", True, False, *self.buffers), **options
        )

    def test_each_plan_is_in_the_same_memory(self, attended):
        wrapper = self.wrapper()
        assert wrapper.is_cuda_graph_enabled
        q, cache = randn(4, HEADS, D_HEAD), make_cache()
        wrapper.plan(INDPTR, INDICES, LAST, *SIZES)
        wrapper.run(q, cache)
        table, lengths = (attended[0][name] for name in ("block_table", "cache_seqlens"))
        assert table.shape == (4, 8) and table[2].tolist()[:3] == [0, 5, 3]
        assert lengths.tolist() == list(LENGTHS)
        for buffer, x in zip(self.buffers, (INDPTR, INDICES, LAST), strict=True):
            assert torch.equal(buffer[: len(x)], x)
        wrapper.plan(int32(0, 0, 1, 1, 5), int32(8, 4, 3, 2, 1), int32(0, 2, 0, 3), *SIZES)
        assert lengths.tolist() == [0, 2, 0, 15]  # the tensors that the first run was given
        assert table[1, 0] == 8 and table[3].tolist() == [4, 3, 2, 1, 0, 0, 0, 0]

    def test_the_result_is_that_without_graphs(self):
        q, cache = randn(4, HEADS, D_HEAD), make_cache()
        wrapper = self.wrapper(max_pages_per_sequence=3)
        wrapper.plan(INDPTR, INDICES, LAST, *SIZES)
        other = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
        other.plan(INDPTR, INDICES, LAST, *SIZES)
        assert torch.equal(wrapper.run(q, cache), other.run(q, cache))

    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            ((int32(0, 1), int32(0), int32(1)), "indptr is for 1 sequences and .* for 4: pass 4"),
            (
                (int32(0, 9, 9, 9, 9), torch.zeros(9).int(), int32(1, 0, 0, 0)),
                "9 pages, up to 9 of a sequence, and there are buffers for 8 and 3: make another",
            ),
            (
                (int32(0, 4, 4, 4, 4), torch.zeros(4).int(), int32(1, 0, 0, 0)),
                "4 pages, up to 4 of a sequence, and there are buffers for 8 and 3: make another",
            ),
        ],
    )
    def test_a_plan_for_more_is_refused(self, plan, message):
        wrapper = self.wrapper(max_pages_per_sequence=3)
        with pytest.raises(ValueError, match=message):
            wrapper.plan(*plan, *SIZES)
        assert not any(buffer.any() for buffer in self.buffers)

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"paged_kv_indptr_buffer": None}, ValueError, "paged_kv_indptr_buffer is None with u"),
            ({"paged_kv_indices_buffer": LAST.long()}, ValueError,
             r"paged_kv_indices_buffer is torch\.int64 \(4,\) on cpu: pass torch\.int32"),
            ({"paged_kv_last_page_len_buffer": LAST[:3]}, ValueError, "paged_kv_indptr_buffer has 5"
             " elements and paged_kv_last_page_len_buffer 3: pass"),
            ({"max_pages_per_sequence": 0}, ValueError, "0 pages are the most of a sequence: pass"),
            ({"paged_kv_indptr_buffer": 3}, TypeError, "paged_kv_indptr_buffer is a int: pass"),
        ],
    )  # fmt: skip
    def test_buffers_that_do_not_fit_are_refused(self, changes, error, message):
        buffers = {
            "paged_kv_indptr_buffer": INDPTR,
            "paged_kv_indices_buffer": INDICES,
            "paged_kv_last_page_len_buffer": LAST,
        }
        with pytest.raises(error, match=message):
            BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True, **buffers | changes)


# Queries of the four sequences.
QUERIES = int32(0, 3, 4, 4, 6)


class TestPrefill:
    def planned(self, layout: str = "NHD", **options: Any) -> BatchPrefillWithPagedKVCacheWrapper:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
        wrapper.plan(QUERIES, INDPTR, INDICES, LAST, *SIZES, **options)
        return wrapper

    @pytest.mark.parametrize("form", FORMS)
    def test_gathers_the_keys_of_all_sequences(self, monkeypatch, form):
        found: list[tuple[Any, ...]] = []

        def varlen(*tensors: Any, **options: Any) -> Any:
            found.append((*tensors, options))
            return tensors[0] + 1, torch.full((HEADS, 6), math.log(2))

        monkeypatch.setattr(flashinfer, "varlen_attention", varlen)
        layout, cache = FORMS[form]
        (k, v), q = make_cache(), randn(6, HEADS, D_HEAD)
        options = {"causal": True, "window_left": 3, "logits_soft_cap": 2.0, "sm_scale": 0.1}
        wrapper = self.planned(layout, **options)
        out, lse = torch.empty_like(q), torch.empty(6, HEADS)
        o, of_o = wrapper.run(q, cache(k, v), return_lse=True, out=out, lse=lse)
        assert o is out and torch.equal(o, q + 1)
        assert of_o is lse and torch.equal(lse, torch.ones(6, HEADS))
        ((own_q, keys, values, *lengths, given),) = found
        assert own_q is q
        for x, rows in ((k, keys), (v, values)):
            assert torch.equal(rows, torch.cat([keys_of(n, x)[0] for n in range(4)]))
        begins_q, begins_k, *longest = lengths
        assert torch.equal(begins_q, QUERIES) and torch.equal(begins_k, int32(0, 7, 7, 19, 20))
        assert longest == [3, 12]
        assert given == {
            **{"causal": True, "sinks": None, "return_lse": True},
            **{"window_size": (3, -1), "softcap": 2.0, "softmax_scale": 0.1},
        }

    @pytest.mark.slow
    def test_is_attention_on_the_pages_of_each_sequence(self):
        torch.manual_seed(5)
        q = (torch.randn(6, HEADS, D_HEAD) + 0.1).half()
        k, v = make_cache()
        o, lse = self.planned(causal=True).run(q, (k, v), return_lse=True)
        for n in (0, 3):
            rows = slice(QUERIES[n], QUERIES[n + 1])
            own = q[rows][None]
            right = attention_reference(own, keys_of(n, k), keys_of(n, v), causal=True)
            assert measure_error(o[rows][None], right.expected["o"]).within(right.bounds["o"])
            natural = (lse[rows].T * math.log(2))[None]
            assert measure_error(natural, right.expected["lse"]).within(right.bounds["lse"])
        assert not o[3].any() and (lse[3] == -math.inf).all()  # of the one without pages

    def test_of_no_pages_at_all(self):
        wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        wrapper.plan(int32(0, 2, 2), int32(0, 0, 0), INDICES[:0], int32(0, 0), *SIZES)
        o, lse = wrapper.run_return_lse(randn(2, HEADS, D_HEAD), make_cache())
        assert not o.any() and (lse == -math.inf).all()


class TestPrefillGraphs:
    """With use_cuda_graph a plan of prefill is written to the memory that a captured run reads."""

    def wrapper(self) -> BatchPrefillWithPagedKVCacheWrapper:
        sizes = (5, 5, 8, 4)
        self.buffers = tuple(torch.full((n,), 99).int() for n in sizes)
        return BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *self.buffers)

    @pytest.mark.slow
    def test_the_result_is_that_without_graphs(self):
        torch.manual_seed(6)
        q, cache = randn(6, HEADS, D_HEAD), make_cache()
        wrapper, other = self.wrapper(), BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        assert wrapper.is_cuda_graph_enabled and not other.is_cuda_graph_enabled
        for each in (wrapper, other):
            each.plan(QUERIES, INDPTR, INDICES, LAST, *SIZES, causal=True)
        assert torch.equal(wrapper.run(q, cache), other.run(q, cache))

    def test_each_plan_is_in_the_same_memory(self):
        wrapper = self.wrapper()
        wrapper.plan(QUERIES, INDPTR, INDICES, LAST, *SIZES)
        page, key = wrapper._places
        begins_q, begins_k = wrapper._begins
        assert len(page) == len(key) == 8 * PAGE_SIZE
        assert page[:9].tolist() == [7, 7, 7, 7, 2, 2, 2, 0, 0] and page[20:].any() == 0
        assert key[:9].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
        for buffer, x in zip(self.buffers, (QUERIES, INDPTR, INDICES, LAST), strict=True):
            assert torch.equal(buffer[: len(x)], x)
        last = int32(0, 2, 4, 0)
        wrapper.plan(int32(0, 1, 1, 2, 2), int32(0, 0, 1, 2, 2), int32(8, 4), last, *SIZES)
        assert wrapper._places == (page, key) and wrapper._begins == (begins_q, begins_k)
        assert begins_q.tolist() == [0, 1, 1, 2, 2]
        assert begins_k.tolist() == [0, 0, 2, 6, 6]
        assert page[:7].tolist() == [8, 8, 4, 4, 4, 4, 0] and not page[7:].any()

    @pytest.mark.parametrize(
        ("plan", "page_size", "message"),
        [
            ((int32(0, 7, 7, 7, 7), INDPTR, INDICES, LAST), 4, "7 rows of q and page_size 4, and "
             "the first plan had 6 and 4: plan the most rows first"),
            ((QUERIES, INDPTR, INDICES, LAST), 8, "6 rows of q and page_size 8, and"),
            ((int32(0, 3), int32(0, 1), int32(2), int32(1)), 4, "1 sequences with 1 pages, and ther"
             "e are buffers for 4 and 8: pass that batch"),
            ((QUERIES, int32(0, 9, 9, 9, 9), torch.zeros(9).int(), LAST), 4, "4 sequences with 9 pa"
             "ges, and there are buffers for 4 and 8"),
        ],
    )  # fmt: skip
    def test_a_plan_for_more_is_refused(self, plan, page_size, message):
        wrapper = self.wrapper()
        wrapper.plan(QUERIES, INDPTR, INDICES, LAST, *SIZES)
        before = [buffer.clone() for buffer in self.buffers]
        with pytest.raises(ValueError, match=message):
            wrapper.plan(*plan, *SIZES[:3], page_size)
        assert all(map(torch.equal, before, self.buffers))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"qo_indptr_buf": None}, "qo_indptr_buf is None with use_cuda_graph: pass an int32"),
            ({"qo_indptr_buf": LAST}, "qo_indptr_buf has 4 elements and paged_kv_last_page_len"),
            ({"paged_kv_indptr_buf": LAST}, "paged_kv_indptr_buf has 4 elements and paged"),
            ({"paged_kv_indices_buf": LAST.long()}, r"paged_kv_indices_buf is torch\.int64"),
        ],
    )  # fmt: skip
    def test_buffers_that_do_not_fit_are_refused(self, changes, message):
        buffers = {
            **{"qo_indptr_buf": QUERIES, "paged_kv_indptr_buf": INDPTR},
            **{"paged_kv_indices_buf": INDICES, "paged_kv_last_page_len_buf": LAST},
        }
        with pytest.raises(ValueError, match=message):
            BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True, **buffers | changes)


# -- refusals --------------------------------------------------------------------------------------

DECODE = {
    **{"indptr": INDPTR, "indices": INDICES, "last_page_len": LAST, "num_qo_heads": HEADS},
    **{"num_kv_heads": KV_HEADS, "head_dim": D_HEAD, "page_size": PAGE_SIZE},
}
PREFILL = {
    **{"qo_indptr": QUERIES, "paged_kv_indptr": INDPTR, "paged_kv_indices": INDICES},
    **{"paged_kv_last_page_len": LAST, "num_qo_heads": HEADS, "num_kv_heads": KV_HEADS},
    **{"head_dim_qk": D_HEAD, "page_size": PAGE_SIZE},
}


class TestPlanRefuses:
    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"page_size": 0}, ValueError, "page_size 0 is less than 1: pass 1 or more"),
            ({"page_size": 4.0}, TypeError, r"page_size is 4\.0: pass an int"),
            ({"num_kv_heads": 3}, ValueError, "num_qo_heads 4 is not a multiple of num_kv_heads 3"),
            ({"num_kv_heads": 0}, ValueError, "num_kv_heads 0 is less than 1"),
            ({"window_left": -2}, ValueError, r"window_size is \(-2, -1\), and a bound"),
            ({"logits_soft_cap": "1"}, TypeError, "softcap is '1': pass a number"),
            ({"sm_scale": "1"}, TypeError, "softmax_scale is '1': pass a number"),
            ({"q_data_type": "float8_e4m3fn"}, ValueError, "q_data_type float8_e4m3fn is not built:"
             r" pass torch\.float16 or torch\.bfloat16"),
            ({"q_data_type": torch.float32}, ValueError, r"q_data_type torch\.float32 is not buil"),
            ({"kv_data_type": "bfloat16"}, ValueError,
             r"kv_data_type bfloat16 is not q_data_type torch\.float16: pass None"),
            ({"o_data_type": torch.bfloat16}, ValueError, r"o_data_type torch\.bfloat16 is not q_"),
            ({"pos_encoding_mode": "ROPE_LLAMA"}, ValueError, "pos_encoding_mode 'ROPE_LLAMA' is no"
             "t built: pass 'NONE', and rotate"),
            ({"disable_split_kv": 0}, TypeError, "disable_split_kv is 0: pass True or False"),
            ({"block_tables": INDICES}, ValueError, "block_tables is not built: pass None"),
            ({"seq_lens": LAST}, ValueError, "seq_lens is not built: pass None"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
    )  # fmt: skip
    @pytest.mark.parametrize("is_prefill", [False, True])
    def test_what_is_not_built_or_no_size(self, changes, error, message, is_prefill):
        kind, usual = BatchDecodeWithPagedKVCacheWrapper, DECODE
        if is_prefill:
            kind, usual = BatchPrefillWithPagedKVCacheWrapper, PREFILL
        wrapper = kind(WORKSPACE)
        with pytest.raises(error, match=message):
            wrapper.plan(**{**usual, **changes})
        with pytest.raises(RuntimeError, match=r"run\(\) without a plan: call plan\(\) before"):
            wrapper.run(randn(4, HEADS, D_HEAD), make_cache())

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"indptr": INDPTR.long()}, TypeError, r"{}indptr is torch\.int64: convert it with \."),
            ({"indptr": INDPTR[None]}, ValueError, r"{}indptr has 2 dimensions, shape \(1, 5\)"),
            ({"indptr": INDPTR[:0]}, ValueError, r"{}indptr has shape \(0,\): pass \(batch \+ 1,"),
            ({"indptr": INDPTR + 1}, ValueError, "{}indptr begins with 1: pass 0 first"),
            ({"indptr": int32(0, 3, 2, 5, 6)}, ValueError, "{}indptr falls from 3 to 2 at sequenc"),
            ({"indptr": [0]}, TypeError, r"{}indptr is a list: pass a torch\.Tensor"),
            ({"indices": INDICES[:5]}, ValueError, "{0}indptr ends with 6 and {0}indices has 5 pa"),
            ({"indices": INDICES.long()}, TypeError, r"{}indices is torch\.int64 \(6,\): pass tor"),
            ({"indices": INDICES[None]}, TypeError, r"{}indices is torch\.int32 \(1, 6\): pass"),
            ({"last_page_len": LAST.long()}, TypeError, r"{}last_page_len is torch\.int64: conver"),
            ({"last_page_len": LAST[:3]}, ValueError, "{0}last_page_len has 3 elements and {0}ind"),
            ({"last_page_len": int32(3, 0, 5, 1)}, ValueError,
             "{}last_page_len 5 of sequence 2 is not from 1 to page_size 4: pass the keys in"),
            ({"last_page_len": int32(0, 0, 4, 1)}, ValueError, "{}last_page_len 0 of sequence 0 i"),
            ({"last_page_len": None}, TypeError, "{}last_page_len is a NoneType: pass"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
    )  # fmt: skip
    @pytest.mark.parametrize("is_prefill", [False, True])
    def test_tables_that_do_not_fit(self, changes, error, message, is_prefill):
        prefix = "paged_kv_" * is_prefill
        changes = {f"{prefix}{name}": value for name, value in changes.items()}
        with pytest.raises(error, match=message.format(prefix)):
            if is_prefill:
                BatchPrefillWithPagedKVCacheWrapper(WORKSPACE).plan(**{**PREFILL, **changes})
            else:
                BatchDecodeWithPagedKVCacheWrapper(WORKSPACE).plan(**{**DECODE, **changes})

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"qo_indptr": QUERIES.long()}, TypeError, r"qo_indptr is torch\.int64"),
            ({"qo_indptr": QUERIES + 1}, ValueError, "qo_indptr begins with 1: pass 0 first"),
            ({"qo_indptr": QUERIES[:4]}, ValueError, "qo_indptr has 4 elements and .*indptr 5: pa"),
            ({"causal": 1}, TypeError, "causal is 1: pass True or False"),
            ({"custom_mask": INDICES}, ValueError, "custom_mask is not built: pass None, or call"),
            ({"packed_custom_mask": INDICES}, ValueError, "packed_custom_mask is not built"),
            ({"use_fp16_qk_reduction": True}, ValueError, "use_fp16_qk_reduction True is not buil"),
            ({"head_dim_vo": 128}, ValueError, "head_dim_vo 128 is not head_dim_qk 64: pad"),
        ],
    )  # fmt: skip
    def test_what_prefill_alone_takes(self, changes, error, message):
        with pytest.raises(error, match=message):
            BatchPrefillWithPagedKVCacheWrapper(WORKSPACE).plan(**{**PREFILL, **changes})


class TestRunRefuses:
    """What does not fit the plan is refused before a kernel runs."""

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"q": randn(3, 4, 64)}, ValueError,
             r"q has shape \(3, 4, 64\) and plan\(\) was for \(4, 4, 64\): call plan\(\) for"),
            ({"q": randn(4, 8, 64)}, ValueError, r"q has shape \(4, 8, 64\) and plan"),
            ({"q": randn(4, 4, 32)}, ValueError, r"q has shape \(4, 4, 32\) and plan"),
            ({"q": randn(4, 4, 64).bfloat16()}, TypeError, r"q is torch\.bfloat16 and plan\(\) wa"),
            ({"q": randn(4, 4, 64).to("meta")}, ValueError, "q is on meta and float_workspace_buf"),
            ({"q": None}, TypeError, r"q is a NoneType: pass a torch\.Tensor"),
            ({"paged_kv_cache": (randn(9, 8, 2, 64),) * 2}, ValueError,
             r"k of paged_kv_cache has shape \(9, 8, 2, 64\) and plan\(\) was for pages of \(4, "),
            ({"paged_kv_cache": (randn(9, 2, 4, 64),) * 2}, ValueError, r"k of paged_kv_cache has"),
            ({"paged_kv_cache": (randn(9, 4, 2, 64), randn(9, 4, 1, 64))}, ValueError, "v of page"),
            ({"paged_kv_cache": randn(9, 4, 2, 64)}, ValueError,
             r"paged_kv_cache has shape \(9, 4, 2, 64\): pass \(pages, 2, \.\.\.\), or a pair"),
            ({"paged_kv_cache": None}, TypeError, "paged_kv_cache is a NoneType: pass a pair of K"),
            ({"paged_kv_cache": (1, 2)}, TypeError, "k of paged_kv_cache is a int"),
            ({"paged_kv_cache": (randn(9, 4, 2, 64).float(),) * 2}, TypeError, r"k is torch\.floa"),
            ({"window_left": 3}, ValueError, r"window_left 3 and plan\(\) was for -1: pass it to"),
            ({"q_scale": 2.0}, ValueError, r"q_scale 2\.0 is not built: pass None, and sm_scale"),
            ({"k_scale": 2.0}, ValueError, r"k_scale 2\.0 is not built"),
            ({"v_scale": 2.0}, ValueError, r"v_scale 2\.0 is not built: pass None, and multiply"),
            ({"return_lse": 1}, TypeError, "return_lse is 1: pass True or False"),
            ({"out": randn(4, 4, 32)}, ValueError, r"out is torch\.float16 \(4, 4, 32\): pass tor"),
            ({"lse": randn(4, 4)}, ValueError, r"lse is torch\.float16 \(4, 4\): pass torch\.floa"),
        ],
    )  # fmt: skip
    def test_names_what_is_wrong(self, attended, changes, error, message):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
        wrapper.plan(**DECODE)
        given = {"q": randn(4, HEADS, D_HEAD), "paged_kv_cache": make_cache(), **changes}
        with pytest.raises(error, match=message):
            wrapper.run(**given)
        assert attended == []

    def test_of_another_layout(self, attended):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "HND")
        wrapper.plan(**DECODE)
        with pytest.raises(
            ValueError, match=r"\(2, 4, 64\): pass \(pages, num_kv_heads, page_size"
        ):
            wrapper.run(randn(4, HEADS, D_HEAD), make_cache())
        assert attended == []


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"kv_layout": "NDH"}, ValueError, "kv_layout 'NDH' is not one of NHD, HND: pass one"),
        ({"backend": "fa3"}, ValueError, "backend 'fa3' is not built: pass 'auto'"),
        ({"jit_args": [1]}, ValueError, r"jit_args \[1\] is not built: pass None"),
        ({"use_cuda_graph": 1}, TypeError, "use_cuda_graph is 1: pass True or False"),
        ({"float_workspace_buffer": 128}, TypeError, "float_workspace_buffer is a int: pass"),
    ],
)
@pytest.mark.parametrize(
    "kind", [BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper]
)
def test_wrappers_that_are_not_made(kind, given, error, message):
    with pytest.raises(error, match=message):
        kind(**{"float_workspace_buffer": WORKSPACE, **given})


# -- levels ----------------------------------------------------------------------------------------

# A prompt of two pages that rows 0 to 2 share, none for row 3; and keys of their own: two pages,
# none, one, one.
LEVELS = (
    [int32(0, 3, 4), int32(0, 1, 2, 3, 4)],
    [int32(0, 2, 2), int32(0, 2, 2, 3, 4)],
    [int32(8, 4), int32(7, 2, 0, 1)],
    [int32(4, 0), int32(3, 0, 4, 1)],
)
PROMPT = [8, 4]
OWN_PAGES, OWN_LENGTHS = ([7, 2], [], [0], [1]), (7, 0, 4, 1)


def keys_of_levels(row: int, x: torch.Tensor) -> torch.Tensor:
    """All keys of a row, (1, keys, kv_heads, d_head)."""
    prompt = x[PROMPT].flatten(0, 1) if row < 3 else x[:0].flatten(0, 1)
    own = x[OWN_PAGES[row]].flatten(0, 1)[: OWN_LENGTHS[row]]
    return torch.cat((prompt, own))[None]


class TestLevels:
    def planned(self, layout: str = "NHD", **options: Any) -> MultiLevelCascadeAttentionWrapper:
        wrapper = MultiLevelCascadeAttentionWrapper(2, WORKSPACE, layout)
        wrapper.plan(*LEVELS, *SIZES, **options)
        return wrapper

    @pytest.mark.parametrize("form", ["NHD, pair", "HND, one"])
    def test_are_attention_on_all_keys_of_a_row(self, form):
        layout, cache = FORMS[form]
        (k, v), q = make_cache(), randn(4, HEADS, D_HEAD)
        o = self.planned(layout).run(q, cache(k, v))
        assert (o.shape, o.dtype) == (q.shape, q.dtype)
        for n in range(4):
            own = keys_of_levels(n, k), keys_of_levels(n, v)
            right = attention_reference(q[n][None, None], *own)
            error = measure_error(o[n][None, None], right.expected["o"])
            assert error.within(right.bounds["o"]), n

    def test_options_are_those_of_attention(self):
        q, (k, v) = randn(4, HEADS, D_HEAD), make_cache()
        o = self.planned(sm_scale=0.5, logits_soft_cap=3.0).run(q, (k, v))
        for n in range(4):
            own = decode(
                q[n][None, None],
                *(keys_of_levels(n, x) for x in (k, v)),
                softmax_scale=0.5,
                softcap=3.0,
            )
            torch.testing.assert_close(o[n][None, None], own, atol=2e-3, rtol=2e-3)

    def test_causal_is_of_the_last_level_alone(self):
        # a prompt of 8 keys, and 3 rows of one request with 3 keys of their own
        wrapper = MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
        every = [int32(0, 3)] * 2, [int32(0, 2), int32(0, 1)], [int32(8, 4), int32(7)]
        wrapper.plan(*every, [int32(4), int32(3)], *SIZES, causal=True)
        q, (k, v) = randn(3, HEADS, D_HEAD), make_cache()
        o = wrapper.run(q, (k, v))
        keys = [torch.cat((x[[8, 4]].flatten(0, 1), x[7][:3]))[None] for x in (k, v)]
        for n in range(3):
            right = attention_reference(q[n][None, None], *(x[:, : 9 + n] for x in keys))
            error = measure_error(o[n][None, None], right.expected["o"])
            assert error.within(right.bounds["o"]), n

    def test_of_one_query_of_each_sequence_are_decoded(self, attended):
        self.planned().run(randn(4, HEADS, D_HEAD), make_cache())
        (own,) = (tensors for tensors in attended if "block_table" in tensors)
        assert own["cache_seqlens"].tolist() == [*OWN_LENGTHS]

    def test_one_level_is_that_of_its_wrapper(self):
        wrapper = MultiLevelCascadeAttentionWrapper(1, WORKSPACE)
        wrapper.plan([int32(0, 1, 2, 3, 4)], [INDPTR], [INDICES], [LAST], *SIZES)
        own = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
        own.plan(INDPTR, INDICES, LAST, *SIZES)
        q, cache = randn(4, HEADS, D_HEAD), make_cache()
        assert torch.equal(wrapper.run(q, cache), own.run(q, cache))

    def test_plans_of_graphs_are_written_to_the_same_memory(self):
        buffers = [[x.clone() for x in own] for own in LEVELS]
        buffers[2] = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
        wrapper = MultiLevelCascadeAttentionWrapper(2, WORKSPACE, "NHD", True, *buffers)
        assert wrapper.is_cuda_graph_enabled
        q, cache = randn(4, HEADS, D_HEAD), make_cache()
        wrapper.plan(*LEVELS, *SIZES)
        assert torch.equal(wrapper.run(q, cache), self.planned().run(q, cache))
        other = [*LEVELS[:2], [int32(8, 4), int32(6, 2, 0, 1)], LEVELS[3]]
        wrapper.plan(*other, *SIZES)
        fresh = MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
        fresh.plan(*other, *SIZES)
        assert torch.equal(wrapper.run(q, cache), fresh.run(q, cache))
        assert buffers[2][1].tolist() == [6, 2, 0, 1]
        several = [[int32(0, 3, 4), int32(0, 2, 2, 3, 4)], *LEVELS[1:]]
        with pytest.raises(ValueError, match="level 1 has several queries of a sequence, and had"):
            wrapper.plan(*several, *SIZES)
        with pytest.raises(RuntimeError, match=r"run\(\) without a plan"):
            wrapper.run(q, cache)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"window_left": 5}, "window_left 5 is not built for levels: pass -1"),
            ({"causal": 1}, "causal"),
            ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode 'ROPE_LLAMA' is not built"),
            ({"q_data_type": "float32"}, "q_data_type float32 is not built"),
        ],
    )
    def test_options_that_are_not_built_are_refused(self, change, reason):
        with pytest.raises((TypeError, ValueError), match=reason):
            self.planned(**change)

    def test_lists_and_rows_that_do_not_fit_are_refused(self):
        wrapper = MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
        with pytest.raises(ValueError, match="has 1 tensors and num_levels is 2: pass one for"):
            wrapper.plan(LEVELS[0][:1], *LEVELS[1:], *SIZES)
        with pytest.raises(ValueError, match="qo_indptr end with 4, 5: pass the rows of q"):
            wrapper.plan([LEVELS[0][0], int32(0, 1, 2, 3, 5)], *LEVELS[1:], *SIZES)
        with pytest.raises(RuntimeError, match=r"run\(\) without a plan: call plan\(\) before"):
            wrapper.run(randn(4, HEADS, D_HEAD), make_cache())
        for levels in (0, True, 1.0):
            with pytest.raises(ValueError, match=f"num_levels {levels!r}: pass 1 or more"):
                MultiLevelCascadeAttentionWrapper(levels, WORKSPACE)
        with pytest.raises(ValueError, match="kv_layout 'HDN' is not one of NHD, HND"):
            MultiLevelCascadeAttentionWrapper(1, WORKSPACE, "HDN")
        with pytest.raises(ValueError, match="qo_indptr_buf_arr is None and num_levels is 1"):
            MultiLevelCascadeAttentionWrapper(1, WORKSPACE, use_cuda_graph=True)
