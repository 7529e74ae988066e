"""State of a GPU and of the sources during a measurement, from NVML, PyTorch and git.

NVML is the driver's management library, which nvidia-smi uses too (NVIDIA, "NVML API Reference
Guide"). Without a driver, NVML's facts are left out. torch is imported when it is needed.
"""

from __future__ import annotations

import functools
import math
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pynvml

from flash_helpers.kernel_configs import Config
from flash_helpers.measure.results import Provenance, ResourceRecord
from flash_helpers.runtime.backend import Backend

if TYPE_CHECKING:
    import torch

READING_INTERVAL_S = 0.01
REST_POWER = 0.5  # of the power limit
MAX_REST_S = 1.0

T = TypeVar("T")


def _ask(question: Callable[..., T], *arguments: Any) -> T | None:
    """NVML's answer; None if there is none."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


@functools.cache
def _handle(device: torch.device) -> Any:
    """NVML's handle of a CUDA device; None if NVML does not know the device."""
    import torch

    _ask(pynvml.nvmlInit)
    # CUDA_VISIBLE_DEVICES renumbers devices for PyTorch but not for NVML.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return _ask(pynvml.nvmlDeviceGetHandleByIndex, device.index)
    return _ask(pynvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}")


def driver_version(device: torch.device) -> str:
    """Version of a CUDA device's driver; "" if the driver does not tell it."""
    _handle(device)
    return _ask(pynvml.nvmlSystemGetDriverVersion) or ""


class Reading(NamedTuple):
    """SM clock in MHz, power in W, temperature in degrees C."""

    sm_mhz: float
    power_w: float
    temperature_c: float


def _milliwatts(handle: Any) -> int:
    """Power of the GPU now, or its mean over the last second if the driver tells only that."""
    fields = _ask(pynvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    if fields and fields[0].nvmlReturn == pynvml.NVML_SUCCESS:
        return fields[0].value.uiVal
    return pynvml.nvmlDeviceGetPowerUsage(handle)


def read_gpu(device: torch.device) -> Reading | None:
    """Reading of a CUDA device; None unless NVML tells all three numbers. It takes
    microseconds."""
    handle = _handle(device)
    try:
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        milliwatts = _milliwatts(handle)
        celsius = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    except pynvml.NVMLError:
        return None
    return Reading(float(clock), milliwatts / 1000, float(celsius))


class GpuSensor:
    """Sensor of a CUDA device, which can also let the device rest."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        limit = _ask(pynvml.nvmlDeviceGetPowerManagementLimit, _handle(device))
        self._resting_w = REST_POWER * limit / 1000 if limit else math.inf

    def read(self) -> Reading | None:
        """Take a reading; None if the device gives none."""
        return read_gpu(self._device)

    def rest(self, seconds: float) -> None:
        """Wait for `seconds`, then until the device draws less than REST_POWER of its power limit,
        MAX_REST_S at most. The power limiter then does not slow the next sample."""
        time.sleep(seconds)
        deadline = time.monotonic() + MAX_REST_S
        while time.monotonic() < deadline:
            reading = self.read()
            if reading is None or reading.power_w < self._resting_w:
                return
            time.sleep(READING_INTERVAL_S)


def resource_record(config: Config, device: torch.device) -> ResourceRecord:
    """Resources of a built kernel on a CUDA device."""
    from flash_helpers.runtime.call import resources

    found = resources(config, device)
    return ResourceRecord(
        name=config.short_form(),
        registers=found.registers,
        local_bytes=found.local_bytes,
        smem_bytes=found.static_smem_bytes + found.dynamic_smem_bytes,
        blocks_per_sm=found.resident_blocks_per_sm,
    )


def git_commit(root: Path) -> str:
    """Hash of the commit checked out at `root`, with "-dirty" if files differ from it; "" outside
    git."""
    commit = _git(root, "rev-parse", "HEAD")
    return f"{commit}-dirty" if commit and _git(root, "status", "-s") else commit


def _git(root: Path, *arguments: str) -> str:
    """Output of git; "" if git is absent or fails."""
    command = ["git", "-C", str(root), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()


def provenance(backend: Backend, command: str, commit: str) -> Provenance:
    """The record of this machine and moment. commit: of the kernels' sources, "" if unknown."""
    import torch

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
        # In the form that nvidia-smi prints.
        max_sm_mhz=str(max_sm_mhz or ""),
        power_limit_w=f"{milliwatts / 1000:.2f}" if milliwatts else "",
        cuda=torch.version.cuda or "",
        cudnn=str(torch.backends.cudnn.version() or ""),
        torch=torch.__version__,
        python=platform.python_version(),
        library=backend.library,
    )
