"""What the ahead-of-time tests compile: builders that `layouts.aot` calls in its child process."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moejax
from layouts.schedules import make_schedule
from layouts.tables import Shape
from moejax.axes import mesh_size
from moejax.layer import moe, param_shapes
from moejax.pipeline_step import make_pipeline_step
from moejax.staged import Pipeline
from moejax.step import abstract_state, make_train_step


def layer(devices, tokens=128, mesh=None, expert="expert", **config) -> jax.stages.Lowered:
    """A MoE layer, output and gradients, `tokens` on each token shard; config overrides fields.

    Over the mesh axes (sizes by name) and expert axes named; by default experts and tokens over all the devices.
    """
    defaults = {"d_model": 128, "d_ff": 256, "num_experts": 2 * len(devices), "top_k": 2}
    cfg = moejax.MoEConfig(**defaults | config)
    mesh = moejax.make_mesh(devices=devices, **mesh or {"expert": len(devices)})
    rules = moejax.AxisRules(expert=expert if isinstance(expert, str) else tuple(expert))  # JSON has no tuples
    array = lambda shape, dtype, *logical: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, rules.spec(logical, mesh))
    )

    def loss(params, x):
        y, stats = moe(params, x, None, None, cfg=cfg, rules=rules)
        return jnp.square(y.astype(jnp.float32)).mean() + stats.loss(cfg)

    params = {name: array(shape, cfg.param_dtype, *logical) for name, (shape, logical) in param_shapes(cfg).items()}
    x = array((mesh_size(mesh, rules.axes("batch", mesh)), tokens, cfg.d_model), cfg.dtype, "batch")
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(params, x)


def train_step(devices, d_model=16, d_ff=8, seq=12, axis="expert", **config) -> jax.stages.Lowered:
    """One step of a small model over one axis of all the devices, two micro-batches through its two layers together."""
    dtype = {"dtype": "float32" if devices[0].platform == "cpu" else "bfloat16"}
    moe = moejax.MoEConfig(d_model, d_ff, len(devices), 2, activation="gelu", **dtype)
    cfg = moejax.TransformerConfig(32, 2, d_model, 4, 2, 24, moe, **dtype, **config)
    optimizer, shape, mesh = optax.sgd(0.1), (2 * len(devices), seq), moejax.make_mesh(devices=devices, **{axis: len(devices)})
    rows = NamedSharding(mesh, P(axis))
    kinds = {"tokens": "int32", "targets": "int32", "segment_ids": "int32", "positions": "int32", "loss_mask": "bool"}
    with jax.set_mesh(mesh):
        state = abstract_state(cfg, optimizer, jax.eval_shape(lambda: jax.random.key(0)))
        step = make_train_step(cfg, optimizer, 2, microbatch_overlap=2)
        batch = {name: jax.ShapeDtypeStruct(shape, kind, sharding=rows) for name, kind in kinds.items()}
        return jax.jit(step, donate_argnums=0).lower(state, batch)


def pipelined_step(devices, schedule, shape, moe=True, layers=8, seq=512, fsdp=1, **config) -> jax.stages.Lowered:
    """One step of a model over pipeline stages: `shape` are a Shape's fields; a row of `seq` tokens a device and part."""
    pipeline = Pipeline(make_schedule(schedule, Shape(**shape)))
    axes = {"stage": shape["stages"], "fsdp": fsdp, "expert": len(devices) // shape["stages"] // fsdp}
    sizes = {"d_model": 256, "d_ff": 512} | config
    experts = moejax.MoEConfig(**sizes, num_experts=2 * axes["expert"], top_k=2) if moe else None
    cfg = moejax.TransformerConfig(1024, layers, num_heads=4, num_kv_heads=4, moe=experts, **sizes)
    optimizer, mesh = optax.sgd(0.1), moejax.make_mesh(devices=devices, **axes)
    rows = NamedSharding(mesh, P(("fsdp", "expert")))
    kinds = {"tokens": "int32", "targets": "int32", "segment_ids": "int32", "positions": "int32", "loss_mask": "bool"}
    batch_shape = (shape["microbatches"] * axes["fsdp"] * axes["expert"], seq)
    with jax.set_mesh(mesh):
        state = abstract_state(cfg, optimizer, jax.eval_shape(lambda: jax.random.key(0)), pipeline=pipeline)
        step = make_pipeline_step(cfg, optimizer, pipeline)
        batch = {name: jax.ShapeDtypeStruct(batch_shape, kind, sharding=rows) for name, kind in kinds.items()}
        return jax.jit(step, donate_argnums=0).lower(state, batch)


def fails(devices) -> jax.stages.Lowered:
    """A builder with a mistake in it."""
    raise RuntimeError(f"no program for {len(devices)} devices")


def gathers_all(devices) -> jax.stages.Lowered:
    """A reshard from one axis of the array to another that the partitioner cannot do without gathering all of it."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), devices=devices, axis_types=(AxisType.Auto,) * 3)
    before, after = NamedSharding(mesh, P(("a", "b", "c"))), NamedSharding(mesh, P(None, "b"))
    x = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32, sharding=before)
    return jax.jit(jnp.sin, out_shardings=after).lower(x)
