"""The grouped product said plainly: every group's weights times every row, kept where the row is the group's.

G times the work of the others, any dtype; its gradients are jax's own.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from moejax.kernels.rows import How, Rows, scaled, wide, zeros


def grouped_product(
    x: Shaped[Array, "M K"], w: Shaped[Array, "G K N"], rows: Rows, scale: Shaped[Array, "R"] | None, how: How
) -> Shaped[Array, "R N"]:
    """[R, N]: x[row] @ w[g] for each row of group g, times its scale; zeros for rows of no group."""
    source = rows.read(x)
    dtype = wide(how.dtype) if jnp.issubdtype(how.dtype, jnp.floating) else how.dtype

    def add(total, group):
        weights, start, end = group
        row = jnp.arange(rows.num_rows, dtype=jnp.int32)
        mine = ((row >= start) & (row < end))[:, None]
        part = jnp.matmul(source, weights, precision=how.precision, preferred_element_type=dtype)
        return total + jnp.where(mine, part, 0), None

    empty = zeros((rows.num_rows, w.shape[2]), dtype, x)
    y, _ = lax.scan(add, empty, (w, rows.start, rows.end))
    scale = None if scale is None else jnp.where(rows.live, scale, 0)
    return scaled(y, scale).astype(how.dtype)
