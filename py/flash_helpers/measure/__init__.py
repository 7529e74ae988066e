"""What kernels cost: time, counters, machine code; and how results are kept and shown."""
