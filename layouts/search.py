"""The best layouts of a space, exactly: bounds for all meshes and plans, exact prices for the few that could be among the best.

Best first: pairs of a mesh and a plan are ordered by their bound for the best option there could be; then options are
bounded, then ways to cross, and what is still below the best found so far is priced by `layouts.cost` and counted by
`layouts.memory`. Where the next bound is above the worst of the answer, nothing better is left.
"""

import dataclasses
import heapq
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from layouts.activations import kept_kinds
from layouts.bounds import Bounds, Choices, Crossing
from layouts.cost import Cost, Efficiency, Job, cost, stage_rest
from layouts.cuts import Stages, best_cuts
from layouts.errors import InfeasibleError, InputError
from layouts.hardware import Cluster
from layouts.layout import Layout
from layouts.memory import CODEC_BYTES, Memory, memory, stage_with
from layouts.model import Model
from layouts.space import Mesh, Option, Plan, Space, applies, layout_of, meshes, options, plans, policy
from layouts.step_bounds import Rows
from layouts.workload import Batch, Recipe

OBJECTIVES = ("step_time", "latency", "throughput", "cost")
# Pairs that are bounded option by option at a time, at first and later.
_FIRST, _LATER = 128, 2048
# How much larger a batch `throughput` tries.
_BATCHES = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is searched for.

    Attributes:
      model: the model.
      batch: of one step.
      cluster: the devices.
      recipe: how the executor keeps numbers.
      number_format: of the products.
      efficiency: what the hardware gives; None: the defaults of its kind.
      memory_bytes: of a device; None: all that the smallest one has.
      space: what may be chosen.
      objective: "step_time"; "latency": one micro-batch through all stages and back; "throughput": tokens a second, the
        batch up to 8 times as large; "cost": device-seconds a step, with fewer devices where that is cheaper.
    """

    model: Model
    batch: Batch
    cluster: Cluster
    recipe: Recipe
    number_format: str = "bf16"
    efficiency: Efficiency | None = None
    memory_bytes: float | None = None
    space: Space = dataclasses.field(default_factory=Space)
    objective: str = "step_time"

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise InputError(f"objective {self.objective!r}: legal are {', '.join(OBJECTIVES)}")

    @property
    def limit_bytes(self) -> float:
        """What a device may hold."""
        return self.memory_bytes or min(part.chip.hbm_bytes for part in self.cluster.classes)

    def job(self, layout: Layout, batch: Batch | None = None) -> Job:
        """A layout of it, to be priced."""
        return Job(self.model, layout, batch or self.batch, self.recipe, self.cluster, self.number_format, self.efficiency)


@dataclasses.dataclass(frozen=True)
class Found:
    """A layout that fits.

    Attributes:
      layout: the layout.
      batch: of a step: the problem's, larger under "throughput".
      cost: seconds, term by term.
      memory: bytes, stage by stage.
      value: what the objective makes of it; less is better.
    """

    layout: Layout
    batch: Batch
    cost: Cost
    memory: Memory
    value: float

    @property
    def tokens_per_second(self) -> float:
        """Over all devices."""
        return self.batch.tokens / self.cost.step_seconds


@dataclasses.dataclass
class Tally:
    """How much was looked at: layouts of the space (cuts not told apart), (mesh, plan) pairs, layouts priced exactly."""

    layouts: int = 0
    pairs: int = 0
    priced: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """The best layout of each of the best meshes, best first, and what was looked at."""

    found: tuple[Found, ...]
    tally: Tally


def search(problem: Problem, top: int = 10) -> Answer:
    """The best layouts; of each mesh (axis sizes and axes of the experts) the best one.

    Raises:
      InfeasibleError: where no layout fits, with the binding constraint and the smallest change.
      InputError: where no mesh divides the model and the batch.
    """
    start = time.perf_counter()
    best = _Best(top)
    tally = Tally()
    for part in _variants(problem):
        _Search(problem, part, best, tally).run()
    tally.seconds = time.perf_counter() - start
    if not best.of_mesh:
        raise no_layout(problem, tally)
    return Answer(tuple(sorted(best.of_mesh.values(), key=lambda found: found.value)[:top]), tally)


@dataclasses.dataclass(frozen=True)
class _Variant:
    """A batch and a number of devices; the objective is `weight` x seconds."""

    batch: Batch
    num_devices: int
    weight: float


def _variants(problem: Problem) -> Iterator[_Variant]:
    batch, whole = problem.batch, usable_devices(problem)
    if problem.objective == "throughput":
        for times in _BATCHES:
            larger = Batch(batch.seq, batch.sequences * times)
            yield from (_Variant(larger, count, 1 / larger.tokens) for count in whole)
    elif problem.objective == "cost":
        counts = sorted({count for most in whole for count in range(1, most + 1) if most % count == 0}, reverse=True)
        yield from (_Variant(batch, count, float(count)) for count in counts)
    else:
        yield from (_Variant(batch, count, 1.0) for count in whole)


def usable_devices(problem: Problem) -> list[int]:
    """Numbers of devices that layouts are looked for with: all; where none has such a mesh, the most that one has."""
    most = problem.cluster.num_devices
    for count in range(most, 0, -1):
        if next(meshes(problem.space, problem.model, problem.batch, count), None) is not None:
            return [count]
    raise InputError(f"no mesh of 1 to {most} devices divides the model {problem.model.name} and the batch")


class _Best:
    """The best layout of each mesh."""

    def __init__(self, top: int):
        self.top = top
        self.of_mesh: dict[tuple, Found] = {}

    def bar(self, mesh: tuple | None = None) -> float:
        """What a layout must be below to change the answer: of that mesh, if given."""
        own = self.of_mesh[mesh].value if mesh in self.of_mesh else math.inf
        values = heapq.nsmallest(self.top, (found.value for found in self.of_mesh.values()))
        return min(own, values[-1] if len(values) == self.top else math.inf)

    def add(self, found: Found) -> None:
        """Keeps it if it is its mesh's best."""
        key = mesh_key(found.layout)
        if key not in self.of_mesh or found.value < self.of_mesh[key].value:
            self.of_mesh[key] = found


