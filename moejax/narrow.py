"""Parameters multiplied in a narrower dtype than they are kept in: each gradient is summed over tokens and devices in its own.

A cast before a product would do as a forward; its transpose comes after the sum, which would then be rounded at every step.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moejax import axes as ax


def gather_narrow(weights: Float[Array, "..."], dtype: str, axes: tuple[str, ...], dimension: int) -> Float[Array, "..."]:
    """The whole weights in `dtype`, in which they travel, of all shards' parts; the gradient's sum travels in their own.

    Args:
      weights: this shard's part.
      dtype: what they are multiplied in.
      axes: the mesh axes that they are divided over; none, and this is a cast.
      dimension: which of theirs is divided.
    """
    return _gather(weights, dtype, weights.dtype.name, axes, dimension) if axes else weights.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(weights, dtype, own, axes, dimension):
    return lax.all_gather(weights.astype(dtype), axes, axis=dimension, tiled=True)


def _gather_bwd(dtype, own, axes, dimension, _, cotangent):
    return (lax.psum_scatter(cotangent.astype(own), axes, scatter_dimension=dimension, tiled=True),)


_gather.defvjp(lambda weights, *static: (_gather(weights, *static), None), _gather_bwd)


def narrow_einsum(form: str, x: Float[Array, "..."], weights: Float[Array, "..."]) -> Float[Array, "..."]:
    """jnp.einsum(form, x, weights) in the dtype of x; the gradient of the weights is summed in theirs.

    Args:
      form: two operands and a result; each letter of one of them is a letter of another one's too.
      x: the first operand.
      weights: the second.
    """
    return _einsum(form, *ax.vary_alike((x, weights)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum(form, x, weights):
    return jnp.einsum(form, x, weights.astype(x.dtype))


def _einsum_bwd(form, kept, dy):
    x, weights = kept
    operands, _, of_y = form.partition("->")
    of_x, of_weights = operands.split(",")
    dx = jnp.einsum(f"{of_y},{of_weights}->{of_x}", dy, weights.astype(x.dtype))
    wide = jnp.promote_types(x.dtype, weights.dtype)
    d_weights = jnp.einsum(f"{of_x},{of_y}->{of_weights}", x, dy, preferred_element_type=wide)
    return dx, d_weights.astype(weights.dtype)


_einsum.defvjp(lambda form, x, weights: (_einsum(form, x, weights), (x, weights)), _einsum_bwd)
