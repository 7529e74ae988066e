"""Cost of kernels in time, counters and machine code; files and tables of the results."""
