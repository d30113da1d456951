"""run_pipeline: one jitted program over a mesh that runs any schedule's table, tick after tick.

Shape legend. P: stages, M: micro-batches.

All of it stands in one `shard_map`: a scan over ticks, in which a stage runs its op or idles, and then every stage sends
what the table says. Collectives of the layers (over expert and tensor axes) stand inside the ops: all members of their
groups are on one stage, so they take the same branch. Transfers between stages stand outside.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from moejax import axes as ax
from moejax.pipeline import Schedule
from moejax.pytree import pytree
from moejax.stage_layers import StageLayers
from moejax.stage_program import STAGE, Observer, PipelineModel, Plan, StageProgram, is_spec
from moejax.ticks import make_ticks


@pytree
class PipelineParams:
    """A pipeline's arrays.

    Attributes:
      layers: for each kind a pytree, leaves [P * slots, ...] in stage order (`StageLayers.to_stages`).
      ends: of embedding and head, whole on every stage.
      given: for each kind a pytree without gradients, in stage order too.
    """

    layers: tuple[Any, ...]
    ends: Any
    given: tuple[Any, ...]


@pytree
class PipelineResult:
    """What came out of a step.

    Attributes:
      loss: float32, the sum of the micro-batches' `head` losses over all token shards.
      stats: for each kind its layers' stats in stage order, [P * slots, ...].
      layers: the gradients of that loss plus the mean over micro-batches of the layers' losses, by kind, in stage order;
        None without a backward.
      ends: those of the ends, or None.
    """

    loss: Any
    stats: Any
    layers: Any
    ends: Any


def run_pipeline(
    schedule: Schedule,
    model: PipelineModel,
    params: PipelineParams,
    inputs: Any,
    *,
    layers: StageLayers | None = None,
    backward: bool = True,
    observer: Observer | None = None,
) -> PipelineResult:
    """Runs a schedule's table, forward and backward, over the current mesh, whose axis "stage" has P devices.

    B and W are apart: the input's gradient is there to be sent before the weights' is computed. Where the table has gathers
    and the mesh divides parameters over `model.gathered`, each chunk is gathered when the table says and its gradient
    reduced once a unit; where the table has none, each op gathers a layer at a time.

    Args:
      schedule: any valid table.
      model: what it runs.
      params: laid out over the mesh: layers by their stage, `kinds[k].specs` and `end_specs`.
      inputs: a pytree, leaves [M, rows, ...], rows divided over `model.tokens`.
      layers: which layers each stage holds; None: as even as can be.
      backward: False runs the forwards alone.
      observer: called on the host by every device as it runs an op, with (stage, tick, name of the op, chunk, its index as in
        `moejax.pipeline.Op`); for gathers and reduces once a layer. For tests and traces: it slows the program down.

    Raises:
      ValueError: for a mesh without as many stages, or inputs of another number of micro-batches.
    """
    mesh = ax.current_mesh()
    if mesh.shape.get(STAGE) != schedule.num_stages:
        raise ValueError(
            f"mesh {dict(mesh.shape)}: schedule {schedule.name!r} needs an axis 'stage' of {schedule.num_stages} devices"
        )
    for leaf in jax.tree.leaves(inputs):
        if leaf.shape[0] != schedule.num_microbatches:
            raise ValueError(f"inputs of {leaf.shape[0]} micro-batches: the schedule has {schedule.num_microbatches}")
    layers = StageLayers.even(schedule.placement, model.order) if layers is None else layers
    table = any(schedule.count("gather")) and bool(model.gathered)
    ticks = make_ticks(schedule, layers, backward)
    plan = Plan(model, layers, ticks, schedule.num_microbatches, table, backward, observer)
    stacked = lambda spec: P(STAGE, *spec)
    by_layer = tuple(jax.tree.map(stacked, kind.specs, is_leaf=is_spec) for kind in model.kinds)
    grads = (by_layer, model.end_specs) if backward else (None, None)
    run = jax.shard_map(
        lambda params, inputs: _run(plan, params, inputs),
        in_specs=(PipelineParams(by_layer, model.end_specs, (P(STAGE),) * len(model.kinds)), P(None, model.tokens or None)),
        out_specs=PipelineResult(P(), P(STAGE), *grads),
    )
    return run(params, inputs)


def _run(plan: Plan, params: PipelineParams, inputs) -> PipelineResult:
    """Per shard: scans the ticks, then adds up over shards what they have each a part of."""
    model = plan.model
    spread = lambda trees: tuple(_copies(plan.layers, tree) for tree in trees)
    program = StageProgram(plan, spread(params.layers), params.ends, spread(params.given), inputs)
    columns = {name: jnp.asarray(column) for name, column in plan.ticks.columns.items()}
    ticks = jnp.arange(plan.ticks.num_ticks, dtype=jnp.int32), columns
    state = lax.scan(program.tick, program.start(), ticks)[0]
    home = lambda trees: [_home(plan.layers, k, tree) for k, tree in enumerate(trees)]
    stats = tuple(jax.tree.map(lambda leaf: _averaged(leaf, plan.num_microbatches), tree) for tree in home(state["stats"]))
    loss = lax.psum(state["loss"], model.own)
    if not plan.backward:
        return PipelineResult(loss, stats, None, None)
    layers = tuple(
        kind.tree.unflatten([_sum(leaf, spec, model.tokens) for leaf, spec in zip(grads, kind.specs, strict=True)])
        for kind, grads in zip(program.kinds, home(state["grads"]), strict=True)
    )
    of_ends = lambda spec, leaf: _sum(model.reduced(leaf, spec), spec, model.own)
    ends = jax.tree.map(of_ends, model.end_specs, state["end_grads"], is_leaf=is_spec)
    return PipelineResult(loss, stats, layers, ends)


def _averaged(leaf, num_microbatches: int):
    return leaf if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf / num_microbatches


def _sum(leaf, spec: P, axes: tuple[str, ...]):
    """The sum over those of the axes that the parameter is not divided over."""
    named = {name for entry in spec for name in ax.as_tuple(entry)}
    return ax.sum_over(leaf, [name for name in axes if name not in named])


def _copies(layers: StageLayers, tree):
    """[slots, ...] -> [slots of all pipes, ...]: a stage holds its mirror images' layers too."""
    parts = [tree]
    for pipe in layers.pipes[1:]:
        there = [(source, stage) for stage, source in enumerate(layers.mirrors[pipe])]
        parts.append(lax.ppermute(tree, STAGE, there))
    return tree if len(parts) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _home(layers: StageLayers, kind: int, tree):
    """The way back of `_copies`, for what is added up: copies' slots are added to those that they are copies of."""
    size = layers.slots[kind]
    total = jax.tree.map(lambda leaf: leaf[:size], tree)
    for n, pipe in enumerate(layers.pipes[1:], 1):
        back = list(enumerate(layers.mirrors[pipe]))
        part = jax.tree.map(lambda leaf, n=n: leaf[n * size : (n + 1) * size], tree)
        total = jax.tree.map(jnp.add, total, lax.ppermute(part, STAGE, back))
    return total
