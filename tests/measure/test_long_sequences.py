"""The arithmetic of a ring of GPUs, the records of its measurement, and the tool at a toy size."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from drawn_figure import collisions
from fake_backend import ROOT, fake_backend, load_tool

from flash_helpers.console.tables import DASH
from flash_helpers.course.blocks import render
from flash_helpers.course.evidence import Evidence
from flash_helpers.measure.machine import provenance
from flash_helpers.measure.results import RESULTS
from flash_helpers.measure.ring_costs import (
    Machine,
    Shape,
    hidden_table,
    least_tokens,
    scale_table,
    share_of_one,
    times,
)
from flash_helpers.measure.ring_plot import (
    FILES,
    ring_figure,
    ring_numbers,
    ring_svg,
    stale_rings,
)
from flash_helpers.measure.ring_speeds import (
    BOTH,
    FORWARD,
    ONE,
    PYTORCH,
    RING,
    RingSpeed,
    RingSpeeds,
)
from flash_helpers.registry.selection import UsageError

EXACT = Machine(forward=100.0, backward=100.0, nvlink=100.0, network=10.0, memory=1e9, reached=1.0)


# -- arithmetic ------------------------------------------------------------------------------------


def test_a_step_counts_products_and_bytes() -> None:
    shape = Shape(1000, heads=4, kv_heads=2, d_head=10, causal=False)
    forward, backward = shape.forward(), shape.backward()
    assert forward.operations == 2 * 2 * 4 * 10 * 1000**2  # two products of 2 operations
    assert forward.sent == 2 * 2 * 2 * 10 * 1000  # K and V, of 2 bytes
    assert backward.operations == 2.5 * forward.operations
    assert backward.sent == 3 * forward.sent  # and dK and dV, of 4 bytes
    assert replace(shape, causal=True).forward().operations == forward.operations / 2
    assert replace(shape, tokens=2000).forward().bytes_per_operation == (
        forward.bytes_per_operation / 2
    )


@pytest.mark.parametrize("backward", [False, True])
def test_from_the_least_tokens_on_a_transfer_takes_no_longer_than_its_kernels(backward) -> None:
    shape = Shape(1000)
    step = shape.backward() if backward else shape.forward()
    least = least_tokens(shape, 100.0, 100.0, step)
    at_least = replace(shape, tokens=round(least))
    of_step = times(at_least.backward() if backward else at_least.forward(), 100.0, 8, EXACT)
    assert of_step.kernels == pytest.approx(of_step.transfer, rel=1e-3)
    assert of_step.transfer > of_step.exposed


def test_one_gpu_is_as_fast_as_itself() -> None:
    assert share_of_one(Shape(4096), 1, EXACT, backward=False) == pytest.approx(1.0, abs=1e-6)


def test_a_slow_link_and_short_shards_cost_speed() -> None:
    shares = [
        share_of_one(Shape(tokens), ranks, Machine(), backward=False)
        for ranks, tokens in ((8, 32768), (64, 32768), (64, 8192), (64, 2048))
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.1 < 0.9 < shares[0] < 1.0


def test_the_page_has_each_table_and_no_other() -> None:
    page = PurePosixPath("docs/long_sequences.md")
    text = render(Evidence(ROOT), "ring", "scale", page)
    assert text == scale_table().markdown()
    assert len(hidden_table().rows) == 4
    with pytest.raises(UsageError, match="there is no table 'wide': the tables are bytes, hidden"):
        render(Evidence(ROOT), "ring", "wide", page)


# -- records ---------------------------------------------------------------------------------------


def speed(name: str, ranks: int, **changes: object) -> RingSpeed:
    own = RingSpeed(name, ranks, 1000, 4, 4, 100, "bf16", True, FORWARD)
    return replace(own, **changes)  # type: ignore[arg-type]


def speeds(*found: RingSpeed, simulated: bool = False) -> RingSpeeds:
    return RingSpeeds(provenance(fake_backend(), "tool", "68cfc22"), 3, 250, simulated, found)


def test_a_ring_is_compared_with_one_gpu_of_as_many_tokens() -> None:
    # 4 · 1000 · 1000 · 4 heads · 100 / 2 operations on one, twice the keys in a ring of two
    one = speed(ONE, 1, samples_ms=(1.0, 2.0, 3.0))
    ring = speed(RING, 2, samples_ms=(4.0, 5.0, 6.0), memory_bytes=2**30)
    ring = replace(ring, transfers_ms=(8.0, 2.0), stalls_ms=(1.0, 0.0))
    assert one.tflops == pytest.approx(0.8e9 / 2e9)
    assert ring.tflops == pytest.approx(1.6e9 / 5e9)
    assert ring.hidden == pytest.approx(0.9)
    assert one.link is None and replace(ring, passes=BOTH).link is None
    assert ring.link == pytest.approx(
        1.6e6 / 5e-3 / 1e9
    )  # K and V of 400,000 elements, 2 bytes each
    first, second = speeds(one, ring).table().rows
    assert first[-3] == "1.00"
    assert second == [RING, "2,000", "causal", FORWARD, "2", "0", "0.80", "90%", "1.0"]
    assert replace(ring, passes=BOTH).operations == 3.5 * ring.operations


def test_what_was_not_run_says_why_and_a_simulator_tells_no_speed(tmp_path) -> None:
    found = speeds(
        speed(ONE, 1, samples_ms=(1.0,)),
        speed(next(iter(PYTORCH)), 2, not_run="no GPU"),
        simulated=True,
    )
    first, second = found.table().rows
    assert first[5:7] == [DASH, DASH]
    assert second[-1] == "no GPU"
    assert "no GPU" in found.markdown()
    found.save(tmp_path / "a.json")
    assert RingSpeeds.load(tmp_path / "a.json") == found


def test_the_page_and_its_picture_have_the_measured_speeds(tmp_path) -> None:
    found = speeds(
        *(
            speed(name, ranks, samples_ms=(2.0,), tokens=tokens, passes=passes)
            for name, ranks in ((ONE, 1), (RING, 2))
            for tokens in (1000, 4000)
            for passes in (FORWARD, BOTH)
        ),
        speed(next(iter(PYTORCH)), 2, not_run="no GPU"),
    )
    panels = ring_numbers(found)["panels"]
    assert [*panels] == [f"causal, {passes}" for passes in (FORWARD, BOTH)]
    both = panels[f"causal, {BOTH}"]
    assert [*both] == [ONE, RING] and [*both[RING]] == ["1000", "4000"]
    file = tmp_path / RESULTS.with_name("long_sequences_h100.json")
    picture = tmp_path / "docs/images/long_sequences_h100.svg"
    for folder in (file.parent, picture.parent):
        folder.mkdir(parents=True)
    found.save(file)
    assert [*stale_rings(tmp_path)] == [picture]
    picture.write_text(ring_svg(stale_rings(tmp_path)[picture]))
    assert stale_rings(tmp_path) == {}
    page = PurePosixPath("docs/long_sequences.md")
    text = render(Evidence(tmp_path), "rings", "long_sequences_h100", page)
    assert "](images/long_sequences_h100.svg)" in text and found.table().markdown() in text
    speed_told = found.speeds[-2].tflops
    assert f"with 4,000, forward and backward: {speed_told:.0f} causal" in text


def test_no_text_of_a_committed_picture_is_crossed_by_a_line_or_meets_another() -> None:
    for file in (ROOT / RESULTS).parent.glob(FILES):
        assert collisions(ring_figure(ring_numbers(RingSpeeds.load(file)))) == []


# -- the tool --------------------------------------------------------------------------------------


def test_too_few_gpus_are_told_in_each_row(tmp_path, monkeypatch, capsys) -> None:
    tool = load_tool("benchmarks/long_sequences.py")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(tool, "find_backend", lambda _: fake_backend())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    path = tmp_path / "a.json"
    assert tool.main(["--tokens", "64", "--json", str(path)]) == 0
    found = RingSpeeds.load(path).speeds
    assert {each.not_run for each in found} == {"2 GPUs are needed and 1 found"}
    assert [(each.causal, each.passes) for each in found] == [
        (causal, passes) for causal in (True, False) for passes in (FORWARD, BOTH)
    ]
    assert "2 GPUs are needed" in capsys.readouterr().out


def test_tokens_that_zigzag_does_not_divide_are_refused(monkeypatch, capsys) -> None:
    tool = load_tool("benchmarks/long_sequences.py")
    monkeypatch.setattr(tool, "find_backend", lambda _: fake_backend())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert tool.main(["--tokens", "62", "--device", "cpu"]) == 2
    assert "--tokens 62 with 2 GPUs: pass a multiple of 4" in capsys.readouterr().err


def test_wrong_results_fail(monkeypatch) -> None:
    tool = load_tool("benchmarks/long_sequences.py")
    right = speed(RING, 2, repeats=True, relative_error=0.003)
    assert tool._faults(right) == []
    assert tool._faults(replace(right, repeats=False)) == ["a second call gave other bits"]
    assert (
        "differ from one GPU's by 3.0e-02" in tool._faults(replace(right, relative_error=0.03))[0]
    )


@pytest.mark.slow
@pytest.mark.matrix("overlap")  # attention() takes it on the CPU; three processes import PyTorch
def test_two_processes_measure_a_toy(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    sizes = ["--tokens", "16", "--heads", "1", "--d-head", "64", "--rounds", "1"]
    command = [sys.executable, "benchmarks/long_sequences.py", "--device", "cpu", *sizes]
    result = subprocess.run(
        [*command, "--json", str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = RingSpeeds.load(path)
    assert found.simulated and json.loads(path.read_text())["provenance"]["torch"]
    rings = [each for each in found.speeds if each.name == RING]
    assert len(rings) == 4
    for each in rings:
        assert each.repeats and each.relative_error is not None and each.relative_error < 2**-7
        assert len(each.samples_ms) == 1
    left_out = [each for each in found.speeds if each.name in PYTORCH]
    assert len(left_out) == 4 * len(PYTORCH) and all(each.not_run for each in left_out)
