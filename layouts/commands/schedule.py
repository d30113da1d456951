"""A pipeline schedule: its table and figures, as text, JSON, CSV, a trace or a picture; several names are compared."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from layouts.chart import plot, text_rows
from layouts.errors import InputError
from layouts.schedule_files import load_schedule, save_schedule, write_text
from layouts.schedules import MAKERS, make_schedule
from layouts.simulate import Costs, Simulation, simulate
from layouts.tables import Shape
from layouts.trace import trace_json
from moejax.pipeline import Schedule


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    add = parser.add_argument
    add("names", nargs="+", metavar="NAME", help=f"{', '.join(MAKERS)}, or a table in a .json or .csv file")
    add("--stages", type=int, metavar="P", help="stages; needed unless NAME is a file")
    add("--microbatches", type=int, metavar="M", help="micro-batches a step; needed unless NAME is a file")
    add("--chunks", type=int, metavar="V", help="chunks of the model a stage; default: the schedule's own choice")
    add("--unit", type=int, metavar="U", help="micro-batches that share a gather (zeropp); default min(M, 2P)")
    add("--costs", default="1,1,1", metavar="F,B,W", help="of a micro-batch on a full stage; a chunk costs 1/V; default 1,1,1")
    add("--split", action="store_true", help="gpipe, 1f1b, interleaved: send B before W instead of after it")
    add("--send", type=float, default=0.0, metavar="S", help="cost of a transfer between stages; default 0")
    add("--gather", type=float, default=0.0, metavar="G", help="cost of gathering a full stage's parameters; default 0")
    add("--reduce", type=float, default=0.0, metavar="R", help="cost of reducing a full stage's gradients; default 0")
    add("--blocking", action="store_true", help="stages wait while they send, gather or reduce; default: they work on")
    add("--max-activations", metavar="A[,A...]", help="the cap, in micro-batches of a full stage, held until W; one, or P")
    add("--json", type=Path, metavar="F", help="writes the table with its figures and times")
    add("--csv", type=Path, metavar="F", help="writes the table")
    add("--trace", type=Path, metavar="F.json", help="writes a trace for ui.perfetto.dev")
    add("--plot", type=Path, metavar="F.png", help="draws a .png or .svg")


def run(options: argparse.Namespace) -> int:
    """Makes or reads the schedules, and writes what was asked for."""
    costs = _costs(options)
    files = [option for option in ("json", "csv", "trace") if getattr(options, option)]
    if len(options.names) > 1 and files:
        raise InputError(f"--{files[0]} with {len(options.names)} schedules: takes one; --plot takes several")
    simulations = [_simulate(_schedule(name, options, costs), costs) for name in options.names]
    for simulation in simulations:
        print("\n".join(_report(simulation)))
    if options.json:
        save_schedule(simulations[0].schedule, _suffix(options.json, ".json"), simulations[0])
    if options.csv:
        save_schedule(simulations[0].schedule, _suffix(options.csv, ".csv"))
    if options.trace:
        write_text(_suffix(options.trace, ".json"), trace_json(simulations[0]))
    if options.plot:
        plot(simulations, options.plot)
    return 0


def _suffix(path: Path, wanted: str) -> Path:
    if path.suffix != wanted:
        raise InputError(f"{path}: needs the suffix {wanted}")
    return path


def _costs(options: argparse.Namespace) -> Costs:
    numbers = _numbers("costs", options.costs)
    if len(numbers) != 3:
        raise InputError(f"--costs {options.costs!r}: needs three numbers F,B,W")
    try:
        forward, backward, weight = numbers
        return Costs(forward, backward, weight, options.gather, options.reduce, options.send, blocking=options.blocking)
    except ValueError as error:
        raise InputError(str(error)) from error


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise InputError(f"--{option} {text!r}: needs numbers with commas between them") from error


def _schedule(name: str, options: argparse.Namespace, costs: Costs) -> Schedule:
    caps = _caps(options)
    if Path(name).suffix in (".json", ".csv"):
        return _loaded(Path(name), options, caps)
    for field in ("stages", "microbatches"):
        if getattr(options, field) is None:
            raise InputError(f"{name}: needs --{field}")
    shape = Shape(options.stages, options.microbatches, options.chunks, options.unit, options.split, costs)
    return make_schedule(name, dataclasses.replace(shape, max_activations=caps))


def _caps(options: argparse.Namespace) -> float | Sequence[float] | None:
    if options.max_activations is None:
        return None
    numbers = _numbers("max-activations", options.max_activations)
    return numbers if len(numbers) > 1 else numbers[0]


def _loaded(path: Path, options: argparse.Namespace, caps: float | Sequence[float] | None) -> Schedule:
    for field in ("stages", "microbatches", "chunks", "unit", "split"):
        if getattr(options, field):
            raise InputError(f"{path} with --{field}: a table in a file has its own")
    schedule = load_schedule(path)
    if caps is not None:
        try:
            schedule.check_memory(caps)
        except ValueError as error:
            raise InputError(f"{path}: {error}") from error
    return schedule


def _simulate(schedule: Schedule, costs: Costs) -> Simulation:
    try:
        return simulate(schedule, costs)
    except ValueError as error:
        raise InputError(str(error)) from error


def _report(simulation: Simulation) -> list[str]:
    schedule, figures = simulation.schedule, simulation.figures()
    stages, chunks = schedule.num_stages, schedule.placement.num_chunks
    lines = [
        f"{schedule.name}: {stages} stages x {chunks} chunks, {schedule.num_microbatches} micro-batches, unit {schedule.unit}",
        *text_rows(simulation),
        f"makespan                          {figures['makespan']:g}",
        f"bubble, share of the makespan     {simulation.bubble_makespan:.1%}",
        f"bubble, share of the worst span   {simulation.bubble_span:.1%}",
    ]
    for key, says in _PER_STAGE.items():
        lines.append(f"{says:<33} {' '.join(f'{value:g}' for value in figures[key])}")
    return [*lines, ""]


_PER_STAGE = {
    "peak_activations": "live micro-batches, a stage",
    "peak_waiting": "of these between B and W, a stage",
    "gathers": "gathers, a stage",
    "reduces": "reduces, a stage",
    "transfers": "transfers sent, a stage",
}
