"""Kernels through Nsight Compute: what is asked of it, what is made of its tables."""

import csv
import io
import itertools
import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from fake_backend import fake_backend, load_tool
from fake_ncu import FakeNcu

from flash_helpers.kernel_configs import (
    OPERATIONS,
    AttentionForward,
    Config,
    Element,
    config_from_short_form,
    get_kernel_progression_configs,
)
from flash_helpers.measure.machine import provenance
from flash_helpers.measure.ncu_bench import (
    COUNTERS,
    METRICS,
    STALL_REASONS,
    NcuResults,
    average_launches,
    ncu_table,
    profile_kernels,
)
from flash_helpers.measure.nsight import ProfilerDenied, ProfilerError, parse_csv
from flash_helpers.measure.results import FLASH
from flash_helpers.operations.attention_forward import baselines
from flash_helpers.operations.attention_forward.problems import default_shape

V1, V2, V16 = (
    c
    for c in get_kernel_progression_configs()
    if c.step.id in ("v1", "v2", "v16") and c.dtype == Element.BF16
)
ATTENTION, *OTHERS = OPERATIONS
OF_WIDTH = ", ".join(
    name
    for name in OTHERS
    if any(f.name == "width" and "help" in f.metadata for f in fields(OPERATIONS[name].problem))
)
SHAPE = AttentionForward(batch=2, heads=16, len_q=512)
CAUSAL = config_from_short_form("h24_bf16_d128_Br128_Bc128_K3_V2_pp_causal")
DURATION = "gpu__time_duration.sum"
CYCLES = "gpc__cycles_elapsed.max"
HIT_RATE = "lts__t_sector_hit_rate.pct"
HMMA = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
REGISTERS = "launch__registers_per_thread"


def stall(reason: str) -> str:
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


def symbol(config) -> str:
    return f"void forward_kernel<{config.short_form()}>(ForwardKernelArgs)"


# Two launches of v1, one of v2, as `ncu --csv --page raw --print-units base` prints.
RAW = f"""\
==PROF== Connected to process 17 (/usr/bin/python3)
==PROF== Profiling "forward_kernel" - 0: 0%....50%....100% - 9 passes
"ID","Process ID","Kernel Name","{CYCLES}","{DURATION}","{REGISTERS}","{HIT_RATE}","{HMMA}",\
"{TENSOR}","{stall("wait")}","{stall("mio_throttle")}","{stall("barrier")}","{stall("gmma")}"
"","","","cycle","ns","register/thread","%","%","%","inst","inst","inst","inst"
"0","17","{symbol(V1)}","1,700,000","1000000","197","91.5","20","n/a","1.0","3.5","0.5","0"
"1","17","{symbol(V1)}","1,900,000","1200000","197","92.5","22","n/a","1.0","4.5","0.7","0"
"2","17","{symbol(V2)}","340,000","200000","243","90","n/a","61.5","0.8","0.1","0.2","0"
==PROF== Disconnected from process 17
"""
FLASH_RAW = f"""\
"ID","Kernel Name","{DURATION}","{REGISTERS}"
"","","ns","register/thread"
"0","void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128>>\
(pytorch_flash::Flash_fwd_params)","180000","255"
"""


def faked(tables: dict[str, str]) -> FakeNcu:
    return FakeNcu(METRICS, tables=tables)


def profiled(ncu: FakeNcu, configs=(V1, V2), libraries=(), runs: int = 2):
    return profile_kernels(configs, libraries, SHAPE, runs, ncu.profiler(), ["python", "run.py"])


