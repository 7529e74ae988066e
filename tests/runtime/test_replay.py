"""Calls that a log saved: what their files hold, and what running them again prints and returns."""

import errno
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flash_attention
from flash_helpers.check import replay
from flash_helpers.ptx import RaceError
from flash_helpers.registry.family import Step
from flash_helpers.runtime import call, call_log, saved_calls
from flash_helpers.runtime.call import calls_logged
from flash_helpers.runtime.call_log import CallLog, Destination
from flash_helpers.runtime.saved_calls import SavedCallError, copies, load_call

ROWS = "s3_bf16_w2_c2"
OTHER_ROWS = "s1_bf16_w8"
ATTENTION = "v1_fp16_d128_Br64_Bc64_w4_async_Q0_K0_V0"


@pytest.fixture
def x() -> torch.Tensor:
    """Rows that begin at odd places of a larger memory."""
    torch.manual_seed(0)
    return torch.randn(2000).bfloat16().as_strided((3, 301), (303, 1), 777)


@pytest.fixture
def logged(tmp_path) -> CallLog:
    return CallLog(call_log.TENSORS, Destination(str(tmp_path / "calls.log")))


@pytest.fixture
def saved(tmp_path, logged) -> Callable[..., Path]:
    """Call and return the file of the call."""

    def make(config: str, *tensors: torch.Tensor, **options: object) -> Path:
        with calls_logged(logged):
            flash_attention.run(config, *tensors, **options)
        return max(tmp_path.glob("call_*[0-9].pt"), key=lambda path: path.stat().st_mtime_ns)

    return make


