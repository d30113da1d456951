"""Checkpoints between layouts: layers saved in one order of pipeline stages, wanted in another, or in none."""

from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.pipeline import Placement
from moejax.stage_layers import StageLayers
from moejax.staged import layer_order, reorder, to_model, to_stages
from moejax.step import TrainState, abstract_state
from train.config import RULES, TrainConfig
from train.errors import InputError
from train.optimizer import make_optimizer
from train.stages import make_pipeline

Order = dict[str, Any]


def stage_order(cfg: TrainConfig) -> Order | None:
    """The order that a run's layers are kept in, as a checkpoint says it: None, or parts, pipes and cuts."""
    pipeline = make_pipeline(cfg)
    if pipeline is None:
        return None
    layers = pipeline.layers(cfg.model)
    parts = [list(row) for row in layers.placement.parts]
    return {"parts": parts, "pipes": list(layers.placement.pipes), "cuts": list(layers.cuts)}


def abstract_saved(cfg: TrainConfig, order: Order | None) -> TrainState:
    """The shapes that a run of this config has in that order, laid out over the current mesh for the way through.

    Raises:
      InputError: where the order is of another number of layers.
    """
    key = jax.eval_shape(lambda: jax.random.key(cfg.seed))
    plain = abstract_state(cfg.model, make_optimizer(cfg), key, RULES)
    if order is not None:
        layers = _layers(cfg, order)
        shapes = jax.eval_shape(lambda state: to_stages(cfg.model, layers, state), plain)
        plain = jax.tree.map(lambda a, b: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=b.sharding), shapes, plain)
    return reorder(cfg.model, plain, lambda _, leaf: _over_stages(leaf))


def _over_stages(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Divided over stages too, where these divide the layers, so that the way takes no device more than its part."""
    mesh = jax.sharding.get_mesh()
    if leaf.shape[0] % mesh.shape["stage"]:
        return leaf
    sharding = NamedSharding(mesh, P("stage", *leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def to_order(cfg: TrainConfig, state: TrainState, order: Order | None, wanted: TrainState) -> TrainState:
    """A state of that order as the run keeps it.

    Args:
      cfg: the run.
      state: laid out as `abstract_saved` says.
      order: of its layers.
      wanted: shapes and shardings of the run's own.
    """
    pipeline = make_pipeline(cfg)

    def move(state):
        state = state if order is None else to_model(cfg.model, _layers(cfg, order), state)
        return state if pipeline is None else to_stages(cfg.model, pipeline.layers(cfg.model), state)

    return jax.jit(move, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, wanted), donate_argnums=0)(state)


def _layers(cfg: TrainConfig, order: Order) -> StageLayers:
    placement = Placement(tuple(map(tuple, order["parts"])), tuple(order["pipes"]))
    try:
        return StageLayers(placement, layer_order(cfg.model), tuple(order["cuts"]))
    except ValueError as error:
        raise InputError(f"checkpoint of another model, in pipeline stages: {error}") from error
