"""`debug.py`: its two files, the first difference that it names, and its refusals."""

from __future__ import annotations

import math
import re

import pytest
import torch
from attention_configs import LARGE_TILES
from attention_configs import traced_config as config_of
from fake_backend import ARRIVAL, fake_backend, load_tool

from flash_helpers.check import debugging
from flash_helpers.compile.codegen import library_configs
from flash_helpers.kernel_configs import (
    Element,
)
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.backward_sync import BACKWARD_SYNC
from flash_helpers.registry.hopper import HOPPER
from flash_helpers.runtime.library import ptx_path

pytestmark = pytest.mark.slow


def debug(*arguments: str) -> int:
    return load_tool("tools/debug/debug.py").main(list(arguments))


@pytest.mark.parametrize("step", ("v3", "o5"))
def test_the_tool_writes_two_files_with_the_same_lines(step, tmp_path, capsys):
    status = debug(step, "--seq", "128", "--range", "--block", "1", "--out", str(tmp_path))
    assert status == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all quantities agree within rounding"
    reference = (tmp_path / "debug_pt.txt").read_text().splitlines()
    kernel = (tmp_path / "debug_cuda.txt").read_text().splitlines()
    # the inputs are integers: up to S both are exactly the same
    end = reference.index("m, key block 1, row block 0")
    assert kernel[:end] == reference[:end]
    assert len(kernel) == len(reference)
    assert not any("key block 0" in line for line in kernel)


