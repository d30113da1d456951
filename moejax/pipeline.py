"""Schedule: who computes what, and in which order, in a pipeline: a table that is checked when it is made.

  P stages, V chunks a stage, M micro-batches, U micro-batches a unit

The model is cut into *parts*, in order; a *chunk* is the place on a stage that holds one part. A stage runs the cells of
its row one after another; a cell is one or several ops that run as one, and what it sends leaves when all of it is done:

  (F)          a forward
  (B), (W)     the input gradient, which is sent, and later the weight gradient
  (B, W)       the textbook's fused backward: the weight gradient before the send
  (F, B, W)    DualPipe's overlapped pair
  (gather)     a chunk's parameters over the fsdp axis; kept until their last F or B before the chunk's next gather
  (reduce)     a chunk's gradients of one unit over the fsdp axis

Sends and receives follow from the rows: `Schedule.transfers`.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

KINDS = ("F", "B", "W", "gather", "reduce")
COMPUTE = ("F", "B", "W")
Number = int | float


class Op(NamedTuple):
    """One op of one chunk.

    Attributes:
      kind: one of `KINDS`.
      chunk: which of the stage's chunks.
      index: the micro-batch of an F, B or W; the unit of a reduce; 0 for a gather.
    """

    kind: str
    chunk: int
    index: int = 0

    def __str__(self) -> str:
        what = {"gather": "", "reduce": f", unit {self.index}"}.get(self.kind, f", micro-batch {self.index}")
        return f"{self.kind} of chunk {self.chunk}{what}"


Cell = tuple[Op, ...]


class Need(NamedTuple):
    """A cell's op whose result another cell needs: where it stands, and what it is."""

    stage: int
    cell: int
    op: Op


