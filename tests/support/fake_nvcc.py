#!/usr/bin/env python3
"""Stands in for nvcc: the same files in the same places, in milliseconds and on any machine.

A source that says FAIL, or whose name matches FAKE_FAILS, does not compile; one that says SLEEP
takes a minute, and PAUSE a moment; one that says MEET waits until two of its kind have begun; ptxas
repeats the line of one that says PTXAS. The environment gives what it reports (FAKE_CUDA,
FAKE_ARCHITECTURES) and where it notes what it did (FAKE_LOG).

With --first-use it stands in for the compilers of kernels at first use, and writes the ELF file of
one kernel. The machine code depends on all of the config but the fragment loads of Q, K and V; a
kernel whose name matches FAKE_SPILLS spills. It has no room in folders below FAKE_FULL.
"""

import os
import re
import sys
import time
import zlib
from pathlib import Path

from fake_cubin import cubin


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


def read_unit(source):
    note(source.stem)
    folders = [Path(argument[2:]) for argument in sys.argv if argument.startswith("-I")]
    inputs = closure(source, folders, [])
    text = "".join(path.read_text() for path in inputs)
    if "SLEEP" in text:
        import subprocess  # others start in half the time without it

        sleeper = subprocess.Popen(["sleep", "60"])
        note(f"sleeper {sleeper.pid}")
        sleeper.wait()
    if "PAUSE" in text:
        time.sleep(0.3)
    if "MEET" in text:
        meet()
    fails = "FAKE_FAILS" in os.environ and re.search(os.environ["FAKE_FAILS"], source.stem)
    if fails or "FAIL" in text:
        print(f"{source}(1): error: FAIL is not C++")
        sys.exit(1)
    return inputs, text


def meet():
    note("here")
    deadline = time.monotonic() + 60
    while Path(os.environ["FAKE_LOG"]).read_text().count("here") < 2:
        if time.monotonic() > deadline:
            sys.exit("no other came")
        time.sleep(0.01)


def tell(text):
    for line in re.findall("PTXAS (.*)", text):
        print(f"ptxas info    : {line}")


def compile_at_first_use():
    source, target, scratch, writes = Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5]
    if "FAKE_FULL" in os.environ and scratch.is_relative_to(os.environ["FAKE_FULL"]):
        sys.exit(f"{scratch}: No space left on device")
    _, text = read_unit(source)
    tell(text)
    name = source.stem
    version = name.partition("_")[0]
    namespace = f"{len(version)}{version}"
    symbol = f"_ZN{namespace}14forward_kernelI{len(name)}{name}EEv17ForwardKernelArgs"
    # neither the name nor the loads of the fragments are in the code
    unnamed = re.sub(rf"{name}|\.[QKV]_mma_load_K_tiles = \d+", "", text)
    (scratch / "kernel.ptx").write_text(
        f"// {zlib.crc32(unnamed.encode())}\n.visible .entry {symbol}()\n"
    )
    if target.startswith("compute_") or "kernel.cubin" not in writes:
        return 0
    spills = "FAKE_SPILLS" in os.environ and re.search(os.environ["FAKE_SPILLS"], name)
    stores, loads = (24, 32) if spills else (0, 0)
    print(f"ptxas info    : Compiling entry function '{symbol}' for '{target}'")
    print(f"ptxas info    : Function properties for {symbol}")
    print(f"    0 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads")
    print("ptxas info    : Used 168 registers, used 1 barriers")
    (scratch / "kernel.cubin").write_bytes(cubin(symbol, unnamed.encode(), registers=168))
    return 0


def compile_unit():
    source = Path(after("-fatbin" if "-fatbin" in sys.argv else "-c"))
    inputs, text = read_unit(source)
    keep = Path(after("--keep-dir"))
    Path(after("-MF")).write_text(f"{after('-MT')} : {' '.join(map(str, inputs))}\n")
    codes = [arg for arg in sys.argv if arg.startswith("arch=")]
    for code in codes:
        number = re.search(r"arch=compute_(\d+)", code)[1]
        middle = f".compute_{number}" if len(codes) > 1 else ""
        ptx = f'.target sm_{number}\n.file 1 "{Path.cwd()}/./previous_kernels/v1/kernel.cuh"\n'
        ptx += f".visible .entry {source.stem}_symbol()\n"
        (keep / f"{source.stem}{middle}.ptx").write_text(ptx)
        for machine in re.findall(r"sm_\w+", code):
            print(f"ptxas info    : Compiling entry function 'k' for '{machine}'")
    tell(text)
    Path(after("-o")).write_text("\n".join([text, *codes]))
    return 0


def link():
    note("link")
    given = [Path(argument) for argument in sys.argv if argument.endswith((".o", ".cpp"))]
    text = "".join(path.read_text() for path in given)
    embedded = re.findall(r'\.incbin "(.*)"', text)
    Path(after("-o")).write_text(text + "".join(Path(name).read_text() for name in embedded))
    return 0


def main():
    if "--version" in sys.argv:
        print(f"Cuda compilation tools, release {os.environ.get('FAKE_CUDA', '13.0')}, V0")
        return 0
    if "--list-gpu-arch" in sys.argv:
        architectures = os.environ.get("FAKE_ARCHITECTURES", "75 80 86 89 90")
        print("\n".join(f"compute_{number}" for number in architectures.split()))
        return 0
    if "--first-use" in sys.argv:
        return compile_at_first_use()
    return link() if "-shared" in sys.argv else compile_unit()


if __name__ == "__main__":
    sys.exit(main())
