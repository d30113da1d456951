"""What makers of schedules share: what they are asked for, and how their rows become a table."""

import dataclasses
from collections.abc import Sequence

from layouts.errors import InputError
from layouts.simulate import Costs
from moejax.pipeline import Cell, Op, Placement, Schedule

Row = list[Cell]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a maker is asked for.

    Attributes:
      stages: P.
      microbatches: M.
      chunks: V; None: the maker's own choice.
      unit: U, for `zeropp`; None: min(M, 2P), from which on its bubble does not depend on the number of units.
      split: for the schedules with a fused backward: B is sent before W instead of after it.
      costs: what `auto` makes its table for; the other tables do not depend on costs.
      max_activations: the most that a stage may hold, in micro-batches of a full stage, held until W: one number, or one a
        stage. None: no cap.
    """

    stages: int
    microbatches: int
    chunks: int | None = None
    unit: int | None = None
    split: bool = False
    costs: Costs = dataclasses.field(default_factory=Costs)
    max_activations: float | Sequence[float] | None = None

    def __post_init__(self):
        for name in ("stages", "microbatches", "chunks", "unit"):
            value = getattr(self, name)
            if not (value is None and name in ("chunks", "unit")) and (type(value) is not int or value < 1):
                raise InputError(f"{name}={value!r}: needs a whole number of at least 1")
        if self.max_activations is not None and len(self.caps) != self.stages:
            raise InputError(f"max_activations={self.max_activations!r}: needs one number, or {self.stages}, one a stage")
        if not all(isinstance(cap, int | float) and cap > 0 for cap in self.caps):
            raise InputError(f"max_activations={self.max_activations!r}: needs numbers above 0")

    @property
    def caps(self) -> Sequence[float]:
        """The most micro-batches of a full stage that each stage may hold; M where there is no cap."""
        cap = self.microbatches if self.max_activations is None else self.max_activations
        return cap if isinstance(cap, Sequence) else (cap,) * self.stages


def op_cell(kind: str, m: int, chunk: int = 0) -> Cell:
    """A cell of one F, B or W."""
    return (Op(kind, chunk, m),)


def backward_cells(chunk: int, m: int, split: bool) -> Row:
    """A backward: B, then W; or both in one cell."""
    cells = [op_cell("B", m, chunk), op_cell("W", m, chunk)]
    return cells if split else [cells[0] + cells[1]]


def finish(name: str, shape: Shape, placement: Placement, rows: Sequence[Row], unit: int | None = None) -> Schedule:
    """A table of rows of F, B and W, with its gathers and reduces put in."""
    unit = shape.microbatches if unit is None else unit
    full = tuple(tuple(_with_reduces(_with_gathers(row), unit)) for row in rows)
    return Schedule(name, shape.microbatches, unit, placement, full)


def _with_gathers(row: Row) -> Row:
    """A gather before the first F or B of every chunk that is not held; as many are held as one cell uses at most."""
    used = [{op.chunk for op in cell if op.kind in ("F", "B")} for cell in row]
    room = max(map(len, used))
    held: list[int] = []
    out: Row = []
    for cell, chunks in zip(row, used, strict=True):
        out += [(Op("gather", c),) for c in sorted(chunks - set(held))]
        held = [c for c in held if c not in chunks] + sorted(chunks)
        held = held[-room:]
        out.append(cell)
    return out


def _with_reduces(row: Row, unit: int) -> Row:
    """A reduce after the last W of every (unit, chunk)."""
    last = {(op.chunk, op.index // unit): k for k, cell in enumerate(row) for op in cell if op.kind == "W"}
    after: dict[int, list[Cell]] = {}
    for (chunk, number), k in last.items():
        after.setdefault(k, []).append((Op("reduce", chunk, number),))
    return [out for k, cell in enumerate(row) for out in (cell, *after.get(k, ()))]
