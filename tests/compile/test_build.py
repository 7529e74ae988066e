"""How the library is built: which compiler, for what, and what is compiled again."""

import ast
import importlib
import importlib.metadata
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_sources import write_sources
from fake_toolchain import fake_toolchain, real_toolchain

import flash_attention
from flash_helpers.compile import toolchain
from flash_helpers.compile.build import (
    COMPILE_FLAGS,
    SOURCES,
    LibraryBuild,
    architecture_names,
    copy_built_files,
    gencode_flags,
    requested_configs,
    requested_jobs,
)
from flash_helpers.compile.codegen import (
    KERNEL_HEADER,
    kernel_map_header,
    kernel_unit,
    library_configs,
)
from flash_helpers.compile.toolchain import (
    PYPI_TOOLCHAIN,
    BuildError,
    Toolchain,
    check_platform,
    find_nvcc,
    find_toolchain,
    parse_architectures,
    requested_architectures,
    toolchain_requirements,
)
from flash_helpers.kernel_configs import (
    FAMILIES,
    STEPS,
    get_kernel_progression_configs,
)
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.sass.read.containers import cubins_of

pytestmark = pytest.mark.slow

V1, V2 = (
    next(c for c in get_kernel_progression_configs() if c.step.id == step) for step in ("v1", "v2")
)
NAME_1, NAME_2 = V1.short_form(), V2.short_form()
NOWHERE = Path("/nowhere")
KERNEL_2 = "previous_kernels/v2/forward_kernel.cuh"
BACKEND = "tools/build/build_backend.py"


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def cuda_home(tmp_path) -> Path:
    """A CUDA toolkit whose nvcc is the fake one."""
    return fake_toolchain(tmp_path / "cuda/bin").nvcc.parents[1]


@pytest.fixture
def compilers(tmp_path) -> Path:
    """A folder for PATH that holds a g++ and nothing else."""
    return executable(tmp_path / "bin" / "g++", "#!/bin/sh\necho g++ 12\n").parent


@pytest.fixture
def environ(cuda_home, compilers) -> dict[str, str]:
    """An environment with both."""
    return {"CUDA_HOME": str(cuda_home), "PATH": str(compilers)}


@pytest.fixture
def no_pypi_nvcc(monkeypatch):
    monkeypatch.setattr(toolchain, "_pypi_folder", lambda: None)


class TestArchitectures:
    @pytest.mark.parametrize(
        ("text", "architectures"),
        [
            ("80", (80,)),
            ("80;86;89;90", (80, 86, 89, 90)),
            ("sm_90, sm_80", (80, 90)),
            (" 90 90 86 ", (86, 90)),
            ("8.0 9.0 12.0", (80, 90, 120)),
            ("100", (100,)),
        ],
    )
    def test_are_read_in_the_usual_spellings(self, text, architectures):
        assert parse_architectures(text) == architectures

    @pytest.mark.parametrize("text", ["hopper", "80;", "9", "80;x", "sm90", "-80", "1000", "90a"])
    def test_of_any_other_spelling_are_refused(self, text):
        with pytest.raises(BuildError, match=r"is not an architecture; .*80;86;89;90"):
            parse_architectures(text)

    def test_too_old_are_refused(self):
        with pytest.raises(BuildError, match=r"sm_75 is older: use 80 or higher"):
            parse_architectures("75;80")

    def test_default_to_all_that_the_project_is_about(self):
        assert requested_architectures({}) == (80, 86, 89, 90)
        assert requested_architectures({"FLASH_ATTENTION_CUDA_ARCHS": " "}) == (80, 86, 89, 90)
        assert requested_architectures({"FLASH_ATTENTION_CUDA_ARCHS": "90"}) == (90,)

    def test_become_machine_code_each_and_ptx_of_the_lowest(self):
        assert gencode_flags(("80", "90", "100", "103")) == [
            *("-gencode", "arch=compute_80,code=[sm_80,sm_90,compute_80]"),
            *("-gencode", "arch=compute_100,code=[sm_100,sm_103]"),
        ]
        assert gencode_flags(("80", "86", "90", "90a")) == [
            *("-gencode", "arch=compute_80,code=[sm_80,sm_86,sm_90,compute_80]"),
            *("-gencode", "arch=compute_90a,code=[sm_90a]"),
        ]
        assert gencode_flags(("90a",)) == ["-gencode", "arch=compute_90a,code=[sm_90a,compute_90a]"]
        assert architecture_names(("80", "90", "90a")) == "sm_80 sm_90 sm_90a compute_80"
        assert architecture_names(("90",)) == "sm_90 compute_90"


