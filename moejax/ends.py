"""A model's two ends, per shard: a table's rows for tokens, and the cross-entropy of its logits, the vocabulary divided.

b: sequences, s: tokens of a sequence, d: model width, V: vocabulary, v: this shard's part of it.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moejax import axes as ax


def look_up(table: Float[Array, "v d"], tokens: Int[Array, "b s"], axes: tuple[str, ...]) -> Float[Array, "b s d"]:
    """The rows of tokens.

    Args:
      table: this shard's part of the rows.
      tokens: ids in the whole vocabulary.
      axes: mesh axes that the rows are divided over.
    """
    if not axes:
        return table[tokens]
    index, here = _local(tokens, table.shape[0], axes)
    return ax.sum_over(jnp.where(here[:, :, None], table[index], 0), axes)


def cross_entropy(logits: Float[Array, "b s v"], targets: Int[Array, "b s"], axes: tuple[str, ...]) -> Float[Array, "b s"]:
    """In nats, of each target.

    Args:
      logits: float32, of this shard's part of the vocabulary.
      targets: ids in the whole vocabulary.
      axes: mesh axes that the vocabulary is divided over.
    """
    top = lax.stop_gradient(logits.max(-1))
    top = lax.pmax(top, axes) if axes else top
    total = ax.sum_over(jnp.exp(logits - top[:, :, None]).sum(-1), axes)
    index, here = _local(targets, logits.shape[-1], axes) if axes else (targets, True)
    picked = jnp.take_along_axis(logits, index[:, :, None], axis=-1)[:, :, 0]
    return jnp.log(total) + top - ax.sum_over(jnp.where(here, picked, 0), axes)


def _local(ids, size: int, axes: tuple[str, ...]):
    """(ids within this shard's part, whether they are there at all)."""
    index = ids - ax.axis_index(axes) * size
    return jnp.clip(index, 0, size - 1), (index >= 0) & (index < size)
