"""All-gather: every expert shard sees all tokens, works on its own experts' rows, and partial sums are scattered back.

It moves each token s times whatever k is, so it pays when k is about the number of shards s, or few tokens are routed.
t: tokens on this shard, k: experts per token, E: experts in the layer, e: experts on this shard, s: shards along the expert
axes, R: rows of one shard's tokens, M: rows that this shard's experts take.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.axes import axis_index, axis_size, vary_over
from moejax.codec import carry
from moejax.dispatch import combine, dispatch
from moejax.exchange.flat import flat, home, outgoing
from moejax.exchange.wire import Wire, own_counts
from moejax.flat_plan import expand


def all_gather(x, plan, experts, wire: Wire):
    """x [t, d] -> (y [t, d], rows worked on here), dropping what the plan drops."""
    with jax.named_scope("moe/dispatch"):
        local = _local_plan(plan, wire.axes)
        rows = checkpoint_name(dispatch(_gather(x, wire), local), "moe/dispatch")  # [e, s*r, d]
    with jax.named_scope("moe/experts"):
        rows = checkpoint_name(experts(rows), "moe/experts")
    with jax.named_scope("moe/combine"):
        return _scatter_sum(combine(rows, local), wire), local.group_sizes.sum()


def gather_flat(x, plan, experts, wire: Wire):
    """As `all_gather`, for a FlatPlan: the experts work on the rows there are, whatever the skew."""
    if not wire.axes:
        return flat(x, plan, experts, wire)
    with jax.named_scope("moe/dispatch"):
        local = _local_flat_plan(plan, wire.axes)
        rows, weight = outgoing(_gather(x, wire), local)
        rows = checkpoint_name(rows, "moe/dispatch")  # [M, d]
    with jax.named_scope("moe/experts"):
        out = checkpoint_name(experts.flat(rows, local.group_sizes, weight), "moe/experts")
    with jax.named_scope("moe/combine"):
        return _scatter_sum(home(out, local), wire), local.group_sizes.sum()


def _local_flat_plan(plan, axes):
    """The plan of all shards' tokens over this shard's experts. Its rows are ordered by expert, then shard."""
    shards, (t, k), me = axis_size(axes), plan.slot.shape, axis_index(axes)
    gathered = lambda part: checkpoint_name(lax.all_gather(part, axes), "moe/dispatch")
    slot, source, weight = gathered(plan.slot), gathered(plan.source), gathered(plan.weight)  # [s, t, k], [s, R]
    table = gathered(plan.group_sizes)  # [s, E]
    mine = lambda part: lax.dynamic_slice_in_dim(part, me * (table.shape[1] // shards), table.shape[1] // shards, 1)
    end, sizes = mine(jnp.cumsum(table, 1)), mine(table)  # [s, e] in each shard's own rows
    landed = jnp.cumsum(sizes.T.reshape(-1)).reshape(sizes.T.shape).T  # the same here
    shift = landed - end  # [s, e] from a shard's row to the row here
    segment, place = expand(sizes.T.reshape(-1), plan.bounds.received)
    expert, shard = jnp.divmod(segment, shards)
    pair = source[shard, (end - sizes)[shard, expert] + place]
    live = (jnp.arange(plan.bounds.received) < landed[-1, -1]) & (pair < t * k)
    passed = (slot[..., None] >= end[:, None, None]).sum(-1)  # [s, t, k] this shard's experts that come before
    here = (slot >= (end - sizes)[:, None, None, 0]) & (passed < sizes.shape[1])
    shard = jnp.arange(shards)[:, None, None]
    moved = slot + shift[shard, jnp.minimum(passed, sizes.shape[1] - 1)]
    return dataclasses.replace(
        plan,
        slot=jnp.where(here, moved, plan.bounds.received).reshape(-1, k),
        weight=jnp.where(here, weight, 0).reshape(-1, k),
        source=jnp.where(live, (segment % shards) * t * k + pair, shards * t * k),
        group_sizes=sizes.sum(0),
        bounds=dataclasses.replace(plan.bounds, rows=plan.bounds.received),
    )


def _local_plan(plan, axes):
    """The plan of all shards' tokens over this shard's experts; pairs of other experts count as dropped here."""
    if not axes:
        return plan
    shards, (t, k) = axis_size(axes), plan.slot.shape
    experts = plan.num_experts // shards
    first = axis_index(axes) * experts
    gathered = lambda part: checkpoint_name(lax.all_gather(part, axes), "moe/dispatch")
    slot, source = gathered(plan.slot), gathered(plan.source.reshape(plan.num_experts, -1))  # [s, t, k], [s, E, r]
    r = source.shape[-1]
    shard = jnp.arange(shards, dtype=jnp.int32)[:, None, None]
    expert = slot // r - first
    here = (expert >= 0) & (expert < experts) & (slot < plan.num_experts * r)
    moved = jnp.where(here, (expert * shards + shard) * r + slot % r, experts * shards * r)
    mine = lax.dynamic_slice_in_dim(source, first, experts, 1)
    pair = jnp.where(mine < t * k, shard * t * k + mine, shards * t * k)
    return dataclasses.replace(
        plan,
        slot=moved.reshape(-1, k),
        weight=jnp.where(here, gathered(plan.weight), 0).reshape(-1, k),
        source=pair.swapaxes(0, 1).reshape(-1),
        routed=own_counts(plan.routed, axes),
        kept=own_counts(plan.kept, axes),
        group_sizes=own_counts(plan.group_sizes, axes),
    )


def _gather(x, wire):
    """[t, d] -> [s*t, d]; its transpose sends each shard its own tokens' cotangents and adds them up."""
    if not wire.axes:
        return x
    if wire.codecs == ("plain", "plain"):
        return lax.all_gather(x, wire.axes, tiled=True)
    copies = jnp.broadcast_to(x, (axis_size(wire.axes), *x.shape))
    return _exchange_blocks(copies, wire).reshape(-1, x.shape[1])


def _scatter_sum(partial, wire):
    """[s*t, d] -> [t, d], summed over shards. Under a codec the parts travel encoded and are added after decoding."""
    if not wire.axes:
        return partial
    if wire.codecs == ("plain", "plain"):
        return lax.psum_scatter(partial, wire.axes, tiled=True)
    blocks = _exchange_blocks(partial.reshape(axis_size(wire.axes), -1, partial.shape[1]), wire)
    return blocks.astype(jnp.float32).sum(0).astype(partial.dtype)


def _exchange_blocks(blocks, wire):
    """[s, t, d]: block i to shard i. Its own transpose, and the bytes of a ring all-gather or reduce-scatter."""
    swap = functools.partial(lax.all_to_all, axis_name=wire.axes, split_axis=0, concat_axis=0, tiled=True)
    return carry(vary_over(blocks, wire.axes), swap, swap, wire.codecs)