class TestJobs:
    def test_default_to_the_cores(self):
        assert requested_jobs({}) == len(os.sched_getaffinity(0))

    def test_are_max_jobs(self):
        assert requested_jobs({"MAX_JOBS": "3"}) == 3

    @pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
    def test_that_are_no_positive_number_are_refused(self, text):
        with pytest.raises(BuildError, match="MAX_JOBS"):
            requested_jobs({"MAX_JOBS": text})


class TestSteps:
    def test_default_to_all(self, root):
        assert requested_configs(root, {}) == library_configs(root)

    def test_are_those_that_the_environment_names(self, root):
        found = requested_configs(root, {"FLASH_ATTENTION_STEPS": "v2 7..8"})
        assert {config.step.id for config in found} == {"v2", "v7", "v8"}

    def test_that_there_are_not_are_refused(self, root):
        with pytest.raises(BuildError, match="FLASH_ATTENTION_STEPS: 'v99': the steps are v1 to"):
            requested_configs(root, {"FLASH_ATTENTION_STEPS": "v99"})


class TestOldPython:
    """An older Python reads the metadata, so that pip can say which one this package needs."""

    @pytest.mark.parametrize("name", ["setup.py", "py/flash_helpers/__init__.py", BACKEND])
    def test_can_read_what_is_run_before_that(self, root, name):
        ast.parse((root / name).read_text(), feature_version=(3, 9))

    def test_is_not_sent_for_a_compiler(self, root, monkeypatch):
        monkeypatch.syspath_prepend(root / Path(BACKEND).parent)
        backend = importlib.import_module("build_backend")
        monkeypatch.setattr(backend.sys, "version_info", (3, 9, 25))
        assert backend._with_toolchain(["wheel"]) == ["wheel"]

    def test_is_told_by_the_metadata_of_both_packages(self):
        for name in ("flash_attention", "flash_helpers"):
            metadata = importlib.metadata.metadata(name)
            assert metadata["Requires-Python"] == ">=3.10"
            assert metadata["License-Expression"] == "MIT"
            assert metadata["Version"] == flash_attention.__version__


class TestFindingNvcc:
    def test_prefers_cuda_home_then_cuda_path_then_path_then_the_usual_folder(
        self, tmp_path, no_pypi_nvcc
    ):
        homes = [tmp_path / name for name in ("home", "path", "on_path", "default")]
        nvccs = [executable(home / "bin" / "nvcc", "") for home in homes]
        environ = {
            "CUDA_HOME": str(homes[0]),
            "CUDA_PATH": str(homes[1]),
            "PATH": str(homes[2] / "bin"),
        }
        for nvcc, variable in zip(nvccs, [*environ, None], strict=True):
            assert find_nvcc(environ, homes[3]) == (nvcc, ())
            environ.pop(variable, None)
        assert find_nvcc(environ, NOWHERE) is None

    def test_falls_back_to_the_packages_from_pypi_and_their_runtime(self, tmp_path, monkeypatch):
        nvcc = executable(tmp_path / "nvidia/cu13/bin/nvcc", "")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "nvidia", raising=False)
        assert find_nvcc({}, NOWHERE) == (nvcc, (tmp_path / "nvidia/cu13/lib",))
        on_path = {"PATH": str(nvcc.parent)}
        assert find_nvcc(on_path, NOWHERE) == find_nvcc({}, NOWHERE)

    @pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
    def test_does_not_pass_over_a_wrong_folder_in_silence(self, tmp_path, variable):
        with pytest.raises(BuildError, match=f"{variable}={tmp_path} has no bin/nvcc"):
            find_nvcc({variable: str(tmp_path)}, NOWHERE)


