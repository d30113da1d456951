"""Where a layout's time and memory go, term by term, adding up to the total."""

import argparse
import json
from pathlib import Path
from typing import Any

from layouts.cost import Cost, Job, cost, message_terms
from layouts.memory import Memory, memory
from layouts.request import add_problem, read_layout
from layouts.results import figures, workload_entry
from layouts.search import Problem
from layouts.terminal import layout_words


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("layout", metavar="LAYOUT.json[#RANK]", help="a layout, or what `search --json` wrote")
    add_problem(parser, required=False)
    parser.add_argument("--json", metavar="FILE", help="writes the figures")


def run(chosen: argparse.Namespace) -> int:
    """Prints; returns the exit code."""
    layout, problem = read_layout(chosen)
    job = problem.job(layout)
    priced, held = cost(job), memory(problem.model, layout, problem.batch, problem.recipe)
    print(f"{problem.model.name} on {problem.cluster}: {layout_words(layout)}")
    print("\n".join([*_time(job, priced), *_memory(problem, held)]))
    if chosen.json:
        entry = {"schema": 1, "workload": workload_entry(problem), "layout": layout.to_json()}
        entry |= figures(problem, priced, held, problem.batch.tokens, layout) | {"messages": _messages(job)}
        Path(chosen.json).write_text(json.dumps(entry, indent=1) + "\n")
    return 0


def _time(job: Job, priced: Cost) -> list[str]:
    lines = ["", "seconds of a step"]
    for name, seconds in priced.terms.items():
        lines.append(f"  {name:<16} {seconds:14.9f}  {seconds / priced.step_seconds:6.1%}  {_WORDS.get(name, _EXPOSED)}")
    lines.append(f"  {'total':<16} {priced.step_seconds:14.9f}")
    lines += ["", "messages of a device (a stage's mean), before anything hides them"]
    head = f"  {'name':<34} {'kind':<14} {'axes':<24} {'group':>5} {'operand MB':>11} {'times':>8} {'seconds':>12}"
    lines.append(head)
    for m in _messages(job):
        lines.append(
            f"  {m['name']:<34} {m['kind']:<14} {m['axes']:<24} {m['group']:5} {m['bytes'] / 1e6:11.4g} {m['count']:8.6g} "
            f"{m['seconds']:12.6f}"
        )
    return lines


_EXPOSED = "messages over this axis that compute does not hide"
_WORDS = {
    "products": "matrix products, forward and backward",
    "attention": "scores and values",
    "pointwise": "norms, residuals, activations, routing: memory traffic",
    "recompute": "forwards that run again (remat)",
    "head": "logits and loss, on the slowest stage",
    "stage": "transfers between stages that are not hidden",
    "bubble": "stages waiting, by the schedule's table",
    "gradients": "gradients over replicas and the tables' gathers, less what the last backward hides",
    "optimizer": "states read and written once",
    "host": "parameters and states from and to the host",
}


def _messages(job: Job) -> list[dict[str, Any]]:
    return [
        {
            "name": message.name,
            "kind": message.kind,
            "axes": "+".join(message.axes),
            "group": message.group,
            "bytes": message.bytes,
            "count": message.count,
            "seconds": seconds,
        }
        for message, seconds in message_terms(job)
    ]


def _memory(problem: Problem, held: Memory) -> list[str]:
    stage = held.heaviest
    lines = ["", f"bytes of a device of stage {stage.stage}, the fullest"]
    for name, parts in stage.terms.items():
        size = stage.term(name)
        inside = ", ".join(
            f"{part} {number / 1e9:.3g}" for part, number in sorted(parts.items(), key=lambda p: -p[1])[:5] if number
        )
        lines.append(f"  {name:<16} {size:20.1f}  {size / stage.total_bytes:6.1%}  {inside and f'GB: {inside}'}")
    lines.append(f"  {'total':<16} {stage.total_bytes:20.1f}  of {problem.limit_bytes:.0f} that the device has")
    if stage.host_bytes:
        lines.append(f"  {'on the host':<16} {stage.host_bytes:20.1f}")
    return lines
