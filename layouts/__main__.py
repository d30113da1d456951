"""`python -m layouts COMMAND`: decides and proves without running a step. See --help."""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from layouts.errors import InputError, LayoutsError

# Each is a module of layouts.commands, imported only where its command is given: a wrong word is answered at once.
COMMANDS: dict[str, str] = {
    "search": "ranked layouts of a model on a cluster",
    "explain": "where a layout's time and memory go",
    "verify": "a layout's training step, compiled ahead of time",
    "calibrate": "the cost constants fitted to measured steps",
    "clusters": "the known hardware, with sources",
    "models": "the known models, with sources",
    "schedule": "a pipeline schedule: its table, figures, trace and picture",
}
_CODES = ("", "exit codes: 0 done; 2 the input is wrong; 3 nothing feasible; 4 a proof that failed; 1 anything else")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise InputError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        code = _main(_parser().parse_args(arguments))
        sys.stdout.flush()
        return code
    except LayoutsError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever reads (`| head`) has had enough. Python flushes stdout once more at its end: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m layouts",
        description="Decides and proves without running a step.",
        epilog="\n".join(["commands:", *(f"  {name:<10} {says}" for name, says in COMMANDS.items()), *_CODES]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", help="one of those below; COMMAND --help says more")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    return parser


def _main(chosen: argparse.Namespace) -> int:
    if chosen.command not in COMMANDS:
        near = difflib.get_close_matches(chosen.command or "", COMMANDS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InputError(f"command {chosen.command!r}: legal are {', '.join(COMMANDS)}{hint}")
    module = importlib.import_module(f"layouts.commands.{chosen.command}")
    parser = _Parser(prog=f"python -m layouts {chosen.command}", description=module.__doc__)
    module.configure(parser)
    return module.run(parser.parse_args(chosen.arguments))


if __name__ == "__main__":
    sys.exit(main())
