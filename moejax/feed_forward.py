"""The feed-forward of experts over their rows, with a backward of its own: what it keeps, and in which order it works.

e: experts on this shard, r: rows of an expert, d: model width, f: expert width (this shard's part of it).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moejax import axes as ax
from moejax.kernels.rows import weighed
from moejax.remat import HIDDEN


def _relu2(h):
    return jnp.square(jax.nn.relu(h))


NONLINEARITY = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu, "gelu": jax.nn.gelu, "relu2": _relu2}


def feed_forward(
    rows: Float[Array, "*e r d"],
    weight: Float[Array, "*e r"] | None,
    gate: Float[Array, "*e d f"] | None,
    up: Float[Array, "*e d f"],
    down: Float[Array, "*e f d"],
    activation: str,
) -> Float[Array, "*e r d"]:
    """down(weight * act(up(x))), or down(weight * act(gate(x)) * up(x)) where gated, row by row.

    Products are in the dtype of the rows, whatever that of the weights; their gradients are summed in their own. The backward
    keeps rows, weights and the products with gate and up, and computes the activation again.

    Args:
      rows: [e, r, d], or [r, d] of one expert.
      weight: [e, r] float32 or None. A row of weight zero gives exact zeros and adds nothing to any weights' gradient,
        whatever token it holds. The gradient of a weight is <act, dy down^T>: no output is kept for it.
      gate: [e, d, f], None for ungated experts.
      up: [e, d, f].
      down: [e, f, d].
      activation: a name from `NONLINEARITY`.
    """
    into = (up,) if gate is None else (gate, up)
    return _feed_forward(activation, _order(down), *ax.vary_alike((rows, weight, into, down)))


def _order(down) -> str:
    """How the backward works: "one_pass" makes activation and gradients together, "activation_first" has it gone sooner.

    "expert_by_expert", on CPUs, is the latter for one expert after another: what is in between stays small. Temporaries of a
    layer of 4,096 tokens, d 256, f 512, 8 experts and 2 a token: 95 MB in place of 135 (2026-12-01).

    Compiled for H100, f 14336 and d 4096: one pass 8.05 GB moved and 1.25 GiB, the other 8.63 and 0.98; f 1024 and
    d 2048: 5.42 and 0.71, 5.58 and 0.63. For v5p one pass takes 54.3 Mcycles and 1.92 GiB, 9.67 and 0.67; the other
    52.8 and 1.37, 9.29 and 0.67. (2026-12-01, `python -m benchmarks compiled_layer`)
    """
    if ax.platform() == "cpu":
        return "expert_by_expert"
    return "one_pass" if ax.platform() == "gpu" and down.shape[-2] > down.shape[-1] else "activation_first"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _feed_forward(activation, order, rows, weight, into, down):
    return _forward(activation, order, rows, weight, into, down)[0]


def _forward(activation, order, rows, weight, into, down):
    products = tuple(checkpoint_name(rows @ matrix.astype(rows.dtype), HIDDEN) for matrix in into)
    return hidden_of(activation, products, weight) @ down.astype(rows.dtype), (rows, weight, into, down, products)


def _backward(activation, order, kept, dy):
    if order == "expert_by_expert":
        if dy.ndim == 3:
            return lax.map(lambda one: gradients(activation, "activation_first", one[0], one[1], BATCHED), (kept, dy))
        order = "activation_first"
    return gradients(activation, order, kept, dy, BATCHED)


@dataclasses.dataclass(frozen=True)
class Products:
    """The two products that a backward is made of.

    Attributes:
      outer: (rows [..., a], cotangent [..., b], dtype) -> each expert's rows.T @ cotangent, in `dtype` and summed in no
        narrower one.
      back: (cotangents, matrices) -> the sum of each cotangent @ its matrix.T.
    """

    outer: Callable[..., Array]
    back: Callable[..., Array]


def gradients(activation: str, order: str, kept, dy: Array, products_of: Products):
    """The gradients of (rows, weight, into, down): of matrices first, so that much is gone when that of rows is made.

    Args:
      activation: a name from `NONLINEARITY`.
      order: "one_pass" or "activation_first".
      kept: (rows, weight, into, down, products), the last those of rows with each of `into`.
      dy: the gradient of the result.
      products_of: how rows and matrices are multiplied.
    """
    rows, weight, into, down, (first, *others) = kept
    # Behind the barrier, so that XLA computes the activation again instead of keeping it from the forward. What has been
    # through one is not overwritten in place (H100), so it holds one of the products.
    first, dy = lax.optimization_barrier((first, dy))
    products = (first, *others)
    hidden = hidden_of(activation, products, weight)
    if order == "one_pass":
        d_hidden = products_of.back((dy,), (down,))
        d_down = products_of.outer(hidden, dy, down.dtype)
    else:
        d_down = products_of.outer(hidden, dy, down.dtype)
        dy, d_down = lax.optimization_barrier((dy, d_down))
        d_hidden = products_of.back((dy,), (down,))
    d_products, d_weight = d_hidden_of(activation, products, weight, d_hidden)
    d_products, d_weight, d_down = lax.optimization_barrier((d_products, d_weight, d_down))
    d_into = tuple(products_of.outer(rows, part, matrix.dtype) for part, matrix in zip(d_products, into, strict=True))
    d_products, d_into = lax.optimization_barrier((d_products, d_into))
    return products_of.back(d_products, into), d_weight, d_into, d_down


_feed_forward.defvjp(_forward, _backward)


def act(activation: str, *products: Array) -> Array:
    """The activation of the products with gate and up, or of the only one."""
    hidden = NONLINEARITY[activation](products[0])
    return hidden * products[1] if len(products) == 2 else hidden


def hidden_of(activation, products, weight):
    """weight * act(products), in the dtype of the products."""
    return weighed(act(activation, *_wide(products)), weight).astype(products[0].dtype)


def d_hidden_of(activation, products, weight, d_hidden):
    """The gradients of the products and of the weights, in float32."""
    hidden, pull = jax.vjp(functools.partial(act, activation), *_wide(products))
    d_hidden = _wide(d_hidden)
    d_products = tuple(weighed(part, weight) for part in pull(d_hidden))
    d_products = tuple(part.astype(products[0].dtype) for part in d_products)
    return d_products, None if weight is None else (hidden * d_hidden).sum(-1).astype(weight.dtype)


def _wide(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)


def _sum_rows(rows, cotangent, dtype):
    wide = jnp.promote_types(rows.dtype, dtype)
    return jnp.matmul(jnp.swapaxes(rows, -1, -2), cotangent, preferred_element_type=wide).astype(dtype)


def _back(cotangents, matrices):
    total = _back_one(cotangents[0], matrices[0])
    for cotangent, matrix in zip(cotangents[1:], matrices[1:], strict=True):
        total, cotangent = lax.optimization_barrier((total, cotangent))  # one after the other, so that one is gone
        total += _back_one(cotangent, matrix)
    return total


def _back_one(cotangent, matrix):
    return cotangent @ jnp.swapaxes(matrix, -1, -2).astype(cotangent.dtype)


BATCHED = Products(_sum_rows, _back)
