"""Imported first by a tool that is run.

Until `command_line.run_tool` takes over, which is after the imports of a second or more, Ctrl-C
ends the process without a traceback. Garbage is sought in each 50,000 new objects instead of in
700: a tool makes records by the million, hardly one of them in a cycle.
"""

import gc
import signal

gc.set_threshold(50_000)
signal.signal(signal.SIGINT, signal.SIG_DFL)
