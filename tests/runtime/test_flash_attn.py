"""flash_attn and flash_attn_3: FlashAttention's signatures, what they compute, what they refuse."""

import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.export import Dim

from flash_attention import flash_attn, flash_attn_3
from flash_helpers.check.errors import measure_error
from flash_helpers.operations.attention_forward.reference import attention_reference
from flash_helpers.runtime import call

# Parameters and defaults of FlashAttention 2.8 and of FlashAttention-3's flash_attn_interface.
_REST = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
_LAST = (
    "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
    "return_attn_probs=False"
)
SIGNATURES = {
    flash_attn: {
        "flash_attn_func": f"q, k, v, {_REST}",
        "flash_attn_kvpacked_func": f"q, kv, {_REST}",
        "flash_attn_qkvpacked_func": f"qkv, {_REST}",
        "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, {_REST}, block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {_LENGTHS}, {_REST}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_REST}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, "
        "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
        "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
    },
    flash_attn_3: {
        "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {_DESCALES}, "
        f"window_size=(-1, -1), attention_chunk=0, {_LAST}",
        "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {_DESCALES}, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, "
        "num_heads_q=None, sm_margin=0, return_attn_probs=False",
        "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, seqused_q=None, seqused_k=None, "
        f"softmax_scale=None, causal=False, qv=None, {_DESCALES}, window_size=(-1, -1), "
        f"attention_chunk=0, {_LAST}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, "
        "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
        "page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, "
        f"rotary_seqlens=None, {_DESCALES}, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False",
        # and FlashAttention-4's return_lse
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None, return_lse=True",
    },
}


