"""The benchmark's procedure, statistics, files and tables; no test asserts a real time."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmark_results import (
    BF16,
    FakeMonitor,
    FakeTimer,
    full_results,
    measurement,
    synthetic_results,
    with_rates,
)
from fake_backend import ROOT, Damage, fake_backend, load_tool

from flash_helpers.kernel_configs import (
    STEPS,
    TWO_STAGES,
    AttentionForward,
    DType,
    FlashForwardKernelConfig,
    get_kernel_progression_configs,
)
from flash_helpers.measure.benchmark import (
    DEFAULT_SEQ_LENS,
    Contender,
    InputSet,
    contenders_for,
    default_shape,
    kernel_contender,
    library_contenders,
    library_records,
    make_input_sets,
    measure_problem,
    n_input_sets,
    n_steps,
    run_benchmark,
)
from flash_helpers.measure.benchmark_tables import (
    BEGIN_MARKER,
    END_MARKER,
    HEADER_BEGIN_MARKER,
    HEADER_END_MARKER,
    SUPPORTS_MARKERS,
    header_lines,
    progression_table,
    replace_between_markers,
    report_text,
)
from flash_helpers.measure.machine import clock_record, git_commit, provenance
from flash_helpers.measure.rates import (
    MATMUL_SIZE,
    RateWork,
    matmul_work,
    measure_rates,
    mma_sync_work,
)
from flash_helpers.measure.results import (
    CUDNN,
    FLASH,
    FLASH_ATTN,
    MATMUL,
    MMA_SYNC,
    ClockRecord,
    LibraryRecord,
    Measurement,
    Protocol,
    ResourceRecord,
    SkippedRecord,
    load_results,
    refuse_another_gpu,
)
from flash_helpers.measure.timing import (
    MAX_FLUSHED_WORKS,
    Sample,
    interleaved_rounds,
    record_sample,
)
from flash_helpers.runtime import library

SHAPE = AttentionForward(batch=1, heads=2, seq_len=128)
CPU = torch.device("cpu")
THREE_ROUNDS = Protocol(rounds=3)
RESULTS = ROOT / "benchmarks/results/h100.json"


def measure(
    damage: Damage | None = None,
    configs: Sequence[FlashForwardKernelConfig] = BF16[:2],
    protocol: Protocol = THREE_ROUNDS,
    timer: FakeTimer | None = None,
    **options,
) -> list[Measurement]:
    backend = fake_backend(damage) if damage else fake_backend()
    timer = timer or FakeTimer()
    return measure_problem(
        [kernel_contender(config, backend.forward) for config in configs],
        make_input_sets(SHAPE, DType.BF16, CPU, timer, protocol),
        SHAPE,
        DType.BF16,
        timer,
        protocol,
        FakeMonitor(),
        **options,
    )


# How it is measured


def test_every_contender_is_timed_once_a_round_and_every_second_round_is_reversed() -> None:
    calls: list[str] = []
    samples = [Sample(lambda name=name: calls.append(name)) for name in "abcdefgh"]
    taken = interleaved_rounds(samples, FakeTimer(tuple(map(float, range(16)))), rounds=2)
    first, second = calls[:8], calls[8:]
    assert sorted(first) == list("abcdefgh") and second == first[::-1]
    for name, milliseconds in zip("abcdefgh", taken, strict=True):
        assert milliseconds == [first.index(name), 8 + second.index(name)]


def test_pairs_of_rounds_differ_in_order_and_runs_do_not() -> None:
    def order() -> list[str]:
        calls: list[str] = []
        samples = [Sample(lambda name=name: calls.append(name)) for name in "abcdefgh"]
        interleaved_rounds(samples, FakeTimer(), rounds=6)
        return calls

    assert len({"".join(order()[n : n + 8]) for n in (0, 16, 32)}) == 3
    assert order() == order()


def test_rounds_stop_when_they_may_not_continue() -> None:
    samples = interleaved_rounds([Sample(lambda: None)], FakeTimer(), 10, lambda done: done < 4)
    assert len(samples[0]) == 4


def test_a_sample_repeats_its_work_as_often_as_it_says() -> None:
    calls: list[str] = []
    interleaved_rounds([Sample(lambda: calls.append(""), times=3)], FakeTimer(), 2)
    assert len(calls) == 6


def test_a_timer_that_flushes_the_cache_gets_one_launch_at_a_time() -> None:
    timer = FakeTimer((2.0, 2.0), flushes=True)
    sample = record_sample(lambda: None, 1, timer, sample_ms=10.0)
    assert (sample.times, sample.n_launches) == (5, 5)
    fast = record_sample(lambda: None, 1, FakeTimer((1e-3, 1e-3), flushes=True), sample_ms=10.0)
    assert fast.n_launches == MAX_FLUSHED_WORKS


def test_with_a_flushed_cache_one_set_of_inputs_is_enough() -> None:
    (found,) = measure(configs=BF16[:1], timer=FakeTimer(cache_bytes=10**9, flushes=True))
    assert found.input_sets == 1


def test_a_spent_time_budget_leaves_the_minimum_of_rounds() -> None:
    found = measure(protocol=Protocol(rounds=9, min_rounds=2), deadline=-math.inf)
    assert [len(m.samples_ms) for m in found] == [2, 2]


@pytest.mark.parametrize(
    ("shape", "cache_bytes"),
    [(AttentionForward(1, 1, 64), 50_000_000), (AttentionForward(16, 16, 512), 50_000_000)],
)
def test_between_two_uses_of_a_set_of_inputs_twice_the_cache_is_touched(
    shape: AttentionForward, cache_bytes: int
) -> None:
    n_sets = n_input_sets(shape, 2, cache_bytes)
    set_bytes = 4 * 2 * math.prod(shape.shape)
    assert (n_sets - 1) * set_bytes >= 2 * cache_bytes
    assert (n_sets - 2) * set_bytes < 2 * cache_bytes


def test_a_sample_is_the_mean_of_enough_launches_over_every_set() -> None:
    # two sets; one rotation takes 4 ms, so that three make 10 ms; the graph then takes 12 ms
    cache_bytes = 4 * 2 * math.prod(SHAPE.shape) // 2
    timer = FakeTimer((4.0, 12.0, 99.0, 12.0, 13.0), cache_bytes)
    launches: list[str] = []
    (found,) = measure(
        lambda config, o: launches.append(config.short_form()),
        BF16[:1],
        Protocol(rounds=2, sample_ms=10.0, warmup_rounds=1),
        timer,
    )
    assert found.input_sets == 2
    assert found.launches_per_sample == 6
    assert found.samples_ms == (12.0 / 6, 13.0 / 6)
    assert found.valid
    # warm-up, estimate, recording, its replay; verified twice; one warm-up round and two rounds
    assert len(launches) == 2 + 2 + 6 + 6 + 2 * 6 + 3 * 6


def test_a_kernel_that_is_right_has_its_errors_kept() -> None:
    for found in measure():
        assert found.failure == ""
        assert found.ran == found.name
        assert found.max_abs_error is not None and found.max_abs_bound is not None
        assert 0 < found.max_abs_error <= found.max_abs_bound
        assert len(found.samples_ms) == 3


def test_a_static_row_stride_that_is_not_the_inputs_is_told() -> None:
    (found,) = measure(configs=BF16[-1:])
    assert found.ran == BF16[-1].general().short_form() != found.name


def _leave_nan(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
    if config.step.id == "v1":
        o[0, 0, 0, 0] = math.nan


def _refuse(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
    if config.step.id == "v1":
        raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("damage", "failure"), [(_leave_nan, "wrong output"), (_refuse, "no kernel image is available")]
)
def test_a_kernel_that_fails_is_not_timed_and_stops_no_other(damage: Damage, failure: str) -> None:
    wrong, right = measure(damage)
    assert failure in wrong.failure
    assert wrong.samples_ms == ()
    assert not wrong.valid
    assert wrong.max_abs_error is None
    assert right.valid


def test_a_kernel_that_goes_wrong_while_it_is_timed_is_found_out() -> None:
    calls = 0

    def worsen(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls > 12:  # ten come before the rounds
            o += 1

    (found,) = measure(worsen, BF16[:1])
    assert len(found.samples_ms) == 3
    assert "wrong output" in found.failure
    assert not found.valid


def test_a_kernel_that_writes_only_on_its_first_call_is_found_out() -> None:
    written: list[str] = []
    backend = fake_backend()

    def forward(config, q, k, v, o):
        if not written:
            backend.forward(config, q, k, v, o)
        written.append("")

    protocol, timer = Protocol(rounds=2), FakeTimer()
    sets = make_input_sets(SHAPE, DType.BF16, CPU, timer, protocol)
    contenders = [kernel_contender(BF16[0], forward)]
    (found,) = measure_problem(contenders, sets, SHAPE, DType.BF16, timer, protocol, FakeMonitor())
    assert "wrong output" in found.failure


def test_the_libraries_are_verified_and_timed_like_the_kernels() -> None:
    contenders = contenders_for(BF16[:1], DType.BF16, fake_backend())
    assert [c.name for c in contenders] == [FLASH, CUDNN, BF16[0].short_form()]
    protocol, timer = Protocol(rounds=2), FakeTimer()
    sets = make_input_sets(SHAPE, DType.BF16, CPU, timer, protocol)
    flash, cudnn, _ = measure_problem(
        contenders, sets, SHAPE, DType.BF16, timer, protocol, FakeMonitor()
    )
    assert flash.valid and flash.ran == ""
    assert cudnn.failure != ""  # not on a CPU


def test_progress_is_told_as_often_as_announced() -> None:
    steps: list[int] = []
    measure(protocol=Protocol(rounds=4), advance=lambda: steps.append(1))
    assert len(steps) == n_steps(2, Protocol(rounds=4))


def contenders_of(step: str) -> dict[DType, list[Contender]]:
    configs = [c for c in get_kernel_progression_configs() if c.step.id == step]
    return {dtype: contenders_for(configs, dtype, fake_backend()) for dtype in DType}


def test_a_run_measures_every_dtype_at_every_length_and_reads_the_clocks() -> None:
    run = run_benchmark(
        contenders_of("v1"),
        (64, 128),
        CPU,
        FakeTimer(),
        Protocol(rounds=2),
        FakeMonitor,
        shape_for=lambda seq_len: AttentionForward(1, 1, seq_len),
    )
    assert [(m.dtype, m.seq_len) for m in run.measurements if m.ran] == [
        ("fp16", 64),
        ("fp16", 128),
        ("bf16", 64),
        ("bf16", 128),
    ]
    assert run.clocks[0] == ClockRecord(
        "fp16", 64, 2, (1755.0, 1867.5, 1980.0), (650.0, 675.0, 700.0), 65.0
    )
    assert run.skipped == ()


def test_a_problem_that_does_not_fit_in_memory_is_skipped_and_stops_no_other() -> None:
    def exhaust(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
        if o.shape[1] == 128:
            raise torch.cuda.OutOfMemoryError("Tried to allocate 9 GiB\nand more")

    steps: list[int] = []
    protocol = Protocol(rounds=2)
    run = run_benchmark(
        {DType.BF16: contenders_for(BF16[:1], DType.BF16, fake_backend(exhaust))},
        (64, 128, 192),
        CPU,
        FakeTimer(),
        protocol,
        FakeMonitor,
        advance=steps.append,
        shape_for=lambda seq_len: AttentionForward(1, 1, seq_len),
    )
    assert {m.seq_len for m in run.measurements} == {64, 192}
    (skipped,) = run.skipped
    assert (skipped.dtype, skipped.seq_len) == ("bf16", 128)
    assert "Tried to allocate 9 GiB" in skipped.reason and "\n" not in skipped.reason
    # the progress bar comes to its end
    assert sum(steps) == 3 * n_steps(1 + len(library_contenders()), protocol)


def test_without_readings_there_is_no_clock_record() -> None:
    assert clock_record("bf16", 64, []) is None


# The chip's own rates


def test_rates_are_measured_in_every_dtype_of_the_run() -> None:
    launched: list[DType] = []

    def make(dtype: DType) -> RateWork:
        return RateWork(10**9, lambda: launched.append(dtype))

    run = run_benchmark(
        contenders_of("v1"),
        (64,),
        CPU,
        FakeTimer(),
        Protocol(rounds=2),
        FakeMonitor,
        rate_works={MMA_SYNC: make},
        shape_for=lambda seq_len: AttentionForward(1, 1, seq_len),
    )
    assert [(r.name, r.dtype, len(r.samples_ms)) for r in run.rates] == [
        (MMA_SYNC, "fp16", 2),
        (MMA_SYNC, "bf16", 2),
    ]
    assert set(launched) == set(DType)


def test_a_rate_is_operations_over_the_median_time_of_a_launch() -> None:
    # one launch takes 2 ms; five make a sample, whose rounds take 10, 20 and 30 ms
    timer = FakeTimer((2.0, 10.0, 10.0, 10.0, 20.0, 30.0))
    works = {MATMUL: lambda dtype: RateWork(4 * 10**12, lambda: None)}
    (rate,) = measure_rates(works, DType.BF16, timer, Protocol(rounds=3, sample_ms=10.0))
    assert rate.samples_ms == (2.0, 4.0, 6.0)
    assert rate.tflops == pytest.approx(1000)


def test_a_rate_that_cannot_be_measured_stops_nothing_and_says_why() -> None:
    def fail(dtype: DType) -> RateWork:
        raise RuntimeError("the kernel library has no flash_mma_loop")

    works = {MMA_SYNC: fail, MATMUL: lambda dtype: RateWork(10**9, lambda: None)}
    broken, whole = measure_rates(works, DType.BF16, FakeTimer(), THREE_ROUNDS)
    assert "no flash_mma_loop" in broken.failure and broken.tflops is None
    assert whole.failure == "" and whole.tflops is not None


def test_the_matmul_rate_counts_the_product_it_computes() -> None:
    work = matmul_work(DType.BF16, CPU, size=64)
    work.launch()
    assert work.operations == 2 * 64**3
    assert MATMUL_SIZE == 8192


BEFORE_THE_LOOP = (
    "kernel_count",
    "kernel_name",
    "launch",
    "encode_tensor_map",
    "kernel_resources",
)


def test_a_library_without_the_loop_says_to_build_it_again(monkeypatch) -> None:
    older = SimpleNamespace(**{f"flash_{name}": SimpleNamespace() for name in BEFORE_THE_LOOP})
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: older)
    library.load.cache_clear()
    with pytest.raises(RuntimeError, match="has no flash_mma_loop_describe, so that it is older"):
        mma_sync_work(DType.BF16, torch.device("cuda", 0))
    library.load.cache_clear()


# The flash_attn package


@pytest.fixture
def flash_attn(tmp_path: Path, monkeypatch) -> Path:
    """An installed package of that name, which computes attention in float32."""
    package = tmp_path / "site" / "flash_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import math, torch\n"
        "def flash_attn_func(q, k, v):\n"
        "    Q, K, V = (x.transpose(1, 2).float() for x in (q, k, v))\n"
        "    P = torch.softmax(Q @ K.mT / math.sqrt(q.shape[-1]), -1)\n"
        "    return (P @ V).transpose(1, 2).to(q.dtype)\n"
    )
    info = tmp_path / "site" / "flash_attn-2.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    yield package
    sys.modules.pop("flash_attn", None)


def run_contender(name: str) -> Measurement:
    timer = FakeTimer()
    (contender,) = (c for c in library_contenders() if c.name == name)
    sets: list[InputSet] = make_input_sets(SHAPE, DType.BF16, CPU, timer, THREE_ROUNDS)
    (found,) = measure_problem(
        [contender], sets, SHAPE, DType.BF16, timer, THREE_ROUNDS, FakeMonitor()
    )
    return found


def test_the_flash_attn_package_is_a_contender_where_it_is_installed(flash_attn: Path) -> None:
    assert [c.name for c in library_contenders()] == [FLASH, CUDNN, FLASH_ATTN]
    assert library_records(library_contenders()) == (LibraryRecord(FLASH_ATTN, "2.9.9"),)
    assert run_contender(FLASH_ATTN).valid


def test_a_flash_attn_package_that_cannot_be_imported_fails_with_the_reason(
    flash_attn: Path,
) -> None:
    (flash_attn / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    found = run_contender(FLASH_ATTN)
    assert "undefined symbol: _ZN3c10" in found.failure
    assert synthetic_results(found).failures == []


def test_default_problems_are_the_projects() -> None:
    assert [default_shape(n).batch for n in DEFAULT_SEQ_LENS] == [16, 16, 16, 16, 8, 4]
    assert {default_shape(n).heads for n in DEFAULT_SEQ_LENS} == {16}


def test_provenance_names_the_machine(tmp_path: Path) -> None:
    backend = dataclasses.replace(fake_backend(), library="CUDA 13.0 for sm_90")
    found = provenance(backend, "pt_bench.py", "abc")
    assert found.torch == torch.__version__
    assert (found.library, found.commit) == ("CUDA 13.0 for sm_90", "abc")
    assert git_commit(tmp_path) == ""


# Statistics


def test_operations_are_those_of_two_matrix_products() -> None:
    assert AttentionForward(2, 3, 64).operations == 2 * (2 * 2 * 3 * 64 * 64 * 128)


def test_speed_is_taken_at_the_median_and_spread_between_the_quartiles() -> None:
    found = dataclasses.replace(
        measurement(FLASH, 1024, 100.0),
        batch=SHAPE.batch,
        n_heads=SHAPE.heads,
        seq_len=SHAPE.seq_len,
        samples_ms=(4.0, 1.0, 2.0, 3.0, 100.0),
    )
    assert found.median_ms == 3.0
    assert found.quartiles_ms == (2.0, 4.0)
    assert found.spread == pytest.approx(2 / 3)
    assert found.tflops == pytest.approx(SHAPE.operations / 3e-3 / 1e12)
    assert dataclasses.replace(found, samples_ms=(3.0,)).quartiles_ms == (3.0, 3.0)


def test_means_are_harmonic_and_compared_with_flash() -> None:
    name = BF16[0].short_form()
    results = synthetic_results(
        measurement(FLASH, 1024, 300.0),
        measurement(FLASH, 4096, 600.0),
        measurement(name, 1024, 100.0),
        measurement(name, 4096, 300.0),
    )
    assert results.mean_tflops(name, "bf16") == pytest.approx(150.0)
    assert results.of_flash(name, "bf16", 4096) == pytest.approx(0.5)
    assert results.of_flash(name, "bf16") == pytest.approx(150 / 400)


def test_a_failed_length_leaves_no_mean_and_no_number() -> None:
    name = BF16[0].short_form()
    results = synthetic_results(
        measurement(FLASH, 1024, 300.0),
        measurement(FLASH, 4096, 300.0),
        measurement(name, 1024, 100.0),
        measurement(name, 4096, 100.0, failure="wrong output"),
    )
    assert results.mean_tflops(name, "bf16") is None
    assert results.of_flash(name, "bf16", 4096) is None
    assert results.of_flash(name, "bf16", 1024) == pytest.approx(1 / 3)
    assert [m.name for m in results.failures] == [name]


def test_a_library_that_does_not_run_here_is_no_failure() -> None:
    results = synthetic_results(measurement(CUDNN, 1024, 1.0, failure="not available"))
    assert results.failures == []


# Files


def test_json_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    results = full_results()
    results.save(path)
    assert load_results(path) == results


def test_json_has_one_line_a_measurement() -> None:
    results = full_results()
    lines = [line for line in results.to_json().splitlines() if '"samples_ms"' in line]
    assert len(lines) == len(results.measurements)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "holds no benchmark results"),
        ('{"format": 1}', "format 1 is not 2"),
        ('{"format": 2}', "measurements"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_results(path)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("colour", "red", r"\$\.measurements\[0\] lacks or does not know the fields colour"),
        ("batch", None, r"\$\.measurements\[0\]\.batch is null, which is no int"),
        ("batch", 16.0, r"batch is 16\.0, which is no int"),
        ("batch", True, r"batch is true, which is no int"),
        ("name", 7, r"name is 7, which is no str"),
        ("samples_ms", [1.0, "2"], r'samples_ms\[1\] is "2", which is no float'),
        ("samples_ms", 1.0, r"samples_ms is 1\.0, which is no tuple"),
        ("relative_error", "small", r'relative_error is "small", which is no float'),
        ("relative_error", float("nan"), "NaN is no number"),
    ],
)
def test_a_record_with_something_else_in_it_is_refused_by_file_and_place(
    tmp_path: Path, field: str, value: object, said: str
) -> None:
    path = tmp_path / "results.json"
    data = json.loads(full_results().to_json())
    data["measurements"][0][field] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"{path} holds no benchmark results: .*{said}"):
        load_results(path)


def test_a_record_that_lacks_a_field_is_refused_even_if_the_field_has_a_default(
    tmp_path: Path,
) -> None:
    path = tmp_path / "results.json"
    data = json.loads(full_results().to_json())
    del data["protocol"]["timing"], data["clocks"][0]["sm_mhz"][2]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"\$\.protocol lacks or does not know the fields timing"):
        load_results(path)
    data["protocol"]["timing"] = "graph"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"\$\.clocks\[0\]\.sm_mhz is .* which is no tuple"):
        load_results(path)


def test_a_number_that_json_does_not_have_is_not_written(tmp_path: Path) -> None:
    broken = dataclasses.replace(measurement(FLASH, 1024, 300.0), relative_error=math.nan)
    with pytest.raises(ValueError, match="not JSON compliant"):
        synthetic_results(broken).save(tmp_path / "results.json")
    assert not list(tmp_path.iterdir())


def test_csv_has_a_row_a_measurement_with_derived_numbers() -> None:
    name = BF16[2].short_form()
    results = synthetic_results(
        measurement(FLASH, 1024, 300.0),
        measurement(name, 1024, 150.0),
        measurement(BF16[3].short_form(), 1024, 1.0, failure="wrong output"),
    )
    flash, kernel, failed = csv.DictReader(io.StringIO(results.to_csv()))
    assert (flash["step"], flash["percent_of_flash"]) == ("", "100.0")
    assert (kernel["name"], kernel["step"]) == (name, "v3")
    assert (kernel["tflops"], kernel["percent_of_flash"]) == ("150.0", "50.0")
    assert float(kernel["first_quartile_ms"]) < float(kernel["median_ms"])
    assert (failed["tflops"], failed["failure"]) == ("", "wrong output")


def test_table_csv_and_json_have_the_same_shares_of_the_chips_rates(tmp_path: Path) -> None:
    name = BF16[2].short_form()
    results = with_rates(
        synthetic_results(measurement(FLASH, 1024, 300.0), measurement(name, 1024, 150.0))
    )
    expected = {"flash": 50.0, MATMUL: 18.8, MMA_SYNC: 25.0}  # 150 over 300, 800 and 600
    *_, row = csv.DictReader(io.StringIO(results.to_csv()))
    *_, derived = (m["derived"] for m in json.loads(results.to_json())["measurements"])
    text = report_text(results)
    for rate, percent in expected.items():
        assert row[f"percent_of_{rate}"] == str(percent)
        assert derived[f"percent_of_{rate}"] == percent
    assert {"bf16, % of flash", "bf16, % of matmul", "bf16, % of mma.sync"} <= {
        line.partition("  ")[0] for line in text.splitlines()
    }
    assert "bf16 mma.sync: 600 TFLOP/s" in text
    assert results.of_rate(MMA_SYNC, name, "bf16") == pytest.approx(150 / 600)


def test_what_is_derived_is_not_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = with_rates(full_results())
    data = json.loads(results.to_json())
    for row in data["measurements"]:
        row["derived"]["tflops"] = -1
    path.write_text(json.dumps(data))
    assert load_results(path) == results


def test_every_kind_of_record_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = dataclasses.replace(
        with_rates(full_results()),
        libraries=(LibraryRecord(FLASH_ATTN, "2.9.9"),),
        skipped=(SkippedRecord("bf16", 65536, "does not fit"),),
        resources=(ResourceRecord(BF16[0].short_form(), 168, 0, 49152, 3),),
    )
    results.save(path)
    assert load_results(path) == results


def test_a_file_of_another_gpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    refuse_another_gpu(path, "NVIDIA A100")
    full_results().save(path)
    refuse_another_gpu(path, "NVIDIA H100 80GB HBM3")
    with pytest.raises(ValueError, match=r"holds results of NVIDIA H100 .* this is NVIDIA A100"):
        refuse_another_gpu(path, "NVIDIA A100")


# Tables


def rows_of(table: str) -> list[list[str]]:
    """Cells of a Markdown table, without the line of dashes."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def test_the_step_table_has_a_row_a_step_in_order_and_then_the_libraries() -> None:
    header, *rows = rows_of(progression_table(full_results()))
    assert header[:4] == ["step", "idea", "TFLOP/s at 4096", "% of flash at 4096"]
    steps = rows[: len(STEPS)]
    assert [row[:2] for row in steps] == [[step.id, step.idea] for step in STEPS.values()]
    assert steps[0][2:5] == ["110", "36.7", "36.7"]
    assert [row[1:5] for row in rows[len(STEPS) :]] == [
        ["PyTorch's flash backend", "300", "100.0", "100.0"],
        ["PyTorch's cuDNN backend", "600", "200.0", "200.0"],
    ]


