"""The course's pages: what stands between their markers is written by `tools/docs/build_docs.py`.

A page is Markdown. Whatever can be counted or measured stands between two comments:

    <!-- build:counters 2 -->
    <!-- /build -->

and is written, and checked, from the machine code of the installed library, the simulator and the
committed measurements. `blocks.KINDS` holds every kind with its arguments, `commands` the rules of
a ```console block, and `pages.PAGES` the order of the pages, which the site takes, too.
`build_docs.py --help` tells writers all of it.
"""
