"""Fits the cost model's constants to measured steps of one model on one cluster; prints the leave-one-out error."""

import argparse
import json
from pathlib import Path

from layouts.calibrate import Step, calibrate, entry_of
from layouts.errors import InputError
from layouts.layout import Layout
from layouts.request import add_problem, problem_of
from layouts.workload import check_fit


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("steps", metavar="STEPS.jsonl", help='lines {"layout": {...}, "seconds": s}, at least three')
    add_problem(parser, required=True)
    parser.add_argument("--json", metavar="FILE", help="writes the constants, for --efficiency of the other commands")


def run(chosen: argparse.Namespace) -> int:
    """Fits, prints, writes; returns the exit code."""
    problem, steps = problem_of(chosen), read_steps(chosen.steps)
    for step in steps:
        check_fit(problem.model, step.layout, problem.batch)
    found = calibrate(problem, steps)
    for step, error, left_out in zip(steps, found.errors, found.left_out, strict=True):
        mesh = " ".join(f"{name} {size}" for name, size in step.layout.sizes.items() if size > 1) or "1 device"
        print(f"{mesh:<40} measured {step.seconds:10.4g} s  fitted {error:+7.1%}  left out {left_out:+7.1%}")
    print(f"median error {found.left_out_error:.1%} of steps left out of the fit")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps({"schema": 1, "efficiency": entry_of(found.efficiency)}, indent=1) + "\n")
    return 0


def read_steps(path: str) -> list[Step]:
    """The measured steps of a file.

    Raises:
      InputError: naming the line that is none.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise InputError(f"steps file {path!r}: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            seconds = float(entry["seconds"])
            found.append(Step(Layout.from_json(entry["layout"]), seconds))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"steps file {path!r}, line {number}: {error}") from error
        if not seconds > 0:
            raise InputError(f"steps file {path!r}, line {number}: seconds={seconds:g}: needs a number above 0")
    if len(found) < 3:
        raise InputError(f"steps file {path!r}: has {len(found)} steps; needs at least 3")
    return found
