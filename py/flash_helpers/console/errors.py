"""The errors that every tool tells in a line, whatever it was doing."""


class UserError(RuntimeError):
    """An error that the user can mend; the message says how."""
