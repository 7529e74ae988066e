"""A cache in fp8 in the functions that take one: what they compute beside PyTorch on numbers that
are multiplied out, what they append, and what they refuse."""

import math
import re

import pytest
import torch

import flash_attention
from flash_attention.flash_attn import flash_attn_with_kvcache as with_kvcache_of_2
from flash_attention.flash_attn_3 import flash_attn_func, flash_attn_with_kvcache
from flash_attention.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)

FP8 = torch.float8_e4m3fn
MOST = torch.finfo(FP8).max
BATCH, ROOM, HEADS, KV_HEADS, D_HEAD = 2, 24, 4, 2, 64
LENGTHS = (24, 7)


def drawn(dtype=torch.bfloat16, seed=0):
    """q, the cache in fp8, its scales, and the keys of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(BATCH, 1, HEADS, D_HEAD, generator=generator).to(dtype)
    cache = torch.randn(2, BATCH, ROOM, KV_HEADS, D_HEAD, generator=generator) * 30
    scales = (1 + torch.arange(2 * BATCH * KV_HEADS)).view(2, BATCH, KV_HEADS) / 150
    k, v = cache.to(FP8)
    return q, k, v, *scales, torch.tensor(LENGTHS, dtype=torch.int32)


def wanted(q, k, v, k_scale, v_scale, lengths):
    """Attention of one query by PyTorch, in float64, on a cache that is multiplied out."""
    found = torch.empty(q.shape, dtype=torch.float64)
    for n, length in enumerate(lengths.tolist()):
        keys, values = (
            (x[n, :length].double() * scale[n, :, None]).repeat_interleave(HEADS // KV_HEADS, 1)
            for x, scale in ((k, k_scale), (v, v_scale))
        )
        logits = torch.einsum("hd,khd->hk", q[n, 0].double(), keys) / math.sqrt(D_HEAD)
        found[n, 0] = torch.einsum("hk,khd->hd", logits.softmax(-1), values)
    return found


def assert_near(found, right):
    close = {"rtol": 2e-2, "atol": 5e-3} if found.dtype is torch.bfloat16 else {"rtol": 2e-3}
    torch.testing.assert_close(found.double(), right, **{"atol": 1e-3, **close})


def pages_of(x, size):
    """A cache in pages of `size` keys, and the table of each sequence's."""
    table = torch.arange(BATCH * ROOM // size, dtype=torch.int32).view(BATCH, -1).flip(1)
    pages = torch.empty(BATCH * ROOM // size, size, *x.shape[2:], dtype=x.dtype)
    pages[table.long()] = x.unflatten(1, (-1, size))
    return pages, table.contiguous()


class TestDecode:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("size", [0, 8])
    def test_is_attention_on_the_numbers_times_their_scales(self, dtype, size):
        q, k, v, k_scale, v_scale, lengths = drawn(dtype)
        right = wanted(q, k, v, k_scale, v_scale, lengths)
        places = {"cache_seqlens": lengths}
        if size:
            (k, table), (v, _) = pages_of(k, size), pages_of(v, size)
            places["block_table"] = table
        o = flash_attention.decode(q, k, v, **places, k_scale=k_scale, v_scale=v_scale)
        assert o.dtype is dtype
        assert_near(o, right)

    def test_needs_no_scales(self):
        q, k, v, *_, lengths = drawn()
        k, v = ((x.float() / 30).to(FP8) for x in (k, v))
        one = torch.ones(BATCH, KV_HEADS)
        found = flash_attention.decode(q, k, v, cache_seqlens=lengths)
        assert_near(found, wanted(q, k, v, one, one, lengths))

    def test_has_the_lse_of_the_logits_times_the_scale(self):
        q, k, v, k_scale, _, lengths = drawn()
        options = {"cache_seqlens": lengths, "return_lse": True}
        _, lse = flash_attention.decode(q, k, v, k_scale=k_scale, **options)
        plain = (k.float() * k_scale[:, None, :, None]).bfloat16()
        _, right = flash_attention.decode(q, plain, plain, **options)
        torch.testing.assert_close(lse, right, atol=0.05, rtol=0.01)

    def test_is_traced(self):
        q, k, v, k_scale, v_scale, lengths = drawn()

        def function(q, k, v, k_scale, v_scale):
            return flash_attention.decode(
                q, k, v, cache_seqlens=lengths, k_scale=k_scale, v_scale=v_scale
            )

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        found = compiled(q, k, v, k_scale, v_scale)
        assert torch.equal(found, function(q, k, v, k_scale, v_scale))

    @pytest.mark.parametrize(
        ("changes", "error", "text"),
        [
            ({"q": lambda x: x.to(FP8)}, TypeError, "q is torch.float8_e4m3fn and the kernels"),
            (
                {name: lambda x: x.float().to(torch.float8_e5m2) for name in "kv"},
                TypeError,
                "k is torch.float8_e5m2 and decode takes torch.float8_e4m3fn: convert it with",
            ),
            (
                {"v": lambda x: x.bfloat16()},
                TypeError,
                "v is torch.bfloat16 and decode takes torch.float8_e4m3fn: convert it with",
            ),
            (
                {name: lambda x: x.bfloat16() for name in "kv"},
                ValueError,
                "k_scale is given and the cache is in bf16: pass a cache in float8_e4m3fn, or",
            ),
            (
                {"k_scale": lambda x: x[0]},
                ValueError,
                "k_scale has 1 dimensions, shape (2,): pass (batch, heads)",
            ),
            (
                {"v_scale": lambda x: x[:, :1]},
                ValueError,
                "v_scale has shape (2, 1) and q (2, 1, 4, 64): batch and heads of k must be equal",
            ),
            (
                {"v_scale": lambda x: x.double()},
                TypeError,
                "v_scale is torch.float64 and decode takes torch.float32: convert it with",
            ),
            (
                {"k_scale": lambda x: x.to("meta")},
                ValueError,
                "k_scale is on meta and q on cpu: move them to one device",
            ),
            (
                {"k_scale": lambda x: x[:1, :1].expand(2, 2)},
                ValueError,
                "k_scale has strides (0, 0) for shape (2, 2) and must be contiguous: call",
            ),
            ({"k_scale": lambda x: 2.0}, TypeError, "k_scale is a float: pass a torch.Tensor"),
        ],
    )  # fmt: skip
    def test_refuses_what_is_no_such_cache(self, changes, error, text):
        names = ("q", "k", "v", "k_scale", "v_scale")
        given = dict(zip(names, drawn(), strict=False))
        for name, change in changes.items():
            given[name] = change(given[name])
        with pytest.raises(error, match=re.escape(text)):
            flash_attention.decode(**given)

    def test_names_what_the_kernel_for_it_lacks(self):
        q, k, v, *_ = drawn()
        with pytest.raises(ValueError, match="keys_per_piece 64 is not supported by c6_"):
            flash_attention.decode(q, k, v, keys_per_piece=64)


class TestFlashAttention3:
    @pytest.mark.parametrize("size", [0, 8])
    def test_takes_a_scale_for_each_sequence_and_head(self, size):
        q, k, v, k_scale, v_scale, lengths = drawn()
        right = wanted(q, k, v, k_scale, v_scale, lengths)
        table = None
        if size:
            (k, table), (v, _) = pages_of(k, size), pages_of(v, size)
        scales = {"k_descale": k_scale, "v_descale": v_scale}
        found = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, page_table=table, causal=True, **scales
        )
        assert_near(found, right)

    def test_takes_one_number_expanded(self):
        q, k, v, k_scale, v_scale, lengths = drawn()
        k_scale, v_scale = (x[:1, :1].expand(BATCH, KV_HEADS) for x in (k_scale, v_scale))
        scales = {"k_descale": k_scale, "v_descale": v_scale}
        found = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **scales)
        assert_near(found, wanted(q, k, v, k_scale, v_scale, lengths))

    @pytest.mark.parametrize("size", [0, 8])
    @pytest.mark.parametrize("is_rounded", [False, True])
    def test_appends_keys_divided_by_the_scales_and_rounded(self, is_rounded, size):
        q, k, v, k_scale, v_scale, _ = drawn()
        lengths = torch.tensor([23, 6], dtype=torch.int32)
        new = torch.randn(2, BATCH, 1, KV_HEADS, D_HEAD)
        new[0, 0, 0, 0, 0] = 1e4  # over the range, which ends at 448
        scales = k_scale, v_scale
        rounded = [
            (x / scale[:, None, :, None]).clamp(-MOST, MOST).to(FP8)
            for x, scale in zip(new.bfloat16().float(), scales, strict=True)
        ]
        right = [x.clone() for x in (k, v)]
        for cache, x in zip(right, rounded, strict=True):
            for n, length in enumerate(lengths.tolist()):
                cache[n, length] = x[n, 0]
        caches, table = [k, v], None
        if size:
            (k, table), (v, _) = pages_of(k, size), pages_of(v, size)
            caches = [k, v]
        found = flash_attn_with_kvcache(
            *(q, *caches, *(rounded if is_rounded else new.bfloat16())),
            cache_seqlens=lengths,
            page_table=table,
            k_descale=k_scale,
            v_descale=v_scale,
        )
        for cache, x in zip(caches, right, strict=True):
            own = pages_of(x, size)[0] if size else x
            assert torch.equal(cache.view(torch.uint8), own.view(torch.uint8))
        assert_near(found, wanted(q, *right, k_scale, v_scale, lengths + 1))

    def test_rotates_new_keys_before_they_are_rounded(self):
        q, k, v, k_scale, v_scale, _ = drawn()
        lengths = torch.tensor([23, 6], dtype=torch.int32)
        new = torch.randn(2, BATCH, 1, KV_HEADS, D_HEAD).bfloat16()
        angles = torch.arange(ROOM)[:, None] * torch.linspace(0.1, 1.0, D_HEAD // 2)
        rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        scales = {"k_descale": k_scale, "v_descale": v_scale}
        plain = [torch.zeros(x.shape, dtype=q.dtype) for x in (k, v)]
        flash_attn_with_kvcache(q, *plain, *new, cache_seqlens=lengths, **rotary)
        flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=lengths, **rotary, **scales)
        for n, length in enumerate(lengths.tolist()):
            rotated = plain[0][n, length].float() / k_scale[n, :, None]
            own = rotated.clamp(-MOST, MOST).to(FP8)
            assert torch.equal(k[n, length].view(torch.uint8), own.view(torch.uint8))
        with pytest.raises(TypeError, match=r"k is torch\.float8_e4m3fn and rotary_cos is"):
            flash_attn_with_kvcache(
                q, k, v, *new.to(FP8), cache_seqlens=lengths, **rotary, **scales
            )

    @pytest.mark.parametrize(
        ("changes", "error", "text"),
        [
            ({"k_descale": torch.ones(2)}, ValueError, "k_descale has shape (2,): pass (batch, kv"),
            ({"v_descale": torch.ones(2, 2).double()}, TypeError, "v_descale is torch.float64: co"),
            ({"v_descale": 1.0}, TypeError, "v_descale is a float: pass a torch.Tensor"),
            (
                {"k_descale": torch.ones(2, 2, device="meta")},
                ValueError,
                "k_descale is on meta and q on cpu: move them to one device",
            ),
            ({"k": torch.zeros(2, 1, 2, 64)}, TypeError, "k is torch.float32, q torch.bfloat16"),
            ({"q_descale": torch.ones(2, 2)}, ValueError, "q_descale is not built: pass None, an"),
        ],
    )  # fmt: skip
    def test_refuses_bad_scales_before_the_cache_is_written(self, changes, error, text):
        q, k, v, *_, lengths = drawn()
        before = [x.view(torch.uint8).clone() for x in (k, v)]
        new = {name: torch.zeros(2, 1, 2, 64).bfloat16() for name in "kv"}
        with pytest.raises(error, match=re.escape(text)):
            flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **{**new, **changes})
        assert all(map(torch.equal, before, (x.view(torch.uint8) for x in (k, v))))

    def test_refuses_scales_of_another_cache_and_of_other_functions(self):
        q, k, v, *_, lengths = drawn()
        k, v, one = k.bfloat16(), v.bfloat16(), torch.ones(2, 2)
        with pytest.raises(ValueError, match=r"k_descale is given and the cache is torch\.bf"):
            flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, k_descale=one)
        with pytest.raises(ValueError, match="k_descale is not built: pass None, and k in fp16 or"):
            flash_attn_func(q, k, v, k_descale=one)


