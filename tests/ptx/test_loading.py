"""How text, kernels and arguments are given."""

from pathlib import Path

import numpy as np
import pytest
from ptx_snippets import HEAD, entry, launch_on

from flash_helpers.ptx import (
    DeviceMemory,
    LaunchError,
    NotPtxError,
    PtxSyntaxError,
    TensorMap,
    load_ptx,
)
from flash_helpers.ptx.run.layout import pack

ONE_LINE = (
    ".version 8.7 .target sm_80 .address_size 64 .visible .entry k(.param .u64 out) "
    "{ .reg .b64 %rd; .reg .b32 %r; ld.param.u64 %rd, [out]; mov.u32 %r, 7; "
    "st.global.u32 [%rd], %r; ret; }"
)


def first_word(source: object) -> int:
    return int(launch_on(source, [np.zeros(1, np.uint32)], block=1)[1][0][0])


class TestText:
    @pytest.mark.parametrize(
        "text", [ONE_LINE, f"/* mine */ {ONE_LINE}", f"// mine\n{ONE_LINE}", f"  {ONE_LINE}\n"]
    )
    def test_of_one_line_is_told_from_a_path(self, text) -> None:
        assert first_word(text) == 7

    def test_as_bytes_with_the_zero_that_compilers_leave(self) -> None:
        assert first_word(ONE_LINE.encode() + b"\0") == 7

    @pytest.mark.parametrize("kind", [str, Path])
    def test_in_a_file(self, tmp_path, kind) -> None:
        path = tmp_path / "k.ptx"
        path.write_text(ONE_LINE)
        assert first_word(kind(path)) == 7

    def test_in_no_file_is_an_os_error(self, tmp_path) -> None:
        with pytest.raises(FileNotFoundError):
            load_ptx(str(tmp_path / ".version"))

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"\x7fELF" + bytes(60), "an object file, library or program, not PTX"),
            (b"#include <cuda.h>\n__global__ void k();", r"CUDA C\+\+, not PTX"),
            (b".version 8.7\0.target sm_80", "bytes that no text does"),
        ],
    )
    def test_that_is_something_else(self, data, words) -> None:
        with pytest.raises(NotPtxError, match=words):
            load_ptx(data)
        with pytest.raises((NotPtxError, PtxSyntaxError)):
            load_ptx(data.decode() + "\n")

    def test_a_location_ends_where_its_numbers_end(self) -> None:
        located = ONE_LINE.replace("mov.u32", ".loc 1 2 3 mov.u32") + ' .file 1 "k.cu"'
        assert first_word(located) == 7


def kernels(*symbols: str) -> str:
    return HEAD + "\n".join(f".visible .entry {symbol}()\n{{\nret;\n}}" for symbol in symbols)


class TestNames:
    SYMBOLS = (
        "_Z5scaleIfEvPT_i",
        "_Z5scaleI6__halfEvPT_i",
        "_Z6scale2Pf",
        "_ZN2ns4copyIiLi4EEEvPT_",
        "_ZN5other4copyIiLi8EEEvPT_",
        "_ZN12_GLOBAL__N_16hiddenEPFvPfE",
        "plain",
    )

    @pytest.mark.parametrize(
        ("name", "index"),
        [
            ("_Z5scaleIfEvPT_i", 0),
            ("scale<float>", 0),
            ("scale< __half >", 1),
            ("void scale<float>(float*, int)", 0),
            ("scale<float>(float *,int)", 0),
            ("scale2", 2),
            ("e2(float *)", 2),
            ("ns::copy<int, 4>", 3),
            ("copy<int,8>", 4),
            ("other::", 4),
            ("half", 1),
            ("hidden", 5),
            ("(anonymous namespace)::hidden", 5),
            ("plain", 6),
            ("lai", 6),
        ],
    )
    def test_in_cpp_or_as_mangled_whole_or_in_part(self, name, index) -> None:
        module = load_ptx(kernels(*self.SYMBOLS))
        assert module.kernel(name).name == self.SYMBOLS[index]

    def test_a_whole_name_wins_over_a_part_of_another(self) -> None:
        module = load_ptx(kernels("_Z4stepi", "_Z5step2i", "_ZN4step3runEi"))
        assert module.kernel("step").name == "_Z4stepi"

    def test_several_are_listed_as_in_cpp(self) -> None:
        with pytest.raises(LaunchError) as caught:
            load_ptx(kernels(*self.SYMBOLS)).kernel("scale<")
        assert str(caught.value) == (
            "several kernels are named 'scale<'; the file holds\n"
            "  void scale<float>(float*, int)\n  void scale<__half>(__half*, int)"
        )


