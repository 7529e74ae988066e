"""Readers of machine code: from a file to one record per instruction."""
