"""Counting what kernels execute: side by side, by opcode, by line, for people and for machines."""

import csv
import dataclasses
import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from attention_configs import attention_progression
from fake_backend import ROOT, load_tool
from hopper_cases import WHOLE

from flash_helpers.kernel_configs import (
    FAMILIES,
    STEPS,
    AttentionForward,
    Config,
    Element,
    get_kernel_progression_configs,
    get_listed_configs,
)
from flash_helpers.measure.kernel_profile import (
    KernelProfile,
    SourceLine,
    comparison_text,
    is_out_of_date,
    opcode_text,
    overview_text,
    profile_kernels,
    profile_text,
    profiles_as_csv,
    profiles_as_json,
    source_lines,
)
from flash_helpers.ptx import Counts, DeviceMemory, Phase, Run, TensorMap, load_ptx
from flash_helpers.registry.selection import UsageError, choose_kernels
from flash_helpers.runtime import call

pytestmark = pytest.mark.slow

TOOL = "tools/analysis/profile_kernel.py"
BUILT = get_listed_configs()
LAST = attention_progression()[-1].step.id
SHAPE = AttentionForward(1, 1, 128)


def simulate(config: Config, inputs: Sequence[torch.Tensor]) -> Run:
    return call.prepare(config, *inputs).simulate()


@pytest.fixture(scope="module")
def profiles() -> list[KernelProfile]:
    """Steps v1 and v2 in bf16."""
    configs = choose_kernels(BUILT, ["1", "2"], Element.BF16)
    return profile_kernels(configs, SHAPE, simulate)


@pytest.fixture(scope="module")
def ring(profiles) -> KernelProfile:
    """A ring whose producer copies by TMA: one of our own, since no step has roles."""
    case, memory = WHOLE["gemm_bf16"], DeviceMemory()
    addresses = {name: memory.upload(buffer) for name, buffer in case.buffers.items()}
    kernel = load_ptx(ROOT / "tests/ptx/kernels" / f"{case.module}.ptx").kernel(case.kernel)
    args = case.bind(addresses, TensorMap.encode)
    run = kernel.launch(case.grid, case.block, case.shared_bytes, args, memory)
    return dataclasses.replace(profiles[0], run=run)


def cells(table: str, label: str) -> list[str]:
    """The numbers in the first row of a table that begins with a label."""
    row = next(line for line in table.splitlines() if line.startswith(label + " "))
    return row.removeprefix(label).split()


def run_tool(capsys, *arguments: str) -> tuple[int, str, str]:
    status = load_tool(TOOL).main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_short_form_has_its_own_dtype() -> None:
    wanted = next(c for c in BUILT if c not in get_kernel_progression_configs())
    for dtype in (Element.FP16, Element.BF16):
        assert choose_kernels(BUILT, [wanted.short_form()], dtype) == [wanted]


class TestText:
    def test_shows_kernels_side_by_side_with_the_change(self, profiles) -> None:
        text = comparison_text(profiles)
        assert text.splitlines()[0].split() == ["v1", "v2", "change"]
        conflicts = cells(text, "bank conflicts")
        first = profiles[0].run.counters.total.bank_conflicts
        assert first > 0
        assert conflicts == [f"{first:,}", "0", f"-{first:,}"]
        assert cells(text, "mma") == ["2,048", "2,048", "="]

    def test_has_a_section_for_each_phase(self, profiles) -> None:
        text = comparison_text(profiles)
        titles = re.findall(r"^\[([^]]+)\]", text, re.M)
        assert titles == ["whole kernel", *(phase.value for phase in Phase)]
        found = re.findall(r"^warp instructions +([\d,]+)", text, re.M)
        counted = [int(number.replace(",", "")) for number in found]
        assert counted[0] == sum(counted[1:])

    def test_by_opcode_covers_every_instruction(self, profiles) -> None:
        lines = opcode_text(profiles).splitlines()[3:]
        totals = [0, 0]
        for line in lines:
            numbers = [int(n.replace(",", "")) for n in line.split()[1:3]]
            totals = [a + b for a, b in zip(totals, numbers, strict=True)]
        assert totals == [p.run.counters.total.instructions for p in profiles]
        main_loop = opcode_text(profiles, Phase.MAIN_LOOP)
        assert "mma.sync" in main_loop and "st.global" not in main_loop

    def test_of_many_kernels_is_a_line_each(self, profiles) -> None:
        many = [*profiles, *profiles, profiles[0]]
        text = profile_text(many)
        assert overview_text(many) in text
        assert comparison_text(profiles) in profile_text(profiles)
        assert STEPS["v2"].idea in overview_text(profiles)

    def test_says_when_a_general_sibling_ran(self) -> None:
        configs = choose_kernels(BUILT, ["v16"], Element.BF16)
        found = profile_kernels(configs, AttentionForward(1, 2, 128), simulate)
        text = profile_text(found)
        assert "was run by" in text and "it is made for other strides than" in text


