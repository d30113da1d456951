"""`jax.lax.ragged_dot`, rows of no group masked before and after. Grouped on TPU, elsewhere G times the work."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from moejax.kernels.rows import How, Rows, common, scaled, wide

_BY_SEGMENT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def product(
    x: Shaped[Array, "M _"],
    w: Shaped[Array, "G _ _"],
    rows: Rows,
    scale: Shaped[Array, "R"] | None,
    how: How,
    transpose: bool = False,
    dot: Callable[..., Array] = lax.ragged_dot,
) -> Float[Array, "R _"]:
    """As `tiles.product`; `dot` is called as `jax.lax.ragged_dot`."""
    dtype = common(x.dtype, w.dtype)
    weights = (w.swapaxes(1, 2) if transpose else w).astype(dtype)
    source = rows.read(x).astype(dtype)
    y = dot(source, weights, _sizes(rows), how.precision, preferred_element_type=wide(dtype))
    return jnp.where(rows.live[:, None], scaled(y, scale), 0).astype(how.dtype)


def outer(
    x: Shaped[Array, "M K"],
    g: Shaped[Array, "R N"],
    rows: Rows,
    scale: Shaped[Array, "R"] | None,
    how: How,
    dot: Callable[..., Array] = lax.ragged_dot_general,
) -> Float[Array, "G K N"]:
    """As `tiles.outer`; `dot` is called as `jax.lax.ragged_dot_general`."""
    dtype = common(x.dtype, g.dtype)
    right = jnp.where(rows.live[:, None], scaled(g, scale), 0).astype(dtype)
    left = rows.read(x).astype(dtype)
    result = wide(dtype)
    total = dot(left, right, _sizes(rows), _BY_SEGMENT, how.precision, preferred_element_type=result)
    return total.astype(how.dtype)


def _sizes(rows: Rows):
    return rows.end - rows.start
