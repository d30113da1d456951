"""Ranked layouts of a model on a cluster, with where their time and memory go."""

import argparse
import json
from pathlib import Path
from typing import Any

from layouts.errors import InfeasibleError, InputError
from layouts.request import add_problem, head_of, problem_of
from layouts.results import layout_entry, workload_entry
from layouts.search import OBJECTIVES, Answer, Problem, search
from layouts.terminal import print_answer, print_proofs


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    add_problem(parser, required=True)
    add = parser.add_argument
    add("--objective", choices=OBJECTIVES, help="step_time (default), latency, throughput or cost")
    add("--codecs", metavar="A,B", help="codecs that rows may travel in (plain): these round, so they are yours to allow")
    add("--runnable", action="store_true", help="only what moejax runs today")
    add("--top", type=int, default=10, metavar="N", help="layouts shown, the best of each of N meshes (10)")
    add("--verify", type=int, default=0, metavar="N", help="compiles the best N ahead of time, as `verify` does")
    add("--json", metavar="FILE", help="writes the answer")
    add("--html", metavar="FILE", help="writes a page with tables and charts")


def run(chosen: argparse.Namespace) -> int:
    """Searches, prints, writes; returns the exit code."""
    for name in ("top", "verify"):
        if getattr(chosen, name) < (name == "top"):
            raise InputError(f"--{name} {getattr(chosen, name)}: needs a whole number of at least {int(name == 'top')}")
    for name in ("json", "html"):
        path = getattr(chosen, name)
        if path and not Path(path).parent.is_dir():
            raise InputError(f"--{name} {path}: the folder {Path(path).parent} is not there")
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
    return _after(chosen, problem, answer, entry)


def _after(chosen: argparse.Namespace, problem: Problem, answer: Answer, entry: dict[str, Any]) -> int:
    """Proofs and the page, where asked for."""
    code = 0
    if chosen.verify:
        from layouts.verify import prove_best

        proofs = prove_best(problem, [found.layout for found in answer.found], chosen.verify)
        print_proofs(proofs)
        for proof in proofs:
            entry["layouts"][proof.rank - 1]["proof"] = proof.entry()
        _write(chosen.json, entry)
        code = 0 if any(proof.passed for proof in proofs) else 4
    if chosen.html:
        from layouts.page import write_page

        write_page(Path(chosen.html), problem, answer, entry)
    return code


def _write(path: str | None, entry: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(entry, indent=1) + "\n")
