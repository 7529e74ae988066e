"""Kernels compiled at first use, and the cache that keeps them. The compiler is a stand-in."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_sources import write_sources
from fake_toolchain import SUPPORT, FakeCompiler

from flash_helpers.compile import jit as jit_module
from flash_helpers.compile.cache import FOLDER_VARIABLE, Cache, require_room
from flash_helpers.compile.compilers import find_compiler
from flash_helpers.compile.jit import (
    DEBUG_VARIABLE,
    VERBOSE_VARIABLE,
    Jit,
    default_jit,
    units_of,
)
from flash_helpers.compile.nvrtc import gather_sources
from flash_helpers.compile.package import sources_root
from flash_helpers.compile.processes import Stopped
from flash_helpers.compile.sources import Sources, Unit, included_files
from flash_helpers.compile.toolchain import BuildError
from flash_helpers.kernel_configs import get_kernel_progression_configs

pytestmark = pytest.mark.slow

UNIT = Unit("kernel_a", '#include "kernels/a.cuh"\n// a\n')
OTHER = Unit("kernel_b", '#include "kernels/b.cuh"\n// b\n')
TARGET = "sm_90a"
REPOSITORY = Path(__file__).resolve().parents[2]
V1 = get_kernel_progression_configs()[0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Sources of two kernels, one with a header of a header."""
    texts = {
        "kernels/a.cuh": '#include <cstdint>\n#include "sub/outer.cuh"\n// kernel a\n',
        "kernels/b.cuh": "// kernel b\n",
        "src/include/sub/outer.cuh": '# include "sub/inner.cuh" // once\n',
        "src/include/sub/inner.cuh": "// inner\n",
    }
    return write_sources(tmp_path / "sources", texts)


@pytest.fixture
def make(root: Path, tmp_path: Path) -> Callable[..., Jit]:
    """Makes what another process would have: a Jit of the same sources and the same cache."""

    def make(**changes) -> Jit:
        compiler = changes.pop("compiler", FakeCompiler())
        cache = Cache(tmp_path / "cache", changes.pop("prebuilt", None))
        return Jit(changes.pop("root", root), cache, lambda: compiler, 2, **changes)

    return make


def entry_of(jit: Jit, unit: Unit = UNIT) -> Path:
    (found,) = jit.get([unit], TARGET)
    return found.folder


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


class TestEntry:
    def test_machine_code_comes_with_its_ptx_messages_and_symbol(self, make) -> None:
        (found,) = make().get([UNIT], TARGET)
        assert (found.name, found.target, found.compiler) == ("kernel_a", TARGET, "fakecc 13.0")
        assert f".entry {found.symbol}(" in found.ptx_path.read_text()
        assert found.cubin_path.read_bytes().startswith(b"\x7fELF")
        assert "Used 168 registers" in found.log_path.read_text()

    def test_ptx_alone_has_no_machine_code(self, make) -> None:
        (found,) = make().get([UNIT], "compute_90a")
        assert found.ptx_path.is_file() and not found.cubin_path.exists()

    def test_each_unit_has_its_own_in_the_order_asked_for(self, make, log) -> None:
        targets = [TARGET, "sm_80", TARGET]
        found = make().get([OTHER, UNIT, OTHER], targets)
        assert [(c.name, c.target) for c in found] == [
            (unit.name, target) for unit, target in zip((OTHER, UNIT, OTHER), targets, strict=True)
        ]
        assert sorted(log()) == ["kernel_a", "kernel_b"]

    def test_nothing_but_entries_is_left(self, make, tmp_path) -> None:
        entries = {entry_of(make(), unit).name for unit in (UNIT, OTHER)}
        assert {*left_in(tmp_path / "cache")} == entries


# Ingredients of the key. Each change is made to the sources, or to what is asked for.

Change = Callable[[Path], dict]


def written(name: str, text: str) -> Change:
    def change(root: Path) -> dict:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
        return {}

    return change


def renamed_header(root: Path) -> dict:
    """The same two texts, apart from the name that the one includes."""
    folder = root / "src/include/sub"
    (folder / "inner.cuh").rename(folder / "other.cuh")
    (folder / "outer.cuh").write_text('# include "sub/other.cuh" // once\n')
    return {}


