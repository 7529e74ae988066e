"""Calls of exported kernels: drawn, run by the config itself, and by formulas from JSON."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from flash_helpers.export.launches import LaunchFormula, input_name, name_in_c
from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import Config
from flash_helpers.registry.call import TensorMap

Values = Mapping[str, Any]

_SIZES = (1, 1, 2, 3, 4, 6, 8, 16, 24, 63, 64, 128, 192, 256, 513, 1024, 2048, 4096, 16384, 100000)
_FEW = 8  # of the sizes: batches and heads
_SMS = (2, 16, 131, 132)
_PAGE_SIZES = (0, 1, 3, 16, 64, 96)
_SCALES = (128**-0.5, 0.125, 1e-3, -0.5, 0.0, 1e38)


@dataclass(frozen=True)
class Planned:
    """A launch as numbers. `maps`: (member, data type, swizzle, L2 promotion, rank, address, dims,
    strides, box), the last three filled with zeros up to 5."""

    grid: tuple[int, ...]
    cluster: tuple[int, ...]
    block: int
    shared_bytes: int
    programmatic: int
    arguments: bytes
    maps: tuple[tuple[Any, ...], ...]
    buffers: tuple[int, ...]


def draw(launch: LaunchFormula, rng: random.Random) -> dict[str, Any]:
    """Inputs of a call, most of which the kernel takes: dense tensors, heads that share K and V."""
    found: dict[str, Any] = {}
    row_stride = getattr(launch.config, "static_row_stride", 0)
    for given in launch.inputs:
        if given.name == "sms":
            found["sms"] = rng.choice(_SMS)
        elif given.kind == "size":
            found[given.name] = rng.choice(_SIZES[:_FEW] if given.most < 2**16 else _SIZES)
        elif given.kind == "option":
            found[given.name] = rng.choice((0, 1))
        elif given.kind == "real":
            found[given.name] = rng.choice(_SCALES[: rng.choice((3, 6))])
        elif given.kind == "stride":
            usual = row_stride if "_seq_" in given.name and row_stride else 128
            found[given.name] = usual * (1 if row_stride else rng.randint(1, 64))
        else:
            found[given.name] = rng.randint(1, 2**40) * 16
    if "context_in" in found:
        found |= _streams(found, rng)
    elif "rotary_dim" in found:
        found |= _rotary(rng)
    elif "kv_heads" in found and rng.random() < 0.5:  # what every kernel takes
        found |= {"heads": found["kv_heads"], "len_q": found["len_k"]}
        found |= {"softmax_scale": _SCALES[0], "return_lse": 0}
    elif "kv_heads" in found and rng.random() < 0.8:
        found["heads"] = found["kv_heads"] * rng.choice((1, 2, 3, 4))
    if "page_size" in found or "caches" in found:
        room = 48 * rng.choice((1, 4, 63, 1024))
        if "rotary_dim" in found:
            place = _place(rng)
            found |= {name: place[name] for name in ("page_size", "pages", "caches")}
            found["room"] = room
        else:
            found |= _place(rng) | {"len_k": room, "len_q": rng.randint(1, 9)}
        found = {name: found[name] for name in (given.name for given in launch.inputs)}
    if rng.random() < 0.2:
        spoilt = rng.choice([given.name for given in launch.inputs])
        if not isinstance(found[spoilt], float):
            found[spoilt] += rng.choice((1, 2, 4, 7))
    return found


def _place(rng: random.Random) -> dict[str, int]:
    """Where keys lie in a cache: in pages, in rows that sequences share, or in their own."""
    page_size = rng.choice(_PAGE_SIZES) if rng.random() < 0.6 else 0
    found = {"page_size": page_size, "pages": page_size and rng.choice((0, 1, 500))}
    found["caches"] = 0 if page_size else rng.choice((0, 1, 5))
    return found | {"cache_seqlens": rng.choice((0, 2**20))}


def _rotary(rng: random.Random) -> dict[str, int]:
    """What an append turns: keys and queries, keys alone, or nothing."""
    rotary_dim = rng.choice((0, 16, 32, 64))
    found = {"rotary_dim": rotary_dim, "d_head": rotary_dim + 8 * rng.randint(not rotary_dim, 3)}
    found["positions"] = rotary_dim and rng.choice((0, 1, 500))
    found["has_rotary_seqlens"] = rng.choice((0, 1)) if rotary_dim else 0
    has_q = rotary_dim and rng.random() < 0.7
    return found | {name: rng.randint(1, 9) if has_q else 0 for name in ("heads", "len_q")}


def _streams(found: Values, rng: random.Random) -> dict[str, int]:
    """Widths of two streams of tokens, and one distance of the tokens of all samples."""
    widths = ("in_features", "out_features", "context_in", "context_out")
    own = {name: 8 * rng.choice((1, 3, 8, 16)) for name in widths}
    for stream, axis, tokens in (("", "seq", "length"), ("context_", "token", "context")):
        for name in (f"{stream}x", f"{stream}y"):
            own[f"{name}_batch_stride"] = found[tokens] * found[f"{name}_{axis}_stride"]
    return own


def by_config(launch: LaunchFormula, values: Values) -> Planned | None:
    """The launch of a kernel on a Hopper GPU, by `Config.call`; None if the config refuses the
    call, or a number is too large for one from C."""
    if not all(given.least <= values[given.name] <= given.most for given in launch.inputs):
        return None
    return _launched(launch.config, launch.kernel, values)


def _launched(config: Config, kernel: str, values: Values) -> Planned | None:
    kind = config.family.operation.problem
    own = {f.name: getattr(config, f.name) for f in fields(config)}
    own |= {**config.supports.sizes, **config.supports.options}
    asked = {f.name: own.get(f.name, values.get(input_name(kind, f.name))) for f in fields(kind)}
    for f in fields(kind):
        if "tensor" in f.metadata and values.get(f.metadata["tensor"]):
            asked[f.name] = 0
    asked = {name: value for name, value in asked.items() if value is not None}
    try:
        problem = kind(**asked)
    except ValueError:
        return None
    if config.refusal(problem):
        return None
    strides = problem.strides()
    for tensor in problem.tensors:
        names = [f"{tensor.name}_{axis}_stride" for axis in tensor.axes[:-1]]
        if names and names[0] in values:
            sizes = tensor.shape[:-1]
            outer = [values[n] if size > 1 else 0 for n, size in zip(names, sizes, strict=True)]
            strides[tensor.name] = (*outer, 1)
            if config.supports.layout_refusal(tensor, strides[tensor.name]):
                return None
        if values.get(name_in_c(tensor.name), 0) % config.supports.alignment_of(tensor):
            return None
    device = Device("a GPU", (9, 0), values.get("sms", 2))
    call = config.call(problem, strides, device)
    launches = [launch for launch in call.launches if launch.kernel == kernel]
    if not launches:
        return None
    (launch,) = launches
    maps: list[tuple[Any, ...]] = []

    def encode(found: TensorMap, address: int) -> bytes:
        member = next(at for at, other in launch.tensor_maps if other is found)
        sizes = (padded(found.dims), padded(found.strides), padded(found.box))
        kinds = (found.data_type, found.swizzle_mode, found.promotion_mode, len(found.dims))
        maps.append((member, *kinds, address, *sizes))
        return bytes(128)

    addresses = {**values, **{name: values.get(name_in_c(name), 0) for name in strides}}
    return Planned(
        launch.grid,
        launch.cluster,
        launch.block,
        launch.shared_bytes,
        launch.programmatic,
        launch.bind(addresses, encode),
        tuple(maps),
        tuple(buffer.bytes for buffer in call.buffers),
    )


def padded(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Five numbers."""
    return (*sizes, *[0] * (5 - len(sizes)))


def evaluate(formula: Any, values: Values) -> Any:
    """The value of a formula or a condition in JSON."""
    if isinstance(formula, str):
        return values[formula]
    if not isinstance(formula, list):
        return formula
    operator, *operands = formula
    if operator == "?":
        return evaluate(operands[1 if evaluate(operands[0], values) else 2], values)
    found = [evaluate(operand, values) for operand in operands]
    return {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a / b if isinstance(a, float) or isinstance(b, float) else a // b,
        "%": lambda a, b: a % b,
        "<": lambda a, b: a < b,
        "==": lambda a, b: a == b,
        "!": lambda a: not a,
    }[operator](*found)