class TestToolchain:
    def test_knows_the_release(self, cuda_home, environ):
        found = find_toolchain((80,), environ)
        assert found.version == (13, 0)
        assert found.nvcc == cuda_home / "bin" / "nvcc"
        assert "g++ 12" in found.identity

    def test_without_nvcc_says_what_to_install(self, no_pypi_nvcc):
        with pytest.raises(BuildError) as error:
            find_toolchain((80,), {}, NOWHERE)
        assert "install a CUDA toolkit, 12.4 or later, and set CUDA_HOME" in str(error.value)
        assert all(requirement in str(error.value) for requirement in PYPI_TOOLCHAIN)

    def test_without_cpp_compiler_says_what_to_install(self, environ, tmp_path):
        with pytest.raises(BuildError, match=r"no C\+\+ compiler: g\+\+ .* apt-get install g\+\+"):
            find_toolchain((80,), {**environ, "PATH": str(tmp_path)})

    def test_takes_the_cpp_compiler_that_nvcc_is_told_to_use(self, environ, tmp_path):
        clang = executable(tmp_path / "clang++", "#!/bin/sh\necho clang 18\n")
        told = {**environ, "PATH": "", "NVCC_CCBIN": str(clang)}
        assert "clang 18" in find_toolchain((80,), told).identity

    def test_too_old_is_refused(self, environ, monkeypatch):
        monkeypatch.setenv("FAKE_CUDA", "11.8")
        with pytest.raises(BuildError, match=r"is CUDA 11\.8 and the kernels need 12\.4 or later"):
            find_toolchain((80,), environ)

    def test_that_cannot_compile_for_an_architecture_is_refused(self, environ, monkeypatch):
        monkeypatch.setenv("FAKE_ARCHITECTURES", "75 80 90")
        with pytest.raises(BuildError, match=r'cannot compile for sm_89: .* some of "80;90"'):
            find_toolchain((80, 89), environ)

    @pytest.mark.parametrize("platform", ["win32", "darwin"])
    def test_exists_on_linux_only(self, platform):
        with pytest.raises(BuildError, match=f"builds on Linux and this is {platform}"):
            check_platform(platform)


class TestRequirements:
    @pytest.fixture
    def required(self, compilers, no_pypi_nvcc, monkeypatch) -> Callable[..., list[str]]:
        """Requirements without an nvcc, where g++ --version, pip --version and pip install
        --dry-run end with these statuses."""

        def run(*statuses: int) -> list[str]:
            left = iter(statuses)
            monkeypatch.setattr(
                toolchain.subprocess,
                "run",
                lambda command, **_: subprocess.CompletedProcess(
                    command, next(left), "g++ 12", "No matching distribution"
                ),
            )
            return toolchain_requirements({"PATH": str(compilers)}, NOWHERE)

        return run

    def test_are_none_where_there_is_an_nvcc(self, environ):
        assert toolchain_requirements(environ) == []

    @pytest.mark.parametrize("statuses", [(0, 0, 0), (0, 1)], ids=["pip", "another installer"])
    def test_are_nvidias_packages_unless_pip_cannot_get_them(self, required, statuses):
        assert required(*statuses) == list(PYPI_TOOLCHAIN)

    def test_that_pip_cannot_get_stop_the_build_with_what_to_install(self, required):
        with pytest.raises(BuildError) as error:
            required(0, 0, 1)
        assert "No matching distribution" in str(error.value)
        assert "Install a CUDA toolkit, 12.4 or later, and set CUDA_HOME" in str(error.value)


