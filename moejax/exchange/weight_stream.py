"""Weight streaming (FSE-DP): tokens stay where they are and the expert shards go round the ring.

No all-to-all and no padding on the wire; it moves (s - 1) shards of weights a pass, whatever the number of tokens.
s: shards along the expert axes, e: experts of a shard, r: rows per expert of this shard's tokens, d: model width.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.axes import axis_index, axis_size
from moejax.dispatch import combine, dispatch
from moejax.exchange.wire import Wire


def weight_stream(x, plan, experts, wire: Wire):
    """x [t, d] -> (y [t, d], rows worked on here), dropping what the plan drops."""
    with jax.named_scope("moe/dispatch"):
        rows = checkpoint_name(dispatch(x, plan), "moe/dispatch")  # [E, r, d]
    with jax.named_scope("moe/experts"):
        out = experts(rows) if not wire.axes else _ring(rows, experts, wire.axes)
        out = checkpoint_name(out, "moe/combine")
    with jax.named_scope("moe/combine"):
        return combine(out, plan), plan.kept.sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ring(rows, experts, axes):
    """[E, r, d] -> [E, r, d]: at turn i this shard works with the experts of the shard i places before it."""
    blocks = _turns(rows, axes)

    def turn(held, block):
        following = _pass_on(held, axes)
        return following, held(block)

    return _home(lax.scan(turn, experts, blocks)[1], axes, rows.shape)


def _ring_fwd(rows, experts, axes):
    return _ring(rows, experts, axes), (rows, experts)


def _ring_bwd(axes, residuals, cotangent):
    """A second round: each shard's gradient travels with its weights and is home, summed, when they are."""
    rows, experts = residuals

    def turn(carry, blocks):
        held, gradient = carry
        block, d_out = blocks
        d_held, d_block = jax.vjp(lambda weights, x: weights(x), held, block)[1](d_out)
        gradient = jax.tree.map(jnp.add, gradient, d_held)
        return _pass_on((held, gradient), axes), d_block

    start = (experts, jax.tree.map(jnp.zeros_like, experts))
    (_, gradient), d_rows = lax.scan(turn, start, (_turns(rows, axes), _turns(cotangent, axes)))
    return _home(d_rows, axes, rows.shape), gradient


_ring.defvjp(_ring_fwd, _ring_bwd)


def _pass_on(tree, axes):
    size = axis_size(axes)
    ring = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axes, ring), tree)


def _turns(rows, axes):
    """[E, r, d] -> [s, e, r, d], in the order in which the shards' experts pass by; its own inverse."""
    size = axis_size(axes)
    order = (axis_index(axes) - jnp.arange(size)) % size
    return rows.reshape(size, -1, *rows.shape[1:])[order]


def _home(blocks, axes, shape):
    return _turns(blocks.reshape(shape), axes).reshape(shape)
