"""Reading, counting and comparing SASS: the machine code that ptxas made of a kernel."""
