"""The benchmark's procedure, statistics, files and tables; no test asserts a real time."""

import csv
import gc
import io
import itertools
import json
import math
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from attention_configs import ATTENTION_STEPS
from benchmark_results import (
    BF16,
    BURST_GAIN,
    LARGE_TILE_7,
    STAIRS,
    FakeSensor,
    FakeTimer,
    control,
    full_results,
    grouped_results,
    measurement,
    synthetic_results,
    with_rates,
)
from fake_backend import ROOT, Damage, fake_backend, load_tool

from flash_helpers.gpu import SM_COUNTS
from flash_helpers.kernel_configs import (
    FAMILIES,
    OPERATIONS,
    STEPS,
    AttentionForward,
    Element,
    FlashForwardKernelConfig,
    Problem,
    get_kernel_progression_configs,
)
from flash_helpers.measure import benchmark, code, rates, timing
from flash_helpers.measure.benchmark import (
    MOST_SETS,
    BenchmarkRun,
    Contender,
    InputSet,
    contenders_for,
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
    HEADER_BEGIN_MARKER,
    HEADER_END_MARKER,
    header_lines,
    lengths_table,
    loads_table,
    progression_table,
    replace_between_markers,
    report_text,
    share_text,
)
from flash_helpers.measure.machine import git_commit, provenance
from flash_helpers.measure.rates import (
    MATMUL_SIZE,
    RateWork,
    matmul_work,
    measure_rates,
)
from flash_helpers.measure.results import (
    BEST_OTHER,
    BURST,
    CONTROL,
    CUDNN,
    FA3,
    FLASH,
    FLASH_ATTN,
    LIBRARY_NAMES,
    LOADS,
    MATMUL,
    MMA_SYNC,
    SUSTAINED,
    BenchmarkResults,
    LibraryRecord,
    Load,
    Measurement,
    Protocol,
    ResourceRecord,
    SkippedRecord,
    interval,
    load_results,
    refuse_another_gpu,
    results_by_family,
)
from flash_helpers.measure.staircases import stairs
from flash_helpers.measure.timing import (
    COOL_DOWN_S,
    HEAT,
    MAX_FLUSHED_WORKS,
    MAX_WARM_UPS,
    Sample,
    Taken,
    heats,
    interleaved_rounds,
    record,
    warm_up,
)
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.operations.attention_forward.problems import MEASURED_LENGTHS, default_shape
from flash_helpers.operations.rows.problem import Rows

SHAPE = AttentionForward(batch=1, heads=2, len_q=128)
DTYPES = (Element.FP16, Element.BF16)
CPU = torch.device("cpu")
TURNS = Load("turns", sample_ms=10.0)
IN_TURNS = Protocol(rounds=3, loads=(TURNS,))
RESULTS = ROOT / "benchmarks/results/h100.json"


def measure(
    damage: Damage | None = None,
    configs: Sequence[FlashForwardKernelConfig] = BF16[:2],
    protocol: Protocol = IN_TURNS,
    timer: FakeTimer | None = None,
    shape: AttentionForward = SHAPE,
    **options,
) -> list[Measurement]:
    backend = fake_backend(damage) if damage else fake_backend()
    timer = timer or FakeTimer()
    return measure_problem(
        [kernel_contender(config, backend.execute) for config in configs],
        make_input_sets(shape, Element.BF16, CPU, timer, protocol),
        shape,
        Element.BF16,
        timer,
        protocol,
        FakeSensor(),
        **options,
    )


# How it is measured


def take(
    samples: Sequence[Sample],
    rounds: int,
    load: Load = TURNS,
    timer: FakeTimer | None = None,
    **more,
) -> list[list[Taken]]:
    sensor = more.pop("sensor", None) or FakeSensor()
    return interleaved_rounds(samples, timer or FakeTimer(), load, rounds, sensor, **more)


def noting(calls: list[str], names: str, **options) -> list[Sample]:
    return [Sample(lambda name=name: calls.append(name), **options) for name in names]


def test_every_contender_is_timed_once_a_round_and_every_second_round_is_reversed() -> None:
    calls: list[str] = []
    timer = FakeTimer(tuple(map(float, range(16))))
    taken = take(noting(calls, "abcdefgh"), 2, timer=timer)
    first, second = calls[:8], calls[8:]
    assert sorted(first) == list("abcdefgh") and second == first[::-1]
    for name, of_rounds in zip("abcdefgh", taken, strict=True):
        assert [sample.ms for sample in of_rounds] == [first.index(name), 8 + second.index(name)]
        assert [sample.reference_ms for sample in of_rounds] == [None, None]


def test_pairs_of_rounds_differ_in_order_and_runs_do_not() -> None:
    def order() -> list[str]:
        calls: list[str] = []
        take(noting(calls, "abcdefgh"), 6)
        return calls

    assert len({"".join(order()[n : n + 8]) for n in (0, 16, 32)}) == 3
    assert order() == order()


def test_the_order_differs_from_length_to_length() -> None:
    """Else a contender follows the same neighbour at each, and its mean keeps what that does."""

    def order(seq_len: int) -> list[str]:
        calls: list[str] = []
        measure(
            lambda config, o: calls.append(config.short_form()),
            BF16[:8],
            shape=AttentionForward(1, 1, seq_len),
        )
        return [name for name, _ in itertools.groupby(calls)]

    first, second = order(64), order(128)
    assert set(first) == set(second) and first != second
    assert order(64) == first


def test_rounds_stop_when_they_may_not_continue() -> None:
    (taken,) = take([Sample(lambda: None)], 10, may_continue=lambda done: done < 4)
    assert len(taken) == 4


def test_a_sample_repeats_its_work_as_often_as_it_says() -> None:
    calls: list[str] = []
    (taken,) = take(noting(calls, "a", times=3, n_launches=6), 2, timer=FakeTimer((12.0, 24.0)))
    assert len(calls) == 6
    assert [sample.ms for sample in taken] == [2.0, 4.0]


@pytest.mark.parametrize("n", [1, 2, HEAT + 1, HEAT + 2, 4 * HEAT])
def test_a_sample_of_the_reference_is_next_to_each_contenders(n: int) -> None:
    for done in (0, 1):
        found = heats(n, done, reference=0)
        assert sorted(index for heat in found for index in heat if index) == list(range(1, n))
        for heat in found:
            assert heat.count(0) == 1
            assert len(heat) <= HEAT + 1
            assert abs(heat.index(0) - (len(heat) - 1) / 2) <= 1  # in the middle


def test_a_contender_is_paired_with_the_reference_of_its_own_heat() -> None:
    # the clock falls from sample to sample: the n-th takes n ms
    calls: list[int] = []
    samples = [Sample(lambda index=index: calls.append(index)) for index in range(2 * HEAT + 1)]
    timer = FakeTimer(tuple(float(n) for n in range(100)))
    taken = take(samples, 1, timer=timer, reference=0)
    places = [place for place, index in enumerate(calls) if index == 0]
    assert len(places) == 2
    for index, (sample,) in enumerate(taken[1:], start=1):
        assert sample.ms == calls.index(index)
        assert sample.reference_ms == min(places, key=lambda place: abs(place - sample.ms))
    # what is told of the reference itself is the mean of its samples
    assert taken[0][0].ms == taken[0][0].reference_ms == sum(places) / 2


def test_the_gpu_is_read_at_the_end_of_each_sample() -> None:
    events: list[str] = []

    class Timer(FakeTimer):
        def start(self, work, times=1):
            end = super().start(work, times)
            return lambda: (events.append("end"), end())[1]

    class Sensor(FakeSensor):
        def read(self):
            events.append("read")
            return super().read()

    (taken,) = take(noting([], "a"), 2, timer=Timer(), sensor=Sensor())
    assert events == ["end", "read"] * 2
    assert [sample.reading.sm_mhz for sample in taken] == [1965.0, 1950.0]


def test_in_bursts_the_chip_rests_after_each_sample() -> None:
    sensor = FakeSensor()
    take(noting([], "ab"), 2, LOADS[BURST], FakeTimer((10.0, 20.0, 30.0, 40.0)), sensor=sensor)
    after_each = [n * LOADS[BURST].rest / 1000 for n in (10.0, 20.0, 30.0, 40.0)]
    assert sensor.rests == [COOL_DOWN_S, *after_each]


def test_under_sustained_load_the_next_lead_is_in_line_before_a_sample_is_waited_for(
    monkeypatch,
) -> None:
    events: list[str] = []
    sensor = FakeSensor()
    monkeypatch.setattr(timing, "warm_up", lambda *arguments: events.append("warm-up"))

    class Timer(FakeTimer):
        def start(self, work, times=1):
            events.append("start")
            end = super().start(work, times)
            return lambda: (events.append("wait"), end())[1]

    take(noting(events, "ab", lead=2), 1, LOADS[SUSTAINED], Timer(), sensor=sensor)
    first, second = events[1], events[4 + 1]
    assert {first, second} == {"a", "b"}
    assert events == [
        "warm-up",
        *(first, first, "start", first),
        *(second, second, "wait", "start", second),
        "wait",
    ]
    assert sensor.rests == []


def test_before_sustained_load_the_chip_is_kept_busy_until_its_speed_is_steady() -> None:
    sample, load = Sample(lambda: None, times=20), LOADS[SUSTAINED]
    timer = FakeTimer((800.0, 900.0, 990.0, 1000.0, 1003.0, 7.0))
    warm_up(sample, timer, load)
    assert timer.times_ms == [1003.0, 7.0]  # 990 and 1000 ms differ by no more than 1%
    restless = FakeTimer(tuple(float(2**n) for n in range(30)))
    warm_up(sample, restless, load)
    assert len(restless.times_ms) == 30 - MAX_WARM_UPS


def test_a_sample_is_as_long_as_its_load_says_and_its_graph_is_not() -> None:
    # a launch takes 2 ms; a graph of five of them 10 ms
    found = record(lambda: None, 1, FakeTimer((2.0, 10.0)), Protocol())
    sample = found.sample(LOADS[SUSTAINED])
    assert (sample.times, sample.n_launches, sample.lead) == (25, 125, 50)
    sample = found.sample(LOADS[BURST])
    assert (sample.times, sample.n_launches, sample.lead) == (1, 5, 0)
    short = record(lambda: None, 1, FakeTimer((2.0, 4.0)), Protocol(loads=(Load("turns", 3.0),)))
    assert (short.n_launches, short.sample(Load("turns", 3.0)).n_launches) == (2, 2)


def test_a_timer_that_flushes_the_cache_gets_one_launch_at_a_time() -> None:
    timer = FakeTimer((2.0, 2.0), flushes=True)
    sample = record(lambda: None, 1, timer, IN_TURNS).sample(TURNS)
    assert (sample.times, sample.n_launches) == (5, 5)
    timer = FakeTimer((1e-3, 1e-3), flushes=True)
    fast = record(lambda: None, 1, timer, Protocol()).sample(LOADS[SUSTAINED])
    assert (fast.n_launches, fast.lead) == (MAX_FLUSHED_WORKS, MAX_FLUSHED_WORKS)


