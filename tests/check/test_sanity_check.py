"""The sanity check: its verdicts, table, JSON and exit codes, with kernels faked on the CPU."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from fake_backend import ARRIVAL, ROOT, Damage, fake_backend, load_tool

from flash_helpers.check.sanity import SanityReport, check_kernels, make_request
from flash_helpers.console.tables import json_text
from flash_helpers.kernel_configs import (
    FAMILIES,
    OPERATIONS,
    AttentionForward,
    Config,
    Element,
    FlashForwardKernelConfig,
    get_kernel_progression_configs,
    get_listed_configs,
)
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.selection import UsageError
from flash_helpers.runtime import simulator
from flash_helpers.runtime.backend import Backend, Findings, find_backend
from flash_helpers.runtime.library import ptx_path

pytestmark = pytest.mark.slow

TOOL = "tools/debug/sanity_check.py"
PROGRESSION = get_kernel_progression_configs()
BUILT = get_listed_configs()
CHECKED = sorted(
    {
        checked
        for config in PROGRESSION
        for checked in (
            config,
            *[v for v in config.variants() if any(v.supports.options.values())][:1],
        )
        if checked in BUILT
    }
)
EVERY = tuple(Element)
SHAPE = AttentionForward(batch=1, heads=2, len_q=128)


def of_version(number: int, dtype: Element = Element.FP16) -> FlashForwardKernelConfig:
    return next(c for c in PROGRESSION if c.step.id == f"v{number}" and c.dtype == dtype)


def report_on(
    backend: Backend, *selectors: str, diff: bool = False, shape: AttentionForward = SHAPE
) -> SanityReport:
    problems = {name: operation.small for name, operation in OPERATIONS.items()}
    problems[shape.operation] = shape
    options = {"diff": diff, "own_sizes": shape is SHAPE}
    request = make_request(backend, selectors, EVERY, problems, "normal", **options)
    return SanityReport(request, backend.description, tuple(check_kernels(request, backend)))


def only(version: int, damage: Damage) -> Damage:
    def damage_one(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
        if config.step.id == f"v{version}":
            damage(config, o)

    return damage_one


def leave_a_row_unwritten(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
    o[:, -1] = math.nan


def shift_by_a_tenth(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
    o[0, 70, 1, 5] += 0.1


def scale_by_two_percent(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
    o *= 1.02


def refuse_to_launch(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
    raise RuntimeError("too many resources requested for launch")


def run_tool(monkeypatch, capsys, damage: Damage | None, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the tool with every kernel faked."""
    tool = load_tool(TOOL)
    backend = fake_backend(damage) if damage else fake_backend()
    monkeypatch.setattr(tool, "find_backend", lambda device, keep_going: backend)
    status = tool.main(["--small", "--seq", "128", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# Verdicts


def test_right_kernels_pass() -> None:
    report = report_on(fake_backend())
    assert len(report.checks) == len(CHECKED)
    assert report.summary == f"{len(CHECKED)} passed, 0 failed"
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (leave_a_row_unwritten, "256 of 32768 elements were not written, or"),
        (shift_by_a_tenth, "max abs error"),
        (scale_by_two_percent, "relative error"),
        (refuse_to_launch, "RuntimeError: too many resources requested for launch"),
    ],
)
def test_a_wrong_kernel_fails_alone_and_says_why(damage: Damage, reason: str) -> None:
    report = report_on(fake_backend(only(3, damage)), "2..4")
    assert [check.passed for check in report.checks] == [True, True, False, False, True, True]
    assert report.summary == "4 passed, 2 failed"
    assert report.exit_code == 1
    failed = report.checks[2]
    assert reason in failed.reason
    assert f"{failed.config.short_form()} failed: {failed.reason}" in report.notes()


