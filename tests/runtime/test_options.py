"""Windows, softcap, sinks and a head size of V from a call to the problem that a kernel gets. No
kernel runs: the float64 reference computes the problem in its place."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import flash_attention
from flash_attention import _forward, _operators
from flash_helpers.kernel_configs import AttentionForward, Config, Element
from flash_helpers.operations.attention_forward.inputs import draw
from flash_helpers.operations.attention_forward.reference import reference
from flash_helpers.operations.attention_forward.supports import ABILITIES
from flash_helpers.registry.general import GENERAL, GeneralKernelConfig
from flash_helpers.runtime import call, library, saved_calls
from flash_helpers.tune import best

PLAIN = GENERAL.progression()[-1].replace(dtype=Element.BF16)  # whose arguments have all options
CAUSAL = PLAIN.replace(causal=True)
SIZES = {"batch": 1, "heads": 2, "len_q": 3, "len_k": 5, "kv_heads": 1, "d_v": 64}
WINDOW = {"window_left": 2, "window_right": 1}
CASES = [WINDOW, {"softcap": 1.5}, {"sinks": True}, {**WINDOW, "softcap": 0.5, "sinks": True}, {}]
EMPTY = torch.empty(1, 3, 2, 128, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def ran(monkeypatch) -> list[AttentionForward]:
    """The problems that ran, in order. attention() knows two configs, which take everything with a
    d_v of 64."""
    problems: list[AttentionForward] = []
    declared = GeneralKernelConfig.supports

    def supports(config: Config) -> Any:
        every = frozenset(ABILITIES)
        return replace(declared.fget(config), abilities=every, d_v=64)

    def run(ready: call.ReadyCall, *_: object) -> None:
        problems.append(ready.problem)
        found = reference(ready.problem, ready.tensors).expected
        for name, output in ready.outputs.items():
            output.copy_(found[name])

    monkeypatch.setattr(GeneralKernelConfig, "supports", property(supports))
    by_name = {config.short_form(): config for config in (PLAIN, CAUSAL)}
    monkeypatch.setattr(library, "resolve", lambda c: by_name.get(c, c))
    monkeypatch.setattr(_forward, "resolve", lambda c: by_name.get(c, c))
    monkeypatch.setattr(_operators, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(best, "_candidates", lambda *_: (PLAIN, CAUSAL))
    monkeypatch.setattr(call, "_plans", {})
    monkeypatch.setattr(call.ReadyCall, "run", run)
    monkeypatch.setattr(call.ReadyCall, "simulate", run)
    return problems


def posed(return_lse: bool, options: dict[str, Any]) -> AttentionForward:
    return AttentionForward(**SIZES, return_lse=return_lse, **options)


def arguments(problem: AttentionForward, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A call's arguments behind q, k and v."""
    bounds = (problem.window_left, problem.window_right)
    return {
        "window_size": tuple(-1 if bound is None else bound for bound in bounds),
        "softcap": problem.softcap,
        "sinks": inputs.get("sinks"),
    }


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("options", CASES, ids=str)
class TestCall:
    def test_of_attention_poses_them(self, ran, options, return_lse):
        problem = posed(return_lse, options)
        inputs = draw("normal", problem)
        q, k, v = (inputs[name] for name in "qkv")
        asked = arguments(problem, inputs)
        expected = reference(problem, inputs).expected

        def ask(q, k, v):
            return flash_attention.attention(q, k, v, **asked, return_lse=return_lse)

        torch._dynamo.reset()
        compiled = torch.compile(ask, fullgraph=True, backend="aot_eager")
        for function in (ask, compiled):
            found = function(q, k, v)
            outputs = dict(zip(("o", "lse"), found if return_lse else [found], strict=False))
            for name, x in outputs.items():
                assert torch.equal(x, expected[name].to(x.dtype)), name
            assert outputs["o"].shape == problem.o_shape
        assert ran == 2 * [problem]

    def test_of_forward_poses_them(self, ran, options, return_lse):
        problem = posed(return_lse, options)
        inputs = draw("normal", problem)
        q, k, v = (inputs[name] for name in "qkv")
        lse = torch.empty(1, 2, 3) if return_lse else None
        expected = reference(problem, inputs).expected
        for o in (None, torch.empty(problem.o_shape, dtype=torch.bfloat16)):
            asked = {**arguments(problem, inputs), "lse": lse}
            found = flash_attention.forward(PLAIN, q, k, v, o, **asked)
            assert o is None or found is o
            assert torch.equal(found, expected["o"].bfloat16())
            if return_lse:
                assert torch.equal(lse, expected["lse"].float())
        found, _ = flash_attention.simulate(PLAIN, q, k, v, **asked)
        named = problem.arranged({**inputs, **({"lse": lse} if return_lse else {})})
        own = {n: x for n, x in options.items() if n != "sinks"}
        again = flash_attention.run(PLAIN, *named, **own)["o"]
        assert torch.equal(found, again) and torch.equal(again, expected["o"].bfloat16())
        assert ran == 4 * [problem]


def test_of_a_causal_kernel_has_the_left_bound_alone(ran):
    q, k, v = (draw("normal", posed(False, {}))[name] for name in "qkv")
    for asked in ({"causal": True, "window_size": (1, 7)}, {"window_size": [1, 0]}):
        flash_attention.attention(q, k, v, **asked)
    flash_attention.forward(CAUSAL, q, k, v, window_size=(1, -1))
    assert ran == 3 * [posed(False, {"causal": True, "window_left": 1})]
    flash_attention.attention(q, k, v, window_size=(4, 2))  # which hides nothing
    flash_attention.attention(q, k, v, window_size=(2**70, -1), softcap=0)
    assert ran[3:] == 2 * [posed(False, {})]


