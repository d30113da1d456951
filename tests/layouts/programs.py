"""What the ahead-of-time tests compile: builders that `layouts.aot` calls in its child process."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moejax
from moejax.layer import moe, param_shapes


def layer(devices, tokens=128, **config) -> jax.stages.Lowered:
    """A MoE layer, output and gradients, experts and tokens over all the devices, `tokens` on each; config overrides fields."""
    defaults = {"d_model": 128, "d_ff": 256, "num_experts": 2 * len(devices), "top_k": 2}
    cfg = moejax.MoEConfig(**defaults | config)
    mesh = moejax.make_mesh(devices=devices, expert=len(devices))

    def array(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def loss(params, x):
        y, stats = moe(params, x, None, None, cfg=cfg)
        return jnp.square(y.astype(jnp.float32)).mean() + stats.loss(cfg)

    params = {
        name: array(shape, cfg.param_dtype, *(["expert"] if logical[0] else []))
        for name, (shape, logical) in param_shapes(cfg).items()
    }
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return step.lower(params, array((len(devices), tokens, cfg.d_model), cfg.dtype, "expert"))


def fails(devices) -> jax.stages.Lowered:
    """A builder with a mistake in it."""
    raise RuntimeError(f"no program for {len(devices)} devices")


def gathers_all(devices) -> jax.stages.Lowered:
    """A reshard from one axis of the array to another that the partitioner cannot do without gathering all of it."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), devices=devices, axis_types=(AxisType.Auto,) * 3)
    before, after = NamedSharding(mesh, P(("a", "b", "c"))), NamedSharding(mesh, P(None, "b"))
    x = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32, sharding=before)
    return jax.jit(jnp.sin, out_shardings=after).lower(x)
