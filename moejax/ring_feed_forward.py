"""The feed-forward whose weights stay divided over the embed axes, and tokens over the mlp axes: rings in both products.

d: model width, D: this shard's part of it, f: hidden width (this shard's part of it), r: rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax import axes as ax
from moejax.axes import AxisRules
from moejax.overlapped import DOT, GROUPED, apply, ring
from moejax.remat import HIDDEN
from moejax.ring_sum import split_round

Activation = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class Spread:
    """How a feed-forward is divided over mesh axes.

    Attributes:
      embed: the axes that the model width of the weights is divided over.
      rows: the mlp axes, which divide the hidden width, where they are to divide the rows too; () where all shards have
        the same rows.
      columns: the mlp axes, where the result is to be in parts, its columns in the order of `moejax.ring_sum`: partial sums.
    """

    embed: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


def ring_feed_forward(
    rows: Float[Array, "... r d"],
    weights: tuple[Float[Array, "... D f"] | None, Float[Array, "... D f"], Float[Array, "... f D"]],
    act: Activation,
    spread: Spread,
    *,
    row_weight: Float[Array, "... r"] | None = None,
    group_sizes: Int[Array, "e"] | None = None,
):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) where gated, in the dtype of the rows. Per shard.

    While one part of the weights is multiplied the next ones are on their way round the embed axes; so are, round the mlp
    axes, the next rows for the first product and the partial sums of the second. Its backward keeps rows, weights and
    the first product's result, and computes the activation again. Gradients of weights are summed in their own dtype.

    Args:
      rows: [..., r, d]; where mlp axes divide them, each shard's own.
      weights: gate [..., D, f] or None, up [..., D, f], down [..., f, D].
      act: elementwise.
      spread: the axes.
      row_weight: [..., r] factors of the result's rows, whose gradient needs no result to be kept; for undivided rows.
      group_sizes: [e] for rows of all experts in one array [R, d], grouped by expert; for undivided rows.

    Returns:
      [..., r, d]; with `spread.columns` a tuple of its parts.
    """
    gate, up, down = weights
    base = DOT if group_sizes is None else GROUPED
    into = ring(spread.embed, "w", "inner", ring(spread.rows, "x", "rows", base))
    out_of = ring(spread.embed, "w", "columns", ring(spread.rows, "y", "rows", base))
    wide = up if gate is None else jnp.concatenate([gate, up], -1)

    @jax.checkpoint
    def second(product, row_weight, down):
        hidden = _hidden(product, row_weight, act, gate is not None)
        if not spread.columns:
            return apply(out_of, hidden, down, group_sizes)
        parts: Any = split_round(down, spread.columns)
        return tuple(apply(out_of, hidden, part, group_sizes) for part in parts)

    product = checkpoint_name(apply(into, rows, wide, group_sizes), HIDDEN)
    return second(product, row_weight, down)


def _hidden(product, row_weight, act: Activation, gated: bool):
    parts = jnp.split(product, 2, axis=-1) if gated else [product]
    hidden = act(parts[0]) * parts[1] if gated else act(product)
    if row_weight is None:
        return hidden
    return (hidden.astype(jnp.float32) * row_weight[..., None]).astype(hidden.dtype)


def feed_forward_over_mesh(
    x: Float[Array, "b s d"],
    weights: tuple[Float[Array, "d f"] | None, Float[Array, "d f"], Float[Array, "f d"]],
    act: Activation,
    rules: AxisRules,
) -> Float[Array, "b s d"]:
    """`ring_feed_forward` of whole arrays, laid out by the rules over the current mesh's Auto axes.

    Args:
      x: [b, s, d]. Batches and sequences that the mesh does not divide are padded on the way.
      weights: gate [d, f] or None, up [d, f], down [f, d].
      act: elementwise.
      rules: logical axes to mesh axes; tokens must be sharded over the embed axes (`AxisRules.resolve`).

    Returns:
      [b, s, d], sequences divided over the mlp axes: the sum with x before it is gathered costs no more than x's own.
    """
    mesh = ax.current_mesh()
    axes = rules.resolve(mesh)

    def shard(x, weights):
        rows = ring_feed_forward(x.reshape(-1, x.shape[-1]), weights, act, Spread(axes.embed, axes.mlp))
        return rows.reshape(x.shape)

    if not axes.embed + axes.mlp:
        return shard(x, weights)
    pad = [(0, -x.shape[0] % ax.mesh_size(mesh, axes.tokens)), (0, -x.shape[1] % ax.mesh_size(mesh, axes.mlp)), (0, 0)]
    wide, narrow, tokens = P(axes.embed, axes.mlp), P(axes.mlp, axes.embed), P(axes.tokens, axes.mlp)
    specs = tokens, (None if weights[0] is None else wide, wide, narrow)
    return jax.shard_map(shard, in_specs=specs, out_specs=tokens)(jnp.pad(x, pad), weights)[: x.shape[0], : x.shape[1]]
