"""The log of calls: what it says at each level, when and where; and that without one a call has
nothing to do for it. Its files are in test_replay.py."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flash_attention
from flash_attention import _forward
from flash_helpers.kernel_configs import Config
from flash_helpers.runtime import call, call_log
from flash_helpers.runtime.call import calls_logged
from flash_helpers.runtime.call_log import CallLog, Destination, LogError
from flash_helpers.runtime.tensor_statistics import TensorStatistics

ROWS = "s3_bf16_w2_c2"
ATTENTION = "v1_fp16_d128_Br64_Bc64_w4_async_Q0_K0_V0"
PROGRAMMATIC = "g8_fp16_d128_Br128_Bc128_K3_V2_pp"
THIS_FILE = re.escape(__file__)


@pytest.fixture
def x() -> torch.Tensor:
    """Two rows that begin at multiples of 3 in their memory."""
    return torch.arange(14.0).bfloat16().as_strided((2, 5), (6, 1), 3)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "calls.log"


@pytest.fixture
def logged(path) -> Callable[[int], object]:
    """Log the calls within at a level."""
    return lambda level: calls_logged(CallLog(level, Destination(str(path))))


@pytest.fixture
def not_run(monkeypatch) -> list[Config]:
    """The configs of the calls, which compute nothing."""
    ran: list[Config] = []
    monkeypatch.setattr(call.simulator, "run_shipped", lambda config, *_, **__: ran.append(config))
    return ran


def qkv() -> list[torch.Tensor]:
    return [torch.ones(1, 64, 1, 128, dtype=torch.float16) for _ in range(3)]


class TestEnvironment:
    @pytest.mark.parametrize("text", [None, "", "0"])
    def test_without_a_level_there_is_none(self, text):
        environ = {} if text is None else {call_log.LEVEL_VARIABLE: text}
        assert CallLog.from_environment(environ) is None

    @pytest.mark.parametrize("level", [1, 3, 5, 10])
    def test_has_a_level_and_goes_to_stderr(self, level):
        log = CallLog.from_environment({call_log.LEVEL_VARIABLE: str(level)})
        assert (log.level, log.destination) == (level, Destination("stderr"))

    @pytest.mark.parametrize("text", ["2", "-1", "11", "debug", "1.0", "٣"])
    def test_of_another_level_is_refused_with_the_choices(self, text):
        message = (
            rf"FLASH_ATTENTION_LOGLEVEL '{text}' is no level: use one of 0 \(off\), 1 \(names and "
            r"configs\), 3 \(.*\), 5 \(.*\), 10 \(tensors saved for replay\)"
        )
        with pytest.raises(LogError, match=message):
            CallLog.from_environment({call_log.LEVEL_VARIABLE: text})

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("stdot", "'stdot' is no stream, .*: use stdout, stderr or a file .*, or ./stdot"),
            ("no/such/calls.log", r"'no/such/calls.log' is in .*no/such, which is no folder: make"),
            (".", r"'\.' cannot be written: use stdout, stderr or a file"),
        ],
    )
    def test_of_an_impossible_place_is_refused_even_without_a_level(self, text, message):
        with pytest.raises(LogError, match=f"FLASH_ATTENTION_LOGDEST {message}"):
            CallLog.from_environment({call_log.DESTINATION_VARIABLE: text})

    def test_of_a_relative_file_stays_in_its_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        found = Destination.from_text("calls_%i.log")
        monkeypatch.chdir("/")
        assert found.path == tmp_path / f"calls_{os.getpid()}.log"

    def test_of_a_file_may_be_called_like_a_stream(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert Destination.from_text("./stdout").path == tmp_path / "stdout"

    @pytest.mark.slow
    def test_is_read_when_the_library_is_imported(self, root):
        environ = {**os.environ, call_log.LEVEL_VARIABLE: "7"}
        command = [sys.executable, "-c", "import flash_attention"]
        ended = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True)
        assert ended.returncode == 1
        assert "LogError: FLASH_ATTENTION_LOGLEVEL '7' is no level" in ended.stderr


class TestLevels:
    def test_1_names_function_place_operation_and_kernel(self, logged, path, x):
        with logged(1):
            flash_attention.run(ROWS, x)
            flash_attention.run(ROWS, x)
        line = (
            rf"flash_attention\[{os.getpid()}\] call %d: \d{{4}}-\d\d-\d\d [\d:]{{8}}\.\d{{3}}, "
            rf"run\(\) at {THIS_FILE}:\d+, rows by {ROWS} on the simulator\n"
        )
        assert re.fullmatch(line % 1 + line % 2, path.read_text())

    def test_3_has_layouts_and_launches(self, logged, path, x):
        with logged(3):
            flash_attention.run(ROWS, x)
        _, *lines = [line.partition("call 1: ")[2] for line in path.read_text().splitlines()]
        assert lines[:2] == [
            "problem: rows 2, width 5, dtype bf16",
            f"x: bfloat16, shape (2, 5), strides (6, 1), address {x.data_ptr():#x}",
        ]
        assert lines[2].startswith("y: bfloat16, shape (2, 5), strides (5, 1), address 0x")
        assert lines[3:] == [
            f"launch of {ROWS}: grid (2, 1, 1), 64 threads per block, 16 bytes of dynamic shared "
            "memory per block"
        ]

    def test_3_has_each_option(self, logged, path, not_run):
        with logged(3):
            flash_attention.forward(ATTENTION, *qkv(), softmax_scale=128**-0.5)
        assert "causal False, softmax_scale 0.0883883" in path.read_text()

    def test_3_names_a_programmatic_launch(self, logged, path, not_run):
        with logged(3):
            flash_attention.forward(PROGRAMMATIC, *qkv())
        assert path.read_text().endswith("bytes of dynamic shared memory per block, programmatic\n")

    def test_5_has_statistics_of_inputs_and_outputs(self, logged, path, x):
        x[1, 2], x[1, 3] = torch.nan, torch.inf
        with logged(5):
            flash_attention.run(ROWS, x)
        assert [line.partition("call 1: ")[2] for line in path.read_text().splitlines()[-2:]] == [
            "x: min 3, max 13, mean 7.125, 1 NaN, 1 inf",
            "y: min 0.0116577, max 0.636719, mean 0.200085, 5 NaN, 0 inf",
        ]

    def test_include_those_below(self, logged, path, x, not_run):
        y = torch.ones(2, 5, dtype=x.dtype)
        lines = []
        for level in (1, 3, 5, 10):
            with logged(level):
                flash_attention.run(ROWS, x, y)
            title, *rest = path.read_text().splitlines()
            lines.append({title.partition(", ")[2], *rest})
            path.unlink()
        assert all(less < more for less, more in itertools.pairwise(lines))


class TestStatistics:
    @pytest.mark.parametrize(
        ("values", "found"),
        [
            ([1.0, -2.0, 4.0], TensorStatistics(-2.0, 4.0, 1.0, 0, 0)),
            ([1.0, torch.nan, torch.inf, -torch.inf], TensorStatistics(1.0, 1.0, 1.0, 1, 2)),
            ([torch.nan, torch.inf], TensorStatistics(None, None, None, 1, 1)),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_are_of_finite_elements(self, values, found, dtype):
        assert TensorStatistics.of(torch.tensor(values, dtype=dtype)) == found

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
    def test_are_of_any_element_type(self, dtype):
        found = TensorStatistics.of(torch.tensor([1.0, -2.0, 4.0]).to(dtype))
        assert found == TensorStatistics(-2.0, 4.0, 1.0, 0, 0)

    def test_do_not_overflow(self):
        found = TensorStatistics.of(torch.full((1000,), 60000.0, dtype=torch.float16))
        assert found.mean == 60000.0  # the next number below 60,000 is 32 away

    def test_say_so_where_nothing_is_finite(self):
        text = str(TensorStatistics.of(torch.tensor([torch.nan])))
        assert text == "no finite value, 1 NaN, 0 inf"


class TestTime:
    def test_inputs_are_in_the_file_before_the_launch(self, logged, path, x, monkeypatch):
        seen = []
        monkeypatch.setattr(
            call.simulator, "run_shipped", lambda *_, **__: seen.append(path.read_text())
        )
        with logged(5):
            flash_attention.run(ROWS, x)
        assert f"rows by {ROWS}" in seen[0]
        assert "x: min 3, max 13, mean 8, 0 NaN, 0 inf\n" in seen[0]
        assert "y: min" not in seen[0]
        assert "y: min" in path.read_text()

    def test_a_call_that_fails_says_so(self, logged, path, x, monkeypatch):
        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("an illegal\naddress")

        monkeypatch.setattr(call.simulator, "run_shipped", fail)
        with logged(5), pytest.raises(RuntimeError, match="illegal"):
            flash_attention.run(ROWS, x)
        head = f"flash_attention[{os.getpid()}] call 1: "
        assert path.read_text().endswith(f"{head}raised RuntimeError: an illegal\n{head}address\n")

    def test_a_captured_call_has_no_statistics_and_no_files(
        self, logged, path, x, monkeypatch, not_run
    ):
        monkeypatch.setattr(call_log, "_is_captured", lambda device: True)
        with logged(10):
            flash_attention.run(ROWS, x)
        *_, last = path.read_text().splitlines()
        assert last.endswith(
            "captured into a CUDA graph: replays are not logged, and no statistics are computed "
            "or tensors saved"
        )
        assert [*path.parent.iterdir()] == [path]

    def test_tensors_that_cannot_be_read_are_a_line(self, logged, path, x, monkeypatch, not_run):
        def fail(_: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access")

        monkeypatch.setattr(call_log.TensorStatistics, "of", fail)
        with logged(5):
            flash_attention.run(ROWS, x)
        assert "x cannot be read: CUDA error: an illegal memory access\n" in path.read_text()
        assert "y cannot be read: CUDA error: an illegal memory access\n" in path.read_text()

    def test_what_a_log_reads_is_not_timed(self, monkeypatch):
        done: list[str] = []

        @contextmanager
        def logged() -> Iterator[None]:
            done.append("inputs")
            yield
            done.append("outputs")

        class Event:
            def __init__(self, **_: object) -> None: ...

            def record(self, _: object) -> None:
                done.append("event")

            def synchronize(self) -> None: ...

            def elapsed_time(self, _: object) -> float:
                return 1.0

        ready = SimpleNamespace(
            is_simulated=False,
            logged=logged,
            plan=SimpleNamespace(constants=None, run=lambda _: done.append("kernel")),
            addresses={},
            output=None,
        )
        monkeypatch.setattr(_forward, "ready_call", lambda *_: ready)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        flash_attention.forward_timed(ATTENTION, *qkv())
        assert done == ["inputs", "event", "kernel", "event", "outputs"]


class TestCalls:
    """Each way to call is logged, once a call."""

    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (flash_attention.attention, "attention"),
            (lambda q, k, v: flash_attention.forward(ATTENTION, q, k, v), "forward"),
            (lambda q, k, v: flash_attention.forward(ATTENTION, q, k, v, q.clone()), "forward"),
            (lambda q, k, v: flash_attention.run(ATTENTION, q, k, v), "run"),
            (lambda q, k, v: flash_attention.simulate(ATTENTION, q, k, v), "simulate"),
        ],
    )
    def test_by_its_name(self, logged, path, not_run, function, name):
        with logged(1):
            function(*qkv())
        (config,) = not_run
        pattern = rf".* {name}\(\) at {THIS_FILE}:\d+, attention_forward by {config.short_form()} "
        assert re.match(pattern, path.read_text())
        assert path.read_text().count("\n") == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("made", ["compiled", "exported"])
    def test_traced_code_when_it_runs(self, logged, path, not_run, made):
        class Module(torch.nn.Module):
            def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return flash_attention.attention(q, k, v)

        with logged(5):
            if made == "compiled":
                torch._dynamo.reset()
                function = torch.compile(Module(), fullgraph=True, backend="aot_eager")
            else:
                function = torch.export.export(Module(), tuple(qkv())).module()
            function(*qkv())
            function(*qkv())
        text = path.read_text()
        assert len(not_run) == text.count("attention_forward by") == 2
        assert text.count("q: min 1, max 1, mean 1, 0 NaN, 0 inf") == 2


class TestQuickLaunch:
    """A call that is launched from C skips the log, so that nothing does while there is one."""

    @pytest.fixture
    def launched(self, monkeypatch) -> list[str]:
        """The launches, by their kind, of calls that are planned as if for a GPU."""
        launched: list[str] = []

        def quickly(*_: object) -> bool:
            launched.append("quick")
            return True

        plan = replace(call.prepare(ATTENTION, *qkv()).plan, device=0, quick=quickly)
        tensors = dict.fromkeys("qkvo", qkv()[0])
        monkeypatch.setattr(call, "_quick_plans", {})
        monkeypatch.setattr(call, "_checked", lambda *_: (plan, tensors, {}))
        monkeypatch.setattr(call.Plan, "run", lambda *_: launched.append("ordinary"))
        monkeypatch.setattr(call_log, "_is_captured", lambda device: False)
        return launched

    def test_asks_nothing_about_a_log(self, launched, monkeypatch):
        flash_attention.forward(ATTENTION, *qkv())
        monkeypatch.delattr(call, "_log")
        flash_attention.forward(ATTENTION, *qkv())
        assert launched == ["ordinary", "quick"]

    def test_is_not_made_within_a_log(self, launched, logged, path):
        flash_attention.forward(ATTENTION, *qkv())
        with logged(1):
            flash_attention.forward(ATTENTION, *qkv())
            flash_attention.forward(ATTENTION, *qkv())
        flash_attention.forward(ATTENTION, *qkv())
        flash_attention.forward(ATTENTION, *qkv())
        assert launched == [*4 * ["ordinary"], "quick"]
        assert path.read_text().count("on cuda:0\n") == 2


class TestDestination:
    @pytest.mark.parametrize("stream", ["stdout", "stderr"])
    def test_is_a_stream(self, stream, capsys, x, not_run):
        with calls_logged(CallLog(1, Destination.from_text(stream))):
            flash_attention.run(ROWS, x)
        assert f"rows by {ROWS}" in getattr(capsys.readouterr(), stream.removeprefix("std"))

    def test_is_a_file_for_each_process(self, tmp_path, x, not_run):
        with calls_logged(CallLog(1, Destination.from_text(str(tmp_path / "%i.log")))):
            flash_attention.run(ROWS, x)
            if not (child := os.fork()):
                try:
                    flash_attention.run(ROWS, x)
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
        for process in (os.getpid(), child):
            (line,) = (tmp_path / f"{process}.log").read_text().splitlines()
            assert line.startswith(f"flash_attention[{process}] call ")

    def test_that_holds_a_log_is_appended_to(self, logged, path, x, not_run):
        for _ in range(2):
            with logged(1):
                flash_attention.run(ROWS, x)
        assert path.read_text().count("call 1: ") == 2

    def test_that_takes_no_more_ends_the_log_with_one_warning(self, path, x, not_run):
        log = CallLog(1, Destination(str(path)))
        path.mkdir()
        with calls_logged(log), pytest.warns(RuntimeWarning, match="calls ends, .*directory") as w:
            flash_attention.run(ROWS, x)
            flash_attention.run(ROWS, x)
        assert len(w) == 1
        assert len(not_run) == 2


class TestWrongValues:
    """Level 5 names values of a cache's tables that no call checks."""

    def call(self, lengths: list[int], **places: list) -> None:
        q, k = torch.ones(3, 1, 2, 64).half(), torch.ones(3, 4, 1, 64).half()
        tensors = {name: torch.tensor(x).int() for name, x in places.items()}
        flash_attention.decode(q, k, k, cache_seqlens=torch.tensor(lengths).int(), **tensors)

    def lines(self, path: Path) -> list[str]:
        """What is said of wrong values."""
        found = (line.partition(": ")[2] for line in path.read_text().splitlines())
        return [line for line in found if re.search("names no|over the room|wrong values", line)]

    def test_of_a_table_and_of_lengths_are_named(self, logged, path, not_run):
        with logged(5):
            self.call([9, 4, 0], block_table=[[0, 3], [2, 7], [-1, -1]])
            self.call([4, -1, 1], cache_batch_idx=[0, 3, 2])
        assert self.lines(path) == [
            "cache_seqlens 9 of sequence 0 is over the room of 8 keys, which count: pass at most 8",
            "block_table 3 of sequence 0, block 1, names no page: pass one from 0 to 2",
            "cache_batch_idx 3 of sequence 1 names no row of the cache: pass one from 0 to 2",
        ]

    def test_that_are_many_are_counted(self, logged, path, not_run):
        with logged(5):
            self.call([40, 40, 40], block_table=[[5] * 10] * 3)
        *shown, rest = self.lines(path)
        assert len(shown) == call_log.WRONG_VALUES_SHOWN and rest == "and 22 more wrong values"

    def test_of_right_tables_there_are_none_and_below_level_5_nothing_is_read(
        self, logged, path, not_run
    ):
        with logged(5):
            self.call([8, 4, 0], block_table=[[0, 2], [1, 7], [-1, -1]])
        with logged(3):
            self.call([9, 4, 0], block_table=[[9, 9], [1, 7], [-1, -1]])
        assert self.lines(path) == [] and len(not_run) == 2