class TestFile:
    def test_is_beside_the_log_which_names_it(self, saved, x, tmp_path):
        path = saved(ROWS, x)
        assert path == tmp_path / f"call_{os.getpid()}_1.pt"
        assert f"python -m flash_attention replay {path}\n" in (tmp_path / "calls.log").read_text()

    def test_is_in_the_working_folder_for_a_stream(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        assert Destination("stderr").folder == tmp_path

    def test_holds_all_of_the_call(self, saved, x):
        y = torch.empty(3, 512, dtype=torch.bfloat16)[:, :301]
        call = load_call(saved(ROWS, x, y))
        assert (call.config.short_form(), call.device) == (ROWS, "the simulator")
        assert (call.problem.rows, call.problem.width) == (3, 301)
        assert torch.equal(call.inputs["x"], x)
        assert torch.equal(call.outputs["y"], y)
        again_x, again_y = call.tensors("cpu")
        assert torch.equal(again_x, x)
        assert (again_x.stride(), again_y.stride()) == ((303, 1), (512, 1))

    def test_holds_no_output_that_was_not_asked_for(self, logged, tmp_path, capsys):
        """The memory of dK and dV holds anything, which is no result."""
        q, k, v = (torch.randn(1, 18, 1, 64).half() for _ in range(3))
        o = flash_attention.attention(q.requires_grad_(), k, v)
        with calls_logged(logged):
            o.sum().backward()
        (path,) = tmp_path.glob("call_*[0-9].pt")
        found = load_call(path).outputs
        assert found is not None and [*found] == ["dq"]
        text = (tmp_path / "calls.log").read_text()
        assert "not asked for: dk, dv" in text
        assert "dq: min" in text and "dk: min" not in text and "dv: min" not in text
        assert replay.main([str(path)]) == 0
        assert "dq: the same values" in capsys.readouterr().out

    def test_holds_the_options_of_attention(self, saved):
        q = torch.ones(1, 64, 1, 128, dtype=torch.float16)
        call = load_call(saved(ATTENTION, q, q, q))
        assert call.problem.softmax_scale == 1 / math.sqrt(128)
        assert [*call.inputs] == ["q", "k", "v"]
        assert len(call.tensors("cpu")) == 4  # without lse and sinks, which were not asked for

    def test_is_there_without_outputs_when_the_kernel_begins(self, saved, x, monkeypatch, tmp_path):
        seen = []

        def crash(*_: object, **__: object) -> None:
            (path,) = tmp_path.glob("call_*")
            seen.append(load_call(path))
            raise RuntimeError("an illegal address")

        monkeypatch.setattr(call.simulator, "run_shipped", crash)
        with pytest.raises(RuntimeError, match="illegal"):
            saved(ROWS, x)
        assert torch.equal(seen[0].inputs["x"], x)
        assert seen[0].outputs is None
        assert len([*tmp_path.glob("call_*")]) == 1

    def test_of_a_process_stay_the_last(self, saved, x, tmp_path, monkeypatch):
        monkeypatch.setattr(call_log, "CALLS_KEPT", 2)
        for _ in range(4):
            saved(ROWS, x)
        head = f"call_{os.getpid()}"
        assert {path.name for path in tmp_path.glob("call_*")} == {
            f"{head}_{number}{kind}.pt" for number in (3, 4) for kind in ("", ".outputs")
        }

    def test_of_another_process_stay_after_a_fork(self, saved, x, tmp_path, monkeypatch):
        monkeypatch.setattr(call_log, "CALLS_KEPT", 1)
        path = saved(ROWS, x)
        if not (child := os.fork()):
            try:
                saved(ROWS, x)
                saved(ROWS, x)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert {*tmp_path.glob("call_*[0-9].pt")} == {path, tmp_path / f"call_{child}_3.pt"}

    def test_that_cannot_be_written_is_a_line_and_the_call_goes_on(
        self, saved, x, tmp_path, monkeypatch, logged
    ):
        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(torch, "save", fail)
        with calls_logged(logged):
            y = flash_attention.run(ROWS, x)["y"]
        assert torch.equal(y, flash_attention.run(ROWS, x)["y"])
        (log,) = tmp_path.iterdir()
        assert re.search(r"tensors cannot be saved: .* No space left on dev", log.read_text())


class TestCopies:
    def test_share_memory_as_the_originals(self):
        packed = torch.randn(2, 64, 3, 4, 128).half()
        q, k, v = packed.unbind(2)
        alone = torch.randn(5)
        found = copies({"q": q, "alone": alone, "k": k, "v": v}, "cpu")
        assert [*found] == ["q", "alone", "k", "v"]
        for name, x in {"q": q, "k": k, "v": v, "alone": alone}.items():
            assert torch.equal(found[name], x)
            assert found[name].stride() == x.stride()
            assert found[name].storage_offset() == x.storage_offset()
        storages = {x.untyped_storage().data_ptr() for x in found.values()}
        assert len(storages) == 2
        assert packed.untyped_storage().data_ptr() not in storages

    @pytest.mark.parametrize("offset", [0, 255, 256, 1000])
    def test_hold_no_more_than_is_used_and_are_aligned_as_the_originals(self, offset):
        x = torch.randn(100_000).half().as_strided((4, 8), (10, 1), offset)
        found = copies({"x": x}, "cpu")["x"]
        assert torch.equal(found, x)
        assert found.storage_offset() == offset % 256
        assert found.untyped_storage().nbytes() == 2 * (offset % 256 + 3 * 10 + 8)

    def test_of_repeated_elements_are_repeated(self):
        x = torch.randn(3, 1).expand(3, 1000)
        found = copies({"x": x}, "cpu")["x"]
        assert torch.equal(found, x)
        assert found.untyped_storage().nbytes() == 12


class TestReplay:
    def test_computes_the_same(self, saved, x, capsys):
        assert replay.main([str(saved(ROWS, x))]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[:2] == [f"saved: {ROWS} on the simulator", f"runs: {ROWS} on the simulator"]
        assert said[2].startswith("x: min ")
        assert said[3].startswith("y: min ")
        assert said[4:] == ["y: the same values as in the saved output"]

    @pytest.mark.slow
    def test_is_a_command_of_the_library(self, saved, x, root):
        command = [sys.executable, "-m", "flash_attention", "replay", str(saved(ROWS, x))]
        ended = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout.endswith("y: the same values as in the saved output\n")

    def test_of_nan_is_the_same(self, saved, x):
        x[1, 2] = torch.nan
        assert replay.main([str(saved(ROWS, x))]) == 0

    def test_by_another_kernel_may_round_otherwise(self, saved, x, capsys):
        assert replay.main([str(saved(ROWS, x)), "--kernel", OTHER_ROWS]) == 0
        assert f"runs: {OTHER_ROWS} on" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("factor", "kernel", "status", "said"),
        [
            (1 + 2**-7, ROWS, 1, r"y: DIFFERS from the saved output, .*, at most 0\.000e\+00; fir"),
            (1 + 2**-7, OTHER_ROWS, 0, r"y: rounded otherwise than the saved output"),
            (
                1.1,
                OTHER_ROWS,
                1,
                r"DIFFERS .* relative 9.*e-02, at most 7.812e-03; first y \(row 0",
            ),
            (float("nan"), OTHER_ROWS, 1, "DIFFERS"),
        ],
    )
    def test_compares_with_the_saved_outputs(self, saved, x, capsys, factor, kernel, status, said):
        path = saved(ROWS, x)
        y = load_call(path).outputs["y"]
        saved_calls.save_outputs(path, {"y": y * factor})
        assert replay.main([str(path), "--kernel", kernel]) == status
        assert re.search(said, capsys.readouterr().out)

    def test_by_a_kernel_that_adds_in_any_order_may_round_otherwise(
        self, saved, x, capsys, monkeypatch
    ):
        path = saved(ROWS, x)
        y = load_call(path).outputs["y"]
        saved_calls.save_outputs(path, {"y": y * (1 + 2**-7)})
        monkeypatch.setattr(Step, "is_deterministic", False)
        assert replay.main([str(path)]) == 0
        assert "y: rounded otherwise than the saved output" in capsys.readouterr().out

    def test_of_a_call_that_did_not_end_compares_nothing(self, saved, x, capsys):
        path = saved(ROWS, x)
        path.with_suffix(".outputs.pt").unlink()
        assert replay.main([str(path)]) == 0
        said = capsys.readouterr().out
        assert said.endswith("no outputs were saved, so that there is nothing to compare with\n")
        assert "y: min" in said

    def test_of_a_gpu_runs_in_the_simulator_if_asked(self, saved, x, capsys, monkeypatch):
        monkeypatch.setattr(saved_calls, "device_text", lambda device: "NVIDIA H100")
        path = saved(ROWS, x)
        monkeypatch.undo()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert replay.main([str(path)]) == 2
        message = "ran on NVIDIA H100 and torch finds no CUDA device here: pass --simulate to run"
        assert message in capsys.readouterr().err
        assert replay.main([str(path), "--simulate"]) == 0
        assert f"{ROWS} on NVIDIA H100\nruns: {ROWS} on the simulator" in capsys.readouterr().out

    def test_that_finds_a_fault_tells_it(self, saved, x, capsys, monkeypatch):
        def fail(*_: object, **__: object) -> None:
            raise RaceError("shared-memory race")

        path = saved(ROWS, x)
        monkeypatch.setattr(call.simulator, "run_shipped", fail)
        assert replay.main([str(path)]) == 1
        assert "shared-memory race" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("kernel", "message"),
        [
            ("s1_fp16_w8", "dtype bf16: s1_fp16_w8 takes fp16"),
            (ATTENTION, f"{ATTENTION} computes attention_forward and the problem is one of rows"),
            ("s9", "s9"),
        ],
    )
    def test_by_a_kernel_that_does_not_take_it_is_refused(self, saved, x, capsys, kernel, message):
        assert replay.main([str(saved(ROWS, x)), "--kernel", kernel]) == 2
        assert message in capsys.readouterr().err

    def test_by_a_kernel_of_another_mask_is_refused(self, saved, capsys):
        q = torch.ones(1, 64, 1, 128, dtype=torch.float16)
        path = saved(ATTENTION, q, q, q)
        causal = "h24_fp16_d128_Br128_Bc64_K3_V3_pp_causal"
        assert replay.main([str(path), "--kernel", causal]) == 2
        assert "causal" in capsys.readouterr().err


