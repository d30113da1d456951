"""grouped_matmul and grouped_glu: rows of each group times its own weights. One meaning, several implementations.

G: groups (experts), M: rows of x, R: rows of the result, K: width of x, N: width of the result.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Shaped

from moejax import axes as ax
from moejax.checks import one_of, positive
from moejax.kernels import capacity, pallas_gpu, pallas_tpu, ragged, reference, tiles, tokamax
from moejax.kernels.choice import choose
from moejax.kernels.rows import How, Rows, common, scaled, sum_into, wide
from moejax.kernels.tile_map import ORDERS
from moejax.remat import HIDDEN


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An implementation: `product` forward and for the gradient of x, `outer` for that of w (see `moejax.kernels`).

    `glu` does both products of a gated feed-forward in one pass, where there is such a kernel, and `joined` the gradient of
    its rows: the sum of two products, of which neither is stored.
    """

    product: Callable[..., Array]
    outer: Callable[..., Array]
    glu: Callable[..., tuple[Array, ...]] | None = None
    joined: Callable[..., Array] | None = None

    def back(self, cotangents, weights, rows: Rows, how: How) -> Array:
        """[R, K]: the sum of each cotangent [R, N] @ its weights[g].T [G, K, N]; rows without an index."""
        if len(weights) == 2 and self.joined is not None:
            return self.joined(cotangents, weights, rows, how)
        parts = [self.product(dy, w, rows, None, how, transpose=True) for dy, w in zip(cotangents, weights, strict=True)]
        return functools.reduce(jnp.add, parts)