def test_flash_attention_2_takes_a_cache_in_fp8_without_scales() -> None:
    q, k, v, *_, lengths = drawn()
    found = with_kvcache_of_2(q, k, v, cache_seqlens=lengths)
    assert torch.equal(found, flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths))


def planned(kv_layout="NHD", size=8, **options):
    """A wrapper with a plan for the sequences of `drawn`, and the table of their pages."""
    _, table = pages_of(drawn()[1], size)
    pages = [-(-length // size) for length in LENGTHS]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), kv_layout)
    wrapper.plan(
        torch.tensor([0, pages[0], sum(pages)], dtype=torch.int32),
        torch.cat([table[n, :count] for n, count in enumerate(pages)]),
        torch.tensor([(length - 1) % size + 1 for length in LENGTHS], dtype=torch.int32),
        *(HEADS, KV_HEADS, D_HEAD, size),
        q_data_type="bfloat16",
        **options,
    )
    return wrapper


class TestFlashInfer:
    @pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
    @pytest.mark.parametrize("kv_data_type", [FP8, "float8_e4m3fn"])
    def test_takes_numbers_as_scales(self, kv_layout, kv_data_type):
        q, k, v, *_, lengths = drawn()
        cache = [pages_of(x, 8)[0] for x in (k, v)]
        if kv_layout == "HND":
            cache = [x.transpose(1, 2).contiguous() for x in cache]
        wrapper = planned(kv_layout, kv_data_type=kv_data_type)
        found = wrapper.run(q[:, 0], tuple(cache), k_scale=0.02, v_scale=0.5)
        shape = (BATCH, KV_HEADS)
        scales = torch.full(shape, 0.02), torch.full(shape, 0.5)
        assert_near(found, wanted(q, k, v, *scales, lengths)[:, 0])

    def test_takes_tensors_as_scales(self):
        q, k, v, k_scale, v_scale, lengths = drawn()
        wrapper = planned(kv_data_type=FP8, sm_scale=1 / math.sqrt(D_HEAD))
        cache = tuple(pages_of(x, 8)[0] for x in (k, v))
        found = wrapper.run(q[:, 0], cache, k_scale=k_scale, v_scale=v_scale)
        assert_near(found, wanted(q, k, v, k_scale, v_scale, lengths)[:, 0])
        for one in (torch.tensor(0.02), torch.tensor([0.02])):
            both = {"k_scale": one, "v_scale": one}
            numbers = {"k_scale": 0.02, "v_scale": 0.02}
            by_tensor, by_number = (wrapper.run(q[:, 0], cache, **own) for own in (both, numbers))
            torch.testing.assert_close(by_tensor, by_number, rtol=8e-3, atol=1e-3)

    def test_needs_no_scales_and_a_plan_for_its_dtype(self):
        q, k, v, *_ = drawn()
        cache = tuple(pages_of(x, 8)[0] for x in (k, v))
        one = {"k_scale": 1.0, "v_scale": 1.0}
        wrapper = planned(kv_data_type=FP8)
        assert torch.equal(wrapper.run(q[:, 0], cache), wrapper.run(q[:, 0], cache, **one))
        with pytest.raises(
            TypeError, match=r"k is torch.float8_e4m3fn and plan\(\) was for torch.bf"
        ):
            planned().run(q[:, 0], cache)
        with pytest.raises(
            TypeError, match=r"k is torch.bfloat16 and plan\(\) was for torch.float8"
        ):
            wrapper.run(q[:, 0], tuple(x.bfloat16() for x in cache))

    @pytest.mark.parametrize(
        ("scales", "error", "text"),
        [
            ({"k_scale": torch.ones(3)}, ValueError, "k_scale has shape (3,): pass a number, a"),
            ({"v_scale": "1"}, TypeError, "v_scale is '1': pass a number, or None for 1"),
            ({"v_scale": torch.ones(2, 2).half()}, TypeError, "v_scale is torch.float16 and deco"),
            ({"k_scale": -1.0}, ValueError, "softmax_scale -0.125 is negative"),
            ({"q_scale": 1.0}, ValueError, "q_scale 1.0 is not built: pass None, and sm_scale"),
        ],
    )  # fmt: skip
    def test_refuses_what_is_no_scale(self, scales, error, text):
        q, k, v, *_ = drawn()
        cache = tuple(pages_of(x, 8)[0] for x in (k, v))
        with pytest.raises(error, match=re.escape(text)):
            planned(kv_data_type=FP8).run(q[:, 0], cache, **scales)

    def test_refuses_other_dtypes_and_scales_of_other_caches(self):
        q, k, v, *_ = drawn()
        with pytest.raises(ValueError, match=r"kv_data_type torch\.float8_e5m2 is not built: pass"):
            planned(kv_data_type=torch.float8_e5m2)
        cache = tuple(pages_of(x.bfloat16(), 8)[0] for x in (k, v))
        for name in ("k_scale", "v_scale"):
            with pytest.raises(ValueError, match=f"{name} 0.5 is not built: pass None, and "):
                planned().run(q[:, 0], cache, **{name: 0.5})

    def test_of_prefill_refuse_it(self):
        begins = torch.tensor([0, 1], dtype=torch.int32)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(1))
        with pytest.raises(ValueError, match=r"kv_data_type torch\.float8_e4m3fn is not built: p"):
            wrapper.plan(
                *(begins, begins, begins[:1], begins[1:], 2, 2, 64, 8),
                q_data_type=torch.bfloat16,
                kv_data_type=FP8,
            )
