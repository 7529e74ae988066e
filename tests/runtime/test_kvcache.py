"""flash_attn_with_kvcache: what it appends, rotates and computes, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_attention import decode, flash_attn, flash_attn_3

BATCH, ROOM, KV_HEADS, D_HEAD = 3, 24, 2, 64
LENGTHS = (5, 0, 23)
FUNCTIONS: list[Callable[..., Any]] = [
    flash_attn.flash_attn_with_kvcache,
    flash_attn_3.flash_attn_with_kvcache,
]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values or LENGTHS).int()


class Case:
    """Queries, new keys and values, and caches of K and V: `new` of each, at any strides."""

    def __init__(self, *shape: int, new: int = 1, batch: int = BATCH) -> None:
        torch.manual_seed(1)
        self.q = randn(batch, new, 4, D_HEAD)
        self.k, self.v = (randn(batch, new, KV_HEADS, D_HEAD) for _ in range(2))
        shape = (*(shape or (batch, ROOM)), KV_HEADS, D_HEAD)
        self.k_cache, self.v_cache = (randn(*shape) for _ in range(2))

    def run(self, function: Callable[..., Any] = FUNCTIONS[0], **options: Any) -> Any:
        q, caches, new = self.q, (self.k_cache, self.v_cache), {"k": self.k, "v": self.v}
        return function(q, *caches, **{**new, **options})

    def appended(
        self, begins: torch.Tensor, place: Callable[[int, int], tuple[int, int] | None]
    ) -> list[torch.Tensor]:
        """Copies of both caches with the new rows written one by one. place: row and key in the
        cache of a sequence's key, None for none."""
        found = []
        for x, cache in ((self.k, self.k_cache), (self.v, self.v_cache)):
            cache = cache.clone()
            for b, begin in enumerate(begins.tolist()):
                for i in range(x.shape[1]):
                    if at := place(b, begin + i):
                        cache[at] = x[b, i]
            found.append(cache)
        return found


def in_own_row(b: int, key: int) -> tuple[int, int] | None:
    return (b, key) if 0 <= key < ROOM else None


TABLE = torch.tensor([[7, 2, 4], [0, 99, -3], [5, 1, 3]]).int()
PAGES, PAGE_SIZE = 8, 8


