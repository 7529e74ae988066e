"""Running a host program from its start to its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.compile.toolchain import (
    PYPI_TOOLCHAIN,
    BuildError,
    find_nvcc,
    find_toolchain,
)
from flash_helpers.console.file_kinds import FileKind, kind_of
from flash_helpers.host.device import SimulatedDevice
from flash_helpers.host.errors import HostError
from flash_helpers.host.launches import FinishedLaunch, LaunchFault, Options
from flash_helpers.host.memory import SharedMemory
from flash_helpers.host.program import check_functions, check_program, compiled
from flash_helpers.host.session import Session
from flash_helpers.host.stub_library import stub_library
from flash_helpers.host.wire import Connection
from flash_helpers.ptx.run.memory.regions import ARENA_BASE

LINK_VARIABLE = "FLASH_HELPERS_HOST_LINK"
"""Tells the stub its socket, the file of device memory, and the address of that file's begin."""

CHECK_FAILED = 1


@dataclass(frozen=True)
class Ended:
    """A program that has run. `status`: its exit status as a shell has it; 1 if it ended well but a
    call was refused or a launch was at fault."""

    status: int
    launches: tuple[FinishedLaunch, ...]


def run_program(
    file: Path,
    arguments: Sequence[str],
    target: str,
    options: Options,
    nvcc_options: Sequence[str] = (),
    own_output: int | None = None,
) -> Ended:
    """Runs a .cu file or a program. Faults and refused calls are told on stderr.

    `target`: the GPU, such as sm_90a, for whose PTX a .cu file is compiled. `own_output`: file
    descriptor of the program's standard output, if not this process's.

    Raises HostError for a file that cannot be run.
    """
    device = SimulatedDevice(target)
    try:
        if find_nvcc(os.environ) is None:
            packages = " ".join(map(repr, PYPI_TOOLCHAIN))
            raise HostError(
                "no nvcc in CUDA_HOME, on PATH or from PyPI: install a CUDA toolkit, or\n"
                f"python -m pip install {packages}"
            )
        toolchain = find_toolchain((device.capability,))
    except BuildError as error:
        raise HostError(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="flash_helpers_") as name:
        folder = Path(name)
        is_source = file.suffix == ".cu" or _is_cuda(file)
        if not is_source:
            check_program(file, toolchain)
        stub = stub_library(toolchain, folder)
        if is_source:
            file = compiled(file, target, nvcc_options, toolchain, stub, folder)
        else:
            check_functions(file, stub)
        memory = SharedMemory()
        try:
            session = Session(device, memory, folder, options)
            status = _run([file.resolve(), *arguments], stub, memory, session, own_output)
        finally:
            memory.close()
    faulty = session.refused or any(launch.n_faults for launch in session.launches.finished)
    return Ended(status or (CHECK_FAILED if faulty else 0), tuple(session.launches.finished))


def _is_cuda(file: Path) -> bool:
    try:
        return kind_of(file.read_bytes()) is FileKind.CUDA
    except OSError as error:
        raise HostError(f"{file}: {error.strerror}") from None


def _run(
    command: Sequence[str | Path],
    stub: Path,
    memory: SharedMemory,
    session: Session,
    own_output: int | None,
) -> int:
    """Starts the program, serves it, and returns its exit status."""
    here, there = socket.socketpair()
    libraries = [str(stub), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    with here:
        with there:
            process = subprocess.Popen(
                command,
                stdout=own_output,
                pass_fds=(there.fileno(), memory.file),
                env={
                    **os.environ,
                    "LD_LIBRARY_PATH": ":".join(libraries),
                    LINK_VARIABLE: f"{there.fileno()},{memory.file},{ARENA_BASE}",
                },
            )
        try:
            session.serve(Connection(here))
            status = process.wait()
        except LaunchFault as fault:
            print(fault, file=sys.stderr)
            status = CHECK_FAILED
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if status < 0:
        name = signal.Signals(-status).name
        print(f"the program was ended by {name}", file=sys.stderr)
        return 128 - status
    return status
