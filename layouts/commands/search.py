"""Ranked layouts of a model on a cluster, with where their time and memory go."""

import argparse
import json
from pathlib import Path
from typing import Any

from layouts.errors import InfeasibleError, InputError
from layouts.request import add_problem, head_of, problem_of
from layouts.results import layout_entry, workload_entry
from layouts.search import OBJECTIVES, search
from layouts.terminal import print_answer


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    add_problem(parser, required=True)
    add = parser.add_argument
    add("--objective", choices=OBJECTIVES, help="step_time (default), latency, throughput or cost")
    add("--codecs", metavar="A,B", help="codecs that rows may travel in (plain): these round, so they are yours to allow")
    add("--runnable", action="store_true", help="only what moejax runs today")
    add("--top", type=int, default=10, metavar="N", help="layouts shown, the best of each of N meshes (10)")
    add("--json", metavar="FILE", help="writes the answer")


def run(chosen: argparse.Namespace) -> int:
    """Searches, prints, writes; returns the exit code."""
    if chosen.top < 1:
        raise InputError(f"--top {chosen.top}: needs a whole number of at least 1")
    if chosen.json and not Path(chosen.json).parent.is_dir():
        raise InputError(f"--json {chosen.json}: the folder {Path(chosen.json).parent} is not there")
    problem = problem_of(chosen)
    entry = {"schema": 1, "problem": head_of(chosen), "workload": workload_entry(problem), "layouts": []}
    try:
        answer = search(problem, chosen.top)
    except InfeasibleError as error:
        _write(chosen.json, entry | {"infeasible": str(error)})
        raise
    entry |= {"considered": vars(answer.tally)}
    entry["layouts"] = [layout_entry(problem, found, rank) for rank, found in enumerate(answer.found, 1)]
    print_answer(problem, answer)
    _write(chosen.json, entry)
    return 0


def _write(path: str | None, entry: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(entry, indent=1) + "\n")