class Transfer(NamedTuple):
    """A result that crosses stages: `op`'s, from a cell of `source` to a cell of `target`."""

    op: Op
    source: int
    source_cell: int
    target: int
    target_cell: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which part of the model each chunk of each stage holds.

    Attributes:
      parts: `parts[stage][chunk]`.
      pipes: `pipes[chunk]`: 0, and 1 for the chunks of a second copy of the model that micro-batches cross the other way.
    """

    parts: tuple[tuple[int, ...], ...]
    pipes: tuple[int, ...]

    @classmethod
    def loop(cls, num_stages: int, num_chunks: int = 1) -> "Placement":
        """Part c * P + r is chunk c of stage r: every chunk runs from the first stage to the last."""
        parts = tuple(tuple(c * num_stages + r for c in range(num_chunks)) for r in range(num_stages))
        return cls(parts, (0,) * num_chunks)

    @classmethod
    def zigzag(cls, num_stages: int, num_chunks: int = 2) -> "Placement":
        """As `loop`, but odd chunks run back: with two chunks a V, the first and the last part on stage 0."""
        at = lambda c, r: c * num_stages + (num_stages - 1 - r if c % 2 else r)
        parts = tuple(tuple(at(c, r) for c in range(num_chunks)) for r in range(num_stages))
        return cls(parts, (0,) * num_chunks)

    def both_ways(self) -> "Placement":
        """This one and its mirror image: stage r holds also what stage P - 1 - r does, as chunks of pipe 1."""
        parts = tuple(a + b for a, b in zip(self.parts, reversed(self.parts), strict=True))
        return Placement(parts, self.pipes + tuple(1 + max(self.pipes) + pipe for pipe in self.pipes))

    def __post_init__(self):
        if not self.parts or not self.pipes or any(len(row) != len(self.pipes) for row in self.parts):
            raise ValueError(f"placement {self.parts} with pipes {self.pipes}: needs a part for each chunk of each stage")
        for pipe in set(self.pipes):
            held = sorted(row[c] for row in self.parts for c, p in enumerate(self.pipes) if p == pipe)
            if held != list(range(self.num_parts)):
                raise ValueError(f"placement: pipe {pipe} holds parts {held}; needs each of 0 to {self.num_parts - 1} once")

    @property
    def num_stages(self) -> int:
        """P."""
        return len(self.parts)

    @property
    def num_chunks(self) -> int:
        """Chunks a stage holds, of all pipes."""
        return len(self.pipes)

    @cached_property
    def num_parts(self) -> int:
        """Parts the model is cut into."""
        return 1 + max(part for row in self.parts for part in row)

    @property
    def chunk_share(self) -> float:
        """A chunk as a share of a full stage, which is a P-th of the model."""
        return self.num_stages / self.num_parts

    @cached_property
    def where(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(pipe, part) -> (stage, chunk)."""
        stages = range(self.num_stages)
        return {(p, self.parts[r][c]): (r, c) for r in stages for c, p in enumerate(self.pipes)}

    def inputs(self, stage: int, op: Op) -> Iterator[tuple[int, Op]]:
        """The ops whose results an F, B or W needs, each with its stage; what a gather brings is not among them."""
        pipe, part = self.pipes[op.chunk], self.parts[stage][op.chunk]
        if op.kind == "F" and part:
            source, chunk = self.where[pipe, part - 1]
            yield source, Op("F", chunk, op.index)
        if op.kind == "B":
            yield stage, Op("F", op.chunk, op.index)
            if part + 1 < self.num_parts:
                source, chunk = self.where[pipe, part + 1]
                yield source, Op("B", chunk, op.index)
        if op.kind == "W":
            yield stage, Op("B", op.chunk, op.index)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: a row of cells a stage. Whatever is wrong with a row is refused here, op by op.

    Attributes:
      name: for pictures and messages.
      num_microbatches: M.
      unit: U: micro-batch m is of unit m // U; a chunk's gradients are reduced once a unit.
      placement: which part of the model each chunk holds.
      rows: `rows[stage]`, its cells in order. Every micro-batch runs F, B and W once on each part of one pipe. Gathers and
        reduces may be left out of all rows; where there are any, they must suffice.

    Raises:
      ValueError: naming the stage, the cell and the op that is out of range, missing, there twice, or before its input.
    """

    name: str
    num_microbatches: int
    unit: int
    placement: Placement
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self):
        for what in ("num_microbatches", "unit"):
            if type(getattr(self, what)) is not int or getattr(self, what) < 1:
                raise ValueError(f"schedule {what}={getattr(self, what)!r}: needs a whole number of at least 1")
        if len(self.rows) != self.num_stages:
            raise ValueError(f"schedule of {len(self.rows)} rows: the placement has {self.num_stages} stages")
        for stage, row in enumerate(self.rows):
            _check_ranges(self, stage, row)
        _check_once(self)
        _check_collectives(self)
        _ = self.order

    @property
    def num_stages(self) -> int:
        """P."""
        return self.placement.num_stages

    @property
    def num_units(self) -> int:
        """ceil(M / U)."""
        return -(-self.num_microbatches // self.unit)

    @cached_property
    def cell_of(self) -> dict[tuple[int, Op], int]:
        """(stage, op) -> the cell of the stage's row it stands in; of equal gathers the last."""
        return {(stage, op): k for stage, row in enumerate(self.rows) for k, cell in enumerate(row) for op in cell}

    @cached_property
    def needs(self) -> tuple[tuple[tuple[Need, ...], ...], ...]:
        """`needs[stage][cell]`: the results of other cells that the cell waits for."""
        return tuple(tuple(self._needs(r, k) for k in range(len(row))) for r, row in enumerate(self.rows))

    def _needs(self, stage: int, k: int) -> tuple[Need, ...]:
        cell = self.rows[stage][k]
        found = (Need(s, self.cell_of[s, op], op) for own in cell for s, op in self.placement.inputs(stage, own))
        return tuple(need for need in found if not (need.op.kind == "B" and need.op in cell and need[:2] == (stage, k)))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """What crosses stages: an F's output to the next part's stage, a B's input gradient to the previous one's."""
        return tuple(
            Transfer(need.op, need.stage, need.cell, stage, k)
            for stage, row in enumerate(self.needs)
            for k, needs in enumerate(row)
            for need in needs
            if need.stage != stage
        )

    @cached_property
    def order(self) -> tuple[tuple[int, int], ...]:
        """All (stage, cell), each after those whose results it needs and after those before it in its row."""
        return _order(self)

    @cached_property
    def live_chunks(self) -> tuple[tuple[int, ...], ...]:
        """`live_chunks[stage][cell]`: micro-batches of a chunk held while the cell runs, each from its F to its W."""
        return tuple(tuple(_live(row)) for row in self.rows)

    def peak_activations(self) -> tuple[float, ...]:
        """The most activations each stage holds, in micro-batches of a full stage, held until W."""
        return tuple(max(live, default=0) * self.placement.chunk_share for live in self.live_chunks)

    def count(self, kind: str) -> tuple[int, ...]:
        """How many ops of a kind each stage runs."""
        return tuple(sum(op.kind == kind for cell in row for op in cell) for row in self.rows)

    def check_memory(self, max_activations: Number | Sequence[Number]) -> None:
        """Raises ValueError at the first F with which a stage holds more than its cap.

        Args:
          max_activations: micro-batches of a full stage, held until W: one number, or one a stage.
        """
        caps = max_activations if isinstance(max_activations, Sequence) else (max_activations,) * self.num_stages
        if len(caps) != self.num_stages:
            raise ValueError(f"max_activations={max_activations!r}: needs one number, or {self.num_stages}, one a stage")
        for stage, (cap, live) in enumerate(zip(caps, self.live_chunks, strict=True)):
            held = [chunks * self.placement.chunk_share for chunks in live]
            over = next((k for k, size in enumerate(held) if size > cap + 1e-9), None)
            if over is not None:
                op = next(op for op in self.rows[stage][over] if op.kind == "F")
                raise ValueError(
                    f"{_at(stage, over, op)}: with it {held[over]:g} micro-batches of a full stage are held, "
                    f"over the cap of {cap:g}; this table needs {max(held):g}"
                )


