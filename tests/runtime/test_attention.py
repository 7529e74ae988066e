"""attention(): what it computes, chooses and refuses; and that calls are quick and their operators
are still what torch expects of one."""

import functools
import math
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import STEPS, AttentionForward, Config
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.operations.attention_forward.inputs import make_inputs
from flash_helpers.operations.attention_forward.reference import attention_reference
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.choice import preferred_steps
from flash_helpers.runtime import call
from flash_helpers.tune import best

NEWEST = preferred_steps(OPERATION, None)[0]
CONFIG = flash_attention.best_config(NEWEST.id, "bf16", "cpu")
SMALL = AttentionForward(1, 1, 128)


def inputs(problem: AttentionForward = SMALL, dtype: torch.dtype = torch.bfloat16) -> tuple:
    return make_inputs("normal", problem, dtype)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.fixture
def ran(monkeypatch) -> list[Config]:
    """The configs whose kernels ran, in order; they compute nothing."""
    configs = []
    monkeypatch.setattr(call.ReadyCall, "run", lambda self: configs.append(self.config))
    return configs


@pytest.fixture
def whole_blocks(monkeypatch) -> None:
    """The choice is among kernels that take whole blocks of one length, and no options."""
    monkeypatch.setattr(best, "preferred_steps", lambda *_: [STEPS["o5"], STEPS["v16"]])
    monkeypatch.setattr(call, "_plans", {})


@pytest.mark.slow
class TestResult:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(
        "problem", [SMALL, AttentionForward(2, 3, 77), AttentionForward(1, 16, 128)], ids=str
    )
    def test_is_attention(self, problem, dtype):
        q, k, v = inputs(problem, dtype)
        o = flash_attention.attention(q, k, v)
        found = attention_reference(q, k, v)
        assert measure_error(o, found.expected["o"]).within(found.bounds["o"])
        assert (o.shape, o.dtype, o.is_contiguous()) == (q.shape, dtype, True)

    def test_is_that_of_forward_with_the_chosen_config(self):
        assert torch.equal(
            flash_attention.attention(*inputs()), flash_attention.forward(CONFIG, *inputs())
        )

    def test_of_strided_tensors_is_that_of_contiguous_ones(self):
        q, k, v = inputs(AttentionForward(2, 2, 128))
        strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        assert torch.equal(flash_attention.attention(*strided), flash_attention.attention(q, k, v))


class TestChoice:
    @pytest.mark.parametrize(
        ("problem", "config"),
        [
            (AttentionForward(2, 16, 256), CONFIG),
            (AttentionForward(2, 3, 256), CONFIG.general()),  # another row stride
        ],
        ids=["own row stride", "another row stride"],
    )
    def test_on_the_cpu_is_the_last_step_of_the_newest_portable_family(self, ran, problem, config):
        flash_attention.attention(*(empty(*problem.shape) for _ in range(3)))
        assert ran == [config]
        assert config.step == NEWEST

    @pytest.mark.parametrize("dtype", AMPERE.dtypes)
    def test_follows_length_and_dtype(self, ran, whole_blocks, dtype):
        for seq_len in (64, 128, 192):
            q = empty(1, seq_len, 1, 128, dtype=getattr(torch, dtype.torch_name))
            flash_attention.attention(q, q, q)
        assert [c.step.id for c in ran] == ["v16", "o5", "v16"]
        assert {c.dtype for c in ran} == {dtype}


