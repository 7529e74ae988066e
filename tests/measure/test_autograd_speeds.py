"""Forward and backward passes through autograd, as the benchmark runs them, and its table."""

from pathlib import PurePosixPath

import pytest
from fake_backend import fake_backend, load_tool
from torch.nn.attention import SDPBackend

import flash_attention
from flash_helpers.check.errors import measure_error
from flash_helpers.console.tables import DASH
from flash_helpers.course.blocks import render
from flash_helpers.course.evidence import Evidence
from flash_helpers.kernel_configs import Element
from flash_helpers.measure import autograd, benchmark, timing
from flash_helpers.measure.autograd import BACKENDS, LAB, AutogradSpeeds, contenders
from flash_helpers.measure.benchmark import InputSet
from flash_helpers.measure.machine import provenance
from flash_helpers.measure.results import RESULTS, Measurement, Protocol
from flash_helpers.operations.attention_backward.inputs import draw
from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_backward.reference import reference

PROBLEM = AttentionBackward(1, 1, 64, causal=True, dtype=Element.BF16)


@pytest.mark.parametrize("name", [LAB, *BACKENDS])
def test_each_contender_returns_all_gradients(name, monkeypatch) -> None:
    on_a_cpu = dict.fromkeys(BACKENDS, SDPBackend.MATH)
    monkeypatch.setattr(autograd, "BACKENDS", on_a_cpu)
    inputs = draw("normal", PROBLEM)
    right = reference(PROBLEM, inputs)
    (own,) = [c for c in contenders(flash_attention.attention, True) if c.name == name]
    found = own.run(InputSet(PROBLEM, inputs, {}, right))
    assert found.keys() == right.expected.keys()
    for gradient, x in found.items():
        error = measure_error(x, right.expected[gradient])
        assert error.within(right.bounds[gradient]), f"{gradient}: {error}"
    assert not any(x.requires_grad for x in inputs.values())


def timed(name: str, problem: AttentionBackward, *samples_ms: float) -> Measurement:
    failure = "" if samples_ms else "it does not run"
    return Measurement(
        name, "", problem.record(), 1, 1, samples_ms, None, None, None, None, failure
    )


SHORT, LONG = (AttentionBackward(1, 1, n, causal=True, dtype=Element.BF16) for n in (512, 1024))
SPEEDS = AutogradSpeeds(
    provenance(fake_backend(), "autograd.py", "68cfc22"),
    Protocol(),
    (
        timed(LAB, SHORT, 1e-3, 1e-3, 2e-3),
        timed("flash", SHORT, 2e-3, 2e-3, 4e-3),
        timed("cuDNN", SHORT, 1.5e-3, 3e-3, 2.4e-3),
        timed(LAB, LONG, 1.0),
        timed("flash", LONG, 1.25),
        timed("cuDNN", LONG),
    ),
)


def test_the_ratio_is_that_to_the_faster_backend_in_each_round(tmp_path) -> None:
    SPEEDS.save(tmp_path / "speeds.json")
    assert AutogradSpeeds.load(tmp_path / "speeds.json") == SPEEDS
    first, second = SPEEDS.table().rows
    assert (first[0], first[-1]) == (str(SHORT), "1.50")  # of 1.5, 2.0 and 1.2
    assert second[-2:] == [DASH, "1.25"]
    operations = 3.5 * 4 * 512 * 512 * 128 / 2
    assert first[1] == f"{operations / 1e-3 / 1e9:.0f}"


def test_a_page_shows_the_table_and_how_it_was_measured(tmp_path) -> None:
    path = tmp_path / RESULTS.with_name("autograd_h100.json")
    path.parent.mkdir(parents=True)
    SPEEDS.save(path)
    text = render(Evidence(tmp_path), "autograd", "autograd_h100", PurePosixPath("docs/using.md"))
    assert text.startswith(SPEEDS.table().markdown())
    assert "commit 68cfc22" in text and "PyTorch's faster backend" in text


def test_an_interrupted_run_keeps_the_problems_that_it_measured(
    monkeypatch, tmp_path, capsys
) -> None:
    tool, asked = load_tool("benchmarks/autograd.py"), []

    def measure_problem(contenders, sets, problem, *_) -> list[Measurement]:
        if asked:
            raise KeyboardInterrupt
        asked.append(problem)
        return [timed(own.name, problem, 1.0) for own in contenders]

    monkeypatch.setattr(tool, "find_backend", lambda kind: fake_backend())
    monkeypatch.setattr(tool, "GpuSensor", lambda device: None)
    monkeypatch.setattr(timing, "make_timer", lambda device, protocol: None)
    monkeypatch.setattr(benchmark, "make_input_sets", lambda *_: [])
    monkeypatch.setattr(benchmark, "measure_problem", measure_problem)
    path = tmp_path / "autograd.json"
    assert tool.main(["--json", str(path), "--commit", "68cfc22"]) == 130
    assert {m.asked for m in AutogradSpeeds.load(path).measurements} == {*asked}
    assert f"interrupted, {path} holds each problem" in capsys.readouterr().err
