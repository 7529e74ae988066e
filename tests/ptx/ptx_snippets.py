"""Runs a few PTX instructions on given values: one value a lane, one result a lane."""

import numpy as np

from flash_helpers.ptx import DeviceMemory, Run, load_ptx

HEAD = ".version 8.7\n.target sm_80\n.address_size 64\n"

_DTYPES = {
    "u8": np.uint8,
    "s8": np.int8,
    "u16": np.uint16,
    "s16": np.int16,
    "b16": np.uint16,
    "f16": np.float16,
    "bf16": np.uint16,
    "u32": np.uint32,
    "s32": np.int32,
    "b32": np.uint32,
    "f32": np.float32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "u64": np.uint64,
    "s64": np.int64,
    "b64": np.uint64,
    "f64": np.float64,
}


def register_type(type_name: str) -> str:
    size = np.dtype(_DTYPES[type_name]).itemsize
    return f"b{max(8 * size, 16)}"


def entry(body: str, parameters: str = "", declarations: str = "", before: str = "") -> str:
    """A whole module around the body of one kernel named ``k``."""
    return (
        f"{HEAD}{before}\n.visible .entry k({parameters})\n{{\n{declarations}\n{body}\nret;\n}}\n"
    )


def launch_on(
    text: str, arrays: list[np.ndarray], grid: object = 1, block: int = 32, **options: object
) -> tuple[Run, list[np.ndarray]]:
    """Runs kernel ``k`` of a text on copies of arrays; the run, and what the copies hold then."""
    memory = DeviceMemory()
    args = [memory.upload(array) for array in arrays]
    run = load_ptx(text).kernel("k").launch(grid, block, args=args, memory=memory, **options)
    return run, [memory.download(at, a.shape, a.dtype) for at, a in zip(args, arrays, strict=True)]


def evaluate(
    body: str,
    inputs: dict[str, tuple[str, list]] | None = None,
    result: str = "u32",
    declarations: str = "",
    threads: int = 32,
    before: str = "",
    target: str = "sm_80",
) -> np.ndarray:
    """The values of ``%d`` after ``body``, one for each thread.

    inputs: register name to PTX type and values; values are repeated to fill the threads. result:
    PTX type of ``%d``. declarations: further declarations of the function. target: of the text.
    """
    arrays, parameters = [], []
    lines = [f".reg .{register_type(result)} %d;", ".reg .b64 %at, %base;"]
    lines += [".reg .b32 %thread;", declarations]
    code = ["mov.u32 %thread, %tid.x;"]
    for name, (type_name, values) in (inputs or {}).items():
        dtype = np.dtype(_DTYPES[type_name])
        arrays.append(np.resize(np.array(values, dtype), threads))
        parameters.append(f".param .u64 p_{name}")
        lines.append(f".reg .{register_type(type_name)} %{name};")
        access = f"{'s' if type_name[0] == 's' else 'u'}{8 * dtype.itemsize}"
        code += [
            f"ld.param.u64 %base, [p_{name}];",
            f"mad.wide.u32 %at, %thread, {dtype.itemsize}, %base;",
            f"ld.global.{access} %{name}, [%at];",
        ]
    out_type = np.dtype(_DTYPES[result])
    arrays.append(np.zeros(threads, out_type))
    parameters.append(".param .u64 p_out")
    tail = [
        "ld.param.u64 %base, [p_out];",
        f"mad.wide.u32 %at, %thread, {out_type.itemsize}, %base;",
        f"st.global.b{8 * out_type.itemsize} [%at], %d;",
    ]
    text = entry("\n".join([*code, body, *tail]), ", ".join(parameters), "\n".join(lines), before)
    text = text.replace("sm_80", target)
    return launch_on(text, arrays, block=threads)[1][-1]


def run_body(
    body: str,
    declarations: str = "",
    threads: int = 64,
    shared_bytes: int = 0,
    before: str = "",
    **options: object,
) -> Run:
    """Runs a kernel without parameters."""
    kernel = load_ptx(entry(body, "", declarations, before)).kernel("k")
    return kernel.launch(grid=1, block=threads, shared_bytes=shared_bytes, **options)
