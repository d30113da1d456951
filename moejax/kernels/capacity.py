"""One batched product over groups padded to `max_group_size` rows; where a group is larger, tiles.

The sizes are data, so the choice is made on the device, by a `lax.cond`: nothing is ever lost. C: max_group_size.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from moejax.kernels import tiles
from moejax.kernels.rows import How, Rows, dot, scaled, take


def product(
    x: Shaped[Array, "M _"],
    w: Shaped[Array, "G _ _"],
    rows: Rows,
    scale: Shaped[Array, "R"] | None,
    how: How,
    transpose: bool = False,
) -> Float[Array, "R _"]:
    """As `tiles.product`."""

    def padded(x, w, rows, scale):
        part = dot(_pad(x, rows, how), w, (((2,), (2 if transpose else 1,)), ((0,), (0,))), how)
        y = take(part.reshape(-1, part.shape[2]), _slot(rows, how))
        return jnp.where(rows.live[:, None], scaled(y, scale), 0).astype(how.dtype)

    def tiled(x, w, rows, scale):
        return tiles.product(x, w, rows, scale, how, transpose)

    return lax.cond(_fits(rows, how), padded, tiled, x, w, rows, scale)


def outer(
    x: Shaped[Array, "M K"], g: Shaped[Array, "R N"], rows: Rows, scale: Shaped[Array, "R"] | None, how: How
) -> Float[Array, "G K N"]:
    """As `tiles.outer`."""

    def padded(x, g, rows, scale):
        right = take(scaled(g, scale), _source(rows, how))
        return dot(_pad(x, rows, how), right, (((1,), (1,)), ((0,), (0,))), how).astype(how.dtype)

    def tiled(x, g, rows, scale):
        return tiles.outer(x, g, rows, scale, how)

    return lax.cond(_fits(rows, how), padded, tiled, x, g, rows, scale)


def _bound(how: How) -> int:
    assert how.max_group_size is not None, "grouped_matmul calls this implementation with a bound only"
    return how.max_group_size


def _fits(rows: Rows, how: How) -> Bool[Array, ""]:
    return (rows.end - rows.start).max() <= _bound(how)


def _source(rows: Rows, how: How) -> Int[Array, "G C"]:
    """The row in each place of each padded group; R for an empty place."""
    row = rows.start[:, None] + jnp.arange(_bound(how), dtype=jnp.int32)
    return jnp.where(row < rows.end[:, None], row, rows.num_rows)


def _pad(x: Shaped[Array, "M _"], rows: Rows, how: How) -> Shaped[Array, "G C K"]:
    source = _source(rows, how)
    if rows.index is None:
        return take(x, jnp.where(source < rows.num_rows, source, x.shape[0]))
    return take(x, rows.index.at[source].get(mode="fill", fill_value=x.shape[0]))


def _slot(rows: Rows, how: How) -> Int[Array, "R"]:
    """The place of each row among the padded groups; past their end for a row of no group."""
    row = jnp.arange(rows.num_rows, dtype=jnp.int32)
    group = jnp.searchsorted(rows.end, row, side="right", method="compare_all").astype(jnp.int32)
    return group * _bound(how) + row - jnp.where(rows.live, rows.start.at[group].get(mode="clip"), 0)
