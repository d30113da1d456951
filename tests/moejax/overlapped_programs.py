"""What the ahead-of-time tests of the rings compile: builders that `layouts.aot` calls in its child process."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import moejax
from moejax.ring_feed_forward import feed_forward_over_mesh


def feed_forward(devices, axis: str, tokens: int = 1024, d: int = 4096, f: int = 8192) -> jax.stages.Lowered:
    """A bfloat16 gelu feed-forward of float32 weights and its gradients, over one axis of all devices; tokens a device."""
    mesh, rules = moejax.make_mesh(devices=devices, **{axis: len(devices)}), moejax.AxisRules()
    array = lambda shape, dtype, logical: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, rules.spec(logical, mesh))
    )
    up, down = array((d, f), "float32", ("embed", "mlp")), array((f, d), "float32", ("mlp", "embed"))
    x = jax.ShapeDtypeStruct((len(devices), tokens, d), "bfloat16", sharding=NamedSharding(mesh, P(*_tokens(axis))))

    def loss(x, up, down):
        y = feed_forward_over_mesh(x, (None, up, down), jax.nn.gelu, rules)
        return jnp.square(y.astype(jnp.float32)).mean()

    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, up, down)


def _tokens(axis):
    return (axis,) if axis == "fsdp" else (None, axis)
