"""When everything of a schedule happens, at given costs: makespan, bubbles, live activations, gathers, transfers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from moejax.pipeline import COMPUTE, Cell, Op, Placement, Schedule

PerStage = float | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Costs:
    """What ops take, in any unit of time: each a number, or one a stage.

    Attributes:
      forward: F of one micro-batch on a full stage; a chunk takes its share of that (1/V).
      backward: B, the input gradient, likewise.
      weight: W, the weight gradient, likewise.
      gather: gathering a full stage's parameters, likewise.
      reduce: reducing a full stage's gradients, likewise.
      send: one micro-batch's activations, or their gradient, from a stage to another.
      pair: an overlapped F, B and W of a full stage; None: forward + backward + weight.
      blocking: a stage does nothing else while it sends, gathers or reduces. Else what it sends travels while it goes on
        (messages do not queue), a gather runs beside the cell before it and a reduce beside those after it, one gather and
        one reduce at a time.
      part_sizes: the size of each part of the model, in shares of their mean: costs but `send`, and activations, are
        proportional. None: all equal.
    """

    forward: PerStage = 1.0
    backward: PerStage = 1.0
    weight: PerStage = 1.0
    gather: PerStage = 0.0
    reduce: PerStage = 0.0
    send: float = 0.0
    pair: PerStage | None = None
    blocking: bool = False
    part_sizes: Sequence[float] | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name != "blocking":
                _check_cost(field.name, value)

    def at(self, placement: Placement) -> "ChunkCosts":
        """The costs of every chunk.

        Raises:
          ValueError: where a sequence has not as many numbers as there are stages, or parts.
        """
        kinds = dict(zip((*COMPUTE, "gather", "reduce", "pair"), _FIELDS, strict=True))
        stages = {kind: self._per_stage(name, placement.num_stages) for kind, name in kinds.items()}
        sizes = _normalised(self.part_sizes, placement.num_parts)
        shares = [[sizes[part] * placement.chunk_share for part in row] for row in placement.parts]
        of = {kind: [[c * s for s in row] for c, row in zip(cost, shares, strict=True)] for kind, cost in stages.items()}
        return ChunkCosts(of, shares)

    def _per_stage(self, name: str, num_stages: int) -> Sequence[float]:
        value = getattr(self, name)
        if value is None:
            each = zip(*(self._per_stage(part, num_stages) for part in _FIELDS[:3]), strict=True)
            return [sum(three) for three in each]
        values = value if isinstance(value, Sequence) else (value,) * num_stages
        if len(values) != num_stages:
            raise ValueError(f"costs {name}={value!r}: needs one number, or {num_stages}, one a stage")
        return values


_FIELDS = ("forward", "backward", "weight", "gather", "reduce", "pair")


def _check_cost(name: str, value: PerStage) -> None:
    if not all(map(_at_least_0, value if isinstance(value, Sequence) else (value,))):
        raise ValueError(f"costs {name}={value!r}: needs a number of at least 0, or one a stage")


def _at_least_0(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _normalised(sizes: Sequence[float] | None, num_parts: int) -> Sequence[float]:
    if sizes is None:
        return (1.0,) * num_parts
    if len(sizes) != num_parts or not sum(sizes) > 0:
        raise ValueError(f"costs part_sizes={sizes!r}: needs {num_parts} numbers, one a part, not all 0")
    mean = sum(sizes) / num_parts
    return [size / mean for size in sizes]


@dataclasses.dataclass(frozen=True)
class ChunkCosts:
    """`Costs` of one placement.

    Attributes:
      of: `of[kind][stage][chunk]`: what an op of that kind takes there; "pair" for an overlapped F, B, W.
      activations: `activations[stage][chunk]`: what a micro-batch holds there, in those of a mean stage.
    """

    of: dict[str, list[list[float]]]
    activations: list[list[float]]

    def compute(self, stage: int, cell: Cell) -> float:
        """What a cell's F, B and W take."""
        ops = [op for op in cell if op.kind in COMPUTE]
        if {"F", "B"} <= {op.kind for op in ops}:
            return sum(self.of["pair"][stage][op.chunk] for op in ops if op.kind == "F")
        return sum(self.of[op.kind][stage][op.chunk] for op in ops)

    def communicate(self, stage: int, cell: Cell) -> float:
        """What a cell's gathers and reduces take."""
        return sum(self.of[op.kind][stage][op.chunk] for op in cell if op.kind not in COMPUTE)