@pytest.mark.usefixtures("whole_blocks")
class TestRefusal:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"causal": True}, "causal is not supported by .*: without causal=True every query"),
            ({"softmax_scale": 0.1}, r"softmax_scale 0.1 is not supported .*\(d_head\); multip"),
            ({"return_lse": True}, "return_lse is not supported by .*the output alone"),
        ],
    )
    def test_of_an_option_names_it(self, ran, options, message):
        q = empty(*SMALL.shape)
        with pytest.raises(ValueError, match=message):
            flash_attention.attention(q, q, q, **options)
        assert ran == []

    def test_of_a_scale_is_not_that_of_the_usual_one(self, ran):
        q = empty(*SMALL.shape)
        for scale in (128**-0.5, 1 / math.sqrt(128), torch.tensor(128.0).rsqrt().item()):
            flash_attention.attention(q, q, q, softmax_scale=scale)
        assert len(ran) == 3
        with pytest.raises(ValueError, match=r"softmax_scale 0.088388\d+ is not supported"):
            flash_attention.attention(q, q, q, softmax_scale=128**-0.5 * (1 + 1e-6))

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            ([(1, 100, 2, 128)] * 3, "seq_len 100 is not a multiple of B_r 64 .*: use 128"),
            ([(1, 128, 2, 64)] * 3, "d_head 64 is not supported by .*: pad .* to 128"),
            ([(1, 128, 2, 256)] * 3, "d_head 256 is not supported by .*: use 128 at most"),
            ([(128, 2, 128)] * 3, "q has 3 dimensions"),
            (
                [(1, 128, 8, 128), (1, 128, 2, 128), (1, 128, 2, 128)],
                r"heads 8 on 2 of k and v is not .*: pass k.repeat_interleave\(4, dim=2\), and v",
            ),
            (
                [(1, 128, 2, 128), (1, 256, 2, 128), (1, 256, 2, 128)],
                "len_q 128 with len_k 256 is not supported by .*: pad q to as many rows as k and v",
            ),
        ],
    )
    def test_of_a_shape_names_the_nearest(self, ran, shapes, message):
        with pytest.raises(ValueError, match=message):
            flash_attention.attention(*(empty(*shape) for shape in shapes))
        assert ran == []

    def test_of_a_type_names_those_there_are(self, ran):
        q = empty(*SMALL.shape)
        with pytest.raises(TypeError, match=r"q is a NoneType: pass a torch\.Tensor"):
            flash_attention.attention(None, q, q)
        with pytest.raises(TypeError, match=r"float32 and the kernels take torch.float16 or torch"):
            flash_attention.attention(q.float(), q, q)
        with pytest.raises(TypeError, match=r"k is torch.float16 and .* takes torch.bfloat16"):
            flash_attention.attention(q, q.half(), q)

    @pytest.mark.parametrize(
        ("q", "k"),
        [
            ((1, 8, 256, 128), (1, 8, 256, 128)),
            ((1, 8, 256, 128), (1, 2, 256, 128)),
            ((1, 32, 1000, 128), (1, 32, 1000, 128)),
            ((1, 8, 200, 128), (1, 8, 77, 128)),  # whose heads seem to be 200 on 77
        ],
    )
    def test_of_heads_before_the_sequence_names_the_layout(self, ran, q, k):
        with pytest.raises(ValueError, match=r"; if q, k and v are \(batch, heads, seq, d_head\)"):
            flash_attention.attention(empty(*q), empty(*k), empty(*k))
        assert ran == []

    @pytest.mark.parametrize("shape", [(1, 100, 2, 128), (1, 8, 16, 64), (8, 16, 128)])
    def test_of_what_is_no_such_layout_does_not_name_it(self, ran, shape):
        with pytest.raises(ValueError, match=r"seq|dimensions|d_head") as refused:
            flash_attention.attention(*(empty(*shape) for _ in range(3)))
        assert "transpose" not in str(refused.value)

    @pytest.mark.parametrize(
        ("lengths", "heads", "options"),
        [
            ((100, 100), (2, 2), {}),
            ((128, 128), (1, 1), {"causal": True}),
            ((128, 192), (4, 2), {"causal": True, "softmax_scale": 0.1}),
            ((128, 128), (1, 1), {"return_lse": True}),
        ],
    )
    def test_on_the_cpu_names_a_config_that_takes_the_problem(self, ran, lengths, heads, options):
        q = empty(1, lengths[0], heads[0], 128)
        k = empty(1, lengths[1], heads[1], 128)
        with pytest.raises(ValueError, match=r"simulate\(\) counts it too") as refused:
            flash_attention.attention(q, k, k, **options)
        (found,) = re.findall(
            r"forward\((.*)\) simulates a kernel that computes", str(refused.value)
        )
        assert ran == []
        names = {"q": q, "k": k, "v": k, "lse": torch.empty(1, heads[0], lengths[0])}
        o = eval(f"forward({found})", {"forward": flash_attention.forward, **names})
        (config,) = ran
        assert not config.family.is_portable and o.shape == q.shape
        assert ("lse=lse" in found) == options.get("return_lse", False)

    def test_of_tensors_without_data_names_where_they_are(self, ran):
        q = empty(*SMALL.shape).to("meta")
        with pytest.raises(RuntimeError, match="on meta, where they have shapes and no data: make"):
            flash_attention.attention(q, q, q)
        with torch._subclasses.FakeTensorMode():  # the way out that is named
            q = empty(*SMALL.shape)
            assert flash_attention.attention(q, q, q).shape == SMALL.shape
        assert ran == []

    @pytest.mark.parametrize("value", ["no", "", 1, 0, None, torch.tensor(True)], ids=repr)
    @pytest.mark.parametrize("name", ["causal", "return_lse"])
    def test_of_what_is_no_bool_names_it(self, ran, name, value):
        q = empty(*SMALL.shape)
        with pytest.raises(TypeError, match=f"{name} is {re.escape(repr(value))}: pass True or"):
            flash_attention.attention(q, q, q, **{name: value})
        assert ran == []

    @pytest.mark.parametrize("value", ["0.5", True, [1.0], torch.ones(2), 1j], ids=repr)
    @pytest.mark.parametrize(
        "function",
        [
            flash_attention.attention,
            functools.partial(flash_attention.forward, CONFIG),
            functools.partial(flash_attention.simulate, CONFIG),
            functools.partial(flash_attention.run, CONFIG),
        ],
        ids=["attention", "forward", "simulate", "run"],
    )
    def test_of_a_scale_that_is_no_number_names_it(self, ran, function, value):
        q = empty(*SMALL.shape)
        with pytest.raises(TypeError, match=f"softmax_scale is {re.escape(repr(value))}: pass a"):
            function(q, q, q, softmax_scale=value)
        assert ran == []

    def test_of_an_option_of_simulate_or_run_that_is_no_bool_names_it(self, ran):
        q = empty(*SMALL.shape)
        with pytest.raises(TypeError, match="keep_going is 'no': pass True or False"):
            flash_attention.simulate(CONFIG, q, q, q, keep_going="no")
        with pytest.raises(TypeError, match="causal is 'no': pass True or False"):
            flash_attention.run(CONFIG, q, q, q, causal="no")

    def test_of_another_layout_copies_nothing(self, ran):
        q = empty(1, 128, 1, 256)[..., ::2]
        with pytest.raises(ValueError, match=r"q has stride 2 .*call \.contiguous\(\)"):
            flash_attention.attention(q, q, q)