def test_the_launches_of_a_kernel_are_averaged() -> None:
    (v1, v2), failures = profiled(faked({"forward_kernel": RAW}))
    assert failures == []
    assert (v1.name, v1.kernel, v1.runs) == (V1.short_form(), V1.short_form(), 2)
    expected = {
        "duration_us": 1100,
        "cycles": 1_800_000,
        "registers_per_thread": 197,
        "l2_hit_percent": 92,
        "tensor_pipe_percent": 21,  # of several names the first that the GPU has
    }
    assert {key: v1.values[key] for key in expected} == pytest.approx(expected)
    assert v1.values["bank_conflicts"] is None  # not in this table
    assert v1.spread == pytest.approx(0.2)
    # speed is taken at the mean duration
    assert v1.asked == SHAPE.in_dtype(Element.BF16)
    assert v1.speed == pytest.approx(4 * 2 * 16 * 512**2 * 128 / 1.1e-3 / 1e12)
    assert (v2.runs, v2.values["duration_us"]) == (1, 200)
    assert v2.values["tensor_pipe_percent"] == pytest.approx(61.5)


def test_stalls_come_largest_first_and_those_of_nothing_are_not_shown() -> None:
    (v1, v2), _ = profiled(faked({"forward_kernel": RAW}))
    assert list(v1.stalls) == ["mio_throttle", "wait", "barrier", "gmma"]
    assert v1.stall_text() == "mio_throttle 4.00, wait 1.00, barrier 0.60"
    assert v2.stall_text() == "wait 0.80, barrier 0.20, mio_throttle 0.10"


def test_kernels_are_launched_by_name_and_clocks_left_alone() -> None:
    ncu = faked({"forward_kernel": RAW})
    profiled(ncu, runs=3)
    (command,) = ncu.commands
    options = dict(itertools.pairwise(command))
    assert options["--clock-control"] == "none"
    assert options["--repeat"] == "3"
    assert (options["--batch"], options["--heads"], options["--seq"]) == ("2", "16", "512")
    assert list(command[-3:]) == ["--kernel", V1.short_form(), V2.short_form()]


def test_a_library_is_counted_beside_the_kernels_in_their_dtype() -> None:
    ncu = faked({"forward_kernel": RAW, "flash_fwd": FLASH_RAW})
    (flash, *_), failures = profiled(ncu, libraries=["flash"])
    assert failures == []
    assert (flash.name, flash.kernel) == (f"{FLASH} bf16", "pytorch_flash::flash_fwd_kernel")
    assert flash.values["duration_us"] == 180
    assert list(ncu.commands[0][-4:]) == ["--dtype", "bf16", "--library", FLASH]


def test_a_kernel_that_was_launched_for_another_is_counted_for_it() -> None:
    # 8 heads are not the rows that v16 was compiled for
    general = V16.general()
    raw = RAW.replace(V2.short_form(), general.short_form())
    profiler, shape = faked({"forward_kernel": raw}).profiler(), AttentionForward(2, 8, 512)
    (found,), _ = profile_kernels([V16], [], shape, 1, profiler, ["run.py"])
    assert (found.name, found.kernel) == (V16.short_form(), general.short_form())


def test_a_kernel_that_ncu_did_not_see_is_told_and_stops_no_other() -> None:
    found, (failure,) = profiled(faked({"forward_kernel": RAW}), configs=(V1, V16))
    assert [kernel.name for kernel in found] == [V1.short_form()]
    assert f"{V16.short_form()}: ncu saw no launch of it" in failure.replace(
        f"of {V16.short_form()}", "of it"
    )


def test_metrics_that_the_gpu_lacks_are_not_asked_for() -> None:
    wanted = FakeNcu(METRICS, lacks=[stall("gmma"), TENSOR]).profiler().available(METRICS)
    assert set(METRICS) - set(wanted) == {stall("gmma"), TENSOR}
    assert REGISTERS in wanted  # which --query-metrics does not list


def test_without_permission_that_is_said_in_a_line_with_the_way_out() -> None:
    denied = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters\n"
    with pytest.raises(ProfilerDenied, match="run as root, or let all users") as error:
        profiled(faked({"forward_kernel": denied}))
    assert "\n" not in str(error.value)


def test_names_of_a_counter_differ_and_each_stall_is_named_once() -> None:
    assert len({counter.key for counter in COUNTERS}) == len(COUNTERS)
    assert len(set(STALL_REASONS)) == len(STALL_REASONS)
    assert len(set(METRICS)) == len(METRICS)