def test_an_operator_is_as_torch_expects_one(ran):
    inputs = draw("normal", posed(True, {"sinks": True}))
    q, k, v, sinks = inputs.values()
    operators = torch.ops.flash_attention
    options = (2, None, 1.5, None)
    for operator in (operators.attention_options, operators.attention_options_lse):
        for given in ((sinks, True, *options, False), (None, False, *options, True)):
            torch.library.opcheck(operator.default, (q, k, v, *given))
    name, o, lse = PLAIN.short_form(), torch.empty(1, 3, 2, 64).bfloat16(), torch.empty(1, 2, 3)
    torch.library.opcheck(operators.forward_options.default, (name, q, k, v, sinks, *options))
    torch.library.opcheck(
        operators.forward_options_out.default, (name, q, k, v, sinks, o, *options, lse)
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\), and a bound is at le"),
        ({"window_size": 7}, TypeError, "window_size is 7: pass two whole numbers"),
        ({"window_size": (1, 2, 3)}, TypeError, r"window_size is \(1, 2, 3\): pass two"),
        ({"window_size": (True, 1)}, TypeError, r"window_size is \(True, 1\): pass two"),
        ({"window_size": (1.0, 2)}, TypeError, r"window_size is \(1.0, 2\): pass two"),
        ({"window_size": None}, TypeError, "window_size is None: pass two"),
        ({"softcap": -1}, ValueError, "softcap -1: softcap must be from 2"),
        ({"softcap": float("nan")}, ValueError, "softcap nan: softcap must be from 2"),
        ({"softcap": "50"}, TypeError, "softcap is '50': pass a number, or 0 for none"),
        ({"softcap": True}, TypeError, "softcap is True: pass a number"),
        ({"sinks": [1.0, 2.0]}, TypeError, "sinks is a list: pass a torch.Tensor"),
        ({"sinks": EMPTY[0, 0, :, 0].float()}, TypeError, "sinks is torch.float32 and"),
        ({"sinks": EMPTY[0, 0, 0, :3]}, ValueError, r"sinks has shape \(3,\) .*: heads must be eq"),
        ({"sinks": EMPTY[0, 0, :, 0].to("meta")}, ValueError, "sinks is on meta and q on cpu"),
        ({"sinks": EMPTY[0, 0]}, ValueError, "sinks has 2 dimensions"),
        ({"sinks": EMPTY[0, 0, :, 0]}, ValueError, "sinks has strides .* call .contiguous()"),
    ],
)
@pytest.mark.parametrize("function", ["attention", "forward"])
def test_a_value_that_is_none_is_refused(ran, function, options, error, message):
    call = getattr(flash_attention, function)
    config = [PLAIN] if function == "forward" else []
    with pytest.raises(error, match=message):
        call(*config, EMPTY, EMPTY, EMPTY[..., :64], **options)
    assert ran == []


def test_a_kernel_without_them_names_the_call_of_one_that_has_them(monkeypatch):
    monkeypatch.setattr(_forward, "newest_that_takes", lambda problem: PLAIN)
    problem = posed(True, {**WINDOW, "softcap": 2.0, "sinks": True})
    text = _forward._simulated_text(problem)
    wanted = "window_size=(2, 1), softcap=2, sinks=sinks, lse=lse) simulates a kernel"
    assert wanted in text


def test_a_saved_call_is_replayed_with_them(ran, tmp_path, monkeypatch):
    problem = posed(True, {**WINDOW, "softcap": 2.0, "sinks": True})
    inputs = draw("normal", problem)
    q, k, v, sinks = inputs.values()
    asked = {"window_size": (2, 1), "softcap": 2.0, "sinks": sinks, "lse": torch.empty(1, 2, 3)}
    ready = []
    monkeypatch.setattr(call.ReadyCall, "run", lambda self: ready.append(self))
    flash_attention.forward(PLAIN, q, k, v, **asked)
    (first,) = ready
    monkeypatch.setattr(saved_calls, "config_from_short_form", lambda _: PLAIN)
    path = tmp_path / "call_1.pt"
    outputs = first.outputs
    saved_calls.save_call(path, PLAIN, first.problem, inputs, outputs)
    saved = saved_calls.load_call(path)
    assert saved.problem == problem
    again = call.prepare(PLAIN, *saved.tensors("cpu"), **saved.problem.call_options())
    assert again.problem == problem
    assert torch.equal(again.tensors["sinks"], sinks)


def test_fake_tensors_have_the_head_size_of_v():
    with FakeTensorMode():
        q, v = torch.empty(1, 3, 2, 128).bfloat16(), torch.empty(1, 3, 2, 64).bfloat16()
        o, lse = flash_attention.attention(q, q, v, softcap=2.0, return_lse=True)
        assert (o.shape, lse.shape) == ((1, 3, 2, 64), (1, 2, 3))


def test_run_takes_options_of_the_problem_alone(ran):
    q, k, v = (draw("normal", posed(False, {}))[name] for name in "qkv")
    with pytest.raises(ValueError, match=re.escape("causal is not supported by g")):
        flash_attention.run(PLAIN, q, k, v, causal=True)
    for options, message in (
        ({"window_left": "3"}, "window_left is '3': pass a whole number"),
        ({"softcap": "3"}, "softcap is '3': pass a number, or leave it out"),
        ({"return_lse": True}, "attention_forward has no option return_lse"),
    ):
        with pytest.raises(TypeError, match=message):
            flash_attention.run(PLAIN, q, k, v, **options)
    assert ran == []
