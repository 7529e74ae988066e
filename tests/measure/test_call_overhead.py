"""Host time of a call: how it is measured, written and shown."""

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from fake_backend import fake_backend, load_tool

from flash_helpers.measure.call_overhead import (
    CALL_NAMES,
    FLASH_TRANSPOSED,
    CallOverhead,
    CallRecord,
    Contender,
    measure_calls,
)
from flash_helpers.measure.machine import provenance
from flash_helpers.measure.results import CUDNN, FLASH

US = 1000  # nanoseconds


class Host:
    """A clock that calls take their time of."""

    def __init__(self) -> None:
        self.now = 0
        self.called: list[str] = []

    def contender(self, name: str, microseconds: float) -> Contender:
        def call() -> None:
            self.now += int(microseconds * US)
            self.called.append(name)

        @contextlib.contextmanager
        def around():
            self.now += 500 * US
            yield

        return Contender(call, around)

    def synchronize(self) -> None:
        self.now += 1000 * US
        self.called.append("")


@pytest.fixture
def measured() -> Callable[..., tuple[CallRecord, ...]]:
    def run(host: Host, **options) -> tuple[CallRecord, ...]:
        contenders = {"forward": host.contender("forward", 12), FLASH: host.contender(FLASH, 40)}
        return measure_calls(
            contenders, synchronize=host.synchronize, clock=lambda: host.now, **options
        )

    return run


def test_a_sample_is_the_time_of_a_call_without_waiting_for_the_device(measured):
    forward, flash = measured(Host(), rounds=4, calls=5)
    assert forward == CallRecord("forward", (12.0,) * 4)
    assert flash.samples_us == (40.0,) * 4


def test_contenders_take_turns_in_either_order_after_a_warm_up(measured):
    host = Host()
    measured(host, rounds=20, calls=3)
    samples = [(name, len([*group])) for name, group in itertools.groupby(host.called) if name]
    assert {n for _, n in samples} == {1, 3}  # one call before the device is waited for
    samples = [(name, n) for name, n in samples if n == 3]
    rounds = [tuple(name for name, _ in pair) for pair in zip(*[iter(samples)] * 2, strict=True)]
    assert len(rounds) == 21
    orders = {("forward", FLASH), (FLASH, "forward")}
    assert all({*pair} == orders for pair in zip(rounds[1::2], rounds[2::2], strict=True))


def results(*calls: CallRecord) -> CallOverhead:
    found = provenance(fake_backend(), "call_overhead.py", "68cfc22")
    return CallOverhead(found, (1, 128, 16, 128), "bf16", 200, calls)


class TestStatistics:
    """On a host that is busy for more than half of the rounds."""

    QUICK, SLOW = 20.0, 50.0
    BUSY = (False, True, True, False, True, True, True, False)

    def record(self, name: str, scale: float) -> CallRecord:
        return CallRecord(name, tuple(scale * (self.SLOW if b else self.QUICK) for b in self.BUSY))

    def test_the_time_is_that_of_a_quiet_host(self):
        assert self.record("forward", 1.0).quiet_us == self.QUICK

    def test_the_time_is_not_that_of_one_sample(self):
        assert CallRecord("forward", (1.0, *[20.0] * 7)).quiet_us == 20.0

    def test_the_ratio_is_within_rounds(self):
        flash = self.record(FLASH, 1.0)
        assert self.record("forward", 0.5).ratio_to(flash) == 0.5
        mixed = CallRecord("forward", (*self.record("", 0.5).samples_us[:-1], 1000.0))
        assert mixed.ratio_to(flash) == 0.5


class TestTable:
    RESULTS = results(CallRecord("attention", (19.0, 21.0, 20.0)), CallRecord(FLASH, (40.0,) * 3))

    def test_has_lower_quartiles_and_shares_of_flash(self):
        text = self.RESULTS.markdown()
        assert "| `attention(q, k, v)` | 19.0 | 0.50 |" in text
        assert "| PyTorch's flash backend, transposing q, k, v and o | 40.0 | 1.00 |" in text
        assert "3 rounds of 200 calls: µs is the lower quartile over the rounds" in text
        assert "commit 68cfc22" in text

    def test_is_read_back_from_its_file(self, tmp_path):
        self.RESULTS.save(tmp_path / "calls.json")
        assert CallOverhead.load(tmp_path / "calls.json") == self.RESULTS


@pytest.fixture
def tool():
    return load_tool("benchmarks/call_overhead.py")


class TestTool:
    def test_calls_what_it_names(self, tool):
        found = tool.contenders(torch.device("cpu"))
        assert {*found} == {*CALL_NAMES}
        q = found["forward"].call()
        for name in ("forward_out", "attention"):
            assert torch.equal(found[name].call(), q)
        o = found[FLASH].call()
        assert o.shape == q.shape
        assert torch.equal(found[FLASH_TRANSPOSED].call().transpose(1, 2), o)
        with found[CUDNN].around(), pytest.raises(RuntimeError, match=r"backend|kernel"):
            found[CUDNN].call()

    def test_prints_the_table_and_writes_the_file(self, tool, monkeypatch, tmp_path, capsys):
        host = Host()
        monkeypatch.setattr(tool, "find_backend", lambda device: fake_backend())
        monkeypatch.setattr(
            tool, "contenders", lambda device: {n: host.contender(n, 20) for n in CALL_NAMES}
        )
        path = tmp_path / "calls.json"
        assert tool.main(["--rounds", "3", "--commit", "68cfc22", "--json", str(path)]) == 0
        written = CallOverhead.load(path)
        assert [record.name for record in written.calls] == [*CALL_NAMES]
        assert {len(record.samples_us) for record in written.calls} == {3}
        assert "`attention(q, k, v)`" in capsys.readouterr().out
