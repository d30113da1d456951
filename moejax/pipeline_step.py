"""The train step and the evaluation over pipeline stages: what `moejax.step` does without them, by `run_pipeline`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from moejax import axes as ax
from moejax.axes import AxisRules
from moejax.stage_program import Observer
from moejax.staged import Pipeline, gradients, layer_stats, pipeline_model, run_transformer, single
from moejax.step import Batch, Metrics, TrainState, param_specs, routing_metrics, split_batch, update_routers
from moejax.transformer import TransformerConfig


def make_pipeline_step(
    cfg: TransformerConfig,
    optimizer: optax.GradientTransformation,
    pipeline: Pipeline,
    rules: AxisRules = AxisRules(),
    observer: Observer | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`moejax.step.make_train_step` over the current mesh's axis "stage": the same losses, gradients and metrics.

    Args:
      cfg: the model.
      optimizer: as there. It sees parameters in stage order, with zeros in empty slots.
      pipeline: its schedule's micro-batches are the step's.
      rules: logical axes to mesh axes.
      observer: see `moejax.run_pipeline`.

    Returns:
      A pure function from (state, batch) to (next state, metrics); the state is that of `init_state` with this pipeline.

    Raises:
      ValueError: where the pipeline does not fit the model or the mesh.
    """
    pipeline.check(cfg, ax.current_mesh().shape.get("stage", 1))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        result = _run(cfg, pipeline, rules, (state.params, state.router), batch, observer=observer)
        stats, grads = layer_stats(cfg, pipeline.layers(cfg), result), gradients(cfg, result)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        following = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            router=update_routers(state.router, stats),
            opt_state=opt_state,
        )
        total = result.loss + (0.0 if stats is None else stats.loss(cfg.moe))
        metrics = {"loss": result.loss, "total_loss": total, "grad_norm": optax.tree.norm(grads)}
        return following, {**metrics, "num_targets": batch["loss_mask"].sum(), **routing_metrics(stats)}

    return train_step


def make_pipeline_eval(
    cfg: TransformerConfig, pipeline: Pipeline, rules: AxisRules = AxisRules()
) -> Callable[[Any, Any, Batch], Metrics]:
    """`moejax.step.make_eval_step` over stages: the batch walks through them as one micro-batch, in the time that a device
    takes for the whole model. Parameters are in stage order."""
    pipeline.check(cfg, ax.current_mesh().shape.get("stage", 1))
    forward = dataclasses.replace(pipeline, schedule=single(pipeline.schedule.placement))

    def eval_step(params, router, batch: Batch) -> Metrics:
        loss = _run(cfg, forward, rules, (params, router), batch, backward=False).loss
        num_targets = batch["loss_mask"].sum()
        return {"loss_sum": loss * num_targets, "num_targets": num_targets}

    return eval_step


def _run(cfg, pipeline: Pipeline, rules, arrays: tuple[Any, Any], batch: Batch, **options):
    """The pipeline's result, its loss the mean over the batch's counted targets."""
    (parts,) = split_batch(batch, pipeline.schedule.num_microbatches, 1)
    mask = parts.pop("loss_mask")
    parts["weight"] = mask / jnp.maximum(mask.sum(), 1).astype(jnp.float32)
    rows = P(None, rules.axes("batch", ax.current_mesh()) or None)
    parts = jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, rows), parts)
    model = pipeline_model(cfg, rules, param_specs(cfg, rules), train=options.get("backward", True))
    return run_transformer(cfg, pipeline, model, arrays, parts, **options)
