"""Source text made from configs: one translation unit per kernel, and each family's map from config
to kernel.

The maps are outputs, and hold the kernels of the library: for each family that is in it the fixed
configs and the fastest that sweeps have found (configs/best_*.json). Every other config is compiled
at first use. Standard library only.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from flash_helpers.kernel_configs import (
    FAMILIES,
    Config,
    get_kernel_progression_configs,
    get_listed_configs,
    read_configs,
)
from flash_helpers.registry.families import with_siblings
from flash_helpers.registry.family import Family

GENERATOR = "tools/build/generate_kernel_instantiations.py"
CONFIG_FOLDER = "configs"  # below the root, and in the package: the fastest configs of each GPU
BEST_PATTERN = "best_*.json"
CHOICE_PATTERN = "choice_*.json"
KERNEL_HEADER = "src/include/flash_attention.cuh"  # declares the record of a kernel
ALL_MAPS = PurePosixPath("src/include/flash_kernels.cuh")  # includes the maps of all families

_FIELDS_BEGIN, _FIELDS_END = "    // fields:begin", "    // fields:end"
_WIDTH = 100


def read_config_file(path: Path) -> list[Config]:
    """Return the configs of a JSON file. Raises OSError, and ValueError that names the file."""
    try:
        return read_configs(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _winners(root: Path) -> list[Config]:
    best = sorted((root / CONFIG_FOLDER).glob(BEST_PATTERN))
    return [config for path in best for config in read_config_file(path)]


def listed_configs(root: Path) -> list[Config]:
    """Return the registry's configs and the fastest that sweeps have found, in order.

    Raises OSError and ValueError.
    """
    return with_siblings([*get_listed_configs(), *_winners(root)])


def library_configs(root: Path) -> list[Config]:
    """Return the configs of the library and of the committed maps, in order: of each family in the
    library the fixed configs and the fastest that sweeps have found.

    Raises OSError and ValueError.
    """
    configs = [*get_kernel_progression_configs(), *_winners(root)]
    return with_siblings(config for config in configs if config.family.in_library)


def families_in_library() -> list[Family[Any]]:
    """Return the families that have a map."""
    return [family for family in FAMILIES.values() if family.in_library]


def generated_files(root: Path, configs: Sequence[Config]) -> dict[Path, tuple[str, str]]:
    """Return the committed files that are made from the registry, relative to the root: the text of
    each file on disk (empty without a file), and its new text. `configs`: those of the maps.

    Raises OSError and ValueError.
    """
    mapped = families_in_library()
    wanted = {family.map_header: kernel_map_header(family, configs) for family in mapped}
    wanted[ALL_MAPS] = all_maps_header(mapped)
    for family in FAMILIES.values():
        header = wanted.get(family.header) or (root / family.header).read_text()
        wanted[family.header] = with_fields(header, family)
    return {
        Path(path): ((root / path).read_text() if (root / path).is_file() else "", text)
        for path, text in wanted.items()
    }


def with_fields(header: str, family: Family[Any]) -> str:
    """Return a C++ header with the fields of the family's config between the markers of its struct.

    Raises ValueError unless the struct is there, with each marker once.
    """
    name = family.config.__name__
    struct, begin, rest = header.partition(f"struct {name} {{\n{_FIELDS_BEGIN}")
    _, end, after = rest.partition(_FIELDS_END)
    if not begin or not end:
        raise ValueError(f"no struct {name} with {_FIELDS_BEGIN.strip()} and {_FIELDS_END.strip()}")
    return f"{struct}{begin}\n{family.config.cpp_fields()}\n{end}{after}"


def _initializer(config: Config, indent: int) -> str:
    lines = textwrap.wrap(config.cpp_initializer(), _WIDTH - indent, break_on_hyphens=False)
    return f"\n{' ' * indent} ".join(lines)


def kernel_function(name: str) -> str:
    """Return the name of the C++ function that returns the `Kernel` of that name; in the kernel's
    own unit it returns the address alone."""
    return f"{name}_kernel"


def kernel_unit(
    config: Config, function: str = "", *, name: str = "", header: str = "", namespace: str = ""
) -> str:
    """Return the translation unit of one kernel, which holds C++ and Python to the same arguments
    and launch. Only its device code is compiled.

    It is compiled from the root of the repository with that folder and src/include on the
    include path.

    `function`: one of the config's kernels, the first by default. `name`: name of the struct that
    names the kernel, its config's short form by default. `header`, `namespace`: where the kernel is
    defined; those of the step by default.
    """
    step, family = config.step, config.family
    function = function or config.functions[0]
    name = name or config.short_form()
    n_threads, smem_bytes = config.block(function)
    checks = (
        f"""
