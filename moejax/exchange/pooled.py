"""The pooled all-to-all: each token travels once per destination device, and its part of the sum comes back as one row.

Its experts' numbers and weights ride along in two small all-to-alls; the destination groups the pairs by expert, works on
true rows only, and adds up each token's outputs before they return.

t: tokens of one sender, k: experts per token, d: model width, n: destinations, e: experts on this shard, M: rows of a pool,
L: pairs of a pool, R: rows that a destination works on. M_p, L_p: those of one part.
"""

import functools

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

    Over expert axes m is 1. On one device the same code runs under vmap, every n senders exchanging among themselves, in
    one part: nothing crosses there.
    """
    if wire.axes:
        return _one(x, jax.tree.map(lambda leaf: leaf[0], plan), experts, wire)
    m, n = plan.local_expert.shape[:2]
    split = lambda leaf: leaf.reshape(m // n, n, -1, *leaf.shape[1:])
    # Where experts are lent (`moejax.lending`) every group has seats of its own.
    lent = experts.num_experts > plan.kept.shape[-1]
    outer = (m // n, n) if lent else (n,)
    shares = experts.map(lambda _, weights: weights.reshape(*outer, -1, *weights.shape[1:]))
    tokens = x.reshape(m // n, n, -1, x.shape[1])
    plans = jax.tree.map(lambda leaf: split(leaf)[:, :, 0], plan)
    one = functools.partial(_one, wire=Wire(("pool",), wire.codecs))
    y, num_rows = jax.vmap(jax.vmap(one, axis_name="pool"), in_axes=(0, 0, 0 if lent else None))(tokens, plans, shares)
    return y.reshape(x.shape), num_rows.sum()


def _one(x, plan, experts, wire: Wire):
    """One sender's tokens in `wire.num_chunks` parts: part i + 1 crosses without waiting for the experts of part i."""
    n, d = plan.local_expert.shape[0], x.shape[1]
    cut = PoolCut(plan.caps, min(wire.num_chunks, plan.caps[0]))
    plan = order_plan(plan, cut)
    swap = functools.partial(lax.all_to_all, axis_name=wire.axes, split_axis=0, concat_axis=0, tiled=True)
    sender = (plan.token, tuple(plan.slot[:, j] for j in range(plan.slot.shape[1])))
    with jax.named_scope("moe/dispatch"):
        pair_weight = spread(plan.weight.reshape(-1), plan.pair, (plan.cell.reshape(-1),)).reshape(n, -1)
        # [n, L], of all parts: the destination's bound is one.
        arrived = checkpoint_name((swap(plan.local_expert), swap(pair_weight)), "moe/dispatch")
        rows = make_row_plans(arrived[0], cut, num_experts=experts.num_experts, max_rows=plan.max_rows)
        sent = cut.split_rows(spread(x, *sender), n)
        received = [checkpoint_name(carry(part, swap, swap, wire.codecs), "moe/dispatch") for part in sent]  # [n, M_p, d]
        weights = cut.split_pairs(arrived[1])
    partial = [_through_experts(*part, experts) for part in zip(received, weights, rows, strict=True)]
    with jax.named_scope("moe/combine"):
        back = [checkpoint_name(carry(part, swap, swap, wire.codecs), "moe/combine").reshape(-1, d) for part in partial]
        y = gather_sum(jnp.concatenate(back), *sender)
    return y, jnp.stack([part.group_sizes.sum() for part in rows]).sum()


def _through_experts(received, pair_weight, rows, experts):
    """Received rows [n, M_p, d] and pairs' weights [n, L_p] -> each row's weighted sum over its experts here."""
    with jax.named_scope("moe/dispatch"):
        inside = spread(received, rows.source, rows.rows)  # [R, d]
        row_weight = spread(pair_weight, rows.cell, (jnp.concatenate(rows.rows, 1),))
    with jax.named_scope("moe/experts"):
        out = checkpoint_name(experts.flat(inside, rows.group_sizes, row_weight), "moe/experts")
    with jax.named_scope("moe/combine"):
        return gather_sum(out, rows.source, rows.rows)
