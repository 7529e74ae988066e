"""What a GPU is and does while something is measured, as NVML, PyTorch and git tell it.

NVML is the driver's management library, which nvidia-smi asks too (NVIDIA, "NVML API Reference
Guide"). Without a driver all that it would tell is left out.
"""

from __future__ import annotations

import functools
import platform
import statistics
import subprocess
import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pynvml
import torch

from flash_helpers.kernel_configs import Config
from flash_helpers.measure.results import ClockRecord, Provenance, ResourceRecord
from flash_helpers.runtime.backend import Backend
from flash_helpers.runtime.call import resources

READING_INTERVAL_S = 0.25

T = TypeVar("T")


def _ask(question: Callable[..., T], *arguments: Any) -> T | None:
    """NVML's answer; None if there is none."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


@functools.cache
def _handle(device: torch.device) -> Any:
    """NVML's of a CUDA device; None, for which it answers nothing, if it does not know the
    device."""
    _ask(pynvml.nvmlInit)
    # CUDA_VISIBLE_DEVICES renumbers devices for PyTorch but not for NVML
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return _ask(pynvml.nvmlDeviceGetHandleByIndex, device.index)
    return _ask(pynvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}")


def driver_version(device: torch.device) -> str:
    """Of the driver of a CUDA device; "" where it does not tell."""
    _handle(device)
    return _ask(pynvml.nvmlSystemGetDriverVersion) or ""


def read_gpu(device: torch.device) -> tuple[float, float, float] | None:
    """SM clock in MHz, power in W and temperature in degrees C of a CUDA device; None unless it
    tells all three. It takes microseconds."""
    handle = _handle(device)
    try:
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        milliwatts = pynvml.nvmlDeviceGetPowerUsage(handle)
        celsius = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    except pynvml.NVMLError:
        return None
    return float(clock), milliwatts / 1000, float(celsius)


def clock_record(
    dtype: str, seq_len: int, readings: Sequence[Sequence[float]]
) -> ClockRecord | None:
    """Summary of readings of (SM clock in MHz, power in W, temperature in degrees C), if any."""
    if not readings:
        return None
    clocks, powers, temperatures = zip(*readings, strict=True)
    return ClockRecord(
        dtype=dtype,
        seq_len=seq_len,
        n_readings=len(readings),
        sm_mhz=(min(clocks), statistics.median(clocks), max(clocks)),
        power_w=(min(powers), statistics.median(powers), max(powers)),
        temperature_c=max(temperatures),
    )


def resource_record(config: Config, device: torch.device) -> ResourceRecord:
    """What a built kernel takes on a CUDA device."""
    found = resources(config, device)
    return ResourceRecord(
        name=config.short_form(),
        registers=found.registers,
        local_bytes=found.local_bytes,
        smem_bytes=found.static_smem_bytes + found.dynamic_smem_bytes,
        blocks_per_sm=found.resident_blocks_per_sm,
    )


class GpuMonitor:
    """Reads clock, power and temperature of a CUDA device while its block runs."""

    def __init__(self, device: torch.device) -> None:
        self.readings: list[tuple[float, ...]] = []
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while (reading := read_gpu(self._device)) is not None:
            self.readings.append(reading)
            if self._stop.wait(READING_INTERVAL_S):
                return

    def __enter__(self) -> GpuMonitor:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()


def git_commit(root: Path) -> str:
    """Hash of the commit checked out at `root`, with "-dirty" if files differ; "" outside git."""
    commit = _git(root, "rev-parse", "HEAD")
    return f"{commit}-dirty" if commit and _git(root, "status", "-s") else commit


def _git(root: Path, *arguments: str) -> str:
    """What git prints; "" if it is not there or fails."""
    command = ["git", "-C", str(root), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()


def provenance(backend: Backend, command: str, commit: str) -> Provenance:
    """The record of this machine and moment. commit: of the kernels' sources, "" if unknown."""
    device = backend.device
    gpu, capability, driver = platform.machine(), "", ""
    max_sm_mhz = milliwatts = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu, capability = properties.name, f"{properties.major}.{properties.minor}"
        driver = driver_version(device)
        handle = _handle(device)
        max_sm_mhz = _ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM)
        milliwatts = _ask(pynvml.nvmlDeviceGetPowerManagementLimit, handle)
    return Provenance(
        date=datetime.now(timezone.utc).date().isoformat(),
        commit=commit,
        command=command,
        gpu=gpu,
        compute_capability=capability,
        driver=driver,
        # as nvidia-smi prints them
        max_sm_mhz=str(max_sm_mhz or ""),
        power_limit_w=f"{milliwatts / 1000:.2f}" if milliwatts else "",
        cuda=torch.version.cuda or "",
        cudnn=str(torch.backends.cudnn.version() or ""),
        torch=torch.__version__,
        python=platform.python_version(),
        library=backend.library,
    )
