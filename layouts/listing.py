"""List scheduling: each stage, whenever it is free, starts the best op that it can, by a policy and within its memory."""

import dataclasses
import heapq
import random
from collections import deque
from collections.abc import Sequence

from layouts.simulate import ChunkCosts, Costs
from moejax.pipeline import Cell, Op, Placement


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a free stage prefers.

    Attributes:
      first: between a ready F and a ready B: "B", "F", or "turn", the one that did not run last.
      order: among F or among B: "depth", the oldest micro-batch; "breadth", all micro-batches of a chunk before the next;
        "group", the same within groups of P micro-batches.
      patience: W is not begun where the input of an F or B is on its way and comes within this share of W's time.
      fused: B and W are one cell, and B is sent after W.
      noise: the share of choices between F and B that are made by chance.
      seed: of the chance.
    """

    first: str = "B"
    order: str = "depth"
    patience: float = 0.0
    fused: bool = False
    noise: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a list-scheduled table is made for.

    Attributes:
      placement: which part each chunk holds.
      num_microbatches: M; of several pipes each gets an equal run of them.
      costs: what ops take.
      max_activations: one number a stage: micro-batches of a full stage held until W; at least one whole micro-batch.
    """

    placement: Placement
    num_microbatches: int
    costs: Costs
    max_activations: Sequence[float]

    def pipe_of(self, m: int) -> int:
        """The pipe of a micro-batch."""
        return m * (1 + max(self.placement.pipes)) // self.num_microbatches


def list_schedule(limits: Limits, policy: Policy) -> list[list[Cell]]:
    """A row of cells (F), (B), (W) or (B, W) for every stage.

    An F is run only where the stage can still finish all its micro-batches, oldest first, so that no cap of at least one
    micro-batch ends in a deadlock.
    """
    work = _Work(limits, policy)
    while work.events:
        work.step()
    return [stage.row for stage in work.stages]


class _Stage:
    """One stage while the list is made."""

    def __init__(self, limits: Limits, stage: int, at: ChunkCosts):
        self.sizes = at.activations[stage]
        self.room = limits.max_activations[stage]
        self.row: list[Cell] = []
        self.busy = False
        self.ready: dict[str, list[Op]] = {"F": [], "B": []}
        self.weights: deque[Op] = deque()
        self.coming: list[float] = []  # when inputs on their way arrive
        chunks_of = [[c for c, p in enumerate(limits.placement.pipes) if p == q] for q in set(limits.placement.pipes)]
        order = sorted(range(limits.num_microbatches), key=lambda m: _age(limits, m))
        self.unfinished = {m: len(chunks_of[limits.pipe_of(m)]) for m in order}  # W left, oldest first
        self.owed = {m: sum(self.sizes[c] for c in chunks_of[limits.pipe_of(m)]) for m in order}  # of F not yet run
        self.held = dict.fromkeys(order, 0.0)  # of F run whose W is not
        self.most = max(self.owed.values())

    def fits(self, op: Op) -> bool:
        """Whether the micro-batches can still all be finished, the oldest first, after this F (the banker's algorithm)."""
        size = self.sizes[op.chunk]
        room = self.room - size + 1e-9
        if room >= self.most:
            return True
        for m in self.unfinished:
            mine = size if m == op.index else 0.0
            if self.owed[m] - mine > room:
                return False
            room += self.held[m] + mine
        return True

    def account(self, op: Op) -> None:
        """Takes and gives back the room of an op that starts."""
        size = self.sizes[op.chunk] * {"F": 1, "B": 0, "W": -1}[op.kind]
        self.room -= size
        self.held[op.index] += size
        if op.kind == "F":
            self.owed[op.index] -= size
        if op.kind == "W":
            self.unfinished[op.index] -= 1
            if not self.unfinished[op.index]:
                del self.unfinished[op.index]