def _live(row: Sequence[Cell]) -> Iterator[int]:
    live = 0
    for cell in row:
        live += sum(op.kind == "F" for op in cell)
        yield live
        live -= sum(op.kind == "W" for op in cell)


def _at(stage: int, k: int, op: Op) -> str:
    return f"stage {stage}, cell {k}: {op}"


def _check_ranges(schedule: Schedule, stage: int, row: Sequence[Cell]) -> None:
    limits = dict.fromkeys(COMPUTE, ("micro-batches", schedule.num_microbatches))
    limits |= {"gather": ("only", 1), "reduce": ("units", schedule.num_units)}
    for k, cell in enumerate(row):
        if not cell:
            raise ValueError(f"stage {stage}, cell {k}: holds no op; leave the cell out")
        for op in cell:
            if op.kind not in KINDS:
                raise ValueError(f"stage {stage}, cell {k}: op {op.kind!r}: legal are {', '.join(KINDS)}")
            if not 0 <= op.chunk < schedule.placement.num_chunks:
                raise ValueError(f"{_at(stage, k, op)}: legal chunks are 0 to {schedule.placement.num_chunks - 1}")
            what, limit = limits[op.kind]
            if not 0 <= op.index < limit:
                raise ValueError(f"{_at(stage, k, op)}: legal {what} are 0 to {limit - 1}")


def _check_once(schedule: Schedule) -> None:
    """Every F, B and W of a micro-batch on each part of one pipe, none twice."""
    first: dict[tuple[int, Op], int] = {}
    pipe_of: dict[int, tuple[int, str]] = {}
    for stage, k, op in _compute(schedule):
        if (stage, op) in first:
            raise ValueError(f"{_at(stage, k, op)}: for the second time, the first is in cell {first[stage, op]}")
        first[stage, op] = k
        pipe = schedule.placement.pipes[op.chunk]
        other, place = pipe_of.setdefault(op.index, (pipe, _at(stage, k, op)))
        if other != pipe:
            raise ValueError(f"{_at(stage, k, op)}: is of pipe {pipe}, but the micro-batch is in pipe {other} ({place})")
    for m in range(schedule.num_microbatches):
        pipe = pipe_of.get(m, (0, ""))[0]
        for part, kind in itertools.product(range(schedule.placement.num_parts), COMPUTE):
            stage, chunk = schedule.placement.where[pipe, part]
            if (stage, Op(kind, chunk, m)) not in first:
                raise ValueError(f"stage {stage}: {Op(kind, chunk, m)} is missing")


def _compute(schedule: Schedule) -> Iterator[tuple[int, int, Op]]:
    for stage, row in enumerate(schedule.rows):
        for k, cell in enumerate(row):
            yield from ((stage, k, op) for op in cell if op.kind in COMPUTE)


