"""The all-to-all in two hops: over a fast axis and a slow one.

Over two expert axes (DeepSpeed-MoE) the fast one comes first: each device then sends 1/F of the messages over the slow axis
that a flat all-to-all sends, F times as long. Over one expert axis and axes whose shards hold the same tokens (MoNTA,
2411.00662) each of those sends its share of the rows, and what landed is gathered over them: where a flat all-to-all sends
everything F times over the slow axis, it then crosses once. Their outputs, partial sums, go the same way back, summed and
divided before they cross.

S, F: devices along the slow and the fast axes, E experts, e of them on this shard, r: rows per expert and shard.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from moejax.axes import axis_index, axis_size
from moejax.exchange.all_to_all import flat_route
from moejax.exchange.cells import Route, through_cells
from moejax.exchange.wire import Wire
from moejax.plan import DispatchPlan


def hierarchical(x, plan, experts, wire: Wire):
    """x [t, d] -> (y [t, d], rows worked on here): with `wire.shared`, this shard's part of y, to be summed over those axes."""
    if not wire.axes:
        return through_cells(x, plan, experts, wire, Route())
    if wire.shared:
        return through_cells(x, share(plan, wire.shared), experts, wire, _shared_route(wire))
    return through_cells(x, plan, experts, wire, _two_hops(*wire.axes))


def share(plan: DispatchPlan, axes: tuple[str, ...]) -> DispatchPlan:
    """The plan with this shard's share of each cell's rows, r / F rounded up; the other pairs have no row in it."""
    size, num_experts = axis_size(axes), plan.num_experts
    source = plan.source.reshape(num_experts, -1)
    r = source.shape[1]
    width = -(-r // size)
    first = axis_index(axes) * width
    source = jnp.pad(source, ((0, 0), (0, size * width - r)), constant_values=plan.slot.size)
    expert, place = plan.slot // r, plan.slot % r - first
    here = (plan.slot < num_experts * r) & (place >= 0) & (place < width)
    return dataclasses.replace(
        plan,
        slot=jnp.where(here, expert * width + place, num_experts * width),
        weight=jnp.where(here, plan.weight, 0),
        source=lax.dynamic_slice_in_dim(source, first, width, 1).reshape(-1),
    )


def _shared_route(wire: Wire) -> Route:
    gather = lambda rows, axis: _gather(rows, axis % rows.ndim, wire.shared)
    scatter = lambda rows, axis: _scatter(rows, axis % rows.ndim, wire.shared)
    return dataclasses.replace(flat_route(wire.axes), gather=gather, scatter=scatter)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(rows, axis, names):
    return lax.all_gather(rows, names, axis=axis, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scatter(rows, axis, names):
    """Its own blocks of all shards, added up here: XLA makes reduce-scatters all-reduces (v5e), of several parts together."""
    size = axis_size(names)
    blocks = rows.reshape(*rows.shape[:axis], size, -1, *rows.shape[axis + 1 :])
    blocks = lax.all_to_all(blocks, names, axis, axis, tiled=True)
    return blocks.astype(jnp.promote_types(rows.dtype, jnp.float32)).sum(axis).astype(rows.dtype)


# Each is the other's transpose.
_gather.defvjp(lambda *args: (_gather(*args), None), lambda axis, names, _, cotangent: (_scatter(cotangent, axis, names),))
_scatter.defvjp(lambda *args: (_scatter(*args), None), lambda axis, names, _, cotangent: (_gather(cotangent, axis, names),))


def _two_hops(slow: str, fast: str) -> Route:
    """Rows land as a flat all-to-all lands them."""
    sizes = lax.axis_size(slow), lax.axis_size(fast)

    def there(rows):  # [E, r, d] -> [S, F, e, r, d] -> [S, 1, e, F*r, d] -> [1, 1, e, S*F*r, d]
        rows = rows.reshape(*sizes, -1, *rows.shape[1:])
        rows = lax.all_to_all(rows, fast, 1, 3, tiled=True)
        rows = lax.all_to_all(rows, slow, 0, 3, tiled=True)
        return rows.reshape(rows.shape[2:])

    def back(rows):
        rows = rows.reshape(1, 1, *rows.shape)
        rows = lax.all_to_all(rows, slow, 3, 0, tiled=True)
        rows = lax.all_to_all(rows, fast, 3, 1, tiled=True)
        return rows.reshape(-1, *rows.shape[3:])

    def swap(rows):  # [S*F, n, d] -> [S, F, n, d] and back
        blocks = rows.reshape(*sizes, *rows.shape[1:])
        blocks = lax.all_to_all(blocks, fast, 1, 1, tiled=True)
        return lax.all_to_all(blocks, slow, 0, 0, tiled=True).reshape(rows.shape)

    return Route(there, back, swap)
