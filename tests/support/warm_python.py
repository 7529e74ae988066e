"""A Python whose programs do not wait for torch: each runs in a fork of a process that has imported
it. For tests that run the repository's tools as a reader does; what a program imports by itself,
and how it starts, it does not show.

The file is run as both: `serve` is the process that forks, `python` in its folder the client, which
hands over its words, folder, environment and streams, and ends as the program does.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOCKET = "socket"
CLIENT = '#!/bin/sh\nexec "{python}" -I -S "{file}" client "{folder}" "$@"\n'
LARGEST = 1 << 17  # bytes of a message: mostly the environment


@contextlib.contextmanager
def warm_python(folder: Path) -> Iterator[Path]:
    """Start the process that forks; yield the program `python`, in `folder`."""
    program = folder / "python"
    program.write_text(CLIENT.format(python=sys.executable, file=__file__, folder=folder))
    program.chmod(0o755)
    command = [sys.executable, __file__, "serve", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        try:
            yield program
        finally:
            server.terminate()


def serve(folder: str) -> None:
    """Fork for each client. Returns in a fork, whose program is then to run."""
    import torch  # noqa: F401

    gc.freeze()  # forks share these pages of memory as long as no process writes to them
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"{folder}/{SOCKET}")
        listening.listen()
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, _reap)
        while True:
            client, _ = listening.accept()
            if os.fork() == 0:
                break
            client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, streams, *_ = socket.recv_fds(client, LARGEST, 3)
    if program := os.fork():
        _, status = os.waitpid(program, 0)
        client.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    client.close()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    words, where, environment = json.loads(message)
    os.chdir(where)
    os.environ.clear()
    os.environ.update(environment)
    own = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.argv, sys.path[:1] = words, own  # instead of this file's folder


def _reap(*_: object) -> None:
    """Wait for what has ended, so that its time counts."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run() -> None:
    """Run the program that the words of the command line name, as `python` does."""
    import runpy

    first = sys.argv[0]
    if first == "-m":
        sys.argv = sys.argv[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        text = sys.argv.pop(1)
        sys.path.insert(0, "")
        exec(text, {"__name__": "__main__"})
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))  # noqa: PTH100, PTH120
        runpy.run_path(first, run_name="__main__")


def client(folder: str, words: list[str]) -> int:
    """Have a program run; return its exit status, or end by its signal."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(f"{folder}/{SOCKET}")
        message = json.dumps([words, str(Path.cwd()), dict(os.environ)])
        socket.send_fds(server, [message.encode()], [0, 1, 2])
        status = int(server.recv(16) or -signal.SIGKILL)
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    if sys.argv[1] == "client":
        sys.exit(client(sys.argv[2], sys.argv[3:]))
    serve(sys.argv[2])
    run()