def asked(**what: object) -> Change:
    return lambda root: what


CHANGES: dict[str, Change] = {
    "the unit's text": asked(unit=Unit(UNIT.name, UNIT.text + "//\n")),
    "the unit's name": asked(unit=Unit("kernel_c", UNIT.text)),
    "the kernel's file": written("kernels/a.cuh", '#include "sub/outer.cuh"\n// kernel A\n'),
    "a header of a header": written("src/include/sub/inner.cuh", "// INNER\n"),
    "a header's name": renamed_header,
    "a file that hides a header": written("kernels/sub/outer.cuh", "// hides the other\n"),
    "a header that was missing": written("src/include/cstdint", "// hides the compiler's\n"),
    "the compiler": asked(compiler=FakeCompiler(identity="another")),
    "a flag": asked(compiler=FakeCompiler(options=("-DX",))),
    "debugging": asked(debug=True),
    "the architecture": asked(target="sm_90"),
    "PTX alone": asked(target="compute_90a"),
}
OF_SOURCES = (
    "the kernel's file",
    "a header of a header",
    "a file that hides a header",
    "a header that was missing",
)


class TestKey:
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_has_every_ingredient(self, make, root, log, change) -> None:
        before = shutil.copytree(root, root.parent / "before")
        entry_of(make())
        log()
        what = {"unit": UNIT, "target": TARGET, **change(root)}
        unit, target = what.pop("unit"), what.pop("target")
        for _ in range(2):
            make(**what).get([unit], target)
        assert log() == [unit.name]
        shutil.rmtree(root)
        before.rename(root)
        entry_of(make())
        assert log() == []  # the entry of before is still there

    @pytest.mark.parametrize("name", OF_SOURCES)
    def test_sees_a_change_within_a_process(self, make, root, log, name) -> None:
        jit = make()
        entry_of(jit)
        log()
        CHANGES[name](root)
        for _ in range(2):
            entry_of(jit)
        assert log() == ["kernel_a"]

    def test_has_nothing_else(self, make, root, log, tmp_path, monkeypatch) -> None:
        entry_of(make())
        log()
        (root / "kernels/b.cuh").write_text("// of another kernel\n")
        moved = tmp_path / "elsewhere"
        root.rename(moved)
        monkeypatch.chdir(tmp_path)
        (moved / "kernels/a.cuh").touch()
        entry_of(make(root=moved, verbose=True))
        assert log() == []

    def test_is_of_the_sources_that_the_compiler_read(self, make, root) -> None:
        """A file that is saved while the compiler runs must not be kept under the old key."""
        header = root / "kernels/a.cuh"
        saved = header.read_text() + "// saved\n"

        class SavingCompiler(FakeCompiler):
            def command(self, unit, target, scratch, debug):
                header.write_text(saved)
                return super().command(unit, target, scratch, debug)

        before = header.read_text()
        made = make(compiler=SavingCompiler()).get([UNIT], TARGET)[0].ptx_path.read_text()
        assert entry_of(make()).joinpath("kernel.ptx").read_text() == made
        header.write_text(before)
        assert entry_of(make()).joinpath("kernel.ptx").read_text() != made

    def test_a_macro_that_names_a_file_is_refused(self, make, root) -> None:
        (root / "kernels/a.cuh").write_text("#define FILE\n#include FILE\n")
        with pytest.raises(BuildError, match=r"a\.cuh includes 'FILE': write the file's name"):
            entry_of(make())

    def test_a_file_that_cannot_be_read_is_no_fault_of_the_cache(self, make, root) -> None:
        (root / "src/include/cstdint").mkdir()
        with pytest.raises(BuildError, match="include/cstdint cannot be read: Is a directory"):
            entry_of(make())

    def test_a_config_has_a_unit_for_each_kernel(self) -> None:
        (unit,) = units_of(V1)
        assert unit.name == V1.short_form() and V1.short_form() in unit.text
        assert units_of(V1) is units_of(V1)