class TestRoles:
    def section(self, text: str, name: str) -> str:
        """The rows under a title."""
        return text.split(f"[{name}]")[1].split("\n[")[0]

    def test_have_sections_and_add_up(self, ring) -> None:
        text = comparison_text([ring])
        total = ring.run.counters.total
        names = ["producer", "consumer", "others", "several"]
        parts = [self.section(text, name) for name in names if f"[{name}]" in text]
        found = re.findall(r"^warp instructions +([\d,]+)", "\n".join(parts), re.M)
        assert sum(int(n.replace(",", "")) for n in found) == total.instructions
        producer, consumer = parts[:2]
        assert cells(producer, "TMA boxes") and cells(producer, "warps of a block") == ["1"]
        assert cells(consumer, "wgmma") == [f"{total.wgmma:,}"]
        assert cells(consumer, "waits for async groups") == [f"{total.waits:,}"]
        for part in (producer, consumer):
            assert cells(part, "mbarrier waits") and cells(part, "blocked warps")
        (per_wgmma,) = cells(
            self.section(text, "consumer, main loop"), "warp instructions per wgmma"
        )
        loop = ring.roles["consumer"].phases[Phase.MAIN_LOOP]
        assert per_wgmma == f"{loop.instructions / loop.wgmma:.2f}"

    def test_stand_beside_a_kernel_without(self, ring, profiles) -> None:
        text = comparison_text([profiles[0], ring])
        mma = cells(self.section(text, "consumer"), "mma")
        assert mma[0] == f"{profiles[0].run.counters.total.mma:,}"
        assert cells(self.section(text, "producer"), "warps of a block")[:2] == ["0", "1"]

    def test_are_left_out_where_all_warps_do_the_same(self, profiles) -> None:
        assert "[consumer]" not in comparison_text(profiles)

    def test_are_in_the_json(self, ring) -> None:
        (found,) = json.loads(json.dumps(profiles_as_json([ring])))["kernels"]
        assert found["roles"]["producer"]["warps"] == list(ring.roles["producer"].warps)
        consumer = found["roles"]["consumer"]["phases"][Phase.MAIN_LOOP.value]
        assert consumer["wgmma"] == ring.run.counters.total.wgmma

    def test_mbarrier_waits_are_in_the_overview(self, ring, profiles) -> None:
        assert "mbarrier" in overview_text([ring, profiles[0]])
        assert "mbarrier" not in overview_text(profiles)


class TestSource:
    @pytest.mark.parametrize("step", ["v1", "v9", LAST])
    def test_lines_account_for_every_instruction(self, root: Path, step: str) -> None:
        configs = choose_kernels(BUILT, [step], Element.BF16)
        (profile,) = profile_kernels(configs, AttentionForward(1, 1, 128), simulate)
        lines = source_lines(profile, root)
        total = profile.run.counters.total
        counted = sum(line.counts.instructions for line in lines if line.counts)
        assert counted == pytest.approx(total.instructions, rel=0.02)
        assert sum(line.counts.mma for line in lines if line.counts) == total.mma
        assert [line.number for line in lines] == list(range(1, len(lines) + 1))

    def test_conflicts_of_the_first_version_are_where_tiles_are_read(self, root, profiles) -> None:
        lines = source_lines(profiles[0], root)
        worst = max(lines, key=lambda line: line.counts.bank_conflicts if line.counts else 0)
        assert "ldmatrix" in worst.text

    def test_that_moved_since_the_build_is_noticed(self) -> None:
        code = SourceLine(1, "    x += y;", Counts(instructions=1))
        comment = SourceLine(2, "    // why", None)
        assert not is_out_of_date([code, comment])
        for text in ("", "    // why"):
            assert is_out_of_date([code, SourceLine(2, text, Counts(instructions=1))])

    def test_that_is_not_there_is_refused(self, tmp_path, profiles) -> None:
        with pytest.raises(UsageError, match="run the tool from a checkout"):
            source_lines(profiles[0], tmp_path)


class TestMachines:
    def test_csv_has_a_row_for_each_phase_and_opcode(self, profiles) -> None:
        rows = list(csv.DictReader(profiles_as_csv(profiles).splitlines()))
        for profile in profiles:
            mine = [row for row in rows if row["config"] == profile.config.short_form()]
            total = profile.run.counters.total
            for name in ("instructions", "bank_conflicts", "global_sectors", "mma", "barriers"):
                assert sum(int(row[name]) for row in mine) == getattr(total, name)
        assert {row["phase"] for row in rows} == {phase.value for phase in Phase}

    def test_json_holds_the_same(self, profiles) -> None:
        found = json.loads(json.dumps(profiles_as_json(profiles)))
        assert found["problem"] == SHAPE.record()
        first, second = found["kernels"]
        assert first["phases"]["whole kernel"]["bank_conflicts"] > 0
        assert second["phases"]["whole kernel"]["bank_conflicts"] == 0
        opcodes = second["opcodes"][Phase.EPILOGUE.value]
        assert (
            sum(c["instructions"] for c in opcodes.values())
            == (second["phases"][Phase.EPILOGUE.value]["instructions"])
        )