def _age(limits: Limits, m: int) -> tuple[int, int]:
    """Micro-batches of all pipes by when they enter."""
    pipe = limits.pipe_of(m)
    first = -(-pipe * limits.num_microbatches // (1 + max(limits.placement.pipes)))
    return m - first, pipe


class _Work:
    """All stages, and what will happen when."""

    def __init__(self, limits: Limits, policy: Policy):
        self.limits, self.policy, self.placement = limits, policy, limits.placement
        self.at = limits.costs.at(limits.placement)
        self.stages = [_Stage(limits, r, self.at) for r in range(self.placement.num_stages)]
        self.chance = random.Random(policy.seed)
        self.age = [_age(limits, m) for m in range(limits.num_microbatches)]
        self.left = {}  # inputs that an op still waits for
        self.events: list[tuple[float, int, Cell]] = []  # (when, stage, the op that can start, or () for a stage that is free)
        for m in range(limits.num_microbatches):
            stage, chunk = self.placement.where[limits.pipe_of(m), 0]
            self.events.append((0.0, stage, (Op("F", chunk, m),)))
            self.stages[stage].coming.append(0.0)

    def step(self) -> None:
        """All events of the next moment, then a choice on every stage that they left free."""
        now, touched = self.events[0][0], set()
        while self.events and self.events[0][0] <= now + 1e-9:
            _, r, arrived = heapq.heappop(self.events)
            touched.add(r)
            if not arrived:
                self.stages[r].busy = False
            for op in arrived:
                self.stages[r].ready[op.kind].append(op)
                self.stages[r].coming.remove(min(self.stages[r].coming))
        for r in sorted(touched):
            cell = () if self.stages[r].busy else self._choose(r, now)
            if cell:
                self._start(r, cell, now)

    def _choose(self, r: int, now: float) -> Cell:
        stage = self.stages[r]
        found = {}
        for kind in "FB":
            legal = stage.ready[kind] if kind == "B" else [op for op in stage.ready["F"] if stage.fits(op)]
            if legal:
                found[kind] = min(legal, key=lambda op: self._key(r, op))
        if found:
            op = found[self._kind(stage, list(found))]
            stage.ready[op.kind].remove(op)
            return (op, op._replace(kind="W")) if self.policy.fused and op.kind == "B" else (op,)
        if stage.weights and not self._worth_waiting(r, now):
            return (stage.weights.popleft(),)
        return ()

    def _kind(self, stage: _Stage, kinds: list[str]) -> str:
        if len(kinds) == 1:
            return kinds[0]
        if self.policy.noise and self.chance.random() < self.policy.noise:
            return self.chance.choice(kinds)
        if self.policy.first != "turn":
            return self.policy.first
        last = next((cell[0].kind for cell in reversed(stage.row) if cell[0].kind != "W"), "B")
        return "B" if last == "F" else "F"

    def _worth_waiting(self, r: int, now: float) -> bool:
        stage = self.stages[r]
        longest = self.policy.patience * self.at.of["W"][r][stage.weights[0].chunk]
        return bool(stage.coming) and min(stage.coming) - now < longest - 1e-9

    def _key(self, r: int, op: Op) -> tuple:
        part = self.placement.parts[r][op.chunk]
        deep = part if op.kind == "F" else -part
        age = self.age[op.index]
        if self.policy.order == "depth":
            return age, -deep
        group = age[0] // self.placement.num_stages if self.policy.order == "group" else 0
        return group, deep, age

    def _start(self, r: int, cell: Cell, now: float) -> None:
        stage = self.stages[r]
        end = now + self.at.compute(r, cell)
        stage.busy = True
        stage.row.append(cell)
        for op in cell:
            stage.account(op)
        if cell[0].kind == "B" and len(cell) == 1:
            stage.weights.append(cell[0]._replace(kind="W"))
        heapq.heappush(self.events, (end, r, ()))
        for target, op in self._unlocked(r, cell[0]):
            when = end + (self.limits.costs.send if target != r else 0.0)
            heapq.heappush(self.events, (when, target, (op,)))
            self.stages[target].coming.append(when)

    def _unlocked(self, r: int, op: Op) -> list[tuple[int, Op]]:
        """The ops for which this was the last input missing."""
        pipe, part = self.placement.pipes[op.chunk], self.placement.parts[r][op.chunk]
        after = {"F": [("F", part + 1), ("B", part)], "B": [("B", part - 1)], "W": []}[op.kind]
        found = []
        for kind, at in after:
            if 0 <= at < self.placement.num_parts:
                target, chunk = self.placement.where[pipe, at]
                key = target, Op(kind, chunk, op.index)
                inputs = 1 + (kind == "B" and at + 1 < self.placement.num_parts)
                self.left[key] = self.left.get(key, inputs) - 1
                found += [] if self.left[key] else [key]
        return found
