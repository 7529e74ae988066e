"""Bundles: run in the simulator by their text, and by the program of examples/bundle."""

from __future__ import annotations

import functools
import math
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from driver_example import cuda_headers
from torch import Tensor

from flash_helpers.ptx import DeviceMemory, Kernel
from flash_helpers.ptx.run.memory.regions import ARENA_BASE
from flash_helpers.ptx.tensor_map import TensorMap

FOLDER = Path(__file__).resolve().parents[2] / "examples/bundle"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MAP_TYPES = {6: "f16", 9: "bf16", 7: "f32", 3: "s32"}  # as cuda.h numbers them
_SWIZZLES = ("none", "32B", "64B", "128B")
_PROMOTIONS = ("none", "64B", "128B", "256B")
_ANYTHING = b"\xff"  # NaN, or -1


def bytes_of(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


@dataclass
class Ran:
    """A run. outputs: by name. launches: names of the kernels, in order. arena, weights: bytes."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    launches: list[str] = field(default_factory=list)
    arena: int = 0
    weights: int = 0
    tensor_maps: int = 0
    on_side: int = 0  # launches


def simulated(
    text: str,
    weights: bytes,
    kernel_of: Callable[[str], Kernel],
    inputs: Mapping[str, Tensor],
    *,
    late: bool = False,
) -> Ran:
    """Run a bundle. kernel_of: returns a kernel by its name. late: launches of the second stream
    run when the first one waits for them, instead of at once."""
    found, memory = Ran(), DeviceMemory()
    addresses: dict[str, int] = {}
    kernels: list[tuple[str, int, int]] = []
    outputs: list[tuple[str, torch.dtype, int, list[int]]] = []
    is_side = False
    waiting: list[Callable[[], None]] = []
    lines = iter(text.splitlines())
    for line in lines:
        word, *words = line.split()
        numbers = [int(x) for x in words if x.lstrip("-").isdigit()]
        if word == "arena":
            (found.arena,) = numbers
            addresses[word] = memory.upload(np.frombuffer(_ANYTHING * found.arena, np.uint8))
        elif word in ("weights", "zeros"):
            content = weights if word == "weights" else bytes(numbers[0])
            assert len(content) == numbers[0]
            if content:
                addresses[word] = memory.upload(np.frombuffer(content, np.uint8))
            found.weights += len(weights) * (word == "weights")
        elif word in ("input", "output"):
            name, dtype, size, rank, *shape = words
            given = bytes_of(inputs[name]) if word == "input" else _ANYTHING * int(size)
            assert len(given) == int(size) == math.prod(map(int, shape)) * _DTYPES[dtype].itemsize
            assert len(shape) == int(rank)
            addresses[f"{word}:{name}"] = memory.upload(np.frombuffer(given, np.uint8))
            if word == "output":
                outputs.append((name, _DTYPES[dtype], int(size), [*map(int, shape)]))
        elif word == "kernel":
            kernels.append((words[0], *map(int, words[2:])))
        elif word == "zero":
            begin = addresses[words[0]] + numbers[0] - ARENA_BASE
            memory.words(1)[begin : begin + numbers[1]] = 0
        elif word == "launch":
            details = [next(lines) for _ in range(numbers[9] + numbers[10])]
            run = functools.partial(
                _launch, words, details, addresses, kernels, kernel_of, memory, found
            )
            if is_side:
                found.on_side += 1
                waiting.append(run)
            else:
                run()
        elif word in ("side", "main"):
            is_side = word == "side"
        if not late or word == "join":
            for run in waiting:
                run()
            waiting.clear()
    assert not waiting
    for name, dtype, size, shape in outputs:
        content = memory.download(addresses[f"output:{name}"], size, np.dtype(np.uint8))
        found.outputs[name] = torch.from_numpy(content.copy()).view(dtype).view(shape)
    return found


def _launch(words, details, addresses, kernels, kernel_of, memory, found) -> None:
    number, *blocks, programmatic, size, _, _, digits = words
    name, block, shared = kernels[int(number)]
    found.launches.append(name)
    grid, cluster = ([*map(int, blocks[i : i + 3])] for i in (0, 3))
    arguments = bytearray.fromhex(digits)
    assert len(arguments) == int(size)
    for line in details:
        kind, member, buffer, *numbers = line.split()
        at, offset = int(member), int(numbers[0])
        address = addresses[buffer] + offset
        found.tensor_maps += kind == "map"
        if kind == "address":
            content = address.to_bytes(8, "little")
        else:
            data_type, swizzle, promotion, rank, *sizes = map(int, numbers[1:])
            dims, strides, box = sizes[:rank], sizes[rank : 2 * rank - 1], sizes[2 * rank - 1 :]
            content = TensorMap(
                *(_MAP_TYPES[data_type], address, tuple(dims), tuple(box), tuple(strides)),
                swizzle=_SWIZZLES[swizzle],
                l2_promotion=_PROMOTIONS[promotion],
            ).encode()
        assert not any(arguments[at : at + len(content)])
        arguments[at : at + len(content)] = content
    kernel_of(name).launch(
        grid,
        block,
        shared,
        [bytes(arguments)],
        memory,
        cluster=cluster if math.prod(cluster) > 1 else None,
        programmatic=programmatic == "1",
        strict_barriers=True,
    )


def compiled_program(folder: Path) -> Path:
    """The program of examples/bundle. Skips the test without g++ or cuda.h."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no g++")
    program = folder / "run"
    command = [compiler, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror"]
    command += ["-isystem", str(cuda_headers()), str(FOLDER / "run.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    return program
