"""Problems besides whole blocks from a call to its results: what the runtime hands to a kernel that
takes them all, and what it brings back."""

from collections.abc import Callable

import pytest
import torch
from attention_tensors import on_sms
from general_hopper import (
    BEFORE,
    WITH_CAUSAL,
    WITH_COUNTER,
    WITH_OPTIONS,
    GeneralConfig,
    general,
    plain_ptx,
)

import flash_attention
from flash_attention import _forward, _operators
from flash_helpers.check.errors import measure_error
from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.operations.attention_forward.inputs import QKV, make_inputs
from flash_helpers.operations.attention_forward.reference import attention_reference
from flash_helpers.runtime import call, library, simulator, tensors
from flash_helpers.tune import best

CAUSAL = general(WITH_CAUSAL, causal=True)
CONFIGS = [general(WITH_OPTIONS), CAUSAL, general(WITH_COUNTER, causal=True)]
# whole tiles of queries that see no key; one query; one key
LENGTHS = [(3, 3), (130, 2), (2, 4), (1, 3), (3, 1)]


@pytest.fixture(autouse=True)
def built(monkeypatch, tmp_path) -> None:
    """As if the library held CONFIGS, and attention() knew of them and of one for whole blocks."""
    by_name = {config.short_form(): config for config in CONFIGS}
    for config in CONFIGS:
        (tmp_path / f"{config.short_form()}.ptx").write_text(plain_ptx(config))

    def resolve(cfg: str | GeneralConfig) -> GeneralConfig:
        return by_name[cfg] if isinstance(cfg, str) else cfg

    monkeypatch.setattr(library, "resolve", resolve)
    monkeypatch.setattr(_forward, "resolve", resolve)
    monkeypatch.setattr(simulator, "ptx_path", lambda c, _="": tmp_path / f"{c.short_form()}.ptx")
    monkeypatch.setattr(_operators, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(best, "_candidates", lambda *_: (general(BEFORE), *CONFIGS[:2]))
    monkeypatch.setattr(call, "_plans", {})
    # no loop is unrolled
    monkeypatch.setattr("flash_helpers.registry.wgmma._RUNS_PER_REPLAYED_TILE", 2000)
    # a block of a few takes several tiles
    monkeypatch.setattr(tensors, "largest_device", lambda _: on_sms(3))


def inputs(problem: AttentionForward) -> QKV:
    return make_inputs("normal", problem, torch.bfloat16)


def assert_right(problem: AttentionForward, given: QKV, o, lse) -> None:
    reference = attention_reference(
        *given, causal=problem.causal, softmax_scale=problem.softmax_scale
    )
    assert (o.shape, o.dtype, lse.dtype) == (problem.shape, torch.bfloat16, torch.float32)
    assert measure_error(o, reference.expected["o"]).within(reference.bounds["o"])
    assert measure_error(lse, reference.expected["lse"]).within(reference.bounds["lse"])
    unseen = max(0, problem.len_q - problem.len_k) if problem.causal else 0
    assert not o[:, :unseen].any() and (lse[..., :unseen] == -torch.inf).all()


class TestForward:
    @pytest.mark.parametrize(
        ("config", "len_q", "len_k"),
        [
            *((config, *lengths) for config in CONFIGS[:2] for lengths in LENGTHS),
            (CONFIGS[2], 130, 3),
        ],
        ids=lambda value: value.short_form() if isinstance(value, GeneralConfig) else None,
    )
    def test_is_attention(self, config, len_q, len_k):
        problem = AttentionForward(
            2, 4, len_q, len_k=len_k, kv_heads=2, causal=config.causal, softmax_scale=0.05
        )
        q, k, v = inputs(problem)
        o, lse = torch.full_like(q, torch.nan), torch.full((2, 4, len_q), torch.nan)
        found = flash_attention.forward(config, q, k, v, o, softmax_scale=0.05, lse=lse)
        assert found is o
        assert_right(problem, (q, k, v), o, lse)

    def test_of_strided_tensors_is_that_of_contiguous_ones(self):
        problem = AttentionForward(2, 2, 2, len_k=3, kv_heads=1)
        q, k, v = inputs(problem)
        packed = torch.stack((k, v), dim=2)
        head_major = q.transpose(1, 2).contiguous().transpose(1, 2)
        strided = flash_attention.forward(CONFIGS[0], head_major, *packed.unbind(2))
        assert torch.equal(strided, flash_attention.forward(CONFIGS[0], q, k, v))

    def test_has_an_lse_with_an_output_of_its_own_too(self):
        q, k, v = inputs(AttentionForward(1, 2, 3, len_k=4))
        lse = torch.empty(1, 2, 3)
        version = lse._version
        o = flash_attention.forward(CAUSAL, q, k, v, lse=lse)
        assert_right(AttentionForward(1, 2, 3, len_k=4, causal=True), (q, k, v), o, lse)
        assert lse._version > version

    def test_of_another_scale_has_a_plan_of_its_own(self):
        q, k, v = inputs(AttentionForward(1, 1, 3))
        usual = flash_attention.forward(CONFIGS[0], q, k, v)
        other = flash_attention.forward(CONFIGS[0], q, k, v, softmax_scale=2.0)
        assert not torch.equal(usual, other)
        assert torch.equal(flash_attention.forward(CONFIGS[0], q, k, v), usual)

    @pytest.mark.parametrize(
        ("lse", "error", "message"),
        [
            (torch.empty(1, 2, 4), ValueError, r"lse has shape \(1, 2, 4\).*lse \(1, 2, 3\)"),
            (torch.empty(2, 3), ValueError, r"lse has 2 dimensions.*\(batch, heads, seq\)"),
            (
                torch.empty(1, 2, 3).double(),
                TypeError,
                "lse is torch.float64 and .* takes torch.float32",
            ),
            (torch.empty(1, 3, 2).mT, ValueError, r"lse has strides .* must be contiguous"),
            (torch.empty(1, 2, 3, device="meta"), ValueError, "lse is on meta and q on cpu"),
            (3, TypeError, "lse is a int"),
            (torch.empty(1, 2, 3).requires_grad_(), ValueError, "lse requires grad"),
        ],
    )
    def test_refuses_an_lse_that_does_not_fit(self, lse, error, message):
        with pytest.raises(error, match=message):
            flash_attention.forward(CAUSAL, *inputs(AttentionForward(1, 2, 3)), lse=lse)

    def test_refuses_an_lse_in_the_memory_of_another(self):
        q, k, v = inputs(AttentionForward(1, 2, 3))
        with pytest.raises(ValueError, match="lse overlaps q in memory"):
            flash_attention.forward(
                CAUSAL, q, k, v, lse=q.view(torch.float32).flatten()[:6].view(1, 2, 3)
            )

    def test_counts_what_it_simulates(self):
        q, k, v = inputs(AttentionForward(1, 2, 3, len_k=5))
        lse = torch.empty(1, 2, 3)
        o, run = flash_attention.simulate(CAUSAL, q, k, v, softmax_scale=0.5, lse=lse)
        problem = AttentionForward(1, 2, 3, len_k=5, causal=True, softmax_scale=0.5)
        assert_right(problem, (q, k, v), o, lse)
        assert run.counters.total.instructions > 0


class TestAttention:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("scale", [None, 0.3])
    def test_is_attention(self, causal, scale):
        problem = AttentionForward(
            1, 2, 2, len_k=3, kv_heads=1, causal=causal, softmax_scale=scale, return_lse=True
        )
        given = inputs(problem)
        options = {"causal": causal, "softmax_scale": scale}
        o, lse = flash_attention.attention(*given, **options, return_lse=True)
        assert_right(problem, given, o, lse)
        assert torch.equal(flash_attention.attention(*given, **options), o)

    def test_chooses_by_all_that_is_asked(self, monkeypatch):
        ran = []
        monkeypatch.setattr(call.ReadyCall, "run", lambda self: ran.append(self.config))
        q = torch.empty(1, 256, 2, 128, dtype=torch.bfloat16)
        one = q[:, :, :1]
        for k, options in (
            (q, {}),
            (one, {}),
            (q[:, 1:], {}),
            (q, {"softmax_scale": 1.0}),
            (q, {"return_lse": True}),
            (q, {"causal": True}),
        ):
            flash_attention.attention(q, k, k, **options)
        assert ran == [general(BEFORE), *4 * [CONFIGS[0]], CAUSAL]

    def test_is_compiled_whole(self):
        torch._dynamo.reset()
        given = inputs(AttentionForward(1, 2, 3, len_k=4, kv_heads=1))

        def function(q, k, v):
            o, lse = flash_attention.attention(q, k, v, causal=True, return_lse=True)
            return o * 2, lse + 1

        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for found, wanted in zip(compiled(*given), function(*given), strict=True):
            assert torch.equal(found, wanted)

    def test_is_compiled_once_for_keys_that_grow(self):
        torch._dynamo.reset()
        compiled = torch.compile(
            flash_attention.attention, fullgraph=True, backend="aot_eager", dynamic=True
        )
        q, k, v = inputs(AttentionForward(1, 1, 2, len_k=5))
        for length in (3, 4, 5):
            keys = k[:, :length], v[:, :length]
            assert torch.equal(compiled(q, *keys), flash_attention.attention(q, *keys))

    def test_with_an_lse_is_an_operator_as_torch_expects_one(self):
        given = inputs(AttentionForward(1, 2, 3, len_k=4, kv_heads=1))
        operators = torch.ops.flash_attention
        torch.library.opcheck(operators.attention_lse.default, (*given, True, 0.5))
        torch.library.opcheck(operators.attention.default, (*given, True, 0.5))
        q, k, v = given
        o, lse = torch.empty_like(q), torch.empty(1, 2, 3)
        name = CAUSAL.short_form()
        torch.library.opcheck(operators.forward_out.default, (name, q, k, v, o, 0.5, lse))
        torch.library.opcheck(operators.forward.default, (name, q, k, v, 0.5))

    @pytest.mark.parametrize("return_lse", [False, True])
    def test_of_a_tensor_that_does_not_fit_names_it(self, return_lse):
        q = torch.empty(1, 3, 6, 128, dtype=torch.bfloat16)
        k = torch.empty(1, 4, 4, 128, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="heads 6 is not a multiple of kv_heads 4"):
            flash_attention.attention(q, k, k, return_lse=return_lse)
        with pytest.raises(ValueError, match="q has 3 dimensions"):
            flash_attention.attention(q[0], k, k, return_lse=return_lse)
        with pytest.raises(ValueError, match="softmax_scale -1 is negative: pass 1, and -q"):
            flash_attention.attention(q, q, q, softmax_scale=-1, return_lse=return_lse)


def test_a_kernel_that_masks_refuses_what_is_not_causal():
    check: Callable[..., AttentionForward] = tensors.check_problem
    q = torch.empty(1, 256, 2, 128, dtype=torch.bfloat16, device="meta")
    assert check(CAUSAL, {"q": q, "k": q, "v": q}).causal
    assert not check(general(WITH_CAUSAL), {"q": q, "k": q, "v": q}).causal
    with pytest.raises(ValueError, match="len_q 256 with len_k 255 is not supported by"):
        check(general(BEFORE), {"q": q, "k": q[:, 1:], "v": q[:, 1:]})