def mesh_key(layout: Layout) -> tuple:
    """What layouts of one mesh share."""
    return (*layout.sizes.values(), layout.expert_axes)


class _Search:
    """One batch and number of devices."""

    def __init__(self, problem: Problem, variant: _Variant, best: _Best, tally: Tally):
        self.problem, self.variant, self.best, self.tally = problem, variant, best, tally
        self.batch = variant.batch
        self.meshes = list(meshes(problem.space, problem.model, self.batch, variant.num_devices))
        self.options = options(problem.space, problem.model, problem.recipe)
        self.choices = Choices.of(self.options)
        stages = sorted({mesh.layout.stage for mesh in self.meshes})
        space, model = problem.space, problem.model
        self.plans = [plan for stage in stages for plan in plans(space, model, stage, self.batch.sequences)]
        job = problem.job(Layout(), self.batch)
        self.bounds = Bounds(job, self.meshes, self.plans, self.choices, problem.space.uneven)
        self.keys = [(*mesh.sizes, mesh.fold) for mesh in self.meshes]

    def run(self) -> None:
        """Adds to the best what this variant has."""
        mesh, plan, value = self._pairs()
        order = np.argsort(value, kind="stable")
        at, size = 0, _FIRST
        while at < len(order) and value[order[at]] < self.best.bar():
            chosen = order[at : at + size]
            chosen = chosen[value[chosen] < self.best.bar()]
            for candidate in self._candidates(mesh[chosen], plan[chosen]):
                if candidate[0] >= self.best.bar():
                    break
                self._price(*candidate)
            at, size = at + size, min(_LATER, 2 * size)

    # --------------------------------------------------------------------------------------------------------------- pairs

    def _pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All pairs: index of the mesh, index of the plan, bound for the best option."""
        found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        fastest = self._fastest()
        for number, plan in enumerate(self.plans):
            index = np.flatnonzero(self._fitting(plan))
            if len(index):
                self._count(index)
                where = np.full(len(index), number)
                value = self._value(Rows(self.bounds, index, where, fastest))
                found.append((index, where, value.min(axis=(0, 1))))
        if not found:
            return np.zeros(0, int), np.zeros(0, int), np.zeros(0)
        mesh, plan, value = map(np.concatenate, zip(*found, strict=True))
        self.tally.pairs += len(mesh)
        return mesh, plan, value

    def _fastest(self) -> Choices:
        """The options that no other beats in time: nothing recomputed, everything kept; of the codecs the narrowest."""
        remats = [r for r in self.choices.remats if r == "none"] or self.choices.remats
        policies = [p for p in self.choices.policies if p == policy("keep", "keep")] or self.choices.policies
        return Choices(tuple(remats), tuple(policies), _narrowest(self.choices.crossings, self.problem.recipe))

    def _fitting(self, plan: Plan) -> np.ndarray:
        """Which meshes the plan goes with."""
        at, seq = self.bounds.sizes, self.batch.seq
        fits = (at["stage"] == plan.stage) & (self.batch.sequences % (at["batch_shards"] * plan.count) == 0)
        if plan.moments == "over_data":
            fits &= at["dense_replicas"] > 1
        if plan.sequence:
            fits &= (at["tensor"] > 1) & (seq // at["context"] % at["tensor"] == 0)
        return fits

    def _count(self, index: np.ndarray) -> None:
        """Layouts of these meshes under one plan."""
        at, choices = self.bounds.sizes, self.choices
        kept = sum("keep" in dict(pairs).values() for pairs in choices.policies)
        policies = len(choices.policies) - kept * (at["fsdp"][index] == 1)
        crossings = np.where(at["expert_shards"][index] > 1, len(choices.crossings), 1)
        self.tally.layouts += int((len(choices.remats) * policies * crossings).sum())

    def _value(self, rows: Rows) -> np.ndarray:
        """Bounds of the objective, [R,P,n]."""
        latency = self.problem.objective == "latency"
        return self.variant.weight * (rows.pass_seconds() if latency else rows.step_seconds())

    # ---------------------------------------------------------------------------------------------------------- candidates

    def _candidates(self, mesh: np.ndarray, plan: np.ndarray) -> Iterator[tuple[float, int, int, Option]]:
        """(bound, mesh, plan, option) of what could be better than the answer and fit, best first."""
        narrow = dataclasses.replace(self.choices, crossings=_narrowest(self.choices.crossings, self.problem.recipe))
        could = self._could(mesh, plan, narrow)[1] & self._sensible(mesh)
        rows = np.flatnonzero(could.any(axis=(0, 1)))
        values, where = [], []
        for number, crossing in enumerate(self.choices.crossings if len(rows) else ()):
            choices = dataclasses.replace(self.choices, crossings=(crossing,))
            value, good = self._could(mesh[rows], plan[rows], choices)
            places = np.argwhere(good & could[..., rows])
            values.append(value[tuple(places.T)])
            where.append(np.concatenate([places, np.full((len(places), 1), number)], axis=1))
        if values:
            values, where = np.concatenate(values), np.concatenate(where)
            for index in np.argsort(values, kind="stable").tolist():
                r, p, n, x = where[index].tolist()
                option = Option(self.choices.remats[r], self.choices.policies[p], *self.choices.crossings[x])
                yield float(values[index]), int(mesh[rows[n]]), int(plan[rows[n]]), option

    def _could(self, mesh: np.ndarray, plan: np.ndarray, choices: Choices) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of the objective [R,P,n], and whether they and the memory's leave hope."""
        rows = Rows(self.bounds, mesh, plan, choices)
        value = self._value(rows)
        room = (rows.peak_bytes() <= self.problem.limit_bytes) & (rows.host_bytes() <= host_room(self.problem))
        return value, room & (value < self._bars(mesh))

    def _bars(self, mesh: np.ndarray) -> np.ndarray:
        bars = {index: self.best.bar(self.keys[index]) for index in set(mesh.tolist())}
        return np.array([bars[index] for index in mesh.tolist()])

    def _sensible(self, mesh: np.ndarray) -> np.ndarray:
        """[1,P,n]: nothing is kept where nothing is divided."""
        keeps = np.array(["keep" in dict(pairs).values() for pairs in self.choices.policies])
        return ~(keeps[:, None] & (self.bounds.sizes["fsdp"][mesh] == 1))[None]

    def _price(self, bound: float, mesh: int, plan: int, option: Option) -> None:
        """The exact price of a candidate whose bound is still good."""
        if bound >= self.best.bar(self.keys[mesh]) or not applies(self.meshes[mesh], self.plans[plan], option):
            return
        self.tally.priced += 1
        found = price(self.problem, self.batch, self.meshes[mesh], self.plans[plan], option)
        if found is not None:
            layout, priced, held = found
            seconds = sum(priced.stage_seconds) if self.problem.objective == "latency" else priced.step_seconds
            self.best.add(Found(layout, self.batch, priced, held, self.variant.weight * seconds))


