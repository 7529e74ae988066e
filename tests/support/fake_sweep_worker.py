"""Stands in for the process that a sweep measures in: the same lines, without a GPU.

FAKE_GPU is what it runs on, FAKE_CAPABILITY (9.0) what that can do, FAKE_DRIVER its driver. A
kernel's speed over the flash backend's is the first in FAKE_SPEEDS, a JSON list of (pattern,
ratio), whose pattern its name or "NAME at LENGTH" matches; 1 without one. A kernel whose name
matches FAKE_HANGS never ends, FAKE_CRASHES kills the process, FAKE_FAULTS is an error of the GPU,
FAKE_WRONG has a wrong output, FAKE_SPOILS makes the flash backend's wrong for as long as the
process lives. FAKE_LOG notes what was asked for.
"""

import json
import os
import re
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import msgspec

from flash_helpers.kernel_configs import AttentionForward, Element
from flash_helpers.measure.results import FLASH, Measurement
from flash_helpers.tune.process import Request, WorkerInfo

FLASH_TFLOPS = 300.0
FLOPS = 4 * 16 * 128  # of one head's row of length 1


def say(line):
    print(json.dumps(line), flush=True)


def note(text):
    if "FAKE_LOG" in os.environ:
        with Path(os.environ["FAKE_LOG"]).open("a") as log:
            log.write(f"{text}\n")


def matches(variable, name):
    return variable in os.environ and re.search(os.environ[variable], name)


def measurement(name, dtype, seq_len, tflops, failure):
    milliseconds = FLOPS * seq_len**2 / tflops / 1e9
    return Measurement(
        name=name,
        ran="" if name == FLASH else name,
        problem=AttentionForward(1, 16, seq_len, dtype=Element.from_name(dtype)).record(),
        input_sets=1,
        launches_per_sample=1,
        samples_ms=() if failure else (milliseconds,),
        max_abs_error=None,
        relative_error=None,
        max_abs_bound=None,
        relative_bound=None,
        failure=failure,
    )


def ratio(name, seq_len):
    speeds = json.loads(os.environ.get("FAKE_SPEEDS", "[]"))
    known = (name, f"{name} at {seq_len}")
    matching = (speed for pattern, speed in speeds if any(re.search(pattern, n) for n in known))
    return next(matching, 1.0)


def answer(request, spoilt):
    names = [kernel.config for kernel in request.configs]
    note(" ".join([*names, *map(str, request.sizes)]))
    for name in names:
        if matches("FAKE_HANGS", name):
            time.sleep(60)
        if matches("FAKE_CRASHES", name):
            print("a stray pointer", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if matches("FAKE_FAULTS", name):
            say({"error": "AcceleratorError: CUDA error: an illegal memory access"})
            sys.exit(1)
        spoilt |= bool(matches("FAKE_SPOILS", name))
    found = []
    dtype = names[0].split("_")[1]
    for seq_len in request.sizes:
        wrong = "wrong output" if spoilt else ""
        found.append(measurement(FLASH, dtype, seq_len, FLASH_TFLOPS, wrong))
        for name in names:
            wrong = "wrong output" if matches("FAKE_WRONG", name) else ""
            speed = FLASH_TFLOPS * ratio(name, seq_len)
            found.append(measurement(name, dtype, seq_len, speed, wrong))
    say({"measurements": [asdict(m) for m in found], "skipped": []})
    return spoilt


def main():
    if "FAKE_GPU" not in os.environ:
        say({"error": "no CUDA device was found"})
        return 1
    note("start")
    driver = os.environ.get("FAKE_DRIVER", "580.1")
    capability = os.environ.get("FAKE_CAPABILITY", "9.0")
    say(asdict(WorkerInfo(os.environ["FAKE_GPU"], capability, 227 * 1024, driver, "2.13.0")))
    spoilt = False
    for line in sys.stdin:
        spoilt = answer(msgspec.json.decode(line, type=Request), spoilt)
    return 0


if __name__ == "__main__":
    sys.exit(main())
