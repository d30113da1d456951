"""`auto`: a search for the shortest table at measured costs and within a memory cap, stages unlike each other or not."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from layouts.errors import InfeasibleError, InputError
from layouts.listing import Limits, Policy, list_schedule
from layouts.simulate import Costs, Simulation, simulate
from layouts.tables import Shape, finish
from moejax.pipeline import COMPUTE, Placement, Schedule

NUM_TRIES = 48  # tables made with some choices by chance, after all policies have been tried without


@dataclasses.dataclass(frozen=True)
class Found:
    """What the search found.

    Attributes:
      schedule: the shortest table.
      simulation: it, at the costs asked for.
      bound: no table of its placement can have a shorter makespan; memory is not considered.
      num_tables: how many were simulated.
    """

    schedule: Schedule
    simulation: Simulation
    bound: float
    num_tables: int


def search(name: str, shape: Shape, known: Iterable[Schedule]) -> Found:
    """The shortest table for `shape.costs` that holds no more than `shape.max_activations`.

    Tries the known tables that fit, then list scheduling on loops and zigzags of `shape.chunks` chunks a stage (None: one
    and two) by every policy, then the best of these with some choices made by chance; ends where no table can be shorter.

    Args:
      name: of the table.
      shape: what for.
      known: tables to beat.

    Raises:
      InfeasibleError: for a cap below one micro-batch of a stage: any table holds that.
    """
    limits = [Limits(p, shape.microbatches, shape.costs, shape.caps) for p in _placements(shape)]
    for each in limits:
        _check_caps(each)
    bound = min(lower_bound(each.placement, shape.microbatches, shape.costs) for each in limits)
    tables = _Tables(shape, bound)
    for schedule in known:
        tables.add(schedule)
    _by_policy(name, limits, tables)
    best = tables.best
    assert best is not None, "list scheduling keeps within every cap of at least one micro-batch"
    own = lower_bound(best.schedule.placement, shape.microbatches, shape.costs)
    return Found(dataclasses.replace(best.schedule, name=name), best, own, tables.number)


class _Tables:
    """The best of the tables seen so far."""

    def __init__(self, shape: Shape, bound: float):
        self.shape, self.bound, self.number = shape, bound, 0
        self.best: Simulation | None = None

    def add(self, schedule: Schedule) -> float:
        """Simulates a table; returns its makespan."""
        simulation = simulate(schedule, self.shape.costs)
        self.number += 1
        fits = all(peak <= cap + 1e-9 for peak, cap in zip(simulation.peak_activations, self.shape.caps, strict=True))
        if fits and (self.best is None or _cost(simulation) < _cost(self.best)):
            self.best = simulation
        return simulation.makespan

    @property
    def done(self) -> bool:
        """Whether no table can be shorter."""
        return self.best is not None and self.best.makespan <= self.bound * (1 + 1e-9)


def lower_bound(placement: Placement, num_microbatches: int, costs: Costs) -> float:
    """A makespan that no table of the placement can beat, whatever memory it takes.

    The longest of: a stage's own work, begun when its first input can be there; and one micro-batch's way through all F,
    then all B, and the W of the first part.
    """
    at, where = costs.at(placement), placement.where
    chain = [where[0, part] for part in range(placement.num_parts)]
    hops = [costs.send * (a[0] != b[0]) for a, b in itertools.pairwise(chain)]
    forward = [at.of["F"][r][c] for r, c in chain]
    backward = [at.of["B"][r][c] for r, c in chain]
    bounds = [sum(forward) + sum(backward) + 2 * sum(hops) + at.of["W"][chain[0][0]][chain[0][1]]]
    for stage in range(placement.num_stages):
        first = next(part for part, (r, _) in enumerate(chain) if r == stage)
        work = sum(at.of[kind][stage][c] for kind in COMPUTE for r, c in chain if r == stage)
        bounds.append(sum(forward[:first]) + sum(hops[:first]) + num_microbatches * work)
    return max(bounds)


def chunk_counts(shape: Shape) -> tuple[int, ...]:
    """How many chunks a stage the search tries.

    Raises:
      InputError: where the costs have sizes for another number of parts.
    """
    counts = (1, 2) if shape.chunks is None else (shape.chunks,)
    sizes = shape.costs.part_sizes
    fitting = tuple(count for count in counts if sizes is None or len(sizes) == count * shape.stages)
    if not fitting:
        legal = " or ".join(str(count * shape.stages) for count in counts)
        raise InputError(f"costs part_sizes of {len(sizes or ())} parts: with stages={shape.stages} legal are {legal}")
    return fitting


def _placements(shape: Shape) -> Iterator[Placement]:
    for chunks in chunk_counts(shape):
        yield Placement.loop(shape.stages, chunks)
        if chunks % 2 == 0:
            yield Placement.zigzag(shape.stages, chunks)


def _check_caps(limits: Limits) -> None:
    least = [sum(row) for row in limits.costs.at(limits.placement).activations]
    for stage, (need, cap) in enumerate(zip(least, limits.max_activations, strict=True)):
        if cap < need - 1e-9:
            raise InfeasibleError(
                f"auto with max_activations={cap:g}: no table fits, stage {stage} holds {need:g} micro-batches of a full "
                f"stage with a single one under way; legal are numbers from {max(least):g} on"
            )


def _cost(simulation: Simulation) -> tuple[float, float]:
    """Shorter is better; of equally long tables the one whose fullest stage holds less."""
    return round(simulation.makespan, 9), max(simulation.peak_activations)


def _by_policy(name: str, limits: Sequence[Limits], tables: _Tables) -> None:
    """List-scheduled tables: every policy, then the two best with more and more left to chance; stops where done."""
    tried = []
    for each, first, order, patience in itertools.product(limits, ("F", "turn", "B"), ("depth", "group"), (0.0, 1.0)):
        if tables.done:
            return
        policy = Policy(first, order, patience)
        tried.append((_add(name, each, policy, tables), len(tried), each, policy))
    ranked = sorted(tried, key=lambda one: one[:2])[:2]
    for seed in range(NUM_TRIES):
        if tables.done:
            return
        _, _, each, policy = ranked[seed % len(ranked)]
        _add(name, each, dataclasses.replace(policy, noise=0.02 + 0.3 * seed / NUM_TRIES, seed=seed), tables)


def _add(name: str, limits: Limits, policy: Policy, tables: _Tables) -> float:
    return tables.add(finish(name, tables.shape, limits.placement, list_schedule(limits, policy)))
