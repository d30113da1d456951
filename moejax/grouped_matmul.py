"""grouped_matmul: rows of each group times the group's own weights. One meaning, several implementations.

G: groups (experts), M: rows of x, R: rows of the result, K: width of x, N: width of the result.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from moejax import axes as ax
from moejax.config import one_of, positive
from moejax.kernels import capacity, pallas_gpu, pallas_tpu, ragged, reference, tiles
from moejax.kernels.rows import How, Rows, common, scaled, sum_into, wide


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An implementation: `product` forward and for the gradient of x, `outer` for that of w (see `moejax.kernels`)."""

    product: Callable[..., Array]
    outer: Callable[..., Array]


KERNELS = {
    "tiles": Kernel(tiles.product, tiles.outer),
    "capacity": Kernel(capacity.product, capacity.outer),
    "pallas_tpu": Kernel(pallas_tpu.product, pallas_tpu.outer),
    "pallas_gpu": Kernel(pallas_gpu.product, pallas_gpu.outer),
    "ragged_dot": Kernel(ragged.product, ragged.outer),
}
IMPLEMENTATIONS = ("reference", *KERNELS)


def grouped_matmul(
    x: Shaped[Array, "..."],
    w: Shaped[Array, "..."],
    group_sizes: Shaped[Array | np.ndarray, "..."],
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    token_index: Shaped[Array | np.ndarray, "..."] | None = None,
    row_scale: Shaped[Array, "..."] | None = None,
    implementation: str | None = None,
    max_group_size: int | None = None,
) -> Shaped[Array, "R N"]:
    """Rows of x times the weights of their group, as `jax.lax.ragged_dot` means it: y[r] = x[r] @ w[g], r in group g.

    Rows of group g follow those of group g - 1; rows past the last group give zeros, and whatever they hold (NaN too)
    reaches neither the result nor a gradient. Differentiable in x, w and row_scale; sums are kept in float32, and the
    gradient of an empty group's weights is exactly zero.

    Args:
      x: [M, K], floating point ("reference": any dtype).
      w: [G, K, N].
      group_sizes: [G] integers, rows of each group; may be traced. They add up to at most R.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the result; None: the wider of x's and w's.
      token_index: [R] integers: row r reads x[token_index[r]] in place; M for an empty row, which gives zeros. None: R
        is M, and row r reads x[r].
      row_scale: [R] floating point factors of the result's rows.
      implementation: a name from `IMPLEMENTATIONS`; None chooses by backend and shape (see `choose`).
      max_group_size: for "capacity": rows that each group is padded to. Larger groups take another way, at its price.

    Returns:
      [R, N].

    Raises:
      ValueError: for an unknown implementation, shapes that do not fit, dtypes that it does not take, or group
        sizes that exceed R (where they are not traced).
      NotImplementedError: where the named implementation cannot serve the case.
    """
    _check(x, w, group_sizes, token_index, row_scale)
    num_rows = x.shape[0] if token_index is None else token_index.shape[0]
    _check_sizes(group_sizes, num_rows)
    name = choose(max_group_size) if implementation is None else implementation
    one_of("implementation", name, IMPLEMENTATIONS)
    _check_options(name, x, w, max_group_size)
    how = How(jnp.dtype(preferred_element_type or common(x.dtype, w.dtype)), precision, max_group_size)
    rows = Rows(jnp.asarray(group_sizes), None if token_index is None else jnp.asarray(token_index), num_rows)
    x, w, row_scale, rows = _alike((x, w, row_scale, rows))
    with jax.named_scope("moe/grouped_matmul"):
        if name == "reference":
            return reference.grouped_product(x, w, rows, row_scale, how)
        return _product(KERNELS[name], how, x, w, row_scale, rows)