class TestSources:
    def test_are_followed_through_includes(self, root) -> None:
        (root / "src/include/sub/inner.cuh").write_text('#include "sub/outer.cuh"\n')
        found = included_files(root, '#include "kernels/a.cuh"\n#include "not_there.h"\n')
        assert [path.name for path in found] == ["a.cuh", "inner.cuh", "outer.cuh"]

    def test_a_unit_has_no_folder_of_its_own(self, root) -> None:
        """A header beside the root's folders hides none of theirs, in the key and for NVRTC."""
        for name in ("top.cuh", "src/include/top.cuh"):
            (root / name).write_text(f"// {name}\n")
        text = '#include "top.cuh"\n'
        assert included_files(root, text) == [root / "src/include/top.cuh"]
        assert [*gather_sources(root, text)[1]] == ["src/include/top.cuh"]

    def test_a_file_is_read_again_that_was_saved_twice_within_a_tick(
        self, root, monkeypatch
    ) -> None:
        sources, header = Sources(root), root / "src/include/sub/inner.cuh"
        before, status, stat = sources.included(UNIT.text), header.stat(), os.stat
        header.write_text("// INNER\n")
        monkeypatch.setattr(
            os, "stat", lambda path, **options: status if path == str(header) else stat(path)
        )
        assert sources.included(UNIT.text) != before

    def test_digest_is_of_names_and_contents(self, root, tmp_path) -> None:
        before = Sources(root).digest(UNIT)
        assert Sources(root).digest(OTHER) != before
        assert Sources(shutil.copytree(root, tmp_path / "copy")).digest(UNIT) == before
        written("src/include/sub/inner.cuh", "// INNER\n")(root)
        assert Sources(root).digest(UNIT) != before


# Entries that are not what they seem


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def of_another_format(entry: Path, jit: Jit) -> None:
    manifest = json.loads((entry / "manifest.json").read_text())
    (entry / "manifest.json").write_text(json.dumps(manifest | {"format": 0}))


def of_another_kernel(entry: Path, jit: Jit) -> None:
    shutil.rmtree(entry)
    shutil.copytree(entry_of(jit, OTHER), entry)


def a_file(entry: Path, jit: Jit) -> None:
    shutil.rmtree(entry)
    entry.write_text("not a folder")