def _narrowest(crossings: Sequence[Crossing], recipe: Recipe) -> tuple[Crossing, ...]:
    """The crossings that none with fewer bytes each way is like: those are as fast and need no more room."""

    def size(crossing: Crossing) -> tuple[float, ...]:
        codec = crossing[1]
        return tuple(
            CODEC_BYTES.get(name, recipe.compute_bytes) for name in ((codec, codec) if isinstance(codec, str) else codec)
        )

    def beaten(one: Crossing) -> bool:
        alike = (other for other in crossings if (other[0], other[2]) == (one[0], one[2]))
        return any(
            size(other) != size(one) and all(a <= b for a, b in zip(size(other), size(one), strict=True)) for other in alike
        )

    return tuple(crossing for crossing in crossings if not beaten(crossing))


def price(problem: Problem, batch: Batch, mesh: Mesh, plan: Plan, option: Option) -> tuple[Layout, Cost, Memory] | None:
    """The layout with its best cuts, its cost and memory; None where it does not fit."""
    layout = layout_of(mesh, plan, option)
    if problem.space.uneven and plan.stage > 1 and plan.chunks == 1:
        found = _cut(problem, batch, layout)
        if found is None:
            return None
        layout = found
    held = memory(problem.model, layout, batch, problem.recipe)
    if not fits(problem, held):
        return None
    return layout, cost(problem.job(layout, batch)), held