class TestNumbers:
    def launch(self, parameter: str, value: object, **options: object) -> np.ndarray:
        """The bytes of a parameter as the kernel sees them."""
        memory = DeviceMemory()
        out = memory.upload(np.zeros(8, np.uint8))
        size = int(parameter.strip(".busf")) // 8
        text = entry(
            "ld.param.u64 %rd1, [out];\n"
            f"ld.param.b{8 * size} %v, [x]; st.global.b{8 * size} [%rd1], %v;",
            f".param .u64 out, .param {parameter} x",
            f".reg .b64 %rd1; .reg .b{8 * size} %v;",
        )
        options = {"grid": 1, "block": 1, **options}
        load_ptx(text).kernel("k").launch(args=[out, value], memory=memory, **options)
        return memory.download(out, size, np.uint8)

    @pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16, np.uint64])
    def test_of_numpy_are_grid_block_and_bytes(self, kind) -> None:
        run = load_ptx(entry("")).kernel("k").launch(kind(3), kind(64), kind(16))
        assert (run.n_blocks, run.counters.total.instructions) == (3, 6)
        shape = np.array([2, 2, 1], kind)
        assert load_ptx(entry("")).kernel("k").launch(shape, tuple(shape)).n_blocks == 4

    @pytest.mark.parametrize(
        ("grid", "words"),
        [
            (2.0, "grid is 2.0: give an integer"),
            ((1, 2.5), "grid is 2.5: give an integer"),
            ("12", "grid is '12': give one to three"),
            ((1, 2, 3, 4), "give one to three"),
            ((), "give one to three"),
            (-1, "grid is -1"),
        ],
    )
    def test_that_are_no_grid(self, grid, words) -> None:
        with pytest.raises(LaunchError, match=words):
            load_ptx(entry("")).kernel("k").launch(grid, 32)

    @pytest.mark.parametrize(
        ("parameter", "value", "expected"),
        [
            (".u32", np.int64(1000), np.uint32(1000)),
            (".u32", np.int8(-1), np.int32(-1)),
            (".u64", np.uint16(7), np.uint64(7)),
            (".u32", np.bool_(True), np.uint32(1)),
            (".f32", np.int64(3), np.float32(3)),
            (".f32", np.float64(0.1), np.float32(0.1)),
            (".f32", np.float32(0.1), np.float32(0.1)),
            (".f64", 2, np.float64(2)),
            (".b16", np.float16(1.5), np.float16(1.5)),
            (".b32", np.float32(1.5), np.float32(1.5)),
        ],
    )
    def test_of_numpy_are_arguments_by_their_value(self, parameter, value, expected) -> None:
        assert self.launch(parameter, value).tobytes() == expected.tobytes()

    @pytest.mark.parametrize(
        ("parameter", "value", "words"),
        [
            (".u32", np.int64(1 << 40), "argument 1 is 1099511627776, which does not fit 32 bits"),
            (".u32", np.float32(1), "argument 1 is a float"),
            (".f32", 1e300, r"does not fit \.f32"),
            (".f32", 1 << 400, r"does not fit \.f32"),
            (".f64", np.float16(1), "a float16 of 2 bytes, its parameter has 8"),
            (".u32", np.complex64(1), "a complex64 of 8 bytes"),
            (".u32", "7", "argument 1 is a str"),
            (".u32", None, "argument 1 is a NoneType"),
        ],
    )
    def test_that_do_not_fit_are_refused(self, parameter, value, words) -> None:
        with pytest.raises(LaunchError, match=words):
            self.launch(parameter, value)

    def test_of_bytes_that_are_no_integer(self) -> None:
        with pytest.raises(LaunchError, match=r"shared_bytes is 1\.5: give an integer"):
            load_ptx(entry("")).kernel("k").launch(1, 32, 1.5)
        with pytest.raises(LaunchError, match="shared_bytes is -4: give 0 or more"):
            load_ptx(entry("")).kernel("k").launch(1, 32, -4)


