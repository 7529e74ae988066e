"""Each instruction of PTX, from its text to callables on NumPy arrays."""
