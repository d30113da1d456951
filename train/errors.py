"""What ends a run, and with which exit code."""


class InputError(ValueError):
    """The user's input is wrong: one line on stderr saying what, the value, and what would be legal; exit code 2."""


class RunError(RuntimeError):
    """The run cannot go on, through no fault of its input: one line on stderr; exit code 1."""
