"""The course's pages, whose text between markers `tools/docs/build_docs.py` writes.

A page is Markdown. Each counted or measured number stands between two comments:

    <!-- build:counters 2 -->
    <!-- /build -->

`build_docs.py` writes and checks the text between them from the machine code of the installed
library, the simulator and the committed measurements. `blocks.KINDS` holds every kind with its
arguments, `commands` the rules of a ```console block, and `pages.PAGES` the order of the pages,
which the site takes, too. `build_docs.py --help` explains all of it to writers.
"""
