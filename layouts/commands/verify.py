"""Compiles a layout's real training step ahead of time for its cluster; predicted against compiled."""

import argparse
import json
from pathlib import Path

from layouts.errors import InputError
from layouts.request import add_problem, read_layout
from layouts.verify import prove
from layouts.workload import check_fit


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("layout", metavar="LAYOUT.json[#RANK]", help="a layout, or what `search --json` wrote")
    add_problem(parser, required=False)
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="the compiler is stopped after so long (900)")
    parser.add_argument("--json", metavar="FILE", help="writes the proof")


def run(chosen: argparse.Namespace) -> int:
    """Proves, prints; 4 where the proof does not hold."""
    if not chosen.timeout > 0:
        raise InputError(f"--timeout {chosen.timeout:g}: needs seconds above 0")
    layout, problem = read_layout(chosen)
    check_fit(problem.model, layout, problem.batch)
    rank = chosen.layout.partition("#")[2]
    proof = prove(problem, layout, int(rank or 1), chosen.timeout)
    print("\n".join(proof.lines()))
    if chosen.json:
        entry = {"schema": 1, "layout": layout.to_json(), "proof": proof.entry()}
        Path(chosen.json).write_text(json.dumps(entry, indent=1) + "\n")
    return 0 if proof.passed else 4