def write_tree(root: Path) -> Path:
    """A repository of two kernels that share a header."""
    files = {
        "src/flash_attention.cu": '#include "flash_kernels.cuh"\n'
        '#if CUDART_VERSION < 12080\n#include "registered_kernel.h"\n#endif\n',
        "src/include/registered_kernel.h": "// loads kernels\n",
        "src/include/flash_attention.cuh": "// structs\n",
        "src/include/shared.cuh": "// shared\n",
        "previous_kernels/v1/forward_kernel.cuh": '#include "shared.cuh"\n',
        "previous_kernels/v2/forward_kernel.cuh": '#include "shared.cuh"\n',
    }
    return write_sources(root, files)


@pytest.fixture
def tree(tmp_path) -> Path:
    return write_tree(tmp_path / "tree")


@pytest.fixture
def build(tree, cuda_home, tmp_path, monkeypatch) -> Callable[..., list[str]]:
    """Builds the tree with the fake nvcc; returns what that was called for, sorted."""
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))

    def run(
        architectures=(80, 90), identity="nvcc 13.0", report=lambda line: None, configs=(V1, V2)
    ) -> list[str]:
        log.write_text("")
        chain = Toolchain(cuda_home / "bin" / "nvcc", (13, 0), identity)
        made = LibraryBuild(tree, chain, architectures, 2, report, configs)
        made.run(tree / "flash_attention")
        return sorted(log.read_text().split())

    return run


EVERYTHING = sorted(["flash_attention", NAME_1, NAME_2, "link"])


def change(path: Path, text: str = "// changed\n") -> None:
    path.write_text(path.read_text() + text)


