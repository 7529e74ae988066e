"""The types of PTX as NumPy holds them, and rounding between them."""