def test_with_a_flushed_cache_one_set_of_inputs_is_enough() -> None:
    (found,) = measure(configs=BF16[:1], timer=FakeTimer(cache_bytes=10**9, flushes=True))
    assert found.input_sets == 1


def test_a_spent_time_budget_leaves_the_minimum_of_rounds() -> None:
    found = measure(protocol=Protocol(rounds=9, min_rounds=2), deadline=0.0)
    assert [(m.load, len(m.samples_ms)) for m in found] == [
        (load, 2) for load in (BURST, SUSTAINED) for _ in range(2)
    ]


@pytest.mark.parametrize(
    ("shape", "cache_bytes"),
    [
        (AttentionForward(1, 16, 256), 50_000_000),
        (AttentionForward(16, 16, 512), 50_000_000),
        (AttentionForward(8, 32, 512, kv_heads=8), 50_000_000),
    ],
)
def test_between_two_uses_of_a_set_of_inputs_twice_the_cache_is_touched(
    shape: AttentionForward, cache_bytes: int
) -> None:
    n_sets = n_input_sets(shape, cache_bytes)
    set_bytes = 2 * 2 * (math.prod(shape.shape) + math.prod(shape.kv_shape))
    assert (n_sets - 1) * set_bytes >= 2 * cache_bytes
    assert (n_sets - 2) * set_bytes < 2 * cache_bytes


def test_tiny_problems_have_a_limited_number_of_sets_of_inputs() -> None:
    assert n_input_sets(AttentionForward(1, 1, 16), 50_000_000) == MOST_SETS


def test_a_sample_is_the_mean_of_enough_launches_over_every_set() -> None:
    # two sets; one rotation takes 4 ms, so that three make 10 ms; the graph then takes 12 ms
    cache_bytes = 4 * 2 * math.prod(SHAPE.shape) // 2
    timer = FakeTimer((4.0, 12.0, 12.0, 13.0), cache_bytes)
    launches: list[str] = []
    (found,) = measure(
        lambda config, o: launches.append(config.short_form()),
        BF16[:1],
        replace(IN_TURNS, rounds=2),
        timer,
    )
    assert found.input_sets == 2
    assert found.launches_per_sample == 6
    assert found.samples_ms == (12.0 / 6, 13.0 / 6)
    assert found.valid
    # first call, estimate, recording, its replay; verified twice; two rounds
    assert len(launches) == 2 + 2 + 6 + 6 + 2 * 6 + 2 * 6
    assert found.sm_mhz == (1965.0, 1950.0) and found.power_w == (700.0, 700.0)


def test_a_kernel_that_is_right_has_its_errors_kept() -> None:
    for found in measure():
        assert found.failure == ""
        assert found.ran == found.name
        assert found.max_abs_error is not None and found.max_abs_bound is not None
        assert 0 < found.max_abs_error <= found.max_abs_bound
        assert len(found.samples_ms) == 3


def test_a_static_row_stride_that_is_not_the_inputs_is_told() -> None:
    static = next(config for config in reversed(BF16) if config.siblings() != (config,))
    (found,) = measure(configs=[static])
    assert found.ran == static.general().short_form() != found.name


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
        if calls > 8:  # eight come before the rounds
            o += 1

    (found,) = measure(worsen, BF16[:1])
    assert len(found.samples_ms) == 3
    assert "wrong output" in found.failure
    assert not found.valid


def test_a_kernel_that_writes_only_on_its_first_call_is_found_out() -> None:
    written: list[str] = []
    backend = fake_backend()

    def execute(config, *call):
        if not written:
            backend.execute(config, *call)
        written.append("")

    protocol, timer = replace(IN_TURNS, rounds=2), FakeTimer()
    sets = make_input_sets(SHAPE, Element.BF16, CPU, timer, protocol)
    contenders = [kernel_contender(BF16[0], execute)]
    (found,) = measure_problem(contenders, sets, SHAPE, Element.BF16, timer, protocol, FakeSensor())
    assert "wrong output" in found.failure


@pytest.mark.parametrize("wrong", ["o", "lse"])
def test_every_output_is_verified(wrong: str) -> None:
    shape = replace(SHAPE, return_lse=True)
    timer, protocol = FakeTimer(), replace(IN_TURNS, rounds=1)
    sets = make_input_sets(shape, Element.BF16, CPU, timer, protocol)

    def run(inputs: InputSet) -> Mapping[str, torch.Tensor]:
        for name, output in inputs.outputs.items():
            output.copy_(inputs.reference.expected[name] + (name == wrong))
        return inputs.outputs

    (found,) = measure_problem(
        *([Contender("own", None, run)], sets, shape, Element.BF16, timer, protocol, FakeSensor())
    )
    assert "wrong output" in found.failure


def test_the_libraries_are_verified_and_timed_like_the_kernels() -> None:
    every = contenders_for(BF16[:1], Element.BF16, fake_backend(), OPERATION)
    contenders = [contender for contender in every if not contender.refusal(SHAPE)]
    assert [c.name for c in contenders] == [FLASH, CUDNN, CONTROL, BF16[0].short_form()]
    protocol, timer = replace(IN_TURNS, rounds=2), FakeTimer()
    sets = make_input_sets(SHAPE, Element.BF16, CPU, timer, protocol)
    flash, cudnn, again, kernel = measure_problem(
        contenders, sets, SHAPE, Element.BF16, timer, protocol, FakeSensor()
    )
    assert flash.valid and flash.ran == ""
    assert cudnn.failure != ""  # not on a CPU
    assert again.valid and again.ran == ""
    # the flash backend is what all are paired with, itself too
    assert flash.first_ms == flash.samples_ms
    assert len(kernel.first_ms) == len(again.first_ms) == 2


def test_without_the_flash_backend_there_is_no_pair() -> None:
    assert [found.first_ms for found in measure()] == [(), ()]


def contenders_of(step: str) -> dict[Element, list[Contender]]:
    configs = [c for c in get_kernel_progression_configs() if c.step.id == step]
    return {dtype: contenders_for(configs, dtype, fake_backend(), OPERATION) for dtype in DTYPES}


TWO_ROUNDS = Protocol(rounds=2)


def run_small(
    contenders: dict[Element, list[Contender]], seq_lens: Sequence[int], **options
) -> BenchmarkRun:
    return run_benchmark(
        *(contenders, seq_lens, CPU, FakeTimer(), TWO_ROUNDS, FakeSensor()),
        shape_for=lambda seq_len: AttentionForward(1, 1, seq_len),
        **options,
    )


def test_a_problem_leaves_no_tensor_behind_for_the_next() -> None:
    """A GPU's memory is full long before Python's garbage collection looks for cycles."""
    (own,) = contenders_of("v1")[Element.BF16][-1:]
    seen: list[weakref.ref[torch.Tensor]] = []
    left: list[list[bool]] = []

    def run(inputs: InputSet) -> Mapping[str, torch.Tensor]:
        if inputs.problem.len_q == 128 and not left:
            left.append([tensor() is not None for tensor in seen])
        outputs = own.run(inputs)
        if inputs.problem.len_q == 64:
            tensors = (*inputs.inputs.values(), *inputs.reference.expected.values())
            tensors = (*tensors, *outputs.values())
            seen.extend(map(weakref.ref, tensors))
        return outputs

    gc.disable()
    try:
        run_small({Element.BF16: [replace(own, run=run)]}, (64, 128))
    finally:
        gc.enable()
    assert seen and left == [[False] * len(seen)]


def test_a_run_measures_every_dtype_at_every_length_first_in_bursts_then_sustained() -> None:
    run = run_small(contenders_of("v1"), (64, 128))
    assert [(m.load, m.dtype, m.size) for m in run.measurements if m.ran] == [
        (load, dtype, seq_len)
        for seq_len in (64, 128)
        for dtype in ("fp16", "bf16")
        for load in (BURST, SUSTAINED)
    ]
    assert all(len(m.sm_mhz) == len(m.samples_ms) for m in run.measurements if m.valid)
    assert {(s.name, s.reason) for s in run.skipped} == NOT_INSTALLED


NOT_INSTALLED = {
    (FLASH_ATTN, "the package flash_attn is not installed"),
    (FA3, "the package fa3_fwd is not installed"),
}


def test_a_kernel_is_left_out_of_the_lengths_that_its_tile_does_not_divide() -> None:
    steps: list[int] = []
    contenders = contenders_for([BF16[6], LARGE_TILE_7], Element.BF16, fake_backend(), OPERATION)
    run = run_small({Element.BF16: contenders}, (64, 128), advance=steps.append)
    small, large = BF16[6].short_form(), LARGE_TILE_7.short_form()
    measured = {(m.name, m.size) for m in run.measurements if m.ran}
    assert measured == {(small, 64), (small, 128), (large, 128)}
    (skipped,) = (s for s in run.skipped if s.name not in (FLASH_ATTN, FA3))
    assert (skipped.name, skipped.dtype, skipped.size) == (large, "bf16", 64)
    assert "seq_len 64 is not a multiple of B_r 128" in skipped.reason
    assert sum(steps) == 2 * n_steps(len(contenders), TWO_ROUNDS)


def test_what_is_left_of_the_time_is_shared_out_by_what_a_round_takes(monkeypatch) -> None:
    """30 ms for a burst with its rest, 750 ms for a slice of sustained load."""
    done: list[str] = []
    clock = [0.0]
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: clock[0])

    def rounds(
        samples, timer, load, most, sensor, reference, seed, may_continue
    ) -> list[list[Taken]]:
        for n in range(most):
            if not may_continue(n):
                break
            done.append(load.name)
            clock[0] += load.slice_ms / 10
        return [[Taken(1.0, None, None)] for _ in samples]

    monkeypatch.setattr(benchmark, "interleaved_rounds", rounds)
    measure(protocol=Protocol(rounds=99, min_rounds=1), deadline=780.0)
    assert done == [BURST] * 10 + [SUSTAINED] * 10


