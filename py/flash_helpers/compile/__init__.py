"""From a config to machine code: source text, toolchain, build, and what ptxas said."""