def test_the_best_config_of_a_step_stands_beside_the_fixed_one() -> None:
    _, *rows = rows_of(progression_table(full_results()))
    assert rows[6][2] == "170"
    assert rows[6][5:8] == ["330", "110.0", "110.0"]
    assert rows[6][8].startswith("B_r 128, B_c 64, 4 warps")
    assert rows[5][5:] == ["", "", "", ""]  # nothing else was measured for step 6


def test_options_of_the_best_config_beyond_the_steps_are_named() -> None:
    last = BF16[-1].replace(**TWO_STAGES)
    results = full_results()
    more = [measurement(last.short_form(), n, 400.0) for n in (1024, 4096)]
    results = dataclasses.replace(results, measurements=(*results.measurements, *more))
    _, *rows = rows_of(progression_table(results))
    assert rows[len(BF16) - 1][8] == (
        "B_r 128, B_c 64, 4 warps, loads 1/1/1, double-buffered, kv_stages 2, lazy_rescale, "
        "mma_row_sum"
    )


def test_the_step_table_says_what_it_was_measured_on() -> None:
    text = progression_table(full_results())
    for fact in (
        "NVIDIA H100 80GB HBM3",
        "1755 MHz",
        "580.1",
        "2.13.0",
        "16 heads",
        "16 at 4096",
        "median of 3 rounds",
        "2026-01-02",
        "abc123",
        "1024 … 4096",
    ):
        assert fact in text


