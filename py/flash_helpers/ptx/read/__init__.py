"""PTX text to instructions and control flow."""
