"""Runs PTX snippets with mbarriers and bulk copies."""

import itertools

import numpy as np
from ptx_snippets import entry

from flash_helpers.ptx import DeviceMemory, Run, TensorMap, load_ptx

DECLARATIONS = """
.shared .align 1024 .b8 smem[8192];
.shared .align 8 .b64 bar[8];
.reg .pred %p<8>;
.reg .b16 %h<4>;
.reg .b32 %r<40>;
.reg .b64 %rd<16>;
.reg .b32 %tid, %lane, %warp;
"""
_PARAMETERS = ".param .align 64 .b8 map[128], .param .u64 global_in, .param .u64 global_out"
_START = """
mov.u32 %tid, %tid.x;
and.b32 %lane, %tid, 31;
shr.u32 %warp, %tid, 5;
ld.param.u64 %rd0, [global_in];
ld.param.u64 %rd1, [global_out];
mov.b64 %rd2, map;
cvta.param.u64 %rd2, %rd2;
setp.eq.u32 %p0, %tid, 0;
"""
"""%rd0, %rd1: input and output. %rd2: the tensor map. %p0: thread 0. %p1, %p2, %r0 ... are free."""

_labels = itertools.count()
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
LOAD_BYTES = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _,"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _,"
INIT = "mbarrier.init.shared::cta.b64"
BARRIER_INITS = "fence.mbarrier_init.release.cluster;"


def wait(barrier: str, parity: str | int, how: str = "try_wait") -> str:
    """Until the phase of a parity is complete."""
    label = f"WAIT{next(_labels)}"
    return (
        f"{label}: mbarrier.{how}.parity.shared::cta.b64 %p7, [{barrier}], {parity};\n"
        f"@!%p7 bra {label};\n"
    )


def run(
    body: str,
    data: np.ndarray | None = None,
    box: tuple[int, ...] = (32, 4),
    results: int = 1024,
    grid: int = 1,
    block: int = 64,
    declarations: str = "",
    tensor_map: TensorMap | None = None,
    target: str = "sm_80",
    **options: object,
) -> tuple[Run, np.ndarray]:
    """Runs a kernel; its run, and the uint32 words of the output.

    data: the input, of which the tensor map has boxes of a size; (64, 32) float32 if None. target:
    the target of the text.
    """
    memory = DeviceMemory()
    if data is None:
        data = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    start, out = memory.upload(data), memory.upload(np.zeros(results, np.uint32))
    if tensor_map is None:
        row_bytes = data.shape[-1] * data.itemsize
        tensor_map = TensorMap("f32", start, data.shape[::-1], box, (row_bytes,))
    text = entry(_START + body, _PARAMETERS, DECLARATIONS + declarations)
    kernel = load_ptx(text.replace("sm_80", target)).kernel("k")
    args = [tensor_map.encode(), start, out]
    found = kernel.launch(grid, block, args=args, memory=memory, **options)
    return found, memory.download(out, results, np.uint32)


def with_fault(body: str, right: str, wrong: str) -> str:
    """A kernel with a line of it changed."""
    assert body.count(right) == 1, (body.count(right), right)
    return body.replace(right, wrong)