class TestBuild:
    def test_makes_the_library_and_the_ptx_and_log_of_each_kernel(self, tree, build):
        assert build() == EVERYTHING
        package = tree / "flash_attention"
        assert {str(p.relative_to(package)) for p in package.rglob("*") if p.is_file()} == {
            "libflash_attention.so",
            "built_from.json",
            *(f"ptx/{name}.ptx" for name in (NAME_1, NAME_2)),
            *(f"ptxas/{name}.log" for name in (NAME_1, NAME_2)),
        }
        assert "for 'sm_90'" in (package / "ptxas" / f"{NAME_1}.log").read_text()

    def test_ships_the_ptx_of_the_lowest_architecture_without_the_builders_paths(self, tree, build):
        ptx = tree / "flash_attention" / "ptx" / f"{NAME_1}.ptx"
        for architectures in ((80, 90), (80, 100)):  # of one PTX, and of two
            build(architectures=architectures)
            target, file, _ = ptx.read_text().splitlines()
            assert (target, file) == (".target sm_80", '.file 1 "previous_kernels/v1/kernel.cuh"')
        build(architectures=(90,))
        assert ".target sm_90" in ptx.read_text()

    def test_embeds_the_fatbin_of_each_kernel(self, tree, build):
        build()
        library = (tree / "flash_attention/libflash_attention.so").read_text()
        for name in (NAME_1, NAME_2):
            assert (tree / "build/kernels" / f"{name}.fatbin").read_text() in library
            assert f'return {{"{name}", "{name}_symbol", {name}_fatbin}};' in library

    def test_reports_each_unit_and_its_place(self, build):
        lines: list[str] = []
        build(report=lines.append)
        places, units = zip(*map(str.split, lines), strict=True)
        assert places == ("[1/3]", "[2/3]", "[3/3]", "[1/1]")
        assert {*units[:-1]} == {"flash_attention", NAME_1, NAME_2}
        assert units[-1] == "libflash_attention.so"

    def test_again_does_nothing(self, tree, build):
        build()
        files = {p: p.stat().st_mtime_ns for p in tree.rglob("*") if p.is_file()}
        assert build() == []
        assert {p: p.stat().st_mtime_ns for p in tree.rglob("*") if p.is_file()} == files

    @pytest.mark.parametrize(
        ("name", "compiled"),
        [
            (KERNEL_2, [NAME_2, "link"]),
            ("src/include/shared.cuh", [NAME_1, NAME_2, "link"]),
            ("src/include/registered_kernel.h", ["flash_attention", "link"]),
        ],
        ids=["a kernel", "a shared header", "the way of loading kernels"],
    )
    def test_after_a_change_compiles_what_includes_it(self, tree, build, name, compiled):
        build()
        change(tree / name)
        assert build() == sorted(compiled)

    def test_after_a_removed_header_compiles_what_included_it(self, tree, build):
        build()
        (tree / KERNEL_2).write_text("// alone\n")
        (tree / "src/include/shared.cuh").unlink()
        assert build() == sorted([NAME_1, NAME_2, "link"])

    def test_of_fewer_configs_compiles_no_kernel_and_drops_the_others_files(self, tree, build):
        build()
        assert build(configs=[V1]) == ["flash_attention", "link"]
        package = tree / "flash_attention"
        assert [path.stem for path in (package / "ptx").iterdir()] == [NAME_1]
        assert [path.stem for path in (package / "ptxas").iterdir()] == [NAME_1]

    @pytest.mark.parametrize("different", [{"architectures": (80,)}, {"identity": "nvcc 13.1"}])
    def test_for_something_else_compiles_everything(self, build, different):
        build()
        assert build(**different) == EVERYTHING

    def test_makes_a_lost_fatbin_or_library_again(self, tree, build):
        build()
        (tree / "build/kernels" / f"{NAME_1}.fatbin").unlink()
        assert NAME_1 in build()
        (tree / "flash_attention/libflash_attention.so").unlink()
        assert build() == ["link"]

    def test_is_made_from_maps_of_its_own(self, tree, build):
        committed = tree / AMPERE.map_header
        committed.write_text("not read\n")
        build()
        assert committed.read_text() == "not read\n"
        maps = (tree / "build/maps" / AMPERE.map_header.name).read_text()
        assert maps == kernel_map_header(AMPERE, [V1, V2])
        assert NAME_2 in (tree / "build/kernels/flash_attention.o").read_text()

    def test_of_nothing_is_refused(self, build):
        with pytest.raises(BuildError, match="at least one kernel"):
            build(configs=[])

    def test_that_fails_tells_the_units_name_and_the_compilers_words(self, tree, build):
        change(tree / KERNEL_2, "FAIL\n")
        with pytest.raises(BuildError, match=rf"(?s){NAME_2}.*FAIL is not C\+\+"):
            build()
        left = {path.suffix for path in (tree / "build/kernels").glob(f"*{NAME_2}*")}
        assert left == {".cu"}
        assert not (tree / "build/kernels/.compiling").exists()

    @pytest.mark.parametrize(
        "loss",
        [
            "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due "
            "to insufficient register resources for the wgmma pipeline in function 'k'",
            "(C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum "
            "register requirement",
        ],
    )
    def test_fails_where_ptxas_gives_up_what_the_kernel_is_built_on(self, tree, build, loss):
        change(tree / KERNEL_2, f"// PTXAS {loss}\n")
        with pytest.raises(BuildError) as error:
            build()
        assert str(error.value).startswith(f"{NAME_2}: ptxas did not compile it as it is written")
        assert loss.partition(") ")[2] in str(error.value)
        with pytest.raises(BuildError):
            build()  # though no unit is stale
        assert not (tree / "flash_attention/libflash_attention.so").exists()

    def test_passes_a_fence_that_ptxas_has_put_in(self, tree, build):
        told = "(C7519) Potential Performance Loss: 'warpgroup.arrive' is injected in function 'k'"
        change(tree / KERNEL_2, f"// PTXAS {told}\n")
        assert NAME_2 in build()

    def test_keeps_the_old_fatbin_stale_when_its_new_source_fails(self, tree, build):
        build()
        kernel = tree / KERNEL_2
        good = kernel.read_text()
        change(kernel, "FAIL\n")
        with pytest.raises(BuildError):
            build()
        kernel.write_text(good + "// mended\n")
        assert build() == sorted([NAME_2, "link"])