def fits(problem: Problem, held: Memory) -> bool:
    """Whether devices and hosts have the room."""
    host = max(stage.host_bytes for stage in held.stages)
    return held.peak_bytes <= problem.limit_bytes and host <= host_room(problem)


def host_room(problem: Problem) -> float:
    """Bytes of its host's memory that each device can have."""
    chips = (part.chip for part in problem.cluster.classes)
    return min(chip.host_bytes / chip.host_chips / chip.devices for chip in chips)


def _cut(problem: Problem, batch: Batch, layout: Layout) -> Layout | None:
    """The layout with the cuts whose longest stage is shortest among those that fit; as even as can be where that is so."""
    layers, fixed = stage_rest(problem.job(layout, batch))
    even = cost(problem.job(layout, batch))
    room: dict[tuple, bool] = {}
    model = problem.model

    def fits_with(stage: int, first: int, end: int) -> bool:
        key = (stage, model.kind_counts(range(first, end)))
        if key not in room:
            held = stage_with(model, layout, batch, problem.recipe, (stage, first, end))
            room[key] = fits(problem, Memory((held,)))
        return room[key]

    for within in (lambda stage, first, end: True, fits_with):
        cuts = best_cuts(Stages(layers, fixed, within))
        if cuts is None:
            return None
        found = dataclasses.replace(layout, cuts=cuts)
        if fits(problem, memory(model, found, batch, problem.recipe)):
            break
    else:
        return None
    held_even = fits(problem, memory(model, layout, batch, problem.recipe))
    return layout if held_even and even.step_seconds <= cost(problem.job(found, batch)).step_seconds else found