def test_of_a_causal_kernel_what_a_warp_leaves_out_is_nan(tmp_path, capsys):
    shape = ("--seq", "128", "--len-k", "192", "--block", "1")
    assert debug("h24", "--causal", *shape, "--warp", "3", "--out", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "_causal, batch 1, heads 1, seq 128 on 192, d_head 128, causal, " in out
    for name in ("debug_pt.txt", "debug_cuda.txt"):
        rows, output = (tmp_path / name).read_text().split("output, row block 0\n")
        numbers = [line.split(": ")[1].split() for line in rows.splitlines() if ": " in line]
        assert {number for row in numbers for number in row} == {"nan"}
        assert "nan" not in output


def test_kernels_of_the_backward_pass_are_compared_one_after_the_other(tmp_path, capsys):
    shape = ("--causal", "--seq", "40", "--len-k", "70", "--heads", "2", "--kv-heads", "1")
    assert debug("p1", *shape, "--block", "0", "--out", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "p1_bf16_d128_Br64_Bc32_causal, batch 1, heads 2 on 1, seq 40 on 70, " in out
    assert out.splitlines()[-1] == "all quantities agree within rounding"
    titles = [
        [line for line in (tmp_path / name).read_text().splitlines()[1:] if ": " not in line]
        for name in ("debug_pt.txt", "debug_cuda.txt")
    ]
    assert titles[0] == titles[1]
    of_S = [title for title in titles[0] if title.startswith("S, ")]
    assert of_S == [
        "S, dq_kernel, key block 0, row block 0",
        "S, dkdv_kernel, query block 0, row block 0",
    ]


def test_the_tool_names_the_kernel_that_begins_to_be_wrong(tmp_path, capsys):
    config = BACKWARD_SYNC.fixed_config(BACKWARD_SYNC.steps["p1"], Element.BF16)
    text = ptx_path(config, "dkdv_kernel").read_text()
    path = tmp_path / "no_delta.ptx"
    path.write_text(re.sub(r"(sub\.f32\s+%f\d+, %f\d+), %f\d+;", r"\1, 0f00000000;", text))
    assert debug("p1", "--seq", "64", "--ptx", str(path), "--out", str(tmp_path)) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    place = "query block 0, row block 0 (batch 0, head 0), warp 0, row 0, column 0"
    assert last.startswith(f"first difference: delta, dkdv_kernel, {place}: the kernel has 0, ")


def test_the_tool_names_the_first_difference_and_the_faults(tmp_path, capsys):
    config = config_of("v4")
    lines = ptx_path(config).read_text().split("\n")
    barrier = max(n for n, line in enumerate(lines) if "bar.sync" in line)
    lines[barrier] = ""
    text = "\n".join(lines).replace(
        "ldmatrix.sync.aligned.m8n8.x4.trans", "ldmatrix.sync.aligned.m8n8.x4"
    )
    path = tmp_path / "wrong.ptx"
    path.write_text(text)
    status = debug("4", "--seq", "128", "--ptx", str(path), "--out", str(tmp_path))
    out = capsys.readouterr().out
    assert status == 1
    assert "shared-memory race" in out
    assert out.splitlines()[-1].startswith("first difference: V, key block 0, row block 0")


def kernel_ptx(tmp_path, *configs, edit=lambda text: text) -> str:
    """A PTX file with the library's kernel of the first config, or with several of them."""
    path = tmp_path / "kernel.ptx"
    first, *others = (ptx_path(config).read_text() for config in configs)
    entries = [text[text.index(".visible .entry") : text.index("\n}\n") + 3] for text in others]
    head, brace, tail = first.partition("\n}\n")
    path.write_text(edit(head + brace + "\n".join(entries) + tail))
    return str(path)


class TestPtx:
    """A kernel that is being worked on: its config is that of the file's kernel."""

    def test_with_a_static_row_stride_gets_tensors_that_have_it(self, tmp_path, capsys):
        config = next(
            c for c in AMPERE.progression() if c.static_row_stride and c.dtype == Element.BF16
        )
        path = kernel_ptx(tmp_path, config)
        for arguments in ([config.step.id], []):
            assert debug(*arguments, "--seq", "128", "--ptx", path, "--out", str(tmp_path)) == 0
            out = capsys.readouterr().out
            assert out.startswith(f"{config.short_form()}, batch 1, heads 1")

    def test_of_another_config_of_the_step_is_compared_with_that(self, tmp_path, capsys):
        path = kernel_ptx(tmp_path, LARGE_TILES[0])
        dtype = LARGE_TILES[0].dtype.short
        arguments = ("--dtype", dtype, "--seq", "128", "--ptx", path, "--out", str(tmp_path))
        assert debug(LARGE_TILES[0].step.id, *arguments) == 0
        assert LARGE_TILES[0].short_form() in capsys.readouterr().out

    def test_of_another_step_or_config_says_how_it_differs(self, tmp_path, capsys):
        path = kernel_ptx(tmp_path, config_of("v3"))
        assert debug("2", "--ptx", path, "--out", str(tmp_path)) == 2
        err = capsys.readouterr().err
        assert f"kernel.ptx does not hold {config_of('v2').short_form()}" in err
        assert "(version 3 instead of 2, eager_load_blocks True instead of False)" in err

    def test_with_several_kernels_wants_one_named(self, root, tmp_path, capsys):
        built = [c for c in library_configs(root) if c.short_form().startswith("v7_bf16")]
        path = kernel_ptx(tmp_path, *built)
        assert debug("--ptx", path, "--out", str(tmp_path)) == 2
        assert "does not hold one kernel, but" in capsys.readouterr().err
        assert debug("7", "--seq", "64", "--ptx", path, "--out", str(tmp_path)) == 0

    def test_of_somebody_else_is_refused(self, tmp_path, capsys):
        path = kernel_ptx(
            tmp_path,
            config_of("v3"),
            edit=lambda text: text.replace("forward_kernel", "other_kernel12"),
        )
        assert debug("--ptx", path, "--out", str(tmp_path)) == 2
        assert "kernel.ptx holds no kernel of this repository" in capsys.readouterr().err


def test_faults_after_the_first_are_summed_up(tmp_path, capsys):
    path = kernel_ptx(
        tmp_path,
        config_of("v4"),
        edit=lambda text: re.sub(r"\n\s*(bar\.sync|cp\.async\.wait_group)[^\n]*", "", text),
    )
    arguments = ("--seq", "128", "--ptx", path, "--out", str(tmp_path))
    assert debug(*arguments) == 1
    short = capsys.readouterr().out
    counted = re.search(r"\nand (\d+) more: (\d+) \w+Error", short)
    assert counted is not None
    assert debug(*arguments, "--all-faults") == 1
    long = capsys.readouterr().out
    assert len(long) > len(short)
    assert "--all-faults prints them" in short and "--all-faults prints them" not in long


def test_lints_are_printed_and_are_no_failure(tmp_path, capsys):
    path = kernel_ptx(
        tmp_path, config_of("v4"), edit=lambda text: text.replace("ret;", f"{ARRIVAL}\nret;")
    )
    arguments = ("--seq", "64", "--ptx", path, "--out", str(tmp_path))
    assert debug(*arguments) == 0
    short = capsys.readouterr().out.splitlines()
    assert short[-2:] == [
        "legal and suspicious (--lints prints them): 1 arrivals that no thread waits for",
        "all quantities agree within rounding",
    ]
    assert debug(*arguments, "--lints") == 0
    lines = capsys.readouterr().out.splitlines()
    (told,) = [line for line in lines if line.startswith("lint: ")]
    assert told.startswith("lint: arrivals that no thread waits for: 32 of 128 threads of block")
    assert lines[-1] == "all quantities agree within rounding"


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ([], "give a STEP, --kernel CONFIG or --ptx FILE"),
        (["99"], "'99': the steps are v1 to"),
        (["99"], "h1 to h"),
        (["7..9"], "'7..9' is not one step: name one, such as v9; the steps are v1 to"),
        (["7..9"], "h1 to h"),
        (["all"], "'all' is not one step"),
        (["1", "--kernel", "v1_fp16_d128_Br64_Bc64_w4_async_Q0_K0_V0"], "both name a kernel"),
        (
            ["--dtype", "bf16", "--kernel", "v1_fp16_d128_Br64_Bc64_w4_async_Q0_K0_V0"],
            "--dtype bf16 is not that of v1_fp16",
        ),
        (["1", "--seq", "100"], "100 is not a multiple"),
        (["1", "--warp", "4"], "warp 4: there are 0 to 3"),
        (["1", "--block", "4"], "block 4: there are 0 to 3"),
        (["h24", "--len-k", "129", "--block", "2"], "block 2: there are 0 to 1"),
        (["h24", "--seq", "129", "--row-block", "2"], "row block 2: there are 0 to 1"),
        (["p1", "--seq", "65", "--block", "3"], "block 3: there are 0 to 2"),
        (["b4", "--seq", "128", "--row-block", "1"], "row block 1: there are 0 to 0"),
        (["b4", "--seq", "128", "--warp", "12"], "warp 12: there are 0 to 11"),
        (["h20", "--causal"], "causal is not supported by h20_"),
        (["1", "--kv-heads", "2"], "heads 1 is not a multiple of kv_heads 2"),
        (["1", "--softmax-scale", "0.2"], "softmax_scale 0.2 is not supported by v1_"),
        (["--kernel", "v99"], "v99"),
        (["1", "--ptx", "nowhere.ptx"], "nowhere.ptx"),
    ),
)
def test_wrong_usage_is_told_in_a_line(arguments, message, tmp_path, capsys):
    assert debug(*arguments, "--out", str(tmp_path)) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_on_a_gpu_the_output_alone_is_compared(monkeypatch, tmp_path, capsys):
    tool = load_tool("tools/debug/debug.py")
    arguments = ["16", "--device", "cuda", "--seq", "128", "--out", str(tmp_path)]
    monkeypatch.setattr(debugging, "find_backend", lambda device: fake_backend())
    assert tool.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all quantities agree within rounding"
    wrong = fake_backend(lambda config, o: o[0, 70, 0].add_(1))
    monkeypatch.setattr(debugging, "find_backend", lambda device: wrong)
    assert tool.main(arguments) == 1
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("first difference: output, row block 1 (batch 0, head 0), warp 0, row 70")
    )


