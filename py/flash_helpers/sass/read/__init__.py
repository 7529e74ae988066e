"""From a file with machine code to one record an instruction."""