static_assert(Kernels::value.n_threads() == {n_threads});
static_assert(Kernels::value.smem_bytes() == {smem_bytes});
"""
        if len(config.functions) == 1
        else ""
    )
    return f"""\
{_include(family)}#include "{header or step.source}"

#include <cstddef>

{family.kernels[function].assertions()}

struct {name} {{
    static constexpr {type(config).__name__} value =
        {_initializer(config, 8)};
}};
using Kernels = {name};
{checks}
// Never called. It has the kernel compiled, and its name makes the PTX the same every time.
const void *{kernel_function(name)}() {{
    return reinterpret_cast<const void *>({namespace or step.namespace}::{function}<Kernels>);
}}
"""


def _include(family: Family[Any]) -> str:
    """Return the includes that a family's structs need."""
    own = "" if str(family.header) == KERNEL_HEADER else f'#include "{family.header}"\n'
    return f'#include "flash_attention.cuh"\n{own}'


@dataclass(frozen=True)
class BuiltKernel:
    """Compiled device code of one kernel. `fatbin`: its path, relative to where the library is
    linked. `symbol`: the kernel's symbol in it."""

    name: str
    fatbin: str
    symbol: str


def registration_unit(kernels: Iterable[BuiltKernel]) -> str:
    """Return C++ that embeds kernels in the library and defines the functions that the maps
    declare."""
    embedded, functions = "", ""
    for kernel in kernels:
        name = kernel.name
        embedded += f'.balign 8\n{name}_fatbin:\n.incbin "{kernel.fatbin}"\n'
        functions += f"""
extern const char {name}_fatbin[];
Kernel {kernel_function(name)}() {{
    return {{"{name}", "{kernel.symbol}", {name}_fatbin}};
}}
"""
    return f"""\
#include "flash_attention.cuh"

// Where tools look for device code, and nvcc puts it.
asm(R"(
.pushsection .nv_fatbin, "a"
{embedded}.popsection
)");
{functions}"""


def kernel_map_header(family: Family[Any], configs: Iterable[Config]) -> str:
    """Return a family's map header for those of `configs` that belong to the family, sorted, each
    once."""
    ordered = sorted({config for config in configs if config.family is family})
    functions = {c: [kernel_function(name) for name in c.kernels.values()] for c in ordered}
    declarations = "\n".join(f"Kernel {name}();" for names in functions.values() for name in names)
    entries = "\n".join(
        f"    {{{_initializer(config, 5)},\n     {{{', '.join(f'{name}()' for name in names)}}}}},"
        for config, names in functions.items()
    )
    return f"""\
// GENERATED by {GENERATOR}; do not edit.
// The kernels of family {family.name}, one unit each. The library is built from its like in
// build/maps, which may hold a part of them.

#pragma once

#include <map>
#include <vector>

{_include(family)}
// clang-format off
{declarations}

inline const std::map<{family.config.__name__}, std::vector<Kernel>> {family.name}_kernels = {{
{entries}
}};
// clang-format on
"""


def all_maps_header(families: Iterable[Family[Any]]) -> str:
    """Return the header that includes the maps of all families, and hands out each of them."""
    names = [(family.map_header.name, f"{family.name}_kernels") for family in families]
    includes = "\n".join(f'#include "{header}"' for header, _ in sorted(names))
    calls = "\n".join(f"    take({name});" for _, name in names)
    return f"""\
// GENERATED by {GENERATOR}; do not edit.
// The kernels of all families: a map from config to kernels for each.

#pragma once

{includes}

template <typename Take>
void for_each_map(Take take) {{
{calls}
}}
"""