def choose(max_group_size: int | None = None) -> str:
    """The implementation for this backend: "ragged_dot" on TPU, "tiles" elsewhere; "capacity" where given a bound."""
    if max_group_size is not None:
        return "capacity"
    return "ragged_dot" if jax.default_backend() == "tpu" else "tiles"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(kernel: Kernel, how: How, x, w, scale, rows):
    return kernel.product(x, w, rows, scale, how)


def _product_fwd(kernel, how, x, w, scale, rows):
    return kernel.product(x, w, rows, scale, how), (x, w, scale, rows)


def _product_bwd(kernel, how, residuals, dy):
    x, w, scale, rows = residuals
    in_place = dataclasses.replace(rows, index=None)
    # Numbers of one byte are too coarse to be added up or multiplied again.
    dtype = x.dtype if x.dtype.itemsize > 1 else wide(x.dtype)
    d_rows = kernel.product(dy, w, in_place, None, dataclasses.replace(how, dtype=dtype), transpose=True)
    d_scale = None
    if scale is not None:
        # <y, dy> before the scale, as <x, dy @ w.T>: so y need not be kept.
        d_scale = (rows.read(x).astype(wide(dtype)) * d_rows.astype(wide(dtype))).sum(1).astype(scale.dtype)
        d_rows = jnp.where(rows.live[:, None], scaled(d_rows, scale), 0)
    dx = d_rows if rows.index is None else sum_into(d_rows, rows.index, x.shape[0])
    dw = kernel.outer(x, dy, rows, scale, dataclasses.replace(how, dtype=w.dtype))
    return dx.astype(x.dtype), dw, d_scale, None


_product.defvjp(_product_fwd, _product_bwd)


def _alike(tree):
    """All of it marked as varying over the manual mesh axes that any of it does; there gradients add up."""
    names = frozenset().union(*(ax.varying(leaf) for leaf in jax.tree.leaves(tree)))
    return ax.vary_over(tree, sorted(names))


def _check(x, w, group_sizes, token_index, row_scale):
    """Raises ValueError unless shapes and kinds fit together."""
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or not w.shape[0]:
        raise ValueError(
            f"x of shape {x.shape} and w of shape {w.shape}: needs [M, K] and [G, K, N] with G of at least 1"
        )
    if group_sizes.shape != w.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes {group_sizes.dtype}{group_sizes.shape}: needs integers of shape {w.shape[:1]}")
    if token_index is not None and (token_index.ndim != 1 or not jnp.issubdtype(token_index.dtype, jnp.integer)):
        raise ValueError(f"token_index {token_index.dtype}{token_index.shape}: needs integers of shape [R]")
    num_rows = x.shape[0] if token_index is None else token_index.shape[0]
    if row_scale is not None and (row_scale.shape != (num_rows,) or not jnp.issubdtype(row_scale.dtype, jnp.floating)):
        raise ValueError(f"row_scale {row_scale.dtype}{row_scale.shape}: needs floating point of shape {(num_rows,)}")


def _check_sizes(group_sizes, num_rows):
    """Raises ValueError for sizes that are known, and impossible."""
    if isinstance(group_sizes, jax.core.Tracer):
        return
    sizes = np.asarray(group_sizes)
    if (sizes < 0).any():
        raise ValueError(f"group_sizes has {sizes.min()} for group {sizes.argmin()}: needs 0 or more")
    if sizes.sum(dtype=np.int64) > num_rows:
        raise ValueError(f"group_sizes add up to {sizes.sum(dtype=np.int64)}: needs at most the {num_rows} rows")


def _check_options(name, x, w, max_group_size):
    """Raises ValueError for what the implementation does not take."""
    for label, dtype in (("x", x.dtype), ("w", w.dtype)):
        if name != "reference" and not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"{label} of dtype {dtype}: {name!r} needs floating point; 'reference' takes any dtype")
    if (max_group_size is None) == (name == "capacity"):
        raise ValueError(
            f"max_group_size={max_group_size!r} with {name!r}: 'capacity' needs it, and nothing else takes it"
        )
    if max_group_size is not None:
        positive("max_group_size", max_group_size)
