"""Operations: one folder for each, with its problem and all that is true of it without a kernel."""
