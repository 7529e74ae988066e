"""Cost of kernels in time, counters and machine code; and how results are kept and shown."""
