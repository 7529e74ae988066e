"""Instructions of PTX on NumPy: computed, watched and counted."""