def test_the_step_table_tells_the_chips_rates_and_how_launches_were_timed() -> None:
    results = with_rates(full_results())
    text = progression_table(results)
    assert "matmul 800 TFLOP/s, mma.sync 600 TFLOP/s" in text
    assert "CUDA graph replays" in text and "L2" not in text
    protocol = dataclasses.replace(results.protocol, timing="events", cache="flush")
    text = progression_table(dataclasses.replace(results, protocol=protocol))
    assert "launches one by one; L2 cache overwritten before each" in text


def test_a_step_that_was_not_measured_has_dashes() -> None:
    results = synthetic_results(measurement(FLASH, 4096, 300.0))
    _, first, *_ = rows_of(progression_table(results))
    assert first[2:5] == ["-", "-", "-"]


def test_the_terminal_gets_speeds_percents_and_failures() -> None:
    failed = measurement(BF16[1].short_form(), 4096, 1.0, failure="wrong output")
    results = full_results()
    results = dataclasses.replace(
        results,
        measurements=(*results.measurements, failed),
        libraries=(LibraryRecord(FLASH_ATTN, "2.9.9"),),
        skipped=(SkippedRecord("bf16", 65536, "does not fit"),),
    )
    text = report_text(results)
    assert "bf16, TFLOP/s" in text
    assert "bf16, % of flash" in text
    assert "largest spread" in text
    # samples of 0.9, 1 and 1.2 times the median
    flash = next(line for line in text.splitlines() if line.startswith(FLASH))
    assert flash.split() == [FLASH, "300", "300", "300", "15.0"]
    assert f"{failed.name} at 4096: wrong output" in text
    assert "flash_attn 2.9.9" in text
    assert "bf16 at 65536 skipped: does not fit" in text