KERNELS = {
    "tiles": Kernel(tiles.product, tiles.outer, tiles.glu),
    "capacity": Kernel(capacity.product, capacity.outer),
    "pallas_tpu": Kernel(pallas_tpu.product, pallas_tpu.outer, pallas_tpu.glu, pallas_tpu.joined),
    "pallas_gpu": Kernel(pallas_gpu.product, pallas_gpu.outer, pallas_gpu.glu, pallas_gpu.joined),
    "ragged_dot": Kernel(ragged.product, ragged.outer),
    "tokamax": Kernel(tokamax.product, tokamax.outer),
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
    group_order: str | None = None,
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
      implementation: a name from `IMPLEMENTATIONS`; None chooses by backend and shape (see `moejax.kernels.choice`).
      max_group_size: for "capacity": the rows that each group is padded to. Where a group has more, the product is done
        as by "tiles". With no implementation named, "capacity" is taken where the padding is small.
      group_order: for "pallas_gpu": which groups its grid begins with, a name from `moejax.kernels.tile_map.ORDERS`.

    Returns:
      [R, N].

    Raises:
      ValueError: for an unknown implementation, shapes that do not fit, dtypes that it does not take, or group
        sizes that exceed R (where they are not traced).
      NotImplementedError: where the named implementation cannot serve the case.
    """
    _check(x, w, group_sizes, token_index, row_scale)
    rows = _rows(x, group_sizes, token_index)
    name = _name(implementation, x, w, rows, max_group_size)
    _check_order(group_order, name)
    dtype = jnp.dtype(preferred_element_type or common(x.dtype, w.dtype))
    how = How(dtype, precision, max_group_size, group_order or ORDERS[0])
    x, w, row_scale, rows = ax.vary_alike((x, w, row_scale, rows))
    with jax.named_scope("moe/grouped_matmul"):
        if name == "reference":
            return reference.grouped_product(x, w, rows, row_scale, how)
        return _product(KERNELS[name], how, x, w, row_scale, rows)


def default_implementation(x: Shaped[Array, "R K"], w: Shaped[Array, "G K N"]) -> str:
    """The implementation that `grouped_matmul` and `grouped_glu` take for these where none is named."""
    return _name(None, x, w, Rows(jnp.zeros(w.shape[0], jnp.int32), None, x.shape[0]), None)


def grouped_part(
    x: Shaped[Array, "R _"],
    w: Shaped[Array, "G _ _"],
    sizes: Shaped[Array, "G"],
    first: Shaped[Array, ""] | None = None,
    *,
    transpose: bool = False,
) -> Shaped[Array, "R _"]:
    """`grouped_matmul` of the rows from `first` on, zeros for the others. Not differentiable itself.

    Args:
      x: [R, K]; with `transpose` [R, N].
      w: [G, K, N], of the dtype of x.
      sizes: [G].
      first: the first row of group 0; None: 0.
      transpose: x @ w[g].T.

    Returns:
      [R, N] in the dtype of x; with `transpose` [R, K].
    """
    name = choose(ax.platform(), (str(x.dtype), str(w.dtype)), (x.size, w.size, x.shape[0] * max(w.shape[1:])), None)
    rows = Rows(sizes, None, x.shape[0], first)
    with jax.named_scope("moe/grouped_matmul"):
        return KERNELS[name].product(*ax.vary_alike((x, w, rows)), None, How(jnp.dtype(x.dtype)), transpose)


def grouped_outer(
    x: Shaped[Array, "R K"],
    dy: Shaped[Array, "R N"],
    group_sizes: Shaped[Array, "G"],
    preferred_element_type: Any = None,
    first: Shaped[Array, ""] | None = None,
) -> Shaped[Array, "G K N"]:
    """x.T @ dy over the rows of each group: the gradient of w in `grouped_matmul`. Not differentiable itself.

    Args:
      x: [R, K].
      dy: [R, N].
      group_sizes: [G].
      preferred_element_type: dtype of the result; None: the wider of x's and dy's.
      first: the first row of group 0; None: 0.

    Returns:
      [G, K, N], zeros for an empty group.
    """
    rows = Rows(group_sizes, None, x.shape[0], first)
    result = group_sizes.shape[0] * x.shape[1] * dy.shape[1]
    name = choose(ax.platform(), (str(x.dtype), str(dy.dtype)), (x.size, dy.size, result), None)
    how = How(jnp.dtype(preferred_element_type or common(x.dtype, dy.dtype)))
    with jax.named_scope("moe/grouped_outer"):
        return KERNELS[name].outer(*ax.vary_alike((x, dy, rows)), None, how)


def grouped_glu(
    x: Shaped[Array, "..."],
    gate: Shaped[Array, "..."],
    up: Shaped[Array, "..."],
    group_sizes: Shaped[Array | np.ndarray, "..."],
    nonlinearity: Callable[[Array], Array] = jax.nn.silu,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    token_index: Shaped[Array | np.ndarray, "..."] | None = None,
    implementation: str | None = None,
    max_group_size: int | None = None,
) -> Shaped[Array, "R N"]:
    """nonlinearity(x @ gate[g]) * (x @ up[g]) for the rows of each group: the first half of a gated feed-forward.

    The Pallas kernels do it in one pass over x, and without gradients neither product is ever stored.

    Args:
      x: [M, K].
      gate: [G, K, N].
      up: [G, K, N], of gate's dtype.
      group_sizes: [G].
      nonlinearity: elementwise, with nonlinearity(0) finite; a plain function, the same object in every call.
      precision: this and the others as in `grouped_matmul`.

    Returns:
      [R, N].

    Raises:
      ValueError: where gate and up differ in shape or dtype, and as `grouped_matmul`.
    """
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(f"gate {gate.dtype}{gate.shape} and up {up.dtype}{up.shape}: need one shape and dtype")
    _check(x, gate, group_sizes, token_index, None)
    rows = _rows(x, group_sizes, token_index)
    name = _name(implementation, x, gate, rows, max_group_size)
    if name not in KERNELS or KERNELS[name].glu is None:
        bound = max_group_size if name == "capacity" else None
        options = {"token_index": token_index, "implementation": name, "max_group_size": bound}
        product = lambda w: checkpoint_name(
            grouped_matmul(x, w, group_sizes, precision, preferred_element_type, **options), HIDDEN
        )
        return nonlinearity(product(gate)) * product(up)
    how = How(jnp.dtype(preferred_element_type or common(x.dtype, gate.dtype)), precision)
    x, gate, up, rows = ax.vary_alike((x, gate, up, rows))
    with jax.named_scope("moe/grouped_glu"):
        return _glu(KERNELS[name], nonlinearity, how, x, gate, up, rows)


def _rows(x, group_sizes, token_index) -> Rows:
    num_rows = x.shape[0] if token_index is None else token_index.shape[0]
    return Rows(jnp.asarray(group_sizes), None if token_index is None else jnp.asarray(token_index), num_rows)


def _name(implementation, x, w, rows, max_group_size) -> str:
    """The implementation asked for, or the table's; ValueError where that is none, or does not take what it gets."""
    if max_group_size is not None:
        positive("max_group_size", max_group_size)
    name = implementation
    if name is None:
        padding = None if max_group_size is None else w.shape[0] * max_group_size / max(1, rows.num_rows)
        result = rows.num_rows * max(w.shape[1:])  # or the gradient of the rows that are read
        name = choose(ax.platform(), (str(x.dtype), str(w.dtype)), (x.size, w.size, result), padding)
    else:
        one_of("implementation", name, IMPLEMENTATIONS)
        if (max_group_size is None) == (name == "capacity"):
            raise ValueError(f"max_group_size={max_group_size!r} with {name!r}: 'capacity' needs it, no other takes it")
    for label, dtype in (("x", x.dtype), ("w", w.dtype)):
        if name != "reference" and not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"{label} of dtype {dtype}: {name!r} needs floating point; 'reference' takes any dtype")
    return name


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(kernel: Kernel, how: How, x, w, scale, rows):
    return kernel.product(x, w, rows, scale, how)


def _product_fwd(kernel, how, x, w, scale, rows):
    return kernel.product(x, w, rows, scale, how), (x, w, scale, rows)


