"""Simulated schedules as traces that https://ui.perfetto.dev opens."""

import json
from typing import Any

from layouts.schedule_files import op_fields
from layouts.simulate import Event, Simulation

# Threads of a stage: what computes, what gathers beside it, what reduces beside it.
_THREADS = {"gather": (1, ": gathers"), "reduce": (2, ": reduces")}


def trace_json(simulation: Simulation) -> str:
    """A trace in Chrome's JSON format: threads of a stage for what computes, gathers and reduces, and arrows for transfers.

    One unit of the costs is shown as a second.
    """
    schedule = simulation.schedule
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": schedule.name}}]
    for stage, lane in sorted({(e.stage, e.lane if e.lane in _THREADS else "") for e in simulation.events}):
        thread = {"ph": "M", "pid": 0, "tid": _thread(stage, lane)}
        events.append(thread | {"name": "thread_name", "args": {"name": f"stage {stage}{_THREADS.get(lane, (0, ''))[1]}"}})
        events.append(thread | {"name": "thread_sort_index", "args": {"sort_index": _thread(stage, lane)}})
    events += [_slice(simulation, event) for event in simulation.events]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events + _arrows(simulation)}) + "\n"


def _thread(stage: int, lane: str) -> int:
    return 3 * stage + _THREADS.get(lane, (0, ""))[0]


def _slice(simulation: Simulation, event: Event) -> dict[str, Any]:
    part = simulation.schedule.placement.parts[event.stage][event.op.chunk]
    fields = {key: value for key, value in op_fields(event.cell, event.op).items() if key != "op"}
    return {
        "ph": "X",
        "pid": 0,
        "tid": _thread(event.stage, event.lane),
        "name": str(event.op),
        "cat": event.op.kind,
        "ts": event.start * 1e6,
        "dur": (event.end - event.start) * 1e6,
        "args": fields | {"part": part},
    }


def _arrows(simulation: Simulation) -> list[dict[str, Any]]:
    """From the op that makes a result to the one on another stage that needs it."""
    schedule = simulation.schedule
    of = {(event.stage, event.op): event for event in simulation.events}
    arrows = []
    for number, way in enumerate(schedule.transfers):
        cell = schedule.rows[way.target][way.target_cell]
        reader = next(op for op in cell if (way.source, way.op) in schedule.placement.inputs(way.target, op))
        arrows += [_arrow(of[way.source, way.op], "s", number), _arrow(of[way.target, reader], "f", number)]
    return arrows


def _arrow(event: Event, phase: str, number: int) -> dict[str, Any]:
    # A little inside the slice: at its very end an arrow would be bound to the next one.
    at = event.start + (event.end - event.start) * (0.999 if phase == "s" else 0.001)
    common = {"pid": 0, "tid": _thread(event.stage, event.lane), "ts": at * 1e6, "bp": "e"}
    return {"ph": phase, "id": number, "name": event.op.kind, "cat": "transfer", **common}
