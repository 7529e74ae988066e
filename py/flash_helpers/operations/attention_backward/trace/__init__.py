"""A kernel's own S, P, dP, dS and sums of dQ, dK and dV beside blockwise Python."""
