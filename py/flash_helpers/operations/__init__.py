"""Operations: one folder for each, with its problem and everything about it that needs no
kernel."""
