"""Kernels that make a tensor map of zeros, and copy one box with it."""

import struct
from dataclasses import dataclass

import numpy as np

from flash_helpers.ptx import DeviceMemory, TensorMap, load_ptx
from flash_helpers.ptx.run.memory.boxes import CHUNK, Box, shared_chunks

TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "", "f64", "bf16")
_SWIZZLES = ("none", "32B", "64B", "128B")
_TENSOR_BYTES, _BOX_BYTES = 1 << 16, 8192
THREADS = 128


@dataclass(frozen=True)
class MapCase:
    """A map, whose address counts from the beginning of the tensor, and where its box begins."""

    name: str
    map: TensorMap
    coordinates: tuple[int, ...]

    @property
    def fields(self) -> list[str]:
        """The changes that make the map of zeros: field, type, and operands behind the address."""
        found = self.map
        changes = [("rank", "b32", f"{found.rank - 1}")]
        for name, numbers in (
            ("box_dim", found.box),
            ("global_dim", found.dims),
            ("element_stride", found.element_strides),
        ):
            changes += [(name, "b32", f"{i}, {n}") for i, n in enumerate(numbers)]
        changes += [("global_stride", "b64", f"{i}, {n}") for i, n in enumerate(found.strides)]
        changes += [
            ("elemtype", "b32", f"{TYPES.index(found.dtype)}"),
            ("interleave_layout", "b32", "0"),
            ("swizzle_mode", "b32", f"{_SWIZZLES.index(found.swizzle)}"),
            ("fill_mode", "b32", f"{int(found.fill == 'nan')}"),
            ("global_address", "b64", "%first"),
        ]
        return [
            f"@%one tensormap.replace.tile.{field}.shared::cta.b1024.{kind} [%map], {operands};"
            for field, kind, operands in changes
        ]

    def text(self) -> str:
        rank, size = self.map.rank, self.map.box_bytes
        at = ", ".join(map(str, self.coordinates))
        loads = [
            f"ld.shared.v4.b32 {{%v0, %v1, %v2, %v3}}, [%to+{i}];\n"
            f"st.global.v4.b32 [%into+{i}], {{%v0, %v1, %v2, %v3}};"
            for i in range(0, _BOX_BYTES, 16 * THREADS)
        ]
        return "\n".join(
            [
                ".version 8.7\n.target sm_90a\n.address_size 64",
                ".visible .entry k(.param .align 8 .b8 pointers[24])\n{",
                f".shared .align 1024 .b8 box[{_BOX_BYTES}];",
                ".shared .align 128 .b8 map[128];\n.shared .align 8 .b64 bar;",
                ".reg .pred %one, %warp, %p; .reg .b32 %v<4>, %thread, %to, %map, %word, %bar;",
                ".reg .b64 %first, %out, %copy, %into;",
                "ld.param.u64 %first, [pointers];\nld.param.u64 %out, [pointers+8];",
                "ld.param.u64 %copy, [pointers+16];",
                f"add.u64 %first, %first, {self.map.address};",
                "mov.u32 %thread, %tid.x;\nmov.u32 %to, box;\nmad.lo.u32 %to, %thread, 16, %to;",
                "mov.b32 %v0, -1;",
                *(
                    f"st.shared.v4.b32 [%to+{i}], {{%v0, %v0, %v0, %v0}};"
                    for i in range(0, _BOX_BYTES, 16 * THREADS)
                ),
                "mov.u32 %map, map;\nmad.lo.u32 %word, %thread, 4, %map;\nmov.u32 %bar, bar;",
                "setp.lt.u32 %warp, %thread, 32;\nsetp.eq.u32 %one, %thread, 0;",
                "@%warp st.shared.b32 [%word], 0;\nbar.warp.sync -1;",
                *self.fields,
                "bar.warp.sync -1;",
                "@%warp tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu"
                ".sync.aligned [%copy], [%map], 128;",
                "@%warp fence.proxy.tensormap::generic.acquire.gpu [%copy], 128;",
                "@%one mbarrier.init.shared::cta.b64 [%bar], 1;",
                "fence.proxy.async.shared::cta;\nbar.sync 0;",
                f"@%one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {size};",
                f"@%one cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile"
                f".mbarrier::complete_tx::bytes [box], [%copy, {{{at}}}], [%bar];",
                "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;\n@!%p bra WAIT;",
                "mad.wide.u32 %into, %thread, 16, %out;",
                *loads,
                "ret;\n}",
            ]
        )

    @property
    def tensor(self) -> np.ndarray:
        """Its bytes: 32-bit words that count."""
        return np.arange(_TENSOR_BYTES // 4, dtype=np.uint32).view(np.uint8)

    @property
    def expected(self) -> np.ndarray:
        """What shared memory holds then, -1 where nothing is copied."""
        found = np.full(_BOX_BYTES, 0xFF, np.uint8).reshape(-1, CHUNK)
        data = Box(self.map, self.coordinates).read(self.tensor, 0)
        found[shared_chunks(0, self.map)] = data.reshape(-1, CHUNK)
        return found.reshape(-1)

    def arguments(self, tensor: int, out: int, copy: int) -> bytes:
        return struct.pack("<3Q", tensor, out, copy)

    def simulated(self) -> np.ndarray:
        memory = DeviceMemory()
        out, copy = memory.allocate(_BOX_BYTES), memory.allocate(128, 128)
        arguments = self.arguments(memory.upload(self.tensor), out, copy)
        load_ptx(self.text()).kernel("k").launch(1, THREADS, args=[arguments], memory=memory)
        return memory.download(out, _BOX_BYTES, np.uint8)


def _cases() -> list[MapCase]:
    cases = [
        MapCase(f"{dtype}", TensorMap(dtype, 32, (64, 16), (16, 8)), (16, 4))
        for dtype in filter(None, TYPES)
    ]
    for swizzle, row in (("32B", 8), ("64B", 16), ("128B", 32)):
        found = TensorMap("f32", 0, (64, 64), (row, 16), swizzle=swizzle)
        cases.append(MapCase(f"swizzle_{swizzle}", found, (32, 8)))
    for fill in ("zeros", "nan"):
        found = TensorMap("f32", 0, (40, 20), (32, 8), fill=fill)
        cases.append(MapCase(f"fill_{fill}", found, (-8, 16)))
    for rank in (1, 3, 4, 5):
        dims, box = (16, 6, 5, 4, 3)[:rank], (8, 3, 2, 2, 2)[:rank]
        cases.append(
            MapCase(f"rank_{rank}", TensorMap("f32", 16, dims, box), (4, 1, 2, 1, 1)[:rank])
        )
    steps = TensorMap("f32", 0, (64, 32), (16, 8), element_strides=(1, 3))
    cases.append(MapCase("element_stride", steps, (8, 5)))
    gaps = TensorMap("f16", 0, (24, 16), (16, 4), strides=(80,))
    cases.append(MapCase("stride_with_gaps", gaps, (8, 2)))
    return cases


CASES = _cases()
