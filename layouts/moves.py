"""When a placement should change: the history of loads, and moves that pay for their bytes (FlexMoE, arXiv 2304.03946).

A step waits for its fullest device, so what a move is worth is the load that the fullest device loses, for as many steps as the
loads are believed to stay; what it costs are the bytes of the slots that take another expert.
"""

import dataclasses
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
    """The move after which the devices' loads, fullest first, are least; None where no move lowers them."""
    before = _profile(placement.device_loads(loads, num_devices))
    fullest = int(np.argmax(placement.device_loads(loads, num_devices)))
    own = placement.num_slots // num_devices
    mine = [s for s in range(fullest * own, (fullest + 1) * own) if s not in placement.dead and placement.expert_of[s] >= 0]
    others = [s for s in range(placement.num_slots) if s // own != fullest and s not in placement.dead]
    free = [slot for slot in others if placement.expert_of[slot] < 0 or len(placement.slots_of(placement.expert_of[slot])) > 1]
    differ = lambda pairs: [(a, b) for a, b in pairs if placement.expert_of[a] != placement.expert_of[b]]
    found = [placement.swap(*pair) for pair in differ(itertools.product(mine, others))]
    found += [placement.put(placement.expert_of[a], slot) for a, slot in differ(itertools.product(mine, free))]
    scored = [(_profile(made.device_loads(loads, num_devices)), index) for index, made in enumerate(found)]
    if not scored or min(scored)[0] >= before:
        return None
    return found[min(scored)[1]]


def _profile(loads: np.ndarray) -> tuple[float, ...]:
    """Loads from the fullest on, rounded so that sums in another order are equal."""
    return tuple(np.round(-np.sort(-loads), 9).tolist())
