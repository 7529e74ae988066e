"""From a config to machine code: source text, toolchain, build, and the messages of ptxas."""