class TestCommand:
    def test_compares_steps(self, capsys) -> None:
        status, out, err = run_tool(capsys, "1", "2", "--seq", "64")
        assert (status, err) == (0, "")
        assert out.startswith("batch 1, heads 1, seq 64, d_head 128; counted in the simulator")
        assert cells(out, "bank conflicts")[1] == "0"

    def test_of_a_config_of_several_kernels_counts_the_main_one(self, capsys) -> None:
        """The last one of b5 has no product."""
        status, out, _ = run_tool(capsys, "b4", "b5", "--seq", "128")
        assert status == 0
        assert out.splitlines()[1].startswith("dkdv_kernel of b4, gradients_kernel of b5; other")
        b4, b5, _ = (int(x.replace(",", "")) for x in cells(out, "wgmma"))
        assert b5 / b4 == (2 * 24 + 8) / (2 * 24)  # of two warpgroups, one of which has dQ's

    def test_counts_of_a_causal_problem_what_its_mask_leaves(self, capsys) -> None:
        sizes = ("h24", "--seq", "256", "--heads", "2", "--kv-heads", "1", "--json")
        whole, causal = (
            json.loads(run_tool(capsys, *sizes, *option)[1]) for option in ([], ["--causal"])
        )
        assert causal["problem"] == {**whole["problem"], "kv_heads": 1, "causal": True}
        products = [
            profile["kernels"][0]["phases"]["whole kernel"]["wgmma"] for profile in (whole, causal)
        ]
        assert products[1] / products[0] == 3 / 4  # blocks of a tile: 2 and 2, or 1 and 2

    @pytest.mark.parametrize("options", [[], ["--csv"], ["--json"]])
    def test_annotates_the_source(self, capsys, options) -> None:
        status, out, _ = run_tool(capsys, "--by-line", "2", "--seq", "64", *options)
        assert status == 0
        assert str(STEPS["v2"].source) in out
        assert "ldmatrix" in out

    def test_prints_csv_and_json(self, capsys) -> None:
        _, text, _ = run_tool(capsys, "1", "--seq", "64", "--csv", "--dtype", "fp16")
        assert {row["dtype"] for row in csv.DictReader(text.splitlines())} == {"fp16"}
        _, text, _ = run_tool(capsys, "1", "--seq", "64", "--heads", "2", "--json")
        assert json.loads(text)["problem"]["heads"] == 2

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["99"], "the steps are v1 to v"),
            (["my.ptx"], "'my.ptx' is a file, and this tool takes a step"),
            (["--by-line", "my.ptx"], "examples/own_kernel/simulate.py"),
            (["1", "--seq", "100"], "seq_len 100 is not a multiple"),
            (["--by-line", "1..2"], "names 2 kernels: name one"),
            (["1", "--seq", "64", "--causal"], "causal is not supported by v1"),
        ],
    )
    def test_refuses_wrong_usage_with_2(self, capsys, arguments, message) -> None:
        status, out, err = run_tool(capsys, *arguments)
        assert (status, out) == (2, "")
        assert message in err

    @pytest.mark.parametrize(
        "arguments", [[], ["1", "--by-line", "1"], ["1", "--csv", "--json"], ["1", "--heads", "x"]]
    )
    def test_refuses_what_does_not_go_together_with_2(self, capsys, arguments) -> None:
        with pytest.raises(SystemExit) as exit_info:
            load_tool(TOOL).main(arguments)
        assert exit_info.value.code == 2

    def test_reports_a_faulty_kernel_with_1(self, capsys, monkeypatch) -> None:
        def fail(*arguments: object) -> None:
            raise RuntimeError("shared-memory race: here")

        monkeypatch.setattr(call.ReadyCall, "simulate", fail)
        status, out, err = run_tool(capsys, "1", "--seq", "64")
        assert (status, out, err) == (1, "", "shared-memory race: here\n")


