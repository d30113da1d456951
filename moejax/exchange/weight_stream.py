"""Weight streaming (FSE-DP): tokens stay where they are and the expert shards go round the ring.

No all-to-all and no padding on the wire; it moves (s - 1) shards of weights a pass, whatever the number of tokens.
s: shards along the expert axes, e: experts of a shard, r: rows per expert of this shard's tokens, d: model width,
t: tokens of this shard, R: their rows where there is no padding.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from moejax.axes import axis_index, axis_size, sum_over, vary_over, varying
from moejax.dispatch import combine, dispatch
from moejax.exchange.flat import flat, home, outgoing
from moejax.exchange.wire import Wire


def weight_stream(x, plan, experts, wire: Wire):
    """x [t, d] -> (y [t, d], rows worked on here), dropping what the plan drops."""
    with jax.named_scope("moe/dispatch"):
        rows = checkpoint_name(dispatch(x, plan), "moe/dispatch")  # [E, r, d]
    with jax.named_scope("moe/experts"):
        out = experts(rows) if not wire.axes else _ring(rows, experts, wire.axes)
        out = checkpoint_name(out, "moe/combine")
    with jax.named_scope("moe/combine"):
        return combine(out, plan), plan.group_sizes.sum()


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
    return rows.reshape(axis_size(axes), -1, *rows.shape[1:])[_order(axes)]


def _home(blocks, axes, shape):
    return _turns(blocks.reshape(shape), axes).reshape(shape)


# Rows of one pass, over an even share of them: so that one pass does where the load is about even.
EVEN_SHARES = 1.25


def stream_flat(x, plan, experts, wire: Wire):
    """As `weight_stream`, for a FlatPlan: the work is that of the rows there are, whatever the skew."""
    if not wire.axes:
        return flat(x, plan, experts, wire)
    with jax.named_scope("moe/dispatch"):
        rows, weight = outgoing(x, plan)
        rows = checkpoint_name(rows, "moe/dispatch")
    with jax.named_scope("moe/experts"):
        out = checkpoint_name(_flat_ring(rows, weight, plan.group_sizes, experts, wire.axes), "moe/combine")
    with jax.named_scope("moe/combine"):
        return home(out, plan), plan.group_sizes.sum()


def overflow(x, plan, experts, wire: Wire) -> tuple[Array, Array]:
    """As `stream_flat`, and free where no shard has a row in the plan: no weights are sent then.

    All shards of the mesh must take one branch, for collectives stand in one of them. The backward does the forward again,
    as that of a ring does anyway, so nothing is kept for it that both branches would have to return.
    """
    weight = vary_over(plan.weight, sorted(varying(x)))
    return _overflow(x, weight, experts, dataclasses.replace(plan, weight=None), wire), plan.group_sizes.sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _overflow(x, weight, experts, plan, wire):
    return lax.cond(_any_rows(plan, wire), lambda: _streamed(plan, wire)(x, weight, experts), lambda: jnp.zeros_like(x))


def _overflow_bwd(wire, residuals, cotangent):
    plan, *primals = residuals
    pull = lambda: jax.vjp(_streamed(plan, wire), *primals)[1](cotangent)
    return *lax.cond(_any_rows(plan, wire), pull, lambda: jax.tree.map(jnp.zeros_like, tuple(primals))), None


_overflow.defvjp(
    lambda x, weight, experts, plan, wire: (_overflow(x, weight, experts, plan, wire), (plan, x, weight, experts)),
    _overflow_bwd,
)


def _any_rows(plan, wire):
    return sum_over(plan.group_sizes.sum(), wire.tokens) > 0


def _streamed(plan, wire):
    return lambda x, weight, experts: stream_flat(x, dataclasses.replace(plan, weight=weight), experts, wire)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _flat_ring(rows, weight, sizes, experts, axes):
    """rows [R, d] grouped by expert, weight [R], sizes [E] -> [R, d]: each row through its expert, times its weight."""
    num_rows, height = rows.shape[0], _height(rows, axes)
    rows, weight = _pad(rows, height), _pad(weight, height)

    def turn(carry, block):
        held, out = carry

        def work(at, group_sizes, out):
            return _add(out, held.flat(_cut(rows, at, height), group_sizes, _cut(weight, at, height)), at)

        return (_pass_on(held, axes), _passes(block, sizes, held.num_experts, height, work, out)), None

    (_, out), _ = lax.scan(turn, (experts, jnp.zeros_like(rows)), _order(axes))
    return out[:num_rows]


def _flat_ring_fwd(rows, weight, sizes, experts, axes):
    return _flat_ring(rows, weight, sizes, experts, axes), (rows, weight, sizes, experts)


def _flat_ring_bwd(axes, residuals, cotangent):
    """A second round, as `_ring_bwd`."""
    rows, weight, sizes, experts = residuals
    num_rows, height = rows.shape[0], _height(rows, axes)
    rows, weight, cotangent = (_pad(part, height) for part in (rows, weight, cotangent))

    def turn(carry, block):
        held, *gradients = carry

        def work(at, group_sizes, gradients):
            run = lambda held, rows, weight: held.flat(rows, group_sizes, weight)
            _, pull = jax.vjp(run, held, _cut(rows, at, height), _cut(weight, at, height))
            d_held, *d_parts = pull(_cut(cotangent, at, height))
            added = (_add(total, part, at) for total, part in zip(gradients[1:], d_parts, strict=True))
            return jax.tree.map(jnp.add, gradients[0], d_held), *added

        gradients = _passes(block, sizes, held.num_experts, height, work, tuple(gradients))
        return (*_pass_on((held, gradients[0]), axes), *gradients[1:]), None

    start = jax.tree.map(jnp.zeros_like, (experts, rows, weight))
    (_, d_experts, d_rows, d_weight), _ = lax.scan(turn, (experts, *start), _order(axes))
    return d_rows[:num_rows], d_weight[:num_rows], None, d_experts


_flat_ring.defvjp(_flat_ring_fwd, _flat_ring_bwd)


def _height(rows, axes):
    return min(rows.shape[0], math.ceil(EVEN_SHARES * rows.shape[0] / axis_size(axes)))


def _order(axes):
    """[s] whose experts pass by, turn after turn."""
    size = axis_size(axes)
    return (axis_index(axes) - jnp.arange(size)) % size


def _passes(block, sizes, num_experts, height, work, carry):
    """work(first row, group sizes, carry) over the rows of the block's experts, `height` of them in each pass."""
    end = jnp.cumsum(sizes)
    low, high = (lax.dynamic_slice_in_dim(part, block * num_experts, num_experts) for part in (end - sizes, end))

    def one(i, carry):
        at = low[0] + i * height
        inside = lambda row: jnp.clip(row, at, at + height)
        return work(at, inside(high) - inside(low), carry)

    return lax.fori_loop(0, -(-(high[-1] - low[0]) // height), one, carry)


def _pad(rows, height):
    """Room for a pass that begins with the last row."""
    return jnp.pad(rows, [(0, height)] + [(0, 0)] * (rows.ndim - 1))


def _cut(rows, at, height):
    return lax.dynamic_slice_in_dim(rows, at, height)


def _add(total, part, at):
    """Added, not set: what a pass has past its last row are zeros, and other blocks' rows stand there."""
    return lax.dynamic_update_slice_in_dim(total, _cut(total, at, part.shape[0]) + part, at, 0)