@dataclasses.dataclass(frozen=True)
class Event:
    """One op in time.

    Attributes:
      op: what; the kind "send" for a stage that is blocked by sending the result of a cell.
      stage: where.
      cell: of the stage's row.
      start: when.
      end: when.
      lane: "compute"; "upper" and "lower" for the two sides of an overlapped pair; "gather" and "reduce" for what runs beside.
    """

    op: Op
    stage: int
    cell: int
    start: float
    end: float
    lane: str = "compute"


@dataclasses.dataclass(frozen=True)
class Message:
    """A result on its way to another stage."""

    op: Op
    source: int
    target: int
    sent: float
    arrived: float


@dataclasses.dataclass(frozen=True)
class HeldBytes:
    """What one micro-batch holds on a mean full stage until its W is done.

    Attributes:
      forward_bytes: from F on: its activations.
      backward_bytes: from B on, besides: gradients of the products' results, and operands that B has made again.
    """

    forward_bytes: float
    backward_bytes: float

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not _at_least_0(value := getattr(self, field.name)):
                raise ValueError(f"held {field.name}={value!r}: needs a number of at least 0")


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A schedule in time.

    Attributes:
      schedule: the table.
      costs: what ops took.
      events: in no particular order.
      messages: what crossed stages.
      peak_activations: the most each stage held at a time, in micro-batches of a mean full stage, held until W.
      peak_waiting: likewise the most whose B was done and whose W was not: what B made for W is held until then.
    """

    schedule: Schedule
    costs: Costs
    events: tuple[Event, ...]
    messages: tuple[Message, ...]
    peak_activations: tuple[float, ...]
    peak_waiting: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """From the start to the end of the last event."""
        return max(event.end for event in self.events)

    @property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """When each stage begins its first F, B or W, and when it has done its last."""
        each = [[e for e in self.events if e.stage == r and e.op.kind in COMPUTE] for r in range(self.schedule.num_stages)]
        return tuple((min(e.start for e in events), max(e.end for e in events)) for events in each)

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each stage computes; an overlapped pair's time once."""
        busy = [0.0] * self.schedule.num_stages
        for event in self.events:
            if event.op.kind in COMPUTE and event.lane != "lower":
                busy[event.stage] += event.end - event.start
        return tuple(busy)

    @property
    def bubble_makespan(self) -> float:
        """The stages' mean idle time as a share of the makespan; idle is all that is not F, B or W."""
        return max(0.0, 1 - sum(self.busy) / (self.schedule.num_stages * self.makespan)) if self.makespan else 0.0

    @property
    def bubble_span(self) -> float:
        """The worst stage's idle time between its first start and its last end, as a share of that span."""
        pairs = zip(self.spans, self.busy, strict=True)
        return max(0.0, *(1 - busy / (end - start) for (start, end), busy in pairs if end > start))

    def peak_bytes(self, held: HeldBytes) -> tuple[float, ...]:
        """The most bytes each stage holds at a time: activations, and what W waits for besides, at the same moment."""
        shares = self.costs.at(self.schedule.placement).activations
        return _peaks(self.schedule, shares, {"F": held.forward_bytes, "B": held.backward_bytes})

    def figures(self) -> dict[str, Any]:
        """What the JSON file and the printed table give."""
        sent = [sum(m.source == r for m in self.messages) for r in range(self.schedule.num_stages)]
        return {
            "makespan": _clean(self.makespan),
            "bubble_makespan": _clean(self.bubble_makespan),
            "bubble_span": _clean(self.bubble_span),
            "peak_activations": [_clean(peak) for peak in self.peak_activations],
            "peak_waiting": [_clean(peak) for peak in self.peak_waiting],
            "gathers": list(self.schedule.count("gather")),
            "reduces": list(self.schedule.count("reduce")),
            "transfers": sent,
        }


