"""What every tool needs at a terminal: arguments, errors, files, tables and progress bars."""
