"""A kernel's own Q, K, S, m, l, P, V and O beside blockwise FlashAttention-2."""
