"""Global, local and shared memory of a batch, and where tensor maps and descriptors point in it."""