def test_a_problem_that_does_not_fit_in_memory_is_skipped_and_stops_no_other() -> None:
    def exhaust(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
        if o.shape[1] == 128:
            raise torch.cuda.OutOfMemoryError("Tried to allocate 9 GiB\nand more")

    steps: list[int] = []
    contenders = contenders_for(BF16[:1], Element.BF16, fake_backend(exhaust), OPERATION)
    run = run_small({Element.BF16: contenders}, (64, 128, 192), advance=steps.append)
    assert {m.size for m in run.measurements} == {64, 192}
    (skipped,) = (s for s in run.skipped if not s.name)
    assert (skipped.dtype, skipped.size) == ("bf16", 128)
    assert "Tried to allocate 9 GiB" in skipped.reason and "\n" not in skipped.reason
    # the progress bar comes to its end
    assert sum(steps) == 3 * n_steps(len(contenders), TWO_ROUNDS)


# The chip's own rates


def test_rates_are_measured_in_every_dtype_of_the_run_under_each_load() -> None:
    launched: list[Element] = []

    def make(dtype: Element) -> RateWork:
        return RateWork(10**9, lambda: launched.append(dtype))

    run = run_small(contenders_of("v1"), (64,), rate_works={MMA_SYNC: make})
    assert [(r.name, r.load, r.dtype, len(r.samples_ms)) for r in run.rates] == [
        (MMA_SYNC, load, dtype, 2) for dtype in ("fp16", "bf16") for load in (BURST, SUSTAINED)
    ]
    assert set(launched) == set(DTYPES)


def test_a_rate_is_operations_over_the_median_time_of_a_launch() -> None:
    # one launch takes 2 ms; five make a sample, whose rounds take 10, 20 and 30 ms
    timer = FakeTimer((2.0, 10.0, 10.0, 20.0, 30.0))
    works = {MATMUL: lambda dtype: RateWork(4 * 10**12, lambda: None)}
    (rate,) = measure_rates(works, Element.BF16, timer, IN_TURNS, FakeSensor())
    assert rate.samples_ms == (2.0, 4.0, 6.0)
    assert rate.tflops == pytest.approx(1000)


def test_a_rate_that_cannot_be_measured_stops_nothing_and_says_why() -> None:
    def fail(dtype: Element) -> RateWork:
        raise RuntimeError("the kernel library has no flash_mma_loop")

    works = {MMA_SYNC: fail, MATMUL: lambda dtype: RateWork(10**9, lambda: None)}
    broken, whole = measure_rates(works, Element.BF16, FakeTimer(), IN_TURNS, FakeSensor())
    assert "no flash_mma_loop" in broken.failure and broken.tflops is None
    assert whole.failure == "" and whole.tflops is not None


def test_the_matmul_rate_counts_the_product_it_computes() -> None:
    work = matmul_work(Element.BF16, CPU, size=64)
    work.launch()
    assert work.operations == 2 * 64**3
    assert MATMUL_SIZE == 8192


def test_a_gpu_has_as_many_sms_as_the_work_of_the_loop_on_each_of_them_says() -> None:
    of_an_sm = set()
    for name in ("h100", "large_tile_h200"):
        results = load_results(RESULTS.with_name(f"{name}.json"))
        sms = SM_COUNTS[results.provenance.gpu]
        of_an_sm |= {r.operations / sms for r in results.rates if r.name == MMA_SYNC}
    assert len(of_an_sm) == 1


# Packages that are contenders

PACKAGES = [(FLASH_ATTN, "flash_attn", "flash_attn"), (FA3, "fa3_fwd", "fa3_fwd_interface")]


@pytest.fixture(params=PACKAGES, ids=[name for name, *_ in PACKAGES])
def package(request, tmp_path: Path, monkeypatch) -> Iterator[tuple[str, str, Path]]:
    """One that is installed, whose module computes attention in float32: the contender's name, the
    package's, and the module's file."""
    name, distribution, module = request.param
    site = tmp_path / "site"
    site.mkdir()
    (site / f"{module}.py").write_text(
        "import math, torch\n"
        "def flash_attn_func(q, k, v, causal):\n"
        "    n = q.shape[2] // k.shape[2]\n"
        "    k, v = (x.repeat_interleave(n, dim=2) for x in (k, v))\n"
        "    Q, K, V = (x.transpose(1, 2).float() for x in (q, k, v))\n"
        "    S = Q @ K.mT / math.sqrt(q.shape[-1])\n"
        "    hidden = torch.ones_like(S).triu(1).bool() if causal else torch.zeros_like(S).bool()\n"
        "    P = torch.softmax(S.masked_fill(hidden, -math.inf), -1)\n"
        "    return (P @ V).transpose(1, 2).to(q.dtype)\n"
    )
    info = site / f"{distribution}-2.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.9.9\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, module, raising=False)
    yield name, distribution, site / f"{module}.py"
    sys.modules.pop(module, None)


def run_contender(name: str, shape: AttentionForward = SHAPE) -> Measurement:
    timer = FakeTimer()
    (contender,) = (c for c in library_contenders(OPERATION) if c.name == name)
    sets: list[InputSet] = make_input_sets(shape, Element.BF16, CPU, timer, IN_TURNS)
    (found,) = measure_problem(
        [contender], sets, shape, Element.BF16, timer, IN_TURNS, FakeSensor()
    )
    return found


CAUSAL = AttentionForward(1, 2, 100, causal=True)
GROUPED = AttentionForward(1, 4, 72, kv_heads=2)


@pytest.mark.parametrize("shape", [CAUSAL, GROUPED], ids=["causal", "grouped"])
def test_a_library_is_asked_for_the_problem(shape: AttentionForward) -> None:
    found = run_contender(FLASH, shape)
    assert found.valid and found.max_abs_error
    assert found.asked == shape and found.problem == shape.record()


@pytest.mark.parametrize("shape", [CAUSAL, GROUPED], ids=["causal", "grouped"])
def test_a_package_is_asked_for_the_problem(
    package: tuple[str, str, Path], shape: AttentionForward
) -> None:
    found = run_contender(package[0], shape)
    assert found.valid and found.asked == shape


def test_a_package_is_a_contender_where_it_is_installed(package: tuple[str, str, Path]) -> None:
    name, distribution, _ = package
    refused = {c.name for c in library_contenders(OPERATION) if c.refusal(SHAPE)}
    assert refused == {FLASH_ATTN, FA3} - {name}
    assert library_records(library_contenders(OPERATION), OPERATION) == (
        LibraryRecord(distribution, "2.9.9"),
    )
    assert run_contender(name).valid


def test_a_package_that_cannot_be_imported_fails_with_the_reason(
    package: tuple[str, str, Path],
) -> None:
    name, _, module = package
    module.write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    found = run_contender(name)
    assert "undefined symbol: _ZN3c10" in found.failure
    assert synthetic_results(found).failures == []


def test_default_problems_are_the_projects() -> None:
    assert [default_shape(n).batch for n in MEASURED_LENGTHS] == [16, 16, 16, 16, 8, 4]
    assert {default_shape(n).heads for n in MEASURED_LENGTHS} == {16}
    assert {default_shape(n) for n in (1000, 4000, 8191)} == {
        *(AttentionForward(16, 16, 1000), AttentionForward(16, 16, 4000)),
        AttentionForward(8, 16, 8191),
    }


def test_a_problem_of_more_heads_has_a_batch_so_much_smaller() -> None:
    grouped = [default_shape(n, heads=32, kv_heads=8, causal=True) for n in MEASURED_LENGTHS]
    assert [shape.batch for shape in grouped] == [8, 8, 8, 8, 4, 2]
    assert all((p.heads, p.kv_heads, p.causal) == (32, 8, True) for p in grouped)
    assert default_shape(16384, heads=512).batch == 1
    assert default_shape(512, heads=32, batch=3).batch == 3
    with pytest.raises(ValueError, match="heads 32 is not a multiple of kv_heads 5"):
        default_shape(512, heads=32, kv_heads=5)


def test_provenance_names_the_machine(tmp_path: Path) -> None:
    backend = replace(fake_backend(), library="CUDA 13.0 for sm_90")
    found = provenance(backend, "pt_bench.py", "abc")
    assert found.torch == torch.__version__
    assert (found.library, found.commit) == ("CUDA 13.0 for sm_90", "abc")
    assert git_commit(tmp_path) == ""


# Statistics


def test_operations_are_those_of_two_matrix_products() -> None:
    assert AttentionForward(2, 3, 64).operations == 2 * (2 * 2 * 3 * 64 * 64 * 128)


def test_speed_is_taken_at_the_median() -> None:
    found = replace(
        measurement(FLASH, 1024, 100.0),
        problem=SHAPE.record(),
        samples_ms=(4.0, 1.0, 2.0, 3.0, 100.0),
    )
    assert found.median_ms == 3.0
    assert found.speed == pytest.approx(SHAPE.operations / 3e-3 / 1e12)
    # 128 queries see 1 to 128 keys
    causal = replace(found, problem=replace(SHAPE, causal=True).record())
    assert causal.speed == pytest.approx(found.speed * 129 / 256)


def test_an_interval_holds_the_middle_four_fifths() -> None:
    assert interval([float(n) for n in range(11)]) == (1.0, 9.0)
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((1.2, 2.8))
    assert interval([3.0]) == (3.0, 3.0)


def test_a_ratio_is_formed_within_a_round_so_that_a_drifting_clock_cancels() -> None:
    name = BF16[0].short_form()
    own, flash = measurement(name, 1024, 150.0), measurement(FLASH, 1024, 300.0)
    # the flash backend of the whole round had another clock than the one next to it
    flash = replace(flash, samples_ms=flash.samples_ms[::-1], first_ms=flash.samples_ms[::-1])
    results = synthetic_results(flash, own)
    assert results.pairs(name, FLASH, "bf16", 1024) == pytest.approx([0.5] * 3)
    assert results.of_first(name, "bf16", 1024) == pytest.approx(0.5)
    # where it was not timed beside them, the samples of a round are compared themselves
    raw = [replace(m, first_ms=()) for m in (flash, own)]
    ratios = synthetic_results(*raw).pairs(name, FLASH, "bf16", 1024)
    assert ratios == pytest.approx([0.5 * 1.2 / 0.9, 0.5, 0.5 * 0.9 / 1.2])


def test_two_kernels_are_compared_through_the_flash_backend_next_to_each() -> None:
    one, other = (config.short_form() for config in BF16[:2])
    slow = measurement(other, 1024, 150.0)
    # it was timed when the clock was at half, and so was the flash backend next to it
    halved = {
        name: tuple(2 * ms for ms in getattr(slow, name)) for name in ("samples_ms", "first_ms")
    }
    results = synthetic_results(measurement(one, 1024, 100.0), replace(slow, **halved))
    assert results.ratio(other, one, "bf16", 1024) == pytest.approx(1.5)


def test_noise_is_how_far_flash_is_from_itself() -> None:
    name = BF16[0].short_form()
    speeds = {FLASH: 300.0, name: 300 * 1.0079, "slower": 300 * 0.9921, "faster": 300 * 1.0081}
    rows = [measurement(own, 1024, speed) for own, speed in speeds.items()]
    results = synthetic_results(*rows, control(1024))
    assert results.noise("bf16", 1024) == pytest.approx(0.008)  # 80% of 0.99, 1 and 1.01
    assert results.is_equal(name, FLASH, "bf16", 1024)
    assert results.is_equal("slower", FLASH, "bf16", 1024)
    assert not results.is_equal("faster", FLASH, "bf16", 1024)
    # of one length, too, the mean's is the farthest round
    assert results.noise("bf16") == pytest.approx(0.01)
    assert results.is_equal("faster", FLASH, "bf16")
    without = synthetic_results(*rows)
    assert without.noise("bf16") is without.noise("bf16", 1024) is None
    assert not without.is_equal(name, FLASH, "bf16", 1024)  # nobody knows


def test_the_noise_of_a_mean_is_that_of_the_mean() -> None:
    name, speed = BF16[0].short_form(), 300 * 1.014
    rows = [measurement(own, n, v) for own, v in ((FLASH, 300.0), (name, speed)) for n in (64, 128)]
    controls = control(64, ratios=(0.97, 1.0, 1.03)), control(128, ratios=(1.03, 1.02, 1.0))
    results = synthetic_results(*rows, *controls)
    rounds = [2 / (1 / one + 1 / other) for one, other in ((0.97, 1.03), (1.0, 1.02), (1.03, 1.0))]
    assert results.noise("bf16") == pytest.approx(rounds[2] - 1)  # 1.5%
    assert results.noise("bf16", 64) == pytest.approx(0.03)  # 80% of the rounds of both lengths
    # each question has its own: 1.4% is less than both, 2% less than that of one length alone
    assert results.is_equal(name, FLASH, "bf16")
    larger = with_speed(results, name, 300 * 1.02)
    assert larger.is_equal(name, FLASH, "bf16", 64) and not larger.is_equal(name, FLASH, "bf16")
    # the third round, if one length had no time for it, has no mean
    shorter = synthetic_results(
        *(
            replace(m, samples_ms=m.samples_ms[:2], first_ms=m.first_ms[:2]) if m.size == 128 else m
            for m in results.measurements
        )
    )
    assert shorter.noise("bf16") == pytest.approx(rounds[1] - 1)
    # a mean over lengths that the control was not timed at is nobody's
    assert synthetic_results(*rows, controls[0]).noise("bf16") is None


def test_burst_and_sustained_are_told_apart_and_bursts_are_meant() -> None:
    results = full_results()
    name = BF16[0].short_form()
    assert results.loads == [BURST, SUSTAINED]
    assert results.main_load == BURST
    assert results.speed(name, "bf16", 4096) == pytest.approx(110.0 * BURST_GAIN)
    assert results.speed(name, "bf16", 4096, SUSTAINED) == pytest.approx(110.0)
    assert results.of_first(name, "bf16", load=SUSTAINED) == pytest.approx(110 / 300)
    sustained = under(SUSTAINED, results)
    assert sustained.main_load == SUSTAINED
    assert sustained.speed(name, "bf16") == pytest.approx(110.0)


def test_means_are_harmonic_and_compared_with_flash() -> None:
    name = BF16[0].short_form()
    # next to a flash backend of 300
    results = synthetic_results(
        measurement(FLASH, 1024, 300.0),
        replace(measurement(FLASH, 4096, 600.0), first_ms=()),
        measurement(name, 1024, 100.0),
        replace(measurement(name, 4096, 300.0), first_ms=()),
    )
    assert results.speed(name, "bf16") == pytest.approx(150.0)
    assert results.of_first(name, "bf16", 4096) == pytest.approx(0.5)
    assert results.of_first(name, "bf16") == pytest.approx(150 / 400)


def test_the_best_of_the_others_may_be_another_at_each_length() -> None:
    name = BF16[0].short_form()
    speeds = {FLASH: (300.0, 300.0), CUDNN: (400.0, 500.0), FA3: (450.0, 480.0), name: (495, 450)}
    rows = [
        measurement(own, n, speed)
        for own, both in speeds.items()
        for n, speed in zip((1024, 4096), both, strict=True)
    ]
    # the control is none of them
    fast = replace(control(1024), samples_ms=(1e-3,) * 3)
    results = synthetic_results(*rows, fast)
    assert [results.find(BEST_OTHER, "bf16", n).name for n in (1024, 4096)] == [FA3, CUDNN]
    assert results.of_best_other(name, "bf16", 1024) == pytest.approx(1.1)
    assert results.of_best_other(name, "bf16", 4096) == pytest.approx(0.9)
    means = [2 / (1 / one + 1 / other) for one, other in ((495, 450), (450, 500))]
    assert results.of_best_other(name, "bf16") == pytest.approx(means[0] / means[1])
    assert results.fastest([name, FLASH], "bf16", 1024).name == name
    alone = synthetic_results(measurement(name, 1024, 100.0))
    assert alone.find(BEST_OTHER, "bf16", 1024) is None
    assert alone.of_best_other(name, "bf16", 1024) is None


def test_the_share_of_the_tensor_peak_is_that_at_the_clock_which_was_read() -> None:
    name = BF16[0].short_form()
    # 132 SMs, 4096 operations a cycle each, 1470 MHz in the median
    peak = 132 * 4096 * 1470e6 / 1e12
    found = [measurement(name, 1024, 0.9 * peak), measurement(name, 4096, 0.6 * peak)]
    results = synthetic_results(*found)
    assert results.of_tensor_peak(name, "bf16", 1024) == pytest.approx(0.9)
    assert results.of_tensor_peak(name, "bf16") == pytest.approx(2 / (1 / 0.9 + 1 / 0.6))
    assert results.of_tensor_peak(name, "fp16", 1024) is None
    unread = synthetic_results(found[0], replace(found[1], sm_mhz=()))
    assert unread.of_tensor_peak(name, "bf16", 1024) == pytest.approx(0.9)
    assert unread.of_tensor_peak(name, "bf16") is None
    for gpu, capability in (("GPU of tomorrow", "9.0"), ("x86_64", "")):
        other = replace(results.provenance, gpu=gpu, compute_capability=capability)
        assert replace(results, provenance=other).of_tensor_peak(name, "bf16", 1024) is None


def test_a_failed_length_leaves_no_mean_and_no_number() -> None:
    name = BF16[0].short_form()
    results = synthetic_results(
        measurement(FLASH, 1024, 300.0),
        measurement(FLASH, 4096, 300.0),
        measurement(name, 1024, 100.0),
        measurement(name, 4096, 100.0, failure="wrong output"),
    )
    assert results.speed(name, "bf16") is None
    assert results.of_first(name, "bf16", 4096) is None
    assert results.of_first(name, "bf16", 1024) == pytest.approx(1 / 3)
    assert [m.name for m in results.failures] == [name]


def test_a_library_that_does_not_run_here_is_no_failure() -> None:
    results = synthetic_results(measurement(CUDNN, 1024, 1.0, failure="not available"))
    assert results.failures == []


# Files


def test_json_has_one_line_a_measurement() -> None:
    results = full_results()
    lines = [line for line in results.to_json().splitlines() if '"first_ms"' in line]
    assert len(lines) == len(results.measurements)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "holds no benchmark results"),
        ('{"format": 3}', "format 3 is not 4: measure again"),
        ('{"format": 4}', "missing required field `provenance`"),
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
        (
            "input_sets",
            None,
            r"Expected `int`, got `null` - at `\$\.measurements\[0\]\.input_sets`",
        ),
        ("input_sets", 16.0, "Expected `int`, got `float`"),
        ("input_sets", True, "Expected `int`, got `bool`"),
        ("problem", [], "Expected `object`, got `array`"),
        ("problem", {}, r"operation None is not one of .*rows.* - at `\$\.measurements\[0\]`"),
        ("problem", {"operation": "rows", "rows": 2.5, "width": 8}, "rows 2.5 is no int"),
        ("problem", {"operation": "rows", "rows": 2}, r"lacks the fields \['width'\]"),
        ("name", 7, "Expected `str`, got `int`"),
        ("samples_ms", [1.0, "2"], r"got `str` - at `\$\.measurements\[0\]\.samples_ms\[1\]`"),
        ("samples_ms", 1.0, "Expected `array`, got `float`"),
        ("relative_error", "small", r"Expected `float \| null`, got `str`"),
        ("relative_error", float("nan"), "JSON is malformed"),
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


