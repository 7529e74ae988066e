"""The formulas of an exported kernel give the launches that its config gives."""

import ctypes
import functools
import json
import random
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exported_calls import Planned, Values, by_config, draw, evaluate
from general_hopper import WITH_OPTIONS, GeneralConfig, general
from tiers import matrix_mark
from two_kernels import TOY_FAMILY

from flash_helpers.export.c_header import c_header
from flash_helpers.export.description import description, in_json
from flash_helpers.export.launches import LaunchFormula, launch_formula
from flash_helpers.kernel_configs import FAMILIES, Config, Element
from flash_helpers.operations.attention_forward.supports import WINDOW, AttentionSupports
from flash_helpers.registry import decode, decode_sync
from flash_helpers.registry.call import Call
from flash_helpers.registry.decode import COMBINE, DECODE, DECODE_FAMILY
from flash_helpers.registry.decode_sync import DECODE_SYNC
from flash_helpers.registry.hopper import HOPPER, LONG_TILE

_LAST = {name: family.progression()[-1] for name, family in FAMILIES.items()}
CONFIGS: dict[str, Config] = {
    **_LAST,
    "any stride": _LAST["overlap"].replace(static_row_stride=0),
    "one tile per block": HOPPER.fixed_config(HOPPER.steps["h1"], Element.BF16),
    "any length": HOPPER.fixed_config(HOPPER.steps["h20"], Element.FP16),
    "counter": _LAST["hopper"].replace(causal=True),
    "causal gradients": _LAST["backward"].replace(causal=True),
    "gradients in turn": _LAST["backward"].replace(in_turn=True),
    "long tile": HOPPER.fixed_config(HOPPER.steps["h24"], Element.BF16).replace(
        **LONG_TILE, causal=True
    ),
    "pieces": DECODE_FAMILY.fixed_config(DECODE_FAMILY.steps["d5"], Element.BF16),
    "two kernels": TOY_FAMILY.progression()[0],
}


class Windowed(GeneralConfig):
    """A config whose kernel gets the bounds of a window, and takes no problem without one."""

    @property
    def supports(self) -> AttentionSupports:
        window = frozenset({WINDOW})
        return replace(
            super().supports, abilities=super().supports.abilities | window, exact=window
        )

    def call(self, problem, strides, device) -> Call:
        call = super().call(problem, strides, device)
        (launch,) = call.launches
        bounds = (problem.window_left, problem.window_right)
        left, right = (-1 if bound is None else bound for bound in bounds)
        values = {**launch.values, "head_group": (left,), "last_heads": (right,)}
        return replace(call, launches=(replace(launch, values=values),))


WIDEST_TILE = _LAST["decode"].replace(d_head=256, B_r=64, slots=2)
CONFIGS["window"] = Windowed(**general(WITH_OPTIONS).to_dict() | {"dtype": Element.BF16})
MATRIX = {
    config.short_form(): config
    for family, variants in (
        (DECODE_SYNC, decode_sync.listed_variants()),
        (DECODE_FAMILY, [*decode.listed_variants(), WIDEST_TILE]),
    )
    for config in (*family.progression(), *variants)
    if config != _LAST[family.name]
}
FORMULAS = {
    (name, function): config
    for name, config in (CONFIGS | MATRIX).items()
    for function in config.kernels
}
EACH = pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=[matrix_mark(config)] if key[0] in MATRIX else [])
        for key, config in FORMULAS.items()
    ],
    ids=" ".join,
)
CALLS = 200


@functools.cache
def launch_of(key: tuple[str, str]) -> LaunchFormula:
    return launch_formula(FORMULAS[key], key[1], "sm_90a")


def calls(launch: LaunchFormula) -> list[dict[str, Any]]:
    rng = random.Random(launch.kernel)
    return [draw(launch, rng) for _ in range(CALLS)]


@pytest.mark.slow
@EACH
def test_json_gives_the_launches_of_the_config(key) -> None:
    launch = launch_of(key)
    text = json.dumps(description(launch, {}), allow_nan=False)
    found = json.loads(text)
    taken = 0
    for values in calls(launch):
        wanted = by_config(launch, values)
        assert by_json(found, values) == wanted, values
        taken += wanted is not None
    assert CALLS > taken > CALLS // 20  # both kinds are tried


