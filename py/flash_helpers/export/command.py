"""`python -m flash_attention export`: kernels for programs without Python."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from flash_helpers import gpu
from flash_helpers.compile.cache import Compiled
from flash_helpers.compile.jit import default_jit, units_of
from flash_helpers.console.command_line import (
    add_architecture_argument,
    make_parser,
    output_folder,
    print_text,
    run_tool,
)
from flash_helpers.console.files import replaced_file
from flash_helpers.export.c_header import c_header
from flash_helpers.export.description import description
from flash_helpers.export.launches import launch_formula
from flash_helpers.kernel_configs import Config, config_from_short_form

PROGRAM = "python -m flash_attention export"

DESCRIPTION = """\
Write kernels for programs that launch them by the CUDA driver, without Python and without a
compiler. Each kernel has four files, named after it:

  .cubin   machine code for one architecture
  .ptx     its PTX, which the driver compiles for later GPUs where the family is portable
  .h       C and C++: the arguments, and a function that checks a call and fills in its launch
  .json    the same for other languages; flash_helpers.export.description has its schema

Files of these names are replaced, each at once. examples/driver_launch launches such a kernel.
"""

EXAMPLES = """\
examples:
  a kernel for Hopper:
    python -m flash_attention export h30_bf16_d128_Br128_Bc128_K3_V2_pp --arch 90a --out exported
  two kernels for GPUs from compute capability 8.0 on:
    python -m flash_attention export o5_bf16_d128_Br128_Bc64_w4 s3_bf16_w8_c4 --arch 80 --out both

exit status: 0 done, 2 wrong usage, a kernel that does not compile or a folder that cannot be
written, 130 interrupted
"""


def check_target(config: Config, target: str) -> None:
    """Raises ValueError unless the config's kernels can be compiled for a target, such as sm_90a,
    and run there."""
    family, name = config.family, config.short_form()
    if family.is_portable:
        lowest = min(family.capabilities)
        fits, known = gpu.capability_of(target) >= lowest, f"sm_{lowest} or higher"
    else:
        targets = [f"sm_{own}" for own in family.targets]
        fits, known = target in targets, " or ".join(targets)
    if not fits:
        raise ValueError(f"{name} of family {family.name} has no kernel for {target}: use {known}")
    limits = gpu.LIMITS.get(gpu.capability_of(target))
    for function in config.kernels:
        _, shared_bytes = config.block(function)
        if limits is not None and shared_bytes > limits.smem_bytes:
            raise ValueError(
                f"{name} needs {shared_bytes} bytes of shared memory per block, and {target} has "
                f"{limits.smem_bytes}: choose smaller tiles, or another architecture"
            )


def export(configs: Sequence[Config], target: str, folder: Path) -> list[Path]:
    """Compile the configs' kernels for a target, such as sm_90a, and write their files into a
    folder, which is made if it does not exist; returns the descriptions' paths.

    Raises ValueError for a target that a config cannot have, BuildError for a kernel that does not
    compile, and OSError that names the path.
    """
    for config in configs:
        check_target(config, target)
    kernels = [(config, function) for config in configs for function in config.kernels]
    units = [unit for config in configs for unit in units_of(config)]
    compiled = default_jit().get(units, target)
    folder.mkdir(exist_ok=True)
    return [
        _write(config, function, found, folder)
        for (config, function), found in zip(kernels, compiled, strict=True)
    ]


def _write(config: Config, function: str, compiled: Compiled, folder: Path) -> Path:
    """Write the files of one kernel; returns the path of the description, which is written last."""
    launch = launch_formula(config, function, compiled.target)
    files = {
        "cubin": compiled.cubin_path.read_bytes(),
        "ptx": compiled.ptx_path.read_bytes(),
        "h": c_header(launch, compiled.symbol, compiled.target).encode(),
    }
    facts = {
        "target": compiled.target,
        "symbol": compiled.symbol,
        "compiler": compiled.compiler,
        "files": {
            kind: {"name": f"{launch.kernel}.{kind}", "sha256": hashlib.sha256(data).hexdigest()}
            for kind, data in files.items()
        },
    }
    files["json"] = (json.dumps(description(launch, facts), indent=1) + "\n").encode()
    for kind, data in files.items():
        with replaced_file(folder / f"{launch.kernel}.{kind}") as file:
            file.write(data)
    return folder / f"{launch.kernel}.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Export the kernels that are asked for; returns the exit status."""
    parser = make_parser(DESCRIPTION, EXAMPLES, PROGRAM)
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="a config's short form")
    add_architecture_argument(parser, "of the machine code, such as 80, 90 or 90a", required=True)
    parser.add_argument(
        "--out", type=output_folder, required=True, metavar="DIR", help="folder of the files"
    )
    arguments = parser.parse_args(argv)

    def work() -> None:
        configs = dict.fromkeys(map(config_from_short_form, arguments.configs))
        for path in export([*configs], arguments.arch, arguments.out):
            print_text(f"{path.with_suffix('')}.cubin, .ptx, .h, .json\n")

    return run_tool(work, ValueError, OSError, RuntimeError)
