"""The pooled all-to-all: each token travels once per destination device, and its part of the sum comes back as one row.

Its experts' numbers and weights ride along in two small all-to-alls; the destination groups the pairs by expert, works on
true rows only, and adds up each token's outputs before they return.

t: tokens of one sender, k: experts per token, d: model width, n: destinations, e: experts on this shard, M: rows of a pool,
L: pairs of a pool, R: rows that a destination works on. M_p, L_p: those of one part.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.codec import carry
from moejax.exchange.wire import Wire
from moejax.permute import gather_sum, spread
from moejax.pool_cut import PoolCut, make_row_plans, order_plan


def pooled(x, plan, experts, wire: Wire):
    """x [m*t, d] of m senders -> (y [m*t, d], rows worked on here). `plan` is a PoolPlan with a leading axis of senders.

    Over expert axes m is 1. Without them every n senders exchange among themselves, in one part: nothing crosses there.
    """
    if wire.axes:
        mine = jax.tree.map(lambda leaf: leaf[0], plan)
        return _through_pools(x, mine, experts, wire, _Places(wire.axes), experts.num_experts)
    m, n = plan.local_expert.shape[:2]
    split = lambda leaf: leaf.reshape(m // n, n, *leaf.shape[1:])
    # Where experts are lent (`moejax.lending`) every group has seats of its own.
    lent = experts.num_experts > plan.kept.shape[-1]
    outer = (m // n, n) if lent else (n,)
    shares = experts.map(lambda _, weights: weights.reshape(*outer, -1, *weights.shape[1:]))
    tokens, own = split(x.reshape(m, -1, x.shape[1])), experts.num_experts // math.prod(outer)
    plans, places = jax.tree.map(split, plan), _Places((), lent)
    y, num_rows = _through_pools(tokens, plans, shares, Wire((), wire.codecs), places, own)
    return y.reshape(x.shape), num_rows


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where senders and destinations are: on a shard each, or all here, in arrays with leading axes [groups, n].

    A vmap with a named axis would do for the latter, were that name not unknown to a shard_map around it.

    Attributes:
      axes: the expert axes; none where all are here.
      by_group: whether each group's destinations have experts of their own, or all groups' the same ones.
    """

    axes: tuple[str, ...]
    by_group: bool = False

    def each(self, run, *parts):
        """What `run` makes of every place's part."""
        return run(*parts) if self.axes else jax.vmap(jax.vmap(run))(*parts)

    def each_with_own(self, run, own, *parts):
        """The same of (own, *parts), `own` what a destination has."""
        outer = 0 if self.by_group else None
        return run(own, *parts) if self.axes else jax.vmap(jax.vmap(run), (outer, *[0] * len(parts)))(own, *parts)

    def swap(self, blocks):
        """[n, ...] of every place: block i to place i of its group."""
        if self.axes:
            return lax.all_to_all(blocks, self.axes, split_axis=0, concat_axis=0, tiled=True)
        return blocks.swapaxes(1, 2)


def _through_pools(x, plan, experts, wire: Wire, places: _Places, num_experts: int):
    """A sender's tokens [t, d] in `wire.num_chunks` parts: part i + 1 crosses without waiting for the experts of part i."""
    n, d = plan.local_expert.shape[-2], x.shape[-1]
    cut = PoolCut(plan.caps, min(wire.num_chunks, plan.caps[0]))
    row_plans = functools.partial(make_row_plans, cut=cut, num_experts=num_experts, max_rows=plan.max_rows)
    plan = places.each(functools.partial(order_plan, cut=cut), plan)
    cross = lambda part: carry(part, places.swap, places.swap, wire.codecs)
    with jax.named_scope("moe/dispatch"):
        pair_weight = places.each(_pair_weight, plan)
        # [n, L], of all parts: the destination's bound is one.
        arrived = checkpoint_name((places.swap(plan.local_expert), places.swap(pair_weight)), "moe/dispatch")
        rows = places.each(row_plans, arrived[0])
        sent = places.each(lambda x, plan: cut.split_rows(spread(x, *_sent_rows(plan), True), n), x, plan)
        received = [checkpoint_name(cross(part), "moe/dispatch") for part in sent]  # [n, M_p, d]
        weights = places.each(cut.split_pairs, arrived[1])
    landed = zip(received, weights, rows, strict=True)
    partial = [places.each_with_own(_through_experts, experts, *part) for part in landed]
    with jax.named_scope("moe/combine"):
        back = [checkpoint_name(cross(part), "moe/combine") for part in partial]
        joined = lambda parts: jnp.concatenate([part.reshape(-1, d) for part in parts])
        y = places.each(lambda back, plan: gather_sum(joined(back), *_sent_rows(plan), True), back, plan)
    return y, jnp.stack([part.group_sizes.sum() for part in rows]).sum()


def _pair_weight(plan):
    """[n, L] the weight of each pair that is sent."""
    weight = spread(plan.weight.reshape(-1), plan.pair, (plan.cell.reshape(-1),))
    return weight.reshape(plan.local_expert.shape)


def _sent_rows(plan):
    """Which token each row of the send buffer holds; and the row of each token's choices."""
    return plan.token, tuple(plan.slot[:, j] for j in range(plan.slot.shape[1]))


def _through_experts(experts, received, pair_weight, rows):
    """Received rows [n, M_p, d] and pairs' weights [n, L_p] -> each row's weighted sum over its experts here."""
    with jax.named_scope("moe/dispatch"):
        inside = spread(received, rows.source, rows.rows, True)  # [R, d]
        row_weight = spread(pair_weight, rows.cell, (jnp.concatenate(rows.rows, 1),))
    with jax.named_scope("moe/experts"):
        out = checkpoint_name(experts.flat(inside, rows.group_sizes, row_weight), "moe/experts")
    with jax.named_scope("moe/combine"):
        return gather_sum(out, rows.source, rows.rows, True)