def by_json(kernel: dict[str, Any], values: Values) -> Planned | None:
    for given in kernel["inputs"]:
        if not given["least"] <= values[given["name"]] <= given["most"]:
            return None
    for refused in kernel["refused"]:
        if all(evaluate(condition, values) for condition in refused["conditions"]):
            shown = [evaluate(value, values) for value in refused["values"]]
            assert "{" not in refused["reason"].format(*shown)
            return None
    arguments = bytearray(kernel["arguments"]["bytes"])
    codes = {"int32_t": "i", "float": "f", "uint64_t": "Q", "int64_t": "q"}
    for member in kernel["arguments"]["members"]:
        if member["values"]:
            numbers = [evaluate(value, values) for value in member["values"]]
            code = f"<{len(numbers)}{codes[member['type']]}"
            struct.pack_into(code, arguments, member["offset"], *numbers)

    def sizes(formulas: list[Any]) -> tuple[int, ...]:
        found = [evaluate(formula, values) for formula in formulas]
        return (*found, *[0] * (5 - len(found)))

    buffers = [evaluate(buffer["bytes"], values) for buffer in kernel["buffers"]]
    return Planned(
        tuple(evaluate(x, values) for x in kernel["launch"]["grid"]),
        tuple(evaluate(x, values) for x in kernel["launch"]["cluster"]),
        kernel["launch"]["block"],
        kernel["launch"]["shared_bytes"],
        kernel["launch"]["programmatic"],
        bytes(arguments),
        tuple(
            (
                *(found[name] for name in ("offset", "data_type", "swizzle", "l2_promotion")),
                len(found["dims"]),
                evaluate(found["address"], values),
                *(sizes(found[name]) for name in ("dims", "strides", "box")),
            )
            for found in kernel["tensor_maps"]
        ),
        tuple(size for size in buffers if size),
    )


@pytest.mark.parametrize(("name", "bytes_apart"), [("context_o", 4), ("context_q", 16)])
def test_an_optional_tensor_is_aligned_as_one_that_is_given(name: str, bytes_apart: int) -> None:
    """Outputs of joint attention are stored in pairs, inputs are loaded in chunks."""
    launch = launch_of(("joint", "attention_kernel"))
    reasons = [x["reason"] for x in description(launch, {})["refused"]]
    (reason,) = (text for text in reasons if text.startswith(f"{name} starts at"))
    assert reason.endswith(f"not a multiple of {bytes_apart} bytes")


# A launch as numbers for Python, in the order of `Planned`.
_SHIM = """
int shim{number}(const void *call, unsigned char *arguments, uint64_t *numbers, char *reason) {{
    static struct {name}_launch launch;
    if ({name}_plan((const struct {name}_call *)call, &launch, reason, 200)) return 1;
    memcpy(arguments, &launch.arguments, sizeof launch.arguments);
    for (int i = 0; i < 3; ++i) *numbers++ = launch.grid[i];
    for (int i = 0; i < 3; ++i) *numbers++ = launch.cluster[i];
    *numbers++ = launch.block;
    *numbers++ = launch.shared_bytes;
    *numbers++ = (uint64_t)launch.programmatic;
    for (int i = 0; i < launch.n_tensor_maps; ++i) {{
        const struct flash_tensor_map *map = &launch.tensor_maps[i];
        *numbers++ = map->member;
        *numbers++ = (uint64_t)map->data_type;
        *numbers++ = (uint64_t)map->swizzle;
        *numbers++ = (uint64_t)map->l2_promotion;
        *numbers++ = map->rank;
        *numbers++ = map->address;
        for (int j = 0; j < 5; ++j) *numbers++ = map->dims[j];
        for (int j = 0; j < 5; ++j) *numbers++ = map->strides[j];
        for (int j = 0; j < 5; ++j) *numbers++ = map->box[j];
    }}
    {buffers}
    return 0;
}}
"""


@pytest.fixture(scope="module")
def library_with(tmp_path_factory) -> Callable[[tuple[str, str]], ctypes.CDLL]:
    """Returns all headers of a key's tier, compiled together as C."""
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("no gcc")

    @functools.cache
    def library(of_matrix: bool) -> ctypes.CDLL:
        keys = [key for key in FORMULAS if (key[0] in MATRIX) == of_matrix]
        return _compiled(compiler, tmp_path_factory.mktemp("headers"), keys)

    return lambda key: library(key[0] in MATRIX)


