"""Nsight Compute's command line: what it is asked, and how its tables are read."""

import shutil
import subprocess
from collections.abc import Sequence

import pytest
from fake_ncu import FakeNcu, symbol_of

from flash_helpers.measure.counts import METRICS, OPCODE_METRIC
from flash_helpers.measure.nsight import (
    NsightCompute,
    ProfiledLaunch,
    ProfilerDenied,
    ProfilerError,
    find_launch,
    parse_csv,
    parse_metric_names,
)

ONE, OTHER = "v1_bf16_x", "v2_bf16_x"
MMA, EXECUTED = "sm__inst_executed_pipe_tensor_op_hmma.sum", "smsp__inst_executed.sum"
CONFLICTS = "smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum"
RAW = f"""\
==PROF== Connected to process 17 (/usr/bin/python3)
==PROF== Profiling "forward_kernel" - 0: 0%....50%....100% - 7 passes
"ID","Process ID","Kernel Name","Block Size","{MMA}","{CONFLICTS}"
"","","","","inst",""
"0","17","{symbol_of(ONE)}","(128, 1, 1)","65,536","1048576"
"1","17","{symbol_of(OTHER)}","(128, 1, 1)","65536","n/a"
==PROF== Disconnected from process 17
"""
DETAILS = f"""\
==PROF== Connected to process 17
"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","{symbol_of(ONE)}","Command line profiler metrics","{MMA}","inst","65,536"
"0","{symbol_of(ONE)}","Command line profiler metrics","{CONFLICTS}","","1,048,576"
"1","{symbol_of(OTHER)}","Command line profiler metrics","{MMA}","inst","65,536"
"1","{symbol_of(OTHER)}","Command line profiler metrics","{CONFLICTS}","","(!) n/a"
"""


@pytest.mark.parametrize("text", (RAW, DETAILS))
def test_both_forms_of_the_table_are_read(text):
    assert parse_csv(text) == [
        ProfiledLaunch(symbol_of(ONE), {MMA: 65536.0, CONFLICTS: 1048576.0}),
        ProfiledLaunch(symbol_of(OTHER), {MMA: 65536.0, CONFLICTS: None}),
    ]


@pytest.mark.parametrize("text", ("", "==ERROR== ERR_NVGPUCTRPERM: no permission", "a,b\n1,2\n"))
def test_text_without_a_table_is_an_error_that_shows_it(text):
    with pytest.raises(ProfilerError, match="no table of launches") as error:
        parse_csv(text)
    assert text.strip() in str(error.value)


def test_counts_by_opcode_are_read_from_the_cell():
    text = (
        f'"ID","Kernel Name","{OPCODE_METRIC}","{EXECUTED}"\n'
        f'"0","{symbol_of(ONE)}","1,696 (HMMA: 1,024; LDSM: 512; F2FP: 160)","1696"\n'
    )
    (launch,) = parse_csv(text)
    assert launch.values == {OPCODE_METRIC: 1696.0, EXECUTED: 1696.0}
    assert launch.instances == {OPCODE_METRIC: {"HMMA": 1024.0, "LDSM": 512.0, "F2FP": 160.0}}


def test_a_cell_holds_the_instances_of_the_longest_kernel():
    instances = {f"at_{n}": float(n) for n in range(20_000)}  # of each instruction
    cell = "; ".join(f"{name}: {count:.0f}" for name, count in instances.items())
    (launch,) = parse_csv(f'"ID","Kernel Name","inst__executed"\n"0","k","1 ({cell})"\n')
    assert launch.instances == {"inst__executed": instances}


def test_metric_names_are_read_from_the_list():
    text = "Device NVIDIA H100 (GH100)\n-----\nMetric Name   Type\n-----\n"
    text += "smsp__inst_executed   Counter  # of warp instructions\n  dram__bytes  Counter  bytes\n"
    assert parse_metric_names(text) == {"smsp__inst_executed", "dram__bytes"}


def test_a_launch_is_found_although_ncu_left_out_the_namespace():
    launches = [
        ProfiledLaunch("void at::fill()", {}),
        ProfiledLaunch(f"void forward_kernel<{ONE}>(ForwardKernelArgs)", {}),
    ]
    assert find_launch(ONE, launches) is launches[1]
    assert find_launch(OTHER, launches) is None


def test_the_clocks_are_left_alone_and_everything_is_kept(tmp_path):
    ncu = FakeNcu(METRICS)
    (launch,) = ncu.profiler(tmp_path / "raw").profile(
        ["python", "run.py", "--kernel", ONE], "forward_kernel", METRICS, "p"
    )
    assert dict(launch.values) == dict.fromkeys(METRICS, 7.0)
    (command,) = ncu.commands
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[command.index("--kernel-name") + 1] == "regex:forward_kernel"
    assert ONE in (tmp_path / "raw" / "p_0.csv").read_text()


@pytest.mark.parametrize("says", ("==ERROR== Failed to find metric {}", "==ERROR== no luck"))
def test_a_metric_that_the_gpu_lacks_is_left_out(says):
    ncu = FakeNcu(METRICS, lacks=METRICS[2:3], says=says)
    (launch,) = ncu.profiler().profile(["run", "--kernel", "k"], "forward_kernel", METRICS)
    assert set(launch.values) == set(METRICS) - {METRICS[2]}


def test_without_permission_there_is_one_line_with_the_way_out():
    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "==ERROR== ERR_NVGPUCTRPERM\nand more")

    with pytest.raises(ProfilerDenied, match="run as root, or let all users") as error:
        NsightCompute("ncu", None, run).profile(["run"], "forward_kernel", METRICS)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(shutil.which("ncu") is not None, reason="ncu is installed")
def test_without_nsight_compute_there_is_an_error(monkeypatch):
    monkeypatch.setattr("flash_helpers.measure.nsight._PLACES", ())
    with pytest.raises(ProfilerError, match="was found neither"):
        NsightCompute.find()
