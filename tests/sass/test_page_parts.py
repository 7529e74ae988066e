"""The panes of a page in files of their own: together they hold what the page would."""

import json
import re

from edited_kernels import library_kernel
from test_page import Elements, bare

from flash_helpers.sass.show.page import PANES, kernel_data, page_html
from flash_helpers.sass.show.page_parts import pane_scripts

FILES = {pane: f"kernels/k.{pane}.js" for pane in PANES}


def test_the_files_of_a_kernel_hold_its_data_once() -> None:
    page = bare(library_kernel(9))
    name = kernel_data(page)["files"][0]
    found: dict[str, object] = {"sass": {}, "ptx": {}}
    for file, script in pane_scripts(page, {name: "a\n</script>", "other": "b"}, FILES):
        called, data = re.fullmatch(r'viewPart\("([^"]+)", (.*)\);\n', script, re.DOTALL).groups()
        assert called == file
        for key, value in json.loads(data).items():
            if key in ("sass", "ptx"):
                assert not found[key].keys() & value.keys()
                found[key].update(value)
            else:
                assert key not in found
                found[key] = value
    assert found.pop("sources") == {name: ["a", "</script>"]}
    assert found == json.loads(json.dumps(kernel_data(page)))


def test_a_line_of_code_has_a_line_of_the_file() -> None:
    page = bare(library_kernel(9))
    scripts = dict(pane_scripts(page, {}, FILES))
    lines = scripts[FILES["sass"]].split("\n")
    for text in kernel_data(page)["sass"]["text"]:
        assert any(line.rstrip(",") == json.dumps(text) for line in lines)


def test_the_page_then_holds_links_in_place_of_data() -> None:
    page = bare(library_kernel(9), "v9")
    text = page_html([page], {}, "t", files=[FILES])
    assert [*Elements(text).data] == ["index"]
    for pane, title in PANES.items():
        assert f'<a href="{FILES[pane]}">{title} of v9</a>' in text
    assert "script-src 'unsafe-inline' 'self' file:;" in text
