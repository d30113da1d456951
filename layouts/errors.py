"""What ends a command of `python -m layouts`, and with which exit code."""


class LayoutsError(ValueError):
    """Ends a command with one line on stderr and an exit code."""

    exit_code = 1


class InputError(LayoutsError):
    """The user's input is wrong: the line says what, the value, and what would be legal."""

    exit_code = 2


class InfeasibleError(LayoutsError):
    """Nothing meets the limits asked for: the line names the binding one and the smallest change."""

    exit_code = 3