class TestCheckRace:
    """tools/debug/check_race.sh without a GPU."""

    @pytest.fixture(autouse=True)
    def python(self, warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHON", str(warm))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(self, root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(root / "tools/debug/check_race.sh"), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )

    def test_watches_the_kernels_in_the_simulator(self, root: Path) -> None:
        result = self.run(root, "1..2")
        assert result.returncode == 0, result.stderr
        assert "simulated PTX on the CPU" in result.stdout
        assert result.stdout.splitlines()[-1] == "4 passed, 0 failed"

    def test_takes_the_options_of_the_problem(self, root: Path) -> None:
        options = ("--causal", "--heads", "4", "--kv-heads", "2", "--seq", "77", "--dtype", "bf16")
        result = self.run(root, "h30", *options)
        assert result.returncode == 0, result.stderr
        assert "batch 1, heads 4 on 2, seq 77, d_head 128, causal" in result.stdout
        assert "h30_bf16_d128_Br128_Bc128_K3_V2_pp_causal" in result.stdout
        assert result.stdout.splitlines()[-1] == "1 passed, 0 failed"

    def test_refuses_wrong_usage_with_2(self, root: Path) -> None:
        assert self.run(root, "99").returncode == 2
        assert self.run(root, "--fast").returncode == 2

    def test_explains_itself(self, root: Path) -> None:
        result = self.run(root, "--help")
        assert result.returncode == 0
        assert "compute-sanitizer" in result.stdout


def fixed(step: str) -> Config:
    """A step's fixed config in bf16."""
    return next(
        config
        for config in get_kernel_progression_configs()
        if config.step.id == step and config.dtype is Element.BF16
    )


class TestCheckRaceOnAGPU:
    """tools/debug/check_race.sh with a sanitizer of the test's own, and a PyTorch that has CUDA."""

    @pytest.fixture(autouse=True)
    def python(self, warm: Path) -> None:
        self.warm = warm

    def run(
        self, folder: Path, root: Path, race: str, *arguments: str
    ) -> subprocess.CompletedProcess[str]:
        """race: name of the kernels in which the sanitizer finds one."""
        programs = {
            "compute-sanitizer": f'echo "$@"; case "$*" in *={race}\\ *) exit 1;; esac',
            "python": f"""case "$*" in
                *is_available*) exit 0;;
                *--list*) exec {self.warm} "$@" --device cpu;;
                *) exec {self.warm} "$@";;
            esac""",
        }
        for name, text in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        path = f"{folder}:{os.environ['PATH']}"
        return subprocess.run(
            [str(root / "tools/debug/check_race.sh"), *arguments],
            env={**os.environ, "PATH": path, "PYTHON": str(folder / "python")},
            capture_output=True,
            text=True,
            check=False,
        )

    @pytest.mark.parametrize(
        ("race", "status"), [("softmax_kernel", 1), ("forward_kernel", 1), ("none", 0)]
    )
    def test_kernels_of_every_family_are_watched(
        self, race: str, status: int, tmp_path: Path, root: Path
    ) -> None:
        result = self.run(tmp_path, root, race, "s1", "v1", "--dtype", "bf16")
        assert result.returncode == status, result.stderr
        watched = set(re.findall(r"kernel_substring=(\w+)", result.stdout))
        assert watched == {name for family in FAMILIES.values() for name in family.kernels}
        v1, s1 = (fixed(step).short_form() for step in ("v1", "s1"))
        assert result.stdout.count(f"--kernel {v1} {s1} --dtype bf16") == len(watched)

    def test_clusters_are_watched_in_the_simulator(self, tmp_path: Path, root: Path) -> None:
        """Those of h25 on: compute-sanitizer 2025.3 ends them with an illegal memory access."""
        result = self.run(tmp_path, root, "none", "h24..h25", "--dtype", "bf16")
        assert result.returncode == 0, result.stderr
        watched = re.findall(r"--kernel (.+) --dtype", result.stdout)
        assert len(watched) == len(set(re.findall(r"kernel_substring=(\w+)", result.stdout)))
        (names,) = {tuple(line.split()) for line in watched}
        assert names and all(name.startswith("h24") for name in names)
        (simulated,) = re.findall(r"cannot follow clusters: (.+)\n", result.stdout)
        assert all(name.startswith("h25") for name in simulated.split())
        n_simulated = len(simulated.split())
        assert result.stdout.splitlines()[-1] == f"{n_simulated} passed, 0 failed"

    def test_wrong_usage_is_2(self, tmp_path: Path, root: Path) -> None:
        assert self.run(tmp_path, root, "none", "99").returncode == 2


def test_run_kernels_lists_thread_blocks_of_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    tool = load_tool("tools/benchmark/run_kernels.py")
    asked = ["--kernel", "h24..h25", "--dtype", "bf16", "--device", "cpu", "--list"]
    assert tool.main(asked) == 0
    blocks = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert blocks == sorted(blocks) and set(blocks) == {1, 2}
    with pytest.raises(SystemExit):
        tool.main(["--library", "pytorch_flash", "--list"])