def _clean(value: float) -> float:
    """Without the last digits, where sums of thirds are not whole."""
    return round(value, 9) + 0.0


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Runs a schedule in time: every stage runs its cells in order, each as soon as its inputs are there.

    Args:
      schedule: any table.
      costs: default F = B = W = 1 a full stage, all communication free.

    Raises:
      ValueError: where the costs do not fit the schedule's stages or parts.
    """
    clock = _Clock(schedule, costs or Costs())
    for stage, k in schedule.order:
        clock.run(stage, k)
    peaks = [_peaks(schedule, clock.at.activations, {kind: 1.0}) for kind in ("F", "B")]
    return Simulation(schedule, clock.costs, tuple(clock.events), tuple(clock.messages), *peaks)


class _Clock:
    """The stages' times while a schedule runs."""

    def __init__(self, schedule: Schedule, costs: Costs):
        self.schedule, self.costs, self.at = schedule, costs, costs.at(schedule.placement)
        stages = range(schedule.num_stages)
        self.free = [0.0 for _ in stages]  # when the stage can begin its next cell
        self.link = {kind: [0.0 for _ in stages] for kind in ("gather", "reduce")}  # when it has done those so far
        self.last_start = [0.0 for _ in stages]
        self.gathered: list[dict[int, float]] = [{} for _ in stages]
        self.arrival: dict[tuple[int, Op, int], float] = {}  # (source, op, target)
        self.events: list[Event] = []
        self.messages: list[Message] = []
        self.targets: dict[tuple[int, int], list[tuple[Op, int]]] = {}
        for way in schedule.transfers:
            self.targets.setdefault((way.source, way.source_cell), []).append((way.op, way.target))

    def run(self, stage: int, k: int) -> None:
        cell = self.schedule.rows[stage][k]
        needs = self.schedule.needs[stage][k]
        arrived = [self.arrival[need.stage, need.op, stage] for need in needs if need.stage != stage]
        params = [self.gathered[stage].get(op.chunk, 0.0) for op in cell if op.kind in ("F", "B")]
        compute = any(op.kind in COMPUTE for op in cell)
        start = max([self.free[stage], *arrived, *params])
        end = start + self.at.compute(stage, cell)
        end = max(end, self._communicate(stage, k, start, compute))
        if compute:
            self.events += _events(stage, k, cell, start, end, self.at)
            self.last_start[stage] = start
        self.free[stage] = end
        self._send(stage, k, end)

    def _communicate(self, stage: int, k: int, start: float, compute: bool) -> float:
        """The cell's gathers and reduces; returns until when they hold up the stage."""
        cell = self.schedule.rows[stage][k]
        until = start
        for op in cell:
            if op.kind in COMPUTE:
                continue
            early = self.last_start[stage] if op.kind == "gather" and not compute else start
            begin = until if self.costs.blocking else max(self.link[op.kind][stage], early)
            done = begin + self.at.of[op.kind][stage][op.chunk]
            lane = "compute" if self.costs.blocking and not compute else op.kind
            self.events.append(Event(op, stage, k, begin, done, lane))
            self.link[op.kind][stage] = done
            until = done if self.costs.blocking else until
            if op.kind == "gather":
                self.gathered[stage][op.chunk] = done
        return until

    def _send(self, stage: int, k: int, end: float) -> None:
        for op, target in self.targets.get((stage, k), ()):
            arrived = end + self.costs.send
            self.messages.append(Message(op, stage, target, end, arrived))
            self.arrival[stage, op, target] = arrived
            if self.costs.blocking and self.costs.send:
                self.events.append(Event(Op("send", op.chunk, op.index), stage, k, end, arrived))
                end = self.free[stage] = arrived


def _events(stage: int, k: int, cell: Cell, start: float, end: float, at: ChunkCosts) -> list[Event]:
    """A cell's computing ops one after another; of an overlapped pair the F beside the others."""
    ops = [op for op in cell if op.kind in COMPUTE]
    if {"F", "B"} <= {op.kind for op in ops}:
        forwards = [op for op in ops if op.kind == "F"]
        return [
            *_in_turn(stage, k, forwards, (start, end), at, "upper"),
            *_in_turn(stage, k, [op for op in ops if op.kind != "F"], (start, end), at, "lower"),
        ]
    return _in_turn(stage, k, ops, (start, start + at.compute(stage, cell)), at, "compute")


def _in_turn(stage: int, k: int, ops: list[Op], span: tuple[float, float], at: ChunkCosts, lane: str) -> list[Event]:
    """The ops fill the span, each in proportion to its cost."""
    sizes = [at.of[op.kind][stage][op.chunk] for op in ops]
    sizes = sizes if sum(sizes) else [1.0] * len(sizes)
    start, scale = span[0], (span[1] - span[0]) / max(1e-300, sum(sizes))
    events = []
    for op, size in zip(ops, sizes, strict=True):
        events.append(Event(op, stage, k, start, start + size * scale, lane))
        start += size * scale
    return events


def _peaks(schedule: Schedule, shares: list[list[float]], held: dict[str, float]) -> tuple[float, ...]:
    """The most that each stage holds: an op of a kind in `held` adds as much as that says, which stays until its W is done."""
    peaks = []
    for row, sizes in zip(schedule.rows, shares, strict=True):
        live = peak = 0.0
        for cell in row:
            live += sum(held[op.kind] * sizes[op.chunk] for op in cell if op.kind in held)
            peak = max(peak, live)
            live -= sum(sum(held.values()) * sizes[op.chunk] for op in cell if op.kind == "W")
        peaks.append(_clean(peak))
    return tuple(peaks)