class TestForeignFile:
    @pytest.mark.parametrize(
        "data", [b"", b"PK\3\4", b"text", b"\x80\x02c__builtin__\neval\n."], ids=str
    )
    def test_is_refused(self, tmp_path, capsys, data):
        path = tmp_path / "call.pt"
        path.write_bytes(data)
        assert replay.main([str(path)]) == 2
        assert re.match(
            rf"{path} holds no saved call: pass a call_\*\.pt that FLASH_ATTENTION",
            capsys.readouterr().err,
        )

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
    def test_is_one_that_was_cut_off(self, saved, x, share):
        path = saved(ROWS, x)
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        with pytest.raises(SavedCallError, match="holds no saved call"):
            load_call(path)

    def test_is_that_of_the_outputs(self, saved, x, capsys):
        path = saved(ROWS, x).with_suffix(".outputs.pt")
        assert replay.main([str(path)]) == 2
        assert "holds no saved call" in capsys.readouterr().err

    def test_of_another_format_is_named(self, saved, x):
        path = saved(ROWS, x)
        record = torch.load(path, weights_only=True)
        torch.save({**record, "format": 2}, path)
        with pytest.raises(SavedCallError, match="format 2 and this version reads 1: replay it"):
            load_call(path)

    def test_runs_no_code(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "ran"),)

        path = tmp_path / "call.pt"
        torch.save({"format": 1, "config": Evil()}, path)
        with pytest.raises(SavedCallError):
            load_call(path)
        assert not (tmp_path / "ran").exists()

    def test_that_is_not_there_is_named(self, capsys):
        assert replay.main(["no_such_call.pt"]) == 2
        assert capsys.readouterr().err == "no_such_call.pt: No such file or directory\n"