def test_the_small_check_has_grouped_heads_where_a_kernel_with_a_mask_takes_them(
    monkeypatch, capsys
) -> None:
    tool = load_tool(TOOL)
    monkeypatch.setattr(tool, "find_backend", lambda device, keep_going: fake_backend())

    def heads_checked(*arguments: str) -> dict[str, list[tuple[bool, int, int]]]:
        assert tool.main(["--small", "--dtype", "bf16", "--json", *arguments]) == 0
        checks = json.loads(capsys.readouterr().out)["checks"]
        problems: dict[str, list[tuple[bool, int, int]]] = {c["step"]: [] for c in checks}
        for c in checks:
            p = AttentionForward.from_record(c["problem"])
            problems[c["step"]].append((p.causal, p.heads, p.kv_heads))
        return problems

    assert heads_checked("--kernel", "h12", "h30") == {
        "h12": [(False, 1, 1)],
        "h30": [(False, 1, 1), (True, 2, 1)],
    }
    # Sizes of the command line are everybody's.
    assert heads_checked("--kernel", "h30", "--heads", "3") == {
        "h30": [(False, 3, 3), (True, 3, 3)]
    }


def test_causal_configs_are_checked_on_a_causal_problem() -> None:
    """Beside those that are not, on the problem as it is."""
    report = report_on(fake_backend())
    causal = [
        check.config for check in report.checks if check.config.supports.options.get("causal")
    ]
    assert {config.step.id for config in causal} >= {"h21", "h30"}
    for check in report.checks:
        problem = report.request.problem_of(check.config)
        if isinstance(problem, AttentionForward):
            assert problem.causal == (check.config in causal)
    assert report.request.skipped == ()


def test_steps_that_do_not_take_the_problem_are_left_out_unless_they_are_named() -> None:
    shape = AttentionForward(1, 4, 77, kv_heads=2, causal=True)
    report = report_on(fake_backend(), shape=shape)
    checked = [check.config for check in report.checks]
    attention = [c for c in checked if c.family.operation is OPERATIONS[shape.operation]]
    assert all(config.supports.options["causal"] for config in attention)
    assert {c.step.id for c in attention} >= {"h21", "h30"}
    assert len(report.request.skipped) == len(CHECKED) - len(checked)
    told = [note for note in report.notes() if note.startswith("skipped: ")]
    assert len(told) == 4 and told[-1].endswith("more, which --json names")
    with pytest.raises(UsageError, match="is not supported by v1"):
        report_on(fake_backend(), "1", shape=shape)


def test_by_default_the_first_step_of_each_family_is_checked_at_its_own_head_size() -> None:
    problems = {name: operation.small for name, operation in OPERATIONS.items()}
    request = make_request(fake_backend(), [], EVERY, problems, "normal", own_sizes=True)
    checked = {config.step.id: config for config in request.configs}
    for family in FAMILIES.values():
        config = checked[next(iter(family.steps))]
        own, sizes = request.problem_of(config), config.supports.sizes
        assert {name: getattr(own, name) for name in sizes} == sizes


def test_a_kernel_that_writes_nothing_fails() -> None:
    backend = fake_backend()
    idle = Backend(backend.device, "idle", lambda *tensors: Findings(), backend.kernels)
    assert {check.passed for check in report_on(idle).checks} == {False}


def test_the_inputs_of_a_check_do_not_depend_on_the_other_kernels() -> None:
    alone = report_on(fake_backend(), "5").checks
    among_others = [c for c in report_on(fake_backend()).checks if c.config.step.id == "v5"]
    assert [c.outputs for c in alone] == [c.outputs for c in among_others]


def test_the_diff_names_the_first_wrong_element() -> None:
    report = report_on(fake_backend(only(1, shift_by_a_tenth)), "1", diff=True)
    (output,) = report.checks[0].outputs
    difference = output.difference
    assert difference is not None and difference.first_wrong is not None
    assert difference.first_wrong.place == (0, 70, 1, 5)
    assert "o (batch 0, seq 70, heads 1, d_head 5): got" in report.text()
    assert f"{report.checks[0].config.short_form()}, o\n" in report.text()


def test_the_report_says_which_config_really_ran() -> None:
    static = AMPERE.progression()[-1]
    notes = report_on(fake_backend(), static.short_form()).notes()
    assert notes == [
        f"{static.short_form()} was run by {static.general().short_form()}: it is made for other "
        f"strides than those of {SHAPE}"
    ]


def test_a_tile_that_does_not_divide_the_length_is_skipped_where_another_of_its_step_does() -> None:
    backend = fake_backend()
    report = report_on(backend, "h13")
    assert {check.config.B_r for check in report.checks} == {128}
    skipped = [note for note in report.notes() if note.startswith("skipped: ")]
    assert len(skipped) == 1 and "not a multiple of B_r 192" in skipped[0]
    alone = "h13_bf16_d128_Br192_Bc80_K3_V3_pp"
    with pytest.raises(UsageError, match="not a multiple of B_r 192"):
        report_on(backend, alone)


