"""The feed-forward of experts whose rows stand one after another: as one pass over tiles, or as grouped products.

G: experts on this shard, R: rows, d: model width, f: expert width (this shard's part of it).
"""

import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moejax import axes as ax
from moejax.grouped_matmul import default_implementation, grouped_glu, grouped_matmul
from moejax.kernels import tiled_feed_forward as tiled
from moejax.kernels.rows import How, Rows, common
from moejax.remat import HIDDEN

Weights = tuple[Float[Array, "G d f"] | None, Float[Array, "G d f"], Float[Array, "G f d"]]


def flat_feed_forward(
    rows: Float[Array, "R d"],
    group_sizes: Int[Array, "G"],
    row_weight: Float[Array, "R"],
    weights: Weights,
    nonlinearity: Callable[[Array], Array],
) -> Float[Array, "R d"]:
    """row_weight * down(act(gate(x)) * up(x)), or row_weight * down(act(up(x))), for each row by its expert's weights.

    Rows past the last group give zeros, and whatever they hold reaches neither the result nor a gradient. The backward
    keeps rows and the products with gate and up.

    Args:
      rows: [R, d], grouped by expert, empty rows last.
      group_sizes: [G], rows of each expert; they add up to at most R.
      row_weight: [R] factors; their gradient needs no output to be kept.
      weights: (gate, up, down); no gate for ungated experts.
      nonlinearity: elementwise, finite at 0; the same object in every call.
    """
    gate, up, down = weights
    if default_implementation(rows, up) == "tiles":
        into = (up,) if gate is None else (gate, up)
        how = How(common(rows.dtype, up.dtype))
        of_rows = Rows(group_sizes, None, rows.shape[0])
        with jax.named_scope("moe/tiled_feed_forward"):
            return _tiled(nonlinearity, how, *ax.vary_alike((rows, row_weight, into, down, of_rows)))
    if gate is None:
        hidden = nonlinearity(checkpoint_name(grouped_matmul(rows, up, group_sizes), HIDDEN))
    else:
        hidden = grouped_glu(rows, gate, up, group_sizes, nonlinearity)
    return grouped_matmul(hidden, down, group_sizes, row_scale=row_weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tiled(nonlinearity, how, x, row_weight, into, down, rows):
    return tiled.forward(x, into, down, rows, row_weight, _act(nonlinearity), how, keep=False)[0]


def _forward(nonlinearity, how, x, row_weight, into, down, rows):
    y, *products = tiled.forward(x, into, down, rows, row_weight, _act(nonlinearity), how, keep=True)
    products = checkpoint_name(tuple(products), HIDDEN)
    return y, (x, row_weight, into, down, rows, products)


def _backward(nonlinearity, how, kept, dy):
    x, row_weight, into, down, rows, products = kept
    kept = (x, (into, down), rows, row_weight, products)
    dx, (d_into, d_down), d_weight = tiled.backward(*kept, dy, _act(nonlinearity), how)
    return dx, d_weight, d_into, d_down, None


_tiled.defvjp(_forward, _backward)


def _act(nonlinearity):
    return lambda first, *others: nonlinearity(first) * others[0] if others else nonlinearity(first)