def other_values(problem: Problem) -> dict[str, object]:
    """Another value of each field of a problem, by the field's name."""
    flags = dict.fromkeys(("causal", "return_lse", "sinks"), True)
    numbers = {"window_left": 5, "window_right": 6, "softmax_scale": 0.5, "softcap": 2.0}
    other = {"dtype": Element.FP16, **flags, **numbers, "sequences": 3}
    sizes = {f.name: 2 * getattr(problem, f.name) for f in fields(problem) if f.name not in other}
    return {f.name: other.get(f.name, sizes.get(f.name)) for f in fields(problem)}


PROBLEMS = (AttentionForward(1, 16, 1024, kv_heads=8), Rows(64, 1024))


@pytest.mark.parametrize(
    ("problem", "field"),
    [(problem, name) for problem in PROBLEMS for name in other_values(problem)],
    ids=lambda value: value if isinstance(value, str) else value.operation,
)
def test_results_of_problems_that_differ_in_any_one_field_never_share_a_key(
    tmp_path: Path, problem: Problem, field: str
) -> None:
    other = replace(problem, **{field: other_values(problem)[field]})
    assert other != problem
    first = OPERATIONS[problem.operation].first
    one, two = (
        replace(measurement(first, 1024, 300.0), problem=p.record()) for p in (problem, other)
    )
    assert one.key != two.key
    skipped = [SkippedRecord(m.problem, "does not fit") for m in (one, two)]
    assert skipped[0].key != skipped[1].key
    # a run that goes on measures the other one
    assert BenchmarkRun(measurements=(one,)).problems == {problem}
    assert BenchmarkRun(skipped=tuple(skipped)).problems == {problem, other}
    path = tmp_path / "results.json"
    both = replace(synthetic_results(one, two), skipped=tuple(skipped))
    both.save(path)
    found = load_results(path)
    assert found == both and len({m.key for m in found.measurements}) == 2
    # neither is found in the other's place
    assert [found.find(first, p.dtype.short, p) for p in (problem, other)] == [one, two]
    if (one.dtype, one.size) == (two.dtype, two.size):
        with pytest.raises(ValueError, match=r"hold two problems of .* name the problem"):
            found.find(first, one.dtype, one.size)
    else:
        assert [found.find(first, m.dtype, m.size) for m in (one, two)] == [one, two]


def test_results_of_two_operations_never_share_a_key() -> None:
    own, rows = (
        replace(measurement(FLASH, 1024, 300.0), problem=problem.record()) for problem in PROBLEMS
    )
    assert own.size == rows.size and own.dtype == rows.dtype and own.key != rows.key
    with pytest.raises(ValueError, match="are of attention_forward, rows: keep each operation"):
        _ = synthetic_results(own, rows).operation