class TestAllOutputsAreCompared:
    SHAPE = AttentionForward(1, 2, 64, len_k=80, return_lse=True)

    def report(
        self,
        damage: Callable[[torch.Tensor, torch.Tensor], None],
        kernel: str = "h20_bf16_d128_Br128_Bc128_K3_V2_pp",
        shape: AttentionForward = SHAPE,
    ) -> SanityReport:
        """Return the report on a kernel that is simulated; o and lse are damaged afterwards."""
        real = find_backend("cpu")

        def execute(config: Config, tensors: Sequence[torch.Tensor], options: Mapping) -> Findings:
            found = real.execute(config, tensors, options)
            damage(*tensors[3:])
            return found

        backend = Backend(real.device, "damaged", execute, real.kernels)
        return report_on(backend, kernel, diff=True, shape=shape)

    def test_of_a_right_kernel_all_pass_and_each_has_a_line(self) -> None:
        report = self.report(lambda o, lse: None)
        (check,) = report.checks
        assert check.passed
        assert [output.name for output in check.outputs] == ["o", "lse"]
        lines = [line for line in report.table().splitlines() if line.endswith("pass")]
        assert [line.split()[-6] for line in lines] == ["o", "lse"]
        (told,) = report.as_json()["checks"]
        assert [output["name"] for output in told["outputs"]] == ["o", "lse"]
        json.loads(json_text(report.as_json()), parse_constant=pytest.fail)

    def test_a_wrong_second_output_fails_the_kernel_and_is_named(self) -> None:
        report = self.report(lambda o, lse: lse[0, 1, 63].add_(0.01))
        (check,) = report.checks
        assert [bool(output.reason) for output in check.outputs] == [False, True]
        assert check.reason.startswith("lse: max abs error 1.000e-02 is over its bound")
        assert [line.split()[-1] for line in report.table().splitlines()[2:]] == ["pass", "FAIL"]
        assert "lse (batch 0, heads 1, seq 63): got" in report.text()
        assert report.exit_code == 1

    def test_a_second_output_that_was_not_written_fails_the_kernel(self) -> None:
        (check,) = self.report(lambda o, lse: lse[0, 0].fill_(math.nan)).checks
        assert check.reason.startswith("lse: 64 of 128 elements were not written, or are infinite")

    def test_an_infinity_is_counted_only_where_it_is_wrong(self) -> None:
        # a mask hides all keys from 32 of 64 queries, whose LSE is -inf
        shape = AttentionForward(1, 1, 64, len_k=32, causal=True, return_lse=True)

        def damage(o: torch.Tensor, lse: torch.Tensor) -> None:
            lse[0, 0, :3] = 1.0
            lse[0, 0, -1] = -math.inf

        (check,) = self.report(damage, "h21_bf16_d128_Br128_Bc128_K3_V2_pp_causal", shape).checks
        assert check.reason.startswith("lse: 4 of 64 elements were not written, or are infinite")

    def test_a_wrong_first_output_is_named_too(self) -> None:
        (check,) = self.report(lambda o, lse: o.mul_(1.02)).checks
        assert check.reason.startswith("o: relative error")

    def test_the_option_is_refused_where_the_kernel_has_no_lse(self, monkeypatch, capsys) -> None:
        status, out, err = run_tool(monkeypatch, capsys, None, "--kernel", "1", "--lse")
        assert (status, out) == (2, "")
        assert "return_lse is not supported by v1_" in err


# The command line


def test_a_reader_that_has_seen_enough_is_no_error(warm) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [warm, ROOT / "tools/debug/sanity_check.py", "--small", "--kernel", "s1"]
    try:
        found = subprocess.run(
            [*command, "--device", "cpu"], stdout=writing, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writing)
    assert found.returncode == 0, found.stderr
    assert "BrokenPipeError" not in found.stderr


