"""The real training step of a layout, lowered: what `verify` compiles for hardware that need not be there."""

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from layouts.errors import InputError
from layouts.layout import Layout
from layouts.model import FeedForward, Model, MoE
from layouts.schedules import make_schedule
from layouts.tables import Shape
from layouts.workload import Batch, Recipe
from moejax import MoEConfig, TransformerConfig
from moejax.pipeline_step import make_pipeline_step
from moejax.staged import Pipeline
from moejax.step import abstract_state, make_train_step

_INPUTS = {"tokens": "int32", "targets": "int32", "segment_ids": "int32", "positions": "int32", "loss_mask": "bool"}


def config_of(model: Model, layout: Layout, recipe: Recipe, num_layers: int | None = None) -> TransformerConfig:
    """The config under which moejax runs the model as the layout says.

    Args:
      model: the model.
      layout: its exchange, codec, chunks and remat go into the config.
      recipe: its capacity and numbers do.
      num_layers: of the model's first layers; None: all.

    Raises:
      InputError: for what moejax does not run.
    """
    lacking = (*model.not_runnable(), *layout.not_runnable())
    if lacking:
        raise InputError(f"{model.name}: moejax does not run {', '.join(lacking)}; `search --runnable` finds what it does")
    layers = model.layers[:num_layers]
    a = layers[0].attention
    dense = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, FeedForward)]
    dtype = "float32" if recipe.compute_bytes == 4 else "bfloat16"
    moe = next(
        (_moe(layer.feed_forward, model, layout, recipe, dtype) for layer in layers if isinstance(layer.feed_forward, MoE)),
        None,
    )
    return TransformerConfig(
        vocab_size=model.vocab_size,
        num_layers=len(layers),
        d_model=model.d_model,
        num_heads=a.num_heads,
        num_kv_heads=a.num_kv_heads,
        d_ff=dense[0].d_ff if dense else model.d_model,
        moe=moe,
        num_dense_layers=len(dense) if moe else 0,
        head_dim=a.qk_dim,
        qk_norm=a.qk_norm == "head",
        tie_embeddings=model.tied,
        activation="swiglu" if not dense or dense[0].gated else "gelu",
        remat=layout.remat,
        param_dtype="float32" if recipe.param_bytes == 4 else "bfloat16",
        dtype=dtype,
    )


def _moe(f: MoE, model: Model, layout: Layout, recipe: Recipe, dtype: str) -> MoEConfig:
    return MoEConfig(
        d_model=model.d_model,
        d_ff=f.d_ff,
        num_experts=f.num_experts,
        top_k=f.top_k,
        capacity=recipe.capacity if recipe.capacity in ("cell", "pool") else "cell",
        capacity_factor=recipe.capacity_factor if recipe.capacity in ("cell", "pool") else None,
        exchange=layout.exchange,
        codec=layout.codec,
        num_chunks=layout.num_chunks,
        activation="swiglu" if f.gated else "gelu",
        num_shared_experts=f.shared_d_ff // f.d_ff,
        dtype=dtype,
    )


def pipeline_of(cfg: TransformerConfig, layout: Layout) -> Pipeline | None:
    """The pipeline that a layout runs a model in; None without stages.

    Raises:
      InputError: where its schedule cannot have so many micro-batches, or the model cannot run in one.
    """
    if layout.stage == 1:
        return None
    try:
        shape = Shape(layout.stage, layout.num_microbatches, layout.stage_chunks, layout.unit)
        schedule = make_schedule(layout.schedule, shape)
        pipeline = Pipeline(schedule, tuple(map(len, layout.part_layers(cfg.num_layers))))
        pipeline.check(cfg, layout.stage)
    except ValueError as error:
        raise InputError(str(error)) from error
    return pipeline


def lower_step(cfg: TransformerConfig, layout: Layout, batch: Batch, devices) -> jax.stages.Lowered:
    """One step of AdamW with clipping, as `python -m train` runs it, on a mesh over these devices."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    mesh, rules = layout.to_mesh(devices), layout.rules()
    rows = NamedSharding(mesh, rules.spec(("batch", None), mesh))
    shape = (batch.sequences, batch.seq)
    with jax.set_mesh(mesh):
        pipeline = pipeline_of(cfg, layout)
        state = abstract_state(cfg, optimizer, jax.eval_shape(lambda: jax.random.key(0)), rules, pipeline)
        if pipeline is None:
            step = make_train_step(cfg, optimizer, layout.num_microbatches, rules, layout.microbatch_overlap)
        else:
            step = make_pipeline_step(cfg, optimizer, pipeline, rules)
        inputs = {name: jax.ShapeDtypeStruct(shape, kind, sharding=rows) for name, kind in _INPUTS.items()}
        return jax.jit(step, donate_argnums=0).lower(state, inputs)


def step(devices, model: Any, layout: Any, batch: Any, recipe: Any, num_layers: int | None = None) -> jax.stages.Lowered:
    """What `layouts.aot` calls in its child: `lower_step` of what JSON carries (see `request_of`)."""
    from layouts.presets import model_from_json

    chosen, how = Layout.from_json(layout), Recipe(**{**recipe, "loads": tuple(recipe["loads"])})
    cfg = config_of(model_from_json(model), chosen, how, num_layers)
    return lower_step(cfg, chosen, Batch(**batch), devices)


def request_of(model: Model, layout: Layout, batch: Batch, recipe: Recipe, num_layers: int | None) -> dict[str, Any]:
    """The arguments of `step`, as JSON carries them."""
    return {
        "model": dataclasses.asdict(model),
        "layout": layout.to_json(),
        "batch": dataclasses.asdict(batch),
        "recipe": dataclasses.asdict(recipe),
        "num_layers": num_layers,
    }
