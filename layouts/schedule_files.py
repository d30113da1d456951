"""Schedules in files: JSON and CSV tables in and out, as docs/schedules.md says."""

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from layouts.errors import InputError
from layouts.simulate import Simulation
from moejax.pipeline import COMPUTE, Cell, Op, Placement, Schedule

SCHEMA = 1
COLUMNS = ("stage", "cell", "op", "chunk", "microbatch", "unit", "part", "pipe")


def load_schedule(path: Path) -> Schedule:
    """A table from a .json or .csv file, checked.

    Raises:
      InputError: where the file cannot be read, is no table, or its table is wrong: the message says where.
    """
    readers = {".json": _from_json, ".csv": _from_csv}
    if path.suffix not in readers:
        raise InputError(f"{path}: legal are {' and '.join(readers)} files")
    try:
        return readers[path.suffix](path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not a table of a schedule, {type(error).__name__} at {error}") from error
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error


def save_schedule(schedule: Schedule, path: Path, simulation: Simulation | None = None) -> None:
    """Writes a table as .json or .csv; a simulation adds its figures and times to the JSON.

    Raises:
      InputError: for another suffix, or where the file cannot be written.
    """
    if path.suffix not in (".json", ".csv"):
        raise InputError(f"{path}: legal are .json and .csv files")
    text = _csv_text(schedule) if path.suffix == ".csv" else _json_text(schedule, simulation)
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Writes a file; InputError where that is not possible."""
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error


def _json_text(schedule: Schedule, simulation: Simulation | None) -> str:
    times = {(e.stage, e.cell, e.op): {"start": e.start, "end": e.end} for e in simulation.events} if simulation else {}
    ops = [
        json.dumps([op_fields(k, op) | times.get((r, k, op), {}) for k, cell in enumerate(row) for op in cell])
        for r, row in enumerate(schedule.rows)
    ]
    head = {
        "schema": SCHEMA,
        "name": schedule.name,
        "stages": schedule.num_stages,
        "chunks": schedule.placement.num_chunks,
        "microbatches": schedule.num_microbatches,
        "unit": schedule.unit,
        "parts": schedule.placement.parts,
        "pipes": schedule.placement.pipes,
    }
    head |= simulation.figures() if simulation else {}
    lines = [f'  "{key}": {json.dumps(value)}' for key, value in head.items()]
    lines.append('  "ops": [\n    ' + ",\n    ".join(ops) + "\n  ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def op_fields(k: int, op: Op) -> dict[str, Any]:
    """An op of cell k, as the JSON file has it."""
    index = {"gather": {}, "reduce": {"unit": op.index}}.get(op.kind, {"microbatch": op.index})
    return {"cell": k, "op": op.kind, "chunk": op.chunk, **index}


def _from_json(path: Path) -> Schedule:
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"schema {found.get('schema') if isinstance(found, dict) else None!r}: legal is {SCHEMA}")
    placement = Placement(tuple(map(tuple, found["parts"])), tuple(found["pipes"]))
    rows = tuple(_cells(ops) for ops in found["ops"])
    return Schedule(
        found.get("name", path.stem), found["microbatches"], found.get("unit", found["microbatches"]), placement, rows
    )


def _cells(ops: Iterable[Mapping[str, Any]]) -> tuple[Cell, ...]:
    """Ops of one cell number are one cell; without a number an op is a cell of its own."""
    cells: dict[Any, list[Op]] = {}
    for position, fields in enumerate(ops):
        index = {"gather": 0, "reduce": fields.get("unit")}.get(fields["op"], fields.get("microbatch"))
        if type(index) is not int or type(fields["chunk"]) is not int:
            raise ValueError(f"op {dict(fields)}: needs whole numbers as chunk and as micro-batch (of a reduce: as unit)")
        cells.setdefault(fields.get("cell", f"own {position}"), []).append(Op(fields["op"], fields["chunk"], index))
    return tuple(map(tuple, cells.values()))


def _csv_text(schedule: Schedule) -> str:
    lines = [",".join(COLUMNS)]
    for r, row in enumerate(schedule.rows):
        for k, cell in enumerate(row):
            lines += [_csv_line(schedule, r, k, op) for op in cell]
    return "\n".join(lines) + "\n"


def _csv_line(schedule: Schedule, stage: int, k: int, op: Op) -> str:
    microbatch = op.index if op.kind in COMPUTE else ""
    unit = {"gather": "", "reduce": op.index}.get(op.kind, op.index // schedule.unit)
    place = schedule.placement
    return ",".join(
        map(str, (stage, k, op.kind, op.chunk, microbatch, unit, place.parts[stage][op.chunk], place.pipes[op.chunk]))
    )


def _from_csv(path: Path) -> Schedule:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        wanted = set(COLUMNS) - {"cell", "unit", "pipe"}
        if not wanted <= set(reader.fieldnames or ()):
            raise ValueError(f"columns {reader.fieldnames}: needs {', '.join(COLUMNS)} (cell, unit and pipe may be left out)")
        lines = [{key: _number(value, key) for key, value in line.items() if key and value != ""} for line in reader]
    stages: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        stages.setdefault(line["stage"], []).append(line)
    rows = tuple(_cells(stages[stage]) for stage in sorted(stages))
    computes = [line for line in lines if line["op"] in COMPUTE]
    if not computes:
        raise ValueError(f"{len(lines)} lines: none is an F, B or W")
    num_microbatches = 1 + max(line["microbatch"] for line in computes)
    unit = len({line["microbatch"] for line in computes if line.get("unit", 0) == 0})
    return Schedule(path.stem, num_microbatches, unit, _placement(computes), rows)


def _number(text: str | None, column: str) -> Any:
    if column == "op" or text is None:
        return text
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{column} {text!r}: needs a whole number") from error


def _placement(lines: Iterable[Mapping[str, Any]]) -> Placement:
    parts = {(line["stage"], line["chunk"]): line["part"] for line in lines}
    pipes = {line["chunk"]: line.get("pipe", 0) for line in lines}
    stages, chunks = (1 + max(key[i] for key in parts) for i in (0, 1))
    missing = [(r, c) for r in range(stages) for c in range(chunks) if (r, c) not in parts]
    if missing:
        raise ValueError(f"stage {missing[0][0]}: no F, B or W of chunk {missing[0][1]}, so that its part is not known")
    rows = tuple(tuple(parts[r, c] for c in range(chunks)) for r in range(stages))
    return Placement(rows, tuple(pipes[c] for c in range(chunks)))