def in_pages(b: int, key: int) -> tuple[int, int] | None:
    if not 0 <= key < PAGE_SIZE * TABLE.shape[1]:
        return None
    page = int(TABLE[b, key // PAGE_SIZE])
    return (page, key % PAGE_SIZE) if 0 <= page < PAGES else None


class TestAppend:
    """New rows are written in place, all of them, and nothing else."""

    def assert_appends(self, case: Case, expected: list[torch.Tensor], **options: Any) -> None:
        version = case.k_cache._version
        case.run(**options)
        assert torch.equal(case.k_cache, expected[0]) and torch.equal(case.v_cache, expected[1])
        assert case.k_cache._version > version

    @pytest.mark.parametrize("new", [1, 2, 5])
    def test_behind_the_keys_of_each_sequence(self, attended, new):
        case = Case(new=new)  # the last has room for one more
        self.assert_appends(
            case, case.appended(lengths(), in_own_row), cache_seqlens=lengths(), causal=True
        )
        (tensors,) = attended
        assert torch.equal(tensors["cache_seqlens"], lengths() + new)

    def test_of_equal_lengths_by_one_int(self, attended):
        case = Case()
        self.assert_appends(case, case.appended(lengths(4, 4, 4), in_own_row), cache_seqlens=4)
        assert attended[0]["cache_seqlens"].tolist() == [5, 5, 5]

    @pytest.mark.parametrize("begins", [(24, 40, 2**31 - 9), (-3, -1, -2)])
    def test_of_sequences_without_room_writes_nothing(self, attended, begins):
        case = Case()
        before = case.k_cache.clone(), case.v_cache.clone()
        expected = case.appended(lengths(*begins), in_own_row)
        assert torch.equal(expected[0], before[0])
        self.assert_appends(case, expected, cache_seqlens=lengths(*begins))

    def test_to_rows_that_sequences_choose(self, attended):
        case, rows = Case(5, ROOM, new=2), lengths(4, 1, 2)
        expected = case.appended(
            lengths(), lambda b, key: (int(rows[b]), key) if key < 24 else None
        )
        self.assert_appends(case, expected, cache_seqlens=lengths(), cache_batch_idx=rows)

    def test_to_rows_that_do_not_exist_writes_nothing_there(self, attended):
        case, rows = Case(2, ROOM), lengths(-1, 1, 2)
        expected = case.appended(lengths(), lambda b, key: (1, key) if b == 1 else None)
        self.assert_appends(case, expected, cache_seqlens=lengths(), cache_batch_idx=rows)

    @pytest.mark.parametrize("new", [1, 2, 9])
    @pytest.mark.parametrize("begins", [(5, 0, 23), (7, 8, 15), (24, 16, 8)])
    def test_to_pages(self, attended, new, begins):
        case = Case(PAGES, PAGE_SIZE, new=new)  # some entries name no page
        self.assert_appends(
            case,
            case.appended(lengths(*begins), in_pages),
            cache_seqlens=lengths(*begins),
            block_table=TABLE,
        )

    def test_to_pages_with_heads_before_keys(self, attended):
        case = Case(PAGES, PAGE_SIZE, new=3)
        memory = [x.transpose(1, 2).contiguous() for x in (case.k_cache, case.v_cache)]
        expected = case.appended(lengths(), in_pages)
        case.k_cache, case.v_cache = (x.transpose(1, 2) for x in memory)
        self.assert_appends(case, expected, cache_seqlens=lengths(), block_table=TABLE)
        assert torch.equal(memory[0].transpose(1, 2), expected[0])

    def test_to_keys_and_values_in_one_tensor(self, attended):
        case = Case()
        both = torch.stack((case.k_cache, case.v_cache), 1)
        expected = case.appended(lengths(), in_own_row)
        case.k_cache, case.v_cache = both.unbind(1)
        self.assert_appends(case, expected, cache_seqlens=lengths())
        assert torch.equal(both[:, 1], expected[1])

    def test_of_no_new_keys_leaves_all(self, attended):
        case = Case(new=0)
        case.q = randn(BATCH, 1, 4, D_HEAD)
        expected = [case.k_cache.clone(), case.v_cache.clone()]
        case.run(cache_seqlens=lengths())
        assert torch.equal(case.k_cache, expected[0])
        assert torch.equal(attended[0]["cache_seqlens"], lengths())

    def test_without_new_keys_reads_what_is_there(self, attended):
        case = Case()
        for given, found in ((lengths(), lengths()), (7, lengths(7, 7, 7)), (None, None)):
            case.run(k=None, v=None, cache_seqlens=given)
            seen = attended.pop().get("cache_seqlens")
            assert seen is found or torch.equal(seen, found)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_result_is_that_of_decode_on_the_cache_that_it_leaves(function):
    options = {"causal": True, "window_size": (9, -1), "softcap": 3.0, "softmax_scale": 0.2}
    case = Case(new=2)
    o, lse = case.run(function, cache_seqlens=lengths(), return_softmax_lse=True, **options)
    caches = case.k_cache, case.v_cache
    right = decode(case.q, *caches, cache_seqlens=lengths() + 2, return_lse=True, **options)
    assert torch.equal(o, right[0]) and torch.equal(lse, right[1])
    assert torch.equal(case.run(function, cache_seqlens=lengths(), **options), o)
    not_causal = case.run(function, cache_seqlens=lengths())
    assert torch.equal(
        not_causal, decode(case.q, *caches, cache_seqlens=lengths() + 2, causal=False)
    )
    assert not torch.equal(not_causal, o)


def test_num_splits_is_the_number_of_pieces():
    case = Case()
    for splits, pieces in ((0, 0), (1, 1), (3, 3)):
        both = (
            case.run(function, k=None, v=None, num_splits=splits, return_softmax_lse=True)
            for function in FUNCTIONS
        )
        own = decode(
            *(case.q, case.k_cache, case.v_cache), pieces=pieces, causal=False, return_lse=True
        )
        assert all(torch.equal(x, y) for found in both for x, y in zip(found, own, strict=True))


def test_the_result_on_pages_is_that_on_their_keys_side_by_side():
    table = torch.tensor([[7, 2, 4], [0, 6, 99], [5, 1, 3]]).int()
    paged = Case(PAGES, PAGE_SIZE, new=2)
    rows = torch.stack([paged.k_cache[row].flatten(0, 1) for row in table.clamp(max=7).long()])
    values = torch.stack([paged.v_cache[row].flatten(0, 1) for row in table.clamp(max=7).long()])
    o = paged.run(cache_seqlens=lengths(), block_table=table, causal=True)
    flat = Case(new=2)
    flat.k_cache, flat.v_cache = rows, values
    assert torch.equal(o, flat.run(cache_seqlens=lengths(), causal=True))
    third = flash_attn_3.flash_attn_with_kvcache
    again = paged.run(third, cache_seqlens=lengths(), page_table=table, causal=True)
    assert torch.equal(o, again)


# -- rotary embedding ------------------------------------------------------------------------------


def turned(x: torch.Tensor, angles: torch.Tensor, positions: list[int], interleaved: bool) -> Any:
    """x, (seq, heads, d_head), turned by complex numbers in float64. angles: (positions, pairs)."""
    pairs = angles.shape[1]
    own = x.double()
    first = own[..., : 2 * pairs]
    of_pairs = first.unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    if not interleaved:
        of_pairs = of_pairs.transpose(-1, -2)
    factor = torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    found = torch.view_as_real(torch.view_as_complex(of_pairs.contiguous()) * factor)
    if not interleaved:
        found = found.transpose(-1, -2)
    return torch.cat((found.flatten(-2), own[..., 2 * pairs :]), -1)


class TestRotary:
    @pytest.mark.parametrize("interleaved", [True, False])
    @pytest.mark.parametrize("pairs", [1, 8, D_HEAD // 2])
    @pytest.mark.parametrize(
        "options", [{}, {"causal": True}, {"window_size": (4, -1)}], ids=["all", "causal", "local"]
    )
    def test_turns_keys_and_queries_at_their_positions(self, attended, interleaved, pairs, options):
        case, angles = Case(new=2), torch.randn(ROOM, pairs, dtype=torch.float64)
        tables = {"rotary_cos": angles.cos().float(), "rotary_sin": angles.sin().float()}
        case.run(cache_seqlens=lengths(), rotary_interleaved=interleaved, **tables, **options)
        for b, begin in enumerate((5, 0, 22)):
            if b == 2:  # its second key has no place
                continue
            positions = [begin, begin + 1]
            expected = turned(case.k[b], angles, positions, interleaved).bfloat16()
            torch.testing.assert_close(case.k_cache[b, begin : begin + 2], expected)
            assert torch.equal(case.v_cache[b, begin : begin + 2], case.v[b])
            of_q = positions if options else [begin, begin]
            expected = turned(case.q[b], angles, of_q, interleaved).bfloat16()
            torch.testing.assert_close(attended[0]["q"][b], expected)

    def test_of_positions_of_their_own(self, attended):
        case, angles = Case(), torch.randn(ROOM, 8, dtype=torch.float64)
        tables = {"rotary_cos": angles.cos().float(), "rotary_sin": angles.sin().float()}
        function = flash_attn_3.flash_attn_with_kvcache
        own = lengths(3, 20, 1)
        case.run(function, cache_seqlens=lengths(), rotary_seqlens=own, **tables)
        for b, begin in enumerate(LENGTHS):
            expected = turned(case.k[b], angles, [int(own[b])], True).bfloat16()
            torch.testing.assert_close(case.k_cache[b, begin : begin + 1], expected)


# -- under torch.compile ---------------------------------------------------------------------------


def test_compiled_code_appends_rotates_and_attends():
    def function(case: Case, begins: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        new = case.k, case.v
        return flash_attn.flash_attn_with_kvcache(
            *(case.q, case.k_cache, case.v_cache, *new, *tables, begins), causal=True
        )

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    tables = torch.randn(2, ROOM, 8).unbind()
    eager, traced = Case(new=2), Case(new=2)
    for begins in (lengths(), lengths(1, 2, 3)):
        o = function(eager, begins, *tables)
        assert torch.equal(compiled(traced, begins, *tables), o)
        assert torch.equal(traced.k_cache, eager.k_cache)
        assert torch.equal(traced.v_cache, eager.v_cache)


def test_lengths_are_not_read_while_it_is_traced():
    def function(
        q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, begins: Any, table: Any
    ) -> Any:
        return flash_attn.flash_attn_with_kvcache(
            *(q, k_cache, v_cache, k, v), cache_seqlens=begins, block_table=table
        )

    make_fx: Callable[..., Any] = torch.fx.experimental.proxy_tensor.make_fx
    case = Case(PAGES, PAGE_SIZE)
    given = case.q, case.k_cache, case.v_cache, case.k, case.v, lengths(), TABLE
    with torch._subclasses.FakeTensorMode() as mode:  # which has no values to read
        graph = make_fx(function)(*map(mode.from_tensor, given)).graph
    names = [str(node.target) for node in graph.nodes if "flash_attention" in str(node.target)]
    assert names == ["flash_attention.append.default", "flash_attention.decode.default"]


@pytest.mark.slow
def test_the_append_is_what_torch_expects_of_an_operator():
    case = Case(PAGES, PAGE_SIZE, new=2)
    given = case.k, case.v, lengths(), TABLE, None, case.k_cache, case.v_cache
    torch.library.opcheck(torch.ops.flash_attention.append.default, given)


# -- refusals --------------------------------------------------------------------------------------

COS = torch.ones(ROOM, 8)


@pytest.mark.parametrize("function", FUNCTIONS)
class TestRefusal:
    """Refused before anything is written."""

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"v": None}, ValueError, "k is given and v is None: pass both, or neither"),
            ({"k": None}, ValueError, "v is given and k is None: pass both"),
            ({"k": 1.0}, TypeError, r"k is a float: pass a torch\.Tensor"),
            ({"cache_seqlens": None}, ValueError, "k and v are given and cache_seqlens is None: p"),
            ({"cache_seqlens": True}, TypeError, "cache_seqlens is True: pass an int, or an int32"),
            ({"cache_seqlens": lengths().long()}, TypeError, r"cache_seqlens is torch\.int64: con"),
            ({"cache_seqlens": lengths(1)}, ValueError, r"cache_seqlens has shape \(1,\): pass \("),
            ({"cache_seqlens": lengths().to("meta")}, ValueError, "cache_seqlens is on meta and q"),
            ({"cache_batch_idx": lengths().long()}, TypeError, r"cache_batch_idx is torch\.int64"),
            ({"cache_batch_idx": lengths(1, 2)}, ValueError, r"cache_batch_idx has shape \(2,\): "),
            ({"k": randn(3, 1, 2, 32)}, ValueError, r"k has shape \(3, 1, 2, 32\) and k_cache \(3"),
            ({"k": randn(3, 1, 4, 64)}, ValueError, r"k has shape \(3, 1, 4, 64\) and k_cache"),
            ({"v": randn(3, 2, 2, 64)}, ValueError, r"v has shape \(3, 2, 2, 64\) and k \(3, 1, 2"),
            ({"k": randn(1, 2, 64)}, ValueError, r"k has shape \(1, 2, 64\).*\(batch, seq, kv_hea"),
            ({"k": randn(3, 1, 2, 64).half()}, TypeError, r"k_cache is .* and k torch\.float16"),
            ({"v_cache": randn(3, 9, 2, 64)}, ValueError, "v_cache has shape .*: pass equal ones"),
            ({"k_cache": randn(3, 2, 64)}, ValueError, r"k_cache has 3 dimensions.*\(batch, room,"),
            ({"k_cache": randn(2, 24, 2, 64), "v_cache": randn(2, 24, 2, 64)}, ValueError,
             "k_cache has shape .*: pass a row for each sequence, or cache_batch_idx"),
            ({"k_cache": randn(1, 24, 2, 64).expand(3, -1, -1, -1)}, ValueError, "k_cache has strid"
             r"es .* share memory, and k is written to it: pass a tensor that is not expanded"),
            ({"num_splits": -1}, ValueError, "num_splits -1 is not from 0, for the kernel's cho"),
            ({"num_splits": 2.0}, TypeError, r"num_splits is 2\.0: pass a whole number, or 0 for"),
            ({"num_splits": 65536}, ValueError, "num_splits 65536 is not from 0, .* to 65535, the"),
            ({"cache_leftpad": lengths()}, ValueError, "cache_leftpad is not built: pass None, an"),
            ({"causal": 1}, TypeError, "causal is 1: pass True or False"),
            ({"return_softmax_lse": 1}, TypeError, "return_softmax_lse is 1: pass True or False"),
            ({"rotary_interleaved": 1}, TypeError, "rotary_interleaved is 1: pass True or False"),
            ({"rotary_cos": COS}, ValueError, "rotary_sin is None: pass both"),
            ({"rotary_sin": COS}, ValueError, "rotary_cos is None: pass both"),
            ({"rotary_cos": COS, "rotary_sin": COS[:, :4]}, ValueError, r"rotary_sin has shape \(24"
             r", 4\) and rotary_cos \(24, 8\): pass two of one shape"),
            ({"rotary_cos": COS[:20], "rotary_sin": COS[:20]}, ValueError, "rotary_cos has 20 posit"
             "ions and the cache has room for 24 keys of a sequence: pass a table of 24"),
            ({"rotary_cos": COS[0], "rotary_sin": COS[0]}, ValueError, r"rotary_cos has shape \(8"
             r",\): pass \(positions, rotary_dim / 2\), with a rotary_dim of at most d_head 64"),
            ({"rotary_cos": torch.ones(24, 33), "rotary_sin": torch.ones(24, 33)}, ValueError,
             r"rotary_cos has shape \(24, 33\)"),
            ({"rotary_cos": COS.int(), "rotary_sin": COS.int()}, TypeError, "rotary_cos is torch.in"
             r"t32: convert it with \.to\(torch\.bfloat16\)"),
            ({"rotary_cos": COS.to("meta"), "rotary_sin": COS}, ValueError, "rotary_cos is on met"),
            ({"rotary_cos": COS, "rotary_sin": COS, "k": None, "v": None}, ValueError, "rotary_cos "
             "is given and k is None: pass k and v"),
            ({"rotary_cos": COS, "rotary_sin": COS, "q": randn(3, 4, 64)}, ValueError, r"q has shap"
             r"e \(3, 4, 64\): pass \(batch, seq, heads, d_head\)"),
            ({"q": None}, TypeError, r"q is a NoneType: pass a torch\.Tensor"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
    )  # fmt: skip
    def test_names_what_is_wrong(self, attended, function, changes, error, message):
        case = Case()
        before = case.k_cache.clone()
        own = {"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache, "k": case.k}
        with pytest.raises(error, match=message):
            function(**{**own, "v": case.v, "cache_seqlens": lengths(), **changes})
        assert torch.equal(case.k_cache, before) and attended == []

    def test_names_what_is_wrong_with_a_table(self, attended, function):
        case = Case(PAGES, PAGE_SIZE)
        name = "block_table" if function is FUNCTIONS[0] else "page_table"
        for table, error, message in (
            (TABLE.long(), TypeError, r"block_table is torch\.int64: convert it with"),
            (TABLE[:2], ValueError, r"block_table has shape \(2, 3\): pass \(3, 3\), for a batch"),
            (TABLE[0], ValueError, r"block_table has shape \(3,\): pass"),
            ([1], TypeError, r"block_table is a list: pass a torch\.Tensor"),
        ):
            with pytest.raises(error, match=message):
                case.run(function, cache_seqlens=lengths(), **{name: table})
        with pytest.raises(ValueError, match="are both given: pass one of them"):
            both = {name: TABLE, "cache_batch_idx": lengths()}
            case.run(function, cache_seqlens=lengths(), **both)
        case.k_cache = case.v_cache = randn(PAGES, 0, KV_HEADS, D_HEAD)
        with pytest.raises(ValueError, match="page_size 0: k has shape"):
            case.run(function, cache_seqlens=lengths(), **{name: TABLE})
        assert attended == []


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (FUNCTIONS[0], "alibi_slopes", torch.ones(4)),
        *((FUNCTIONS[1], name, lengths()) for name in ("cu_seqlens_q", "cu_seqlens_k_new", "qv")),
        (FUNCTIONS[1], "q_descale", torch.ones(3, 2)),
        (FUNCTIONS[1], "scheduler_metadata", lengths()),
        (FUNCTIONS[1], "max_seqlen_q", 3),
        (FUNCTIONS[1], "attention_chunk", 8),
        (FUNCTIONS[1], "sm_margin", 8),
    ],
)
def test_what_is_not_built_is_refused_by_name(attended, function, name, value):
    case = Case()
    before = case.k_cache.clone()
    with pytest.raises(ValueError, match=f"{name} .*is not built: pass"):
        case.run(function, cache_seqlens=lengths(), **{name: value})
    assert torch.equal(case.k_cache, before) and attended == []


def test_new_keys_have_no_gradient(attended):
    case = Case()
    case.k.requires_grad_()
    with pytest.raises(RuntimeError, match="is written into k_cache or v_cache has no gradient"):
        case.run(cache_seqlens=lengths())
