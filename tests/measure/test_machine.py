"""What the driver tells of a GPU while it is measured, and that without one nothing is missed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest
import torch
from fake_backend import fake_backend

from flash_helpers.measure import machine
from flash_helpers.measure.machine import (
    GpuMonitor,
    clock_record,
    driver_version,
    provenance,
    read_gpu,
)

GPU = torch.device("cuda", 0)
ON_GPU = replace(fake_backend(), device=GPU)


class FakeNvml:
    """A driver with one GPU, which does not tell what is in `silent`."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, silent: tuple[str, ...] = ()) -> None:
        self.silent = silent
        self.n_read = 0

    def _answer(self, name: str, value: object) -> object:
        if name in self.silent or "init" in self.silent:
            raise self.NVMLError(name)
        return value

    def nvmlInit(self) -> None:
        self._answer("init", None)

    def nvmlSystemGetDriverVersion(self) -> str:
        return self._answer("driver", "580.1")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-1234"
        return self._answer("handle", "a handle")

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:
        self.n_read += 1
        return self._of(handle, "clock", 1755 + self.n_read % 2)

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:
        return self._of(handle, "power", 650_500)

    def nvmlDeviceGetTemperature(self, handle: object, kind: int) -> int:
        return self._of(handle, "temperature", 60)

    def nvmlDeviceGetMaxClockInfo(self, handle: object, kind: int) -> int:
        return self._of(handle, "max clock", 1980)

    def nvmlDeviceGetPowerManagementLimit(self, handle: object) -> int:
        return self._of(handle, "limit", 700_000)

    def _of(self, handle: object, name: str, value: object) -> object:
        if not handle:
            raise self.NVMLError("invalid argument")
        return self._answer(name, value)


@pytest.fixture
def nvml(monkeypatch) -> Iterator[FakeNvml]:
    fake = FakeNvml()
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, uuid="1234")
    monkeypatch.setattr(machine, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(machine, "READING_INTERVAL_S", 0.001)
    machine._handle.cache_clear()
    yield fake
    machine._handle.cache_clear()


def test_clock_power_and_temperature_are_in_mhz_watts_and_degrees(nvml: FakeNvml) -> None:
    assert read_gpu(GPU) == (1756.0, 650.5, 60.0)


def test_a_monitor_reads_until_its_block_ends(nvml: FakeNvml) -> None:
    with GpuMonitor(GPU) as monitor:
        while len(monitor.readings) < 3:
            pass
    n_readings = len(monitor.readings)
    record = clock_record("bf16", 4096, monitor.readings)
    assert record is not None and record.n_readings == n_readings == nvml.n_read
    assert record.sm_mhz[::2] == (1755.0, 1756.0)
    assert record.power_w == (650.5, 650.5, 650.5)


def test_provenance_names_driver_and_limits_as_nvidia_smi_prints_them(nvml: FakeNvml) -> None:
    found = provenance(ON_GPU, "pt_bench.py", "")
    assert (found.gpu, found.compute_capability) == ("NVIDIA H100 80GB HBM3", "9.0")
    assert (found.driver, found.max_sm_mhz, found.power_limit_w) == ("580.1", "1980", "700.00")


@pytest.mark.parametrize("silent", ["init", "handle", "clock", "power", "temperature"])
def test_what_the_driver_does_not_tell_leaves_no_reading(nvml: FakeNvml, silent: str) -> None:
    nvml.silent = (silent,)
    assert read_gpu(GPU) is None
    with GpuMonitor(GPU) as monitor:
        pass
    assert clock_record("bf16", 4096, monitor.readings) is None


def test_without_a_driver_its_version_and_the_limits_are_empty(nvml: FakeNvml) -> None:
    nvml.silent = ("init",)
    assert driver_version(GPU) == ""
    found = provenance(ON_GPU, "pt_bench.py", "")
    assert (found.driver, found.max_sm_mhz, found.power_limit_w) == ("", "", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_library_itself_does_no_harm_where_there_is_no_driver(monkeypatch) -> None:
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        pytest.skip("there is a driver")
    machine._handle.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert read_gpu(GPU) is None
    assert driver_version(GPU) == ""
    machine._handle.cache_clear()