def _compiled(compiler: str, folder: Path, keys: list[tuple[str, str]]) -> ctypes.CDLL:
    text = ""
    for key in keys:
        launch = launch_of(key)
        header = folder / f"{launch.kernel}.h"
        header.write_text(c_header(launch, "symbol", "sm_90a"))
        fields = (f"*numbers++ = launch.{b.name}_bytes;" for b in launch.buffers)
        shim = _SHIM.format(number=_number(key), name=launch.kernel, buffers=" ".join(fields))
        text += f'#include "{header}"\n{shim}'
    source = folder / "shims.c"
    source.write_text(text)
    strict = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
    subprocess.run(
        [compiler, *strict, "-shared", "-fPIC", "-o", folder / "it.so", source], check=True
    )
    return ctypes.CDLL(str(folder / "it.so"))


def _number(key: tuple[str, str]) -> int:
    return [*FORMULAS].index(key)


@pytest.mark.slow
@EACH
def test_c_gives_the_launches_of_the_config(library_with, key) -> None:
    launch = launch_of(key)
    plan = by_c(launch, library_with(key)[f"shim{_number(key)}"])
    for values in calls(launch):
        assert plan(values) == by_config(launch, values), values


def by_c(launch: LaunchFormula, shim: Any) -> Callable[[Values], Planned | None]:
    codes = "".join("d" if given.kind == "real" else "q" for given in launch.inputs)

    def plan(values: Values) -> Planned | None:
        call = struct.pack(f"<{codes}", *(values[given.name] for given in launch.inputs))
        arguments = ctypes.create_string_buffer(launch.layout.size)
        size = 9 + 21 * len(launch.tensor_maps) + len(launch.buffers)
        numbers, reason = (ctypes.c_uint64 * size)(), ctypes.create_string_buffer(200)
        if shim(call, arguments, numbers, reason):
            assert reason.value
            return None
        found = iter(numbers)

        def take(count: int) -> tuple[int, ...]:
            return tuple(next(found) for _ in range(count))

        launched = (take(3), take(3), *take(3))
        maps = [(*take(6), take(5), take(5), take(5)) for _ in launch.tensor_maps]
        buffers = tuple(size for size in take(len(launch.buffers)) if size)
        return Planned(*launched, arguments.raw, tuple(maps), buffers)

    return plan


@pytest.mark.slow
def test_a_header_is_cpp_too(tmp_path: Path) -> None:
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no g++")
    header = tmp_path / "it.h"
    header.write_text(c_header(launch_of(("counter", "forward_kernel")), "symbol", "sm_90a"))
    strict = ("-std=c++11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only")
    subprocess.run([compiler, *strict, "-x", "c++", "-include", header, "/dev/null"], check=True)


def test_a_kernel_takes_only_the_inputs_that_its_launch_depends_on() -> None:
    launch = launch_formula(_LAST["ampere"], "forward_kernel", "sm_80")
    names = {given.name for given in launch.inputs if given.kind != "stride"}
    assert names == {"batch", "heads", "len_q", *"qkvo"}


@pytest.mark.slow
def test_a_kernel_without_a_launch_in_a_call_tells_which_one_does_all() -> None:
    combining, decoding = (launch_of(("pieces", function)) for function in (COMBINE, DECODE))
    reason = f"{decoding.kernel} does all of this call: do not launch {combining.kernel}"
    (check,) = [check for check in combining.checks if check.text == reason]
    (pieces,) = (in_json(formula) for formula in decoding.members["pieces"])
    found = set()
    for values in calls(decoding):
        if by_config(decoding, values) is not None:
            has_one = evaluate(pieces, values) == 1
            conditions = [evaluate(in_json(condition), values) for condition in check.conditions]
            assert all(conditions) == has_one
            found.add(has_one)
    assert found == {False, True}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["decode_sync", "decode"])
def test_lengths_of_a_cache_are_an_address_or_none(family) -> None:
    launch = launch_of((family, DECODE))
    assert [formula.text for formula in launch.members["cache_seqlens"]] == ["cache_seqlens"]
    (given,) = [given for given in launch.inputs if given.name == "cache_seqlens"]
    assert given.text.endswith("; 0 if it is not given")
    assert "total_k" not in {given.name for given in launch.inputs}