# Tables and files


def results() -> NcuResults:
    launches = parse_csv(RAW)
    kernels = (
        average_launches(V1.short_form(), SHAPE, launches[:2]),
        average_launches(V2.short_form(), SHAPE, launches[2:]),
    )
    found = provenance(fake_backend(), "ncu_bench.py", "abc")
    return NcuResults(found, "Nsight Compute Version 2025.3", kernels)


def test_the_table_has_a_row_a_kernel_and_dashes_where_there_is_no_number() -> None:
    text = ncu_table(results())
    row = next(line for line in text.splitlines() if line.startswith(V1.short_form()))
    cells = row.split()
    assert cells[2:4] == ["1,100.0", "1,800,000"]
    assert "-" in cells
    assert "mio_throttle 4.00" in row
    assert "batch 2, heads 16, seq 512, d_head 128: mean of 2 launches" in text
    assert "between the launches of a kernel: 20.0%" in text
    assert "Nsight Compute Version 2025.3" in text


def test_csv_has_every_counter_and_every_stall_reason() -> None:
    v1, v2 = csv.DictReader(io.StringIO(results().to_csv()))
    assert float(v1["duration_us"]) == pytest.approx(1100)
    assert float(v1["stall_mio_throttle"]) == pytest.approx(4)
    assert (v1["bank_conflicts"], v1["stall_sleeping"]) == ("", "")
    assert {counter.key for counter in COUNTERS} <= set(v1)
    assert v2["runs"] == "1"


def test_json_has_what_it_was_counted_on() -> None:
    data = json.loads(results().to_json())
    assert data["provenance"]["commit"] == "abc"
    assert data["kernels"][0]["values"]["registers_per_thread"] == 197
    assert data["kernels"][0]["stalls"]["barrier"] == pytest.approx(0.6)


# The command line


@pytest.fixture
def tool(monkeypatch):
    """The tool, with a GPU and an ncu that are faked."""
    module = load_tool("tools/benchmark/ncu_bench.py")
    ncu = faked({"forward_kernel": RAW, "flash_fwd": FLASH_RAW})
    monkeypatch.setattr(module, "find_backend", lambda device: fake_backend())
    monkeypatch.setattr(module.NsightCompute, "find", ncu.profiler)
    module.ncu = ncu
    return module


def test_the_tool_prints_the_table_and_writes_the_files(tool, tmp_path: Path, capsys) -> None:
    files = ["--csv", str(tmp_path / "a.csv"), "--json", str(tmp_path / "a.json")]
    options = ["--kernel", "1", "2", "--runs", "2", "--library", "flash", "--commit", "abc"]
    assert tool.main([*options, *files]) == 0
    assert V1.short_form() in capsys.readouterr().out
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 3
    assert json.loads((tmp_path / "a.json").read_text())["provenance"]["commit"] == "abc"
    shape = default_shape(4096)
    options = dict(itertools.pairwise(tool.ncu.commands[-1]))
    assert (options["--batch"], options["--heads"]) == (str(shape.batch), str(shape.heads))


def test_the_tool_exits_with_1_if_a_kernel_was_not_counted(tool, capsys) -> None:
    assert tool.main(["--kernel", "1..3"]) == 1
    captured = capsys.readouterr()
    assert V1.short_form() in captured.out
    assert "ncu saw no launch of v3" in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq", "100"], "seq_len 100 is not a multiple"),
        (["--kernel", "99"], "the steps are v1 to v"),
    ],
)
def test_wrong_usage_exits_with_2(tool, capsys, options: list[str], message: str) -> None:
    assert tool.main(options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--seq", "--seq 0 is not positive"),
        ("--batch", "batch 0 is not positive"),
        ("--heads", "heads 0 is not positive"),
        ("--width", f"--width is an option of {OF_WIDTH}, and the kernels compute {ATTENTION}"),
    ],
)
def test_a_size_that_is_not_positive_or_of_another_operation_is_wrong_usage(
    tool, capsys, option: str, message: str
) -> None:
    assert tool.main([option, "0"]) == 2
    assert message in capsys.readouterr().err


