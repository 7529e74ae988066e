"""Features that the simulator lacks are refused by name, with the opcode and the line."""

import pytest
from ptx_snippets import entry

from flash_helpers.ptx import PtxError, UnsupportedInstruction, load_ptx

DECLARATIONS = ".reg .pred %p; .reg .b32 %a, %b; .reg .b64 %x, %y; .shared .align 16 .b8 s[64];"
NAMES = {
    "surfaces": [
        "suld.b.2d.b32.trap {%a}, [%x, {%a, %b}];",
        "sust.b.1d.v2.b32.clamp [%x, {%a}], {%a, %b};",
        "suq.width.b32 %a, [%x];",
    ],
    "textures": [
        "tex.2d.v4.f32.f32 {%a, %a, %a, %a}, [%x, {%a, %b}];",
        "tld4.r.2d.v4.f32.f32 {%a, %a, %a, %a}, [%x, {%a, %b}];",
        "txq.width.b32 %a, [%x];",
    ],
    "bulk copies of zeros": ["st.bulk.weak.shared::cta [s], 16, 0;"],
    "im2col copies": [
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[s], [%x, {%a, %a, %a}], [s], {%a};",
        "cp.async.bulk.tensor.3d.global.shared::cta.im2col_no_offs.bulk_group "
        "[%x, {%a, %a, %a}], [s];",
    ],
    "copies of rows that are gathered": [
        "cp.async.bulk.tensor.2d.tile::gather4.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[s], [%x, {%a, %a, %a, %a, %a}], [s];",
    ],
    "reductions to shared memory": [
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 "
        "[s], [s], 16, [s];",
    ],
    "asynchronous reductions": [
        "red.async.relaxed.cluster.mbarrier::complete_tx::bytes.add.u32 [s], %a, [s];",
    ],
    "tensor cores of the fifth generation": [
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [s], 32;",
        "tcgen05.mma.cta_group::1.kind::f16 [%a], %x, %y, %b, %p;",
    ],
    "multicast addresses": ["multimem.ld_reduce.relaxed.gpu.global.add.f32 %a, [%x];"],
    "cluster launch control": [
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 "
        "[s], [%x];",
    ],
    "sparse matrices": [
        "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
        "{%a, %a, %a, %a}, {%a, %a, %a, %a}, {%a, %a, %a, %a}, {%a, %a, %a, %a}, %b, 0;",
        "mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%a, %a, %a, %a}, {%a, %a}, {%a, %a}, {%a, %a, %a, %a}, %b, 0;",
    ],
    "allocations on the stack": ["alloca.u64 %x, %y, 16;", "stacksave.u64 %x;"],
    "video instructions": [
        "vadd.u32.u32.u32 %a, %a, %b, %b;",
        "vabsdiff4.u32.u32.u32.add %a, %a, %b, %b;",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in NAMES.items() for text in texts]
)
def test_what_is_not_simulated_is_refused_by_its_name(name, text):
    module = load_ptx(entry(text, declarations=DECLARATIONS))
    with pytest.raises(UnsupportedInstruction) as caught:
        module.kernel("k").launch(grid=1, block=32)
    opcode = text.split()[0].rstrip(";")
    told = f"PTX line 8: the simulator does not know {opcode!r}: {name} are not simulated"
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("kind", "name"),
    [("surfref", "surfaces"), ("texref", "textures"), ("samplerref", "samplers of textures")],
)
def test_a_variable_of_what_is_not_simulated_refuses_the_kernel_that_uses_it(kind, name):
    variable = f".global .{kind} image;"
    module = load_ptx(entry("", before=variable))
    module.kernel("k").launch(grid=1, block=32)  # it does not use it
    module = load_ptx(entry("suq.width.b32 %a, [image];", "", DECLARATIONS, variable))
    with pytest.raises(PtxError, match=f"PTX line 4: {name} are not simulated, as in '.global"):
        module.kernel("k").launch(grid=1, block=32)


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("wgmma.fence.sync.aligned;", "sm_80 sm_90 sm_100a"),
        ("wgmma.commit_group.sync.aligned;", "sm_90 sm_120f"),
        ("setmaxnreg.dec.sync.aligned.u32 40;", "sm_90 sm_100"),
        ("tensormap.replace.tile.rank.shared::cta.b1024.b32 [s], 1;", "sm_90 sm_120"),
        ("redux.sync.min.f32 %a, %a, -1;", "sm_80 sm_90a sm_100 sm_120a"),
    ],
)
def test_what_only_some_targets_have(text, targets):
    for target in targets.split():
        module = load_ptx(entry(text, declarations=DECLARATIONS).replace("sm_80", target))
        with pytest.raises(UnsupportedInstruction, match=f"has .target {target}, and this needs"):
            module.kernel("k").launch(grid=1, block=128, target="sm_90a")


def test_an_opcode_that_only_begins_like_one_is_not_taken_for_it():
    module = load_ptx(entry("vadds.u32 %a, %a, %b;", declarations=DECLARATIONS))
    with pytest.raises(UnsupportedInstruction, match=r"'vadds\.u32'$"):
        module.kernel("k").launch(grid=1, block=32)
