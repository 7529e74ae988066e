"""The table of the steps that attention() takes."""

from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import FAMILIES, STEPS, AttentionForward, Config, Element
from flash_helpers.measure.choice_table import choice_table


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_each_head_size_has_a_row_and_each_option_its_step() -> None:
    def choose(problem: AttentionForward, gpu: Device | None) -> Config:
        if problem.sinks or problem.d_head != problem.d_v:
            raise ValueError("no kernel takes it")
        step = STEPS["h30" if gpu and gpu.capability == (9, 0) and problem.causal else "o12"]
        return FAMILIES[step.family].fixed_config(step, Element.BF16)

    head, _, *rows = choice_table(choose).splitlines()
    assert cells(head)[0] == "d_head" and len(cells(head)) == 4
    found = {name: texts for name, *texts in map(cells, rows)}
    assert {"64", "96", "128", "192", "192, V 128", "256"} <= {*found}
    assert found["64"] == [
        "no mask, window, softcap, variable lengths: o12; causal: h30; sinks: refused",
        *["no mask, causal, window, softcap, variable lengths: o12; sinks: refused"] * 2,
    ]
    assert found["192, V 128"] == ["all: refused"] * 3
