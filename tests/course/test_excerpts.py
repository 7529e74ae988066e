"""How code of a kernel stands on a page."""

from flash_helpers.course.excerpts import dedented, phase_lines


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


def test_a_phase_goes_on_behind_a_pragma_to_the_end_of_its_block() -> None:
    lines = ["    // 1. Load", "#pragma unroll", "    for (;;) {}", "}", "void other() {}"]
    assert phase_lines(lines, "1") == range(0, 3)
