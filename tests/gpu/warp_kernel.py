"""Kernels of a few instructions that run both on the GPU and in the simulator."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from flash_helpers.gpu import WARP
from flash_helpers.ptx import DeviceMemory, load_ptx
from flash_helpers.runtime.driver import LoadedKernel


@dataclass(frozen=True)
class WarpKernel:
    """A kernel of blocks of one warp, and its inputs.

    body: PTX between loads and stores. inputs: (registers, threads) words of 32 or 64 bits, which
    are in %<name>0, %<name>1, ... when the body begins; or bytes in memory, at %<name>. outputs:
    registers %d0, %d1, ..., which are stored when it has ended, and their bits. n_bytes: of memory
    that the body itself writes to, at %out, instead.
    """

    name: str
    body: str
    inputs: Mapping[str, np.ndarray]
    outputs: tuple[int, int] = (0, 32)
    n_bytes: int = 0

    @property
    def threads(self) -> int:
        return next((x.shape[1] for x in self.inputs.values() if x.ndim == 2), WARP)

    @property
    def out_bytes(self) -> int:
        count, bits = self.outputs
        return self.n_bytes or count * self.threads * bits // 8

    @property
    def word(self) -> str:
        """NumPy's name of an output's type."""
        return f"u{self.outputs[1] // 8}"

    @property
    def data(self) -> np.ndarray:
        """All inputs, one behind the other."""
        return np.concatenate([x.reshape(-1).view(np.uint8) for x in self.inputs.values()])

    def ptx(self) -> str:
        (count, bits), at = self.outputs, 0
        declared, loads = [f".reg .b{bits} %d<{max(count, 1)}>;"], []
        for name, x in self.inputs.items():
            own = f"b{8 * x.itemsize}"
            if x.ndim == 1:
                declared.append(f".reg .b64 %{name};")
                loads.append(f"add.u64 %{name}, %in, {at};")
            else:
                declared.append(f".reg .{own} %{name}<{len(x)}>;")
                loads.append(f"mad.wide.u32 %at, %thread, {x.itemsize}, %in;")
                for i, row in enumerate(x):
                    loads.append(f"ld.global.{own} %{name}{i}, [%at+{at + i * row.nbytes}];")
            at += x.nbytes
        stride = self.threads * bits // 8
        stores = [f"st.global.b{bits} [%at+{i * stride}], %d{i};" for i in range(count)]
        before, after = "\n".join([*declared, *loads]), "\n".join(stores)
        return f""".version 8.7\n.target sm_90\n.address_size 64
.visible .entry k(.param .align 8 .b8 pointers[16])
{{
.reg .b32 %lane, %thread; .reg .b64 %in, %out, %at;
ld.param.u64 %in, [pointers];
ld.param.u64 %out, [pointers+8];
mov.u32 %lane, %tid.x;
mov.u32 %thread, %ctaid.x;
mad.lo.u32 %thread, %thread, {WARP}, %lane;
{before}
{self.body}
mad.wide.u32 %at, %thread, {bits // 8}, %out;
{after}
ret;
}}
"""

    def on_gpu(self) -> np.ndarray:
        """(registers, threads) words of the output."""
        data = torch.from_numpy(self.data).cuda()
        out = torch.zeros(self.out_bytes, dtype=torch.uint8, device="cuda")
        kernel = LoadedKernel(self.ptx().encode(), "k", 0)
        arguments = struct.pack("<2Q", data.data_ptr(), out.data_ptr())
        kernel.start((self.threads // WARP, 1, 1), WARP, [arguments])
        return out.cpu().numpy().view(self.word).reshape(self.outputs[0] or 1, -1)

    def simulated(self) -> np.ndarray:
        """The same, of the simulator."""
        memory = DeviceMemory()
        out = memory.allocate(self.out_bytes)
        arguments = struct.pack("<2Q", memory.upload(self.data), out)
        kernel = load_ptx(self.ptx()).kernel("k")
        kernel.launch(self.threads // WARP, WARP, args=[arguments], memory=memory, target="sm_90")
        found = memory.download(out, self.out_bytes, np.uint8)
        return found.view(self.word).reshape(self.outputs[0] or 1, -1)


def vector(name: str, count: int) -> str:
    return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"
