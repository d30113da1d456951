"""Parameters that are born sharded: no device ever holds more than its part."""

from collections.abc import Callable

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import Array

from moejax.axes import AxisRules, current_mesh

Init = Callable[[Array, tuple[int, ...], str], Array]


def born_sharded(
    init: Init, key: Array, shape: tuple[int, ...], dtype: str, logical: tuple[str | None, ...], rules: AxisRules
) -> nnx.Param:
    """A parameter of init(key, shape, dtype), annotated with its PartitionSpec on the current mesh, and laid out by it.

    Args:
      init: an initializer, (key, shape, dtype) -> array.
      key: a random key.
      shape: the whole parameter's.
      dtype: its dtype.
      logical: the logical axis of each dimension, or None.
      rules: logical axes to mesh axes.
    """
    mesh = current_mesh()
    if mesh.empty:
        return nnx.Param(init(key, shape, dtype))
    spec = rules.spec(logical, mesh)
    if not isinstance(key, Tracer):
        sharding = NamedSharding(jax.sharding.get_mesh(), spec)
        value = jax.jit(init, static_argnums=(1, 2), out_shardings=sharding)(key, shape, dtype)
        return nnx.Param(value, out_sharding=spec)
    return nnx.Param(init(key, shape, dtype), out_sharding=spec)