def attention(q: torch.Tensor) -> torch.Tensor:
    return flash_attention.attention(q, q, q)


def forward(q: torch.Tensor) -> torch.Tensor:
    return flash_attention.forward(CONFIG, q, q, q)


def forward_out(q: torch.Tensor) -> torch.Tensor:
    return flash_attention.forward(CONFIG, q, q, q, torch.empty_like(q))


either = pytest.mark.parametrize("function", [attention, forward])
any_of_three = pytest.mark.parametrize("function", [attention, forward, forward_out])


class TestCompile:
    @pytest.fixture(autouse=True)
    def reset(self):
        torch._dynamo.reset()

    @pytest.mark.slow
    def test_takes_attention_whole(self):
        q, k, v = inputs()
        compiled = torch.compile(
            lambda q, k, v: flash_attention.attention(q, k, v) * 2,
            fullgraph=True,
            backend="aot_eager",
        )
        assert torch.equal(compiled(q, k, v), flash_attention.attention(q, k, v) * 2)

    def test_has_no_defaults_that_compiled_code_would_pass_by_name(self):
        arguments = torch.ops.flash_attention.attention.default._schema.arguments
        assert [argument.name for argument in arguments if argument.has_default_value()] == []

    def test_chooses_anew_for_another_length(self, ran, whole_blocks):
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
        for seq_len in (128, 64, 256):
            compiled(empty(2, seq_len, 3, 128))
        assert [config.step.id for config in ran] == ["o5", "v16", "o5"]

    @pytest.mark.parametrize(
        ("shape", "options", "message"),
        [
            ((1, 100, 1, 128), {}, "seq_len 100 is not a multiple of B_r 64"),
            (SMALL.shape, {"causal": True}, "causal is not supported by"),
            (SMALL.shape, {"softmax_scale": 1.0}, r"softmax_scale 1\.0 is not supported by"),
        ],
    )
    def test_is_refused_what_is_refused_without(self, ran, whole_blocks, shape, options, message):
        compiled = torch.compile(
            lambda q: flash_attention.attention(q, q, q, **options), backend="aot_eager"
        )
        with pytest.raises(Exception, match=message):
            compiled(empty(*shape))
        assert ran == []


