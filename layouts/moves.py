"""When a placement should change: the history of loads, and moves that pay for their bytes (FlexMoE, arXiv 2304.03946).

A step waits for its fullest device, so what a move is worth is the load that the fullest device loses, for as many steps as the
loads are believed to stay; what it costs are the bytes of the slots that take another expert.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np

from layouts.errors import InputError
from layouts.placement import replicate
from moejax.migration import num_moved
from moejax.placement import ExpertPlacement


@dataclasses.dataclass(frozen=True)
class LoadHistory:
    """Loads of past steps, older ones weighing less.

    Attributes:
      decay: what a step's loads weigh a step later, from 0 (the last step alone) to below 1.
      total: [*layers, E] the weighted sum, or None before the first step.
      weight: the sum of the weights.
    """

    decay: float = 0.9
    total: np.ndarray | None = None
    weight: float = 0.0

    def __post_init__(self):
        if not 0 <= self.decay < 1:
            raise InputError(f"decay={self.decay!r}: needs a number of at least 0 and below 1")

    def add(self, tokens_per_expert: np.ndarray) -> "LoadHistory":
        """The history with one more step, of [*layers, E] tokens."""
        loads = np.asarray(tokens_per_expert, float)
        before = np.zeros_like(loads) if self.total is None else self.total
        return dataclasses.replace(self, total=self.decay * before + loads, weight=self.decay * self.weight + 1)

    @property
    def mean(self) -> np.ndarray:
        """[*layers, E] tokens a step."""
        if self.total is None:
            raise InputError("the history of loads is empty: add a step's tokens_per_expert first")
        return self.total / self.weight


@dataclasses.dataclass(frozen=True)
class MoveCost:
    """What moving an expert costs and what balance is worth.

    Attributes:
      slot_bytes: of one expert: parameters and all that the optimizer keeps of them.
      bytes_per_second: between devices.
      row_seconds: of one token in one expert, forward and backward, on one device.
      horizon_steps: for how many steps the loads are believed to stay as they are.
    """

    slot_bytes: float
    bytes_per_second: float
    row_seconds: float
    horizon_steps: float

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise InputError(f"{field.name}={getattr(self, field.name)!r}: needs a number above 0")

    def gain_seconds(self, saved_rows: float, num_slots: int) -> float:
        """Seconds won over the horizon by a fullest device with so many rows fewer, less those of moving so many slots."""
        return saved_rows * self.row_seconds * self.horizon_steps - num_slots * self.slot_bytes / self.bytes_per_second


def improve(
    placement: ExpertPlacement, loads: np.ndarray, num_devices: int, cost: MoveCost, max_moves: int = 16
) -> ExpertPlacement:
    """The placement after moves that pay, or the placement itself where none do.

    A move exchanges two slots (migrate), or gives a slot that is empty or holds one of several replicas to another expert
    (shrink one, expand the other). Moves are taken one by one, the best at its time, at most `max_moves`; what is returned is
    the best of all prefixes, since a few may pay together where none pays alone, or the whole way to the balanced placement
    of `layouts.placement.replicate`, its devices numbered so that most slots stay, whichever wins most.

    Args:
      placement: as it is.
      loads: [E] tokens a step.
      num_devices: D.
      cost: of a move.
      max_moves: bounds the search.
    """
    fullest = lambda made: made.device_loads(loads, num_devices).max()
    start = fullest(placement)
    gain = lambda made: cost.gain_seconds(start - fullest(made), num_moved(placement, made))
    found = list(itertools.islice(_moves(placement, loads, num_devices), max_moves))
    if not placement.dead:
        balanced = replicate(loads, placement.num_slots, num_devices)
        found.append(aligned(balanced, placement, num_devices))
    best = max(found, key=gain, default=placement)
    return best if gain(best) > 0 else placement


def aligned(target: ExpertPlacement, before: ExpertPlacement, num_devices: int) -> ExpertPlacement:
    """The target with its devices, and the slots of each, numbered so that few slots take another expert than before."""
    rows = lambda made: [list(row) for row in np.reshape(made.expert_of, (num_devices, -1)).tolist()]
    there, here = rows(target), rows(before)
    alike = [[sum((Counter(a) & Counter(b)).values()) for b in here] for a in there]
    pairs = sorted(itertools.product(range(num_devices), repeat=2), key=lambda pair: -alike[pair[0]][pair[1]])
    made: dict[int, list[int]] = {}
    placed = set()
    for a, b in pairs:
        if b not in made and a not in placed:
            made[b] = _in_place(there[a], here[b])
            placed.add(a)
    return ExpertPlacement(before.num_experts, tuple(e for device in range(num_devices) for e in made[device]))


def _in_place(experts: list[int], before: list[int]) -> list[int]:
    """The experts in an order that leaves those that were here where they were."""
    rest = list((Counter(experts) - Counter(before)).elements())
    left = Counter(experts)
    order = []
    for e in before:
        keep = left[e] > 0
        left[e] -= keep
        order.append(e if keep else None)
    return [rest.pop() if e is None else e for e in order]


def _moves(placement: ExpertPlacement, loads: np.ndarray, num_devices: int) -> Iterator[ExpertPlacement]:
    """The placement after one best move, after two ..., as long as they help the fullest device."""
    while (following := _best_move(placement, np.asarray(loads, float), num_devices)) is not None:
        placement = following
        yield placement


def _best_move(placement: ExpertPlacement, loads: np.ndarray, num_devices: int) -> ExpertPlacement | None:
    """The move after which the fullest device has least, and then the squares of all loads; None where no move lowers them."""
    view = View.of(placement, loads, num_devices)
    found = [(view.after_swap(*pairs), pairs, placement.swap) for pairs in [view.pairs(view.usable)]]
    put = lambda slot, free: placement.put(placement.expert_of[slot], free)
    found += [(view.after_put(*pairs), pairs, put) for pairs in [view.pairs(view.free)]]
    best, before = None, _rank(view.now[None])[0]
    for after, (slots, others), change in found:
        ranks = _rank(after)
        if len(ranks) and min(ranks) < before:
            index = ranks.index(min(ranks))
            best, before = functools.partial(change, int(slots[index]), int(others[index])), min(ranks)
    return None if best is None else best()


def _rank(loads: np.ndarray) -> list[tuple[float, float]]:
    """[n, D] -> the largest load and the sum of squares of each, rounded so that sums in another order are equal."""
    return list(zip(np.round(loads.max(1), 6).tolist(), np.round((loads**2).sum(1), 3).tolist(), strict=True))


@dataclasses.dataclass(frozen=True)
class View:
    """A placement in arrays.

    Attributes:
      expert: [P], -1 for an empty slot.
      device: [P].
      load: [P] of each slot.
      loads: [E] of each expert.
      on: [E, D] live slots of each expert on each device.
      now: [D] load of each device.
      usable: [P] the slots that are not dead and not on the fullest device.
      free: [P] those of them that are empty, or hold one of several replicas.
    """

    expert: np.ndarray
    device: np.ndarray
    load: np.ndarray
    loads: np.ndarray
    on: np.ndarray
    now: np.ndarray
    usable: np.ndarray
    free: np.ndarray

    @classmethod
    def of(cls, placement: ExpertPlacement, loads: np.ndarray, num_devices: int) -> "View":
        expert, live = np.array(placement.expert_of), placement.live
        device = np.arange(len(expert)) * num_devices // len(expert)
        on = np.zeros((len(loads), num_devices), int)
        np.add.at(on, (expert[live], device[live]), 1)
        load = np.where(live, (loads / np.maximum(on.sum(1), 1))[expert], 0.0)
        now = np.bincount(device, load, num_devices)
        usable = ~np.isin(np.arange(len(expert)), list(placement.dead)) & (device != np.argmax(now))
        free = usable & ((expert < 0) | (on.sum(1)[expert] > 1))
        return cls(expert, device, load, loads, on, now, usable, free)

    def pairs(self, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Every slot of the fullest device that has load, with every one of the others that holds another expert."""
        mine = np.flatnonzero((self.device == np.argmax(self.now)) & (self.load > 0))
        slots, others = (part.ravel() for part in np.meshgrid(mine, np.flatnonzero(others), indexing="ij"))
        differ = self.expert[slots] != self.expert[others]
        return slots[differ], others[differ]

    def after_swap(self, slots: np.ndarray, others: np.ndarray) -> np.ndarray:
        """[n, D] the devices' loads after each exchange of two slots."""
        change = (self.load[others] - self.load[slots])[:, None]
        return self.now + change * self._at(slots) - change * self._at(others)

    def after_put(self, slots: np.ndarray, others: np.ndarray) -> np.ndarray:
        """[n, D] the same after each `other` took the expert of the slot in place of its own."""
        new, old = self.expert[slots], self.expert[others]
        count = self.on.sum(1)
        more = self.loads[new] / (count[new] + 1)
        fewer = np.where(old >= 0, self.loads[old] / np.maximum(count[old] - 1, 1), 0)
        after = self.now + self.on[new] * (more - self.load[slots])[:, None] + self._at(others) * more[:, None]
        after += np.where(old >= 0, 1, 0)[:, None] * (self.on[old] - self._at(others)) * (fewer - self.load[others])[:, None]
        return after - self._at(others) * self.load[others][:, None]

    def _at(self, slots: np.ndarray) -> np.ndarray:
        return (self.device[slots][:, None] == np.arange(len(self.now))).astype(float)
