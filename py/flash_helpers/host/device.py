"""The GPU that a host program sees: attributes, and a few questions about it."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers import gpu
from flash_helpers.host.errors import INVALID_DEVICE, NOT_SUPPORTED, CudaError, HostError

_DEFAULT_SMEM_BYTES = 48 << 10
"""Shared memory per block that a launch gets without cudaFuncSetAttribute (CUDA C++ Programming
Guide, "Shared Memory" of compute capability 9.0)."""

_NAMES = {90: "NVIDIA H100, simulated"}


@dataclass(frozen=True)
class SimulatedDevice:
    """The largest GPU of a target such as sm_90a.

    Raises HostError for a target whose largest GPU is not known.
    """

    target: str

    def __post_init__(self) -> None:
        try:
            known = gpu.capability_of(self.target) in gpu.MOST_SMS
        except ValueError:
            known = False
        if not known:
            targets = ", ".join(f"sm_{capability}" for capability in gpu.MOST_SMS)
            raise HostError(f"{self.target!r} is no target of the host runner: use {targets}")

    @property
    def capability(self) -> int:
        """Compute capability, such as 90."""
        return gpu.capability_of(self.target)

    @property
    def limits(self) -> gpu.Limits:
        """Its limits."""
        return gpu.LIMITS[self.capability]

    @property
    def name(self) -> str:
        """Its name."""
        return _NAMES.get(self.capability, f"{self.target}, simulated")

    def _attributes(self) -> dict[int, int]:
        """Values by number, as cudaDeviceAttr and CUdevice_attribute number them."""
        limits, (major, minor) = self.limits, divmod(self.capability, 10)
        per_sm = limits.smem_bytes + gpu.RESERVED_SMEM_BYTES
        return {
            **{1: gpu.MAX_THREADS, 2: gpu.MAX_THREADS, 3: gpu.MAX_THREADS, 4: gpu.MAX_BLOCK_Z},
            **{5 + i: most for i, most in enumerate(gpu.MAX_GRID)},
            8: _DEFAULT_SMEM_BYTES,
            9: gpu.MAX_CONSTANT_BYTES,
            10: gpu.WARP,
            **{12: gpu.REGISTERS_PER_SM, 82: gpu.REGISTERS_PER_SM},
            16: gpu.MOST_SMS[self.capability],
            **{18: 0, 20: 0, 88: 0, 90: 0},  # integrated, compute mode, pageable access, preemption
            **{19: 1, 31: 1, 41: 1, 83: 1, 89: 1},  # mapped, concurrent, unified, managed memory
            39: limits.warps * gpu.WARP,
            40: 1,  # copy engines
            **{75: major, 76: minor},
            81: per_sm,
            95: 1,  # cooperative launches
            97: limits.smem_bytes,
            106: limits.blocks,
            111: gpu.RESERVED_SMEM_BYTES,
            115: 1,  # memory pools: cudaMallocAsync
            **{120: int(major >= 9), 127: int(major >= 9)},  # clusters, tensor maps
        }

    def device_attribute(self, number: int) -> list[int]:
        """cudaDeviceGetAttribute."""
        try:
            return [self._attributes()[number]]
        except KeyError:
            raise CudaError(
                NOT_SUPPORTED, f"attribute {number} of the device is not known to the simulator"
            ) from None

    def device_name(self) -> bytes:
        """cuDeviceGetName."""
        return self.name.encode()

    def check_device(self, ordinal: int) -> None:
        """cudaSetDevice: there is one device."""
        if ordinal:
            raise CudaError(INVALID_DEVICE, f"device {ordinal}: the simulator has device 0 only")
