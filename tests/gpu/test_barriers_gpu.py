"""Barriers with a thread count, on the GPU and in the simulator."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from flash_helpers.ptx import DeviceMemory, load_ptx
from flash_helpers.runtime.driver import LoadedKernel

pytestmark = pytest.mark.gpu

THREADS = 96
# The code of warp 0, then those of warps 1 and 2 behind the labels ONE and TWO.
BODIES = {
    "a warp that arrives and then waits counts twice": "bar.arrive 1, 64; bar.sync 1, 64; bra END;"
    "ONE: bra END; TWO: bra END;",
    "the same, where the count is that of the block": "bar.arrive 1, 96; bar.arrive 2, 64;"
    "bar.sync 1, 96; bra END; ONE: bar.sync 2, 64; bar.arrive 1, 96; bra END; TWO: bra END;",
    "warps that meet at different places": "bar.sync 1, 96; bar.sync 2, 64; bra END;"
    "ONE: bar.sync 1, 96; bar.sync 2, 64; bra END; TWO: bar.arrive 1, 96; bra END;",
}
TEXT = """.version 8.7
.target sm_90
.address_size 64
.visible .entry k(.param .u64 pointer)
{{
.reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .pred %p<4>;
ld.param.u64 %rd0, [pointer];
mov.u32 %r0, %tid.x;
setp.ge.u32 %p1, %r0, 64;
@%p1 bra TWO;
setp.ge.u32 %p1, %r0, 32;
@%p1 bra ONE;
{body}
END:
add.u32 %r1, %r0, 1;
mul.wide.u32 %rd1, %r0, 4;
add.u64 %rd1, %rd1, %rd0;
st.global.u32 [%rd1], %r1;
ret;
}}
"""
WANTED = np.arange(1, THREADS + 1)


def simulated(text: str) -> np.ndarray:
    memory = DeviceMemory()
    out = memory.upload(np.zeros(THREADS, np.uint32))
    load_ptx(text).kernel("k").launch(1, THREADS, args=[out], memory=memory, target="sm_90")
    return memory.download(out, (THREADS,), np.uint32)


def on_gpu(text: str) -> np.ndarray:
    out = torch.zeros(THREADS, dtype=torch.int32, device="cuda")
    kernel = LoadedKernel(text.encode(), "k", 0)
    kernel.start((1, 1, 1), THREADS, [struct.pack("<Q", out.data_ptr())])
    return out.cpu().numpy()


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_all_threads_pass(body: str) -> None:
    text = TEXT.format(body=body)
    assert (simulated(text) == WANTED).all()
    assert (on_gpu(text) == WANTED).all()
