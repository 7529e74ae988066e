"""Settings of a tool's process, imported before everything else.

Ctrl-C ends the process without a traceback until `command_line.run_tool` takes over, which is after
a second or more of imports. Python collects garbage after 50,000 new objects instead of 700, since
a tool makes millions of records and hardly any is part of a cycle.
"""

import gc
import signal

gc.set_threshold(50_000)
signal.signal(signal.SIGINT, signal.SIG_DFL)