def test_a_number_of_runs_that_is_not_positive_is_wrong_usage(tool, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        tool.main(["--runs", "0"])
    assert stopped.value.code == 2
    assert "--runs: 0 is not positive" in capsys.readouterr().err


def test_without_ncu_that_is_said_in_a_line(tool, monkeypatch, capsys) -> None:
    def absent(raw):
        raise ProfilerError("ncu (Nsight Compute) was found neither in PATH nor beside CUDA")

    monkeypatch.setattr(tool.NsightCompute, "find", absent)
    assert tool.main([]) == 2
    assert capsys.readouterr().err.startswith("ncu (Nsight Compute) was found neither")


# Something to put under a profiler


def test_run_kernels_launches_a_library_as_often_as_asked(monkeypatch) -> None:
    module = load_tool("tools/benchmark/run_kernels.py")
    launched: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    monkeypatch.setattr(module, "find_backend", lambda device: fake_backend())
    monkeypatch.setattr(
        baselines,
        "run",
        lambda name, problem, x: launched.append((name, x["q"].dtype, tuple(x["q"].shape))),
    )
    options = ["--library", FLASH, "--dtype", "fp16", "--repeat", "3", "--seq", "64"]
    assert module.main(options) == 0
    assert launched == [(FLASH, torch.float16, (1, 64, 1, 128))] * 3


def test_run_kernels_launches_each_kernel_on_its_own_dtype(monkeypatch) -> None:
    module = load_tool("tools/benchmark/run_kernels.py")
    launched: list[tuple[str, torch.dtype]] = []
    backend = fake_backend(lambda config, o: launched.append((config.short_form(), o.dtype)))
    monkeypatch.setattr(module, "find_backend", lambda device: backend)
    assert module.main(["--kernel", "1", "--repeat", "2", "--seq", "64"]) == 0
    fp16 = V1.replace(dtype=Element.FP16)
    assert launched == [
        (config.short_form(), dtype)
        for config, dtype in ((fp16, torch.float16), (V1, torch.bfloat16))
        for _ in range(2)
    ]


@pytest.mark.parametrize("options", [["h24", "--causal"], [CAUSAL.short_form()]])
def test_run_kernels_launches_causal_kernels_on_causal_problems(monkeypatch, options) -> None:
    """A step's as the problem asks for, a config with a mask in any case."""
    module = load_tool("tools/benchmark/run_kernels.py")
    launched: list[Config] = []
    backend = fake_backend(lambda config, o: launched.append(config))
    monkeypatch.setattr(module, "find_backend", lambda device: backend)
    sizes = ["--dtype", "bf16", "--seq", "65", "--len-k", "130", "--heads", "2", "--kv-heads", "1"]
    assert module.main(["--kernel", *options, *sizes]) == 0
    assert CAUSAL in launched and all(config.supports.causal for config in launched)


def test_run_kernels_says_which_kernels_take_no_causal_problem(monkeypatch, capsys) -> None:
    module = load_tool("tools/benchmark/run_kernels.py")
    monkeypatch.setattr(module, "find_backend", lambda device: fake_backend())
    assert module.main(["--kernel", "1", "--causal", "--seq", "64"]) == 2
    assert "causal is not supported by v1" in capsys.readouterr().err


def test_what_is_not_launched_with_a_library_is_said(monkeypatch, capsys) -> None:
    module = load_tool("tools/benchmark/run_kernels.py")
    with pytest.raises(SystemExit) as exit_info:
        module.main(["--library", FLASH, "--kernel", "1"])
    assert exit_info.value.code == 2
    monkeypatch.setattr(module, "find_backend", lambda device: fake_backend())
    options = ["--causal", "--seq", "64", "--len-k", "128"]
    assert module.main(["--library", FLASH, *options]) == 2
    assert "take as many keys as queries" in capsys.readouterr().err
