"""The padded all-to-all (GShard): every cell travels whole, one collective each way.

E: experts in the layer, e: experts on this shard, s: shards along the expert axes, r: rows per expert and shard.
"""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.codec import carry
from moejax.dispatch import combine, dispatch
from moejax.exchange.wire import Wire


def all_to_all(x, plan, experts, wire: Wire):
    """x [t, d] -> y [t, d]. Rows land expert-major: nothing is sorted or scattered after the exchange."""
    with jax.named_scope("moe/dispatch"):
        rows = checkpoint_name(_cross(dispatch(x, plan), 0, 1, wire), "moe/dispatch")  # [E, r, d] -> [e, s*r, d]
    with jax.named_scope("moe/experts"):
        rows = checkpoint_name(experts(rows), "moe/experts")
    with jax.named_scope("moe/combine"):
        return combine(checkpoint_name(_cross(rows, 1, 0, wire), "moe/combine"), plan)


def _cross(rows, split, concat, wire):
    if not wire.axes:
        return rows
    there = functools.partial(lax.all_to_all, axis_name=wire.axes, split_axis=split, concat_axis=concat, tiled=True)
    back = functools.partial(lax.all_to_all, axis_name=wire.axes, split_axis=concat, concat_axis=split, tiled=True)
    return carry(rows, there, back, wire.codecs)
