"""The feed-forward of experts whose rows stand one after another: as one pass over tiles, or as grouped products.

G: experts on this shard, R: rows, d: model width, f: expert width (this shard's part of it).
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moejax import axes as ax
from moejax.feed_forward import NONLINEARITY, Products, act, gradients
from moejax.grouped_matmul import KERNELS, Kernel, default_implementation
from moejax.kernels import tiled_feed_forward as tiled
from moejax.kernels.rows import How, Rows, common
from moejax.remat import HIDDEN

Weights = tuple[Float[Array, "G d f"] | None, Float[Array, "G d f"], Float[Array, "G f d"]]


def flat_feed_forward(
    rows: Float[Array, "R d"],
    group_sizes: Int[Array, "G"],
    row_weight: Float[Array, "R"],
    weights: Weights,
    activation: str,
) -> Float[Array, "R d"]:
    """row_weight * down(act(gate(x)) * up(x)), or row_weight * down(act(up(x))), for each row by its expert's weights.

    Rows past the last group give zeros, and whatever they hold reaches neither the result nor a gradient. The backward
    keeps rows and the products with gate and up.

    Args:
      rows: [R, d], grouped by expert, empty rows last.
      group_sizes: [G], rows of each expert; they add up to at most R.
      row_weight: [R] factors; their gradient needs no output to be kept.
      weights: (gate, up, down); no gate for ungated experts.
      activation: a name from `moejax.feed_forward.NONLINEARITY`.
    """
    gate, up, down = weights
    into = (up,) if gate is None else (gate, up)
    name = default_implementation(rows, up)
    run = _tiled if name == "tiles" else functools.partial(_grouped, KERNELS[name])
    of_rows = Rows(group_sizes, None, rows.shape[0])
    with jax.named_scope("moe/flat_feed_forward"):
        how = How(common(rows.dtype, up.dtype))
        return run(activation, how, *ax.vary_alike((rows, row_weight, into, down, of_rows)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tiled(activation, how, x, row_weight, into, down, rows):
    return tiled.forward(x, into, down, rows, row_weight, functools.partial(act, activation), how, keep=False)[0]


def _tiled_forward(activation, how, x, row_weight, into, down, rows):
    run = functools.partial(act, activation)
    y, *products = tiled.forward(x, into, down, rows, row_weight, run, how, keep=True)
    products = checkpoint_name(tuple(products), HIDDEN)
    return y, (x, row_weight, into, down, rows, products)


def _tiled_backward(activation, how, kept, dy):
    x, row_weight, into, down, rows, products = kept
    kept = (x, (into, down), rows, row_weight, products)
    dx, (d_into, d_down), d_weight = tiled.backward(*kept, dy, functools.partial(act, activation), how)
    return dx, d_weight, d_into, d_down, None


_tiled.defvjp(_tiled_forward, _tiled_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _grouped(kernel: Kernel, activation, how, x, row_weight, into, down, rows):
    hidden, _ = _hidden(kernel, activation, how, x, into, rows, keep=False)
    return kernel.product(hidden, down, rows, row_weight, how)


def _grouped_forward(kernel, activation, how, x, row_weight, into, down, rows):
    hidden, products = _hidden(kernel, activation, how, x, into, rows, keep=True)
    y = kernel.product(hidden, down, rows, row_weight, how)
    return y, (x, row_weight, into, down, rows, checkpoint_name(products, HIDDEN))


def _hidden(kernel, activation, how, x, into, rows, keep):
    """(act of the products with `into`, with `keep` those products too)."""
    if len(into) == 2 and kernel.glu is not None:
        hidden, *products = kernel.glu(x, *into, rows, NONLINEARITY[activation], how, keep)
        return hidden, tuple(products)
    products = tuple(kernel.product(x, matrix, rows, None, how) for matrix in into)
    return act(activation, *products), products


def _grouped_backward(kernel, activation, how, kept, dy):
    x, row_weight, into, down, rows, products = kept
    grouped = Products(
        outer=lambda left, cotangent, dtype: kernel.outer(left, cotangent, rows, None, How(dtype)),
        back=lambda cotangents, matrices: kernel.back(cotangents, matrices, rows, How(x.dtype)),
    )
    weight = jnp.where(rows.live, row_weight, 0)
    # Not in one pass, which takes a quarter more memory and moves 3 to 7% fewer bytes (`python -m benchmarks compiled_layer`,
    # pools on H100, 2026-12-01: 0.73 and 1.52 GiB for 0.58 and 1.25).
    dx, d_weight, d_into, d_down = gradients(activation, "activation_first", (x, weight, into, down, products), dy, grouped)
    return dx, d_weight, d_into, d_down, None


_grouped.defvjp(_grouped_forward, _grouped_backward)