class TestTarget:
    @pytest.mark.parametrize(
        ("target", "limit"),
        [
            ("sm_52", 48 * 1024),
            ("sm_75", 64 * 1024),
            ("sm_80", 163 * 1024),
            ("sm_86, debug", 99 * 1024),
            ("sm_90a", 227 * 1024),
            ("sm_100f", 227 * 1024),
            ("sm_120", 99 * 1024),
        ],
    )
    def test_is_the_modules_own(self, target, limit) -> None:
        kernel = load_ptx(entry("").replace("sm_80", target)).kernel("k")
        kernel.launch(1, 32, limit)
        name = target.partition(",")[0]
        with pytest.raises(LaunchError, match=f"{name} has {limit}"):
            kernel.launch(1, 32, limit + 1)
        kernel.launch(1, 32, limit + 1, target="sm_90") if limit < 227 * 1024 else None

    def test_that_is_not_known_is_told_with_those_that_are(self) -> None:
        kernel = load_ptx(entry("").replace("sm_80", "sm_999")).kernel("k")
        with pytest.raises(LaunchError, match=r"limits of sm_999 are not known: .*sm_75, sm_80"):
            kernel.launch(1, 32)
        assert kernel.launch(1, 32, target="sm_90").n_blocks == 1


def test_a_structure_is_no_number() -> None:
    kernel = load_ptx(entry("", ".param .align 8 .b8 p[136]")).kernel("k")
    with pytest.raises(LaunchError, match="argument 0 is passed by value in 136 bytes"):
        kernel.launch(1, 32, args=[0])


def test_a_tensor_map_is_an_argument() -> None:
    tensor_map = TensorMap("f32", 1 << 20, dims=(16, 8), box=(16, 4))
    function = load_ptx(entry("", ".param .align 64 .b8 map[128]")).kernel("k").function
    assert pack(function, [tensor_map])[0].tobytes() == tensor_map.encode()


class TestVariables:
    COUNTER = entry(
        "ld.param.u64 %rd1, [out]; ld.global.u32 %r1, [calls]; add.u32 %r1, %r1, 1;\n"
        "st.global.u32 [calls], %r1; st.global.u32 [%rd1], %r1;",
        ".param .u64 out",
        ".reg .b64 %rd1; .reg .b32 %r1;",
        ".global .u32 calls = 41;",
    )

    def counts(self, variables: dict[str, int] | None) -> list[int]:
        memory = DeviceMemory()
        out = memory.upload(np.zeros(1, np.uint32))
        found = []
        for _ in range(2):
            load_ptx(self.COUNTER).kernel("k").launch(
                1, 1, args=[out], memory=memory, variables=variables
            )
            found.append(int(memory.download(out, 1, np.uint32)[0]))
        return found

    def test_begin_anew_with_each_launch(self) -> None:
        assert self.counts(None) == [42, 42]

    def test_keep_their_values_where_the_launches_share_them(self) -> None:
        variables: dict[str, int] = {}
        assert self.counts(variables) == [42, 43]
        assert [*variables] == ["calls"]


class TestFreedMemory:
    def test_is_outside_every_allocation(self) -> None:
        memory = DeviceMemory()
        kept, freed = memory.allocate(256), memory.allocate(256)
        memory.free(freed)
        assert memory.extent(freed) is None
        assert memory.extent(kept) == (kept, kept + 256)

    def test_is_freed_once_and_as_a_whole(self) -> None:
        memory = DeviceMemory()
        address = memory.allocate(256)
        with pytest.raises(ValueError, match=f"no allocation begins at {address + 16:#x}"):
            memory.free(address + 16)
        memory.free(address)
        with pytest.raises(ValueError, match="no allocation begins at"):
            memory.free(address)
