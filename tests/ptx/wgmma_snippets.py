"""Kernels of a few wgmmas, whose shared memory comes from an image in global memory."""

from dataclasses import dataclass, field

import numpy as np
from ptx_snippets import HEAD

from flash_helpers.ptx import DeviceMemory, Run, load_ptx

FENCE = "wgmma.fence.sync.aligned;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
DONE = f"{COMMIT}\n{WAIT}"
VISIBLE = "fence.proxy.async;\nbar.sync 0;"
"""The fence that generic stores need before a wgmma reads."""


def descriptor(start: int, leading: int = 128, stride: int = 256, mode: int = 0) -> int:
    """The descriptor of a K-major matrix without swizzle whose core matrices lie one after the
    other."""
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


def registers(letter: str, count: int) -> str:
    return "{" + ", ".join(f"%{letter}{i}" for i in range(count)) + "}"


def mma(a: str, b: str, n=8, d="d", d_type="f32", t="f16", adds="1", rest="1, 1, 0, 0") -> str:
    """One wgmma. a, b: registers or literals. d: letter of the registers of D."""
    count = n // 2 if d_type == "f32" else n // 4
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k16.{d_type}.{t}.{t}"
    return f"{opcode} {registers(d, count)}, {a}, {b}, {adds}, {rest};"


def chunks(matrix: np.ndarray) -> np.ndarray:
    """The bytes of a matrix (rows, 16) of 16-bit elements as `descriptor` describes it."""
    rows = matrix.shape[0]
    return matrix.reshape(rows // 8, 8, 2, 8).transpose(0, 2, 1, 3).reshape(-1).view(np.uint8)


@dataclass
class Result:
    """The registers D of all threads, (registers, threads of all blocks), uint32."""

    run: Run
    d: np.ndarray

    def matrix(self, threads: int = 128, warpgroup: int = 0) -> np.ndarray:
        """D in f32 of a warpgroup of each block, (blocks, 64, N)."""
        values = self.d.view(np.float32).reshape(len(self.d), -1, threads)
        values = values[..., 128 * warpgroup :][..., :128]
        n = 2 * len(self.d)
        blocks = np.empty((values.shape[1], 64, n), np.float32)
        for i in range(len(self.d)):
            for lane in range(128):
                row = 16 * (lane // 32) + lane % 32 // 4 + 8 * (i // 2 % 2)
                blocks[:, row, 8 * (i // 4) + 2 * (lane % 4) + i % 2] = values[i, :, lane]
        return blocks


@dataclass
class Snippet:
    """A kernel around a body. image: bytes that shared memory of each block begins with. outputs:
    how many registers, and by which letter, are stored at the end. arguments: u64 registers by
    name, one value for all. inputs: b32 registers by name, one value for each thread of a block."""

    body: str
    image: np.ndarray = field(default_factory=lambda: np.zeros(4096, np.uint8))
    outputs: int = 4
    letter: str = "d"
    arguments: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    visible: str = VISIBLE

    def text(self, threads: int) -> str:
        names = [*self.arguments, *self.inputs]
        parameters = ", ".join(f".param .u64 p_{n}" for n in ("image", "out", *names))
        lines = [
            f"{HEAD.replace('sm_80', 'sm_90a')}",
            ".extern .shared .align 1024 .b8 smem[];",
            f".visible .entry k({parameters})\n{{",
            ".reg .pred %p, %q; .reg .b32 %r<16>, %thread, %i, %v<4>; .reg .b64 %rd<8>, %at;",
            ".reg .f32 %d<128>, %e<128>; .reg .b32 %h<64>, %a<8>;",
            *(f".reg .b64 %{n};" for n in self.arguments),
            *(f".reg .b32 %{n};" for n in self.inputs if n[0] not in "ah"),
            "mov.u32 %thread, %tid.x;",
            "ld.param.u64 %rd0, [p_image];",
            "mov.u32 %i, %thread;",
            "COPY:",
            f"setp.ge.u32 %p, %i, {self.image.size // 16};",
            "@%p bra COPIED;",
            "mad.wide.u32 %at, %i, 16, %rd0;",
            "ld.global.v4.b32 {%v0, %v1, %v2, %v3}, [%at];",
            "shl.b32 %r0, %i, 4;",
            "st.shared.v4.b32 [%r0], {%v0, %v1, %v2, %v3};",
            f"add.u32 %i, %i, {threads};",
            "bra COPY;",
            "COPIED:",
            *(f"ld.param.u64 %{n}, [p_{n}];" for n in self.arguments),
        ]
        for name in self.inputs:
            lines += [
                f"ld.param.u64 %at, [p_{name}];",
                "mad.wide.u32 %at, %thread, 4, %at;",
                f"ld.global.b32 %{name}, [%at];",
            ]
        lines += [self.visible, self.body]
        lines += [
            "mov.u32 %r0, %ctaid.x;",
            "mov.u32 %r1, %nctaid.x;",
            f"mad.lo.u32 %r2, %r0, {threads}, %thread;",
            f"mul.lo.u32 %r1, %r1, {4 * threads};",
            "ld.param.u64 %at, [p_out];",
            "mad.wide.u32 %at, %r2, 4, %at;",
            "cvt.u64.u32 %rd1, %r1;",
        ]
        for i in range(self.outputs):
            kind = "f32" if self.letter in "de" else "b32"
            lines += [f"st.global.{kind} [%at], %{self.letter}{i};", "add.s64 %at, %at, %rd1;"]
        return "\n".join([*lines, "ret;\n}"])

    def run(self, threads: int = 128, grid: int = 1, shared_bytes: int = 0, **options) -> Result:
        """Runs it."""
        memory = DeviceMemory()
        out = memory.allocate(max(self.outputs, 1) * 4 * threads * grid)
        inputs = [memory.upload(x.view(np.uint32)) for x in self.inputs.values()]
        args = [memory.upload(self.image), out, *self.arguments.values(), *inputs]
        run = (
            load_ptx(self.text(threads))
            .kernel("k")
            .launch(
                grid,
                threads,
                args=args,
                memory=memory,
                shared_bytes=shared_bytes or self.image.size,
                **options,
            )
        )
        return Result(run, memory.download(out, (self.outputs, threads * grid), np.uint32))