@pytest.mark.parametrize("step", ("h20", "h24"))
def test_the_lse_is_compared_if_it_is_asked_for(step, tmp_path, capsys):
    # with a mask the first 48 queries see no key, and their LSE is -inf
    causal = ["--causal"] if step == "h24" else []
    arguments = [step, *causal, "--seq", "128", "--len-k", "80", "--lse"]
    assert debug(*arguments, "--out", str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all quantities agree within rounding"
    right, own = (
        [float(x) for x in (tmp_path / name).read_text().split("\nlse\n")[1].split()[1:]]
        for name in ("debug_pt.txt", "debug_cuda.txt")
    )
    assert len(right) == 128
    assert own == pytest.approx(right, abs=1e-3)
    assert own.count(-math.inf) == (48 if causal else 0)


def test_a_wrong_lse_is_the_first_difference_where_all_else_is_right(tmp_path, capsys):
    config = HOPPER.fixed_config(HOPPER.steps["h20"], Element.BF16)
    lines = ptx_path(config).read_text().split("\n")
    written = [n for n, line in enumerate(lines) if re.match(r"\s*(@\S+ )?st\.global\.f32", line)]
    assert written
    for n in written:
        lines[n] = ""
    path = tmp_path / "no_lse.ptx"
    path.write_text("\n".join(lines))
    arguments = ("h20", "--seq", "64", "--len-k", "80", "--ptx", str(path), "--out", str(tmp_path))
    assert debug(*arguments) == 0
    capsys.readouterr()
    assert debug(*arguments, "--lse") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("first difference: lse (batch 0, heads 0, seq 0): got nan, expected ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_output_cannot_be_had(tmp_path, capsys):
    assert debug("1", "--device", "cuda", "--out", str(tmp_path)) == 2
    assert "no CUDA device" in capsys.readouterr().err