DAMAGES: dict[str, Callable[[Path, Jit], object]] = {
    "PTX is cut off": lambda entry, jit: cut(entry / "kernel.ptx"),
    "machine code is changed": lambda entry, jit: (entry / "kernel.cubin").write_bytes(b"\x7fELF"),
    "messages are gone": lambda entry, jit: (entry / "kernel.log").unlink(),
    "manifest is cut off": lambda entry, jit: cut(entry / "manifest.json"),
    "manifest is empty": lambda entry, jit: (entry / "manifest.json").write_text("{}"),
    "manifest is a list": lambda entry, jit: (entry / "manifest.json").write_text("[]"),
    "format is another": of_another_format,
    "kernel is another": of_another_kernel,
    "entry is a file": a_file,
    "entry is gone": lambda entry, jit: shutil.rmtree(entry),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_is_repaired(self, make, log, tmp_path, damage) -> None:
        entry = entry_of(make())
        whole = {path.name: path.read_bytes() for path in entry.iterdir()}
        damage(entry, make())
        log()
        assert entry_of(make()) == entry
        assert log() == ["kernel_a"]
        assert {path.name: path.read_bytes() for path in entry.iterdir()} == whole
        assert not [name for name in left_in(tmp_path / "cache") if name.startswith(".")]

    def test_an_entry_that_goes_while_a_process_has_it_is_made_again(self, make, log) -> None:
        jit = make()
        shutil.rmtree(entry_of(jit))
        log()
        assert entry_of(jit).is_dir()
        assert log() == ["kernel_a"]


class TestDebugging:
    def test_a_kernel_is_found_that_its_ptx_declares_and_defines(self, tmp_path) -> None:
        try:
            compiler = find_compiler()
        except BuildError as error:
            pytest.skip(f"no compiler: {error}")
        jit = Jit(REPOSITORY, Cache(tmp_path / "cache"), lambda: compiler, jobs=1, debug=True)
        (found,) = jit.get(units_of(V1), "sm_80")
        assert len(re.findall(rf"\.entry {found.symbol}\b", found.ptx_path.read_text())) == 2


class TestFailure:
    def test_tells_the_compilers_text_once_and_keeps_nothing(self, make, root, tmp_path) -> None:
        (root / "kernels/a.cuh").write_text("FAIL\n")
        with pytest.raises(BuildError) as error:
            make().get([UNIT], TARGET)
        text = str(error.value)
        assert text.startswith("kernel_a for sm_90a: fakecc 13.0 failed with exit status 1\n")
        assert text.count("error: FAIL is not C++") == 1
        assert left_in(tmp_path / "cache") == []
        (root / "kernels/a.cuh").write_text("// right again\n")
        assert entry_of(make()).is_dir()

    def test_of_one_stops_no_other(self, make, root) -> None:
        (root / "kernels/a.cuh").write_text("FAIL\n")
        found = {outcome.unit: outcome for outcome in make().each([UNIT, OTHER], TARGET, 60)}
        assert found[UNIT].compiled is None and "error: FAIL" in found[UNIT].reason
        assert "error: FAIL" in found[UNIT].log
        assert found[OTHER].compiled is not None

    def test_takes_too_long(self, make, root, log, tmp_path) -> None:
        (root / "kernels/a.cuh").write_text("SLEEP\n")
        (outcome,) = make().each([UNIT], TARGET, timeout_s=0.5)
        assert outcome.reason == "fakecc 13.0 took over 0.5 s"
        assert_no_sleeper_is_left(log())
        assert left_in(tmp_path / "cache") == []

    def test_is_what_ptxas_gave_up_unless_nothing_is_optimised(self, make, root) -> None:
        loss = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
        (root / "kernels/a.cuh").write_text(f"// PTXAS {loss}\n")
        with pytest.raises(BuildError, match=r"find out what it needs(.|\n)*Loss: wgmma"):
            make().get([UNIT], TARGET)
        assert make(debug=True).get([UNIT], TARGET)

    @pytest.mark.parametrize(
        ("compiler", "said"),
        [
            (FakeCompiler(unknown=TARGET), "fakecc 13.0 cannot compile for sm_90a"),
            (FakeCompiler(writes=("kernel.ptx",)), "wrote no kernel.cubin"),
            (FakeCompiler(program="/nowhere/cc"), "/nowhere/cc cannot be run"),
        ],
    )
    def test_of_a_compiler_is_told(self, make, tmp_path, compiler, said) -> None:
        with pytest.raises(BuildError, match=said):
            make(compiler=compiler).get([UNIT], TARGET)
        assert left_in(tmp_path / "cache") == []

    def test_without_a_compiler_is_told_when_one_is_needed(self, root, tmp_path) -> None:
        def none():
            raise BuildError("there is no compiler: pip install one")

        jit = Jit(root, Cache(tmp_path / "cache"), none, jobs=1)
        assert jit.get([], TARGET) == []
        with pytest.raises(BuildError, match="pip install one"):
            jit.get([UNIT], TARGET)


class TestPackage:
    """Entries that the installed package brings."""

    @pytest.fixture
    def package(self, root, tmp_path) -> Path:
        made_by = FakeCompiler(identity="of another machine", name="nvcc 13.1")
        Jit(root, Cache(tmp_path / "package"), lambda: made_by, jobs=1).get([UNIT], TARGET)
        return tmp_path / "package"

    def test_need_no_compiler(self, package, root, tmp_path, log) -> None:
        def none():
            raise BuildError("there is no compiler")

        jit = Jit(root, Cache(tmp_path / "cache", package), none, jobs=1)
        (found,) = jit.get([UNIT], TARGET)
        assert found.folder.parent == package and found.compiler == "nvcc 13.1"
        with pytest.raises(BuildError, match="there is no compiler"):
            jit.get([OTHER], TARGET)

    def test_count_only_for_their_sources_and_are_never_written(self, package, make, root) -> None:
        before = left_in(package)
        assert entry_of(make(prebuilt=package)).parent == package
        (root / "src/include/sub/inner.cuh").write_text("// INNER\n")
        assert entry_of(make(prebuilt=package)).parent != package
        assert left_in(package) == before


# Folders that cannot be written


class TestFallback:
    def expect(self, jit: Jit, said: str, log) -> None:
        """A warning, once, and kernels all the same."""
        with pytest.warns(RuntimeWarning, match=said) as told:
            folders = [jit.get([unit], TARGET)[0].folder for unit in (UNIT, OTHER, UNIT)]
        assert len(told) == 1
        assert f"set {FOLDER_VARIABLE} to" in str(told[0].message)
        assert all((folder / "kernel.cubin").is_file() for folder in folders)
        assert sorted(log()) == ["kernel_a", "kernel_b"]

    def test_from_a_folder_that_cannot_be_made(self, make, log, tmp_path) -> None:
        (tmp_path / "cache").write_text("a file")
        self.expect(make(), "cache cannot be used", log)

    @pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
    def test_from_a_folder_that_cannot_be_written(
        self, make, log, tmp_path, monkeypatch, code
    ) -> None:
        """Root may write anywhere, so that the refusal is simulated."""
        cache, make_folder = str(tmp_path / "cache"), os.mkdir

        def refuse(path, *arguments, **options):
            if str(path).startswith(cache):
                raise OSError(code, os.strerror(code), str(path))
            return make_folder(path, *arguments, **options)

        monkeypatch.setattr(os, "mkdir", refuse)
        self.expect(make(), os.strerror(code), log)

    def test_from_a_file_system_without_locks(self, make, log, tmp_path, monkeypatch) -> None:
        cache, lock = tmp_path / "cache", fcntl.flock

        def refuse(handle: int, operation: int) -> None:
            if Path(f"/proc/self/fd/{handle}").readlink().is_relative_to(cache):
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            lock(handle, operation)

        monkeypatch.setattr(fcntl, "flock", refuse)
        self.expect(make(), os.strerror(errno.ENOLCK), log)

    def test_from_a_disk_that_is_full(self, make, log, tmp_path, monkeypatch) -> None:
        """The compiler fails there, by an error like any other of it."""
        cache = tmp_path / "cache"
        monkeypatch.setenv("FAKE_FULL", str(cache))

        def refuse(folder: Path) -> None:
            if folder.is_relative_to(cache):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(jit_module, "require_room", refuse)
        self.expect(make(), "No space left on device", log)

    def test_finds_room_where_there_is_some(self, tmp_path) -> None:
        require_room(tmp_path)
        assert left_in(tmp_path) == []

    def test_is_told_if_there_is_no_other_folder(self, make, tmp_path, monkeypatch) -> None:
        (tmp_path / "cache").write_text("a file")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        with pytest.raises(BuildError, match="and no temporary folder either: set"):
            entry_of(make())

    def test_reads_what_it_cannot_write(self, make, log, tmp_path, monkeypatch) -> None:
        entry = entry_of(make())
        monkeypatch.setattr(os, "mkdir", lambda *_, **__: pytest.fail("a folder was made"))
        assert entry_of(make()) == entry


class TestClaim:
    """The right to make an entry, which one thread of one process has."""

    def test_ends_when_nobody_waits_for_it_any_more(self, make) -> None:
        jit, stopped = make(), threading.Event()
        recipe = jit.recipe(UNIT, TARGET)
        with jit.cache.claim(recipe, "key", stopped):
            stopped.set()
            with pytest.raises(Stopped), jit.cache.claim(recipe, "key", stopped):
                pytest.fail("two have it")

    @pytest.mark.parametrize("name, is_before", [("mkdir", False), ("open", True), ("open", False)])
    def test_is_had_by_the_next_whenever_its_holder_ends_it(
        self, make, monkeypatch, name, is_before
    ) -> None:
        """Its folder is removed between any two calls of the next one."""
        jit, stopped, holder = make(), threading.Event(), contextlib.ExitStack()
        recipe = jit.recipe(UNIT, TARGET)
        holder.enter_context(jit.cache.claim(recipe, "key", stopped))
        call = getattr(os, name)

        def end_it_beside(path: Any, *arguments: Any, **named: Any) -> Any:
            if not str(path).startswith(f"{jit.cache.folder}/.compiling-"):
                return call(path, *arguments, **named)
            if is_before:
                holder.close()
            try:
                return call(path, *arguments, **named)
            finally:
                holder.close()

        monkeypatch.setattr(os, name, end_it_beside)
        with jit.cache.claim(recipe, "key", stopped) as scratch:
            assert scratch.is_dir()

    def test_ends_for_those_who_wait_although_a_forked_process_lives_on(self, make) -> None:
        """The child has the open file of the lock, too."""
        waiting, got_it = threading.Event(), threading.Event()

        class Stopped(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                waiting.set()
                return super().wait(timeout)

        jit = make()
        recipe = jit.recipe(UNIT, TARGET)

        def wait_for_it() -> None:
            with jit.cache.claim(recipe, "key", stopped):
                got_it.set()

        stopped, thread = Stopped(), threading.Thread(target=wait_for_it)
        with jit.cache.claim(recipe, "key", threading.Event()):
            thread.start()
            assert waiting.wait(60)
            child = os.fork()
            if not child:
                signal.pause()
        try:
            assert got_it.wait(5)
        finally:
            stopped.set()
            thread.join()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# Several at once


PROCESS = """
import signal, sys
from pathlib import Path
from fake_toolchain import FakeCompiler
from flash_helpers.compile.cache import Cache
from flash_helpers.compile.jit import Jit
from flash_helpers.compile.processes import Stopped
from flash_helpers.compile.compilers import find_compiler
from flash_helpers.compile.package import sources_root
from flash_helpers.compile.nvrtc import gather_sources
from flash_helpers.compile.sources import Unit
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
root, cache, *names = sys.argv[1:]
jit = Jit(Path(root), Cache(Path(cache)), FakeCompiler, 2)
units = [Unit(f"kernel_{name}", f'#include "kernels/{name}.cuh"\\n// {name}\\n') for name in names]
print(*(found.folder.name for found in jit.get(units, "sm_90a")))
"""


@pytest.fixture
def start(root, tmp_path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that compile kernels by name."""
    started = []

    def start(*names: str) -> subprocess.Popen[str]:
        paths = [str(SUPPORT), *sys.path]
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(root), str(tmp_path / "cache"), *names],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lines_with(log: Callable[[], list[str]], word: str) -> list[str]:
    """The log's lines, once one of them has the word."""
    lines: list[str] = []
    deadline = time.monotonic() + 60
    while not any(word in line for line in lines) and time.monotonic() < deadline:
        time.sleep(0.01)
        lines += log()
    return lines


def sleepers(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("sleeper")]


def assert_no_sleeper_is_left(lines: list[str]) -> None:
    (sleeper,) = sleepers(lines)
    deadline = time.monotonic() + 10
    while is_running(sleeper) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(sleeper)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class TestParallel:
    def test_compilers_run_at_the_same_time(self, make, root, log) -> None:
        for name in "ab":
            (root / f"kernels/{name}.cuh").write_text("MEET\n")
        assert len(make().get([UNIT, OTHER], TARGET)) == 2

    def test_threads_share_one_compilation(self, make, root, log) -> None:
        (root / "kernels/a.cuh").write_text("PAUSE\n")
        jit, found = make(), []
        threads = [
            threading.Thread(target=lambda own=own: found.append(entry_of(own)))
            for own in (jit, jit, make())
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert log() == ["kernel_a"]
        assert len(found) == 3 and len({*found}) == 1

    def test_processes_share_one_compilation(self, start, root, log) -> None:
        (root / "kernels/a.cuh").write_text("PAUSE\n")
        processes = [start("a"), start("a")]
        outputs = [process.communicate()[0] for process in processes]
        assert log() == ["kernel_a"]
        assert outputs[0].startswith("kernel_a-sm_90a-") and len({*outputs}) == 1

    def test_an_iterator_that_is_closed_ends_its_compilers(self, make, root, log, tmp_path) -> None:
        (root / "kernels/a.cuh").write_text("SLEEP\n")
        outcomes = make().each([UNIT, OTHER], TARGET, 60)
        assert next(outcomes).unit == OTHER
        lines = lines_with(log, "sleeper")
        outcomes.close()
        assert_no_sleeper_is_left(lines)
        assert [name[:8] for name in left_in(tmp_path / "cache")] == ["kernel_b"]

    def test_ctrl_c_ends_compilers_and_leaves_nothing(self, start, root, log, tmp_path) -> None:
        (root / "kernels/a.cuh").write_text("SLEEP\n")
        process = start("a")
        lines = lines_with(log, "sleeper")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert process.returncode != 0 and "KeyboardInterrupt" in errors
        assert_no_sleeper_is_left(lines)
        assert left_in(tmp_path / "cache") == []

    @pytest.mark.parametrize("name", ["a", "b"])
    def test_a_process_that_is_killed_blocks_nothing(
        self, start, root, log, make, tmp_path, name
    ) -> None:
        """Whether the next one wants the same kernel or another one."""
        header = root / "kernels/a.cuh"
        before = header.read_text()
        header.write_text("SLEEP\n")
        process = start("a")
        lines = lines_with(log, "sleeper")
        process.kill()
        process.communicate()
        assert left_in(tmp_path / "cache")[0].startswith(".compiling-kernel_a-")
        header.write_text(before)
        entry = entry_of(make(), {"a": UNIT, "b": OTHER}[name])
        assert left_in(tmp_path / "cache") == [entry.name]
        for orphan in sleepers(lines):
            os.kill(orphan, signal.SIGKILL)


class TestWords:
    """Lines on stderr."""

    def test_progress_is_for_a_terminal(self, make, terminal, capsys) -> None:
        make().get([UNIT, OTHER], TARGET)
        assert "compiling 2 kernels for sm_90a: 0 of 2" in capsys.readouterr().err
        make().get([UNIT, OTHER], TARGET)
        assert capsys.readouterr() == ("", "")
        make().get([UNIT], "compute_90a")
        assert "compiling kernel_a for compute_90a: 0 of 1" in capsys.readouterr().err

    def test_elsewhere_there_are_none(self, make, capsys) -> None:
        make().get([UNIT], TARGET)
        assert capsys.readouterr() == ("", "")

    def test_each_command_is_told_with_its_time_and_messages(self, make, capsys) -> None:
        make(verbose=True).get([UNIT], TARGET)
        said = capsys.readouterr().err
        assert "fake_nvcc.py --first-use" in said
        assert "kernel_a for sm_90a: 0." in said and "Used 168 registers" in said

    @pytest.mark.parametrize("text", ["// right\n", "FAIL\n"])
    def test_a_command_can_be_run_again(
        self, make, root, tmp_path, monkeypatch, capsys, text
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        (root / "kernels/a.cuh").write_text(text)
        (outcome,) = make(verbose=True).each([UNIT], TARGET, 60)
        command, _, *messages = capsys.readouterr().err.splitlines()
        ended = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert (ended.returncode == 0) == (outcome.compiled is not None)
        assert ended.stdout.splitlines()[-1].split()[-1] == messages[-1].split()[-1]
        assert (tmp_path / "kernel.ptx").exists() == (outcome.compiled is not None)


class TestDefault:
    """The Jit of this process."""

    def test_sources_are_in_the_checkout_or_in_the_package(self, tmp_path) -> None:
        package = tmp_path / "flash_attention"
        with pytest.raises(RuntimeError, match="comes without the kernels' sources"):
            sources_root(package)
        for root in (package / "sources", tmp_path):
            (root / "src/include").mkdir(parents=True)
            (root / "src/include/flash_attention.cuh").write_text("")
            assert sources_root(package) == root

    def test_is_made_once_for_an_environment(self, tmp_path) -> None:
        environ = {FOLDER_VARIABLE: str(tmp_path), "MAX_JOBS": "3"}
        jit = default_jit(environ)
        assert jit is default_jit(dict(environ)) and not jit.debug and not jit.verbose
        assert (jit.cache.folder, jit.jobs) == (tmp_path, 3)
        assert (jit.root / "src/include/flash_attention.cuh").is_file()
        other = default_jit({**environ, DEBUG_VARIABLE: "1", VERBOSE_VARIABLE: "1"})
        assert other is not jit and other.debug and other.verbose

    @pytest.mark.parametrize("variable", [DEBUG_VARIABLE, VERBOSE_VARIABLE])
    def test_refuses_other_values(self, variable) -> None:
        assert not default_jit({variable: "0"}).verbose
        with pytest.raises(BuildError, match=f"{variable}='yes' is neither 0 nor 1: set it to 1"):
            default_jit({variable: "yes"})
