"""The types of PTX as NumPy holds them, and the rounding between them."""
