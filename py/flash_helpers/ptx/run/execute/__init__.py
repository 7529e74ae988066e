"""The warps of a batch run their instructions, and poison runs with them."""