def _check_collectives(schedule: Schedule) -> None:
    """Where there are gathers, every F and B has its chunk's; where there are reduces, every W is in one, once."""
    gathers, reduces = any(schedule.count("gather")), any(schedule.count("reduce"))
    for stage, row in enumerate(schedule.rows):
        if gathers:
            _check_gathers(stage, row)
        if reduces:
            _check_reduces(stage, row, schedule.unit)


def _check_gathers(stage: int, row: Sequence[Cell]) -> None:
    unused: dict[int, int] = {}
    gathered: set[int] = set()
    for k, cell in enumerate(row):
        for op in cell:
            if op.kind in ("F", "B") and op.chunk not in gathered:
                raise ValueError(f"{_at(stage, k, op)}: no gather of chunk {op.chunk} comes before it")
            if op.kind in ("F", "B"):
                unused.pop(op.chunk, None)
        for op in cell:
            if op.kind == "gather" and op.chunk in unused:
                raise ValueError(f"{_at(stage, k, op)}: that of cell {unused[op.chunk]} has not been used yet")
            if op.kind == "gather":
                gathered.add(op.chunk)
                unused[op.chunk] = k
    if unused:
        chunk, k = next(iter(unused.items()))
        raise ValueError(f"{_at(stage, k, Op('gather', chunk))}: no F or B uses it")


def _check_reduces(stage: int, row: Sequence[Cell], unit: int) -> None:
    done: dict[Op, int] = {}
    for k, cell in enumerate(row):
        for op in cell:
            if op.kind == "reduce" and op in done:
                raise ValueError(f"{_at(stage, k, op)}: for the second time, the first is in cell {done[op]}")
            if op.kind == "reduce":
                done[op] = k
            own = Op("reduce", op.chunk, op.index // unit)
            if op.kind == "W" and own in done:
                raise ValueError(f"{_at(stage, k, op)}: comes after the {own}, in cell {done[own]}")
    wanted = {Op("reduce", op.chunk, op.index // unit): k for k, cell in enumerate(row) for op in cell if op.kind == "W"}
    for op, k in wanted.items():
        if op not in done:
            raise ValueError(f"stage {stage}: {op} is missing; its last W is in cell {k}")
    for op in done.keys() - wanted.keys():
        raise ValueError(f"{_at(stage, done[op], op)}: there is no W for it")


def _order(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Runs the rows until all is done, each stage as far as its inputs allow."""
    num_done = [0] * schedule.num_stages
    order: list[tuple[int, int]] = []
    ready = lambda needs: all(need.cell < num_done[need.stage] for need in needs)
    waiting: dict[int, list[int]] = {}
    todo = deque(range(schedule.num_stages))
    while todo:
        r = todo.popleft()
        before = num_done[r]
        while num_done[r] < len(schedule.rows[r]) and ready(schedule.needs[r][num_done[r]]):
            order.append((r, num_done[r]))
            num_done[r] += 1
        todo += waiting.pop(r, []) if num_done[r] > before else []
        if num_done[r] < len(schedule.rows[r]):
            blocker = _blocker(schedule, r, num_done)
            if blocker.stage == r:
                raise ValueError(_too_early(schedule, r, num_done))
            waiting.setdefault(blocker.stage, []).append(r)
    if len(order) < sum(map(len, schedule.rows)):
        stuck = next(r for r, row in enumerate(schedule.rows) if num_done[r] < len(row))
        raise ValueError(_too_early(schedule, stuck, num_done))
    return tuple(order)


def _blocker(schedule: Schedule, stage: int, num_done: Sequence[int]) -> Need:
    return next(n for n in schedule.needs[stage][num_done[stage]] if n.cell >= num_done[n.stage])


def _too_early(schedule: Schedule, stage: int, num_done: Sequence[int]) -> str:
    """Follows the waits from a stuck stage until they close a ring, and tells the ring."""
    seen: list[int] = []
    while stage not in seen:
        seen.append(stage)
        stage = _blocker(schedule, stage, num_done).stage
    ring = seen[seen.index(stage) :]
    told = []
    for r in ring:
        need, k = _blocker(schedule, r, num_done), num_done[r]
        op = next(o for o in schedule.rows[r][k] if (need.stage, need.op) in schedule.placement.inputs(r, o))
        told.append(
            f"{_at(r, k, op)}: comes before its input, the {need.op}, which is in cell {need.cell} of stage {need.stage}"
        )
    return "; and that waits for ".join(told)
