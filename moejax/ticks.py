"""Ticks: a schedule as what the executor reads, tick after tick: a stage's op, the slots of its buffers, what it sends.

T ticks, P stages, J: the most layers that a chunk has.

An op (F, B or W) takes a tick. What a cell makes is sent in its last tick, written into the receiver's inbox at the end of
that tick, and may be read from the next one on. Slots are coloured as intervals, so that a buffer has as many as are ever
in use at the same time.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from moejax.pipeline import COMPUTE, Cell, Op, Schedule
from moejax.stage_layers import StageLayers

KINDS = ("idle", *COMPUTE)
Y, DX = 0, 1  # what a stage may send: its last F's output, its last B's
LAYER_BUFFERS = ("keep_b", "keep_w", "stash", "gathered", "sums")


@dataclasses.dataclass(frozen=True)
class Ticks:
    """The table.

    Attributes:
      columns: by name, int32 arrays [T, P] or, of numbers for each layer of the op's chunk, [T, P, J].
      channels: for each message that a tick has room for, how many stages further it goes (0: stays).
      inbox: slots for what arrived, besides one that nobody reads.
      slots: for each of `LAYER_BUFFERS` the slots of each kind of layer.
    """

    columns: dict[str, np.ndarray]
    channels: tuple[int, ...]
    inbox: int
    slots: dict[str, tuple[int, ...]]

    @property
    def num_ticks(self) -> int:
        """T."""
        return len(self.columns["op"])


@dataclasses.dataclass(frozen=True)
class _Timed:
    """An F, B or W, with the gathers that come right before it and the reduces right after."""

    op: Op
    tick: int
    sent: int
    gathers: tuple[Op, ...] = ()
    reduces: tuple[Op, ...] = ()


def make_ticks(schedule: Schedule, layers: StageLayers, backward: bool = True) -> Ticks:
    """The table of a schedule over a model's layers.

    Args:
      schedule: any valid one.
      layers: on its placement.
      backward: False leaves all but the forwards out.
    """
    ops = _timed(schedule, backward)
    T = 1 + max(timed.tick for row in ops for timed in row)
    return _Builder(schedule, layers, ops, T, backward).build()


def _timed(schedule: Schedule, backward: bool) -> list[list[_Timed]]:
    """When everything runs: each stage's cells in order, each as soon as what it needs has been sent."""
    rows: list[list[_Timed]] = [[] for _ in schedule.rows]
    free = [0] * schedule.num_stages
    ends: dict[tuple[int, int], int] = {}
    waiting: list[tuple[Op, ...]] = [()] * schedule.num_stages
    for stage, k in schedule.order:
        cell = schedule.rows[stage][k]
        cell = cell if backward else tuple(op for op in cell if op.kind in ("F", "gather"))
        start = max([free[stage], *(ends[need.stage, need.cell] for need in schedule.needs[stage][k])])
        waiting[stage] = _add_cell(rows[stage], cell, start, waiting[stage])
        free[stage] = ends[stage, k] = start + sum(op.kind in COMPUTE for op in cell)
    return rows


def _add_cell(row: list[_Timed], cell: Cell, start: int, gathers: tuple[Op, ...]) -> tuple[Op, ...]:
    """Adds a cell's ops to a stage's; returns the gathers that wait for an op to go with."""
    compute = [op for op in cell if op.kind in COMPUTE]
    last = start + len(compute) - 1
    for op in cell:
        if op.kind == "gather":
            gathers += (op,)
        elif op.kind == "reduce":
            row[-1] = dataclasses.replace(row[-1], reduces=(*row[-1].reduces, op))
        else:
            tick = start + compute.index(op)
            again = any(later.kind == op.kind for later in compute[compute.index(op) + 1 :])
            row.append(_Timed(op, tick, tick if again else last, gathers))
            gathers = ()
    return gathers


def color(intervals: Mapping[Any, tuple[int, int]]) -> tuple[dict[Any, int], int]:
    """Slots for intervals (written at the end of tick a, last read in tick b), as few as there can be.

    Returns:
      (interval's key -> slot, number of slots).
    """
    slot, busy = {}, []
    for key, (start, end) in sorted(intervals.items(), key=lambda item: item[1]):
        found = next((i for i, until in enumerate(busy) if until <= start), len(busy))
        busy[found : found + 1] = [end]
        slot[key] = found
    return slot, len(busy)