def test_only_the_lines_between_the_markers_change() -> None:
    text = f"before\n{BEGIN_MARKER}\nold\n{END_MARKER}\nafter\n"
    replaced = replace_between_markers(text, "new\n")
    assert replaced == f"before\n{BEGIN_MARKER}\nnew\n{END_MARKER}\nafter\n"
    assert replace_between_markers(replaced, "new") == replaced


@pytest.mark.parametrize(
    "text",
    [
        "none",
        BEGIN_MARKER,
        f"{END_MARKER}{BEGIN_MARKER}",
        f"{BEGIN_MARKER}{BEGIN_MARKER}{END_MARKER}",
    ],
)
def test_a_text_without_the_two_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="benchmark:begin"):
        replace_between_markers(text, "new")


# The command lines


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A README and kernel files with nothing between their markers, and results."""
    (tmp_path / "README.md").write_text(
        f"# Title\n{BEGIN_MARKER}\n{END_MARKER}\n{chr(10).join(SUPPORTS_MARKERS)}\ntext\n"
    )
    for step in STEPS.values():
        path = tmp_path / step.source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {step.id}\n{HEADER_BEGIN_MARKER}\n{HEADER_END_MARKER}\ncode\n")
    full_results().save(tmp_path / "results.json")
    return tmp_path


def update_tables(root: Path, *arguments: str) -> int:
    tool = load_tool("tools/benchmark/update_tables.py")
    return tool.main(["--root", str(root), "--results", str(root / "results.json"), *arguments])


def test_readme_and_headers_are_written_and_are_then_up_to_date(repository: Path, capsys) -> None:
    assert update_tables(repository, "--check") == 1
    assert "+| v1 | base" in capsys.readouterr().out
    assert update_tables(repository) == 0
    readme = (repository / "README.md").read_text()
    assert progression_table(full_results()) in readme
    assert readme.startswith("# Title\n") and readme.endswith("\ntext\n")
    for step in STEPS.values():
        header = (repository / step.source).read_text()
        assert header_lines(full_results(), step) in header
        assert header.startswith(f"// {step.id}\n") and header.endswith("\ncode\n")
    assert update_tables(repository, "--check") == 0


def test_a_check_writes_nothing(repository: Path) -> None:
    before = {path: path.read_text() for path in repository.rglob("*") if path.is_file()}
    update_tables(repository, "--check")
    assert {path: path.read_text() for path in before} == before


def test_a_file_without_markers_is_wrong_usage_and_nothing_is_written(
    repository: Path, capsys
) -> None:
    last = repository / list(STEPS.values())[-1].source
    last.write_text("code\n")
    assert update_tables(repository) == 2
    assert "benchmark:begin" in capsys.readouterr().err
    assert progression_table(full_results()) not in (repository / "README.md").read_text()


def test_header_lines_tell_speed_and_cost_of_the_fixed_config() -> None:
    config = next(c for c in get_kernel_progression_configs() if c.dtype == DType.BF16)
    cost = ResourceRecord(config.short_form(), 168, 12, 49152, 3)
    results = dataclasses.replace(full_results(), resources=(cost,))
    lines = header_lines(results, config.step)
    assert all(line.startswith("// ") and len(line) <= 100 for line in lines.splitlines())
    text = lines.replace("\n// ", " ")
    speed = results.tflops(config.short_form(), "bf16", 4096)
    assert f"{speed:.0f} TFLOP/s at length 4096" in text
    assert "168 registers a thread, 12 bytes of it spilled, 48 KiB" in text
    assert "3 blocks an SM" in text


@pytest.mark.skipif(not RESULTS.exists(), reason="no results are committed")
def test_the_project_shows_the_committed_results() -> None:
    assert load_tool("tools/benchmark/update_tables.py").main(["--check"]) == 0


@pytest.fixture
def pt_bench(monkeypatch):
    """The tool, with kernels, clock and GPU faked, on small problems."""
    tool = load_tool("tools/benchmark/pt_bench.py")
    monkeypatch.setattr(tool, "find_backend", lambda device: fake_backend(_leave_nan))
    monkeypatch.setattr(
        tool, "make_timer", lambda device, protocol: FakeTimer(flushes=protocol.cache == "flush")
    )
    monkeypatch.setattr(tool, "default_rate_works", lambda device: {})
    monkeypatch.setattr(tool, "GpuMonitor", FakeMonitor)
    monkeypatch.setattr(
        tool,
        "resource_record",
        lambda config, device: ResourceRecord(config.short_form(), 168, 0, 49152, 3),
    )
    small = partial(run_benchmark, shape_for=lambda seq_len: AttentionForward(1, 1, seq_len))
    monkeypatch.setattr(tool, "run_benchmark", small)
    return tool


def test_the_tool_writes_the_files_and_prints_the_tables(pt_bench, tmp_path: Path, capsys) -> None:
    json_path, csv_path = tmp_path / "out.json", tmp_path / "out.csv"
    arguments = ["--kernel", "2", "--seq", "128", "64", "--rounds", "2", "--commit", "abc"]
    status = pt_bench.main([*arguments, "--json", str(json_path), "--csv", str(csv_path)])
    assert status == 0
    results = load_results(json_path)
    assert results.seq_lens == [64, 128]
    assert results.names("bf16") == [FLASH, CUDNN, BF16[1].short_form()]
    assert results.protocol.rounds == 2
    assert results.provenance.commit == "abc"
    assert results.provenance.command == (
        f"pt_bench.py {' '.join(arguments)} --json {json_path.name} --csv {csv_path.name}"
    )
    assert len(csv_path.read_text().splitlines()) == 1 + len(results.measurements)
    captured = capsys.readouterr()
    assert BF16[1].short_form() in captured.out
    assert "benchmark" in captured.err  # the progress bar


def test_the_tool_keeps_how_launches_were_timed(pt_bench, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["--kernel", "2", "--seq", "64", "--timing", "events", "--cache", "flush"]
    assert pt_bench.main([*arguments, "--json", str(path)]) == 0
    results = load_results(path)
    assert (results.protocol.timing, results.protocol.cache) == ("events", "flush")
    assert {m.input_sets for m in results.measurements} == {1}


def test_the_tool_does_not_write_over_results_of_another_gpu(
    pt_bench, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "out.json"
    full_results().save(path)
    before = path.read_text()
    assert pt_bench.main(["--kernel", "2", "--seq", "64", "--json", str(path)]) == 2
    assert "holds results of NVIDIA H100" in capsys.readouterr().err
    assert path.read_text() == before


def test_if_no_length_fits_in_memory_the_tool_exits_with_2(pt_bench, monkeypatch, capsys) -> None:
    def exhaust(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
        raise torch.cuda.OutOfMemoryError("Tried to allocate 9 GiB")

    monkeypatch.setattr(pt_bench, "find_backend", lambda device: fake_backend(exhaust))
    assert pt_bench.main(["--kernel", "2", "--seq", "64"]) == 2
    assert "nothing was measured: seq 64 does not fit" in capsys.readouterr().err


def test_the_tool_exits_with_1_if_a_kernel_is_wrong(pt_bench, capsys) -> None:
    assert pt_bench.main(["--kernel", "1", "--seq", "64", "--rounds", "1"]) == 1
    assert "wrong output" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "99"], "the steps are v1 to v"),
        (["--seq", "100"], "seq_len 100 is not a multiple"),
    ],
)
def test_wrong_usage_of_the_tool_exits_with_2(
    pt_bench, capsys, arguments: list[str], message: str
) -> None:
    assert pt_bench.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--time-budget", "nan"], ["--seq", "x"]])
def test_a_number_that_is_no_positive_number_is_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_tool("tools/benchmark/pt_bench.py").main(arguments)
    assert exit_info.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_tool_says_so_and_exits_with_2(capsys) -> None:
    assert load_tool("tools/benchmark/pt_bench.py").main([]) == 2
    assert capsys.readouterr().err == "the kernels were not run: no CUDA device was found\n"


def test_contenders_without_a_config_are_libraries() -> None:
    contenders = contenders_for(BF16, DType.BF16, fake_backend())
    assert [c.name for c in contenders if c.config is None] == [FLASH, CUDNN]
    assert all(isinstance(c, Contender) for c in contenders)
