"""A module's forward as a bundle: its kernels chosen, its memory planned, its files written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flash_helpers import gpu
from flash_helpers.compile.jit import default_jit, units_of
from flash_helpers.console.files import replaced_file
from flash_helpers.export.bundle import (
    ARENA,
    WEIGHTS,
    ZEROS,
    Bundle,
    Change,
    Place,
    PlacedLaunch,
    Port,
    Step,
    Zeroing,
)
from flash_helpers.export.command import check_target
from flash_helpers.export.memory_plan import Use, aligned, placed
from flash_helpers.export.recording import RecordedCall, Recording, recorded, storage_of
from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import Config
from flash_helpers.registry.call import Call
from flash_helpers.registry.problem import Problem
from flash_helpers.runtime import library
from flash_helpers.runtime.tensors import check_problem, check_strides, gpu_device
from flash_helpers.tune.best import config_for

DESCRIPTION = "bundle.txt"
# Part of the memory that outputs of calls on a second stream may take, which all live long.
_SIDE_SHARE = 4


@dataclass(frozen=True)
class _Chosen:
    """A recorded call, and the launches of the config that computes it. `alignment`: bytes, the
    most that one of its tensors needs."""

    recorded: RecordedCall
    config: Config
    call: Call
    alignment: int

    @property
    def read(self) -> set[int]:
        """Storages that the kernels read."""
        return {*map(storage_of, self.recorded.read)}

    @property
    def written(self) -> set[int]:
        """Storages that the kernels write."""
        return {*map(storage_of, self.recorded.written)}


def device_of(target: str, sms: int | None) -> Device:
    """Return the GPU that launches are made for: the one of this machine, where it has the target's
    compute capability, else the largest that has. sms: its number of streaming multiprocessors, if
    it has another.

    Raises ValueError for a target of which that number is not known.
    """
    capability = gpu.capability_of(target)
    if torch.cuda.is_available():
        own = gpu_device(torch.cuda.current_device())
        if own.capability == divmod(capability, 10) and sms in (None, own.sms):
            return own
    if sms is None and capability not in gpu.MOST_SMS:
        raise ValueError(
            f"the streaming multiprocessors of a GPU of {target} are not known: pass sms"
        )
    found = gpu.largest_device(capability) if capability in gpu.MOST_SMS else None
    if found is not None and sms in (None, found.sms):
        return found
    assert sms is not None
    return Device(target, divmod(capability, 10), sms)


def _config_on(problem: Problem, device: Device) -> Config:
    """Return the config that computes a problem on a GPU: the one that a call takes, or where none
    was measured the newest. Raises ValueError if there is none."""
    try:
        return config_for(problem, device)
    except (RuntimeError, ValueError) as error:
        newest = sorted(
            (c for c in library.kernels() if c.family.runs_on(device.capability)),
            key=lambda config: (config.family.rank, config.step.number),
            reverse=True,
        )
        for config in newest:
            if not config.refusal(problem):
                return config
        raise ValueError(str(error)) from error


def _chosen(call: RecordedCall, device: Device, target: str) -> _Chosen:
    try:
        config = _config_on(call.problem, device)
        check_target(config, target)
        problem = check_problem(config, call.tensors, **call.options)
        strides = {**problem.strides(), **check_strides(config, problem, call.tensors)}
    except ValueError as error:
        where = f" of module {call.where}" if call.where else ""
        raise ValueError(f"{call.problem.operation}{where}: {error}") from error
    launches = config.call(problem, strides, device)
    if call.wanted is not None:
        launches = launches.of_outputs(call.wanted)
    alignments = {t.name: config.supports.alignment_of(t) for t in problem.tensors}
    for name, x in call.tensors.items():
        if _offset(x) % alignments[name]:
            raise ValueError(
                f"{name} of {problem.operation} in module {call.where} begins {_offset(x)} bytes "
                f"behind its memory, not a multiple of {alignments[name]}: give it memory of its "
                "own"
            )
    return _Chosen(call, config.runs_as(strides), launches, max(alignments.values()))


def _offset(x: Tensor) -> int:
    return int(x.storage_offset()) * x.element_size()


def _needed(calls: Sequence[_Chosen], outputs: set[int]) -> list[_Chosen]:
    """Return the calls that something reads: outputs of the module, or another of these."""
    read, found = set(outputs), []
    for call in reversed(calls):
        if call.written & read:
            read |= call.read
            found.append(call)
    return found[::-1]


@dataclass(frozen=True)
class _Order:
    """Calls in the order of their launches. `side`: number of the first ones that are on a second
    stream. `join`: number of the call before which the first stream waits for them."""

    calls: Sequence[_Chosen]
    side: int = 0
    join: int = 0

    @property
    def side_bytes(self) -> int:
        """Bytes of the outputs on the second stream."""
        outputs = (x for call in self.calls[: self.side] for x in call.recorded.written)
        return sum(x.untyped_storage().nbytes() for x in outputs)


def _side_by_side(calls: Sequence[_Chosen]) -> _Order:
    """Return an order in which calls that read no output of another one run beside the others: the
    layers of a condition, of which each block has one."""
    written = {storage for call in calls for storage in call.written}
    free = [call for call in calls[1:] if not call.read & written and not call.call.buffers]
    others = (call for call in calls if not any(call is other for other in free))
    ordered = [*free, *others]
    outputs = {storage for call in free for storage in call.written}
    waiting = (n for n, call in enumerate(ordered) if call.read & outputs)
    return _Order(ordered, len(free), next(waiting, len(ordered)))


def _ports(tensors: Mapping[str, Tensor]) -> list[Port]:
    return [
        Port(
            name,
            str(x.dtype).removeprefix("torch."),
            x.numel() * x.element_size(),
            tuple(x.shape),
        )
        for name, x in tensors.items()
    ]


def _check_outputs(recording: Recording, calls: Sequence[_Chosen]) -> None:
    """Raises ValueError for an output that is no whole tensor which a kernel writes."""
    written = {storage for call in calls for storage in call.written}
    seen: dict[int, str] = {}
    if not recording.outputs:
        raise ValueError("forward returns no tensor: a bundle has one output at least")
    for name, x in recording.outputs.items():
        storage = storage_of(x)
        if storage not in written:
            raise ValueError(
                f"{name} is an input or a constant, which no kernel writes: return the others alone"
            )
        if storage in seen:
            raise ValueError(f"{name} and {seen[storage]} share memory: return one of them")
        seen[storage] = name
        if not x.is_contiguous() or x.untyped_storage().nbytes() != x.numel() * x.element_size():
            raise ValueError(
                f"{name} is a part of a tensor, of shape {tuple(x.shape)} and strides {x.stride()}:"
                " return the whole tensor, and take the part of it behind the bundle"
            )


class _Memory:
    """The places of all storages and buffers of calls."""

    def __init__(self, recording: Recording, order: _Order) -> None:
        self._order, calls = order, order.calls
        self._places: dict[int, Place] = {}
        for kind, tensors in (("input", recording.inputs), ("output", recording.outputs)):
            for name, x in tensors.items():
                self._places[storage_of(x)] = Place(f"{kind}:{name}")
        self.weights: list[tuple[int, torch.UntypedStorage]] = []
        self.weights_bytes = 0
        self._place_weights(calls)
        self.arena_bytes, self.zeros_bytes = 0, 0
        self._buffers: dict[tuple[int, str], Place] = {}
        self._place_others(calls)

    def _place_weights(self, calls: Sequence[_Chosen]) -> None:
        written = {storage for call in calls for storage in call.written}
        for call in calls:
            for x in call.recorded.read:
                storage = storage_of(x)
                if storage in self._places or storage in written:
                    continue
                self._places[storage] = Place(WEIGHTS, self.weights_bytes)
                self.weights.append((self.weights_bytes, x.untyped_storage()))
                self.weights_bytes += aligned(x.untyped_storage().nbytes())

    def _place_others(self, calls: Sequence[_Chosen]) -> None:
        uses: dict[int | tuple[int, str], Use] = {}
        for number, call in enumerate(calls):
            # on the second stream it runs at any time until the first one waits
            last = self._order.join if number < self._order.side else number
            for x in (*call.recorded.written, *call.recorded.read):
                storage = storage_of(x)
                if storage not in self._places:
                    before = uses.get(storage, Use(0, number, last))
                    size = x.untyped_storage().nbytes()
                    uses[storage] = Use(size, before.first, max(before.last, last))
            for buffer in call.call.buffers:
                if buffer.left_zeroed:
                    self._buffers[number, buffer.name] = Place(ZEROS)
                    self.zeros_bytes = max(self.zeros_bytes, aligned(buffer.bytes))
                else:
                    uses[number, buffer.name] = Use(buffer.bytes, number, number)
        offsets, self.arena_bytes = placed([*uses.values()])
        for key, offset in zip(uses, offsets, strict=True):
            if isinstance(key, tuple):
                self._buffers[key] = Place(ARENA, offset)
            else:
                self._places[key] = Place(ARENA, offset)

    def steps(self) -> list[Step]:
        """Return what the calls do, in order."""
        order = self._order
        found: list[Step] = [Change.SIDE] if order.side else []
        for number, call in enumerate(order.calls):
            if order.side:
                found += [Change.MAIN] * (number == order.side)
                found += [Change.JOIN] * (number == order.join)
            places = {
                name: self._places[storage_of(x)].behind(_offset(x))
                for name, x in call.recorded.tensors.items()
            }
            for buffer in call.call.buffers:
                own = places[buffer.name] = self._buffers[number, buffer.name]
                if buffer.zeroed and not buffer.left_zeroed:
                    found.append(Zeroing(own, buffer.bytes))
            found += [PlacedLaunch(launch, places) for launch in call.call.launches]
        if order.side and order.join == len(order.calls):
            found.append(Change.JOIN)
        return found


def planned(
    recording: Recording, target: str, device: Device
) -> tuple[Bundle, list[tuple[int, torch.UntypedStorage]]]:
    """Return the bundle of a recording, and the storages of weights.bin with their offsets.

    Raises ValueError for a call without a kernel on the device, and for outputs that no kernel
    writes as a whole.
    """
    every = [_chosen(call, device, target) for call in recording.calls]
    _check_outputs(recording, every)
    calls = _needed(every, {*map(storage_of, recording.outputs.values())})
    memory = _Memory(recording, _Order(calls))
    order = _side_by_side(calls)
    if order.side > 1 and order.side_bytes * _SIDE_SHARE <= memory.arena_bytes:
        memory = _Memory(recording, order)
    kernels = {
        launch.kernel: (call.config, _function(call.config, launch.kernel))
        for call in calls
        for launch in call.call.launches
    }
    bundle = Bundle(
        target,
        device.sms,
        math.lcm(*(call.alignment for call in calls)),
        memory.arena_bytes,
        memory.zeros_bytes,
        memory.weights_bytes,
        _ports(recording.inputs),
        _ports(recording.outputs),
        kernels,
        memory.steps(),
    )
    return bundle, memory.weights


def _function(config: Config, kernel: str) -> str:
    return next(function for function, name in config.kernels.items() if name == kernel)


def weights_bytes(bundle: Bundle, weights: Sequence[tuple[int, torch.UntypedStorage]]) -> bytes:
    """Return the content of weights.bin."""
    found = bytearray(bundle.weights_bytes)
    for offset, storage in weights:
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        found[offset : offset + storage.nbytes()] = flat.numpy().tobytes()
    return bytes(found)


def write_bundle(
    module: nn.Module,
    given: Sequence[object] | Mapping[str, object],
    target: str,
    folder: Path,
    sms: int | None = None,
) -> Path:
    """Write the bundle of a module on the CPU (`recorded`) into a folder, which is made if it does
    not exist; returns the path of its description, which is written last.

    target: of the machine code, such as sm_90a. sms: as for `device_of`.

    Raises ValueError as `recorded`, `device_of` and `planned` do, BuildError for a kernel that does
    not compile, and OSError that names the path.
    """
    device = device_of(target, sms)
    bundle, weights = planned(recorded(module, given), target, device)
    units = {unit.name: unit for config, _ in bundle.kernels.values() for unit in units_of(config)}
    compiled = default_jit().get([units[name] for name in bundle.kernels], target)
    folder.mkdir(exist_ok=True)
    files = {"weights.bin": weights_bytes(bundle, weights)}
    symbols = {}
    for name, found in zip(bundle.kernels, compiled, strict=True):
        files[f"{name}.cubin"] = found.cubin_path.read_bytes()
        files[f"{name}.ptx"] = found.ptx_path.read_bytes()
        symbols[name] = found.symbol
    files[DESCRIPTION] = bundle.text(symbols).encode()
    for name, data in files.items():
        with replaced_file(folder / name) as file:
            file.write(data)
    return folder / DESCRIPTION