def test_a_record_that_lacks_fields_is_of_the_problem_with_their_defaults() -> None:
    whole = measurement(FLASH, 1024, 300.0)
    short = {name: whole.problem[name] for name in ("operation", "batch", "heads", "len_q")}
    assert replace(whole, problem=short).key == whole.key


def test_csv_says_which_problem_was_measured() -> None:
    (row,) = csv.DictReader(
        io.StringIO(synthetic_results(grouped_results().measurements[0]).to_csv())
    )
    assert (row["operation"], row["heads"], row["kv_heads"], row["causal"]) == (
        *("attention_forward", "32", "8", "True"),
    )


def test_a_number_that_json_does_not_have_is_not_written(tmp_path: Path) -> None:
    broken = replace(measurement(FLASH, 1024, 300.0), relative_error=math.nan)
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
    assert (flash["step"], flash["percent_of_pytorch_flash"]) == ("", "100.0")
    assert (kernel["name"], kernel["step"]) == (name, "v3")
    assert (kernel["tflops"], kernel["percent_of_pytorch_flash"]) == ("150.0", "50.0")
    assert (kernel["load"], kernel["sm_mhz"], kernel["power_w"]) == (SUSTAINED, "1470.0", "698.0")
    assert (
        kernel["percent_of_pytorch_flash_low"] == kernel["percent_of_pytorch_flash_high"] == "50.0"
    )
    assert (kernel["best_other"], kernel["percent_of_best_other"]) == (FLASH, "50.0")
    assert kernel["percent_of_tensor_peak"] == "18.9"  # 150 of 132 * 4096 * 1.47 GHz
    assert (failed["tflops"], failed["sm_mhz"], failed["failure"]) == ("", "", "wrong output")


def test_table_csv_and_json_have_the_same_shares_of_the_chips_rates(tmp_path: Path) -> None:
    name = BF16[2].short_form()
    results = with_rates(
        synthetic_results(measurement(FLASH, 1024, 300.0), measurement(name, 1024, 150.0))
    )
    expected = {FLASH: 50.0, MATMUL: 18.8, MMA_SYNC: 25.0}  # 150 over 300, 800 and 600
    *_, row = csv.DictReader(io.StringIO(results.to_csv()))
    *_, derived = (m["derived"] for m in json.loads(results.to_json())["measurements"])
    text = report_text(results)
    for rate, percent in expected.items():
        assert row[f"percent_of_{rate}"] == str(percent)
        assert derived[f"percent_of_{rate}"] == percent
    assert {f"bf16, sustained, % of {name}" for name in ("flash", "matmul", "mma.sync")} <= {
        line.partition("  ")[0] for line in text.splitlines()
    }
    assert "bf16, sustained, mma.sync: 600 TFLOP/s" in text
    assert "bf16, burst, mma.sync: 720 TFLOP/s" in text
    assert results.of_rate(MMA_SYNC, name, "bf16") == pytest.approx(150 / 600)


def test_what_is_derived_is_not_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = with_rates(full_results())
    data = json.loads(results.to_json())
    for row in data["measurements"]:
        row["derived"]["tflops"] = -1
    path.write_text(json.dumps(data))
    assert load_results(path) == results


@pytest.mark.parametrize(
    "results",
    [
        grouped_results(),
        replace(
            with_rates(full_results()),
            libraries=(LibraryRecord(FLASH_ATTN, "2.9.9"),),
            skipped=(
                SkippedRecord(default_shape(65536).record(), "does not fit"),
                SkippedRecord(
                    default_shape(1024).record(), "not a multiple", LARGE_TILE_7.short_form()
                ),
            ),
            resources=(ResourceRecord(BF16[0].short_form(), 168, 0, 49152, 3),),
        ),
    ],
)
def test_every_kind_of_record_round_trips(tmp_path: Path, results: BenchmarkResults) -> None:
    path = tmp_path / "deep" / "results.json"
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


def step_rows(results: BenchmarkResults) -> dict[str, list[str]]:
    """Cells behind the idea, by step or title."""
    _, *rows = rows_of(progression_table(results).partition("<details>")[0])
    return {row[0] or row[1]: row[2:] for row in rows}


def load_rows(results: BenchmarkResults) -> dict[tuple[str, str], list[str]]:
    """Cells behind the idea, by step and idea."""
    _, *rows = rows_of(loads_table(results))
    return {(row[0], row[1]): row[2:] for row in rows}


def test_the_step_table_has_a_row_a_step_in_order_and_then_the_libraries() -> None:
    text = progression_table(with_rates(full_results()))
    header, *rows = rows_of(text)
    assert header == [
        *("step", "idea", "fixed tile: % of flash", "large tile: % of flash"),
        *("stride read: % of flash", "TFLOP/s at 4096"),
    ]
    steps = rows[: len(ATTENTION_STEPS)]
    assert [row[:2] for row in steps] == [[step.id, step.idea] for step in ATTENTION_STEPS.values()]
    assert [row[1:] for row in rows[len(ATTENTION_STEPS) :]] == [
        ["PyTorch's flash backend", "100.0", "100.0", "", "360"],
        ["PyTorch's cuDNN backend", "200.0", "200.0", "", "720"],
        ["mma.sync alone, on registers", "200.0", "200.0", "", "720"],
    ]


def test_the_step_table_shows_both_staircases() -> None:
    rows = step_rows(full_results())
    # before the large tile: 110 of flash's 300
    assert rows["v1"] == ["36.7", "", "", "132"]
    # the speeds are those of the large tile where there is one
    assert rows["v7"] == ["56.7", "90.0", "", "324"]
    # with a static stride, the kernel that reads it stands beside
    assert rows["v16"] == ["86.7", "120.0", "= 116.7", "432"]
    # another family's steps are at the large tile from the start
    assert rows["o1"] == ["", "123.3", "120.0", "444"]


def under(load: str, results: BenchmarkResults) -> BenchmarkResults:
    """Results under one load."""
    return replace(results, measurements=tuple(m for m in results.measurements if m.load == load))


def with_speed(results: BenchmarkResults, name: str, tflops: float) -> BenchmarkResults:
    """The results, with another speed of one kernel: so many TFLOP/s sustained, BURST_GAIN times
    that in bursts."""
    rows = (
        measurement(name, m.size, tflops, load=m.load) if m.name == name else m
        for m in results.measurements
    )
    return replace(results, measurements=tuple(rows))


@pytest.mark.parametrize(
    ("step", "column", "tile"), [("v2", 0, "fixed"), ("v9", 1, "large"), ("o1", 1, "large")]
)
@pytest.mark.parametrize(("share", "is_equal"), [(1.005, True), (0.995, True), (1.02, False)])
def test_a_step_within_the_noise_of_its_parent_at_the_same_tile_is_equal(
    step: str, column: int, tile: str, share: float, is_equal: bool
) -> None:
    own = STAIRS[step]
    parent = getattr(STAIRS[own.step.parent], tile).short_form()
    results = full_results()  # whose control is within 1% of flash
    speed = share * results.speed(parent, "bf16", load=SUSTAINED)
    results = with_speed(results, getattr(own, tile).short_form(), speed)
    text = share_text(results.of_first(getattr(own, tile).short_form(), "bf16"))
    assert step_rows(results)[step][column] == (f"= {text}" if is_equal else text)


def test_no_step_is_equal_to_another_tile_of_its_parent() -> None:
    results = full_results()
    fixed_6, large_7 = (STAIRS[n].widest.short_form() for n in ("v6", "v7"))
    results = with_speed(results, large_7, results.speed(fixed_6, "bf16", load=SUSTAINED))
    assert results.is_equal(large_7, fixed_6, "bf16")
    assert "=" not in "".join(step_rows(results)["v7"])


def test_other_configs_are_folded_below() -> None:
    text = progression_table(full_results())
    assert "<details>" not in text
    wide = LARGE_TILE_7.replace(B_c=32)
    more = (measurement(wide.short_form(), n, 310.0, load=BURST) for n in (1024, 4096))
    table, _, folded = progression_table(full_results(*more)).partition("<details>")
    assert wide.short_form() not in table
    _, row = rows_of(folded)
    assert row == ["v7", f"`{wide.short_form()}`", "103.3", "372"]
    assert "</details>" in folded


@pytest.mark.parametrize(("load", "other"), [(BURST, SUSTAINED), (SUSTAINED, BURST)])
def test_of_one_load_the_step_table_tells_that_one(load: str, other: str) -> None:
    text = progression_table(under(load, full_results()))
    assert load in text and other not in text


def with_control(ratios: dict[str, tuple[float, float, float]]) -> BenchmarkResults:
    """The control so many times as fast as flash in each round, by load."""
    results = full_results()
    rows = (
        control(m.size, m.load, ratios[m.load]) if m.name == CONTROL else m
        for m in results.measurements
    )
    return replace(results, measurements=tuple(rows))


NOISY_SUSTAINED = {BURST: (0.998, 1.0, 1.0), SUSTAINED: (1.0, 1.0, 1.09)}


def test_the_step_table_tells_the_noise_of_its_load() -> None:
    text = progression_table(with_control(NOISY_SUSTAINED))
    assert 'in the mean of a round by up to 0.2%. An "=" marks' in text


def test_the_step_table_says_what_it_was_measured_on() -> None:
    text = progression_table(full_results())
    for fact in (
        "NVIDIA H100 80GB HBM3",
        "580.1",
        "2.13.0",
        "16 heads",
        "16 at 4096",
        "burst: 3 rounds of 10 ms each, with pauses 2 times as long: SM clock 1965 MHz, 310 W",
        "2026-01-02",
        "abc123",
        "1024 … 4096",
        "The fixed tile is B_r 64, B_c 64, 4 warps, the large tile B_r 128, B_c 64, 4 warps",
        "Speeds are in bursts.",
    ):
        assert fact in text, fact
    assert SUSTAINED not in text


def test_the_step_table_tells_how_launches_were_timed() -> None:
    results = full_results()
    text = progression_table(results)
    assert "CUDA graph replays" in text and "L2" not in text
    protocol = replace(results.protocol, timing="events", cache="flush")
    text = progression_table(replace(results, protocol=protocol))
    assert "launches one by one; L2 cache overwritten before each" in text


def test_a_step_that_was_not_measured_has_dashes_and_a_family_no_rows() -> None:
    measured = measurement(BF16[1].short_form(), 4096, 110.0)
    rows = step_rows(synthetic_results(measurement(FLASH, 4096, 300.0), measured))
    assert rows["v1"] == ["-", "", "", "-"]
    assert rows["v16"] == ["-", "-", "-", "-"]
    assert "o1" not in rows and "h1" not in rows


