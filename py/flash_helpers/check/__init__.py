"""Is a kernel right? Inputs, references, and where the two part."""