@pytest.mark.parametrize(
    ("function", "expected"),
    [(getattr(m, name), text) for m, names in SIGNATURES.items() for name, text in names.items()],
)
def test_a_signature_is_that_of_flashattention(function, expected):
    parameters = inspect.signature(function).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    found = (p.replace(annotation=inspect.Parameter.empty) for p in parameters)
    assert ", ".join(map(str, found)) == expected


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def cumulative(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.fixture
def asked(monkeypatch) -> list[SimpleNamespace]:
    """The calls of attention() or varlen_attention(), which compute nothing."""
    found: list[SimpleNamespace] = []

    def attention(*tensors: Any, return_lse: bool, **options: Any) -> Any:
        found.append(SimpleNamespace(tensors=tensors, lse=return_lse, options=options))
        return ("o", "lse") if return_lse else "o"

    monkeypatch.setattr(flash_attn, "attention", attention)
    monkeypatch.setattr(flash_attn, "varlen_attention", attention)
    return found


def is_view(x: torch.Tensor, of: torch.Tensor) -> bool:
    return x.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()


class TestPacked:
    """Packed functions pass views of the tensors, and all options, to those of three tensors."""

    OPTIONS = (0.0, 0.3, True, (2, -1), 5.0, None, True, True)
    PASSED: ClassVar = {
        **{"causal": True, "softmax_scale": 0.3, "window_size": (2, -1), "softcap": 5},
        "deterministic": True,
    }

    def test_keys_and_values(self, asked):
        q, kv = ones(2, 4, 6, 128), torch.randn(2, 7, 2, 3, 128)
        assert flash_attn.flash_attn_kvpacked_func(q, kv, *self.OPTIONS) == ("o", "lse", None)
        total, lengths = kv.flatten(0, 1), (cumulative(3, 5), cumulative(7, 7), 5, 7)
        flash_attn.flash_attn_varlen_kvpacked_func(q[0], total, *lengths, *self.OPTIONS)
        for found, packed in zip(asked, (kv, total), strict=True):
            _, k, v = found.tensors[:3]
            assert is_view(k, kv) and is_view(v, kv) and found.lse
            assert torch.equal(torch.stack((k, v), -3), packed)
            assert found.options == self.PASSED
        assert asked[1].tensors[3:] == lengths

    def test_queries_keys_and_values(self, asked):
        qkv, begins = torch.randn(2, 4, 3, 6, 128), cumulative(3, 5)
        assert flash_attn.flash_attn_qkvpacked_func(qkv, *self.OPTIONS) == ("o", "lse", None)
        total = qkv.flatten(0, 1)
        options = {"window_size": (2, -1), "softcap": 5, "deterministic": True}
        flash_attn.flash_attn_varlen_qkvpacked_func(total, begins, 5, *self.OPTIONS)
        assert flash_attn_3.flash_attn_qkvpacked_func(qkv, 0.3, True, **options) == "o"
        for found, packed in zip(asked, (qkv, total, qkv), strict=True):
            assert all(is_view(x, qkv) for x in found.tensors[:3])
            assert torch.equal(torch.stack(found.tensors[:3], -3), packed)
            assert found.options == self.PASSED
        assert asked[1].tensors[3:] == (begins, begins, 5, 5)
        assert [found.lse for found in asked] == [True, True, False]

    def test_heads_of_different_numbers_behind_one_another(self, asked):
        qkv = torch.randn(2, 4, 8, 128)
        flash_attn_3.flash_attn_qkvpacked_func(qkv, num_heads_q=4)
        q, k, v = asked[0].tensors
        assert torch.equal(torch.cat((q, k, v), 2), qkv) and is_view(v, qkv)
        assert (q.shape[2], k.shape[2], v.shape[2]) == (4, 2, 2)
        for heads in (None, 5, 9):
            with pytest.raises(ValueError, match=f"num_heads_q is {heads} and qkv has 8 heads"):
                flash_attn_3.flash_attn_qkvpacked_func(qkv, num_heads_q=heads)

    @pytest.mark.parametrize(
        ("packed", "error", "message"),
        [
            (ones(2, 4, 2, 6, 128), ValueError, r"qkv has shape \(2, 4, 2, .*\(batch, seq, 3, hea"),
            (ones(2, 3, 6, 128), ValueError, "qkv has shape .*: pass .batch, seq, 3, heads, d_hea"),
            ([1.0], TypeError, "qkv is a list: pass a torch.Tensor"),
        ],
    )
    def test_another_shape_is_refused(self, packed, error, message):
        with pytest.raises(error, match=message):
            flash_attn.flash_attn_qkvpacked_func(packed)


def test_flash_attn_3_passes_what_differs(asked):
    q, begins = ones(1, 4, 2, 128), cumulative(1, 3)
    options = {"pack_gqa": True, "num_splits": 0, "deterministic": True, "causal": True}
    found = flash_attn_3.flash_attn_func(q, q, q, 0.3, return_attn_probs=True, **options)
    assert found == ("o", "lse")
    lengths = begins, begins, 3, 3
    assert flash_attn_3.flash_attn_varlen_func(q[0], q[0], q[0], *lengths, **options) == "o"
    assert [found.options["softmax_scale"] for found in asked] == [0.3, None]
    assert all(found.options["causal"] and found.options["deterministic"] for found in asked)


class TestUnbuilt:
    """Arguments for what is not built are refused by name, before a kernel runs."""

    @pytest.fixture(autouse=True)
    def nothing_runs(self, asked):
        yield
        assert asked == []

    @pytest.mark.parametrize(
        ("module", "name", "value", "message"),
        [
            (flash_attn, "dropout_p", 0.1, "dropout_p 0.1 is not built: pass 0.0, or call"),
            (flash_attn, "dropout_p", math.nan, "dropout_p nan is not built"),
            (flash_attn, "alibi_slopes", torch.ones(2), "alibi_slopes is not built: pass None, or"),
            (flash_attn_3, "qv", ones(1), "qv is not built: pass None, q with qv behind it"),
            (flash_attn_3, "q_descale", ones(1), "q_descale is not built: .*q in fp16 or bf16"),
            (flash_attn_3, "k_descale", ones(1), "k_descale is not built"),
            (flash_attn_3, "v_descale", ones(1), "v_descale is not built"),
            (flash_attn_3, "attention_chunk", 64, "attention_chunk 64 is not built: pass 0"),
            (flash_attn_3, "num_splits", 2, "num_splits 2 is not built: pass 1"),
            (flash_attn_3, "sm_margin", 8, "sm_margin 8 is not built: pass 0"),
        ],
    )
    @pytest.mark.parametrize("is_varlen", [False, True])
    def test_value_is_named(self, module, name, value, message, is_varlen):
        q, begins = ones(1, 4, 2, 128), cumulative(4)
        with pytest.raises(ValueError, match=message):
            if is_varlen:
                lengths = begins, begins, 4, 4
                module.flash_attn_varlen_func(q[0], q[0], q[0], *lengths, **{name: value})
            else:
                module.flash_attn_func(q, q, q, **{name: value})

    @pytest.mark.parametrize(
        ("module", "name"),
        [(flash_attn, "block_table"), (flash_attn_3, "seqused_q"), (flash_attn_3, "seqused_k")],
    )
    def test_argument_of_varlen_is_named(self, module, name):
        q, begins = ones(4, 2, 128), cumulative(4)
        with pytest.raises(ValueError, match=f"{name} is not built: pass None, and"):
            module.flash_attn_varlen_func(q, q, q, begins, begins, 4, 4, **{name: begins})

    @pytest.mark.parametrize(
        ("module", "name", "value", "message"),
        [
            (flash_attn, "dropout_p", "0.1", "dropout_p is '0.1': pass a number"),
            (flash_attn, "dropout_p", None, "dropout_p is None: pass a number"),
            (flash_attn, "return_attn_probs", None, "return_attn_probs is None: pass True or"),
            (flash_attn_3, "pack_gqa", 1, "pack_gqa is 1: pass True or False"),
            (flash_attn_3, "num_splits", True, "num_splits is True: pass a number"),
        ],
    )
    def test_wrong_type_is_named(self, module, name, value, message):
        q = ones(1, 4, 2, 128)
        with pytest.raises(TypeError, match=message):
            module.flash_attn_func(q, q, q, **{name: value})


def check(o: torch.Tensor, lse: torch.Tensor, q, k, v, **options: Any) -> None:
    """Compare with float64. Tensors are (seq, heads, d_head), the LSE is (heads, seq)."""
    found = attention_reference(q[None], k[None], v[None], **options)
    assert measure_error(o[None], found.expected["o"]).within(found.bounds["o"])
    assert measure_error(lse[None], found.expected["lse"]).within(found.bounds["lse"])


# Two sequences with queries and keys; one without queries, one without keys, one without both.
LENGTHS = ((2, 0, 5, 3, 0), (6, 4, 3, 0, 0))


@pytest.fixture(scope="module")
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    q, kv = torch.randn(10, 2, 128), torch.randn(13, 2, 1, 128)
    return (q + 0.1).bfloat16(), (kv + 0.1).bfloat16()


@pytest.mark.slow
class TestResult:
    def test_of_one_length_is_attention(self, rows):
        q, kv = rows
        o, lse, probabilities = flash_attn.flash_attn_kvpacked_func(
            q[None], kv[None], softmax_scale=0.2, causal=True, return_attn_probs=True
        )
        assert probabilities is None and lse.dtype == torch.float32
        check(o[0], lse[0], q, *kv.unbind(1), softmax_scale=0.2, causal=True)

    def test_of_various_lengths_is_that_of_each_sequence(self, rows):
        q, kv = rows
        queries, keys = (cumulative(*lengths) for lengths in LENGTHS)
        o, lse, _ = flash_attn.flash_attn_varlen_kvpacked_func(
            *(q, kv, queries, keys, 5, 100), causal=True, return_attn_probs=True
        )
        assert (o.shape, lse.shape, lse.dtype) == (q.shape, (2, 10), torch.float32)
        for n, (len_q, len_k) in enumerate(zip(*LENGTHS, strict=True)):
            own, seen = slice(queries[n], queries[n + 1]), slice(keys[n], keys[n + 1])
            if len_q and len_k:
                check(o[own], lse[:, own], q[own], *kv[seen].unbind(1), causal=True)
            else:
                assert not o[own].any() and (lse[:, own] == -math.inf).all()


@pytest.fixture
def zeros(monkeypatch) -> list[tuple[int, int]]:
    """Lengths of queries and keys of the kernels that ran; they compute zeros."""
    found: list[tuple[int, int]] = []

    def run(self: call.ReadyCall, *_: object) -> None:
        found.append((self.tensors["q"].shape[1], self.tensors["k"].shape[1]))
        for x in self.outputs.values():
            x.zero_()

    monkeypatch.setattr(call.ReadyCall, "simulate", run)
    return found


def varlen(
    q: torch.Tensor, k: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    return flash_attn.flash_attn_varlen_func(q, k, k, queries, keys, 9, 9, causal=True) + 1


class Varlen(torch.nn.Module):
    forward = staticmethod(varlen)


class TestTracing:
    def test_compiled_code_computes_any_lengths(self, zeros):
        torch._dynamo.reset()
        compiled = torch.compile(varlen, fullgraph=True, backend="aot_eager", dynamic=True)
        for lengths in ((2, 3), (4, 1, 7), (9, 9)):
            q, begins = ones(sum(lengths), 2, 128), cumulative(*lengths)
            assert torch.equal(compiled(q, q, begins, begins), torch.ones_like(q))
        assert zeros == [(n, n) for n in (5, 12, 18)]

    def test_an_exported_program_computes_any_lengths(self, zeros):
        total, batch = {0: Dim("total", max=2**24)}, {0: Dim("batch_1", min=2)}
        given = ones(5, 2, 128), ones(5, 2, 128), cumulative(2, 3), cumulative(2, 3)
        exported = torch.export.export(Varlen(), given, dynamic_shapes=(total, total, batch, batch))
        (node,) = (n for n in exported.graph.nodes if "flash_attention" in str(n.target))
        assert str(node.target) == "flash_attention.varlen.default"
        q, begins = ones(7, 2, 128), cumulative(1, 2, 4)
        assert exported.module()(q, q, begins, begins).shape == q.shape
        assert zeros == [(7, 7)]

    @pytest.mark.slow
    def test_the_operator_is_what_torch_expects_of_one(self, zeros):
        q, begins = ones(5, 2, 128), cumulative(2, 3)
        for return_lse in (False, True):
            options = True, 3, None, 0.0, None, not return_lse, return_lse
            given = q, q, q, begins, begins, None, 9, 9, *options
            torch.library.opcheck(torch.ops.flash_attention.varlen.default, given)

    def test_functions_of_one_length_are_the_operator_of_attention(self, zeros):
        make_fx = torch.fx.experimental.proxy_tensor.make_fx
        graph = make_fx(lambda qkv: flash_attn.flash_attn_qkvpacked_func(qkv))(
            ones(1, 4, 3, 2, 128)
        ).graph
        assert "flash_attention.attention.default" in str(graph)


class TestLengths:
    """Lengths that do not fit are refused before a kernel runs."""

    def refused(
        self, error: type[Exception], message: str, q: torch.Tensor | None = None, **changes: Any
    ) -> None:
        q = ones(5, 2, 128) if q is None else q
        given = {"cu_seqlens_q": cumulative(2, 3), "cu_seqlens_k": cumulative(2, 3)}
        given |= {"max_seqlen_q": 3, "max_seqlen_k": 3, "k": q, "v": q, **changes}
        with pytest.raises(error, match=message):
            flash_attn.flash_attn_varlen_func(q, **given)

    @pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
    @pytest.mark.parametrize(
        ("value", "error", "message"),
        [
            ([0, 2, 5], TypeError, r"{} is a list: pass a torch\.Tensor"),
            (cumulative(2, 3).long(), TypeError, r"{} is torch\.int64: convert it .*torch\.int32"),
            (cumulative(2, 3).to("meta"), ValueError, "{} is on meta and q on cpu: move them"),
            (cumulative(2, 3)[None], ValueError, r"{} has shape \(1, 3\): pass \(batch \+ 1,\)"),
            (cumulative()[:0], ValueError, r"{} has shape \(0,\): pass \(batch \+ 1,\)"),
            (cumulative(1, 1, 1, 2)[::2], ValueError, r"{} has stride 2: call \.contiguous\(\)"),
            (
                cumulative(2, 1, 2),
                ValueError,
                "cu_seqlens_k has . elements and cu_seqlens_q .: pas",
            ),
            (cumulative(2, 3) + 1, ValueError, "{} begins with 1: pass 0 first"),
            (cumulative(7, -2), ValueError, "{} falls from 7 to 5 at sequence 1: pass cumulative"),
            (cumulative(2, 2), ValueError, "{} ends with 4 and . has 5 rows: pass that total last"),
            (cumulative(2, 4), ValueError, "{} ends with 6 and . has 5 rows"),
        ],
        ids=str,
    )
    def test_cumulative_lengths(self, zeros, name, value, error, message):
        self.refused(error, message.format(name), **{name: value})
        assert zeros == []

    @pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
    @pytest.mark.parametrize(
        ("value", "error", "message"),
        [
            (2, ValueError, "{} 2 is less than the longest sequence, 3: pass 3"),
            (-1, ValueError, "{} -1 is less than the longest sequence, 3"),
            (3.0, TypeError, r"{} is 3\.0: pass the longest length, an int"),
            (True, TypeError, "{} is True: pass the longest length, an int"),
            (None, TypeError, "{} is None: pass the longest length, an int"),
        ],
    )
    def test_the_longest(self, zeros, name, value, error, message):
        self.refused(error, message.format(name), **{name: value})
        assert zeros == []

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            (
                {"q": ones(1, 5, 2, 128)},
                ValueError,
                r"q has 4 dimensions.*\(total, heads, d_head\)",
            ),
            (
                {"v": ones(4, 2, 128)},
                ValueError,
                r"v has shape .*: batch, seq and heads must be eq",
            ),
            ({"v": None}, TypeError, "v is a NoneType"),
            ({"k": ones(5, 3, 128), "v": ones(5, 3, 128)}, ValueError, "heads 2 is not a multiple"),
            ({"k": ones(5, 2, 64)}, ValueError, "k has shape .*: batch and d_head must be equal"),
            ({"k": ones(5, 2, 128).to("meta")}, ValueError, "k is on meta and q on cpu: move them"),
            ({"v": ones(5, 2, 128).half()}, TypeError, r"v is torch\.float16 and .*bfloat16"),
            ({"q": ones(5, 2, 128).int()}, TypeError, r"q is torch\.int32 and the kernels take"),
        ],
    )
    @pytest.mark.parametrize("lengths", [(2, 3), (0, 0)])
    def test_tensors_that_do_not_fit(self, zeros, changes, error, message, lengths):
        begins = cumulative(*lengths)
        given = {"cu_seqlens_q": begins, "cu_seqlens_k": begins, **changes}
        self.refused(error, message, **given)
        assert zeros == []

    def test_of_no_sequence_at_all(self, zeros):
        q, none = ones(0, 2, 128), cumulative()
        o, lse, _ = flash_attn.flash_attn_varlen_func(
            *(q, q, q, none, none, 0, 0), return_attn_probs=True
        )
        assert (o.shape, lse.shape, zeros) == ((0, 2, 128), (2, 0), [])

    def test_with_options_that_are_wrong(self, zeros):
        self.refused(TypeError, "window_size is 5: pass two whole numbers", window_size=5)
        self.refused(ValueError, r"window_size is \(-2, 3\)", window_size=(-2, 3))
        self.refused(ValueError, "softcap -1: softcap must be from", softcap=-1.0)
        self.refused(TypeError, "softmax_scale is '1': pass a number", softmax_scale="1")
        self.refused(TypeError, "deterministic is 'no': pass True or", deterministic="no")
        assert zeros == []


FUNCTIONS: list[Callable[..., Any]] = [flash_attn.flash_attn_func, flash_attn_3.flash_attn_func]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_errors_are_those_of_attention(function):
    q = ones(1, 4, 2, 128)
    with pytest.raises(TypeError, match="causal is 1: pass True or False"):
        function(q, q, q, causal=1)
    with pytest.raises(TypeError, match="deterministic is 1: pass True or False"):
        function(q, q, q, deterministic=1)
    with pytest.raises(TypeError, match="k is a NoneType"):
        function(q, None, q)
    with pytest.raises(ValueError, match="softmax_scale -1 is negative"):
        function(q, q, q, softmax_scale=-1.0)