def test_the_table_of_loads_has_the_kernels_at_the_large_tile_and_then_the_libraries() -> None:
    text = loads_table(with_rates(full_results()))
    header, *rows = rows_of(text)
    assert header == [
        *("step", "idea", "bf16, burst: %", "bf16, sustained: %", "TFLOP/s", "MHz", "W"),
    ]
    read = "the same, with the row stride read at run time"
    expected = [
        [own.step.id, title]
        for own in STAIRS.values()
        for config, title in ((own.large, own.step.idea), (own.read, read))
        if config is not None
    ]
    assert [row[:2] for row in rows[: len(expected)]] == expected
    assert rows[len(expected) :] == [
        ["", "PyTorch's flash backend", "100.0", "100.0", "300", "1,470", "698"],
        ["", "PyTorch's cuDNN backend", "200.0", "200.0", "600", "1,470", "698"],
        ["", "mma.sync alone, on registers", "200.0", "200.0", "600", "", ""],
    ]
    for fact in (
        "NVIDIA H100 80GB HBM3",
        "bf16, 16 heads",
        "burst: 3 rounds of 10 ms each, with pauses 2 times as long: SM clock 1965 MHz, 310 W",
        "sustained: 3 rounds of 250 ms each after 500 ms of the same load, without a pause: "
        "SM clock 1470 MHz, 698 W",
        "abc123",
    ):
        assert fact in text, fact


def test_the_table_of_loads_tells_speeds_sustained_beside_those_in_bursts() -> None:
    o1, parent = STAIRS["o1"], STAIRS["v16"]
    slow = replace(
        full_results(),
        measurements=tuple(
            measurement(m.name, m.size, 330.0)
            if (m.name, m.load) == (o1.large.short_form(), SUSTAINED)
            else m
            for m in full_results().measurements
        ),
    )
    assert load_rows(slow)["o1", o1.step.idea] == ["123.3", "110.0", "330", "1,470", "698"]
    assert load_rows(slow)["v16", parent.step.idea][:2] == ["120.0", "120.0"]


def test_a_step_is_equal_to_its_parent_under_a_load_if_within_the_noise_of_that() -> None:
    # o1 has 123.3% of flash, v16 120.0%
    results = with_control(NOISY_SUSTAINED)
    cells = load_rows(results)["o1", STAIRS["o1"].step.idea]
    assert cells[:2] == ["123.3", "= 123.3"]
    assert "0.20% (bf16, burst), 9.00% (bf16, sustained)" in loads_table(results)


def test_the_table_of_loads_has_a_row_for_a_config_at_another_tile() -> None:
    wide = LARGE_TILE_7.replace(B_c=32)
    more = (measurement(wide.short_form(), n, 310.0, load=BURST) for n in (1024, 4096))
    row = load_rows(full_results(*more))["v7", f"`{wide.short_form()}`"]
    assert row[:3] == ["103.3", "-", "-"]


def test_the_table_of_loads_has_columns_of_the_second_dtype_and_rows_of_what_was_measured() -> None:
    measured = [STAIRS["o1"], STAIRS["o2"]]
    fp16 = stairs("fp16")
    rows = [
        measurement(name, 4096, speed, dtype, load=load)
        for dtype, gain in (("fp16", 1.1), ("bf16", 1.0))
        for load in (BURST, SUSTAINED)
        for name, speed in [
            (FLASH, 300.0),
            *(
                ((fp16[own.step.id] if dtype == "fp16" else own).large.short_form(), gain * speed)
                for own, speed in zip(measured, (300.0, 360.0), strict=True)
            ),
        ]
    ]
    header, *found = rows_of(loads_table(synthetic_results(*rows)))
    assert header[2:6] == [
        f"{dtype}, {load}: %" for dtype in ("bf16", "fp16") for load in (BURST, SUSTAINED)
    ]
    assert [row[0] for row in found] == ["o1", "o2", ""]
    assert found[1][2:7] == ["120.0", "120.0", "132.0", "132.0", "360"]


def test_the_terminal_gets_speeds_percents_and_failures() -> None:
    failed = measurement(BF16[1].short_form(), 4096, 1.0, failure="wrong output")
    kept = (m for m in full_results().measurements if (m.name, m.load) != (failed.name, SUSTAINED))
    results = replace(
        synthetic_results(*kept, failed),
        libraries=(LibraryRecord(FLASH_ATTN, "2.9.9"),),
        skipped=(
            SkippedRecord(default_shape(65536).record(), "does not fit"),
            *(SkippedRecord(default_shape(n).record(), "not here", FA3) for n in (1024, 4096)),
        ),
    )
    text = report_text(results)
    tables = {part.partition("  ")[0]: part.splitlines() for part in text.split("\n\n")}
    speeds, shares = (tables[f"bf16, sustained, {name}"] for name in ("TFLOP/s", "% of flash"))
    assert speeds[0].split()[-4:] == ["spread", "%", "MHz", "W"]
    # clock and power stand beside the speed; ratios of 0.99, 1 and 1.01 spread over 1.6%
    again = next(line for line in speeds if line.startswith(CONTROL))
    assert again.split() == [CONTROL, "300", "300", "300", "1.6", "1,470", "698"]
    v1 = next(line for line in shares if line.startswith(BF16[0].short_form()))
    assert v1.split()[1:] == ["36.7", "36.7", "36.7", "0.0", "1,470", "698"]
    burst = next(line for line in tables["bf16, burst, TFLOP/s"] if line.startswith(FLASH))
    assert burst.split() == [FLASH, "360", "360", "360", "0.0", "1,965", "310"]
    assert f"bf16, sustained: {CONTROL} is within 1.00% of {FLASH}" in text
    assert f"{failed.name} at 4096, sustained: wrong output" in text
    assert "flash_attn 2.9.9" in text
    assert "bf16 at 65536 skipped: does not fit" in text
    assert "fa3, bf16, at 1024, 4096 skipped: not here" in text
    peak = tables["bf16, sustained, % of the tensor cores' peak at this clock"]
    again = next(line for line in peak if line.startswith(CONTROL))
    assert again.split()[1:4] == ["37.7"] * 3  # 300 of 132 * 4096 * 1.47 GHz
    fastest = 100 + 10 * len(ATTENTION_STEPS)  # the last step has no large tile
    best = {line[:20].strip(): line[20:].split() for line in tables["bf16, sustained"][2:]}
    assert best["best of the others"] == ["600", CUDNN] * 2
    assert best["best of ours"][:2] == [str(fastest), BF16[-1].step.id]
    assert best["ours over the others"] == [f"{fastest / 600:.2f}"] * 2


def length_rows(text: str) -> list[dict[str, list[str]]]:
    """Cells of each table by the label in front."""
    tables = [part for part in text.split("\n\n") if part.startswith("|")]
    return [{row[0]: row[1:] for row in rows_of(table)} for table in tables]


def test_the_table_by_length_sets_the_last_step_against_the_fastest_of_the_others() -> None:
    small, large = BF16[6].short_form(), LARGE_TILE_7.short_form()
    reason = "seq_len 1024 is not a multiple of B_r 192: use 1152"
    results = replace(
        synthetic_results(
            *(measurement(FLASH, n, 300.0) for n in (1024, 3840, 4096)),
            *(control(n) for n in (1024, 3840, 4096)),
            *(measurement(CUDNN, n, 400.0) for n in (1024, 3840)),
            measurement(CUDNN, 4096, 1.0, failure="not available\nand more"),
            *(measurement(FA3, n, 450.0) for n in (3840, 4096)),
            *(measurement(small, n, 360.0) for n in (1024, 3840, 4096)),
            measurement(large, 3840, 600.0),
            measurement(large, 4096, 450.0),
        ),
        skipped=(
            SkippedRecord(default_shape(1024).record(), reason, large),
            SkippedRecord(
                default_shape(4096).in_dtype(Element.FP16).record(), "another dtype's", large
            ),
        ),
    )
    text = lengths_table(results, "bf16", SUSTAINED)
    speeds, beside = length_rows(text)
    assert speeds == {
        "bf16, sustained: TFLOP/s": ["seq 1024", "seq 3840", "seq 4096"],
        "v7 Br64": ["360", "360", "360"],
        "v7 Br128": ["-", "600", "450"],
        LIBRARY_NAMES[FLASH]: ["300", "300", "300"],
        LIBRARY_NAMES[CUDNN]: ["400", "400", "-"],
        LIBRARY_NAMES[FA3]: ["-", "450", "450"],
        "fastest of the others": [f"400 {CUDNN}", f"450 {FA3}", f"450 {FA3}"],
        "v7 over it": ["0.90", "1.33", "= 1.00"],
    }
    # 600 of 132 * 4096 * 1.47 GHz
    assert beside["v7 Br128"] == ["-", "75.5%, 1,470 MHz, 698 W", "56.6%, 1,470 MHz, 698 W"]
    assert beside[LIBRARY_NAMES[FA3]][0] == "-"
    assert f"- {large}, bf16, at 1024 skipped: {reason}" in text and "another dtype" not in text
    assert f"- {CUDNN} at 4096 failed: not available\n" in text
    assert "NVIDIA H100 80GB HBM3" in text and "16 at 3840" in text


def test_the_table_by_length_tells_what_the_driver_and_the_gpu_do() -> None:
    found = replace(measurement(FLASH, 1024, 300.0), sm_mhz=(), power_w=(), temperature_c=())
    _, beside = length_rows(lengths_table(synthetic_results(found), "bf16", SUSTAINED))
    assert beside[LIBRARY_NAMES[FLASH]] == ["-"]
    results = synthetic_results(measurement(FLASH, 1024, 300.0))
    unknown = replace(results, provenance=replace(results.provenance, gpu="GPU of tomorrow"))
    speeds, beside = length_rows(lengths_table(unknown, "bf16", SUSTAINED))
    assert beside[LIBRARY_NAMES[FLASH]] == ["1,470 MHz, 698 W"]
    assert speeds["fastest of the others"] == [f"300 {FLASH}"]
    assert "tensor cores" not in report_text(unknown)


def test_the_table_by_length_says_which_problems_were_measured() -> None:
    text = lengths_table(grouped_results(), "bf16", SUSTAINED)
    said = "bf16, causal (TFLOP/s count the keys that a query sees), 32 heads on 8, batch 8 at 4096"
    assert said in text
    speeds, _ = length_rows(text)
    assert speeds["h24"] == ["600"]
    assert said.removeprefix("bf16, ") in report_text(grouped_results())
    assert "causal" not in lengths_table(full_results(), "bf16", SUSTAINED)


BEGIN, END = HEADER_BEGIN_MARKER, HEADER_END_MARKER


def test_only_the_lines_between_the_markers_change() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    replaced = replace_between_markers(text, "new\n", BEGIN, END)
    assert replaced == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert replace_between_markers(replaced, "new", BEGIN, END) == replaced


