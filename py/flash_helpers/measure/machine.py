"""What a GPU is and does while something is measured, as nvidia-smi, PyTorch and git tell it."""

from __future__ import annotations

import platform
import statistics
import subprocess
import threading
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

import torch

from flash_helpers.kernel_configs import Config
from flash_helpers.measure.results import ClockRecord, Provenance, ResourceRecord
from flash_helpers.runtime.call import resources

READING_INTERVAL_S = 0.25
_READING_FIELDS = ("clocks.sm", "power.draw", "temperature.gpu")


def _output_of(command: Sequence[str]) -> str | None:
    """What the command prints; None if it is not there or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def query_gpu(device: torch.device, names: Sequence[str]) -> list[str] | None:
    """Values of nvidia-smi's query fields for one CUDA device; None where it does not answer."""
    # CUDA_VISIBLE_DEVICES renumbers devices for PyTorch but not for nvidia-smi
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    selected = f"GPU-{uuid}" if uuid else str(device.index)
    text = _output_of(
        [
            "nvidia-smi",
            f"--id={selected}",
            f"--query-gpu={','.join(names)}",
            "--format=csv,noheader,nounits",
        ]
    )
    if not text:
        return None
    values = [value.strip() for value in text.splitlines()[0].split(",")]
    return values if len(values) == len(names) else None


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
        while True:
            values = query_gpu(self._device, _READING_FIELDS)
            try:
                if values:
                    self.readings.append(tuple(float(value) for value in values))
            except ValueError:
                return  # "[N/A]": this GPU does not tell
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
    commit = _output_of(["git", "-C", str(root), "rev-parse", "HEAD"])
    if not commit:
        return ""
    return f"{commit}-dirty" if _output_of(["git", "-C", str(root), "status", "-s"]) else commit


def provenance(device: torch.device, library: str, command: str, commit: str) -> Provenance:
    """The record of this machine and moment.

    library: what the kernels were built with. commit: of their sources, "" if unknown.
    """
    gpu = capability = ""
    answers = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu, capability = properties.name, f"{properties.major}.{properties.minor}"
        answers = query_gpu(device, ("driver_version", "clocks.max.sm", "power.limit"))
    driver, max_sm_mhz, power_limit_w = answers or ("", "", "")
    return Provenance(
        date=datetime.now(timezone.utc).date().isoformat(),
        commit=commit,
        command=command,
        gpu=gpu or platform.machine(),
        compute_capability=capability,
        driver=driver,
        max_sm_mhz=max_sm_mhz,
        power_limit_w=power_limit_w,
        cuda=torch.version.cuda or "",
        cudnn=str(torch.backends.cudnn.version() or ""),
        torch=torch.__version__,
        python=platform.python_version(),
        library=library,
    )
