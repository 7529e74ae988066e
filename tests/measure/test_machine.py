"""Readings of a GPU from the driver, and measuring without them."""

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
    MAX_REST_S,
    REST_POWER,
    GpuSensor,
    driver_version,
    provenance,
    read_gpu,
)

GPU = torch.device("cuda", 0)
ON_GPU = replace(fake_backend(), device=GPU)


class FakeNvml:
    """A driver with one GPU, which does not tell what is in `silent`."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_SUCCESS, NVML_FI_DEV_POWER_INSTANT = 1, 0, 0, 186
    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, silent: tuple[str, ...] = ()) -> None:
        self.silent = silent
        self.n_read = 0
        self.milliwatts = [650_500]  # the last one stays

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

    def nvmlDeviceGetFieldValues(self, handle: object, fields: list[int]) -> list[object]:
        assert fields == [self.NVML_FI_DEV_POWER_INSTANT]
        drawn = self.milliwatts.pop(0) if len(self.milliwatts) > 1 else self.milliwatts[0]
        self._of(handle, "fields", None)
        status = 3 if "instant" in self.silent or "power" in self.silent else self.NVML_SUCCESS
        return [SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(uiVal=drawn))]

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:
        return self._of(handle, "power", 600_000)  # of the last second

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
    machine._handle.cache_clear()
    yield fake
    machine._handle.cache_clear()


def test_clock_power_and_temperature_are_in_mhz_watts_and_degrees(nvml: FakeNvml) -> None:
    assert read_gpu(GPU) == (1756.0, 650.5, 60.0)


@pytest.mark.parametrize("silent", ["fields", "instant"])
def test_a_driver_that_knows_no_momentary_power_is_asked_for_the_mean(nvml, silent: str) -> None:
    nvml.silent = (silent,)
    assert read_gpu(GPU).power_w == 600.0


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """Sleeps; the clock advances by them alone."""
    slept: list[float] = []
    monkeypatch.setattr(machine.time, "sleep", slept.append)
    monkeypatch.setattr(machine.time, "monotonic", lambda: sum(slept))
    return slept


@pytest.mark.parametrize(
    ("milliwatts", "silent", "readings"),
    [
        ([650_000, 400_000, int(1000 * REST_POWER * 700) - 1], "", 2),  # until the power is low
        ([130_000], "", 0),
        *(([650_500], silent, 0) for silent in ("init", "limit", "clock")),
    ],
)
def test_a_rest_is_as_long_as_asked_for_and_until_the_power_is_low_if_the_gpu_tells(
    nvml: FakeNvml, waits: list[float], milliwatts: list[int], silent: str, readings: int
) -> None:
    nvml.milliwatts, nvml.silent = milliwatts, (silent,)
    GpuSensor(GPU).rest(0.02)
    assert waits == [0.02, *[machine.READING_INTERVAL_S] * readings]


def test_a_rest_ends_if_the_power_stays(nvml: FakeNvml, waits: list[float]) -> None:
    GpuSensor(GPU).rest(0.02)
    assert 0.02 + MAX_REST_S <= sum(waits) < 0.1 + MAX_REST_S


def test_provenance_names_driver_and_limits_as_nvidia_smi_prints_them(nvml: FakeNvml) -> None:
    found = provenance(ON_GPU, "pt_bench.py", "")
    assert (found.gpu, found.compute_capability) == ("NVIDIA H100 80GB HBM3", "9.0")
    assert (found.driver, found.max_sm_mhz, found.power_limit_w) == ("580.1", "1980", "700.00")


@pytest.mark.parametrize("silent", ["init", "handle", "clock", "power", "temperature"])
def test_what_the_driver_does_not_tell_leaves_no_reading(nvml: FakeNvml, silent: str) -> None:
    nvml.silent = (silent,)
    assert read_gpu(GPU) is None
    assert GpuSensor(GPU).read() is None


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