class _Builder:
    """Fills the columns."""

    def __init__(self, schedule: Schedule, layers: StageLayers, ops: list[list[_Timed]], num_ticks: int, backward: bool):
        self.schedule, self.layers, self.ops, self.backward = schedule, layers, ops, backward
        self.shape = (num_ticks, schedule.num_stages)
        self.widest = max(1, *(len(chunk) for row in layers.chunks for chunk in row))
        self.columns: dict[str, np.ndarray] = {}
        self.at = {(stage, timed.op): timed for stage, row in enumerate(ops) for timed in row}
        self.sizes: dict[str, list[int]] = {name: [0] * layers.num_kinds for name in LAYER_BUFFERS}
        self.inbox = 0

    def build(self) -> Ticks:
        self._ops()
        inboxes = [self._stage(stage) for stage in range(self.schedule.num_stages)]
        channels = self._messages(inboxes)
        slots = {name: tuple(sizes) for name, sizes in self.sizes.items()}
        return Ticks({name: column.astype(np.int32) for name, column in self.columns.items()}, channels, self.inbox, slots)

    def column(self, name: str, width: int | None = None, fill: int = 0) -> np.ndarray:
        """The column of that name, made where it is not there yet."""
        if name not in self.columns:
            self.columns[name] = np.full((*self.shape, width) if width else self.shape, fill)
        return self.columns[name]

    def _ops(self) -> None:
        last = self.schedule.placement.num_parts - 1
        for stage, timed in self._each():
            op, at = timed.op, (timed.tick, stage)
            part, chunk = self.schedule.placement.parts[stage][op.chunk], self.layers.chunks[stage][op.chunk]
            numbers = {"op": KINDS.index(op.kind), "chunk": op.chunk, "mb": op.index, "count": len(chunk)}
            for name, value in (numbers | {"first": part == 0, "last": part == last}).items():
                self.column(name)[at] = value
            for name, values in zip(("kind", "slot"), zip(*chunk, strict=True) if chunk else ((), ()), strict=True):
                self.column(name, self.widest)[at][: len(chunk)] = values

    def _each(self) -> Iterator[tuple[int, _Timed]]:
        for stage, row in enumerate(self.ops):
            yield from ((stage, timed) for timed in row)

    # ------------------------------------------------------------------------------------------------ buffers of layers

    def _stage(self, stage: int) -> dict[Op, int]:
        """Fills in the slots of a stage's buffers; returns the inbox's, by the op that reads them."""
        row = {timed.op: timed for timed in self.ops[stage]}
        spans = {"keep_b": ("F", "B"), "keep_w": ("F", "W"), "stash": ("B", "W")} if self.backward else {}
        for name in LAYER_BUFFERS:
            self.column(name, self.widest)
        for name, (begin, end) in spans.items():
            found = {
                (op.chunk, op.index): (timed.tick, row[Op(end, *op[1:])].tick) for op, timed in row.items() if op.kind == begin
            }
            slots = self._color_layers(stage, name, found)
            for op, timed in row.items():
                for j, slot in enumerate(slots[op.chunk, op.index]):
                    self.column(name, self.widest)[timed.tick, stage, j] = slot
        self._gathers(stage)
        self._reduces(stage)
        return self._inbox(stage)

    def _color_layers(self, stage: int, name: str, spans: Mapping[tuple, tuple[int, int]]) -> dict[tuple, list[int]]:
        """Slots for each layer of the chunks (key[0]) that are held over these spans."""
        found: dict[tuple, list[int]] = {key: [0] * len(self.layers.chunks[stage][key[0]]) for key in spans}
        for kind in range(self.layers.num_kinds):
            each = {
                (key, j): span
                for key, span in spans.items()
                for j, (k, _) in enumerate(self.layers.chunks[stage][key[0]])
                if k == kind
            }
            slots, size = color(each)
            self.sizes[name][kind] = max(self.sizes[name][kind], size)
            for (key, j), slot in slots.items():
                found[key][j] = slot
        return found

    def _gathers(self, stage: int) -> None:
        """Each gathered chunk from the tick of its gather to that of its last use before the next one."""
        number: dict[int, int] = {}
        spans: dict[tuple[int, int], tuple[int, int]] = {}
        uses: list[tuple[_Timed, tuple[int, int]]] = []
        for timed in self.ops[stage]:
            for op in timed.gathers:
                number[op.chunk] = number.get(op.chunk, -1) + 1
                spans[op.chunk, number[op.chunk]] = (timed.tick - 1, timed.tick)
            chunk = timed.op.chunk
            if timed.op.kind in ("F", "B") and chunk in number:
                key = (chunk, number[chunk])
                spans[key] = (spans[key][0], timed.tick)
                uses.append((timed, key))
        slots = self._color_layers(stage, "gathered", spans)
        for timed, key in uses:
            for j, slot in enumerate(slots[key]):
                self.column("gathered", self.widest)[timed.tick, stage, j] = slot
        done: dict[int, int] = {}
        for timed in self.ops[stage]:
            keys = []
            for op in timed.gathers:
                done[op.chunk] = done.get(op.chunk, -1) + 1
                keys.append((op.chunk, done[op.chunk]))
            self._moves(stage, timed.tick, "gather", [(chunk, 0, slots[chunk, n]) for chunk, n in keys])

    def _reduces(self, stage: int) -> None:
        """Each (chunk, unit)'s sums from its first W to its reduce."""
        unit = self.schedule.unit
        spans: dict[tuple[int, int], tuple[int, int]] = {}
        for timed in self.ops[stage]:
            if timed.op.kind == "W":
                key = (timed.op.chunk, timed.op.index // unit)
                self.column("fresh")[timed.tick, stage] = key not in spans
                spans[key] = (spans.get(key, (timed.tick - 1,))[0], timed.tick)
            for op in timed.reduces:
                spans[op.chunk, op.index] = (spans[op.chunk, op.index][0], timed.tick)
        slots = self._color_layers(stage, "sums", spans)
        for timed in self.ops[stage]:
            if timed.op.kind == "W":
                for j, slot in enumerate(slots[timed.op.chunk, timed.op.index // unit]):
                    self.column("sums", self.widest)[timed.tick, stage, j] = slot
            self._moves(stage, timed.tick, "reduce", [(*op[1:], slots[op[1:]]) for op in timed.reduces])

    def _moves(self, stage: int, tick: int, name: str, chunks: list[tuple[int, int, list[int]]]) -> None:
        """The layers that a tick gathers or reduces: how many, and of each what the columns `{name}_{field}` say.

        Args:
          stage: where.
          tick: when.
          name: "gather" or "reduce".
          chunks: for each its number, the op's index, and its layers' slots in the buffer.
        """
        held = self.layers.chunks[stage]
        moved = [(*layer, at, c, index) for c, index, slots in chunks for layer, at in zip(held[c], slots, strict=True)]
        self.column(f"num_{name}")[tick, stage] = len(moved)
        for n, field in enumerate(("kind", "slot", "at", "chunk", "index")):
            column = self.column(f"{name}_{field}", self.widest)
            if len(moved) > column.shape[2]:
                more = ((0, 0), (0, 0), (0, len(moved) - column.shape[2]))
                self.columns[f"{name}_{field}"] = column = np.pad(column, more)
            column[tick, stage, : len(moved)] = [layer[n] for layer in moved]

    # ------------------------------------------------------------------------------------------------ messages

    def _target(self, stage: int, op: Op) -> tuple[int, Op] | None:
        """The stage and op that read what an F or B makes; an F of the last part makes its own B's input."""
        place = self.schedule.placement
        pipe, part = place.pipes[op.chunk], place.parts[stage][op.chunk]
        if op.kind == "F" and part == place.num_parts - 1:
            return (stage, Op("B", op.chunk, op.index)) if self.backward else None
        if op.kind not in ("F", "B") or (op.kind == "B" and part == 0):
            return None
        target, chunk = place.where[pipe, part + (1 if op.kind == "F" else -1)]
        return target, Op(op.kind, chunk, op.index)

    def _inbox(self, stage: int) -> dict[Op, int]:
        spans = {}
        for source, timed in self._each():
            found = self._target(source, timed.op)
            if found is not None and found[0] == stage:
                spans[found[1]] = (timed.sent, self.at[stage, found[1]].tick)
        slots, size = color(spans)
        self.inbox = max(self.inbox, size)
        for op, slot in slots.items():
            self.column("input")[self.at[stage, op].tick, stage] = slot
        return slots

    def _messages(self, inboxes: list[dict[Op, int]]) -> tuple[int, ...]:
        """Columns `sends_i` (Y or DX) and `takes_i` (inbox slot, the unread one for nothing) of each channel i."""
        self.column("input")
        sent: dict[tuple[int, int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for stage, timed in self._each():
            found = self._target(stage, timed.op)
            if found is not None:
                shift = (found[0] - stage) % self.schedule.num_stages
                what = Y if timed.op.kind == "F" else DX
                sent[timed.sent, stage, shift].append((what, found[0], inboxes[found[0]][found[1]]))
        lanes: dict[int, int] = {}
        for (_, _, shift), messages in sent.items():
            lanes[shift] = max(lanes.get(shift, 0), len(messages))
        channels = tuple(shift for shift in sorted(lanes) for _ in range(lanes[shift]))
        for i in range(len(channels)):
            self.column(f"sends_{i}")
            self.column(f"takes_{i}", fill=self.inbox)
        for (tick, stage, shift), messages in sent.items():
            for lane, (what, target, slot) in enumerate(messages):
                i = channels.index(shift) + lane
                self.column(f"sends_{i}")[tick, stage] = what
                self.column(f"takes_{i}")[tick, target] = slot
        return channels