def test_interrupted_build_leaves_no_half_output_and_no_process(tree, cuda_home, tmp_path):
    change(tree / "previous_kernels/v1/forward_kernel.cuh", "// SLEEP\n")
    log = tmp_path / "log"
    log.touch()
    program = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from flash_helpers.compile.build import LibraryBuild\n"
        "from flash_helpers.compile.toolchain import Toolchain\n"
        "from flash_helpers.kernel_configs import config_from_short_form\n"
        # a shell's background jobs are started with the interrupt ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "root, nvcc = map(Path, sys.argv[1:3])\n"
        "chain = Toolchain(nvcc, (13, 0), '')\n"
        "configs = [config_from_short_form(name) for name in sys.argv[3:]]\n"
        "made = LibraryBuild(root, chain, (80,), 1, print, configs)\n"
        "made.run(root / 'flash_attention')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, tree, cuda_home / "bin" / "nvcc", NAME_1, NAME_2],
        env={**os.environ, "FAKE_LOG": str(log)},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        sleeper = wait_for_sleeper(log)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) != 0
    finally:
        process.kill()
    assert not is_running(sleeper)
    left = {path.name for path in (tree / "build/kernels").iterdir()}
    assert left == {
        f"{NAME_1}.cu",
        f"{NAME_2}.cu",
        *(f"flash_attention.{suffix}" for suffix in ("o", "o.d", "log")),
        *("build.ninja", ".ninja_log", "library.exports", "toolchain.txt"),
    }