@pytest.mark.parametrize("text", ["none", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_text_without_the_two_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="benchmark:begin"):
        replace_between_markers(text, "new", BEGIN, END)


# The command lines


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Kernel files with nothing between their markers, and results."""
    for step in STEPS.values():
        path = tmp_path / step.source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {step.id}\n{HEADER_BEGIN_MARKER}\n{HEADER_END_MARKER}\ncode\n")
    full_results().save(tmp_path / "results.json")
    return tmp_path


def update_tables(root: Path, *arguments: str) -> int:
    tool = load_tool("tools/benchmark/update_tables.py")
    return tool.main(["--root", str(root), "--results", str(root / "results.json"), *arguments])


def test_headers_are_written_and_are_then_up_to_date(repository: Path, capsys) -> None:
    assert update_tables(repository, "--check") == 1
    assert "+// Measured in bursts (NVIDIA H100" in capsys.readouterr().out
    assert update_tables(repository) == 0
    results = full_results()
    for step in ATTENTION_STEPS.values():
        header = (repository / step.source).read_text()
        assert header_lines(results, step, ()) in header
        assert header.startswith(f"// {step.id}\n") and header.endswith("\ncode\n")
    assert update_tables(repository, "--check") == 0


def test_a_family_with_a_file_of_the_same_gpu_shows_that(repository: Path, capsys) -> None:
    name = FAMILIES["hopper"].fixed_config(STEPS["h2"], Element.BF16).short_form()
    flash = [replace(m, name=name) for m in full_results().measurements if m.name == FLASH]
    found = full_results().provenance
    own = replace(
        full_results(),
        provenance=replace(found, cuda="13.9"),
        measurements=(*full_results().measurements, *flash),
    )
    folder = repository / "benchmarks/results"
    folder.mkdir(parents=True, exist_ok=True)
    own.save(folder / "hopper_h100.json")
    elsewhere = replace(own, provenance=replace(own.provenance, gpu="NVIDIA H200"))
    elsewhere.save(folder / "hopper_h200.json")
    assert update_tables(repository) == 0
    header = (repository / STEPS["h2"].source).read_text().replace("\n//", "")
    assert "CUDA 13.9" in header and ", 1.00." in header
    assert "CUDA 13.9" not in (repository / STEPS["v1"].source).read_text()
    (folder / "hopper_h100.json").unlink()
    assert update_tables(repository) == 2
    error = capsys.readouterr().err
    assert (
        "family hopper was measured on NVIDIA H200, and other families of attention_forward on "
        "NVIDIA H100" in error
    )


def test_families_of_an_operation_are_of_one_gpu_which_may_be_another(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks/results"
    folder.mkdir(parents=True)
    forward = full_results()
    h200 = replace(forward, provenance=replace(forward.provenance, gpu="NVIDIA H200"))
    h200.save(folder / "backward_h200.json")
    forward.save(folder / "backward_sync_h100.json")
    with pytest.raises(
        ValueError, match=r"family backward\w* was measured on NVIDIA H\d00.*, and "
    ):
        results_by_family(tmp_path, forward)
    h200.save(folder / "backward_sync_h200.json")
    found = results_by_family(tmp_path, forward)
    assert {found[n].provenance.gpu for n in ("backward", "backward_sync")} == {"NVIDIA H200"}
    assert found["hopper"] == forward


def test_a_check_writes_nothing(repository: Path) -> None:
    before = {path: path.read_text() for path in repository.rglob("*") if path.is_file()}
    update_tables(repository, "--check")
    assert {path: path.read_text() for path in before} == before


@pytest.mark.parametrize(
    ("measured", "now", "status"), [("a" * 16, "b" * 16, 1), ("a" * 16, "a" * 16, 0), ("", "b", 0)]
)
def test_a_check_fails_for_headline_tables_whose_code_is_known_and_has_changed(
    repository: Path, monkeypatch, capsys, measured: str, now: str, status: int
) -> None:
    monkeypatch.setattr(code, "codes_today", lambda configs, compute_capability: {BF16[0]: now})
    name = BF16[0].short_form()
    rows = (replace(m, code=measured * (m.name == name)) for m in full_results().measurements)
    replace(full_results(), measurements=tuple(rows)).save(repository / "results.json")
    assert update_tables(repository) == 0
    capsys.readouterr()
    assert update_tables(repository, "--check") == status
    said = "the machine code has changed since 'pt_bench.py' measured it on NVIDIA H100 80GB HBM3"
    assert (said in capsys.readouterr().out) is bool(status)


def test_a_file_without_markers_is_wrong_usage_and_nothing_is_written(
    repository: Path, capsys
) -> None:
    last = repository / list(ATTENTION_STEPS.values())[-1].source
    last.write_text("code\n")
    assert update_tables(repository) == 2
    assert "benchmark:begin" in capsys.readouterr().err
    first = repository / next(iter(ATTENTION_STEPS.values())).source
    assert "NVIDIA" not in first.read_text()


def test_header_lines_tell_speed_and_cost_at_each_tile() -> None:
    cost = ResourceRecord(LARGE_TILE_7.short_form(), 168, 12, 49152, 3)
    results = replace(full_results(), resources=(cost,))
    lines = header_lines(results, STEPS["v7"], ())
    assert all(line.startswith("// ") and len(line) <= 100 for line in lines.splitlines())
    text = lines.removeprefix("// ").replace("\n// ", " ")
    assert text == (
        "Measured in bursts (NVIDIA H100 80GB HBM3, CUDA 13.0, bf16), TFLOP/s at length 4096, and "
        "share of PyTorch's flash backend in the harmonic mean over lengths. "
        "B_r 64, B_c 64, 4 warps: 204, 0.57. B_r 128, B_c 64, 4 warps: 324, 0.90. "
        "Cost: 168 registers per thread, 12 bytes of it spilled, 48 KiB of shared memory per "
        "block, 3 blocks per SM."
    )


def test_header_lines_of_a_step_at_the_large_tile_alone_are_of_its_static_stride() -> None:
    text = header_lines(full_results(), STEPS["o1"], ())
    assert text.count("B_r") == 1
    assert "444, 1.23" in text.replace("\n// ", " ")  # 432 if the stride is read


@pytest.mark.skipif(not RESULTS.exists(), reason="no results are committed")
def test_the_project_shows_the_committed_results() -> None:
    assert load_tool("tools/benchmark/update_tables.py").main(["--check"]) == 0


@pytest.fixture
def pt_bench(monkeypatch):
    """The tool, with kernels, clock and GPU faked, on small problems."""
    tool = load_tool("tools/benchmark/pt_bench.py")
    monkeypatch.setattr(tool, "find_backend", lambda device: fake_backend(_leave_nan))
    monkeypatch.setattr(
        timing, "make_timer", lambda device, protocol: FakeTimer(flushes=protocol.cache == "flush")
    )
    monkeypatch.setattr(rates, "default_rate_works", lambda device: {})
    monkeypatch.setattr(tool, "GpuSensor", FakeSensor)
    monkeypatch.setattr(
        tool,
        "resource_record",
        lambda config, device: ResourceRecord(config.short_form(), 168, 0, 49152, 3),
    )
    measured = tool.measured_problem

    def of_one_sequence(arguments, operation, size):
        problem = measured(arguments, operation, size)
        if not isinstance(problem, AttentionForward):
            return problem
        return replace(problem, batch=getattr(arguments, "batch", None) or 1)

    monkeypatch.setattr(tool, "measured_problem", of_one_sequence)
    return tool


@pytest.fixture
def bench(pt_bench, tmp_path: Path):
    """Runs the tool on short problems, one round unless told otherwise; returns its results."""

    def run(*options: str, status: int = 0) -> BenchmarkResults:
        path = tmp_path / "out.json"
        given = {*options}
        usual = {"--kernel": "2", "--seq": "64", "--load": BURST, "--rounds": "1"}
        if "--width" in given:
            del usual["--seq"]
        filled = itertools.chain(*(pair for pair in usual.items() if pair[0] not in given))
        assert pt_bench.main([*filled, *options, "--json", str(path)]) == status
        return load_results(path)

    return run


def test_the_tool_writes_the_files_and_prints_the_tables(
    bench, tmp_path: Path, terminal, capsys
) -> None:
    csv_path = tmp_path / "out.csv"
    arguments = ["--kernel", "2", "--seq", "128", "64", "--load", "both", "--rounds", "2"]
    arguments += ["--heads", "1", "--commit", "abc", "--csv", str(csv_path)]
    results = bench(*arguments)
    assert results.sizes == [64, 128]
    assert results.names("bf16") == [FLASH, CUDNN, CONTROL, BF16[1].short_form()]
    assert results.loads == [BURST, SUSTAINED]
    assert results.noise("bf16") == 0  # the fake clock stands still
    assert results.protocol.rounds == 2
    assert results.provenance.commit == "abc"
    assert results.provenance.command == (
        f"pt_bench.py {' '.join(arguments[:-1])} {csv_path.name} --json out.json"
    )
    assert len(csv_path.read_text().splitlines()) == 1 + len(results.measurements)
    captured = capsys.readouterr()
    assert BF16[1].short_form() in captured.out
    assert "benchmark" in captured.err  # the progress bar


@pytest.mark.parametrize(
    ("options", "found", "expected"),
    [
        (
            ["--heads", "1", "--batch", "3"],
            lambda r: {(m.asked.batch, m.asked.heads, m.size) for m in r.measurements},
            {(3, 1, 64)},
        ),
        (
            ["--timing", "events", "--cache", "flush"],
            lambda r: (r.protocol.timing, r.protocol.cache, {m.input_sets for m in r.measurements}),
            ("events", "flush", {1}),
        ),
        *(
            (["--load", load], lambda r: (r.loads, r.protocol.loads), ([load], (LOADS[load],)))
            for load in (BURST, SUSTAINED)
        ),
    ],
)
def test_the_tool_keeps_what_was_asked_for(bench, options, found, expected) -> None:
    assert found(bench(*options)) == expected


def test_a_benchmark_that_was_ended_goes_on_where_it_was(
    pt_bench, tmp_path: Path, monkeypatch, capsys
) -> None:
    def interrupt(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
        if o.shape[1] == 128:
            raise KeyboardInterrupt

    path = tmp_path / "out.json"
    options = ["--dtype", "fp16", "--load", BURST, "--seq", "64", "128", "--resume"]
    options += ["--json", str(path)]
    arguments = ["--kernel", "2", *options]
    with monkeypatch.context() as interrupted:
        interrupted.setattr(pt_bench, "find_backend", lambda device: fake_backend(interrupt))
        assert pt_bench.main([*arguments, "--rounds", "1"]) == 130
    assert "the same command continues there" in capsys.readouterr().err
    first = load_results(path)
    assert {m.size for m in first.measurements} == {64}
    assert pt_bench.main([*arguments, "--rounds", "2"]) == 2
    assert "was measured with other options" in capsys.readouterr().err
    assert pt_bench.main([*arguments, "--rounds", "1", "--commit", "abc"]) == 2
    assert "and this run has 'abc'" in capsys.readouterr().err
    assert pt_bench.main(["--kernel", "1", *options, "--rounds", "1"]) == 2
    assert "was measured with other kernels" in capsys.readouterr().err
    assert pt_bench.main([*arguments, "--rounds", "1", "--heads", "4"]) == 2
    assert (
        "heads 16, seq 64, d_head 128, and the run asks for batch 1, heads 4"
        in capsys.readouterr().err
    )
    assert load_results(path) == first
    assert pt_bench.main([*arguments, "--rounds", "1"]) == 0
    both = load_results(path)
    n = len(first.measurements)
    assert both.measurements[:n] == first.measurements
    assert {m.size for m in both.measurements[n:]} == {128}
    assert {s.size for s in both.skipped} == {64, 128}


def test_the_tool_does_not_write_over_results_of_another_gpu(
    pt_bench, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "out.json"
    full_results().save(path)
    before = path.read_text()
    assert pt_bench.main(["--kernel", "2", "--seq", "64", "--json", str(path)]) == 2
    assert "holds results of NVIDIA H100" in capsys.readouterr().err
    assert path.read_text() == before


def test_a_length_that_one_kernel_takes_is_measured_without_the_others(bench, capsys) -> None:
    large = LARGE_TILE_7.short_form()
    assert large not in bench("--kernel", "2", large).names("bf16")
    said = capsys.readouterr().out
    assert f"{large}, bf16, at 64 skipped: seq_len 64 is not" in said
    assert "fa3, bf16, at 64 skipped: the package fa3_fwd is not installed" in said


def test_the_tool_measures_causal_problems_and_grouped_heads(bench) -> None:
    asked = ["--causal", "--heads", "4", "--kv-heads", "2", "--seq", "40"]
    results = bench("--kernel", "h21", "1", *asked)
    names = [name for name in results.names("bf16") if name not in LIBRARY_NAMES]
    # of h21 the causal config alone; v1 takes no such problem
    assert [name.partition("_")[0] for name in names] == ["h21"] and names[0].endswith("_causal")
    assert {s.name for s in results.skipped} == {BF16[0].short_form(), FLASH_ATTN, FA3}
    measured = [m for m in results.measurements if m.valid]
    assert {m.name for m in measured} == {FLASH, CONTROL, *names}
    assert {(m.asked.heads, m.asked.kv_heads, m.asked.causal) for m in measured} == {(4, 2, True)}


def test_the_tool_leaves_causal_kernels_out_of_other_problems(bench) -> None:
    causal = FAMILIES["hopper"].fixed_config(STEPS["h21"], Element.BF16).replace(causal=True)
    found = bench("--kernel", "h21", "--seq", "40")
    assert causal.short_form() not in {*found.names("bf16"), *(s.name for s in found.skipped)}
    # one that is named is told why it is left out
    found = bench("--kernel", "h21", causal.short_form(), "--seq", "40")
    (skipped,) = (s for s in found.skipped if s.name == causal.short_form())
    assert "not causal is not supported" in skipped.reason


def test_if_no_length_fits_in_memory_the_tool_exits_with_2(pt_bench, monkeypatch, capsys) -> None:
    def exhaust(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
        raise torch.cuda.OutOfMemoryError("Tried to allocate 9 GiB")

    monkeypatch.setattr(pt_bench, "find_backend", lambda device: fake_backend(exhaust))
    assert pt_bench.main(["--kernel", "2", "--seq", "64"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "nothing was measured: batch 1, heads 16, seq 64, d_head 128 does not fit"
    )


def test_the_tool_exits_with_1_if_a_kernel_is_wrong(pt_bench, capsys) -> None:
    assert pt_bench.main(["--kernel", "1", "--seq", "64", "--rounds", "1"]) == 1
    assert "wrong output" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "99"], "the steps are v1 to v"),
        (["--kernel", "1", "--seq", "100"], "seq_len 100 is not a multiple"),
        (["--kernel", "1", "--causal"], "causal is not supported by v1"),
        (["--kernel", "h24", "--kv-heads", "3"], "heads 16 is not a multiple of kv_heads 3"),
        (["--kernel", "h24", "--causal", "--plot", "x.svg"], "--plot draws steps only at their"),
    ],
)
def test_wrong_usage_of_the_tool_exits_with_2(
    pt_bench, capsys, arguments: list[str], message: str
) -> None:
    assert pt_bench.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--rounds", "0"], ["--time-budget", "nan"], ["--seq", "x"], ["--resume"]]
)
def test_what_cannot_be_parsed_is_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_tool("tools/benchmark/pt_bench.py").main(arguments)
    assert exit_info.value.code == 2


# The second operation


def test_softmax_along_rows_is_measured_beside_its_libraries(
    bench, tmp_path: Path, capsys, monkeypatch
) -> None:
    baselines = OPERATIONS["rows"].part("baselines")
    monkeypatch.setattr(baselines, "_compiled", lambda: baselines.plain)
    csv_path = tmp_path / "out.csv"
    kernel = "s3_fp32_w8_c4"
    results = bench(
        *("--kernel", kernel, "--dtype", "all", "--width", "64", "40", "--rows", "3"),
        *("--load", "both", "--rounds", "2", "--csv", str(csv_path)),
    )
    said = capsys.readouterr().out
    assert results.operation is OPERATIONS["rows"] and results.sizes == [40, 64]
    given = {"pytorch", "compiled_softmax", "copy", "pytorch_again", kernel}
    on_gpus = {"triton_softmax", "liger_softmax"}
    assert {*results.names("fp32")} - on_gpus == given  # where it is installed
    assert {m.asked for m in results.measurements} == {
        Rows(3, width, Element.FP32) for width in (40, 64)
    }
    own = [m for m in results.measurements if m.name not in on_gpus]
    assert all(m.valid for m in own) and results.rates == ()
    # a copy has no result to compare, and is none of the libraries that a kernel is compared with
    by_name = {m.name: m for m in results.measurements}
    assert not by_name["copy"].is_verified and by_name[kernel].is_verified
    assert {m.relative_error for m in results.measurements if m.name == "copy"} == {None}
    assert results.find(BEST_OTHER, "fp32", 40).name in ("pytorch", "compiled_softmax")
    # each input read once, each output written once
    found = by_name[kernel]
    assert found.speed == pytest.approx(found.asked.bytes / (found.median_ms * 1e-3) / 1e9)
    assert results.of_first(kernel, "fp32", 40) == 1  # the fake clock stands still
    assert results.noise("fp32") == 0 and results.of_tensor_peak(kernel, "fp32") is None
    assert "fp32, burst, GB/s" in said and "fp32, burst, % of PyTorch" in said
    assert "width 40" in said and "rows 3 at 40, 3 at 64" in said
    assert "TFLOP" not in said and "flash" not in said
    row = list(csv.DictReader(io.StringIO(csv_path.read_text())))[-1]
    assert (row["operation"], row["rows"], row["width"]) == ("rows", "3", "64")
    assert float(row["gbs"]) == pytest.approx(found.speed, abs=0.01)
    assert row["percent_of_pytorch"] == "100.0"


def test_inputs_of_32_bits_keep_all_of_them_unless_fewer_are_asked_for() -> None:
    problem = Rows(2, 64, Element.FP32)
    (whole,) = make_input_sets(problem, Element.FP32, CPU, FakeTimer(), Protocol())
    (drawn,) = OPERATIONS["rows"].part("inputs").draw("normal", problem, CPU, 0).values()
    assert torch.equal(whole.inputs["x"], drawn)
    seven = Protocol(mantissa_bits=7)
    (rounded,) = make_input_sets(problem, Element.FP32, CPU, FakeTimer(), seven)
    assert torch.equal(rounded.inputs["x"], drawn.bfloat16().float())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "s3", "--seq", "64"], "--seq is an option of attention_forward"),
        (["--kernel", "s3", "--causal"], "--causal is an option of attention_forward"),
        (["--kernel", "2", "--width", "64"], "--width is an option of rows"),
        (["--kernel", "s3", "2"], "name those of one operation"),
    ],
)
def test_options_and_kernels_of_two_operations_are_wrong_usage(
    pt_bench, capsys, arguments: list[str], message: str
) -> None:
    assert pt_bench.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_tables_of_rows_are_in_their_unit_and_beside_their_library() -> None:
    names = {"pytorch": 1000.0, "copy": 2500.0, "pytorch_again": 1000.0}
    names |= {
        c.short_form(): 2000.0 for c in FAMILIES["softmax"].progression() if c.dtype == Element.BF16
    }
    measured_at = OPERATIONS["rows"].measured

    def of(name: str, width: int, speed: float, load: str) -> Measurement:
        problem = measured_at(width)
        ms = problem.bytes / speed / 1e6
        first = problem.bytes / names["pytorch"] / 1e6
        return replace(
            measurement(FLASH, 4096, 300.0, load=load),
            **{"name": name, "ran": "" if name in LIBRARY_NAMES else name},
            **{"problem": problem.record(), "samples_ms": (ms,) * 3, "first_ms": (first,) * 3},
        )

    results = synthetic_results(
        *(
            of(name, width, speed, load)
            for load in (BURST, SUSTAINED)
            for width in (1024, 4096)
            for name, speed in names.items()
        )
    )
    results = replace(
        results,
        measurements=tuple(
            replace(m, relative_bound=None) if m.name == "copy" else m for m in results.measurements
        ),
    )
    text = progression_table(results)
    header, *rows = rows_of(text)
    assert header == ["step", "idea", "% of PyTorch", "GB/s at 4096"]
    assert [row[0] for row in rows] == [*FAMILIES["softmax"].steps, "", ""]
    assert [row[2:] for row in rows] == [
        ["200.0", "2,000"],
        *[["= 200.0", "2,000"]] * (len(FAMILIES["softmax"].steps) - 1),  # as fast as the parent
        ["100.0", "1,000"],
        ["250.0", "2,500"],
    ]
    assert "Pytorch is torch.softmax" in text and "over widths 1024 … 4096" in text
    lengths = lengths_table(results, "bf16", SUSTAINED)
    for table in (text, lengths, loads_table(results)):
        assert "GB/s" in table and "TFLOP/s" not in table and "flash" not in table
        assert "tensor cores" not in table
    step = FAMILIES["softmax"].steps["s1"]
    lines = header_lines(results, step, ()).replace("\n// ", " ")
    assert "GB/s at width 4096, and share of torch.softmax" in lines and ": 2,000, 2.00." in lines
