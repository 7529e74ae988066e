"""A Python that has imported what commands begin with, and forks itself for each that is asked for.

A page's commands start Python some hundred times, and most of them would take longer to import
torch than for their work. Under the variables that `warm_python` gives, every Python runs GREETING
first, as its sitecustomize: it hands its arguments, folder, environment and files to the one that
waits, and ends as the fork ends that runs in its place. The fork is killed with it. What is asked
for otherwise than as a file, -c or -m, or when nobody waits, runs as ever.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

from flash_helpers.runtime.library import library_path
from flash_helpers.sass.read.reader import list_kernels

ADDRESS = "WARM_PYTHON"
PRELOADED = (
    "torch",
    "flash_helpers.check.sanity",
    "flash_helpers.measure.kernel_profile",
    "flash_helpers.sass.show.report_text",
)
GREETING = f"""\
import json, os, socket, sys
if len(sys.orig_argv) > 1 and (sys.orig_argv[1] in ("-c", "-m") or sys.orig_argv[1][0] != "-"):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as warm:
        try:
            warm.connect(os.environ["{ADDRESS}"])
        except OSError:
            pass
        else:
            asked = json.dumps([sys.orig_argv[1:], os.getcwd(), dict(os.environ)]).encode()
            socket.send_fds(warm, [asked], [0, 1, 2])
            os._exit(int(warm.recv(8) or b"70"))
"""
_LONGEST_REQUEST = 1 << 17  # bytes


@contextmanager
def warm_python(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment with variables under which Python is warm, while the context lasts."""
    with tempfile.TemporaryDirectory(prefix="python-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(GREETING)
        address = str(Path(folder) / "socket")
        server = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve({address!r})"],
            env=dict(environment),
            stdin=subprocess.PIPE,
            start_new_session=True,  # what the keyboard interrupts is who waits
        )
        path = os.pathsep.join(filter(None, (folder, environment.get("PYTHONPATH"))))
        try:
            yield {**environment, "PYTHONPATH": path, ADDRESS: address}
        finally:
            server.communicate()


def serve(address: str) -> None:
    """Answer requests, each by a fork, until stdin ends."""
    sys.path.remove("")  # the folder of this process
    for name in PRELOADED:
        importlib.import_module(name)
    with contextlib.suppress(RuntimeError, ValueError):  # who asks is told better
        list_kernels(library_path())  # what it has parsed of the library, it keeps
    gc.freeze()
    fork, running = get_context("fork"), {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        while True:
            ready = wait([0, listener, *running, *(p.sentinel for p in running.values())])
            if 0 in ready:
                break
            for asker, process in list(running.items()):
                if process.sentinel in ready:
                    process.join()
                    with contextlib.suppress(OSError):
                        asker.send(str(process.exitcode % 256).encode())
                elif asker in ready:  # who asked is no more
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    continue
                running.pop(asker).join()
                asker.close()
            if listener in ready:
                asker, _ = listener.accept()
                request, files, *_ = socket.recv_fds(asker, _LONGEST_REQUEST, 3)
                running[asker] = fork.Process(target=_run, args=(*json.loads(request), files))
                running[asker].start()
                for file in files:
                    os.close(file)


def _run(arguments: list[str], folder: str, environment: dict[str, str], files: list[int]) -> None:
    """What `python` does with these arguments."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdin = open(0)  # noqa: SIM115, multiprocessing took it away
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, folder)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