def wait_for_sleeper(log: Path) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        words = log.read_text().split()
        if "sleeper" in words[:-1]:
            return int(words[words.index("sleeper") + 1])
        time.sleep(0.02)
    raise AssertionError("the build never reached the sleeping kernel")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_copy_takes_the_built_files_and_leaves_no_older_ones(tmp_path):
    package, destination = tmp_path / "package", tmp_path / "destination"
    built = ("libflash_attention.so", "built_from.json", "ptx/a.ptx", "ptxas/a.log")
    for name in (*built, "_private.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    (destination / "ptx").mkdir(parents=True)
    (destination / "ptx" / "old.ptx").touch()
    copy_built_files(package, destination)
    files = {str(p.relative_to(destination)) for p in destination.rglob("*") if p.is_file()}
    assert files == {*built}


def test_wheel_serves_every_python_and_holds_the_built_files(
    root, tree, cuda_home, tmp_path, monkeypatch
):
    pytest.importorskip("setuptools", minversion="77")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tree)
    shutil.copytree(root / "py" / "flash_helpers", tree / "py" / "flash_helpers")
    for step in STEPS.values():
        if not (tree / step.source).is_file():
            (tree / step.source).parent.mkdir(parents=True, exist_ok=True)
            (tree / step.source).write_text("// a kernel\n")
    modules = [p.relative_to(root) for p in (root / "flash_attention").rglob("*.py")]
    for path in (*modules, Path("flash_attention/py.typed")):
        (tree / path).parent.mkdir(exist_ok=True)
        shutil.copy(root / path, tree / path)
    environ = {**os.environ, "CUDA_HOME": str(cuda_home), "NVCC_CCBIN": shutil.which("true")}
    subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", tmp_path / "dist"],
        cwd=tree,
        env=environ,
        check=True,
        capture_output=True,
    )
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.startswith(f"flash_attention-{flash_attention.__version__}-py3-none-linux_")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert files == {
        *map(str, modules),
        "flash_attention/py.typed",
        "flash_attention/libflash_attention.so",
        "flash_attention/built_from.json",
        *(f"flash_attention/ptx/{config.short_form()}.ptx" for config in library_configs(tree)),
        *(f"flash_attention/ptxas/{config.short_form()}.log" for config in library_configs(tree)),
        *(
            f"flash_attention/sources/{path.relative_to(tree)}"
            for pattern in SOURCES
            for path in tree.glob(pattern)
        ),
    }
    assert "flash_attention/sources/kernels/hopper/h30.cuh" in files


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ('__version__ = "65.5.0"', "there is setuptools 65.5.0"),
        ('__version__ = "76.1.0.post1"', "there is setuptools 76.1.0.post1"),
        ('raise ImportError("none")', "there is no setuptools"),
    ],
)
def test_an_older_setuptools_is_refused_with_the_one_that_is_needed(root, tmp_path, text, there):
    (needed,) = re.findall(r'"setuptools>=(\d+)"', (root / "pyproject.toml").read_text("utf-8"))
    (tmp_path / "setuptools.py").write_text(text, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "setup.py", "build_kernels"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert ended.stderr == (
        f"error: {there}, and setup.py needs {needed} or later: pip install "
        f"'setuptools>={needed}', or leave out --no-build-isolation\n"
    )


def test_real_compiler_does_as_the_fake_one(tmp_path, root):
    chain = real_toolchain(80)
    tree = write_tree(tmp_path / "tree")
    for name in {KERNEL_HEADER, *(str(family.header) for family in FAMILIES.values())}:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, tree / name)
    (tree / "src/include/shared.cuh").write_text(
        "#pragma once\n__device__ inline void store(void *O) { *static_cast<int *>(O) = 1; }\n"
    )
    (tree / "previous_kernels/v1/forward_kernel.cuh").write_text(
        '#include "flash_attention.cuh"\n'
        '#include "shared.cuh"\n'
        "namespace v1 {\n"
        "template <typename Config>\n"
        "__global__ void forward_kernel(const __grid_constant__ ForwardKernelArgs args) {\n"
        "    store(args.O);\n"
        "}\n"
        "}\n"
    )
    lines: list[str] = []

    def build() -> list[str]:
        lines.clear()
        LibraryBuild(tree, chain, (80,), 2, lines.append, [V1]).run(tree / "flash_attention")
        return lines

    build()
    package = tree / "flash_attention"
    ptx = (package / "ptx" / f"{NAME_1}.ptx").read_text()
    assert ".target sm_80" in ptx
    assert '"src/include/shared.cuh"' in ptx
    assert str(tree) not in ptx
    assert "for 'sm_80'" in (package / "ptxas" / f"{NAME_1}.log").read_text()
    members = cubins_of(package / "libflash_attention.so")
    (kernel,) = (kernel for member in members for kernel in member.cubin().kernels)
    assert NAME_1 in kernel.symbol
    change(tree / "src/include/shared.cuh")
    assert NAME_1 in " ".join(build())
    assert build() == 2 * ["ninja: no work to do."]


@pytest.mark.parametrize("step", ["v16", "o5"])
def test_ptx_for_90_differs_from_that_for_80_in_the_target_only(tmp_path, root, step):
    """So that one can stand for both."""
    nvcc = real_toolchain(80, 90).nvcc
    unit = tmp_path / "kernel.cu"
    config = next(c for c in get_kernel_progression_configs() if c.step is STEPS[step])
    unit.write_text(kernel_unit(config))
    texts = []
    for target in (80, 90):
        flags = [*COMPILE_FLAGS, f"-arch=compute_{target}", "-ptx", unit, "-o", tmp_path / "ptx"]
        subprocess.run([nvcc, *flags], cwd=root, check=True, capture_output=True)
        texts.append((tmp_path / "ptx").read_text().replace(f".target sm_{target}", ".target"))
    assert "mma.sync" in texts[0] and texts[0] == texts[1]
