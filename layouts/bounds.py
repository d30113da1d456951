"""Lower bounds of time and memory of many layouts at once: what lets a search price only a few of them exactly.

No layout's step, as `layouts.cost` prices it, is shorter than its bound, and no device's memory, as `layouts.memory` counts
it, smaller. With one stage the bounds are the exact figures but for rounding. Of a pipeline the cuts are open: the longest
stage takes at least the mean, and the fullest one holds at least what the best cut of whole and part layers would.

Here is what meshes, plans and options each come to by themselves; `layouts.layer_bounds` bounds a layer of pairs of a mesh and
a plan, `layouts.step_bounds` their whole steps.

Shape legend of the three. n: (mesh, plan) pairs, R: remat policies, P: parameter policies, X: ways to cross, C: kinds of
layers (lists).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from layouts.cost import Job, bubble
from layouts.figures import Case, Figures, Line, group_numbers
from layouts.layout import Layout
from layouts.live import live, waiting
from layouts.messages import uses
from layouts.model import Layer, norm_params
from layouts.space import Mesh, Option, Plan
from moejax.axes import MESH_AXES

Crossing = tuple[str, str | tuple[str, str], int]
# The fields of a Profile, as `Bounds.plans` names them.
PROFILE = ("layers", "live", "embedding", "head", "waits")


@dataclasses.dataclass(frozen=True)
class Choices:
    """The options as axes: every combination of the three is one option."""

    remats: tuple[str, ...]
    policies: tuple[tuple[tuple[str, str], ...], ...]
    crossings: tuple[Crossing, ...]

    @classmethod
    def of(cls, options: Sequence[Option]) -> "Choices":
        """The values that the options have, in their order."""
        keep = lambda values: tuple(dict.fromkeys(values))
        return cls(
            keep(option.remat for option in options),
            keep(option.policy for option in options),
            keep((option.exchange, option.codec, option.num_chunks) for option in options),
        )


@dataclasses.dataclass(frozen=True)
class Profile:
    """A stage of a plan, as bounds see it.

    Attributes:
      layers: of each kind, for its time and its states.
      live: micro-batches held of all layers of a kind together, at one moment.
      embedding: share of the embedding that it has.
      head: share of the head.
      waits: layers of each kind whose W waits after their B, at one moment.
    """

    layers: tuple[float, ...]
    live: tuple[float, ...]
    embedding: float
    head: float
    waits: tuple[float, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Kinds:
    """A model's kinds of layers, by identity: a model's own hash reads all its layers."""

    num_layers: int
    count: Callable[[range], tuple[int, ...]]


class Bounds:
    """Bounds for the layouts of some meshes."""

    def __init__(self, job: Job, meshes: Sequence[Mesh], plans: Sequence[Plan], choices: Choices, uneven: bool):
        """Args: job, what is searched for (its layout is not read); meshes; plans; choices; uneven, as in Space."""
        self.job, self.meshes, self.choices, self.uneven = job, list(meshes), choices, uneven
        self.figures = Figures(job, choices.remats)
        self.kinds = Kinds(len(job.model.layers), job.model.kind_counts)
        sizes = np.array([mesh.sizes for mesh in self.meshes]).reshape(-1, len(MESH_AXES))
        self.sizes: dict[str, np.ndarray] = {name: sizes[:, index] for index, name in enumerate(MESH_AXES)}
        of = lambda name: np.array([getattr(mesh.layout, name) for mesh in self.meshes])
        names = ("expert_shards", "expert_tensor", "dense_replicas", "expert_replicas", "batch_shards")
        self.sizes |= {name: of(name) for name in names}
        # What a layer's work depends on, of a mesh: few meshes differ in it.
        cut = np.stack([self.sizes[name] for name in ("tensor", "expert_tensor", "expert_shards")])
        cuts, self.cut = np.unique(cut, axis=1, return_inverse=True)
        self.cut, self.cuts = self.cut.reshape(-1), cuts.T.tolist()
        self.numbers = [self._numbers(layer) for layer in job.model.kinds]
        self._lines: dict[tuple, Line] = {}
        self.plans = self._plans(list(plans))

    def case(self, divisor: int, sequence: bool, cut: int, streams: bool) -> Case:
        """The case of a layer where a mesh cuts as `cuts[cut]` says."""
        tensor, expert_tensor, shards = self.cuts[cut]
        return Case(divisor, sequence, tensor, expert_tensor, shards, streams)

    def _plans(self, plans: list[Plan]) -> dict[str, np.ndarray]:
        """What bounds read of each plan, [plan]; of its profiles [profile, plan, ...], shorter lists repeat the last."""
        layouts = [_plan_layout(plan) for plan in plans]
        found = {name: np.array([getattr(plan, name) for plan in plans]) for name in ("stage", "count", "chunks", "sequence")}
        found["over_data"] = np.array([plan.moments == "over_data" for plan in plans])
        found["bubble"] = np.array([bubble(layout) for layout in layouts])
        found["gathers"], found["divisions"] = np.array([uses(layout) for layout in layouts]).reshape(-1, 2).T
        found["falls"] = np.array([plan.schedule == "1f1b" for plan in plans])
        waits = [[stage[0][0] for stage in waiting(layout, self.job.recipe.by_chunk)] for layout in layouts]
        # Of stages of one chunk; [plan, stage], zeros past the last.
        most = max(map(len, waits), default=1)
        found["waiting"] = np.array([row + [0] * (most - len(row)) for row in waits], int).reshape(-1, most)
        profiles = [_profiles(plan, self.kinds, self.uneven, self.job.recipe.by_chunk) for plan in plans]
        longest = max(map(len, profiles), default=0)
        padded = [[each[min(index, len(each) - 1)] for each in profiles] for index in range(longest)]
        for name in PROFILE:
            found[name] = np.array([[getattr(one, name) for one in row] for row in padded])
        return found

    def _numbers(self, layer: Layer) -> dict[str, np.ndarray]:
        """Numbers of each group of a layer's matrices on one device of each mesh, before fsdp divides them."""
        each = [group_numbers(layer, self.job.model.d_model, *cut) for cut in self.cuts]
        found = {group: np.array([one[group] for one in each])[self.cut] for group in (each[0] if each else ())}
        return {**found, "norms": np.full(len(self.meshes), float(norm_params(self.job.model, layer)))}

    def line(self, kind: str, axes: str, top_k: int = 1) -> Line:
        """The seconds of a kind of message over axes named by their use, for all meshes."""
        key = (kind, axes, top_k)
        if key not in self._lines:
            self._lines[key] = self._line(kind, _AXES[axes], top_k)
        return self._lines[key]

    def _line(self, kind: str, axes: Callable[[Mesh], tuple[str, ...]], top_k: int) -> Line:
        """Mesh by mesh the same axes but for those of the experts, which have few forms."""
        latency, per_byte = np.zeros((2, len(self.meshes)))
        of = [axes(mesh) for mesh in self.meshes]
        for form in set(of):
            index = np.array([number for number, names in enumerate(of) if names == form])
            found = self.figures.line([self.meshes[number] for number in index], kind, form, top_k)
            latency[index], per_byte[index] = found.latency, found.per_byte
        return Line(latency, per_byte)