def no_layout(problem: Problem, tally: Tally) -> InfeasibleError:
    """What binds where nothing fits, and the smallest changes: what the leanest layout needs, and how many devices would do."""
    needed, layout = leanest(problem)
    limit = problem.limit_bytes
    if needed <= limit:
        room = min(part.chip.host_bytes for part in problem.cluster.classes)
        return InfeasibleError(
            f"host memory binds: {tally.layouts:,} layouts fit the devices only with more than {room / 1e9:.4g} GB of a host"
        )
    enough = _enough(problem)
    devices = f"or {enough.num_devices} devices ({enough}); " if enough else ""
    return InfeasibleError(
        f"memory binds: none of {tally.layouts:,} layouts fits {limit / 1e9:.4g} GB a device; the smallest change is "
        f"{needed / 1e9:.5g} GB a device, {devices}the leanest layout is {describe(layout)}"
    )


def _enough(problem: Problem) -> Cluster | None:
    """The cluster of the same kind, doubled as often as needed, on which something fits; None beyond 4,096 devices."""
    cluster = problem.cluster
    while not cluster.is_mixed and cluster.num_devices <= 2048:
        (part,) = cluster.classes
        part = dataclasses.replace(part, shape=(2 * part.shape[0], *part.shape[1:]), source_name="")
        cluster = Cluster((part,), cluster.between)
        larger = dataclasses.replace(problem, cluster=cluster)
        if leanest(larger, tries=8)[0] <= larger.limit_bytes:
            return cluster
    return None


def leanest(problem: Problem, tries: int = 64) -> tuple[float, Layout]:
    """The layout that needs the least memory of a device within the hosts' memory, and its bytes; of even cuts."""
    variant = next(_variants(problem))
    whole = _Search(dataclasses.replace(problem, memory_bytes=math.inf), variant, _Best(1), Tally())
    mesh, plan, _ = whole._pairs()
    least = min(whole.choices.remats, key=lambda remat: len(kept_kinds(remat)))
    choices = dataclasses.replace(whole.choices, remats=(least,))
    found: list[tuple[float, int]] = []
    for at in range(0, len(mesh), _LATER):
        rows = Rows(whole.bounds, mesh[at : at + _LATER], plan[at : at + _LATER], choices)
        held = np.where(rows.host_bytes() <= host_room(problem), rows.peak_bytes(), math.inf)
        found += zip(held.min(axis=(0, 1)).tolist(), range(at, at + held.shape[-1]), strict=True)
    best = (math.inf, Layout())
    for bound, index in heapq.nsmallest(tries, found):
        if bound >= best[0]:
            break
        best = min(best, _leanest_of(whole, mesh[index], plan[index], least), key=lambda one: one[0])
    return best


def _leanest_of(whole: _Search, mesh: int, plan: int, remat: str) -> tuple[float, Layout]:
    best = (math.inf, Layout())
    for option in whole.options:
        if option.remat == remat and applies(whole.meshes[mesh], whole.plans[plan], option):
            layout = layout_of(whole.meshes[mesh], whole.plans[plan], option)
            held = memory(whole.problem.model, layout, whole.batch, whole.problem.recipe)
            if fits(whole.problem, held):
                best = min(best, (held.peak_bytes, layout), key=lambda one: one[0])
    return best


def describe(layout: Layout) -> str:
    """A layout in a few words: "data 2 x expert 8, 4 micro-batches, remat full"."""
    sizes = " x ".join(f"{name} {size}" for name, size in layout.sizes.items() if size > 1) or "1 device"
    pipe = "" if layout.stage == 1 else f", {layout.schedule}" + (f" x{layout.stage_chunks}" if layout.stage_chunks > 1 else "")
    remat = "" if layout.remat == "none" else f", remat {layout.remat}"
    return f"{sizes}{pipe}, {layout.num_microbatches} micro-batch{'es' if layout.num_microbatches > 1 else ''}{remat}"