def test_the_table_has_a_line_a_kernel_and_the_summary_comes_last(
    monkeypatch, terminal, capsys
) -> None:
    status, out, err = run_tool(monkeypatch, capsys, None, "--kernel", "1", "2", "--dtype", "fp16")
    assert status == 0
    lines = out.splitlines()
    for column in (
        "step", "idea", "config", "dtype", "max abs error", "relative error", "bound", "verdict",
    ):  # fmt: skip
        assert column in lines[2]
    for config in (of_version(1), of_version(2)):
        (line,) = [line for line in lines if config.short_form() in line]
        assert line.endswith("pass")
        assert config.step.idea in line
    assert lines[-1] == "2 passed, 0 failed"
    assert "sanity check" in err  # the progress bar


def test_a_failure_exits_with_1(monkeypatch, capsys) -> None:
    status, out, _ = run_tool(monkeypatch, capsys, only(2, shift_by_a_tenth), "--heads", "2")
    assert status == 1
    assert out.splitlines()[-1] == f"{len(CHECKED) - 2} passed, 2 failed"


def test_json_is_all_of_stdout_and_holds_no_nan(monkeypatch, capsys) -> None:
    status, out, err = run_tool(
        monkeypatch, capsys, only(2, leave_a_row_unwritten), "--kernel", "1..2", "--json", "--diff"
    )
    assert status == 1

    def no_constant(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    report = json.loads(out, parse_constant=no_constant)
    assert (report["passed"], report["failed"]) == (2, 2)
    assert report["problems"] == [AttentionForward(1, 1, 128).record()]
    right, *_, wrong = report["checks"]
    (right_o,), (wrong_o,) = right["outputs"], wrong["outputs"]
    assert right_o["name"] == wrong_o["name"] == "o"
    assert right["verdict"] == "pass" and right_o["max_abs_error"] <= right_o["max_abs_bound"]
    assert wrong["verdict"] == "fail" and wrong_o["max_abs_error"] is None
    assert wrong_o["diff"]["first_wrong"]["place"][1] == 127
    assert err.splitlines()[-1] == "2 passed, 2 failed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "99"], "the steps are v1 to"),
        (["--seq", "100", "--kernel", "1"], "seq_len 100 is not a multiple"),
        (["--d-head", "64", "--dtype", "bf16", "--kernel", "ampere"], "d_head 64"),
        (["--heads", "0"], "heads 0 is not positive"),
    ],
)
def test_wrong_usage_exits_with_2(monkeypatch, capsys, arguments: list[str], message: str) -> None:
    status, out, err = run_tool(monkeypatch, capsys, None, *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_an_unknown_option_exits_with_2(capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_tool(TOOL).main(["--dtype", "fp64"])
    assert exit_info.value.code == 2


def run_without_gpu(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, TOOL, *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_gpu_the_kernels_are_simulated_and_the_output_says_so(warm) -> None:
    result = run_without_gpu(warm, "--small", "--seq", "64", "--kernel", "1", "--dtype", "fp16")
    assert result.returncode == 0, result.stderr
    _, first, *_, last = result.stdout.splitlines()
    assert first.endswith("simulated PTX on the CPU")
    assert last == "1 passed, 0 failed"


def test_a_gpu_that_is_asked_for_and_not_there_is_refused_in_one_line(warm) -> None:
    result = run_without_gpu(warm, "--small", "--device", "cuda")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "the kernels were not run: no CUDA device was found\n"


def test_the_cpu_can_be_asked_for() -> None:
    backend = find_backend("cpu")
    assert backend.is_simulator and backend.device == torch.device("cpu")
    assert set(BUILT) <= set(backend.kernels)


def test_a_long_simulation_is_announced_with_an_estimate(monkeypatch, capsys) -> None:
    tool = load_tool(TOOL)
    fake = fake_backend()
    backend = Backend(fake.device, "a fake", fake.execute, fake.kernels, is_simulator=True)
    monkeypatch.setattr(tool, "find_backend", lambda device, keep_going: backend)
    arguments = ["--small", "--seq", "128", "--kernel", "1", "2"]
    assert tool.main(arguments) == 0
    assert "the simulator takes about" not in capsys.readouterr().err
    monkeypatch.setattr(simulator, "ANNOUNCE_FROM_SECONDS", 1e-3)
    assert tool.main(arguments) == 0
    warned = r"warning: the simulator takes about \d+ (s|min) for 4 kernels: fewer kernels or"
    assert re.match(warned, capsys.readouterr().err)


def test_a_simulation_of_the_usual_problem_offers_the_small_one(monkeypatch, capsys) -> None:
    """It begins only after the warning."""
    tool = load_tool(TOOL)
    backend = find_backend("cpu")
    monkeypatch.setattr(tool, "find_backend", lambda device, keep_going: backend)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flash_helpers.check.sanity.check_kernels", interrupt)
    assert tool.main(["--kernel", "7..9", "--diff"]) == 130
    warned = (
        r"warning: the simulator takes about \d+ h for \d+ kernels: --small takes about \d+ (s|min)"
    )
    assert re.match(warned, capsys.readouterr().err)


def test_an_interrupt_ends_without_a_traceback(monkeypatch, capsys) -> None:
    def interrupt(config: FlashForwardKernelConfig, o: torch.Tensor) -> None:
        raise KeyboardInterrupt

    status, out, err = run_tool(monkeypatch, capsys, interrupt)
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"


def test_faults_that_did_not_stop_a_kernel_fail_it_with_their_text(monkeypatch, capsys) -> None:
    fake = fake_backend()

    def execute(config: FlashForwardKernelConfig, *call: object) -> Findings:
        fake.execute(config, *call)
        return Findings(("shared-memory race: here", "misaligned access: there"))

    report = report_on(Backend(fake.device, "a fake", execute, fake.kernels), "1")
    assert report.exit_code == 1
    assert report.checks[0].outputs[0].error is not None
    assert report.checks[0].reason == "shared-memory race: here\nmisaligned access: there"


def test_lints_are_told_of_a_kernel_that_passes(monkeypatch, tmp_path) -> None:
    config = of_version(1)
    path = tmp_path / "kernel.ptx"
    path.write_text(ptx_path(config).read_text().replace("ret;", f"{ARRIVAL}\nret;"))
    monkeypatch.setattr(simulator, "ptx_path", lambda *_: path)
    report = report_on(find_backend("cpu"), config.short_form(), shape=AttentionForward(1, 1, 64))
    assert report.exit_code == 0
    told = f"{config.short_form()}, lint: arrivals that no thread waits for: 32 of 128 threads"
    assert told in report.text(all_lints=True) and told not in report.text()
    name = config.short_form()
    assert report.notes() == [
        f"{name}, legal and suspicious (--lints prints them): 1 arrivals that no thread waits for"
    ]
    (check,) = report.as_json()["checks"]
    (lint,) = check["lints"]
    assert check["verdict"] == "pass" and lint.startswith("arrivals that no thread waits for")


def test_lints_of_a_right_kernel_are_counted_and_those_of_a_wrong_one_printed(monkeypatch, capsys):
    lints = (
        "filled bytes read as data: here\n  line 2",
        "filled bytes read as data: there",
        "b: c",
    )
    for damage in (None, scale_by_two_percent):
        fake = fake_backend(damage) if damage else fake_backend()

        def execute(config: Config, *call: object, fake: Backend = fake) -> Findings:
            fake.execute(config, *call)
            return Findings((), lints)

        backend = Backend(fake.device, "a fake", execute, fake.kernels)
        tool = load_tool(TOOL)
        monkeypatch.setattr(tool, "find_backend", lambda device, keep_going, own=backend: own)
        arguments = ["--small", "--seq", "128", "--kernel", of_version(1).short_form()]
        assert tool.main(arguments) == (1 if damage else 0)
        short = capsys.readouterr().out
        tool.main([*arguments, "--lints"])
        whole = capsys.readouterr().out
        name = of_version(1).short_form()
        assert all(f"{name}, lint: {lint}" in whole for lint in lints)
        if damage:
            assert short == whole
        else:
            assert "(--lints prints them): 2 filled bytes read as data, 1 b\n" in short
            assert "lint: " not in short and "--lints prints" not in whole


def test_keep_going_is_for_the_simulator(monkeypatch, capsys) -> None:
    status, out, err = run_tool(monkeypatch, capsys, None, "--keep-going")
    assert (status, out) == (2, "")
    assert "--keep-going is for the simulator: add --device cpu" in err


def test_help_shows_worked_examples(capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_tool(TOOL).main(["--help"])
    assert exit_info.value.code == 0
    assert "python tools/debug/sanity_check.py --small" in capsys.readouterr().out