def _product_bwd(kernel, how, residuals, dy):
    x, w, scale, rows = residuals
    d_rows = _back(kernel, how, x, (w,), rows, (dy,))
    dw = kernel.outer(x, dy, rows, scale, dataclasses.replace(how, dtype=w.dtype))
    # Behind a barrier, so that nothing after this has to keep dy for a gradient of weights that nobody waits for.
    d_rows, dw = lax.optimization_barrier((d_rows, dw))
    d_scale = None
    if scale is not None:
        # <y, dy> before the scale, as <x, dy @ w.T>: so y need not be kept.
        dtype = wide(d_rows.dtype)
        d_scale = (rows.read(x).astype(dtype) * d_rows.astype(dtype)).sum(1).astype(scale.dtype)
        d_rows = jnp.where(rows.live[:, None], scaled(d_rows, scale), 0)
    return _to_x(d_rows, x, rows), dw, d_scale, None


def _back(kernel, how, x, weights, rows, cotangents):
    """The gradient of the rows that the products read."""
    in_place = dataclasses.replace(rows, index=None)
    return kernel.back(cotangents, weights, in_place, dataclasses.replace(how, dtype=_row_dtype(x)))


def _row_dtype(x):
    """Of the gradient of rows: numbers of one byte are too coarse to be added up or multiplied again."""
    return x.dtype if x.dtype.itemsize > 1 else wide(x.dtype)


def _to_x(d_rows, x, rows):
    """The gradient of x from that of the rows read from it."""
    return (d_rows if rows.index is None else sum_into(d_rows, rows.index, x.shape[0])).astype(x.dtype)


_product.defvjp(_product_fwd, _product_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _glu(kernel: Kernel, nonlinearity, how: How, x, gate, up, rows):
    assert kernel.glu is not None, "grouped_glu does the products of a kernel without one apart"
    return kernel.glu(x, gate, up, rows, nonlinearity, how, keep=False)[0]


def _glu_fwd(kernel, nonlinearity, how, x, gate, up, rows):
    # One kernel makes all three, so one that is not kept would have it run again.
    y, gated, plain = checkpoint_name(kernel.glu(x, gate, up, rows, nonlinearity, how, keep=True), HIDDEN)
    return y, (x, gate, up, gated, plain, rows)


def _glu_bwd(kernel, nonlinearity, how, residuals, dy):
    x, gate, up, gated, plain, rows = residuals
    _, pull = jax.vjp(lambda gated, plain: nonlinearity(gated) * plain, gated, plain)
    d_gated, d_plain = pull(dy)
    outer = lambda g: kernel.outer(x, g, rows, None, dataclasses.replace(how, dtype=gate.dtype))
    # The weights' gradients first: x is gone when its own gradient is made.
    dy, dw = lax.optimization_barrier(((d_gated, d_plain), (outer(d_gated), outer(d_plain))))
    return _to_x(_back(kernel, how, x, (gate, up), rows, dy), x, rows), *dw, None


_glu.defvjp(_glu_fwd, _glu_bwd)


def _check(x, w, group_sizes, token_index, row_scale):
    """Raises ValueError unless shapes and kinds fit together."""
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or not w.shape[0]:
        raise ValueError(f"x of shape {x.shape}, w of shape {w.shape}: needs [M, K] and [G, K, N], G at least 1")
    if group_sizes.shape != w.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes {group_sizes.dtype}{group_sizes.shape}: needs integers of shape {w.shape[:1]}")
    if token_index is not None and (token_index.ndim != 1 or not jnp.issubdtype(token_index.dtype, jnp.integer)):
        raise ValueError(f"token_index {token_index.dtype}{token_index.shape}: needs integers of shape [R]")
    num_rows = x.shape[0] if token_index is None else token_index.shape[0]
    if row_scale is not None and (row_scale.shape != (num_rows,) or not jnp.issubdtype(row_scale.dtype, jnp.floating)):
        raise ValueError(f"row_scale {row_scale.dtype}{row_scale.shape}: needs floating point of shape {(num_rows,)}")
    _check_sizes(group_sizes, num_rows)


def _check_sizes(group_sizes, num_rows):
    """Raises ValueError for sizes that are known here, and impossible."""
    if isinstance(group_sizes, Tracer) or not getattr(group_sizes, "is_fully_addressable", True):
        return
    sizes = np.asarray(group_sizes)
    if (sizes < 0).any():
        raise ValueError(f"group_sizes has {sizes.min()} for group {sizes.argmin()}: needs 0 or more")
    if sizes.sum(dtype=np.int64) > num_rows:
        raise ValueError(f"group_sizes add up to {sizes.sum(dtype=np.int64)}: needs at most the {num_rows} rows")


def _check_order(group_order, name):
    """Raises ValueError for an order that is none, or that the implementation has not."""
    if group_order is None:
        return
    one_of("group_order", group_order, ORDERS)
    if name != "pallas_gpu":
        raise ValueError(f"group_order={group_order!r} with {name!r}: only 'pallas_gpu' has an order to choose")
