#!/usr/bin/env python3
"""Stands in for nvcc: the same files in the same places, in milliseconds and on any machine.

A source that says FAIL does not compile, and one that says SLEEP takes a minute. The environment
gives what it reports (FAKE_CUDA, FAKE_ARCHITECTURES) and where it notes what it did (FAKE_LOG).
"""

import os
import re
import subprocess
import sys
from pathlib import Path


def after(flag):
    return sys.argv[sys.argv.index(flag) + 1]


def closure(source, folders, seen):
    seen.append(source)
    for name in re.findall(r'#include "(.*)"', source.read_text()):
        found = next((f / name for f in folders if (f / name).is_file()), None)
        if found and found not in seen:
            closure(found, folders, seen)
    return seen


def note(text):
    if "FAKE_LOG" in os.environ:
        with Path(os.environ["FAKE_LOG"]).open("a") as log:
            log.write(f"{text}\n")


def compile_unit():
    source = Path(after("-c"))
    note(source.stem)
    folders = [Path(argument[2:]) for argument in sys.argv if argument.startswith("-I")]
    inputs = closure(source, folders, [])
    text = "".join(path.read_text() for path in inputs)
    if "SLEEP" in text:
        sleeper = subprocess.Popen(["sleep", "60"])
        note(f"sleeper {sleeper.pid}")
        sleeper.wait()
    if "FAIL" in text:
        print(f"{source}(1): error: FAIL is not C++")
        return 1
    listed = " \\\n    ".join(str(Path.cwd() / path) for path in inputs)
    Path(after("-MF")).write_text(f"object : {listed} \\\n    /usr/include/stdio.h\n")
    codes = [arg for arg in sys.argv if arg.startswith("arch=")]
    for code in codes:
        number = re.search(r"arch=compute_(\d+)", code)[1]
        middle = f".compute_{number}" if len(codes) > 1 else ""
        ptx = f'.target sm_{number}\n.file 1 "{Path.cwd()}/./previous_kernels/v1/kernel.cuh"\n'
        (Path(after("--keep-dir")) / f"{source.stem}{middle}.ptx").write_text(ptx)
        print(f"ptxas info    : Compiling entry function 'k' for 'sm_{number}'")
    Path(after("-o")).write_text("\n".join([text, *codes]))
    return 0


def link():
    note("link")
    objects = [argument for argument in sys.argv if argument.endswith(".o")]
    Path(after("-o")).write_text("".join(Path(name).read_text() for name in objects))
    return 0


def main():
    if "--version" in sys.argv:
        print(f"Cuda compilation tools, release {os.environ.get('FAKE_CUDA', '13.0')}, V0")
        return 0
    if "--list-gpu-arch" in sys.argv:
        architectures = os.environ.get("FAKE_ARCHITECTURES", "75 80 86 89 90")
        print("\n".join(f"compute_{number}" for number in architectures.split()))
        return 0
    return link() if "-shared" in sys.argv else compile_unit()


if __name__ == "__main__":
    sys.exit(main())
