"""What a search chooses from: meshes, how experts are folded over them, pipelines, and what a layer does on them.

A layout is a mesh (axis sizes, and the axes of the experts), a plan (micro-batches, schedule, how the sequence and the
moments are divided) and an option (exchange, codec, chunks, remat, policy). The three are told apart because a search
bounds whole meshes and plans before it looks at options.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

from layouts.activations import kept_kinds
from layouts.layout import MOMENTS, Layout
from layouts.model import Model, MoE
from layouts.workload import Batch, Recipe, divides
from moejax.axes import MESH_AXES
from moejax.config import CHUNKED

DENSE = ("attention", "dense", "shared", "embedding", "head")
_CHOICES = ("gather", "keep", "offload")
Policy = tuple[tuple[str, str], ...]


def policy(dense: str, experts: str) -> Policy:
    """A layout's `policy` that treats all but the experts alike."""
    pairs = [*((group, dense) for group in DENSE), ("experts", experts)]
    return tuple((group, choice) for group, choice in pairs if choice != "gather")


@dataclasses.dataclass(frozen=True)
class Space:
    """What may be chosen.

    Attributes:
      axes: that may be larger than 1.
      folds: the axes that experts may be divided over.
      pipelines: (schedule, chunks a stage) pairs.
      uneven: stages of one chunk may hold any numbers of layers; else, and with more chunks, as even as can be.
      exchanges: how rows may cross.
      codecs: how they may travel; those that round are the user's to allow.
      num_chunks: parts they may cross in, under the exchanges that have parts.
      remats: what layers may keep.
      policies: of parameters.
      moments: where optimizer states may lie.
      sequence: whether norms and residuals may be divided over the tensor axis.
    """

    axes: tuple[str, ...] = MESH_AXES
    folds: tuple[tuple[str, ...], ...] = (
        ("expert",),
        ("expert", "tensor"),
        ("expert", "context"),
        ("expert", "tensor", "context"),
    )
    pipelines: tuple[tuple[str, int], ...] = (
        ("1f1b", 1),
        ("zb_h1", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zeropp", 2),
        ("zeropp", 4),
    )
    uneven: bool = True
    exchanges: tuple[str, ...] = ("all_to_all", "hierarchical", "all_gather", "weight_stream")
    codecs: tuple[str | tuple[str, str], ...] = ("plain",)
    num_chunks: tuple[int, ...] = (1, 2, 4)
    remats: tuple[str, ...] = ("none", "selective", "norm+activation", "dots", "experts", "exchange", "received", "full")
    policies: tuple[Policy, ...] = tuple(itertools.starmap(policy, itertools.product(_CHOICES, repeat=2)))
    moments: tuple[str, ...] = MOMENTS
    sequence: tuple[bool, ...] = (False, True)

    def runnable(self) -> "Space":
        """The part that moejax's executor runs, as `Layout.not_runnable` says today."""
        runs = lambda **fields: not Layout(**fields).not_runnable()
        one = lambda axis: {"schedule": self.pipelines[0][0]} if axis == "stage" else {}
        axes = tuple(axis for axis in self.axes if runs(**{axis: 2}, **one(axis)))
        pipes = ((name, v) for name, v in self.pipelines if runs(stage=2, schedule=name, stage_chunks=v))
        return dataclasses.replace(
            self,
            axes=axes,
            folds=tuple(fold for fold in self.folds if runs(expert_axes=fold)),
            pipelines=tuple(pipes),
            exchanges=tuple(exchange for exchange in self.exchanges if runs(exchange=exchange)),
            remats=tuple(remat for remat in self.remats if runs(remat=remat)),
            policies=tuple(pairs for pairs in self.policies if runs(policy=pairs)),
            moments=tuple(where for where in self.moments if runs(data=2, moments=where)),
            sequence=tuple(divided for divided in self.sequence if runs(tensor=2, sequence=divided)),
        )


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Axis sizes in the order of `MESH_AXES`, and the axes that experts are divided over."""

    sizes: tuple[int, ...]
    fold: tuple[str, ...]

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of this mesh, all else by default."""
        schedule = "none" if self.sizes[MESH_AXES.index("stage")] == 1 else "1f1b"
        return Layout(**dict(zip(MESH_AXES, self.sizes, strict=True)), expert_axes=self.fold, schedule=schedule)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A pipeline and how it goes through a batch.

    Attributes:
      stage: stages.
      schedule: "none" for one stage.
      chunks: of a stage.
      count: micro-batches.
      sequence: as in Layout.
      moments: as in Layout.
    """

    stage: int
    schedule: str
    chunks: int
    count: int
    sequence: bool
    moments: str


@dataclasses.dataclass(frozen=True)
class Option:
    """What a layer does; the fields are Layout's."""

    remat: str
    policy: Policy
    exchange: str
    codec: str | tuple[str, str]
    num_chunks: int


def meshes(space: Space, model: Model, batch: Batch, num_devices: int) -> Iterator[Mesh]:
    """All meshes of that many devices that model and batch can be divided over, as they would be with one micro-batch."""
    is_moe = any(isinstance(layer.feed_forward, MoE) for layer in model.kinds)
    for sizes in _sizes(space, num_devices):
        if sizes[MESH_AXES.index("stage")] > len(model.layers):
            continue
        for fold in space.folds:
            named: dict[str, int] = {axis: sizes[index] for index, axis in enumerate(MESH_AXES)}
            if any(named[axis] == 1 for axis in fold[1:]) or (fold != ("expert",) and not is_moe):
                continue
            if named["expert"] > 1 and not is_moe:
                continue
            mesh = Mesh(sizes, fold)
            if divides(model, mesh.layout, batch):
                yield mesh


def _sizes(space: Space, left: int, axes: tuple[str, ...] = MESH_AXES) -> Iterator[tuple[int, ...]]:
    """All ways to write a number of devices as a product over the axes."""
    if not axes:
        yield from [()] if left == 1 else []
        return
    for size in divisors(left) if axes[0] in space.axes else (1,):
        for rest in _sizes(space, left // size, axes[1:]):
            yield (size, *rest)


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """All whole numbers that divide it."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))


def plans(space: Space, model: Model, stage: int, replicas_divide: int) -> Iterator[Plan]:
    """All plans of that many stages; `replicas_divide` is the sequences of one batch shard, which micro-batches divide."""
    pipes = [("none", 1)] if stage == 1 else [pipe for pipe in space.pipelines if stage * pipe[1] <= len(model.layers)]
    for (schedule, chunks), count in itertools.product(pipes, divisors(replicas_divide)):
        if not _has_table(schedule, stage, count):
            continue
        for sequence, moments in itertools.product(space.sequence, space.moments):
            yield Plan(stage, schedule, chunks, count, sequence, moments)


def _has_table(schedule: str, stage: int, count: int) -> bool:
    """Whether the space has that schedule for so many micro-batches: at least one a stage, and whole groups or units."""
    if schedule == "interleaved":
        return count % stage == 0
    if schedule == "zeropp":
        return count % (2 * stage) == 0
    return count >= stage


def options(space: Space, model: Model, recipe: Recipe) -> tuple[Option, ...]:
    """All options that differ for this model, the plainest first."""
    is_moe = any(isinstance(layer.feed_forward, MoE) for layer in model.kinds)
    remats = [remat for remat in space.remats if is_moe or "route" not in kept_kinds(remat) or "norm" in kept_kinds(remat)]
    if not recipe.score_bytes:
        remats = [remat for remat in remats if remat != "selective" or "none" not in space.remats]
    policies = [pairs for pairs in space.policies if is_moe or "experts" not in dict(pairs)]
    crossings = [
        (exchange, codec, chunks)
        for exchange in space.exchanges
        for codec in space.codecs
        for chunks in space.num_chunks
        if (chunks == 1 or exchange in CHUNKED) and (exchange != "weight_stream" or codec == "plain")
    ]
    crossings = crossings if is_moe else [("all_to_all", "plain", 1)]
    return tuple(Option(r, p, *crossing) for r, p, crossing in itertools.product(remats, policies, crossings))


def applies(mesh: Mesh, plan: Plan, option: Option) -> bool:
    """Whether the option says something on this mesh that a plainer one does not say too."""
    layout = mesh.layout
    if layout.expert_shards == 1 and (option.exchange, option.codec, option.num_chunks) != ("all_to_all", "plain", 1):
        return False
    if layout.fsdp == 1 and "keep" in dict(option.policy).values():
        return False
    return not (plan.sequence and layout.tensor == 1)


def plan_fits(mesh: Mesh, plan: Plan, batch: Batch) -> bool:
    """Whether the plan goes with the mesh and the batch."""
    layout = mesh.layout
    shards = layout.batch_shards
    if plan.stage != layout.stage or batch.sequences % (shards * plan.count):
        return False
    if plan.moments != MOMENTS[0] and layout.dense_replicas == 1:
        return False
    return not plan.sequence or (layout.tensor > 1 and batch.seq // layout.context % layout.tensor == 0)


def layout_of(mesh: Mesh, plan: Plan, option: Option, **fields: Any) -> Layout:
    """The layout that mesh, plan and option make."""
    return Layout(
        **dict(zip(MESH_AXES, mesh.sizes, strict=True)),
        expert_axes=mesh.fold,
        num_microbatches=plan.count,
        schedule=plan.schedule,
        stage_chunks=plan.chunks,
        sequence=plan.sequence,
        moments=plan.moments,
        **vars(option),
        **fields,
    )


def every_layout(space: Space, model: Model, batch: Batch, recipe: Recipe, num_devices: int) -> Iterator[Layout]:
    """All layouts of the space, one by one: for small problems, and as the meaning of a search."""
    for mesh in meshes(space, model, batch, num_devices):
        for plan in plans(space, model, mesh.layout.stage, batch.sequences // mesh.layout.batch_shards):
            if plan_fits(mesh, plan, batch):
                chosen = [option for option in options(space, model, recipe) if applies(mesh, plan, option)]
                pairs = itertools.product(chosen, _cuts(space, plan, len(model.layers)))
                yield from (layout_of(mesh, plan, option, cuts=cuts) for option, cuts in pairs)


def _cuts(space: Space, plan: Plan, num_layers: int) -> Iterator[tuple[int, ...] | None]:
    yield None
    if space.uneven and plan.stage > 1 and plan.chunks == 1:
        for ends in itertools.combinations(range(1, num_layers), plan.stage - 1):
            yield tuple(b - a for a, b in itertools.pairwise((0, *ends, num_layers)))
