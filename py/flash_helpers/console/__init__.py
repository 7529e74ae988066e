"""The terminal of every tool: arguments, errors, files, tables and progress bars."""