class Operators(TorchDispatchMode):
    """Keeps the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.name())
        return operator(*args, **(kwargs or {}))


@any_of_three
class TestOperator:
    """Who watches or traces a call sees its operator."""

    def test_is_seen_by_a_dispatch_mode(self, ran, function):
        with Operators() as seen:
            function(empty(*SMALL.shape))
        assert f"flash_attention::{function.__name__}" in seen.names

    def test_is_in_a_profile(self, ran, function):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function(empty(*SMALL.shape))
        assert f"flash_attention::{function.__name__}" in [e.key for e in profile.key_averages()]

    def test_is_in_a_trace(self, ran, function):
        q = empty(*SMALL.shape)
        graph = torch.fx.experimental.proxy_tensor.make_fx(function)(q).graph
        assert f"flash_attention.{function.__name__}.default" in str(graph)

    def test_is_not_dispatched_again_when_nobody_watches(self, ran, function, monkeypatch):
        monkeypatch.setattr(torch._C, "_AutoDispatchBelowAutograd", None)  # as dispatching does
        function(empty(*SMALL.shape))
        with torch.no_grad():
            function(empty(*SMALL.shape).requires_grad_())
        assert len(ran) == 2


@pytest.mark.slow
def test_operators_are_what_torch_expects_of_one():
    q, k, v = inputs(AttentionForward(1, 1, 64))
    name = flash_attention.best_config("v16", "bf16", "cpu").short_form()
    operators = torch.ops.flash_attention
    o = torch.empty_like(q)
    torch.library.opcheck(operators.forward.default, (name, q, k, v, None))
    torch.library.opcheck(operators.forward_out.default, (name, q, k, v, o, None, None))
    torch.library.opcheck(operators.attention.default, (q, k, v, False, None))


@pytest.mark.slow
@either
def test_a_negative_view_has_the_sign_that_it_shows(function):
    q, *_ = inputs(dtype=torch.bfloat16)
    view = torch._neg_view(q)  # as of .conj().imag: the memory holds q
    assert torch.equal(function(view), function(-q))


@pytest.mark.parametrize("name", ["q", "o", "lse"])
def test_a_negative_view_beside_a_given_output_is_refused(ran, name):
    given = {x: empty(*SMALL.shape) for x in "qkvo"} | {"lse": torch.empty(1, 1, 128)}
    given[name] = torch._neg_view(given[name])
    with pytest.raises(ValueError, match=r"a negative view, .*call \.resolve_neg\(\), or leave"):
        flash_attention.forward(CONFIG, **given)
    if name == "q":
        with pytest.raises(ValueError, match="a negative view"):
            flash_attention.forward(CONFIG, **{**given, "lse": None})
    assert ran == []


def test_a_scale_that_no_float_holds_is_refused_as_infinite(ran):
    q = empty(*SMALL.shape)
    with pytest.raises(ValueError, match="softmax_scale inf"):
        flash_attention.attention(q, q, q, softmax_scale=10**400)


def test_autograd_sees_that_a_saved_tensor_was_overwritten(ran):
    o = empty(*SMALL.shape)
    weight = torch.ones(SMALL.shape, requires_grad=True)
    loss = (weight * o).sum()
    flash_attention.forward(CONFIG, *(empty(*SMALL.shape) for _ in range(3)), o)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_output_may_be_an_inference_tensor(ran):
    with torch.inference_mode():
        o = empty(*SMALL.shape)
        assert flash_attention.forward(CONFIG, *(empty(*SMALL.shape) for _ in range(3)), o) is o


class TestPlan:
    """Facts of shapes and strides are found out once; what depends on addresses is
    looked at in every call."""

    @pytest.fixture(autouse=True)
    def none_yet(self, ran):
        call._plans.clear()

    def test_is_made_once_for_each_layout(self, monkeypatch):
        made = []
        call_of = type(CONFIG).call

        def count(config, problem, strides, device):
            made.append(problem)
            return call_of(config, problem, strides, device)

        monkeypatch.setattr(type(CONFIG), "call", count)
        problems = [SMALL, AttentionForward(1, 2, 128), SMALL, AttentionForward(1, 2, 128)]
        for problem in problems:
            for _ in range(2):
                q, k, v = (empty(*problem.shape) for _ in range(3))
                flash_attention.forward(CONFIG, q, k, v)
                flash_attention.forward(CONFIG.short_form(), q, k, v)
        assert made == problems[:2]

    def test_knows_strides_dtypes_and_who_is_who(self):
        q = empty(*AttentionForward(2, 16, 128).shape)
        head_major = empty(2, 16, 128, 128).transpose(1, 2)
        for tensors in ((q, q, q), (q, head_major, q), (q, q, head_major)):
            strides = {
                name: call.tensors.kernel_strides(x)
                for name, x in zip("qkvo", (*tensors, q), strict=True)
            }
            expected = CONFIG.call(AttentionForward(2, 16, 128), strides, largest_device(80))
            assert call.prepare(CONFIG, *tensors).plan.call == expected
        with pytest.raises(TypeError, match=r"v is torch\.float16"):
            flash_attention.forward(CONFIG, q, q, q.half())

    @pytest.mark.parametrize(
        "q",
        [
            empty(2, 128, 3, 128),
            empty(2, 3, 128, 128).transpose(1, 2),
            empty(2, 128, 3, 3, 128)[:, :, 1],
            empty(128 * 128).as_strided(SMALL.shape, (8, 128, 24, 1)),
        ],
        ids=["contiguous", "head-major", "packed", "single items"],
    )
    def test_has_an_output_of_the_usual_strides(self, q):
        for _ in range(2):
            assert flash_attention.forward(CONFIG, q, q, q).stride() == empty(*q.shape).stride()

    def test_does_not_hide_where_tensors_begin(self):
        memory = empty(5 * 128 * 128)
        q, k, v, o = (memory[n * 128 * 128 :][: 128 * 128].view(SMALL.shape) for n in range(4))
        flash_attention.forward(CONFIG, q, k, v, o)
        shifted = memory[4:][: 128 * 128].view(SMALL.shape)
        with pytest.raises(ValueError, match="q starts at address 0x"):
            flash_attention.forward(CONFIG, shifted, k, v, o)
        half_a_tensor_on = memory[128 * 64 :][: 128 * 128].view(SMALL.shape)
        for name in "qkv":
            with pytest.raises(ValueError, match=f"o overlaps {name} in memory"):
                given = {"q": q, "k": k, "v": v, name: half_a_tensor_on}
                others = {n: empty(*SMALL.shape) for n in "qkv" if n != name}
                flash_attention.forward(CONFIG, **{**given, **others}, o=q)
        with pytest.raises(ValueError, match="o requires grad"):
            flash_attention.forward(CONFIG, q, k, v, torch.empty_like(o).requires_grad_())

    def test_takes_an_output_between_the_rows_of_the_inputs(self, ran):
        q, k, v, o = empty(1, 128, 4, 1, 128).unbind(2)
        assert flash_attention.forward(CONFIG, q, k, v, o) is o
        with pytest.raises(ValueError, match="elements share memory"):
            flash_attention.forward(CONFIG, q, k, v, empty(1, 1, 1, 128).expand(SMALL.shape))

    def test_is_forgotten_when_there_are_too_many(self, monkeypatch):
        monkeypatch.setattr(call, "_PLANS_KEPT", 2)
        for batch in (1, 2, 3, 1):
            q = empty(batch, 128, 1, 128)
            flash_attention.forward(CONFIG, q, q, q)
            assert len(call._plans) <= 2

    def test_is_not_made_of_what_is_refused(self):
        q = empty(1, 128, 1, 64)
        for _ in range(2):
            with pytest.raises(ValueError, match="d_head 64"):
                flash_attention.forward(CONFIG, q, q, q)
