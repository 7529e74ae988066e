"""How code of a kernel stands on a page."""

from __future__ import annotations

from flash_helpers.course.excerpts import dedented


def test_pragmas_stay_at_the_margin_and_hold_nothing_else_in_place() -> None:
    lines = ["    m = 0;", "", "#pragma unroll", "    for (;;) {", "        m += 1;", "    }"]
    assert dedented(lines).splitlines() == [
        "m = 0;",
        "",
        "#pragma unroll",
        "for (;;) {",
        "    m += 1;",
        "}",
    ]