_AXES = {
    "tensor": lambda mesh: ("tensor",),
    "context": lambda mesh: ("context",),
    "fsdp": lambda mesh: ("fsdp",),
    "stage": lambda mesh: ("stage",),
    "fold": lambda mesh: mesh.fold,
    "dense": lambda mesh: ("data", "expert", "context"),
    "experts": lambda mesh: tuple(name for name in ("data", "expert", "context") if name not in mesh.fold),
}


def _layers_of(moment: Sequence[int], held: Sequence[tuple[int, ...]]) -> tuple[float, ...]:
    """Layers of each kind, of so many micro-batches of each chunk."""
    return tuple(float(sum(m * n for m, n in zip(moment, kinds, strict=True))) for kinds in zip(*held, strict=True))


@functools.lru_cache(maxsize=4096)
def _plan_layout(plan: Plan) -> Layout:
    """The plan's layout on as many devices as it has stages."""
    return Layout(stage=plan.stage, schedule=plan.schedule, stage_chunks=plan.chunks, num_microbatches=plan.count)


@functools.lru_cache(maxsize=4096)
def _profiles(plan: Plan, kinds: "Kinds", uneven: bool, by_chunk: bool) -> tuple[Profile, ...]:
    """One stage: all. Of cuts to be found: the mean stage, and the last with its last layer. Else: those that differ."""
    whole, stage = tuple(map(float, kinds.count(range(kinds.num_layers)))), plan.stage
    none = (0.0,) * len(whole)
    if stage == 1:
        return (Profile(whole, whole, 1.0, 1.0, none),)
    if uneven and plan.chunks == 1:
        mean = tuple(number / stage for number in whole)
        last = tuple(map(float, kinds.count(range(kinds.num_layers - 1, kinds.num_layers))))
        return Profile(mean, none, 0.0, 1 / stage, none), Profile(last, last, 0.0, 1.0, none)
    layout = _plan_layout(plan)
    waits = waiting(layout, by_chunk)
    parts = [kinds.count(part) for part in layout.part_layers(kinds.num_layers)]
    found = {}
    for index, moments in enumerate(live(layout)):
        held = [parts[part] for part in range(index, len(parts), stage)]
        layers = tuple(float(sum(kinds)) for kinds in zip(*held, strict=True))
        alive, later = (_layers_of(max(counts, key=sum), held) for counts in (moments, waits[index]))
        profile = Profile(layers, alive, float(index == 0), float(index == stage - 1), later)
        found.setdefault((layers, profile.embedding, profile.head), profile)
    return tuple(found.values())
