"""Imported first by a tool that is run: until `command_line.run_tool` takes over, which is after
the imports of a second or more, Ctrl-C ends the process without a traceback."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
