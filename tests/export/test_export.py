"""The export command writes whole files, and its kernels run in a program without Python."""

import ctypes
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from driver_example import FOLDER, compiled_example

from flash_attention.__main__ import main
from flash_helpers import gpu
from flash_helpers.compile.compilers import find_compiler
from flash_helpers.compile.toolchain import BuildError
from flash_helpers.host.errors import HostError
from flash_helpers.host.launches import Options
from flash_helpers.host.run import run_program
from flash_helpers.host.stub_library import FOLDER_VARIABLE as STUB_CACHE

PORTABLE = "o5_bf16_d128_Br128_Bc64_w4"
HOPPER = "h30_bf16_d128_Br128_Bc128_K3_V2_pp"
COUNTING = f"{HOPPER}_causal"  # counts its tiles in a buffer, where there are more than blocks


def export(folder: Path, *configs: str, arch: str = "90a") -> int:
    return main(["export", *configs, "--arch", arch, "--out", str(folder)])


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error).splitlines()[0])
    folder = tmp_path_factory.mktemp("exported")
    (folder / f"{HOPPER}.cubin").write_text("of an earlier version")
    assert export(folder, PORTABLE, HOPPER, COUNTING, PORTABLE) == 0
    return folder


@pytest.mark.slow
def test_every_kernel_has_its_files_and_no_others_are_left(exported) -> None:
    suffixes = (".cubin", ".h", ".json", ".ptx")
    names = {f"{name}{suffix}" for name in (PORTABLE, HOPPER, COUNTING) for suffix in suffixes}
    assert {path.name for path in exported.iterdir() if path.suffix in suffixes} == names


@pytest.mark.slow
@pytest.mark.parametrize("name", [PORTABLE, HOPPER])
def test_the_description_names_the_files_and_the_symbol(exported, name) -> None:
    found = json.loads((exported / f"{name}.json").read_text())
    for kind, file in found["files"].items():
        assert file["name"] == f"{name}.{kind}"
        data = (exported / file["name"]).read_bytes()
        assert file["sha256"] == hashlib.sha256(data).hexdigest()
    ptx = (exported / f"{name}.ptx").read_text()
    assert re.search(rf"\.entry\s+{re.escape(found['symbol'])}\(", ptx)
    assert f".target {found['target']}" in ptx
    assert (exported / f"{name}.cubin").read_bytes().startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("config", "arch", "words"),
    [
        ("h99", "90a", "'h99' is not a config's short form; an example of one is h1_"),
        (HOPPER, "90", "of family hopper has no kernel for sm_90: use sm_90a"),
        (HOPPER, "100a", "of family hopper has no kernel for sm_100a: use sm_90a"),
        (PORTABLE, "75", "of family overlap has no kernel for sm_75: use sm_80 or higher"),
        (
            PORTABLE.replace("Bc64_w4", "Bc128_w8"),
            "86",
            "needs 163840 bytes of shared memory per block, and sm_86 has 101376: choose smaller",
        ),
    ],
)
def test_a_kernel_that_cannot_be_is_refused(tmp_path, capsys, config, arch, words) -> None:
    assert export(tmp_path / "out", config, arch=arch) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_wrong_usage_is_refused(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    for folder, words in (("file", "is a file: name a folder"), ("a/b", "there is no folder")):
        with pytest.raises(SystemExit, match="2"):
            export(tmp_path / folder, PORTABLE)
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_named(exported, tmp_path, capsys) -> None:
    (tmp_path / f"{PORTABLE}.h").mkdir()
    assert export(tmp_path, PORTABLE) == 2
    assert f"{tmp_path / PORTABLE}.h: Is a directory" in capsys.readouterr().err
    assert not [*tmp_path.glob(".*")]


def test_the_example_has_at_most_100_lines() -> None:
    assert len((FOLDER / "launch.cpp").read_text().splitlines()) <= 100


@pytest.mark.slow
def test_the_example_tells_that_there_is_no_driver(exported) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("there is a driver")
    program = compiled_example(exported, PORTABLE)
    image = exported / f"{PORTABLE}.cubin"
    result = subprocess.run([program, image], capture_output=True, text=True)
    assert result.returncode == 3
    assert "no CUDA driver that can launch the kernel: libcuda.so.1" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "problem"), [(PORTABLE, ()), (HOPPER, ()), (COUNTING, ("640", "1"))]
)
def test_the_example_runs_in_the_simulator(exported, name, problem, capfd, monkeypatch) -> None:
    monkeypatch.setenv(STUB_CACHE, str(exported / "stub"))
    monkeypatch.setattr(gpu, "MOST_SMS", {**gpu.MOST_SMS, 90: 2})
    program = compiled_example(exported, name)
    try:
        arguments = [str(exported / f"{name}.ptx"), *problem]
        ended = run_program(program, arguments, "sm_90a", Options(output=sys.stdout))
    except HostError as error:
        pytest.skip(str(error).splitlines()[0])
    out, err = capfd.readouterr()
    assert (ended.status, err) == (0, "")
    assert out.startswith("right: the largest error is 0.00")
    (launch,) = ended.launches
    if name == COUNTING:  # of each of three pairs of tiles: the counter, and its taker
        assert launch.counts.global_requests == 6
