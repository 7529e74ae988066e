"""The memory of a launch is freed when it returns, not when the garbage collector runs: shared
memory, registers and marks of one batch may be 20 MiB."""

import gc
import weakref

import pytest
from hopper_cases import CASES
from hopper_launches import launched, module_of
from ptx_snippets import entry

from flash_helpers.ptx import load_ptx
from flash_helpers.ptx.run.execute.scheduler import Scheduler


@pytest.fixture
def batches(monkeypatch):
    """Weak references to the parts of each batch that runs, while nobody collects garbage."""
    found = []
    original = Scheduler.__init__

    def begin(self, machine, *arguments, **options):
        original(self, machine, *arguments, **options)
        parts = (self, machine, machine.shared.data, *machine.register_files)
        found.extend(weakref.ref(part) for part in parts)

    monkeypatch.setattr(Scheduler, "__init__", begin)
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.parametrize(
    "name", ["gemm_cluster_bf16", "copy_bytes", "cluster_shift", "load_box 50"]
)
def test_of_hoppers_units(batches, name) -> None:
    case = CASES[name]
    run, _ = launched(case, module_of(case.module), lints=True, seed=1)
    assert run.counters.total.instructions
    assert batches and all(part() is None for part in batches)


@pytest.mark.parametrize("body", ["bar.sync 0;", "ld.shared.u32 %r0, [word];"])
def test_of_others(batches, body) -> None:
    text = entry(body, "", ".shared .align 4 .b32 word[1];\n.reg .b32 %r<2>;")
    load_ptx(text).kernel("k").launch(4, 64)
    assert batches and all(part() is None for part in batches)
